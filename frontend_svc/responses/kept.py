"""Responses that the next event of their connection may continue, stored or not (pure).

A connection keeps the newest response of each of its lanes, as OpenAI's does. All connections of a
frontend share one store, so their memory is bounded, and divided between tenants, as that of stored
responses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from frontend_svc.responses.store import ResponseStore, StoredResponse


class KeptResponses:
    """Those of one connection."""

    def __init__(self, store: ResponseStore, clock: Callable[[], float]) -> None:
        """
        - store: of all connections.
        - clock: of the store, in seconds.
        """
        self._store = store
        self._clock = clock
        # Id of the newest response by lane.
        self._newest: dict[str | None, str] = {}
        self._is_open = True

    def get(self, response_id: str) -> StoredResponse | None:
        """Returns a response of this connection; None if it is not kept, or not any more."""
        if response_id not in self._newest.values():
            return None
        return self._store.get(response_id, self._clock())

    def put(self, lane: str | None, response_id: str, response: StoredResponse) -> None:
        """Keeps a response in place of the one before it in its lane."""
        if not self._is_open:
            return
        now_s = self._clock()
        if (before := self._newest.get(lane)) is not None:
            self._store.delete(before, now_s)
        self._newest[lane] = response_id
        self._store.put(response_id, response, now_s)

    def close(self) -> None:
        """Removes all: the connection has ended."""
        self._is_open = False
        for response_id in self._newest.values():
            self._store.delete(response_id, self._clock())
        self._newest.clear()


@dataclass(frozen=True, slots=True)
class Turn:
    """What the connection of a response adds to its body."""

    kept: KeptResponses
    lane: str | None

    generates: bool
    """Whether the response has output."""

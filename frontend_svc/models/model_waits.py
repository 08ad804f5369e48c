"""Requests that wait for a configured model of which this frontend has no card.

Requests for a model that was served lately are tokenized and wait in the gateway, see
`request/worker_waits.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from common.errors import MeshError, RequestCancelled

# Calls its argument if the client disconnects before the end of the block.
Watched = Callable[[Callable[[], None]], AbstractContextManager[None]]


class ModelWaits:
    """The waiting requests of a frontend, by model."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Future[None], str] = {}

    def __len__(self) -> int:
        return len(self._open)

    def counts(self) -> Counter[str]:
        """Returns the number of waiting requests of each model that has any."""
        return Counter(list(self._open.values()))

    def wake(self) -> None:
        """Ends all waits: the models that are served have changed."""
        for wait in self._open:
            _end(wait)

    def abort_all(self, error: MeshError) -> None:
        """Ends all waits with an error."""
        for wait in self._open:
            _end(wait, error)

    async def next_change(self, model: str, until: float, watched: Watched) -> None:
        """Returns after a change of the models that are served, at the latest at `until` (loop
        time, seconds). Raises RequestCancelled if the client disconnects, and the error of
        `abort_all`.

        - watched: of the client's connection, see `ClientConnection`.
        """
        loop = asyncio.get_running_loop()
        wait: asyncio.Future[None] = loop.create_future()
        timer = loop.call_at(until, _end, wait)
        self._open[wait] = model
        gone = RequestCancelled("the client disconnected")
        try:
            with watched(partial(_end, wait, gone)):
                await wait
        finally:
            timer.cancel()
            del self._open[wait]


def _end(wait: asyncio.Future[None], error: MeshError | None = None) -> None:
    if wait.done():
        return
    if error is None:
        wait.set_result(None)
    else:
        wait.set_exception(error)

"""Interfaces between a request, the router, the workers and the consumer of its response."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from common.errors import MeshError
from common.request.preprocessed import TokenLogprob
from common.request.token_stream import LegRequest, LegSink
from frontend_svc.core.peers.placement_query import PlacementKey, Query
from frontend_svc.core.request.types import RequestOutcome, RoutingDecision


class RouterPort(Protocol):
    """Source of placements: a RouterClient, or the simulation's."""

    def place(
        self, key: PlacementKey, query: Query, reply: Callable[[RoutingDecision | MeshError], None]
    ) -> None:
        """See RouterClient."""

    def prefill_done(self, key: PlacementKey) -> None:
        """See RouterClient."""

    def output(self, key: PlacementKey, blocks: int, decay_fraction: float | None) -> None:
        """See RouterClient."""

    def free(self, key: PlacementKey) -> None:
        """See RouterClient."""


class AbortHandle(Protocol):
    """A submitted leg."""

    def abort(self, reason: str) -> None:
        """See Submission."""


class WorkerPort(Protocol):
    """Destination of legs: an EngineClient, or the simulation's."""

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> AbortHandle:
        """See EngineClient."""

    @property
    def open_slots(self) -> dict[int, int]:
        """See EngineClient."""

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        """See EngineClient."""


class ResponseSink(Protocol):
    """Receives a response. Calls come from the event loop, never from within `Gateway.open`."""

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Receives the next tokens."""

    def finished(self, outcome: RequestOutcome) -> None:
        """Receives the end."""


@runtime_checkable
class ChunkSink(ResponseSink, Protocol):
    """Receives the response to a pass-through body."""

    def chunk(self, json: bytes) -> None:
        """Receives the next chunk."""

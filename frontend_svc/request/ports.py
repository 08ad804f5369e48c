"""Interfaces between a request, the router, the workers and the consumer of its response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from common.request.preprocessed import TokenLogprob
from common.request.token_stream import LegRequest, LegSink
from frontend_svc.request.placement_request import PlacementCallback, PlacementKey, PlacementRequest
from frontend_svc.request.types import RequestOutcome


class RouterPort(Protocol):
    """Source of placements: a RouterClient, or the simulation's."""

    def place(
        self, key: PlacementKey, request: PlacementRequest, reply: PlacementCallback
    ) -> None: ...
    def prefill_done(self, key: PlacementKey) -> None: ...
    def output(self, key: PlacementKey, blocks: int, decay_fraction: float | None) -> None: ...
    def free(self, key: PlacementKey) -> None: ...


class AbortHandle(Protocol):
    """A submitted leg."""

    def abort(self, reason: str) -> None: ...


class WorkerPort(Protocol):
    """Destination of legs: an EngineClient, or the simulation's."""

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> AbortHandle: ...
    @property
    def open_slots(self) -> dict[int, int]: ...
    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]: ...


class ResponseSink(Protocol):
    """Receives a response. Calls come from the event loop, never from within `Gateway.open`."""

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None: ...
    def finished(self, outcome: RequestOutcome) -> None: ...


@runtime_checkable
class ChunkSink(ResponseSink, Protocol):
    """Receives the response to a pass-through body, or log probabilities of the prompt."""

    def chunk(self, json: bytes) -> None: ...

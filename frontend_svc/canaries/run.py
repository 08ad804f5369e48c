"""Sends one canary, and finds where it failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.errors import DeadlineExceeded, MeshError
from common.request.embedding import load_vector
from common.request.preprocessed import TokenLogprob
from common.request.score import load_score
from common.request.token_stream import LegRequest, LegSink
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.leg import Leg
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.ports import AbortHandle, WorkerPort
from frontend_svc.request.types import Pooling, RequestOutcome, RequestPlan

# Raise MeshError for a chunk without the result.
_LOAD_RESULT: Mapping[Pooling, Callable[[bytes], object]] = {
    "embedding": load_vector,
    "score": load_score,
}


class Stage(StrEnum):
    """What a canary did not get. Values of the metric label `stage`."""

    PREPARE = "prepare"
    """Its prompt as token ids."""
    ROUTE = "route"
    """A placement, from a router or else from this frontend."""
    WORKER = "worker"
    """The acceptance of its workers."""
    TOKEN = "token"
    """A response."""


@dataclass(frozen=True, slots=True)
class CanaryFailure:
    """Why a canary failed."""

    stage: Stage
    reason: str


# Returns a gateway of its own for each canary, so that its waits, retries and permits count for
# no client.
OpenGateway = Callable[[WorkerPort], Gateway]


async def run_canary(
    open_gateway: OpenGateway,
    workers: WorkerPort,
    plan: RequestPlan,
    placement: PlacementRequest,
    timeout_s: float,
) -> CanaryFailure | None:
    """Returns why a canary failed, None if it was served.

    - timeout_s: until the deadline of the plan.
    """
    observed, response = _ObservedWorkers(workers), _Response()
    handle = open_gateway(observed).open(plan, placement, response)
    try:
        outcome = await response.outcome
    finally:
        handle.abort()
    error = outcome.error or response.problem(plan)
    if error is None:
        return None
    late = [leg for leg in observed.last_legs if not leg.is_accepted]
    stage = Stage.WORKER if late else Stage.TOKEN if observed.last_legs else Stage.ROUTE
    if not isinstance(error, DeadlineExceeded):
        return CanaryFailure(stage, error.message)
    names = " and ".join(f"worker {leg.worker_id}" for leg in late or observed.last_legs)
    reasons = {
        Stage.ROUTE: "no worker was available",
        Stage.WORKER: f"{names} did not accept the request",
        Stage.TOKEN: f"{names} accepted the request, and sent no complete response",
    }
    return CanaryFailure(stage, f"{reasons[stage]} within {timeout_s:g} s")


class _ObservedWorkers:
    """The workers of a gateway; keeps the legs of the last attempt."""

    def __init__(self, workers: WorkerPort) -> None:
        self._workers = workers
        self.last_legs: list[Leg] = []

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> AbortHandle:
        assert isinstance(sink, Leg), "requests submit legs"
        attempt = [leg for leg in self.last_legs if leg.attempt == sink.attempt]
        self.last_legs = [*attempt, sink]
        return self._workers.submit(worker_id, address, leg_request, sink)

    @property
    def open_slots(self) -> dict[int, int]:
        return self._workers.open_slots

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        return self._workers.excluded_workers(pool)


class _Response:
    """Receives the response of a canary."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[RequestOutcome] = asyncio.get_running_loop().create_future()
        self._chunk = b""

    def problem(self, plan: RequestPlan) -> MeshError | None:
        """Returns what is wrong with a complete response."""
        if plan.pooling:
            try:
                _LOAD_RESULT[plan.pooling](self._chunk)
            except MeshError as error:
                return error
        return None

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Workers have checked the tokens."""

    def chunk(self, json: bytes) -> None:
        self._chunk = json

    def finished(self, outcome: RequestOutcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

"""All open requests of a frontend process, independent of HTTP.

`Gateway.open` starts a request and reports its progress to a `ResponseSink`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from random import Random

from common.errors import MeshError
from common.streams.stall_clock import never_stalled
from frontend_svc.members import Members
from frontend_svc.request.buffer import Backlog
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.ports import ResponseSink, RouterPort, WorkerPort
from frontend_svc.request.retry_policy import WORKER_WAIT_S, MigrationLimiter, RetryBudget
from frontend_svc.request.types import RequestOutcome, RequestPlan, Success
from frontend_svc.request.worker_pool import WorkerPool
from frontend_svc.request.worker_waits import WorkerWaits


class Gateway:
    """Opens requests and keeps track of them.

    stalled_s: seconds for which this process has stalled so far, see `StallClock`.
    silent_s: seconds since the last frame of a worker.
    request_failed: counts a failed request against a worker; second argument: its peers.
    open_circuits: returns the workers with an open circuit, with the reason.
    rng: also makes span ids.
    worker_wait_s: how long a request waits while its model has no worker.
    successes: by model, the greatest success since it was taken.
    """

    def __init__(
        self,
        router_port: RouterPort,
        workers: WorkerPort,
        members: Members,
        rng: Random | None = None,
        *,
        stalled_s: Callable[[], float] = never_stalled,
        silent_s: Callable[[int], float] = lambda worker_id: math.inf,
        request_failed: Callable[[int, frozenset[int]], None] = lambda worker_id, peers: None,
        open_circuits: Callable[[], Mapping[int, str]] = dict,
        migrations: MigrationLimiter[RequestHandle] | None = None,
        worker_wait_s: float = WORKER_WAIT_S,
    ) -> None:
        self.router = router_port
        self.workers = workers
        self.pool = WorkerPool(members, workers)
        self.rng = Random() if rng is None else rng
        self.stalled_s = stalled_s
        self.silent_s = silent_s
        self.request_failed = request_failed
        self.open_circuits = open_circuits
        self.retries = RetryBudget()
        self.migrations = MigrationLimiter[RequestHandle]() if migrations is None else migrations
        self.worker_waits = WorkerWaits(self.pool)
        self.worker_wait_s = worker_wait_s
        self.backlog = Backlog()
        self._loop = asyncio.get_running_loop()
        self.successes: dict[str, Success] = {}
        self._open: set[RequestHandle] = set()

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def open(
        self, plan: RequestPlan, placement: PlacementRequest, sink: ResponseSink
    ) -> RequestHandle:
        """Starts a request. A plan with a body needs a ChunkSink."""
        self.retries.count_request(self._loop.time())
        handle = RequestHandle(self, plan, placement, sink)
        self._open.add(handle)
        handle.machine.start()
        return handle

    def closed(self, handle: RequestHandle, model: str, outcome: RequestOutcome) -> None:
        self._open.discard(handle)
        if outcome.error is None and outcome.worker_ids and outcome.placed is not None:
            has_tokens = handle.machine.plan.body is not None or outcome.usage.completion_tokens > 0
            self.succeeded(model, Success(has_tokens, outcome.placed.prefill is not None))

    def succeeded(self, model: str, success: Success) -> None:
        self.successes[model] = max(success, self.successes.get(model, success))

    def abort_all(self, error: MeshError) -> list[str]:
        """Ends every open request with `error`; returns their ids."""
        handles = list(self._open)
        for handle in handles:
            handle.fail(error, "drain")
        return [handle.machine.plan.request_id for handle in handles]

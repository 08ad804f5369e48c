"""One open request: connects its RequestMachine to the router, the workers and the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Protocol

from common.errors import MeshError, NotFound, UnknownModel, WorkerLost
from common.request.placement import Decision, Query
from common.request.preprocessed import PreprocessedRequest, TokenLogprob
from common.request.token_stream import LegRequest
from frontend_svc.models.catalog import no_worker_error
from frontend_svc.request.leg import Leg
from frontend_svc.request.local_placement import adapter_of
from frontend_svc.request.machine import RequestMachine
from frontend_svc.request.output_blocks import OutputBlockCounter
from frontend_svc.request.placement_request import (
    UNKNOWN_ADAPTER,
    PlacementKey,
    PlacementRequest,
    exclusion_reasons,
)
from frontend_svc.request.ports import AbortHandle, ChunkSink, ResponseSink, RouterPort, WorkerPort
from frontend_svc.request.retry_policy import MigrationLimiter, RetryBudget
from frontend_svc.request.types import RequestOutcome, RequestPlan, Success
from frontend_svc.request.worker_pool import WorkerPool
from frontend_svc.request.worker_waits import WorkerWaits


class SharedParts(Protocol):
    """What all requests of a frontend share; `Gateway` provides it."""

    router: RouterPort
    workers: WorkerPort
    pool: WorkerPool
    rng: Random
    retries: RetryBudget
    migrations: MigrationLimiter[RequestHandle]
    worker_waits: WorkerWaits
    worker_wait_s: float

    def stalled_s(self) -> float: ...

    def request_failed(self, worker_id: int, peers: frozenset[int], /) -> None: ...

    def silent_s(self, worker_id: int, /) -> float: ...

    def open_circuits(self) -> Mapping[int, str]: ...

    def closed(self, handle: RequestHandle, model: str, outcome: RequestOutcome) -> None: ...

    def succeeded(self, model: str, success: Success, /) -> None: ...


class RequestHandle:
    """An open request: the ports of its machine, and the handle that its owner keeps."""

    def __init__(
        self,
        gateway: SharedParts,
        plan: RequestPlan,
        placement: PlacementRequest,
        sink: ResponseSink,
    ) -> None:
        self._gateway = gateway
        self._placement = _with_request_hints(placement, plan.request)
        self._block_counter = _block_counter_of(self._query)
        # How many of the generated tokens are part of the current attempt's prompt.
        self._generated_in_prompt = 0
        self._sink = sink
        self._tracker = plan.request.tracker
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._submitted: dict[Leg, AbortHandle] = {}
        # Addresses from routing decisions: a router may see a new worker before this frontend.
        self._decision_addresses: dict[int, str] = {}
        # Whether the request has or waits for a permit of the migration limiter.
        self._has_permit_request = False
        self.machine = RequestMachine(plan, self, gateway.rng, worker_wait_s=gateway.worker_wait_s)

    @property
    def _query(self) -> Query:
        return self._placement.query

    def stop(self) -> None:
        self.machine.stop()

    def abort(self) -> None:
        """Ends the request because the client is gone; no effect if it has ended."""
        self.machine.abort()

    def fail(self, error: MeshError, reason: str) -> None:
        """Ends the request with `error`. reason: the abort reason that workers receive."""
        self.machine.fail(error, reason)

    def first_token(self) -> None:
        """Counts the request as a success of its model: its first token has arrived."""
        self._gateway.succeeded(self._query.model, Success(True, self.machine.is_pair))

    # -- RequestPorts ---------------------------------------------------------------------------

    def members(self) -> tuple[frozenset[int], frozenset[int]]:
        return self._gateway.pool.members(self._query.model, adapter_of(self._query))

    def wait_for_worker(self, until: float) -> None:
        self._release_permit()
        query = self._query
        self._gateway.worker_waits.add(self, query.model, adapter_of(query), until)

    def worker_available(self) -> None:
        """Ends a wait; see WorkerWaits."""
        self.machine.place_again()

    def place(self, attempt: int, excluded: frozenset[int]) -> None:
        self._append_generated_to_query()
        placement = self._placement
        if excluded:
            reasons = exclusion_reasons(self._gateway.open_circuits(), self.machine.unsuitable)
            placement = placement.excluding(excluded, reasons)
        reply = partial(self._on_decision, attempt)
        self._gateway.router.place(self._key(attempt), placement, reply)

    def _on_decision(self, attempt: int, reply: Decision | MeshError) -> None:
        is_unknown = isinstance(reply, NotFound) and reply.reason == UNKNOWN_ADAPTER
        if is_unknown or isinstance(reply, UnknownModel):
            # This frontend has seen it: its last worker has just left.
            reply = no_worker_error(adapter_of(self._query) or self._query.model)
        if isinstance(reply, MeshError):
            self.machine.placement_failed(attempt, reply)
            return
        self._record_hit(reply)
        self._decision_addresses[reply.worker.worker_id] = reply.worker_address
        if reply.prefill is not None:
            self._decision_addresses[reply.prefill.worker_id] = reply.prefill_address
        self.machine.placed(attempt, reply, self._loop.time())

    def _record_hit(self, placed: Decision) -> None:
        if self._tracker is not None and self._query.block_size:
            self._tracker.prompt_blocks = self._query.total_tokens // self._query.block_size
            self._tracker.cached_blocks = placed.overlap_blocks

    def _append_generated_to_query(self) -> None:
        """Adds the generated tokens to the prompt: the next worker computes and holds them too."""
        new = len(self.machine.generated) - self._generated_in_prompt
        if new:
            prompt, _ = self.machine.plan.request.routing_tokens()
            token_ids = prompt.extended(self.machine.generated)
            self._placement = self._placement.extended(token_ids, new)
            self._block_counter = _block_counter_of(self._query)
            self._generated_in_prompt += new

    def take_permit(self) -> bool:
        query = self._query
        self._has_permit_request = True
        return self._gateway.migrations.request_permit(
            query.model,
            self,
            self._placement.arrived_at,
            self._count_available,
            adapter_of(query),
        )

    def permit_granted(self) -> None:
        if self._has_permit_request:
            self._loop.call_soon(self.machine.place_again)

    def _release_permit(self) -> None:
        if self._has_permit_request:
            self._has_permit_request = False
            model = self._query.model
            migrations = self._gateway.migrations
            for admitted in migrations.release(model, self, self._count_available):
                admitted.permit_granted()

    def _count_available(self, adapter: str) -> int:
        return self._gateway.pool.count_available(self._query.model, adapter)

    def submit(self, worker_id: int, leg_request: LegRequest, leg: Leg) -> None:
        gateway = self._gateway
        address = gateway.pool.address(worker_id, self._decision_addresses.get(worker_id, ""))
        if not address:
            error = WorkerLost(f"worker {worker_id} has left the mesh", retryable=True)
            self._loop.call_soon(leg.lost, error)
            return
        if self._tracker is not None:
            self._tracker.mark("prefill_started", time.monotonic())
        self._submitted[leg] = gateway.workers.submit(worker_id, address, leg_request, leg)

    def abort_leg(self, leg: Leg, reason: str) -> None:
        submitted = self._submitted.pop(leg, None)
        if submitted is not None:
            submitted.abort(reason)

    def prefill_done(self, attempt: int) -> None:
        if self._tracker is not None:
            self._tracker.mark("prefill_finished", time.monotonic())
        self._release_permit()
        self._gateway.router.prefill_done(self._key(attempt))

    def free(self, attempt: int) -> None:
        self._release_permit()
        self._gateway.router.free(self._key(attempt))

    def emit(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        generated = len(self.machine.generated) - self._generated_in_prompt
        extended = self._block_counter.advance_to(generated)
        if extended is not None:
            key = self._key(self.machine.attempt)
            self._gateway.router.output(key, extended.blocks, extended.decay_fraction)
        self._sink.tokens(token_ids, logprobs)

    def emit_chunk(self, json: bytes) -> None:
        assert isinstance(self._sink, ChunkSink), "chunks need a ChunkSink"
        self._sink.chunk(json)

    def finish(self, outcome: RequestOutcome) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._tracker is not None:
            self._tracker.output_ended(time.monotonic())
        self._release_permit()
        self._gateway.worker_waits.discard(self)
        self._gateway.closed(self, self._placement.query.model, outcome)
        self._sink.finished(outcome)

    def wake_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._on_timer)

    def now(self) -> float:
        return self._loop.time()

    def take_retry(self, error: MeshError) -> bool:
        return self._gateway.retries.take(self._loop.time(), error)

    def has_left(self, worker_id: int) -> bool:
        return self._gateway.pool.has_left(worker_id)

    def worker_failed(self, worker_id: int) -> None:
        peers = self._gateway.pool.peers(worker_id, self._query.model, adapter_of(self._query))
        self._gateway.request_failed(worker_id, peers)

    def stalled_s(self) -> float:
        return self._gateway.stalled_s()

    def silent_s(self, worker_id: int) -> float:
        return self._gateway.silent_s(worker_id)

    def _on_timer(self) -> None:
        self.machine.on_timer(self._loop.time())

    def _key(self, attempt: int) -> PlacementKey:
        return self.machine.plan.request_id, attempt


def _block_counter_of(query: Query) -> OutputBlockCounter:
    return OutputBlockCounter(query.total_tokens, query.block_size, query.expected_output_tokens)


def _with_request_hints(
    placement: PlacementRequest, request: PreprocessedRequest
) -> PlacementRequest:
    """Returns the placement request with the request's hints for the router, where it has none
    itself."""
    query = placement.query
    override, expected = request.router_config_override, query.expected_output_tokens
    if query.routing is not None and expected is None:
        expected = query.routing.expected_output_tokens
    if override is None and expected is None:
        return placement
    hinted = replace(
        query,
        config_override=query.config_override or override,
        expected_output_tokens=expected,
    )
    return replace(placement, query=hinted)

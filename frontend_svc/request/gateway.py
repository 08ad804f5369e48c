"""Runs requests: joins one RequestMachine each with the router, the workers and time.

Nothing here knows HTTP. `Gateway.open` starts a request and tells a `ResponseSink` what comes of
it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Protocol, runtime_checkable

from common.errors import MeshError, NotFound, Unavailable, UnknownModel, WorkerLost
from common.registry.instances import Instance, Snapshot
from common.request.preprocessed import PreprocessedRequest, RoutingHints, TokenLogprob
from common.request.token_stream import LegRequest, LegSink
from frontend_svc.core.models.adapters import serving
from frontend_svc.core.peers.circuit_breaker import RetryBudget
from frontend_svc.core.peers.placement_query import UNKNOWN_ADAPTER, PlacementKey, Query
from frontend_svc.core.peers.stall_clock import never_stalled
from frontend_svc.core.request.machine import (
    Leg,
    RequestMachine,
    RequestOutcome,
    RequestPlan,
    RoutingDecision,
)
from frontend_svc.core.request.migration_limiter import MigrationLimiter
from frontend_svc.core.request.output_blocks import OutputBlockCounter
from frontend_svc.models.catalog import no_worker_error

# A slow client may leave this many tokens unread before its request is ended.
UNREAD_TOKENS_MAX = 65_536
# While all workers that a request may try are left alone, it waits so long, so often: 3 s in all.
EXCLUDED_RETRY_S = 0.1
EXCLUDED_RETRY_ATTEMPTS = 30


class RouterPort(Protocol):
    """Where placements come from: a RouterClient, or the simulation's."""

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
    """A submitted order."""

    def abort(self, reason: str) -> None:
        """See Submission."""


class WorkerPort(Protocol):
    """Where orders go: an EngineClient, or the simulation's."""

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
    """Who hears of a request. Calls come from the loop, never from within `Gateway.open`."""

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """The next tokens."""

    def finished(self, outcome: RequestOutcome) -> None:
        """The end."""


@runtime_checkable
class ChunkSink(ResponseSink, Protocol):
    """Who hears of a request whose body was passed through."""

    def chunk(self, json: bytes) -> None:
        """The next chunk."""


class RequestHandle:
    """A request under way: the ports of its machine, and the handle its owner keeps."""

    def __init__(
        self, gateway: Gateway, plan: RequestPlan, query: Query, sink: ResponseSink
    ) -> None:
        self._gateway = gateway
        self._query = query = _with_request_hints(query, plan.request)
        self._block_counter = _block_counter_of(query)
        self._generated_in_prompt = (
            0  # How many of the generated tokens are prompt to the attempt under way.
        )
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._exclusion_retries_left = EXCLUDED_RETRY_ATTEMPTS
        self._submitted: dict[Leg, AbortHandle] = {}
        # Workers by what routers told of them, which may hear of a new one first.
        self._decision_addresses: dict[int, str] = {}
        # The attempt that waits for its turn, or computes, among the re-routes.
        self._migration: tuple[int, frozenset[int]] | None = None
        # Who failed it and was left alone for that when it began to wait for somebody.
        self._failed_and_excluded: frozenset[int] = frozenset()
        self.machine = RequestMachine(plan, self, gateway.rng)

    def stop(self) -> None:
        """The answer is complete by a stop string."""
        self.machine.stop()

    def client_gone(self) -> None:
        """Nobody listens any more."""
        self.machine.client_gone()

    def fail(self, error: MeshError, reason: str) -> None:
        """The gateway cannot go on with it."""
        self.machine.fail(error, reason)

    # -- RequestPorts ---------------------------------------------------------------------------

    def place(self, attempt: int, excluded: frozenset[int]) -> None:
        """See RequestPorts."""
        if not self.machine.is_awaiting_placement(attempt):
            return  # given up while it waited
        if attempt and not self._acquire_permit(attempt, excluded):
            return
        self._append_generated_to_query()
        query = self._query
        pool, open_circuits = self._gateway.pool(query.model, _adapter(query))
        # It waited because nobody else was left: one that failed it and is whole again will do.
        closed_circuits = self._failed_and_excluded - open_circuits
        excluded -= closed_circuits
        self._failed_and_excluded -= closed_circuits
        not_failed = pool - excluded
        if not_failed and not_failed <= open_circuits and self._exclusion_retries_left:
            self._retry_placement(attempt, excluded, open_circuits)
            return
        if excluded or open_circuits:
            query = query.excluding(excluded | open_circuits)

        def on_decision(reply: RoutingDecision | MeshError) -> None:
            if _is_unknown_model(reply):  # we knew it: its last worker has just left
                reply = no_worker_error(_adapter(query) or query.model)
            if isinstance(reply, Unavailable) and open_circuits and self._exclusion_retries_left:
                # The router may not know those that we know.
                self._retry_placement(attempt, excluded, open_circuits)
            elif isinstance(reply, MeshError):
                self.machine.placement_failed(attempt, reply)
            else:
                self._decision_addresses[reply.worker_id] = reply.address
                if reply.prefill is not None:
                    self._decision_addresses[reply.prefill.worker_id] = reply.prefill.address
                self.machine.placed(attempt, reply, self._loop.time())

        self._gateway.router_port.place(self._key(attempt), query, on_decision)

    def _append_generated_to_query(self) -> None:
        """Whoever goes on with an answer computes, and holds, what was generated before, too."""
        new = len(self.machine.generated) - self._generated_in_prompt
        if new:
            token_ids = self.machine.plan.request.token_ids.extended(self.machine.generated)
            self._query = self._query.extended(token_ids, new)
            self._block_counter = _block_counter_of(self._query)
            self._generated_in_prompt += new

    def _acquire_permit(self, attempt: int, excluded: frozenset[int]) -> bool:
        """Whether it may be tried again now; else it waits for `permit_granted`, or is told to
        come again."""
        gateway, query = self._gateway, self._query
        self._migration = attempt, excluded
        count_available_workers = partial(gateway.count_available_workers, query.model)
        permit = gateway.migrations.request_permit(
            query.model, self, query.arrived_at, count_available_workers, _adapter(query)
        )
        if permit == "full":
            message = "too many requests wait to be tried again"
            error = Unavailable(message, 1.0, reason="REROUTES_FULL")
            self._loop.call_soon(self.machine.placement_failed, attempt, error)
        return permit == "go"

    def permit_granted(self) -> None:
        """Its turn among the re-routes has come."""
        if self._migration is not None:
            self._loop.call_soon(self.place, *self._migration)

    def _release_permit(self) -> None:
        if self._migration is not None:
            self._migration = None
            self._gateway.release_permit(self._query.model, self)

    def _retry_placement(
        self, attempt: int, excluded: frozenset[int], open_circuits: frozenset[int]
    ) -> None:
        """Most often a link was cut for a moment: cheaper to wait than to fail."""
        self._exclusion_retries_left -= 1
        self._failed_and_excluded |= excluded & open_circuits
        self._loop.call_later(EXCLUDED_RETRY_S, self.place, attempt, excluded)

    def submit(self, worker_id: int, leg_request: LegRequest, leg: Leg) -> None:
        """See RequestPorts."""
        instance = self._gateway.snapshot().instances.get(worker_id)
        if instance is not None:
            address = instance.address
        elif self._gateway.has_left(worker_id):
            address = ""
        else:
            address = self._decision_addresses.get(worker_id, "")
        if not address:
            error = WorkerLost(f"worker {worker_id} has left the mesh", retryable=True)
            self._loop.call_soon(leg.lost, error)
            return
        self._submitted[leg] = self._gateway.workers.submit(worker_id, address, leg_request, leg)

    def abort(self, leg: Leg, reason: str) -> None:
        """See RequestPorts."""
        submitted = self._submitted.pop(leg, None)
        if submitted is not None:
            submitted.abort(reason)

    def prefill_done(self, attempt: int) -> None:
        """See RequestPorts."""
        self._release_permit()
        self._gateway.router_port.prefill_done(self._key(attempt))

    def free(self, attempt: int) -> None:
        """See RequestPorts."""
        self._release_permit()
        self._gateway.router_port.free(self._key(attempt))

    def emit(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """See RequestPorts."""
        extended = self._block_counter.advance_to(
            len(self.machine.generated) - self._generated_in_prompt
        )
        if extended is not None:
            key = self._key(self.machine.attempt)
            self._gateway.router_port.output(key, extended.blocks, extended.decay_fraction)
        self._sink.tokens(token_ids, logprobs)

    def emit_chunk(self, json: bytes) -> None:
        """See RequestPorts."""
        assert isinstance(self._sink, ChunkSink), "who passes a body through takes chunks"
        self._sink.chunk(json)

    def finish(self, outcome: RequestOutcome) -> None:
        """See RequestPorts."""
        if self._timer is not None:
            self._timer.cancel()
        self._release_permit()
        self._gateway.on_request_closed(self)
        self._sink.finished(outcome)

    def wake_at(self, at: float) -> None:
        """See RequestPorts."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._on_timer)

    def now(self) -> float:
        """See RequestPorts."""
        return self._loop.time()

    def take_retry(self) -> bool:
        """See RequestPorts."""
        return self._gateway.retries.take(self._loop.time())

    def stalled_s(self) -> float:
        """See RequestPorts."""
        return self._gateway.stalled_s()

    def silent_s(self, worker_id: int) -> float:
        """See RequestPorts."""
        return self._gateway.silent_s(worker_id)

    def _on_timer(self) -> None:
        self.machine.on_timer(self._loop.time())

    def _key(self, attempt: int) -> PlacementKey:
        return self.machine.plan.request_id, attempt


class Gateway:
    """The requests of a frontend process.

    snapshot: the mesh's members as discovery knows them now. rng: makes span ids. lost_s: how long
    this process has stood still so far, see `core/patience.py`; silent_s: since when nothing was
    heard of a worker. departed: who was seen to leave; None:
    nobody goes to a worker that is not in the snapshot.
    """

    def __init__(
        self,
        router_port: RouterPort,
        workers: WorkerPort,
        snapshot: Callable[[], Snapshot],
        rng: Random | None = None,
        *,
        stalled_s: Callable[[], float] = never_stalled,
        silent_s: Callable[[int], float] = lambda worker_id: math.inf,
        recently_left: Container[int] | None = None,
    ) -> None:
        self.router_port = router_port
        self._recently_left = recently_left
        self.stalled_s = stalled_s
        self.silent_s = silent_s
        self.workers = workers
        self.snapshot = snapshot
        self.rng = Random() if rng is None else rng
        self.retries = RetryBudget()
        self.migrations: MigrationLimiter[RequestHandle] = MigrationLimiter()
        self._loop = asyncio.get_running_loop()
        self._open: set[RequestHandle] = set()

    @property
    def open_requests(self) -> int:
        """Requests under way."""
        return len(self._open)

    def open(self, plan: RequestPlan, query: Query, sink: ResponseSink) -> RequestHandle:
        """Starts a request. A plan with a body needs a ChunkListener."""
        self.retries.request(self._loop.time())
        handle = RequestHandle(self, plan, query, sink)
        self._open.add(handle)
        handle.machine.start()
        return handle

    def has_left(self, worker_id: int) -> bool:
        """Whether a worker that discovery does not show was there; else it is about to be."""
        return self._recently_left is None or worker_id in self._recently_left

    def pool(self, model: str, adapter: str = "") -> tuple[frozenset[int], frozenset[int]]:
        """Workers of a model, and those of them that this frontend saw fail and leaves alone.

        adapter: which they are to have, "" if none.
        """
        pool = frozenset(i.id for i in serving(self.snapshot().serving(model), adapter))
        return pool, self.workers.excluded_workers(pool)

    def count_available_workers(self, model: str, adapter: str = "") -> int:
        """Workers of a model that compute prompts and are not left alone; adapter: see `pool`."""
        serving_workers = serving(self.snapshot().serving(model), adapter)
        eligible = [i.id for i in serving_workers if i.role != "decode"]
        return len(eligible) - len(self.workers.excluded_workers(eligible))

    def release_permit(self, model: str, handle: RequestHandle) -> None:
        """A ticket that was tried again computes no more, or waits no more."""
        for next_handle in self.migrations.release(
            model, handle, partial(self.count_available_workers, model)
        ):
            next_handle.permit_granted()

    def on_request_closed(self, handle: RequestHandle) -> None:
        """A ticket's request has ended."""
        self._open.discard(handle)

    def abort_all(self, error: MeshError) -> list[str]:
        """Ends every request under way with `error`; their ids."""
        handles = list(self._open)
        for handle in handles:
            handle.fail(error, "drain")
        return [handle.machine.plan.request_id for handle in handles]


def _block_counter_of(query: Query) -> OutputBlockCounter:
    return OutputBlockCounter(query.total_tokens, query.block_size, query.expected_output_tokens)


def _with_request_hints(query: Query, request: PreprocessedRequest) -> Query:
    """The query with what the request says to the router, where it does not say so itself."""
    routing = query.routing
    expected_tokens = None if routing is None else routing.expected_output_tokens
    return replace(
        query,
        config_override=query.config_override or request.router_config_override,
        expected_output_tokens=expected_tokens
        if query.expected_output_tokens is None
        else query.expected_output_tokens,
    )


def place_locally(
    snapshot: Snapshot, open_slots: dict[int, int], query: Query, rng: Random
) -> RoutingDecision | MeshError:
    """A placement without a router: power of two on our own requests in flight.

    Among aggregated workers; without one, among decode workers that can prefill by themselves. All
    of them have the adapter, if the query names one.
    """
    adapter = _adapter(query)
    workers = serving(snapshot.serving(query.model), adapter)
    if not workers:
        return no_worker_error(adapter or query.model)
    if query.routing is not None and _restricts_workers(query.routing):
        return Unavailable(
            "no router answers at the moment, and only a router can keep to what the request says "
            "of its workers (ids, ranks, taints): ask again, or without that",
            1.0,
            reason="NO_ROUTER",
        )
    not_excluded = [w for w in workers if w.id not in query.excluded]
    eligible = [w for w in not_excluded if w.role == "aggregated"]
    eligible = eligible or [w for w in not_excluded if w.role == "decode" and w.local_prefill]
    if not eligible:
        return Unavailable(
            f"no router answers at the moment, and no worker of {query.model!r} that serves whole "
            "requests by itself is left to try: ask again",
            1.0,
            reason="NO_ROUTER",
        )
    two_candidates: list[Instance] = rng.sample(eligible, min(2, len(eligible)))
    worker = min(two_candidates, key=lambda w: open_slots.get(w.id, 0))
    message = ("unrouted: no router answers",)
    return RoutingDecision(worker.id, worker.dp_rank_start, reasons=message, is_unrouted=True)


def has_workers(snapshot: Snapshot, query: Query) -> bool:
    """Whether there are workers with the query's model, and adapter."""
    return bool(serving(snapshot.serving(query.model), _adapter(query)))


def _adapter(query: Query) -> str:
    """The adapter that a query names, "" if none."""
    return (query.routing.lora_name or "") if query.routing is not None else ""


def _is_unknown_model(reply: RoutingDecision | MeshError) -> bool:
    """Whether the router knows nobody with the query's model, or adapter."""
    if isinstance(reply, NotFound) and reply.reason == UNKNOWN_ADAPTER:
        return True
    return isinstance(reply, UnknownModel)


def _restricts_workers(routing: RoutingHints) -> bool:
    """Whether only some workers will do, but for those without its adapter.

    Order, length, sessions and preferences leave all.
    """
    constraints = routing.routing_constraints
    if constraints is not None and constraints.required_taints:
        return True
    other_hints = replace(
        routing,
        expected_output_tokens=None,
        lora_name=None,
        priority=None,
        priority_jump=None,
        routing_constraints=None,
        session_control=None,
    )
    return other_hints != RoutingHints()

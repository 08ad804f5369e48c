"""Runs requests: joins one RequestMachine each with the router, the workers and time.

Nothing here knows HTTP. `Gateway.open` starts a request and tells a `Listener` what comes of it.
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
from common.request.token_stream import LegSink, Order
from frontend_svc.core.models.adapters import serving
from frontend_svc.core.peers.circuit_breaker import RetryBudget
from frontend_svc.core.peers.stall_clock import never_late
from frontend_svc.core.request.machine import Leg, Outcome, Placed, Plan, RequestMachine
from frontend_svc.core.request.migration_limiter import Reroutes
from frontend_svc.core.request.output_blocks import Growth
from frontend_svc.models.catalog import no_worker
from frontend_svc.peers.router_client import UNKNOWN_ADAPTER, Key, Query

# A slow client may leave this many tokens unread before its request is ended.
UNREAD_TOKENS_MAX = 65_536
# While all workers that a request may try are left alone, it waits so long, so often: 3 s in all.
WHOLE_AGAIN_S = 0.1
WHOLE_AGAIN_TRIES = 30


class Placer(Protocol):
    """Where placements come from: a RouterClient, or the simulation's."""

    def place(self, key: Key, query: Query, answer: Callable[[Placed | MeshError], None]) -> None:
        """See RouterClient."""

    def prefill_done(self, key: Key) -> None:
        """See RouterClient."""

    def output(self, key: Key, blocks: int, decay_fraction: float | None) -> None:
        """See RouterClient."""

    def free(self, key: Key) -> None:
        """See RouterClient."""


class Aborts(Protocol):
    """A submitted order."""

    def abort(self, reason: str) -> None:
        """See Submission."""


class Workers(Protocol):
    """Where orders go: an EngineClient, or the simulation's."""

    def submit(self, worker_id: int, address: str, order: Order, sink: LegSink) -> Aborts:
        """See EngineClient."""

    @property
    def open_slots(self) -> dict[int, int]:
        """See EngineClient."""

    def left_alone(self, pool: Iterable[int]) -> frozenset[int]:
        """See EngineClient."""


class Listener(Protocol):
    """Who hears of a request. Calls come from the loop, never from within `Gateway.open`."""

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """The next tokens."""

    def finished(self, outcome: Outcome) -> None:
        """The end."""


@runtime_checkable
class ChunkListener(Listener, Protocol):
    """Who hears of a request whose body was passed through."""

    def chunk(self, json: bytes) -> None:
        """The next chunk."""


class Ticket:
    """A request under way: the ports of its machine, and the handle its owner keeps."""

    def __init__(self, gateway: Gateway, plan: Plan, query: Query, listener: Listener) -> None:
        self._gateway = gateway
        self._query = query = _completed(query, plan.request)
        self._growth = _growth_of(query)
        self._in_prompt = 0  # How many of the generated tokens are prompt to the attempt under way.
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waits_left = WHOLE_AGAIN_TRIES
        self._submitted: dict[Leg, Aborts] = {}
        # Workers by what routers told of them, which may hear of a new one first.
        self._told: dict[int, str] = {}
        # The attempt that waits for its turn, or computes, among the re-routes.
        self._rerouted: tuple[int, frozenset[int]] | None = None
        # Who failed it and was left alone for that when it began to wait for somebody.
        self._failed_alone: frozenset[int] = frozenset()
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
        if not self.machine.awaits_placement(attempt):
            return  # given up while it waited
        if attempt and not self._has_turn(attempt, excluded):
            return
        self._take_up_generated()
        query = self._query
        pool, alone = self._gateway.pool(query.model, _adapter(query))
        # It waited because nobody else was left: one that failed it and is whole again will do.
        healed = self._failed_alone - alone
        excluded -= healed
        self._failed_alone -= healed
        untried = pool - excluded
        if untried and untried <= alone and self._waits_left:
            self._place_later(attempt, excluded, alone)
            return
        if excluded or alone:
            query = query.without(excluded | alone)

        def answered(answer: Placed | MeshError) -> None:
            if _is_unknown(answer):  # we knew it: its last worker has just left
                answer = no_worker(_adapter(query) or query.model)
            if isinstance(answer, Unavailable) and alone and self._waits_left:
                # The router may not know those that we know.
                self._place_later(attempt, excluded, alone)
            elif isinstance(answer, MeshError):
                self.machine.place_failed(attempt, answer)
            else:
                self._told[answer.worker_id] = answer.address
                if answer.prefill is not None:
                    self._told[answer.prefill.worker_id] = answer.prefill.address
                self.machine.placed(attempt, answer, self._loop.time())

        self._gateway.placer.place(self._key(attempt), query, answered)

    def _take_up_generated(self) -> None:
        """Whoever goes on with an answer computes, and holds, what was generated before, too."""
        new = len(self.machine.generated) - self._in_prompt
        if new:
            token_ids = self.machine.plan.request.token_ids.extended(self.machine.generated)
            self._query = self._query.grown(token_ids, new)
            self._growth = _growth_of(self._query)
            self._in_prompt += new

    def _has_turn(self, attempt: int, excluded: frozenset[int]) -> bool:
        """Whether it may be tried again now; else it waits for `go`, or is told to come again."""
        gateway, query = self._gateway, self._query
        self._rerouted = attempt, excluded
        survivors = partial(gateway.survivors, query.model)
        turn = gateway.reroutes.ask(query.model, self, query.arrived_at, survivors, _adapter(query))
        if turn == "full":
            why = "too many requests wait to be tried again"
            error = Unavailable(why, 1.0, reason="REROUTES_FULL")
            self._loop.call_soon(self.machine.place_failed, attempt, error)
        return turn == "go"

    def go(self) -> None:
        """Its turn among the re-routes has come."""
        if self._rerouted is not None:
            self._loop.call_soon(self.place, *self._rerouted)

    def _leave_reroutes(self) -> None:
        if self._rerouted is not None:
            self._rerouted = None
            self._gateway.leave_reroutes(self._query.model, self)

    def _place_later(self, attempt: int, excluded: frozenset[int], alone: frozenset[int]) -> None:
        """Most often a link was cut for a moment: cheaper to wait than to fail."""
        self._waits_left -= 1
        self._failed_alone |= excluded & alone
        self._loop.call_later(WHOLE_AGAIN_S, self.place, attempt, excluded)

    def submit(self, worker_id: int, order: Order, leg: Leg) -> None:
        """See RequestPorts."""
        instance = self._gateway.snapshot().instances.get(worker_id)
        if instance is not None:
            address = instance.address
        elif self._gateway.has_left(worker_id):
            address = ""
        else:
            address = self._told.get(worker_id, "")
        if not address:
            error = WorkerLost(f"worker {worker_id} has left the mesh", retryable=True)
            self._loop.call_soon(leg.lost, error)
            return
        self._submitted[leg] = self._gateway.workers.submit(worker_id, address, order, leg)

    def abort(self, leg: Leg, reason: str) -> None:
        """See RequestPorts."""
        submitted = self._submitted.pop(leg, None)
        if submitted is not None:
            submitted.abort(reason)

    def prefill_done(self, attempt: int) -> None:
        """See RequestPorts."""
        self._leave_reroutes()
        self._gateway.placer.prefill_done(self._key(attempt))

    def free(self, attempt: int) -> None:
        """See RequestPorts."""
        self._leave_reroutes()
        self._gateway.placer.free(self._key(attempt))

    def emit(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """See RequestPorts."""
        grown = self._growth.reached(len(self.machine.generated) - self._in_prompt)
        if grown is not None:
            key = self._key(self.machine.attempt)
            self._gateway.placer.output(key, grown.blocks, grown.decay_fraction)
        self._listener.tokens(token_ids, logprobs)

    def emit_chunk(self, json: bytes) -> None:
        """See RequestPorts."""
        assert isinstance(self._listener, ChunkListener), "who passes a body through takes chunks"
        self._listener.chunk(json)

    def finish(self, outcome: Outcome) -> None:
        """See RequestPorts."""
        if self._timer is not None:
            self._timer.cancel()
        self._leave_reroutes()
        self._gateway.closed(self)
        self._listener.finished(outcome)

    def wake_at(self, at: float) -> None:
        """See RequestPorts."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._on_time)

    def now(self) -> float:
        """See RequestPorts."""
        return self._loop.time()

    def take_retry(self) -> bool:
        """See RequestPorts."""
        return self._gateway.retries.take(self._loop.time())

    def lost_s(self) -> float:
        """See RequestPorts."""
        return self._gateway.lost_s()

    def silent_s(self, worker_id: int) -> float:
        """See RequestPorts."""
        return self._gateway.silent_s(worker_id)

    def _on_time(self) -> None:
        self.machine.on_time(self._loop.time())

    def _key(self, attempt: int) -> Key:
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
        placer: Placer,
        workers: Workers,
        snapshot: Callable[[], Snapshot],
        rng: Random | None = None,
        *,
        lost_s: Callable[[], float] = never_late,
        silent_s: Callable[[int], float] = lambda worker_id: math.inf,
        departed: Container[int] | None = None,
    ) -> None:
        self.placer = placer
        self._departed = departed
        self.lost_s = lost_s
        self.silent_s = silent_s
        self.workers = workers
        self.snapshot = snapshot
        self.rng = Random() if rng is None else rng
        self.retries = RetryBudget()
        self.reroutes: Reroutes[Ticket] = Reroutes()
        self._loop = asyncio.get_running_loop()
        self._open: set[Ticket] = set()

    @property
    def open_requests(self) -> int:
        """Requests under way."""
        return len(self._open)

    def open(self, plan: Plan, query: Query, listener: Listener) -> Ticket:
        """Starts a request. A plan with a body needs a ChunkListener."""
        self.retries.request(self._loop.time())
        ticket = Ticket(self, plan, query, listener)
        self._open.add(ticket)
        ticket.machine.start()
        return ticket

    def has_left(self, worker_id: int) -> bool:
        """Whether a worker that discovery does not show was there; else it is about to be."""
        return self._departed is None or worker_id in self._departed

    def pool(self, model: str, adapter: str = "") -> tuple[frozenset[int], frozenset[int]]:
        """Workers of a model, and those of them that this frontend saw fail and leaves alone.

        adapter: which they are to have, "" if none.
        """
        pool = frozenset(i.id for i in serving(self.snapshot().serving(model), adapter))
        return pool, self.workers.left_alone(pool)

    def survivors(self, model: str, adapter: str = "") -> int:
        """Workers of a model that compute prompts and are not left alone; adapter: see `pool`."""
        there = serving(self.snapshot().serving(model), adapter)
        fit = [i.id for i in there if i.role != "decode"]
        return len(fit) - len(self.workers.left_alone(fit))

    def leave_reroutes(self, model: str, ticket: Ticket) -> None:
        """A ticket that was tried again computes no more, or waits no more."""
        for next_one in self.reroutes.leave(model, ticket, partial(self.survivors, model)):
            next_one.go()

    def closed(self, ticket: Ticket) -> None:
        """A ticket's request has ended."""
        self._open.discard(ticket)

    def cut(self, error: MeshError) -> list[str]:
        """Ends every request under way with `error`; their ids."""
        tickets = list(self._open)
        for ticket in tickets:
            ticket.fail(error, "drain")
        return [ticket.machine.plan.request_id for ticket in tickets]


def _growth_of(query: Query) -> Growth:
    return Growth(query.total_tokens, query.block_size, query.expected_output_tokens)


def _completed(query: Query, request: PreprocessedRequest) -> Query:
    """The query with what the request says to the router, where it does not say so itself."""
    routing = query.routing
    expected = None if routing is None else routing.expected_output_tokens
    return replace(
        query,
        config_override=query.config_override or request.router_config_override,
        expected_output_tokens=expected
        if query.expected_output_tokens is None
        else query.expected_output_tokens,
    )


def place_alone(
    snapshot: Snapshot, open_slots: dict[int, int], query: Query, rng: Random
) -> Placed | MeshError:
    """A placement without a router: power of two on our own requests in flight.

    Among aggregated workers; without one, among decode workers that can prefill by themselves. All
    of them have the adapter, if the query names one.
    """
    adapter = _adapter(query)
    workers = serving(snapshot.serving(query.model), adapter)
    if not workers:
        return no_worker(adapter or query.model)
    if query.routing is not None and _restricts(query.routing):
        return Unavailable(
            "no router answers at the moment, and only a router can keep to what the request says "
            "of its workers (ids, ranks, taints): ask again, or without that",
            1.0,
            reason="NO_ROUTER",
        )
    left = [w for w in workers if w.id not in query.excluded]
    fit = [w for w in left if w.role == "aggregated"]
    fit = fit or [w for w in left if w.role == "decode" and w.local_prefill]
    if not fit:
        return Unavailable(
            f"no router answers at the moment, and no worker of {query.model!r} that serves whole "
            "requests by itself is left to try: ask again",
            1.0,
            reason="NO_ROUTER",
        )
    pair: list[Instance] = rng.sample(fit, min(2, len(fit)))
    worker = min(pair, key=lambda w: open_slots.get(w.id, 0))
    why = ("unrouted: no router answers",)
    return Placed(worker.id, worker.dp_rank_start, reasons=why, is_unrouted=True)


def sees(snapshot: Snapshot, query: Query) -> bool:
    """Whether there are workers with the query's model, and adapter."""
    return bool(serving(snapshot.serving(query.model), _adapter(query)))


def _adapter(query: Query) -> str:
    """The adapter that a query names, "" if none."""
    return (query.routing.lora_name or "") if query.routing is not None else ""


def _is_unknown(answer: Placed | MeshError) -> bool:
    """Whether the router knows nobody with the query's model, or adapter."""
    if isinstance(answer, NotFound) and answer.reason == UNKNOWN_ADAPTER:
        return True
    return isinstance(answer, UnknownModel)


def _restricts(routing: RoutingHints) -> bool:
    """Whether only some workers will do, but for those without its adapter.

    Order, length, sessions and preferences leave all.
    """
    constraints = routing.routing_constraints
    if constraints is not None and constraints.required_taints:
        return True
    rest = replace(
        routing,
        expected_output_tokens=None,
        lora_name=None,
        priority=None,
        priority_jump=None,
        routing_constraints=None,
        session_control=None,
    )
    return rest != RoutingHints()

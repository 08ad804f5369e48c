"""Runs requests: joins one RequestMachine each with the router, the workers and time.

Nothing here knows HTTP. `Gateway.open` starts a request and tells a `Listener` what comes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Protocol

from common.attach import LegSink, Order
from common.errors import MeshError, Unavailable, UnknownModel, WorkerLost
from common.instances import Instance, Snapshot
from common.preprocessed import TokenLogprob
from frontend_svc.core.breaker import RetryBudget
from frontend_svc.core.request import Leg, Outcome, Placed, Plan, RequestMachine
from frontend_svc.models import no_worker
from frontend_svc.router_client import Key, Query

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


class Ticket:
    """A request under way: the ports of its machine, and the handle its owner keeps."""

    def __init__(self, gateway: Gateway, plan: Plan, query: Query, listener: Listener) -> None:
        self._gateway = gateway
        self._query = query
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waits_left = WHOLE_AGAIN_TRIES
        self._submitted: dict[Leg, Aborts] = {}
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
            return  # given up while it waited for somebody to be whole again
        query = self._query
        pool, alone = self._gateway.pool(query.model)
        untried = pool - excluded
        if untried and untried <= alone and self._waits_left:
            self._place_later(attempt, excluded)
            return
        if excluded or alone:
            query = query.without(excluded | alone)

        def answered(answer: Placed | MeshError) -> None:
            if isinstance(answer, UnknownModel):  # we knew it: its last worker has just left
                answer = no_worker(query.model)
            if isinstance(answer, Unavailable) and alone and self._waits_left:
                self._place_later(attempt, excluded)  # the router may not know those that we know
            elif isinstance(answer, MeshError):
                self.machine.place_failed(attempt, answer)
            else:
                self.machine.placed(attempt, answer, self._loop.time())

        self._gateway.placer.place(self._key(attempt), query, answered)

    def _place_later(self, attempt: int, excluded: frozenset[int]) -> None:
        """Most often a link was cut for a moment: cheaper to wait than to fail."""
        self._waits_left -= 1
        self._loop.call_later(WHOLE_AGAIN_S, self.place, attempt, excluded)

    def submit(self, worker_id: int, order: Order, leg: Leg) -> None:
        """See RequestPorts."""
        instance = self._gateway.snapshot().instances.get(worker_id)
        if instance is None:
            error = WorkerLost(f"worker {worker_id} has left the mesh", retryable=True)
            self._loop.call_soon(leg.lost, error)
            return
        address = instance.address
        self._submitted[leg] = self._gateway.workers.submit(worker_id, address, order, leg)

    def abort(self, leg: Leg, reason: str) -> None:
        """See RequestPorts."""
        submitted = self._submitted.pop(leg, None)
        if submitted is not None:
            submitted.abort(reason)

    def prefill_done(self, attempt: int) -> None:
        """See RequestPorts."""
        self._gateway.placer.prefill_done(self._key(attempt))

    def free(self, attempt: int) -> None:
        """See RequestPorts."""
        self._gateway.placer.free(self._key(attempt))

    def emit(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """See RequestPorts."""
        self._listener.tokens(token_ids, logprobs)

    def finish(self, outcome: Outcome) -> None:
        """See RequestPorts."""
        if self._timer is not None:
            self._timer.cancel()
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

    def _on_time(self) -> None:
        self.machine.on_time(self._loop.time())

    def _key(self, attempt: int) -> Key:
        return self.machine.plan.request_id, attempt


class Gateway:
    """The requests of a frontend process.

    snapshot: the mesh's members as discovery knows them now. rng: makes span ids.
    """

    def __init__(
        self,
        placer: Placer,
        workers: Workers,
        snapshot: Callable[[], Snapshot],
        rng: Random | None = None,
    ) -> None:
        self.placer = placer
        self.workers = workers
        self.snapshot = snapshot
        self.rng = Random() if rng is None else rng
        self.retries = RetryBudget()
        self._loop = asyncio.get_running_loop()
        self._open: set[Ticket] = set()

    @property
    def open_requests(self) -> int:
        """Requests under way."""
        return len(self._open)

    def open(self, plan: Plan, query: Query, listener: Listener) -> Ticket:
        """Starts a request."""
        self.retries.request(self._loop.time())
        ticket = Ticket(self, plan, query, listener)
        self._open.add(ticket)
        ticket.machine.start()
        return ticket

    def pool(self, model: str) -> tuple[frozenset[int], frozenset[int]]:
        """Workers of a model, and those of them that this frontend saw fail and leaves alone."""
        pool = frozenset(i.id for i in self.snapshot().serving(model))
        return pool, self.workers.left_alone(pool)

    def closed(self, ticket: Ticket) -> None:
        """A ticket's request has ended."""
        self._open.discard(ticket)

    def cut(self, error: MeshError) -> list[str]:
        """Ends every request under way with `error`; their ids."""
        tickets = list(self._open)
        for ticket in tickets:
            ticket.fail(error, "drain")
        return [ticket.machine.plan.request_id for ticket in tickets]


def place_alone(
    snapshot: Snapshot, open_slots: dict[int, int], query: Query, rng: Random
) -> Placed | MeshError:
    """A placement without a router: power of two on our own requests in flight.

    Among aggregated workers; without one, among decode workers that can prefill by themselves.
    """
    workers = snapshot.serving(query.model)
    if not workers:
        return no_worker(query.model)
    if query.routing is not None:
        return Unavailable(
            "no router answers, and without one no request can be sent where it asks to run",
            1.0,
            reason="NO_ROUTER",
        )
    left = [w for w in workers if w.id not in query.excluded]
    fit = [w for w in left if w.role == "aggregated"]
    fit = fit or [w for w in left if w.role == "decode" and w.local_prefill]
    if not fit:
        return Unavailable(
            "no router answers, and without one only workers that need no other can be chosen",
            1.0,
            reason="NO_ROUTER",
        )
    pair: list[Instance] = rng.sample(fit, min(2, len(fit)))
    worker = min(pair, key=lambda w: open_slots.get(w.id, 0))
    return Placed(worker.id, worker.dp_rank_start, reasons=("unrouted: no router answers",))

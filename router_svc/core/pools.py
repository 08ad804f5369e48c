"""Samples of each pool, from the bookings of all routers and the load reports of workers (pure).

- prefill: time in which workers had booked prompts to compute, over all time; and the time that the
  booked prompts take, over DRAIN_S. Both from bookings, so an engine need not report its rate.
- itl: time over engine steps, between ticks at which the engine had requests: each of its requests
  gets a token a step.
- ttft: from booking to first token, of the requests whose frontends have their session here. What
  waits in the queue before counts as `queue_s`.

Canaries count neither there nor as requests in flight: they keep no pool awake.

A tick takes a few microseconds a rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from common.kv.load import Load
from common.registry.instances import Role
from common.request.placement import CANARY_ID_PREFIX, Placement
from common.scaling.pool import PoolSample
from router_svc.core.booking import Booking
from router_svc.core.candidate import Candidate
from router_svc.core.router import Router

# Backlog is to be computed in so many seconds: about the start of a worker.
DRAIN_S = 60.0
# First tokens of one model between two samples; further ones replace the oldest.
FIRST_TOKENS_MAX = 4096
# Above so many bookings those of canaries are not found: then few pools could sleep.
BOOKINGS_SEARCHED_MAX = 4096
_ROLES: tuple[Role, ...] = ("aggregated", "prefill", "decode")


class PoolKey(NamedTuple):
    """The workers of one model and role."""

    model: str
    role: Role


@dataclass(slots=True)
class _RankTick:
    """What a rank was at the last tick. steps_s, steps: since the last sample."""

    step: int
    is_running: bool
    at_s: float
    steps_s: float = 0.0
    steps: int = 0


@dataclass(slots=True)
class _Queue:
    """The queued requests of a model. tokens: of their prompts; oldest_s: age in seconds."""

    requests: int = 0
    tokens: int = 0
    oldest_s: float = 0.0


@dataclass(slots=True)
class _Sums:
    """Sums over the ranks of a pool."""

    ranks: int = 0
    busy_s: float = 0.0
    backlog_s: float = 0.0
    used_blocks: int = 0
    total_blocks: int = 0
    requests: int = 0
    seats: int = 0
    steps_s: float = 0.0
    steps: int = 0
    in_flight: int = 0
    workers: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)


class PoolObserver:
    """Observes the pools of a router. Call `tick` each second, and `samples` less often."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._ticks: dict[Placement, _RankTick] = {}
        self._busy_s: dict[Placement, float] = {}
        self._first_tokens: dict[str, deque[float]] = {}
        self._sampled_at: float | None = None
        router.events.first_token.subscribe(self._on_first_token)

    def tick(self, now: float) -> None:
        """Reads the steps of all engines."""
        ranks, ticks = self._router.load_tracker.ranks, dict[Placement, _RankTick]()
        for candidate in self._router.fleet.all_candidates():
            placement = candidate.placement
            load = ranks.last_report(placement, now)
            if load is None:
                continue
            tick = self._ticks.get(placement)
            ticks[placement] = _next_tick(tick, load, now)
        self._ticks = ticks

    def samples(self, now: float, awaiting: Mapping[str, int]) -> dict[PoolKey, PoolSample]:
        """Returns what happened since the call before; nothing at the first call.

        awaiting: requests without a worker, by model.
        """
        started_at, self._sampled_at = self._sampled_at, now
        elapsed_s = 0.0 if started_at is None else now - started_at
        ranks = self._router.load_tracker.ranks
        queues, busy_s, canaries = self._queues(now), dict[Placement, float](), self._canaries()
        found: dict[PoolKey, PoolSample] = {}
        for model in self._router.fleet.models:
            first_tokens = sorted(self._first_tokens.pop(model, ()))
            for role in _ROLES:
                candidates = self._router.fleet.candidates(model, role)
                if candidates:
                    queue = queues.get(model, _Queue())
                    sums = self._sum(candidates, now, busy_s)
                    sums.backlog_s += queue.tokens * ranks.prompt_token_s
                    sums.in_flight += queue.requests
                    sums.in_flight -= sum(canaries[c.placement] for c in candidates)
                    found[PoolKey(model, role)] = replace(
                        _sample(sums, elapsed_s, first_tokens),
                        queue_s=queue.oldest_s,
                        awaiting=awaiting.get(model, 0),
                    )
        self._busy_s = busy_s
        self._first_tokens.clear()
        return found if elapsed_s else {}

    def _sum(
        self, candidates: tuple[Candidate, ...], now: float, busy_s: dict[Placement, float]
    ) -> _Sums:
        """Adds up the ranks of a pool. busy_s: receives their busy seconds so far."""
        ranks, sums = self._router.load_tracker.ranks, _Sums()
        for candidate in candidates:
            placement, instance = candidate.placement, candidate.instance
            sums.ranks += 1
            sums.workers.add(placement.worker_id)
            busy_s[placement] = ranks.prompts_s(placement, now)
            before_s = self._busy_s.get(placement, busy_s[placement])
            sums.busy_s += max(0.0, busy_s[placement] - before_s)
            booked = ranks.load(placement, now)
            sums.backlog_s += booked.prefill_tokens * ranks.prompt_token_s
            sums.in_flight += booked.requests
            load = ranks.last_report(placement, now)
            if load is None:
                sums.silent.add(placement.worker_id)
                continue
            sums.requests += load.running + load.waiting
            sums.seats += instance.max_num_seqs or 0
            sums.used_blocks += load.kv_used_blocks if load.kv_total_blocks else 0
            sums.total_blocks += load.kv_total_blocks or 0
            if (tick := self._ticks.get(placement)) is not None:
                sums.steps_s += tick.steps_s
                sums.steps += tick.steps
                tick.steps_s, tick.steps = 0.0, 0
        return sums

    def _queues(self, now: float) -> dict[str, _Queue]:
        """Returns the queued requests by model. Background requests wait for idle capacity: they
        are no reason for more workers."""
        found: dict[str, _Queue] = {}
        for queued in self._router.queue:
            if queued.query.is_background:
                continue
            queue = found.get(queued.query.model)
            if queue is None:
                queue = found[queued.query.model] = _Queue(oldest_s=now - queued.queued_at)
            queue.requests += not queued.key.request_id.startswith(CANARY_ID_PREFIX)
            queue.tokens += queued.query.total_tokens
        return found

    def _canaries(self) -> Counter[Placement]:
        """Returns the canaries in flight by the ranks that have them."""
        tracker = self._router.load_tracker
        if len(tracker) > BOOKINGS_SEARCHED_MAX:
            return Counter()
        return Counter(
            placement
            for booking in tracker
            if booking.key.request_id.startswith(CANARY_ID_PREFIX)
            for placement in (booking.worker, booking.prefill)
            if placement is not None
        )

    def _on_first_token(self, booking: Booking, seconds: float) -> None:
        if booking.key.request_id.startswith(CANARY_ID_PREFIX):
            return
        known = self._first_tokens.get(booking.model)
        if known is None:
            known = self._first_tokens[booking.model] = deque(maxlen=FIRST_TOKENS_MAX)
        known.append(seconds)


def _next_tick(last: _RankTick | None, load: Load, now: float) -> _RankTick:
    is_running = load.running > 0
    if last is None or load.engine_step < last.step:
        return _RankTick(load.engine_step, is_running, now)
    tick = _RankTick(load.engine_step, is_running, now, last.steps_s, last.steps)
    if is_running and last.is_running:
        tick.steps_s += now - last.at_s
        tick.steps += load.engine_step - last.step
    return tick


def _sample(sums: _Sums, elapsed_s: float, first_tokens: list[float]) -> PoolSample:
    """Returns what the ranks of a pool did. first_tokens: sorted."""
    capacity_s = sums.ranks * elapsed_s
    busy = sums.busy_s / capacity_s if capacity_s else 0.0
    return PoolSample(
        present=len(sums.workers),
        reporting=len(sums.workers - sums.silent),
        prefill=busy + sums.backlog_s / (sums.ranks * DRAIN_S),
        kv=sums.used_blocks / sums.total_blocks if sums.total_blocks else 0.0,
        requests=sums.requests / sums.seats if sums.seats else 0.0,
        ttft_s=first_tokens[int(0.95 * (len(first_tokens) - 1))] if first_tokens else None,
        itl_s=sums.steps_s / sums.steps if sums.steps else None,
        in_flight=sums.in_flight,
    )

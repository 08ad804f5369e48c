"""The load of each worker rank: sums of bookings, and the worker's last report (pure).

Invariant (asserted): no sum is negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.kv.load import LOAD_MAX_AGE_S, Load
from common.request.placement import Placement
from router_svc.core.candidate import LoadTotals

# Weight of the last report in the mean time of a step.
STEP_SHARE = 0.3
# Block weights are integers in units of 1 / 2^16 blocks, so that sums stay exact.
_WEIGHT_BITS = 16
# Seconds of prefill in the measured rate of a rank, and seconds at the mean rate of all ranks
# that are added, so that a few short prompts do not make a rank fast or slow.
PACE_WINDOW_S = 30.0
PACE_PRIOR_S = 2.0
_HALF_WEIGHT = 1 << (_WEIGHT_BITS - 1)


def block_weight(blocks: int, decay: float) -> int:
    """`blocks` at the weight `decay`, 0..1, in units of 1 / 2^16 blocks."""
    weight = blocks << _WEIGHT_BITS
    return weight if decay == 1.0 else round(weight * decay)


@dataclass(slots=True)
class _LoadSums:
    prefill_tokens: int = 0
    block_weight: int = 0
    requests: int = 0

    def add(self, prefill_tokens: int, block_weight: int, requests: int) -> None:
        self.prefill_tokens += prefill_tokens
        self.block_weight += block_weight
        self.requests += requests
        assert self.prefill_tokens >= 0, "negative prefill tokens of a rank"
        assert self.block_weight >= 0, "negative decode blocks of a rank"
        assert self.requests >= 0, "negative requests of a rank"

    @property
    def decode_blocks(self) -> int:
        """The sum of fractional weights, rounded: as NVIDIA Dynamo documents it."""
        return (self.block_weight + _HALF_WEIGHT) >> _WEIGHT_BITS


@dataclass(slots=True)
class _PrefillPace:
    """How fast a rank computes prompts, from its bookings."""

    prompts: int = 0
    """Prompts that are booked and not computed yet."""

    since: float = 0.0
    """When the last prompt was computed, or the first of `prompts` was booked."""

    tokens: float = 0.0
    """Computed tokens; halved after each PACE_WINDOW_S."""

    busy_s: float = 0.0
    """Seconds with prompts to compute; halved after each PACE_WINDOW_S."""

    total_s: float = 0.0
    """The same, never halved."""


@dataclass(slots=True)
class _RankState:
    """What the tracker keeps about one rank."""

    booked: _LoadSums = field(default_factory=_LoadSums)
    pace: _PrefillPace = field(default_factory=_PrefillPace)
    since_report: _LoadSums = field(default_factory=_LoadSums)
    """Sums of the bookings made at the current `report_count`."""

    report: Load | None = None
    reported_at: float = 0.0
    step_s: float = 0.0
    """Smoothed seconds of an engine step; 0: unknown, or the engine is idle."""

    report_count: int = 0
    """Not a time, since a booking and a report may have the same `now`."""

    estimate: LoadTotals | None = None
    """The cached result of `RankLoads.load`, valid until `estimated_until` or the next change."""

    estimated_until: float = math.inf

    @property
    def is_empty(self) -> bool:
        return self.report is None and self.booked.requests == 0

    def compute_estimate(self, now: float) -> LoadTotals:
        """Returns the load; also sets until when it is valid without changes."""
        booked, since_report, report = self.booked, self.since_report, self.report
        expires_at = self.reported_at + LOAD_MAX_AGE_S
        if report is None or now > expires_at:
            self.estimated_until = math.inf
            return LoadTotals(booked.prefill_tokens, booked.decode_blocks, booked.requests)
        self.estimated_until = expires_at
        return LoadTotals(
            max(report.waiting_tokens + since_report.prefill_tokens, booked.prefill_tokens),
            max(report.kv_used_blocks + since_report.decode_blocks, booked.decode_blocks),
            max(report.running + report.waiting + since_report.requests, booked.requests),
        )


class RankLoads:
    """The load of every rank with bookings or reports. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._ranks: dict[Placement, _RankState] = {}
        # The latest `now` of any call.
        self._now = 0.0
        # Sums of the paces of all ranks, including ranks that left; halved like them.
        self._tokens = self._busy_s = 0.0

    def add(
        self, placement: Placement, report_count: int, tokens: int, weight: int, requests: int
    ) -> None:
        """Adds the load of a booking to a known rank; negative values subtract it. report_count:
        that of the rank at the booking; weight: see `block_weight`.
        """
        rank = self._ranks[placement]
        rank.estimate = None
        rank.booked.add(tokens, weight, requests)
        if tokens:
            self._count_prompt(rank.pace, 1 if tokens > 0 else -1)
        if report_count == rank.report_count:
            rank.since_report.add(tokens, weight, requests)

    def report_count(self, placement: Placement) -> int:
        """Reports so far, for a new booking; only later reports of the rank can include it."""
        return self._rank(placement).report_count

    def report(self, placement: Placement, load: Load, now: float) -> None:
        """Stores a worker's load report of one rank; it replaces the previous one."""
        self.set_time(now)
        rank = self._rank(placement)
        rank.step_s = _next_step_s(rank, load, now)
        rank.report = load
        rank.reported_at = now
        rank.report_count += 1
        rank.since_report = _LoadSums()
        rank.estimate = None

    def set_time(self, now: float) -> None:
        self._now = max(self._now, now)

    def prefill_done(self, placement: Placement, tokens: int) -> None:
        """Records that the rank computed a prompt of so many tokens, which were booked there."""
        if (rank := self._ranks.get(placement)) is not None:
            rank.pace.tokens += tokens
            self._tokens += tokens

    def prefill_work(
        self, placements: Iterable[Placement], now: float
    ) -> tuple[list[float], list[float]]:
        """Returns for each rank the prompt tokens that it has to compute, then for each its
        slowness: the time it takes for one, divided by the mean of all ranks. By its rate r in
        tokens per second:

            r = (tokens + PACE_PRIOR_S * R) / (busy_s + PACE_PRIOR_S)       R: of all ranks
            computed = min(r * seconds since the last prompt was computed, mean prompt)
            work = max(booked tokens - computed, last report + bookings newer than it)
            slowness = R / r, with the seconds since the last prompt in busy_s

        Optimized: a large part of a decision.
        """
        mean_rate = self._tokens / self._busy_s if self._busy_s else 0.0
        prior_tokens = PACE_PRIOR_S * mean_rate
        ranks, works, slownesses = self._ranks, list[float](), list[float]()
        for placement in placements:
            if (rank := ranks.get(placement)) is None:
                works.append(0.0)
                slownesses.append(1.0)
                continue
            pace, slowness = rank.pace, 1.0
            work = float(rank.booked.prefill_tokens)
            if mean_rate:
                tokens, busy_s = pace.tokens + prior_tokens, pace.busy_s + PACE_PRIOR_S
                if pace.prompts and (elapsed_s := now - pace.since) > 0:
                    computed, mean_prompt = elapsed_s * tokens / busy_s, work / pace.prompts
                    work -= computed if computed < mean_prompt else mean_prompt
                    busy_s += elapsed_s
                slowness = mean_rate * busy_s / tokens
            report = rank.report
            if report is not None and now <= rank.reported_at + LOAD_MAX_AGE_S:
                reported = report.waiting_tokens + rank.since_report.prefill_tokens
                if reported > work:
                    work = float(reported)
            works.append(work)
            slownesses.append(slowness)
        return works, slownesses

    def _count_prompt(self, pace: _PrefillPace, change: int) -> None:
        if pace.prompts:
            elapsed_s = self._now - pace.since
            if change < 0:
                pace.busy_s += elapsed_s
                pace.total_s += elapsed_s
                self._busy_s += elapsed_s
        if change < 0 or not pace.prompts:
            pace.since = self._now
        pace.prompts += change
        if pace.busy_s > PACE_WINDOW_S:
            pace.tokens, pace.busy_s = pace.tokens / 2, pace.busy_s / 2
            self._tokens, self._busy_s = self._tokens - pace.tokens, self._busy_s - pace.busy_s

    def prompts_s(self, placement: Placement, now: float) -> float:
        """Returns the seconds in which the rank has had prompts to compute, since it was first
        booked."""
        rank = self._ranks.get(placement)
        if rank is None:
            return 0.0
        pace = rank.pace
        return pace.total_s + (max(0.0, now - pace.since) if pace.prompts else 0.0)

    @property
    def prompt_token_s(self) -> float:
        """Mean seconds for a prompt token of all ranks; 0: none was computed yet."""
        return self._busy_s / self._tokens if self._tokens else 0.0

    def last_report(self, placement: Placement, now: float) -> Load | None:
        """Returns the last load report of the rank; None if it is too old to count."""
        rank = self._ranks.get(placement)
        if rank is None or rank.report is None or now > rank.reported_at + LOAD_MAX_AGE_S:
            return None
        return rank.report

    def itl_s(self, placement: Placement, now: float) -> float:
        """Returns the seconds between two tokens of a request of the rank: each gets a token an
        engine step. 0: unknown, or it runs no request."""
        rank = self._ranks.get(placement)
        if rank is None or rank.report is None or now > rank.reported_at + LOAD_MAX_AGE_S:
            return 0.0
        return rank.step_s

    @property
    def now(self) -> float:
        """The latest time of any call."""
        return self._now

    def drop_report(self, placement: Placement) -> None:
        """Forgets the report of a rank: no further one follows it."""
        if (rank := self._ranks.get(placement)) is not None:
            rank.report = rank.estimate = None
            self.discard_if_empty(placement)

    def worker_left(self, worker_id: int) -> None:
        for placement in [p for p in self._ranks if p.worker_id == worker_id]:
            self.drop_report(placement)

    def load(self, placement: Placement, now: float) -> LoadTotals:
        """Returns the estimate, per field: max(last report + bookings newer than it, bookings). A
        report has waiting tokens, KV blocks in use, requests running or waiting; one older than
        LOAD_MAX_AGE_S counts as 0.
        """
        rank = self._ranks.get(placement)
        if rank is None:
            return LoadTotals()
        estimate = rank.estimate
        if estimate is None or now > rank.estimated_until:
            estimate = rank.estimate = rank.compute_estimate(now)
        return estimate

    def reported_at(self, placement: Placement) -> float | None:
        """Returns the time of the rank's last report; None: no report."""
        rank = self._ranks.get(placement)
        return None if rank is None or rank.report is None else rank.reported_at

    def report_age_s(self, placement: Placement, now: float) -> float | None:
        """Returns the seconds since the rank's last report; None: no report."""
        reported_at = self.reported_at(placement)
        return None if reported_at is None else now - reported_at

    def stale_report_count(self, now: float) -> int:
        """Returns the number of ranks with a last report that is too old to count. Any thread
        may call it."""
        return sum(
            rank.report is not None and now - rank.reported_at > LOAD_MAX_AGE_S
            for rank in list(self._ranks.values())
        )

    def discard_if_empty(self, placement: Placement | None) -> None:
        """Deletes the state of an unused rank, so that memory does not grow with churn."""
        if placement is not None and (rank := self._ranks.get(placement)) and rank.is_empty:
            del self._ranks[placement]

    def __len__(self) -> int:
        return len(self._ranks)

    def _rank(self, placement: Placement) -> _RankState:
        rank = self._ranks.get(placement)
        if rank is None:
            rank = self._ranks[placement] = _RankState()
        return rank


def _next_step_s(rank: _RankState, load: Load, now: float) -> float:
    """Returns the smoothed time of a step after a report; 0 if the rank runs nothing."""
    last = rank.report
    if not load.running:
        return 0.0
    if last is None or not last.running:
        return rank.step_s
    steps = load.engine_step - last.engine_step
    if steps <= 0:
        return rank.step_s
    step_s = (now - rank.reported_at) / steps
    return rank.step_s + STEP_SHARE * (step_s - rank.step_s) if rank.step_s else step_s

"""The load of each worker rank: sums of bookings, and the worker's last report (pure).

Invariant (asserted): no sum is negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common.kv.load import LOAD_MAX_AGE_S, Load
from router_svc.core.types import LoadTotals, Placement

# Block weights are integers in units of 1 / 2^16 blocks, so that sums stay exact.
_WEIGHT_BITS = 16
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
class _RankState:
    """since_report: sums of the bookings made at the current `report_count` (a counter: a booking
    and a report may have the same `now`). estimate: the cached result of `RankLoads.load`, valid
    until `estimated_until` or the next change.
    """

    booked: _LoadSums = field(default_factory=_LoadSums)
    since_report: _LoadSums = field(default_factory=_LoadSums)
    report: Load | None = None
    reported_at: float = 0.0
    report_count: int = 0
    estimate: LoadTotals | None = None
    estimated_until: float = math.inf

    @property
    def is_empty(self) -> bool:
        return self.report is None and self.booked.requests == 0

    def compute_estimate(self, now: float) -> LoadTotals:
        """The load; also sets until when it is valid without changes."""
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

    def add(
        self, placement: Placement, report_count: int, tokens: int, weight: int, requests: int
    ) -> None:
        """Add the load of a booking to a known rank; negative values subtract it. report_count:
        that of the rank at the booking; weight: see `block_weight`.
        """
        rank = self._ranks[placement]
        rank.estimate = None
        rank.booked.add(tokens, weight, requests)
        if report_count == rank.report_count:
            rank.since_report.add(tokens, weight, requests)

    def report_count(self, placement: Placement) -> int:
        """Reports so far, for a new booking; only later reports of the rank can include it."""
        return self._rank(placement).report_count

    def report(self, placement: Placement, load: Load, now: float) -> None:
        """Store a worker's load report of one rank; it replaces the previous one."""
        rank = self._rank(placement)
        rank.report = load
        rank.reported_at = now
        rank.report_count += 1
        rank.since_report = _LoadSums()
        rank.estimate = None

    def drop_report(self, placement: Placement) -> None:
        """Forget the report of a rank: no further one follows it."""
        if (rank := self._ranks.get(placement)) is not None:
            rank.report = rank.estimate = None
            self.discard_if_empty(placement)

    def worker_left(self, worker_id: int) -> None:
        for placement in [p for p in self._ranks if p.worker_id == worker_id]:
            self.drop_report(placement)

    def load(self, placement: Placement, now: float) -> LoadTotals:
        """The estimate, per field: max(last report + bookings newer than it, bookings). A report
        has waiting tokens, KV blocks in use, requests running or waiting; one older than
        LOAD_MAX_AGE_S counts as 0.
        """
        rank = self._ranks.get(placement)
        if rank is None:
            return LoadTotals()
        estimate = rank.estimate
        if estimate is None or now > rank.estimated_until:
            estimate = rank.estimate = rank.compute_estimate(now)
        return estimate

    def report_age_s(self, placement: Placement, now: float) -> float | None:
        """Seconds since the rank's last report; None: no report."""
        rank = self._ranks.get(placement)
        return None if rank is None or rank.report is None else now - rank.reported_at

    def stale_report_count(self, now: float) -> int:
        """Ranks with a last report that is too old to count. Any thread may call this."""
        return sum(
            rank.report is not None and now - rank.reported_at > LOAD_MAX_AGE_S
            for rank in list(self._ranks.values())
        )

    def discard_if_empty(self, placement: Placement | None) -> None:
        """Delete the state of an unused rank, so that memory does not grow with churn."""
        if placement is not None and (rank := self._ranks.get(placement)) and rank.is_empty:
            del self._ranks[placement]

    def __len__(self) -> int:
        return len(self._ranks)

    def _rank(self, placement: Placement) -> _RankState:
        rank = self._ranks.get(placement)
        if rank is None:
            rank = self._ranks[placement] = _RankState()
        return rank

"""From samples of a pool to the recommended number of its workers (pure).

A step up needs a need that lasts for `up_window_s`. A step down is the consolidation check: one
worker fewer, if all work of `down_window_s` leaves room at N - 1 workers, and neither latency would
exceed its target there. After it the worker comes back for late tokens and full workers only, for a
while. A pool without complete data keeps its count.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from common.registry.instances import Role
from common.scaling.history import WorkHistory
from common.scaling.need import NEEDS, Need, can_lose_one
from common.scaling.pool import Advice, PoolSample, Reason, ScalingSettings

# Share of N - 1 workers that the work may fill when a worker leaves. Less than 1, so that the work
# that brought a worker is not the work at which it leaves.
CONSOLIDATION_SHARE = 0.9
# Of the down window, after a step down: the time in which work is no reason for a step up while
# tokens are in time. A burst for which the others have room does not bring the worker back.
SETTLING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class _Want:
    """Workers that a sample needs."""

    at_s: float
    replicas: int
    reason: Reason


class PoolScaler:
    """The recommendation for one pool. Call `advise` once for each sample."""

    def __init__(self, role: Role, settings: ScalingSettings) -> None:
        self._need = NEEDS[role]
        self._settings = settings
        self._history = WorkHistory(settings.down_window_s)
        self._wants: deque[_Want] = deque()
        self._count: int | None = None
        self._present = 0
        # Since when data is complete, the count has not risen, and there is no request.
        self._known_since: float | None = None
        self._raised_at = -math.inf
        self._lowered_at = -math.inf
        self._idle_since: float | None = None

    def advise(self, sample: PoolSample, now: float) -> Advice:
        """Returns the recommendation. now: seconds of one clock, later than before."""
        settings = self._settings
        if self._count is None:
            self._count = sample.present
        elif sample.present > max(self._count, self._present):
            # Started by others: the count follows, and falls after the window if it is too great.
            self._count, self._raised_at = sample.present, now
        self._present = sample.present
        count, reason = self._decide(sample, self._count, now)
        floor = max(settings.floor, 1 if count else 0)
        if count < floor:
            count, reason = floor, Reason.FLOOR
        if count > settings.ceiling:
            count, reason = settings.ceiling, Reason.CEILING
        if count > self._count:
            self._raised_at = now
        elif count < self._count:
            self._lowered_at = now
        self._count = count
        return Advice(count, reason)

    def _decide(self, sample: PoolSample, count: int, now: float) -> tuple[int, Reason]:
        is_idle = self._is_idle(sample, now)
        if sample.present == 0:
            return self._without_workers(sample, count, is_idle)
        if sample.reporting == 0:
            self._known_since = None
            self._wants.clear()
            return count, Reason.MISSING_DATA
        need = self._need(sample, self._settings)
        self._history.add(now, need.work)
        if is_idle:
            return 0, Reason.ASLEEP
        if sample.reporting < sample.present:
            self._known_since = None
        elif self._known_since is None:
            self._known_since = now
        raised, reason = self._lasting(self._want(sample, need, count, now), now)
        if raised > count:
            return raised, reason
        if self._known_since is None:
            return count, Reason.MISSING_DATA
        return self._consolidate(sample, count, now)

    def _without_workers(self, sample: PoolSample, count: int, is_idle: bool) -> tuple[int, Reason]:
        self._known_since = None
        self._wants.clear()
        if sample.awaiting:
            return max(1, count), Reason.WAKE
        if is_idle or not count:
            return 0, Reason.ASLEEP
        return count, Reason.PENDING

    def _is_idle(self, sample: PoolSample, now: float) -> bool:
        """Returns whether the pool may sleep. Without reports its requests are unknown. A request
        that began and ended between two samples had a first token."""
        is_unknown = sample.reporting < sample.present
        is_used = sample.in_flight or sample.awaiting or sample.ttft_s is not None
        if is_used or is_unknown:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
        settings = self._settings
        return settings.floor == 0 and now - self._idle_since >= settings.sleep_after_s

    def _want(self, sample: PoolSample, need: Need, count: int, now: float) -> _Want:
        """Returns the greatest of all needs, with the reason of the first that exceeds the
        count."""
        settings, work = self._settings, math.ceil(self._history.smoothed)
        is_pending = sample.present < count and now - self._raised_at < settings.pending_s
        if now - self._lowered_at < SETTLING_SHARE * settings.down_window_s and not need.is_full:
            work = min(work, count)
        needs = (
            (work, need.work_reason),
            (0 if is_pending else need.late, need.late_reason),
        )
        reason = next((reason for replicas, reason in needs if replicas > count), Reason.STEADY)
        return _Want(now, max(replicas for replicas, _ in needs), reason)

    def _lasting(self, want: _Want, now: float) -> tuple[int, Reason]:
        """Returns what was needed at least, all the time of the window; 0 before it is full."""
        wants, start = self._wants, now - self._settings.up_window_s
        wants.append(want)
        while len(wants) > 1 and wants[1].at_s <= start:
            wants.popleft()
        if wants[0].at_s > start:
            return 0, Reason.STEADY
        least = min(wants, key=lambda one: one.replicas)
        return least.replicas, least.reason

    def _consolidate(self, sample: PoolSample, count: int, now: float) -> tuple[int, Reason]:
        """Returns the count, or one less."""
        settings, history = self._settings, self._history
        if sample.present < count and now - self._raised_at < settings.pending_s:
            return count, Reason.PENDING
        room = (count - 1) * CONSOLIDATION_SHARE
        if count <= max(1, settings.floor) or history.smoothed > room:
            return count, Reason.STEADY
        if not can_lose_one(sample, settings):
            return count, Reason.STEADY
        known_s = 0.0 if self._known_since is None else now - self._known_since
        is_settled = (
            sample.present <= count
            and now - self._raised_at >= settings.down_window_s
            and now - self._lowered_at >= settings.up_window_s
        )
        if history.peak > room or known_s < settings.down_window_s or not is_settled:
            return count, Reason.DOWN_WINDOW
        return count - 1, Reason.CONSOLIDATED

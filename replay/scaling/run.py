"""A day under a rule: minutes that keep the target, flaps, worker hours (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.scaling.pool import ScalingSettings
from replay.engine import WorkerSettings
from replay.scaling.pool import ElasticPool, percentile
from replay.scaling.rules import Rule, Traffic
from replay.trace import TraceRequest

SAMPLE_S = 15.0
# Backlog is to be computed in so many seconds.
DRAIN_S = 60.0
# A count that returns within this time has flapped.
FLAP_S = 900.0


@dataclass(frozen=True, slots=True)
class DaySettings:
    """A pool and what it is to keep."""

    worker: WorkerSettings
    scaling: ScalingSettings
    start_s: float = 60.0
    """Seconds until a worker that was asked for serves."""

    workers: int = 2
    """At the beginning."""


@dataclass(frozen=True, slots=True)
class Minute:
    """One minute. ttft_s: 95th percentile of the requests that arrived in it; None: none did."""

    requests: int
    replicas: int
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class DayResult:
    """The course of a day."""

    minutes: list[Minute]
    changes: list[tuple[float, int]]
    """Each change of the count: time in seconds and the count after it."""

    worker_s: float
    duration_s: float

    @property
    def flaps(self) -> int:
        """Number of changes that were undone within FLAP_S: up and down, or down and up."""
        steps = list(zip(self.changes, self.changes[1:], self.changes[2:], strict=False))
        return sum(
            (second[1] > first[1]) != (third[1] > second[1]) and third[0] - second[0] < FLAP_S
            for first, second, third in steps
        )

    def kept(self, target_s: float) -> float:
        """Returns the share of the minutes with requests that keep a TTFT."""
        busy = [minute.ttft_s for minute in self.minutes if minute.ttft_s is not None]
        return sum(ttft_s <= target_s for ttft_s in busy) / len(busy) if busy else 1.0

    @property
    def peak(self) -> int:
        return max(count for _, count in self.changes)

    @property
    def share_of_peak(self) -> float:
        """Worker hours against those of the greatest count all day."""
        return self.worker_s / (self.peak * self.duration_s)


class _Day:
    """Gathers what arrives between two samples, and minute by minute."""

    def __init__(self, settings: DaySettings, rule: Rule) -> None:
        self._settings = settings
        self._rule = rule
        self.pool = ElasticPool(settings.worker, settings.workers, settings.start_s)
        self.changes = [(0.0, settings.workers)]
        self.minutes: list[Minute] = []
        self._requests = self._input_tokens = self._output_tokens = 0
        self._ttfts: list[float] = []
        self._sample_at, self._minute_at = SAMPLE_S, 60.0

    def pass_time(self, until: float) -> None:
        while min(self._sample_at, self._minute_at) <= until:
            if self._sample_at <= self._minute_at:
                self._sample(self._sample_at)
                self._sample_at += SAMPLE_S
            else:
                ttft_s = percentile(self._ttfts, 0.95)
                self.minutes.append(Minute(len(self._ttfts), self.pool.target, ttft_s))
                self._ttfts = []
                self._minute_at += 60.0

    def serve(self, request: TraceRequest) -> None:
        self._requests += 1
        self._input_tokens += request.input_tokens
        self._output_tokens += request.output_tokens
        self._ttfts.append(self.pool.serve(request).ttft_s)

    def _sample(self, now: float) -> None:
        sample = self.pool.sample(now, SAMPLE_S, DRAIN_S)
        traffic = Traffic(self._requests, self._input_tokens, self._output_tokens, SAMPLE_S)
        self._requests = self._input_tokens = self._output_tokens = 0
        replicas = self._rule.choose(sample, traffic, now)
        if replicas != self.changes[-1][1]:
            self.changes.append((now, replicas))
            self.pool.scale(replicas, now)


def run_day(requests: Iterable[TraceRequest], settings: DaySettings, rule: Rule) -> DayResult:
    """Returns the course of all requests, to the minute after the last one."""
    day, end_s = _Day(settings, rule), 0.0
    for request in requests:
        day.pass_time(request.at_s)
        day.serve(request)
        end_s = request.at_s
    end_s = 60.0 * (end_s // 60.0 + 1)
    day.pass_time(end_s)
    return DayResult(day.minutes, day.changes, day.pool.worker_s, end_s)

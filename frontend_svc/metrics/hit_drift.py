"""Measures how well the router predicts cache hits (pure).

Each placement predicts how many prompt tokens the worker has cached; the engine reports the actual
number. If KV events are lost, hashed differently or not published, no request fails: requests only
become slow. The monitor therefore compares the two, per source, over a window:

    drift = sum |predicted - actual| / sum max(predicted, actual)

over the requests that ended in the window: 0 if every prediction was right (also if nothing was
predicted and nothing found), 1 if none was. Some drift is normal: two requests with a common prefix
that arrive together are both placed before either is computed.

Invariants: a window is WINDOW_S / 2 to WINDOW_S long; a source with few requests is not degraded; a
source is reported at most once per window; sources of workers that left are removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WINDOW_S = 60.0
# Fewer requests in a window are no evidence: for example a burst with a common prefix.
REQUESTS_MIN = 20

# (worker id, dp rank)
Source = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DriftStats:
    """Predictions and results of one source."""

    source: Source

    predicted: int
    """Predicted cached tokens since the first request."""

    actual: int
    """Actual cached tokens since the first request."""

    requests: int
    """Requests since the first one."""

    ratio: float
    """Drift of the window."""

    is_degraded: bool
    """Whether the drift is above the limit, with at least REQUESTS_MIN requests."""


@dataclass(slots=True)
class _SourceCounters:
    began_at: float
    predicted: int = 0
    actual: int = 0
    requests: int = 0
    # Of the previous half window and of the current one: requests, wrong tokens, compared tokens.
    previous: tuple[int, int, int] = (0, 0, 0)
    current: tuple[int, int, int] = (0, 0, 0)
    reported_at: float = float("-inf")

    def advance_window(self, now: float) -> None:
        half = WINDOW_S / 2
        elapsed = now - self.began_at
        if elapsed >= half:
            self.previous = self.current if elapsed < 2 * half else (0, 0, 0)
            self.current = (0, 0, 0)
            self.began_at = now - elapsed % half


class HitDriftMonitor:
    """The sources of one frontend. ratio_max: drift above it degrades a source, 0..1."""

    def __init__(self, ratio_max: float) -> None:
        self._ratio_max = ratio_max
        self._counters: dict[Source, _SourceCounters] = {}

    def observe(self, source: Source, predicted: int, actual: int, now: float) -> DriftStats | None:
        """Records the end of a request; statistics once per window if the source is degraded."""
        counters = self._counters.get(source)
        if counters is None:
            counters = self._counters[source] = _SourceCounters(now)
        counters.advance_window(now)
        counters.predicted += predicted
        counters.actual += actual
        counters.requests += 1
        requests, wrong, compared = counters.current
        compared += max(predicted, actual)
        counters.current = (requests + 1, wrong + abs(predicted - actual), compared)
        if now - counters.reported_at < WINDOW_S:
            return None
        stats = self._drift_stats(source, counters)
        if not stats.is_degraded:
            return None
        counters.reported_at = now
        return stats

    def drift_stats(self, now: float) -> list[DriftStats]:
        found = []
        for source, counters in self._counters.items():
            counters.advance_window(now)
            found.append(self._drift_stats(source, counters))
        return found

    def retain(self, present: Iterable[int]) -> None:
        present = set(present)
        for source in [s for s in self._counters if s[0] not in present]:
            del self._counters[source]

    def _drift_stats(self, source: Source, counters: _SourceCounters) -> DriftStats:
        requests, wrong, compared = map(sum, zip(counters.previous, counters.current, strict=True))
        ratio = wrong / compared if compared else 0.0
        return DriftStats(
            source=source,
            predicted=counters.predicted,
            actual=counters.actual,
            requests=counters.requests,
            ratio=ratio,
            is_degraded=requests >= REQUESTS_MIN and ratio > self._ratio_max,
        )

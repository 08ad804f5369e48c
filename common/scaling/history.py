"""What a pool needed lately (pure). Memory is bounded by time."""

from __future__ import annotations

from collections import deque

# Work is averaged over this time: a few long prompts are no reason for a worker.
SMOOTHING_S = 120.0


class WorkHistory:
    """Samples of the work of one pool, in workers."""

    def __init__(self, window_s: float) -> None:
        """Begins without samples. window_s: of `peak`."""
        self._window_s = window_s
        self._recent: deque[tuple[float, float]] = deque()
        # Smoothed work in falling order, each the greatest of those after it.
        self._peaks: deque[tuple[float, float]] = deque()

    def add(self, now: float, work: float) -> None:
        """Adds the work since the last sample."""
        self._recent.append((now, work))
        _drop_until(self._recent, now - SMOOTHING_S)
        smoothed = self.smoothed
        while self._peaks and self._peaks[-1][1] <= smoothed:
            self._peaks.pop()
        self._peaks.append((now, smoothed))
        _drop_until(self._peaks, now - self._window_s)

    @property
    def smoothed(self) -> float:
        """Mean work of the last SMOOTHING_S."""
        recent = self._recent
        return sum(work for _, work in recent) / len(recent) if recent else 0.0

    @property
    def peak(self) -> float:
        """Greatest smoothed work in the window."""
        return self._peaks[0][1] if self._peaks else 0.0


def _drop_until(samples: deque[tuple[float, float]], at_s: float) -> None:
    while samples and samples[0][0] <= at_s:
        samples.popleft()

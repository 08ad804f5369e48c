"""Delays between attempts that fail in a row. Pure.

The n-th delay in a row, from 0, is

    min(longest_s, first_s * 2**n) * u,  u uniform in [jitter[0], jitter[1])

Jitter desynchronizes processes that lost the same peer at the same moment.
"""

from __future__ import annotations

from random import Random

# Factors of a delay: half to one and a half times.
HALF: tuple[float, float] = (0.5, 1.5)
# Bounds the power: 2**32 times any first delay exceeds every longest one.
_DOUBLINGS_MAX = 32


class Backoff:
    """The delays of one repeated attempt."""

    failures: int
    """Delays since the last reset: 0 before the first failure."""

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        rng: Random | None,
        *,
        jitter: tuple[float, float] = HALF,
    ) -> None:
        """Creates it without a failure.

        first_s: the first delay in a row; equal to `longest_s` if delays do not grow.
        longest_s: limit of a delay, before its jitter.
        rng: draws the jitter. None: delays are exact.
        jitter: least and greatest factor of a delay.
        """
        self.failures = 0
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng
        self._jitter = jitter

    def next_s(self) -> float:
        """Counts a failure. Returns the seconds until the next attempt."""
        doublings = min(self.failures, _DOUBLINGS_MAX)
        self.failures += 1
        delay_s = min(self._longest_s, self._first_s * 2.0**doublings)
        return delay_s if self._rng is None else delay_s * self._rng.uniform(*self._jitter)

    def reset(self) -> None:
        """Records a success: the next delay is a first one."""
        self.failures = 0

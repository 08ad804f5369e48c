"""When a service that ended is started again, and when it is given up (pure).

The n-th pause in a row is `min(max_pause_s, initial_pause_s * 2**n) * (1 - JITTER * u)`, u uniform
in [0, 1):
jitter only shortens, so that `max_pause_s` is a limit, and services that died together of one
cause do
not return in step.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

JITTER = 0.2
# 2**32 pauses of any length are past every limit; beyond it the power would only grow.
_DOUBLINGS_MAX = 32


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """first_s: the first pause. limit_s: the longest. healthy_s: a service that was ready this long
    starts again from the first pause. tries_max: starts of a service that was never ready yet.
    """

    initial_pause_s: float = 0.2
    max_pause_s: float = 10.0
    reset_after_s: float = 30.0
    attempts_max: int = 5


class Backoff:
    """The failures of one service. All times are seconds of one monotonic clock.

    A service is given up only if it was never ready: what has run once, and fails now, is tried for
    ever, since the mesh around it may still be serving.

    Invariants: a pause lies in ((1 - JITTER) * first_s, limit_s]; pauses in a row do not shorten
    but for jitter.
    """

    def __init__(self, policy: BackoffPolicy, rng: Random) -> None:
        self._policy = policy
        self._rng = rng
        self._failures = 0
        self._ready_at: float | None = None
        self._was_ready = False

    @property
    def failures(self) -> int:
        """Ends in a row with no healthy time between them."""
        return self._failures

    def ready(self, now: float) -> None:
        """The service, started last, is ready."""
        self._ready_at = now
        self._was_ready = True

    def ended(self, now: float, *, is_retryable: bool = True) -> float | None:
        """The service ended: the pause in seconds before its next start; None: give it up.

        can_heal: whether another start may go better.
        """
        policy = self._policy
        ready_at, self._ready_at = self._ready_at, None
        if ready_at is not None and now - ready_at >= policy.reset_after_s:
            self._failures = 0
        doublings = min(self._failures, _DOUBLINGS_MAX)
        self._failures += 1
        attempts_max = policy.attempts_max if is_retryable else 1
        if not self._was_ready and self._failures >= attempts_max:
            return None
        pause_s = min(policy.max_pause_s, policy.initial_pause_s * 2.0**doublings)
        return pause_s * (1 - JITTER * self._rng.random())

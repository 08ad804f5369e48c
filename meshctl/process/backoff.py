"""Restart delays of a service, and when restarts end (pure).

The n-th pause in a row is `min(max_pause_s, initial_pause_s * 2**n) * (1 - JITTER * u)`, with u
uniform in [0, 1). Jitter only shortens, so `max_pause_s` is a limit; it desynchronizes services
that died of one cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

JITTER = 0.2
# Bounds the power; 2**32 times any pause exceeds every limit.
_DOUBLINGS_MAX = 32


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """Settings of the restart delays.

    reset_after_s: a service that was ready this long restarts with the first pause.
    attempts_max: starts of a service that was never ready.
    """

    initial_pause_s: float = 0.2
    max_pause_s: float = 10.0
    reset_after_s: float = 30.0
    attempts_max: int = 5


class Backoff:
    """The failures of one service. All times are seconds of one monotonic clock.

    Restarts end only for a service that was never ready: the rest of the mesh may still serve.
    failures: consecutive exits without `reset_after_s` of readiness between them.

    Invariant: a pause is in ((1 - JITTER) * initial_pause_s, max_pause_s].
    """

    def __init__(self, policy: BackoffPolicy, rng: Random) -> None:
        self._policy = policy
        self._rng = rng
        self.failures = 0
        self._ready_at: float | None = None
        self._was_ready = False

    def ready(self, now: float) -> None:
        self._ready_at = now
        self._was_ready = True

    def ended(self, now: float, *, is_retryable: bool = True) -> float | None:
        """The service exited: seconds until its next start; None: no more restarts.

        is_retryable: whether another start can succeed.
        """
        policy = self._policy
        ready_at, self._ready_at = self._ready_at, None
        if ready_at is not None and now - ready_at >= policy.reset_after_s:
            self.failures = 0
        doublings = min(self.failures, _DOUBLINGS_MAX)
        self.failures += 1
        attempts_max = policy.attempts_max if is_retryable else 1
        if not self._was_ready and self.failures >= attempts_max:
            return None
        pause_s = min(policy.max_pause_s, policy.initial_pause_s * 2.0**doublings)
        return pause_s * (1 - JITTER * self._rng.random())

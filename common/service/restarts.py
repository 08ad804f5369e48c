"""When a process that ended starts again (pure).

Pauses grow from the first to the longest while the process ends again and again, and are first ones
after it was ready for a while. Jitter only shortens, so the longest pause is a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from common.streams.backoff import Backoff

# The largest part by which jitter shortens a pause.
JITTER = 0.2


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Settings of the restarts of a process."""

    initial_pause_s: float = 0.2
    max_pause_s: float = 10.0
    reset_after_s: float = 30.0
    """A process that was ready this long restarts with the first pause."""
    attempts_max: int = 5
    """Starts of a process that was never ready."""


class Restarts:
    """The ends of one process. All times are seconds of one monotonic clock."""

    def __init__(self, policy: RestartPolicy, rng: Random | None) -> None:
        """Creates it for a process that has not ended.

        rng: draws the jitter. None: pauses are exact.
        """
        self._policy = policy
        self._backoff = Backoff(
            policy.initial_pause_s, policy.max_pause_s, rng, jitter=(1 - JITTER, 1.0)
        )
        self._ready_at: float | None = None
        self._was_ready = False

    @property
    def failures(self) -> int:
        """Ends in a row without `reset_after_s` of readiness between them."""
        return self._backoff.failures

    def ready(self, now: float) -> None:
        """Records that the process is ready."""
        self._ready_at = now
        self._was_ready = True

    def ended(self, now: float) -> float:
        """Records that the process ended. Returns the seconds until its next start."""
        ready_at, self._ready_at = self._ready_at, None
        if ready_at is not None and now - ready_at >= self._policy.reset_after_s:
            self._backoff.reset()
        return self._backoff.next_s()

    def is_exhausted(self, *, is_retryable: bool = True) -> bool:
        """Returns whether the process that ended must not start again: it was never ready.

        is_retryable: whether another start can succeed.
        """
        attempts_max = self._policy.attempts_max if is_retryable else 1
        return not self._was_ready and self.failures >= attempts_max

"""Distinguishes a hung engine from a busy one (pure)."""

from __future__ import annotations


class HangDetector:
    """Reports a hang if `engine_step` does not change for `hung_after_s` while requests run. A
    waiting request is no evidence of a hang, and neither is an idle engine."""

    def __init__(self, hung_after_s: float) -> None:
        self._hung_after_s = hung_after_s
        self._step = -1
        self._last_step_at: float | None = None

    def received(self, engine_step: int, running: int, now: float) -> bool:
        """Records a heartbeat; whether the engine is hung."""
        if running == 0:
            self._last_step_at = None  # the next request has the whole time
            return False
        if engine_step != self._step or self._last_step_at is None:
            self._step = engine_step
            self._last_step_at = now
            return False
        return now - self._last_step_at >= self._hung_after_s

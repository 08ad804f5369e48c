"""Detects a hung engine by the heartbeats of its ranks (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from common.kv.load import Load
from frontend_svc.core.peers.hang_detector import HangDetector

# How long an engine may make no step with work before its requests go elsewhere.
HANG_TIMEOUT_S = 2.0
# A heartbeat that a busy frontend reads late shortens the interval to the next one. Without this
# tolerance the verdict would wait for one more heartbeat, a second.
HEARTBEAT_JITTER_S = 0.2


class EngineProgress(IntEnum):
    """What heartbeats show of an engine, least urgent first."""

    UNKNOWN = 0
    STEPPED = 1
    # No step while all requests wait; correct while they wait for KV from prefill.
    STALLED = 2
    # No step while requests run.
    HUNG = 3


class _RankWatch:
    def __init__(self) -> None:
        self._running_detector = HangDetector(HANG_TIMEOUT_S - HEARTBEAT_JITTER_S)
        self._waiting_detector = HangDetector(HANG_TIMEOUT_S - HEARTBEAT_JITTER_S)
        self._last_step: int | None = None

    def received(self, load: Load, now: float) -> EngineProgress:
        is_hung = self._running_detector.received(load.engine_step, load.running, now)
        waiting_while_idle = 0 if load.running else load.waiting
        is_stalled = self._waiting_detector.received(load.engine_step, waiting_while_idle, now)
        # An idle engine makes no step, and may still hang.
        has_stepped = self._last_step is not None and load.engine_step != self._last_step
        self._last_step = load.engine_step
        if is_hung:
            return EngineProgress.HUNG
        if is_stalled:
            return EngineProgress.STALLED
        return EngineProgress.STEPPED if has_stepped else EngineProgress.UNKNOWN


class EngineWatch:
    """Watches all ranks of one worker."""

    def __init__(self) -> None:
        self._ranks: dict[int, _RankWatch] = {}

    def received(self, loads: Sequence[Load], now: float) -> EngineProgress:
        """A heartbeat came; returns the most urgent progress of its ranks. now: loop time without
        stalls, seconds."""
        return max(
            (
                self._ranks.setdefault(load.dp_rank, _RankWatch()).received(load, now)
                for load in loads
            ),
            default=EngineProgress.UNKNOWN,
        )

"""Detects a hung engine by the heartbeats of its ranks (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from common.kv.load import Load

# The step limit of a worker that reports none.
DEFAULT_STEP_LIMIT_S = 2.0
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


def step_limit_s(loads: Sequence[Load]) -> float:
    """Returns how long an engine may make no step with work before its requests go elsewhere."""
    limit_ms = max((load.step_limit_ms for load in loads), default=0)
    return limit_ms / 1000 or DEFAULT_STEP_LIMIT_S


class _RankWatch:
    """A rank is late if it makes no step for its limit while its work is of one kind."""

    def __init__(self) -> None:
        self._last_step: int | None = None
        # What the rank has come to once `_since` is a step limit ago.
        self._without_step = EngineProgress.UNKNOWN
        self._since = 0.0

    def received(self, load: Load, now: float) -> EngineProgress:
        without_step = EngineProgress.UNKNOWN
        if load.running:
            without_step = EngineProgress.HUNG
        elif load.waiting:
            without_step = EngineProgress.STALLED
        last_step, self._last_step = self._last_step, load.engine_step
        if load.engine_step != last_step or without_step is not self._without_step:
            self._without_step, self._since = without_step, now
        if last_step is not None and load.engine_step != last_step:
            return EngineProgress.STEPPED
        is_late = now - self._since >= step_limit_s((load,)) - HEARTBEAT_JITTER_S
        return without_step if is_late else EngineProgress.UNKNOWN


class EngineWatch:
    """Watches all ranks of one worker."""

    def __init__(self) -> None:
        self._ranks: dict[int, _RankWatch] = {}

    def received(self, loads: Sequence[Load], now: float) -> EngineProgress:
        """Records a heartbeat; returns the most urgent progress of its ranks.

        now: loop time without stalls, seconds.
        """
        return max(
            (
                self._ranks.setdefault(load.dp_rank, _RankWatch()).received(load, now)
                for load in loads
            ),
            default=EngineProgress.UNKNOWN,
        )

"""The longest plausible duration of an engine's step, measured from the steps so far. Pure.

    expected_s = base_s + token_s * tokens * max(1, longest / measured_tokens)
    limit_s = min(max(FACTOR * expected_s, min_s), max_s)

tokens: prompt tokens that the step in progress can compute; longest: those of the longest prompt.
token_s: seconds per prompt token in steps with many of them. measured_tokens: the most tokens of a
step so far; attention makes longer prompts more than proportionally slow. base_s: the rest of a
step. Both are the largest recent values: they halve with every HALF_LIFE_S of steps that measure
them. Without a measured step (graph capture, compilation) the limit is max_s.

A rank is observed about every TICK_S, so durations are multiples of it, and several fast steps
count as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.kv.load import Load

TICK_S = 0.1
FACTOR = 3.0
HALF_LIFE_S = 30.0
# A longer time between two observations is a pause of this process and no step.
OBSERVATION_GAP_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class StepLimitSettings:
    """min_s, max_s: bounds of the limit in seconds. tokens_max: prompt tokens of one step."""

    min_s: float = 2.0
    max_s: float = 60.0
    tokens_max: float = math.inf


class _Rank:
    """Measures one rank."""

    def __init__(self) -> None:
        self._progress: tuple[int, int] | None = None
        self._observed_at = 0.0
        self._is_busy = False
        # Of the step in progress: its duration so far, and the prompt tokens it can compute.
        self._elapsed_s = 0.0
        self._tokens = self._longest = 0.0
        self._base_s: float | None = None
        self._token_s = 0.0
        self._measured_tokens = 0

    @property
    def expected_s(self) -> float:
        """Infinite if unknown."""
        if self._base_s is None or (self._tokens and not self._measured_tokens):
            return math.inf
        growth = max(1.0, self._longest / max(self._measured_tokens, 1))
        return self._base_s + self._token_s * self._tokens * growth

    def observe(
        self, load: Load, computed_tokens: int, tokens: float, longest: float, now: float
    ) -> None:
        """computed_tokens: prompt tokens since start. tokens, longest: of the next step."""
        last, self._progress = self._progress, (load.engine_step, computed_tokens)
        self._elapsed_s += min(now - self._observed_at, OBSERVATION_GAP_MAX_S)
        self._observed_at = now
        has_stepped = last is not None and last != self._progress
        is_busy = load.running > 0 or tokens > 0
        # Work that ended late and without a step was aborted: the step takes at least this long.
        is_late = self._elapsed_s >= FACTOR * self.expected_s
        is_aborted = self._is_busy and not is_busy and is_late
        if last is not None and (has_stepped or is_aborted):
            self._measure(self._elapsed_s, computed_tokens - last[1])
        # A step contains only prompts that were submitted before it began.
        if has_stepped or not self._is_busy:
            self._elapsed_s, self._tokens, self._longest = 0.0, tokens, longest
        self._is_busy = is_busy

    def _measure(self, duration_s: float, tokens: int) -> None:
        decay = 0.5 ** (duration_s / HALF_LIFE_S)
        if tokens > 0 and 2 * tokens >= self._measured_tokens:
            self._token_s = max(duration_s / tokens, decay * self._token_s)
            self._measured_tokens = max(tokens, self._measured_tokens)
        if self._base_s is None:
            self._base_s = duration_s
        self._base_s = max(duration_s - self._token_s * tokens, decay * self._base_s)


class StepLimits:
    """The limits of all ranks of one engine."""

    def __init__(self, settings: StepLimitSettings) -> None:
        self._settings = settings
        self._ranks: dict[int, _Rank] = {}

    def observe(
        self,
        loads: Sequence[Load],
        started_tokens: int,
        pending_tokens: int,
        now: float,
        *,
        longest_prompt: float = math.inf,
    ) -> None:
        """Measures; call it about every TICK_S while requests are open.

        - started_tokens: tokens of all prompts that had output, used for engines that do not report
          `prefill_tokens`.
        - pending_tokens: of those that had none yet.
        - longest_prompt: of the longest of these.
        - now: seconds.
        """
        for load in loads:
            tokens = min(max(pending_tokens, load.waiting_tokens), self._settings.tokens_max)
            rank = self._ranks.setdefault(load.dp_rank, _Rank())
            computed_tokens = load.prefill_tokens or started_tokens
            rank.observe(load, computed_tokens, tokens, min(tokens, longest_prompt), now)

    def limit_s(self, dp_rank: int) -> float:
        """Returns the seconds after which a rank without a step hangs."""
        rank = self._ranks.get(dp_rank)
        return self._bounded(math.inf if rank is None else rank.expected_s)

    @property
    def measured_s(self) -> float:
        """Returns the largest limit of a rank with a measured step; 0 without any."""
        expected = (rank.expected_s for rank in self._ranks.values())
        return max(
            (self._bounded(expected_s) for expected_s in expected if expected_s < math.inf),
            default=0.0,
        )

    def _bounded(self, expected_s: float) -> float:
        return min(max(FACTOR * expected_s, self._settings.min_s), self._settings.max_s)

    def add_to(self, loads: Sequence[Load]) -> list[Load]:
        """Returns the loads with `step_limit_ms`."""
        return [
            replace(load, step_limit_ms=round(1000 * self.limit_s(load.dp_rank))) for load in loads
        ]

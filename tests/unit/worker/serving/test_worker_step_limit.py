"""The step limit: measured durations, longer prompts, pauses, and its bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from common.kv.load import Load
from worker_svc.config import WorkerConfig
from worker_svc.serving.step_limit import (
    FACTOR,
    HALF_LIFE_S,
    TICK_S,
    StepLimits,
    StepLimitSettings,
)

MIN_S, MAX_S = 2.0, 60.0


class Engine:
    """An engine of one rank, observed every TICK_S."""

    def __init__(self, *, reports_tokens: bool = True, tokens_max: float = 8192) -> None:
        self.limits = StepLimits(StepLimitSettings(MIN_S, MAX_S, tokens_max))
        self.now = 100.0
        self._steps = self._computed = 0
        self._reports_tokens = reports_tokens
        self.observe()

    @property
    def limit_s(self) -> float:
        return self.limits.limit_s(0)

    def observe(self, pending: int = 0, *, running: int = 0, wait_s: float = TICK_S) -> None:
        self.now += wait_s
        load = Load(
            engine_step=self._steps,
            running=running,
            prefill_tokens=self._computed if self._reports_tokens else 0,
        )
        self.limits.observe([load], self._computed, pending, self.now)

    def begin(self, tokens: int) -> float:
        """Begins a step with a prompt; returns its limit."""
        self.observe(tokens, running=1)
        return self.limit_s

    def step(self, duration_s: float, tokens: int = 0, cached_tokens: int = 0) -> float:
        """Runs a step; returns the limit that it had."""
        limit_s = self.begin(tokens + cached_tokens)
        for _ in range(round(duration_s / TICK_S) - 1):
            self.observe(tokens + cached_tokens, running=1)
        self._steps, self._computed = self._steps + 1, self._computed + tokens
        self.observe()
        return limit_s

    def rest(self, duration_s: float = 1.0) -> None:
        for _ in range(round(duration_s / TICK_S)):
            self.observe()


def test_the_first_step_has_the_largest_limit() -> None:
    engine = Engine()
    assert engine.limit_s == MAX_S
    assert engine.begin(10) == MAX_S


def test_an_engine_with_short_steps_has_the_smallest_limit() -> None:
    engine = Engine()
    engine.step(0.1, tokens=100)
    assert engine.limit_s == MIN_S
    assert engine.step(0.1, tokens=60) == MIN_S


@pytest.mark.parametrize("step_s", [2.0, 5.0, 15.0])
def test_without_prompts_the_limit_is_a_multiple_of_the_longest_recent_step(step_s: float) -> None:
    engine = Engine()
    engine.step(step_s)
    assert engine.limit_s == pytest.approx(FACTOR * step_s, rel=0.15)
    for _ in range(round(10 * HALF_LIFE_S / 0.1)):
        engine.step(0.1)
    assert engine.limit_s == MIN_S, "the long step is not recent any more"


def test_a_rest_does_not_forget_the_longest_step() -> None:
    engine = Engine()
    engine.step(5.0)
    engine.rest(600.0)
    assert engine.limit_s > 5.0


@pytest.mark.parametrize("reports_tokens", [True, False])
@pytest.mark.parametrize("tokens", [100, 1000, 4000])
def test_a_longer_prompt_may_take_longer_than_all_before(tokens: int, reports_tokens: bool) -> None:
    engine = Engine(reports_tokens=reports_tokens)
    engine.step(0.1, tokens=50)
    engine.rest()
    # Ten milliseconds per token: far above the smallest limit.
    assert engine.begin(tokens) >= min(MAX_S, 0.002 * tokens)


def test_a_step_computes_at_most_the_tokens_of_one_batch() -> None:
    engine = Engine(tokens_max=1000)
    engine.step(1.0, tokens=1000)
    assert engine.begin(1_000_000) < 10.0


def test_a_cached_prompt_does_not_hide_the_duration_of_a_computed_one() -> None:
    engine = Engine()
    engine.step(3.0, tokens=3000)
    for _ in range(600):
        engine.step(0.1, tokens=10, cached_tokens=2990)
    assert engine.limit_s < 3.0
    engine.rest()
    assert engine.begin(3000) > 3.0


def test_long_prompts_do_not_extend_the_limit_of_steps_without_them() -> None:
    engine = Engine()
    engine.step(0.1)
    for _ in range(3):
        engine.step(10.0, tokens=4000)
    assert engine.begin(4000) > 20.0
    for _ in range(3):
        engine.step(0.1)
    assert engine.limit_s == MIN_S


def test_prompts_submitted_during_a_step_do_not_extend_its_limit() -> None:
    engine = Engine()
    engine.step(0.1, tokens=100)
    engine.begin(100)
    for number in range(20):
        engine.observe(100 * number, running=1)
    assert engine.limit_s == MIN_S


def test_a_pause_of_the_worker_process_is_no_step() -> None:
    engine = Engine()
    engine.step(0.1)
    engine.observe(running=1, wait_s=30.0)
    engine.step(0.1)
    assert engine.limit_s < 5.0


def test_after_aborted_work_the_limit_grows_until_a_long_step_fits() -> None:
    engine = Engine()
    engine.step(0.1, tokens=100)
    limits = []
    for _ in range(4):
        limits.append(engine.begin(0))
        for _ in range(round(limits[-1] / TICK_S)):
            engine.observe(running=1)
        engine.rest()
    assert limits[0] == MIN_S
    assert all(after > 2 * before for before, after in pairwise(limits[:3]))
    assert limits[-1] > 20.0


def test_work_aborted_before_the_limit_is_no_step() -> None:
    """For example a probe of a hung engine, or a client that disconnects."""
    engine = Engine()
    engine.step(5.0)
    before_s = engine.limit_s
    for _ in range(10):
        engine.begin(1)
        for _ in range(round(before_s / 2 / TICK_S)):
            engine.observe(1, running=1)
        engine.rest()
    assert engine.limit_s == before_s


def test_each_rank_has_its_own_limit() -> None:
    limits = StepLimits(StepLimitSettings(MIN_S, MAX_S))
    for tick in range(100):
        rows = [Load(engine_step=tick, running=1), Load(running=1, dp_rank=1)]
        limits.observe(rows, 0, 0, tick * TICK_S)
    assert [load.step_limit_ms for load in limits.add_to(rows)] == [2000, 60_000]
    assert limits.measured_s == MIN_S


def test_the_largest_limit_is_at_least_the_smallest() -> None:
    problems = WorkerConfig(step_limit_s=5.0, step_limit_max_s=4.0).problems()
    assert problems == ["step_limit_max_s: must be at least --step-limit-s"]

"""Step times of the simulated accelerator."""

from __future__ import annotations

import math

import pytest

from worker_svc.engines.sim.timing import Timing


def test_the_duration_of_a_step_follows_the_formula() -> None:
    timing = Timing(base_s=1.0, prefill_token_s=0.1, decode_seq_s=0.01, kv_token_s=0.001)

    assert timing.step_s(2, 3, 4) == pytest.approx(1.0 + 0.2 + 0.03 + 0.004)
    assert timing.prefill_s(5) == pytest.approx(0.5)


def test_the_default_timing_is_that_of_a_mid_range_accelerator() -> None:
    timing = Timing()

    assert timing.step_s(0, 1, 0) == pytest.approx(6.02e-3)
    assert 8192 / timing.prefill_s(8192) == pytest.approx(12_000)


def test_speedup_divides_and_zero_takes_no_time() -> None:
    assert Timing(speedup=10).step_s(100, 5, 9) == pytest.approx(Timing().step_s(100, 5, 9) / 10)
    assert Timing(speedup=0).step_s(100, 5, 9) == 0
    assert Timing(speedup=0).prefill_s(100) == 0


@pytest.mark.parametrize("name", ["base_s", "prefill_token_s", "kv_token_s", "speedup"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_invalid_durations_are_rejected_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Timing(**{name: value})

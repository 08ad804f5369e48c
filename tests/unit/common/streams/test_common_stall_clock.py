"""Stalled time of an event loop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.streams.stall_clock import SLACK_S, TICK_S, StallClock


def test_a_loop_that_ticks_in_time_has_no_stall() -> None:
    stall_clock = StallClock(100.0)
    for tick in range(1, 1000):
        stall_clock.tick(100.0 + tick * (TICK_S + SLACK_S / 2))
    assert stall_clock.stalled_s(100.0 + 1000 * (TICK_S + SLACK_S / 2)) == 0.0


def test_a_stall_counts_before_a_tick_ends_it() -> None:
    stall_clock = StallClock(0.0)
    assert stall_clock.stalled_s(3.0) == pytest.approx(3.0 - TICK_S - SLACK_S)
    stall_clock.tick(3.0)
    assert stall_clock.stalled_s(3.0 + TICK_S) == pytest.approx(3.0 - TICK_S - SLACK_S), "kept"


def test_stalls_add_up() -> None:
    stall_clock = StallClock(0.0)
    for turn in range(1, 11):
        stall_clock.tick(turn * 1.0)
    assert stall_clock.stalled_s(10.0) == pytest.approx(10 * (1.0 - TICK_S - SLACK_S))


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.booleans()), max_size=40))
def test_stalled_time_never_decreases_and_never_exceeds_elapsed_time(
    steps: list[tuple[float, bool]],
) -> None:
    stall_clock, now, before = StallClock(0.0), 0.0, 0.0
    for step_s, ticks in steps:
        now += step_s
        lost = stall_clock.stalled_s(now)
        assert before <= lost <= before + step_s + 1e-9
        if ticks:
            stall_clock.tick(now)
            assert stall_clock.stalled_s(now) == lost, "a tick keeps the total"
        before = lost

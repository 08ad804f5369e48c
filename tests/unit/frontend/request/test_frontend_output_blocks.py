"""What the router is told of an answer's length."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_svc.core.request.output_blocks import Grown, Growth


def test_nothing_is_told_before_a_block_is_started() -> None:
    growth = Growth(30, 16, None)  # Two blocks, the second with room for two tokens.
    assert growth.reached(1) is None
    assert growth.reached(2) is None
    assert growth.reached(3) == Grown(1, None)
    assert growth.reached(4) is None


@pytest.mark.row("S1-83")
def test_all_blocks_that_one_frame_crosses_are_told() -> None:
    assert Growth(16, 16, None).reached(50) == Grown(4, None)


@pytest.mark.parametrize(
    ("generated", "expected", "decay"),
    [(25, 100, 0.75), (100, 100, 0.0), (500, 100, 0.0), (1, 0, 0.0)],
)
def test_what_is_still_to_come_shrinks_with_the_output(
    generated: int, expected: int, decay: float
) -> None:
    grown = Growth(16, 1, expected).reached(generated)
    assert grown == Grown(generated, decay)


def test_without_a_block_size_nothing_is_told() -> None:
    assert Growth(16, 0, 10).reached(1000) is None


@settings(deadline=None)
@given(
    total=st.integers(0, 200),
    size=st.integers(1, 64),
    frames=st.lists(st.integers(1, 70), max_size=30),
)
def test_what_was_told_is_always_what_the_answer_holds(
    total: int, size: int, frames: list[int]
) -> None:
    growth, generated, told = Growth(total, size, None), 0, 0
    for frame in frames:
        generated += frame
        grown = growth.reached(generated)
        told += 0 if grown is None else grown.blocks
        assert told == math.ceil((total + generated) / size) - math.ceil(total / size)

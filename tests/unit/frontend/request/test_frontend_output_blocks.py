"""Reports of output blocks to the router."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_svc.request.output_blocks import NewOutputBlocks, OutputBlockCounter


def test_no_block_is_reported_before_it_starts() -> None:
    growth = OutputBlockCounter(30, 16, None)  # Two blocks, with two free tokens in the second.
    assert growth.advance_to(1) is None
    assert growth.advance_to(2) is None
    assert growth.advance_to(3) == NewOutputBlocks(1, None)
    assert growth.advance_to(4) is None


@pytest.mark.row("S1-83")
def test_all_blocks_that_one_frame_starts_are_reported() -> None:
    assert OutputBlockCounter(16, 16, None).advance_to(50) == NewOutputBlocks(4, None)


@pytest.mark.parametrize(
    ("generated", "expected", "decay"),
    [(25, 100, 0.75), (100, 100, 0.0), (500, 100, 0.0), (1, 0, 0.0)],
)
def test_the_decay_fraction_shrinks_with_the_output(
    generated: int, expected: int, decay: float
) -> None:
    grown = OutputBlockCounter(16, 1, expected).advance_to(generated)
    assert grown == NewOutputBlocks(generated, decay)


def test_without_a_block_size_no_block_is_reported() -> None:
    assert OutputBlockCounter(16, 0, 10).advance_to(1000) is None


@settings(deadline=None)
@given(
    total=st.integers(0, 200),
    size=st.integers(1, 64),
    frames=st.lists(st.integers(1, 70), max_size=30),
)
def test_the_reported_blocks_are_always_those_of_the_response(
    total: int, size: int, frames: list[int]
) -> None:
    growth, generated, reported = OutputBlockCounter(total, size, None), 0, 0
    for frame in frames:
        generated += frame
        grown = growth.advance_to(generated)
        reported += 0 if grown is None else grown.blocks
        assert reported == math.ceil((total + generated) / size) - math.ceil(total / size)

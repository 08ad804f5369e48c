"""Delays between attempts that fail in a row."""

from __future__ import annotations

from random import Random

import pytest

from common.streams.backoff import HALF, Backoff


def test_exact_delays_double_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 1.0, None)
    assert [backoff.next_s() for _ in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert backoff.failures == 6


def test_after_a_reset_the_next_delay_is_a_first_one() -> None:
    backoff = Backoff(0.1, 1.0, None)
    assert [backoff.next_s(), backoff.next_s()] == pytest.approx([0.1, 0.2])
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next_s() == pytest.approx(0.1)


@pytest.mark.parametrize("jitter", [HALF, (0.8, 1.0)])
def test_jitter_spreads_each_delay_over_its_whole_range(jitter: tuple[float, float]) -> None:
    delays = [Backoff(0.2, 0.2, Random(seed), jitter=jitter).next_s() for seed in range(300)]
    least, greatest = 0.2 * jitter[0], 0.2 * jitter[1]
    width = greatest - least
    assert least <= min(delays) <= least + width / 20
    assert greatest - width / 20 <= max(delays) <= greatest


def test_a_delay_of_thousands_of_failures_is_the_longest_one() -> None:
    backoff = Backoff(0.1, 5.0, None)
    assert [backoff.next_s() for _ in range(5_000)][-1] == 5.0

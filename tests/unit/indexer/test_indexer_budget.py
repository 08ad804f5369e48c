"""Asking publishers to shrink, and what happens if they do not."""

from __future__ import annotations

from common.kv import Source
from indexer_svc.core.budget import ASK_EVERY_S, PATIENCE_S, Budget, Verdict

BLOCKS = {Source(1): 600, Source(2): 300, Source(2, 1): 100}


def test_below_the_budget_and_without_one_nothing_is_asked() -> None:
    assert Budget(1000).review(0.0, 1000, BLOCKS) == Verdict()
    assert Budget(0).review(0.0, 10**12, BLOCKS) == Verdict()


def test_every_worker_is_asked_for_its_share_of_the_excess() -> None:
    verdict = Budget(1000).review(0.0, 1800, BLOCKS)
    assert verdict == Verdict(shrink={1: 300, 2: 200})


def test_it_asks_again_only_after_a_while() -> None:
    budget = Budget(1000)
    assert budget.review(0.0, 1800, BLOCKS).shrink
    assert budget.review(ASK_EVERY_S / 2, 1800, BLOCKS) == Verdict()
    assert budget.review(ASK_EVERY_S, 1800, BLOCKS).shrink


def test_when_asking_does_not_help_the_largest_source_is_dropped_and_later_admitted() -> None:
    budget = Budget(1000)
    now = 0.0
    while now < PATIENCE_S:
        assert budget.review(now, 1800, BLOCKS).drop is None
        now += ASK_EVERY_S
    assert budget.review(now, 1800, BLOCKS) == Verdict(drop=Source(1))
    rest = {**BLOCKS, Source(1): 0}
    assert budget.review(now + 1, 720, rest) == Verdict(), "1,080 bytes more would not fit"
    budget.review(now + 2, 200, rest)
    small = Budget(2000)
    small._dropped = {Source(1): 100}
    assert small.review(0.0, 1400, rest) == Verdict()
    assert small.review(0.0, 1300, rest) == Verdict(admit=Source(1))
    assert small.review(0.0, 1300, rest) == Verdict(), "once"


def test_a_source_that_left_is_not_admitted() -> None:
    budget = Budget(2000)
    budget._dropped = {Source(9): 100}
    assert budget.review(0.0, 0, BLOCKS) == Verdict()

"""Shrink requests to publishers, and load-only sources."""

from __future__ import annotations

from common.kv.events import Source
from indexer_svc.core.budget import SHRINK_GRACE_S, SHRINK_INTERVAL_S, Budget, BudgetActions

BLOCKS = {Source(1): 600, Source(2): 300, Source(2, 1): 100}


def test_nothing_is_requested_below_the_budget_or_without_one() -> None:
    assert Budget(1000).plan_actions(0.0, 1000, BLOCKS, {}) == BudgetActions()
    assert Budget(0).plan_actions(0.0, 10**12, BLOCKS, {}) == BudgetActions()


def test_every_worker_must_withdraw_its_share_of_the_excess() -> None:
    budget_actions = Budget(1000).plan_actions(0.0, 1800, BLOCKS, {})
    assert budget_actions == BudgetActions(shrink={1: 300, 2: 200})


def test_shrink_requests_repeat_after_an_interval() -> None:
    budget = Budget(1000)
    assert budget.plan_actions(0.0, 1800, BLOCKS, {}).shrink
    assert budget.plan_actions(SHRINK_INTERVAL_S / 2, 1800, BLOCKS, {}) == BudgetActions()
    assert budget.plan_actions(SHRINK_INTERVAL_S, 1800, BLOCKS, {}).shrink


def test_if_shrinking_does_not_help_the_largest_source_is_dropped_and_later_readmitted() -> None:
    budget = Budget(1000)
    now = 0.0
    while now < SHRINK_GRACE_S:
        assert budget.plan_actions(now, 1800, BLOCKS, {}).drop is None
        now += SHRINK_INTERVAL_S
    assert budget.plan_actions(now, 1800, BLOCKS, {}) == BudgetActions(drop=Source(1))
    rest = {**BLOCKS, Source(1): 0}
    assert budget.plan_actions(now + 1, 620, rest, {Source(1): 45}) == BudgetActions(), (
        "81 bytes do not fit"
    )
    budget_actions = budget.plan_actions(now + 2, 620, rest, {Source(1): 44})
    assert budget_actions == BudgetActions(end_load_only=Source(1)), (
        "at 1.8 bytes per block at that time"
    )
    assert budget.plan_actions(now + 3, 620, rest, {}) == BudgetActions(), "once"


def over_budget(budget: Budget) -> None:
    """Run until the largest source is dropped, because shrinking does not help."""
    verdicts = [
        budget.plan_actions(float(now), 1800, BLOCKS, {}) for now in range(int(SHRINK_GRACE_S) + 1)
    ]
    assert verdicts[-1].drop == Source(1)


def test_readmission_depends_on_the_current_blocks_of_the_source() -> None:
    """Regression: a source dropped above the readmission limit was never readmitted."""
    budget = Budget(1000)
    over_budget(budget)
    rest = {**BLOCKS, Source(1): 0}
    assert budget.plan_actions(20.0, 0, rest, {Source(1): 600}) == BudgetActions()
    assert budget.plan_actions(21.0, 0, rest, {Source(1): 10}) == BudgetActions(
        end_load_only=Source(1)
    )


def test_a_source_that_left_or_reconnected_is_not_readmitted() -> None:
    """Readmission resets the set of a source."""
    for blocks in ({Source(2): 300}, BLOCKS):
        budget = Budget(1000)
        over_budget(budget)
        assert budget.plan_actions(20.0, 0, blocks, {}) == BudgetActions()
        assert budget.plan_actions(21.0, 0, blocks, {}) == BudgetActions()

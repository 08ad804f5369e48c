"""Frontends spread over routers, avoid a failed one, and return to their home."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_svc.routers.choice import AVOID_FAILED_ROUTER_S, RouterSelector, home_router

IDS = st.integers(1, 2**63 - 1)


@settings(max_examples=100, deadline=None)
@given(frontends=st.sets(IDS, min_size=1, max_size=20), routers=st.sets(IDS, max_size=5))
def test_every_router_is_home_to_equally_many_frontends_give_or_take_one(
    frontends: set[int], routers: set[int]
) -> None:
    homes = Counter(home_router(one, frontends, routers) for one in frontends)
    if not routers:
        assert homes == {None: len(frontends)}
        return
    assert homes.keys() <= routers
    assert max(homes.values()) - min(homes[r] for r in routers) <= 1


def test_a_frontend_missing_in_discovery_has_the_same_home_as_later() -> None:
    assert home_router(1, [2, 3], {10, 11}) == home_router(1, [1, 2, 3], {10, 11})


def test_the_loss_of_a_router_moves_few_frontends_of_other_routers() -> None:
    frontends, routers = range(100, 140), set(range(1, 5))
    before = {one: home_router(one, frontends, routers) for one in frontends}
    after = {one: home_router(one, frontends, routers - {1}) for one in frontends}
    moved = [one for one in frontends if before[one] != 1 and after[one] != before[one]]
    assert len(moved) <= 10
    assert all(after[one] != 1 for one in frontends)


def test_frontends_of_a_lost_router_spread_over_all_others() -> None:
    frontends, routers = list(range(100, 160)), [1, 2, 3, 4]
    fled: Counter[int | None] = Counter()
    for one in frontends:
        choice = RouterSelector(one)
        choice.update(frontends, routers)
        if choice.choose(0.0) == 1:
            choice.mark_failed(1, 0.0)
            fled[choice.choose(0.1)] += 1
    assert fled.keys() == {2, 3, 4}, "discovery still shows it, but its frontends have moved"
    assert max(fled.values()) <= 10


def test_a_failed_home_is_avoided_for_a_while_and_then_used_again() -> None:
    choice = RouterSelector(7)
    choice.update([7], [1, 2])
    home = choice.choose(10.0)
    assert home is not None
    other = 3 - home
    choice.mark_failed(home, 10.0)
    assert choice.choose(10.0) == other
    assert choice.choose(10.0 + AVOID_FAILED_ROUTER_S - 0.1) == other
    assert choice.choose(10.0 + AVOID_FAILED_ROUTER_S) == home


def test_if_all_routers_failed_the_one_that_failed_first_is_chosen() -> None:
    choice = RouterSelector(7)
    choice.update([7], [1, 2])
    choice.mark_failed(1, 10.0)
    choice.mark_failed(2, 11.0)
    assert choice.choose(11.1) == 1
    choice.mark_failed(1, 11.2)
    assert choice.choose(11.3) == 2
    choice.update([7], [1])
    assert choice.choose(11.4) == 1, "a failed router is better than none"
    choice.update([7], [])
    assert choice.choose(11.5) is None

"""Instances that left, and instances that were never present."""

from __future__ import annotations

from frontend_svc.workers.recently_left import RECENTLY_LEFT_MAX, RecentlyLeft


def test_only_instances_of_an_earlier_snapshot_have_left() -> None:
    recently_left = RecentlyLeft()
    assert 1 not in recently_left
    recently_left.follow([1, 2])
    assert 1 not in recently_left
    recently_left.follow([2])
    assert 1 in recently_left
    assert 3 not in recently_left
    recently_left.follow([1, 2])
    assert 1 not in recently_left, "the instance is present again"


def test_the_oldest_instances_are_removed_first() -> None:
    recently_left = RecentlyLeft()
    for one in range(RECENTLY_LEFT_MAX + 2):
        recently_left.follow([one])
    recently_left.follow([])
    assert 0 not in recently_left
    assert 1 not in recently_left
    assert 2 in recently_left
    assert RECENTLY_LEFT_MAX + 1 in recently_left

"""Instances that left, and instances that were never present."""

from __future__ import annotations

from common.registry.instances import Instance, Snapshot, diff_snapshots
from frontend_svc.members import RECENTLY_LEFT_MAX, Members


def show(members: Members, *present: int) -> None:
    """Passes it a snapshot with these instances."""
    instances = {number: Instance(number, "n", "worker", "", "a:1") for number in present}
    snapshot = Snapshot(members.snapshot.revision + 1, instances)
    members.on_snapshot(snapshot, diff_snapshots(members.snapshot, snapshot))


def test_only_instances_of_an_earlier_snapshot_have_left() -> None:
    members = Members()
    assert not members.has_left(1)
    show(members, 1, 2)
    assert not members.has_left(1)
    show(members, 2)
    assert members.has_left(1)
    assert not members.has_left(3)
    show(members, 1, 2)
    assert not members.has_left(1), "the instance is present again"
    assert members.snapshot.instances.keys() == {1, 2}


def test_the_oldest_instances_are_removed_first() -> None:
    members = Members()
    for number in range(1, RECENTLY_LEFT_MAX + 3):
        show(members, number)
    show(members)
    assert not members.has_left(1)
    assert not members.has_left(2)
    assert members.has_left(3)
    assert members.has_left(RECENTLY_LEFT_MAX + 2)

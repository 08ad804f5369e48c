"""Instances that discovery no longer shows (pure).

A router may name a worker that discovery does not show here: either a new one, which the frontend
can contact at the address from the router, or one that has left.

Invariant: no instance of the newest snapshot is in the set; it has at most RECENTLY_LEFT_MAX.
"""

from __future__ import annotations

from collections.abc import Collection

RECENTLY_LEFT_MAX = 4096


class RecentlyLeft:
    """The instances that left, in the snapshots of one process."""

    def __init__(self) -> None:
        self._present: frozenset[int] = frozenset()
        self._left: dict[int, None] = {}  # oldest first

    def follow(self, present: Collection[int]) -> None:
        newest = frozenset(present)
        for instance_id in self._present - newest:
            self._left[instance_id] = None
        for instance_id in newest & self._left.keys():
            del self._left[instance_id]
        while len(self._left) > RECENTLY_LEFT_MAX:
            del self._left[next(iter(self._left))]
        self._present = newest

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._left

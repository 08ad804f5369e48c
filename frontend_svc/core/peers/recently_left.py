"""Instances that discovery showed and shows no more (pure).

A router may name a worker that discovery does not show here: one that this process has not heard of
yet, which can be asked at the address that the router knows, or one that has left.

Invariant: nobody of the newest snapshot is among them; at most DEPARTED_MAX are remembered.
"""

from __future__ import annotations

from collections.abc import Collection

RECENTLY_LEFT_MAX = 4096


class RecentlyLeft:
    """Who left, as far as one process saw it."""

    def __init__(self) -> None:
        self._present: frozenset[int] = frozenset()
        self._left: dict[int, None] = {}  # Oldest first.

    def follow(self, present: Collection[int]) -> None:
        """The instances of the newest snapshot."""
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

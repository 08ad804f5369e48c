"""Changes of a rank's published sets, merged to events. Pure.

Tiers are published separately: with two tiers a block stored on the device is stored in set 1 and
then in set 0; a block that moves to the host is removed from set 0 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from common.kv.events import EventKind, KvEvent, Tier

# Name, previous level, new level.
LevelChange: TypeAlias = tuple[int, int, int]


class Changes:
    """Collects changes of levels; equal kinds and tiers are merged."""

    def __init__(self, tiers: int) -> None:
        self._tiers = tiers
        self._changes: list[tuple[EventKind, int, list[int]]] = []
        # Parents first; not yet in `_changes`.
        self._pending_stored: list[LevelChange] = []

    def take(self) -> list[KvEvent]:
        """Returns the events since the last call."""
        changes, self._changes = self._changes, []
        return [
            KvEvent(kind, np.array(hashes, dtype=np.uint64), Tier(tier))
            for kind, tier, hashes in changes
        ]

    def add_cleared(self) -> None:
        self._changes.append((EventKind.CLEARED, Tier.DEVICE, []))

    def add_stored(self, change: LevelChange) -> None:
        """Adds a stored block, which `flush_stored` makes an event."""
        self._pending_stored.append(change)

    def discard_pending(self) -> None:
        """Discards the stored blocks since the last `flush_stored`."""
        self._pending_stored.clear()

    def flush_stored(self) -> None:
        """Adds the stored blocks, slower tiers first: a faster set is a subset at every point."""
        if not self._pending_stored:
            return
        for tier in reversed(range(self._tiers)):
            hashes = [
                name for name, before, level in self._pending_stored if level <= tier < before
            ]
            self._add(EventKind.STORED, tier, hashes)
        self._pending_stored.clear()

    def add_removed(self, withdrawn: Sequence[LevelChange]) -> None:
        """Adds removals in the given order: deepest first."""
        for tier in range(self._tiers):
            hashes = [name for name, before, level in withdrawn if before <= tier < level]
            self._add(EventKind.REMOVED, tier, hashes)

    def _add(self, kind: EventKind, tier: int, hashes: list[int]) -> None:
        if hashes and self._changes and self._changes[-1][:2] == (kind, tier):
            self._changes[-1][2].extend(hashes)
        elif hashes:
            self._changes.append((kind, tier, hashes))

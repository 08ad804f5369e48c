"""Pages whose parent is not known yet. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from worker_svc.kv_events.external_events import DuplicatePolicy
from worker_svc.kv_events.page_tree import PageNamer

# Tier, scope and external hash.
ExternalKey: TypeAlias = tuple[int, str, int]


@dataclass(slots=True)
class Orphan:
    """A page with unknown parent. count: how often it was stored."""

    parent: int
    token_ids: bytes
    page_namer: PageNamer
    count: int


class Orphans:
    """Orphans by key, oldest first, and by the scope and hash of their missing parent."""

    def __init__(self) -> None:
        self._orphans: dict[ExternalKey, Orphan] = {}
        self._keys_by_parent: dict[tuple[str, int], dict[ExternalKey, None]] = {}

    def __len__(self) -> int:
        return len(self._orphans)

    def __contains__(self, key: ExternalKey) -> bool:
        return key in self._orphans

    @property
    def entry_count(self) -> int:
        """Returns the number of entries in all maps."""
        return len(self._orphans) + len(self._keys_by_parent)

    def children(self, scope: str, parent: int) -> tuple[ExternalKey, ...]:
        """Returns the keys of the orphans whose missing parent has this hash."""
        return tuple(self._keys_by_parent.get((scope, parent), ()))

    def add(self, key: ExternalKey, orphan: Orphan) -> None:
        """Adds an orphan whose key is new."""
        self._orphans[key] = orphan
        self._keys_by_parent.setdefault((key[1], orphan.parent), {})[key] = None

    def drop(self, key: ExternalKey) -> Orphan:
        """Removes and returns an orphan. Raises KeyError."""
        orphan = self._orphans.pop(key)
        parent = (key[1], orphan.parent)
        siblings = self._keys_by_parent[parent]
        del siblings[key]
        if not siblings:
            del self._keys_by_parent[parent]
        return orphan

    def remove(self, key: ExternalKey, duplicates: DuplicatePolicy) -> bool:
        """Removes an orphan once. Returns whether there was one."""
        orphan = self._orphans.get(key)
        if orphan is None:
            return False
        orphan.count -= 1
        if orphan.count == 0 or duplicates is DuplicatePolicy.IDEMPOTENT:
            self.drop(key)
        return True

    def drop_oldest(self) -> None:
        self.drop(next(iter(self._orphans)))

"""Parentless pages: their parent is not known yet. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from worker_svc.kv_events.external_events import DuplicatePolicy
from worker_svc.kv_events.page_tree import PageNamer

# Tier, hash scope and external hash.
ExternalKey: TypeAlias = tuple[int, str, int]


@dataclass(slots=True)
class ParentlessPage:
    """A page without a known parent. count: how often it was stored."""

    parent: int
    token_ids: bytes
    page_namer: PageNamer
    count: int


class ParentlessPages:
    """Parentless pages by key, oldest first, and by hash scope and hash of their missing parent."""

    def __init__(self) -> None:
        self._pages: dict[ExternalKey, ParentlessPage] = {}
        self._keys_by_parent: dict[tuple[str, int], dict[ExternalKey, None]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: ExternalKey) -> bool:
        return key in self._pages

    @property
    def entry_count(self) -> int:
        """Returns the number of entries in all maps."""
        return len(self._pages) + len(self._keys_by_parent)

    def children(self, hash_scope: str, parent: int) -> tuple[ExternalKey, ...]:
        """Returns the keys of the pages that lack a parent of this hash."""
        return tuple(self._keys_by_parent.get((hash_scope, parent), ()))

    def add(self, key: ExternalKey, page: ParentlessPage) -> None:
        """Adds a page with a new key."""
        self._pages[key] = page
        self._keys_by_parent.setdefault((key[1], page.parent), {})[key] = None

    def drop(self, key: ExternalKey) -> ParentlessPage:
        """Removes and returns a page. Raises KeyError."""
        page = self._pages.pop(key)
        parent = (key[1], page.parent)
        siblings = self._keys_by_parent[parent]
        del siblings[key]
        if not siblings:
            del self._keys_by_parent[parent]
        return page

    def remove(self, key: ExternalKey, duplicates: DuplicatePolicy) -> bool:
        """Removes a page once. Returns whether there was one."""
        page = self._pages.get(key)
        if page is None:
            return False
        page.count -= 1
        if page.count == 0 or duplicates is DuplicatePolicy.IDEMPOTENT:
            self.drop(key)
        return True

    def drop_oldest(self) -> None:
        self.drop(next(iter(self._pages)))

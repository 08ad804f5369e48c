"""Converts an engine's cache events to prefix hashes in prefix-closed sets. Pure.

An engine reports *pages* by its own names (external hashes). These are opaque: they may be signed,
differ between workers, and name other content after a removal. `Normalizer` follows the cache of
one rank and converts pages to the prefix hashes of `common/kv/hashing.py`. `event_log.py` numbers
and publishes the result.

A page is identified by the *content* of the whole prefix up to its end. All external hashes of
equal content mean one page, which counts once regardless of how often it is held. If pages are
smaller than a routing block, the block is held when its last page and all pages before are held. A
page of n blocks is n pages of one block: each is held while a page that contains it is held.

A page has a level (`page_tree.py`) and is in set t if level <= t. Invariants, after every event
and every hash of it:
- Set t = all blocks with all pages, from the root on, held on a tier <= t, unless withheld.
- Therefore sets are prefix-closed and cumulative: set 0 is a subset of set 1, set 1 of set 2.
- A block is stored after its parent and removed before it. If a page in the middle is removed, its
  descendants are withdrawn first; if it returns, those still held are stored again.
- Pages that are not held are kept only for held descendants: after all was removed all maps are
  empty. Every map has a bound.
- Published blocks are held. If events could not be used, blocks may be missing: `is_incomplete`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from common.kv.events import KvEvent
from worker_svc.kv_events.changes import Changes, LevelChange
from worker_svc.kv_events.external_events import (
    TOKEN_BYTES,
    DuplicatePolicy,
    ExternalEvent,
    HasherFactory,
    KvEventFormat,
    PagesCleared,
    PagesRemoved,
    PagesStored,
)
from worker_svc.kv_events.page_tree import (
    ROOT,
    DiscardedPages,
    Page,
    PageNamer,
    PageNamers,
    PageSpec,
    by_depth,
)
from worker_svc.kv_events.parentless_pages import (
    ExternalKey,
    ParentlessPage,
    ParentlessPages,
)

# Limit of pages with unknown parent.
PARENTLESS_PAGES_MAX = 65_536
# Limit of pages and of external hashes: far above any engine, unless it never reports removals.
PAGES_MAX = 1 << 22
_U64 = 2**64 - 1


class Normalizer:
    """Converts the events of one rank to changes of its published sets.

    counts, in pages: duplicates; ignored (adapter or salt unknown or not to be published);
    unknown_removals; contradictions (a hash stored with other content without a removal: the last
    report wins); withheld; and, not published, so that the sets are incomplete from then on:
    misfits (page size or tier differs from the format), orphans_dropped, over_limit, collisions.
    published_blocks: number of blocks in the widest set.
    """

    def __init__(
        self,
        event_format: KvEventFormat,
        hasher_factory: HasherFactory,
    ) -> None:
        self.event_format = event_format
        self.counts: Counter[str] = Counter()
        self.is_incomplete = False
        self._page_namers = PageNamers(event_format, hasher_factory)
        self._changes = Changes(event_format.tiers)
        self._discarded = DiscardedPages()
        # Number of pages that an external hash holds.
        self._pages_per_hash = max(1, event_format.page_size // event_format.block_size)
        self._reset_state()

    def _reset_state(self) -> None:
        self._root = Page(*ROOT, None, 0, [0] * self.event_format.tiers, 0)
        self._pages: dict[int, Page] = {}
        self._page_by_hash: dict[tuple[int, str], dict[int, Page]] = {}
        self._hash_count = 0
        # Number of stores of a page if above 1; for counted duplicates only.
        self._repeats: dict[ExternalKey, int] = {}
        self._parentless = ParentlessPages()
        self._changes.discard_pending()
        self.published_blocks = 0
        self._blocks_max: int | None = None
        # Number of withheld pages, and the pages that `resize` has still to visit.
        self._withheld_count = 0
        self._is_growing = False
        self._resize_order: Iterator[Page | None] | None = None

    @property
    def entry_count(self) -> int:
        """Returns the number of entries in all maps; 0 when nothing is held."""
        known = len(self._pages) + len(self._page_by_hash) + self._hash_count
        return known + len(self._repeats) + self._parentless.entry_count

    def apply(self, event: ExternalEvent) -> None:
        """Applies one event; `take` returns the changes that result."""
        match event:
            case PagesStored():
                self._store(event)
            case PagesRemoved():
                self._remove(event)
            case PagesCleared():
                self.clear()

    def take(self) -> list[KvEvent]:
        """Returns the changes since the last call; equal kinds and tiers are merged."""
        return self._changes.take()

    def clear(self) -> None:
        """Discards everything, including the bound of `shrink`, and emits CLEARED."""
        self.discard_all()
        self._changes.add_cleared()

    def discard_all(self) -> None:
        """Clears as `clear` does, without an event. `free_deferred` frees the memory."""
        self._discarded.add(*self._page_by_hash.values(), self._pages)
        self._reset_state()
        self.is_incomplete = False

    def free_deferred(self, pages: int) -> bool:
        """Frees about this many discarded pages. Returns whether more remain."""
        return self._discarded.free(pages)

    @property
    def is_resizing(self) -> bool:
        """Whether `resize` has work left."""
        return self._resize_order is not None

    def shrink(self, blocks: int) -> None:
        """Lowers the bound of published blocks; `resize` then withdraws the deepest first.

        A withdrawn block stays withdrawn until it is stored again. Until `grow` or `clear` the
        bound also limits new blocks.
        """
        bound = self.published_blocks if self._blocks_max is None else self._blocks_max
        self._blocks_max = max(0, min(self.published_blocks, bound) - blocks)
        self._is_growing = False
        self._resize_order = by_depth(tuple(self._pages.values()), deepest_first=True)

    def grow(self, blocks: int) -> None:
        """Raises the bound of `shrink`, and removes it when no block is withheld any more.

        `resize` then publishes withheld blocks, shallow ones first.
        """
        if self._blocks_max is None:
            return
        self._blocks_max += blocks
        # otherwise shrinking continues, or there is no capacity
        if self.published_blocks < self._blocks_max:
            self._is_growing = True
            self._resize_order = by_depth(tuple(self._pages.values()), deepest_first=False)

    def resize(self, pages: int) -> int:
        """Resizes over `pages` pages. Returns the blocks published, negative if withdrawn.

        Events may arrive between calls; they respect the present bound.
        """
        assert self._resize_order is not None, "a resize is in progress"
        assert self._blocks_max is not None, "a resize has a bound"
        before = self.published_blocks
        part = tuple(islice(self._resize_order, pages))
        if self._is_growing:
            self._republish_withheld(part)
        else:
            self._withdraw_deepest(part)
        free_blocks = self._blocks_max - self.published_blocks
        if len(part) < pages or (free_blocks <= 0 if self._is_growing else free_blocks >= 0):
            self._resize_order = None
            if self._is_growing and not self._withheld_count and free_blocks > 0:
                self._blocks_max = None
        return self.published_blocks - before

    def _withdraw_deepest(self, part: Iterable[Page | None]) -> None:
        """Withdraws pages until the bound holds. Their descendants are withdrawn already."""
        blocks_max, tiers = self._blocks_max, self.event_format.tiers
        assert blocks_max is not None, "shrinking has a bound"
        withdrawn: list[LevelChange] = []
        for page in part:
            if self.published_blocks <= blocks_max:
                break
            if page is None or page.level == tiers:
                continue
            if page.name is not None:
                withdrawn.append((page.name, page.level, tiers))
                self.published_blocks -= 1
            page.level = tiers
            self._withhold(page)
        self._changes.add_removed(withdrawn)

    def _republish_withheld(self, part: Iterable[Page | None]) -> None:
        """Publishes withheld pages and their descendants while there is capacity."""
        blocks_max = self._blocks_max
        assert blocks_max is not None, "growing has a bound"
        for page in part:
            if self.published_blocks >= blocks_max:
                break
            if page is not None and page.is_withheld:
                self._clear_withheld(page)
                self._update_level(page)
        self._changes.flush_stored()

    # Stored.

    def _store(self, event: PagesStored) -> None:
        hashes = [value & _U64 for value in event.hashes]
        page_namer, event_format = self._page_namers.find(event.lora, event.salt), self.event_format
        if page_namer is None:
            self.counts["ignored"] += len(hashes)
        elif event.page_size != event_format.page_size or event.tier >= event_format.tiers:
            self._mark_incomplete("misfits", len(hashes))
        elif self._is_over_limit(len(hashes)):
            self._mark_incomplete("over_limit", len(hashes))
        else:
            self._store_run(event, hashes, page_namer)
            self._changes.flush_stored()

    def _is_over_limit(self, hash_count: int) -> bool:
        page_count = len(self._pages) + hash_count * self._pages_per_hash
        return max(page_count, self._hash_count + hash_count) > PAGES_MAX

    def _store_run(self, event: PagesStored, hashes: list[int], page_namer: PageNamer) -> None:
        """Stores pages one by one while the parent is unknown, then the rest in one pass."""
        tier, hash_scope = int(event.tier), event.hash_scope
        parent = None if event.parent is None else event.parent & _U64
        page_bytes = event.page_size * TOKEN_BYTES
        for index, value in enumerate(hashes):
            start = index * page_bytes
            page = self._root if parent is None else self._find(tier, hash_scope, parent)
            if page is not None:
                token_ids = event.token_ids[start:] if index else event.token_ids
                self._store_children(page, hashes[index:], token_ids, page_namer, tier, hash_scope)
                return
            assert parent is not None, "the root is always known"
            external_key = (tier, hash_scope, value)
            if value in self._page_by_hash.get((tier, hash_scope), ()):
                self.counts["duplicates"] += 1
                self._count_repeat(external_key, 1)
            else:
                token_ids = event.token_ids[start : start + page_bytes]
                self._add_parentless(external_key, ParentlessPage(parent, token_ids, page_namer, 1))
            parent = value

    def _find(self, tier: int, hash_scope: str, value: int) -> Page | None:
        """Returns the page of this hash: on its own tier, else on the fastest other."""
        page = self._page_by_hash.get((tier, hash_scope), {}).get(value)
        if page is not None or self.event_format.tiers == 1:
            return page
        for other in range(self.event_format.tiers):
            page = self._page_by_hash.get((other, hash_scope), {}).get(value)
            if page is not None:
                return page
        return None

    def _store_children(
        self,
        page: Page,
        hashes: Sequence[int],
        token_ids: bytes,
        page_namer: PageNamer,
        tier: int,
        hash_scope: str,
    ) -> None:
        specs = page_namer.specs(page, token_ids)
        for index, value in enumerate(hashes):
            last = self._extend(page, islice(specs, self._pages_per_hash))
            if last is None:
                self._mark_incomplete("collisions", len(hashes) - index)
                return
            page = last
            self._bind((tier, hash_scope, value), page, 1)
            if self._parentless:
                self._attach_children(hash_scope, value, page)

    def _extend(self, page: Page, specs: Iterable[PageSpec]) -> Page | None:
        """Returns the last page of a chain, which is added if unknown; None after a collision."""
        pages, tiers = self._pages, self.event_format.tiers
        for spec in specs:
            child = pages.get(spec[0])
            if child is None:
                child = Page(*spec, page, page.depth + 1, [0] * tiers, tiers)
                pages[child.key] = child
                page.add_child(child)
            elif child.parent is not page:
                self._discard_unused(page)
                return None
            page = child
        return page

    def _pages_of(self, last: Page) -> Sequence[Page]:
        """Returns the pages of the external hash that ends in this page, deepest first."""
        pages = [last]
        while len(pages) < self._pages_per_hash:
            assert pages[-1].parent is not None, "the root has no external hash"
            pages.append(pages[-1].parent)
        return pages

    def _bind(self, external_key: ExternalKey, page: Page, count: int) -> None:
        """Binds the external hash to `page`, which it then holds."""
        tier, hash_scope, value = external_key
        if self._parentless and external_key in self._parentless:
            self.counts["duplicates"] += 1
            count += self._parentless.drop(external_key).count
        bound = self._page_by_hash.setdefault((tier, hash_scope), {})
        before = bound.get(value)
        if before is page:
            self.counts["duplicates"] += 1
            self._count_repeat(external_key, count)
            return
        bound[value] = page
        if self._pages_per_hash == 1:
            self._hold_page(page, tier)
        else:
            for part in reversed(self._pages_of(page)):
                self._hold_page(part, tier)
        if before is None:
            self._hash_count += 1
        else:
            self.counts["contradictions"] += 1
            self._repeats.pop(external_key, None)
            self._release(before, tier)
        if count > 1:
            self._count_repeat(external_key, count - 1)

    def _hold_page(self, page: Page, tier: int) -> None:
        page.ref_counts[tier] += 1
        if page.child is not None or self._blocks_max is not None:
            self._update_level(page)
        else:
            # As `_update_level` without children and bound, in a third of the time.
            assert page.parent is not None, "the root has no external hash"
            level = max(page.parent.level, tier)
            if level < page.level:
                self._publish_page(page, level)

    def _count_repeat(self, external_key: ExternalKey, count: int) -> None:
        if self.event_format.duplicates is DuplicatePolicy.COUNTED:
            self._repeats[external_key] = self._repeats.get(external_key, 1) + count

    # Parentless pages.

    def _add_parentless(self, external_key: ExternalKey, child: ParentlessPage) -> None:
        if external_key in self._parentless:
            child.count += self._parentless.drop(external_key).count
            self.counts["duplicates"] += 1
        elif len(self._parentless) >= PARENTLESS_PAGES_MAX:
            self._parentless.drop_oldest()
            self._mark_incomplete("orphans_dropped", 1)
        self._parentless.add(external_key, child)

    def _attach_children(self, hash_scope: str, value: int, page: Page) -> None:
        """Attaches the children of this hash, and their children in turn."""
        stack = [(value, page)]
        while stack:
            value, page = stack.pop()
            for external_key in self._parentless.children(hash_scope, value):
                if external_key not in self._parentless:
                    continue
                child = self._parentless.drop(external_key)
                last = self._extend(page, child.page_namer.specs(page, child.token_ids))
                if last is None:
                    self._mark_incomplete("collisions", 1)
                    continue
                self._bind(external_key, last, child.count)
                stack.append((external_key[2], last))

    # Removed.

    def _remove(self, event: PagesRemoved) -> None:
        tier, hash_scope = int(event.tier), event.hash_scope
        for value in event.hashes:
            external_key = (tier, hash_scope, value & _U64)
            if not self._remove_bound(external_key) and not self._parentless.remove(
                external_key, self.event_format.duplicates
            ):
                self.counts["unknown_removals"] += 1

    def _remove_bound(self, external_key: ExternalKey) -> bool:
        tier, hash_scope, value = external_key
        bound = self._page_by_hash.get((tier, hash_scope), {})
        page = bound.get(value)
        if page is None:
            return False
        if self._repeats:
            repeats = self._repeats.pop(external_key, 1)
            if repeats > 2:
                self._repeats[external_key] = repeats - 1
            if repeats > 1:
                return True
        del bound[value]
        self._hash_count -= 1
        if not bound:
            del self._page_by_hash[tier, hash_scope]
        self._release(page, tier)
        return True

    def _release(self, last: Page, tier: int) -> None:
        """Releases the pages of an external hash."""
        for page in self._pages_of(last):
            self._release_page(page, tier)

    def _release_page(self, page: Page, tier: int) -> None:
        page.ref_counts[tier] -= 1
        assert page.ref_counts[tier] >= 0, "a page is released as often as it was held"
        if page.ref_counts[tier]:
            return
        self._update_level(page)
        if any(page.ref_counts):
            return
        if page.is_withheld:
            self._clear_withheld(page)
        self._discard_unused(page)

    def _discard_unused(self, page: Page) -> None:
        """Discards the page and its ancestors as far as neither they nor descendants are held."""
        while page.child is None and page.parent is not None and not any(page.ref_counts):
            del self._pages[page.key]
            page.parent.remove_child(page)
            page = page.parent

    # Levels.

    def _update_level(self, page: Page) -> None:
        level = page.level_now()
        if level < page.level:
            self._publish_subtree(page)
        elif level > page.level:
            self._withdraw_subtree(page)

    def _publish_subtree(self, page: Page) -> None:
        """Publishes the page, then its descendants."""
        stack = [page]
        while stack:
            page = stack.pop()
            level = page.level_now()
            if level >= page.level:
                continue
            published = self.published_blocks + (page.name is not None)
            is_full = self._blocks_max is not None and published > self._blocks_max
            if is_full and page.level == self.event_format.tiers:
                self._withhold(page)
                continue
            self._publish_page(page, level)
            if page.child is not None:
                stack.extend(page.children())

    def _publish_page(self, page: Page, level: int) -> None:
        """Moves one page to a faster level."""
        if page.name is not None:
            if page.level == self.event_format.tiers:
                self.published_blocks += 1
            self._changes.add_stored((page.name, page.level, level))
        page.level = level

    def _withdraw_subtree(self, page: Page) -> None:
        """Withdraws the descendants of the page, then the page."""
        self._changes.flush_stored()
        withdrawn: list[LevelChange] = []
        stack = [page]
        while stack:
            page = stack.pop()
            level = page.level_now()
            if level <= page.level:
                continue
            if page.name is not None:
                if level == self.event_format.tiers:
                    self.published_blocks -= 1
                withdrawn.append((page.name, page.level, level))
            page.level = level
            if page.child is not None:
                stack.extend(page.children())
        withdrawn.reverse()
        self._changes.add_removed(withdrawn)

    # Limits.

    def _withhold(self, page: Page) -> None:
        page.is_withheld = True
        self._withheld_count += 1
        self.counts["withheld"] += 1

    def _clear_withheld(self, page: Page) -> None:
        page.is_withheld = False
        self._withheld_count -= 1

    def _mark_incomplete(self, reason: str, count: int) -> None:
        self.counts[reason] += count
        self.is_incomplete = True

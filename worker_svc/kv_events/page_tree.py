"""The pages of an engine's cache as a tree, identified by content. Pure.

The *level* of a page is the slowest tier on the path from the root, each page counted with the
fastest tier that holds it:

    level(page) = max(level(parent), fastest tier that holds the page)     level(root) = 0
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

from common.kv.hashing import ChainState, PrefixHasher
from worker_svc.kv_events.external_events import TOKEN_BYTES, HasherFactory, KvEventFormat

# Limit of cached namers.
_PAGE_NAMERS_MAX = 64


@dataclass(slots=True, eq=False)
class Page:
    """A page of at most one block, identified by content.

    A larger page of an engine is several pages here, so that others may share its first blocks.
    """

    key: int
    total: int
    """Running sum of its chain."""

    name: int | None
    """The block that ends in it, or None."""

    tail: bytes
    """For pages smaller than a block: the tokens since the end of the last block."""

    block_total: int
    """For pages smaller than a block: the running sum of the block chain at the end of the last
    block."""

    parent: Page | None
    depth: int
    ref_counts: list[int]
    """External hashes that hold it, by tier. A page without holders stays while it has held
    descendants."""

    level: int
    is_withheld: bool = False
    # Children form a linked list: a set per page would double the memory.
    child: Page | None = None
    next_sibling: Page | None = None
    previous_sibling: Page | None = None

    def level_now(self) -> int:
        """Returns the level by the module's formula; the number of tiers means in no set."""
        assert self.parent is not None, "the root's level is fixed"
        if not self.is_withheld:
            for tier, count in enumerate(self.ref_counts):
                if count:
                    return max(self.parent.level, tier)
        return len(self.ref_counts)

    def add_child(self, page: Page) -> None:
        page.next_sibling = self.child
        if self.child is not None:
            self.child.previous_sibling = page
        self.child = page

    def remove_child(self, page: Page) -> None:
        if page.previous_sibling is None:
            self.child = page.next_sibling
        else:
            page.previous_sibling.next_sibling = page.next_sibling
        if page.next_sibling is not None:
            page.next_sibling.previous_sibling = page.previous_sibling

    def children(self) -> Iterator[Page]:
        page = self.child
        while page is not None:
            yield page
            page = page.next_sibling


# key, total, name, tail, block_total: see `Page`.
PageSpec: TypeAlias = tuple[int, int, int | None, bytes, int]
ROOT: PageSpec = (0, 0, None, b"", 0)


@dataclass(frozen=True, slots=True)
class PageNamer:
    """Computes page names of one adapter and salt. pages: hasher of pages smaller than a block."""

    event_format: KvEventFormat
    blocks: PrefixHasher
    pages: PrefixHasher | None

    def specs(self, parent: Page, token_ids: bytes) -> Iterator[PageSpec]:
        """Yields the specs of the pages that follow `parent`."""
        if self.pages is not None:
            return self._small_page_specs(self.pages, parent, token_ids)
        state = ChainState(parent.depth, parent.total)
        hashes, sums = self.blocks.extend(state, token_ids)
        names = hashes.tolist()
        return zip(names, sums.tolist(), names, repeat(b""), repeat(0), strict=False)

    def _small_page_specs(
        self, pages: PrefixHasher, parent: Page, token_ids: bytes
    ) -> Iterator[PageSpec]:
        pages_per_block = self.event_format.block_size // self.event_format.page_size
        keys, totals = pages.extend(ChainState(parent.depth, parent.total), token_ids)
        tokens = parent.tail + token_ids
        state = ChainState(parent.depth // pages_per_block, parent.block_total)
        hashes, sums = self.blocks.extend(state, tokens)
        names, block_totals = hashes.tolist(), sums.tolist()
        page_bytes = self.event_format.page_size * TOKEN_BYTES
        block_total, start = parent.block_total, 0
        page_in_block = parent.depth % pages_per_block
        finished_blocks = 0
        for key, total in zip(keys.tolist(), totals.tolist(), strict=True):
            page_in_block += 1
            if page_in_block < pages_per_block:
                tail = tokens[start : start + page_in_block * page_bytes]
                yield key, total, None, tail, block_total
                continue
            block_total = block_totals[finished_blocks]
            yield key, total, names[finished_blocks], b"", block_total
            finished_blocks += 1
            page_in_block = 0
            start += pages_per_block * page_bytes


class PageNamers:
    """The namers in use, one per adapter and salt."""

    def __init__(self, event_format: KvEventFormat, hasher_factory: HasherFactory) -> None:
        self._event_format = event_format
        self._hasher_factory = hasher_factory
        self._page_namers: dict[tuple[str, str], PageNamer | None] = {}

    def find(self, lora: str | None, salt: str | None) -> PageNamer | None:
        """Returns the namer; None if such blocks are unknown or not to be published."""
        if lora is None or salt is None:
            return None
        page_namers, identity = self._page_namers, (lora, salt)
        if identity not in page_namers:
            if len(page_namers) >= _PAGE_NAMERS_MAX:
                del page_namers[next(iter(page_namers))]
            page_namers[identity] = self._create(lora, salt)
        return page_namers[identity]

    def _create(self, lora: str, salt: str) -> PageNamer | None:
        block_size, page_size = self._event_format.block_size, self._event_format.page_size
        blocks, pages = self._hasher_factory(lora, salt, block_size), None
        if blocks is None:
            return None
        if page_size < block_size:
            pages = self._hasher_factory(lora, salt, page_size)
        return PageNamer(self._event_format, blocks, pages)


def by_depth(pages: Sequence[Page], *, deepest_first: bool) -> Iterator[Page | None]:
    """Yields one None per page, then the pages by depth: even work per item."""
    rows: defaultdict[int, list[Page]] = defaultdict(list)
    for page in pages:
        rows[page.depth].append(page)
        yield None
    for depth in sorted(rows, reverse=deepest_first):
        yield from rows.pop(depth)


class DiscardedPages:
    """Maps of discarded pages, which are freed in parts."""

    def __init__(self) -> None:
        self._maps: deque[dict[int, Page]] = deque()

    def add(self, *maps: dict[int, Page]) -> None:
        self._maps.extend(maps)

    def free(self, pages: int) -> bool:
        """Frees about this many pages. Returns whether more remain."""
        while self._maps and pages > 0:
            if not self._maps[0]:
                self._maps.popleft()
                continue
            _, page = self._maps[0].popitem()
            # Pages reference each other.
            page.parent = page.child = page.next_sibling = page.previous_sibling = None
            pages -= 1
        return bool(self._maps)

"""The paged KV cache of the simulated engine: who holds which block, and what is cached. Pure.

A full block may have a *name*, the prefix hash of all tokens up to its end; then whoever starts
with the same tokens can share it. Whoever uses blocks has a `BlockTable`: all blocks of its prefix,
in order. A block that nobody holds is free when it has no name, and *idle* when it has one: idle
blocks are the prefix cache, reused by the next hit or evicted when room is needed.

Invariants:
- held + idle + free == total_blocks, at every moment; nothing is ever held below zero times.
- A name belongs to one block. A named block's parent is named and is not evicted before it.
- A holding is a chain: each named block's parent is the block before it.
- The events, in order, describe a set of names that holds every name's parent at every point.

Why eviction needs no tree walk: a holder of a block holds its parent too, and holdings give their
blocks back deepest first. So in the order in which blocks became idle a child always stands before
its parent, and the oldest idle block is a leaf.

Names are 64-bit hashes and are not verified against the tokens: no tokens are stored here, so a
collision costs a wrong count. A name that is taken under another parent, which only a collision
can bring about, leaves the block and those after it private.

Pages. Every block lies on a page of memory, which remembers what was last written to it. Whoever
computes a block writes its stamp there (`fill`); a transfer from another worker writes what it
pleases, wherever it was once told to (`write`), as RDMA does: nobody asks whether the page still
belongs to the block it was meant for. So a page that was given back while somebody still writes to
it spoils the block that lies there next. `is_intact`, `verify_received` and `take_corrupt_blocks`
compare what a
page holds with what its block expects; `corrupt_pages` counts the blocks they found spoilt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Contiguous blocks were computed and named, parents before children.

    parent: name of the block before the first, None at the start of a prompt. token_ids: 4 bytes
    little endian each, block_size for each name. lora_name: whose cache it is, "" for the base
    model.
    """

    names: tuple[int, ...]
    parent: int | None
    token_ids: bytes
    lora_name: str = ""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left the cache, children before parents."""

    names: tuple[int, ...]


KvEvent: TypeAlias = BlocksStored | BlocksRemoved


@dataclass(slots=True, eq=False)
class Block:
    """One block. holders: holdings that contain it; children: named blocks that follow it.

    page: where it lies. stamp: what is on the page when it is right. is_filled: whether anything
    was written for it; before that, it does not matter what the page holds. is_damaged: whether the
    page was found to hold something else.
    """

    page: int
    stamp: int
    ref_count: int = 1
    is_filled: bool = False
    is_corrupt: bool = False
    name: int | None = None
    # Not shown: it would show the whole prefix.
    parent: Block | None = field(default=None, repr=False)
    children: int = 0


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence or transfer, in order of the prefix; the first `named` have names.

    reused: how many were found in the cache. is_sealed: no further block gets a name.
    """

    blocks: list[Block] = field(default_factory=list)
    named: int = 0
    reused_count: int = 0
    is_sealed: bool = False


class BlockManager:
    """`total_blocks` blocks of `block_size` tokens each.

    `events` is for the owner to drain (`take_events`); it grows until then.
    corrupt_pages: blocks that were found spoilt, each counted once.
    Raises ValueError when a size is below 1.
    """

    __slots__ = (
        *(
            "_block_by_name",
            "_page_contents",
            "_free_pages",
            "_idle_blocks",
            "_last_stamp",
            "_page_owners",
            "_written_pages",
        ),
        *("_pinned_tables", "block_size", "corrupt_pages", "events", "total_blocks"),
    )

    def __init__(self, total_blocks: int, block_size: int) -> None:
        if total_blocks < 1 or block_size < 1:
            raise ValueError(f"total_blocks, block_size: {total_blocks}, {block_size}: want >= 1")
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.events: list[KvEvent] = []
        self.corrupt_pages = 0
        # Free pages; the last is taken first, so that what writes too late is found out.
        self._free_pages = list(range(total_blocks))
        # What each page holds, and which block lies there.
        self._page_contents = [0] * total_blocks
        self._page_owners: list[Block | None] = [None] * total_blocks
        # Stamps of blocks that are computed here: -1, -2, ...; those of transfers are not negative.
        self._last_stamp = 0
        # Pages that transfers wrote to since the last `take_corrupt_blocks`.
        self._written_pages: set[int] = set()
        self._block_by_name: dict[int, Block] = {}
        # Idle blocks in the order in which they became idle; a dict, for its order.
        self._idle_blocks: dict[Block, None] = {}
        self._pinned_tables: set[BlockTable] = set()

    @property
    def used_blocks(self) -> int:
        """Blocks somebody holds."""
        return self.total_blocks - self.available_blocks

    @property
    def available_blocks(self) -> int:
        """Blocks that can be had, free or by eviction."""
        return len(self._free_pages) + len(self._idle_blocks)

    @property
    def cached_blocks(self) -> int:
        """Named blocks, held or idle."""
        return len(self._block_by_name)

    @property
    def open_transfers(self) -> int:
        """Pins not yet undone."""
        return len(self._pinned_tables)

    def names(self) -> list[int]:
        """All names, parents before children."""
        return list(self._block_by_name)

    def take_events(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events, self.events = self.events, []
        return events

    def match(self, names: Sequence[int]) -> int:
        """How many leading blocks of this prefix are cached."""
        return len(self._cached_prefix(names, len(names)))

    def admit(self, names: Sequence[int], tokens: int) -> BlockTable | None:
        """A holding for `tokens` tokens that reuses what is cached of `names`; None without room.

        At least the last token is left to compute, so at most (tokens - 1) // block_size blocks are
        reused. Nothing changes where None is returned.
        """
        assert tokens >= 1, "nobody needs blocks for nothing"
        shared = self._cached_prefix(names, min(len(names), (tokens - 1) // self.block_size))
        idle = sum(not block.ref_count for block in shared)
        missing = self._blocks_for(tokens) - len(shared)
        if missing > len(self._free_pages) + len(self._idle_blocks) - idle:
            return None
        for block in shared:
            self._add_ref(block)
        block_table = BlockTable(list(shared), named=len(shared), reused_count=len(shared))
        self._add_blocks(block_table, missing)
        return block_table

    def grow(self, block_table: BlockTable, tokens: int) -> bool:
        """Makes the holding large enough for `tokens` tokens; False, unchanged, without room."""
        missing = self._blocks_for(tokens) - len(block_table.blocks)
        if missing > len(self._free_pages) + len(self._idle_blocks):
            return False
        self._add_blocks(block_table, missing)
        return True

    def name(
        self, block_table: BlockTable, names: Sequence[int], token_ids: bytes, lora_name: str = ""
    ) -> None:
        """Names the next len(names) blocks of the holding, which are full now.

        token_ids: what is in them, as in `BlocksStored`. A block whose name is taken is given back
        for the one that has it; where a transfer holds it, it and those after it stay private.
        """
        assert block_table.named + len(names) <= len(block_table.blocks), (
            "only held blocks are named"
        )
        assert len(token_ids) == 4 * self.block_size * len(names), "named blocks are full"
        run: list[int] = []
        run_start = 0
        for index, name in enumerate(names):
            if block_table.is_sealed:
                break
            if self._name_next(block_table, name):
                run_start = run_start if run else index
                run.append(name)
            else:
                self._emit_stored(run, run_start, token_ids, lora_name)
                run = []
        self._emit_stored(run, run_start, token_ids, lora_name)

    def release(self, block_table: BlockTable) -> None:
        """Gives all blocks of the holding back; it is empty afterwards."""
        assert block_table not in self._pinned_tables, "a transfer's blocks are given back by unpin"
        self._release_blocks(block_table)

    def pin(self, block_table: BlockTable) -> BlockTable:
        """Another holding of the same blocks, for a transfer that reads or writes them.

        They stay where they are until `unpin`, whatever becomes of the first holding.
        """
        for block in block_table.blocks:
            self._add_ref(block)
        transfer = BlockTable(list(block_table.blocks), named=block_table.named, is_sealed=True)
        self._pinned_tables.add(transfer)
        return transfer

    def unpin(self, transfer: BlockTable) -> None:
        """Ends a transfer's hold."""
        assert transfer in self._pinned_tables, "a pin is undone once"
        self._pinned_tables.remove(transfer)
        self._release_blocks(transfer)

    def fill(self, block_table: BlockTable, first: int, stop: int) -> None:
        """Blocks first..stop-1 of the holding are written, from their beginnings, by their owner.

        What is appended to a block later changes nothing: it neither spoils nor repairs the rest.
        """
        for block in block_table.blocks[first:stop]:
            block.is_filled = True
            self._page_contents[block.page] = block.stamp

    def expect_stamps(self, block_table: BlockTable, stamps: Sequence[int]) -> None:
        """A transfer is going to write the first len(stamps) blocks, which are private."""
        for block, stamp in zip(block_table.blocks, stamps, strict=False):
            assert block.name is None, "cached blocks are never written again"
            assert stamp >= 0, "negative stamps are those of blocks computed here"
            block.stamp = stamp

    def write(self, page: int, stamp: int) -> None:
        """Another worker writes to a page, whoever has it now. Raises IndexError for no page."""
        if page < 0:
            raise IndexError(f"there is no page {page}")
        self._page_contents[page] = stamp
        self._written_pages.add(page)

    def read(self, block: Block) -> int:
        """What is on the block's page."""
        return self._page_contents[block.page]

    def is_intact(self, block_table: BlockTable, first: int, stop: int) -> bool:
        """Whether the pages of blocks first..stop-1 hold what they should; counts the rest."""
        return sum(map(self._is_corrupt, block_table.blocks[first:stop])) == 0

    def verify_received(self, block_table: BlockTable, count: int) -> bool:
        """A transfer has filled the first `count` blocks; whether with what was expected."""
        for block in block_table.blocks[:count]:
            block.is_filled = True
        return self.is_intact(block_table, 0, count)

    def take_corrupt_blocks(self) -> set[Block]:
        """The blocks that transfers have spoilt since the last call; counts them."""
        if not self._written_pages:
            return set()
        touched, self._written_pages = self._written_pages, set()
        owners = (self._page_owners[page] for page in touched)
        return {block for block in owners if block is not None and self._is_corrupt(block)}

    def flush(self) -> int:
        """Evicts all idle blocks; how many. Held ones keep their names."""
        evicted = len(self._idle_blocks)
        self._evict(evicted)
        return evicted

    def check(self) -> None:
        """Asserts the invariants; takes time in proportion to the cache, so meant for tests."""
        assert len(self._free_pages) == len(set(self._free_pages)), "a page is free once"
        assert all(self._page_owners[page] is None for page in self._free_pages), (
            "free pages have no owner"
        )
        for page, owner in enumerate(self._page_owners):
            assert owner is None or owner.page == page, "a block lies on the page it owns"
        assert self._page_owners.count(None) == len(self._free_pages), (
            "a page is free or has an owner"
        )
        children: dict[Block, int] = {}
        for name, block in self._block_by_name.items():
            assert block.name == name, "the index and the block agree"
            assert (block in self._idle_blocks) == (block.ref_count == 0), (
                "idle means that nobody holds it"
            )
            if block.parent is not None:
                assert block.parent.name is not None, "the parent of a cached block is cached"
                assert self._block_by_name[block.parent.name] is block.parent
                children[block.parent] = children.get(block.parent, 0) + 1
        for block in self._block_by_name.values():
            assert block.children == children.get(block, 0), "children are counted"
        assert set(self._idle_blocks) <= set(self._block_by_name.values()), "idle blocks have names"
        seen: set[Block] = set()
        for block in self._idle_blocks:
            assert block.parent is None or block.parent not in seen, "children are evicted first"
            seen.add(block)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _cached_prefix(self, names: Sequence[int], limit: int) -> list[Block]:
        matched: list[Block] = []
        parent: Block | None = None
        for index in range(limit):
            block = self._block_by_name.get(names[index])
            if block is None or block.parent is not parent:
                break
            matched.append(block)
            parent = block
        return matched

    def _add_ref(self, block: Block) -> None:
        if block.ref_count == 0:
            del self._idle_blocks[block]
        block.ref_count += 1

    def _add_blocks(self, block_table: BlockTable, count: int) -> None:
        if count > len(self._free_pages):
            self._evict(count - len(self._free_pages))
        for _ in range(count):
            page = self._free_pages.pop()
            self._last_stamp -= 1
            block = self._page_owners[page] = Block(page, self._last_stamp)
            block_table.blocks.append(block)

    def _return_page(self, block: Block) -> None:
        self._page_owners[block.page] = None
        self._free_pages.append(block.page)

    def _is_corrupt(self, block: Block) -> bool:
        if not block.is_filled or self._page_contents[block.page] == block.stamp:
            return False
        if not block.is_corrupt:
            block.is_corrupt = True
            self.corrupt_pages += 1
        return True

    def _evict(self, count: int) -> None:
        removed: list[int] = []
        for _ in range(count):
            block = next(iter(self._idle_blocks))
            assert block.ref_count == 0, "only idle blocks are evicted"
            assert block.children == 0, "a parent is never evicted before its child"
            assert block.name is not None, "idle blocks have names"
            del self._idle_blocks[block]
            del self._block_by_name[block.name]
            if block.parent is not None:
                block.parent.children -= 1
            removed.append(block.name)
            self._return_page(block)
        if removed:
            self.events.append(BlocksRemoved(tuple(removed)))

    def _name_next(self, block_table: BlockTable, name: int) -> bool:
        """Names the holding's next block; whether that brought a new name into the cache."""
        index = block_table.named
        block = block_table.blocks[index]
        parent = block_table.blocks[index - 1] if index else None
        existing = self._block_by_name.get(name)
        assert block.name is None, "a block is named once"
        if existing is None:
            block.name, block.parent = name, parent
            self._block_by_name[name] = block
            if parent is not None:
                parent.children += 1
            block_table.named += 1
            return True
        # A transfer that goes on holding the block would hold its children without their parent.
        if existing.parent is not parent or block.ref_count > 1:
            block_table.is_sealed = True
            return False
        self._add_ref(existing)
        block_table.blocks[index] = existing
        self._drop_ref(block)
        block_table.named += 1
        return False

    def _emit_stored(self, run: list[int], start: int, token_ids: bytes, lora_name: str) -> None:
        if not run:
            return
        first = self._block_by_name[run[0]]
        parent = None if first.parent is None else first.parent.name
        block_bytes = 4 * self.block_size
        content = token_ids[start * block_bytes : (start + len(run)) * block_bytes]
        self.events.append(BlocksStored(tuple(run), parent, content, lora_name))

    def _release_blocks(self, block_table: BlockTable) -> None:
        while block_table.blocks:
            self._drop_ref(block_table.blocks.pop())
        block_table.named = 0

    def _drop_ref(self, block: Block) -> None:
        assert block.ref_count > 0, "a block is given back as often as it was taken"
        block.ref_count -= 1
        if block.ref_count:
            return
        if block.name is None:
            self._return_page(block)
        else:
            self._idle_blocks[block] = None

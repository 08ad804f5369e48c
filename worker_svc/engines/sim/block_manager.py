"""The paged KV cache of the simulated engine: who holds which block, and what is cached. Pure.

A full block may have a *name*, the prefix hash of all tokens up to its end; then whoever starts
with the same tokens can share it. Whoever uses blocks has a `Holding`: all blocks of its prefix,
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
it spoils the block that lies there next. `is_intact`, `settle` and `take_damaged` compare what a
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
    holders: int = 1
    is_filled: bool = False
    is_damaged: bool = False
    name: int | None = None
    # Not shown: it would show the whole prefix.
    parent: Block | None = field(default=None, repr=False)
    children: int = 0


@dataclass(slots=True, eq=False)
class Holding:
    """The blocks of one sequence or transfer, in order of the prefix; the first `named` have names.

    reused: how many were found in the cache. is_sealed: no further block gets a name.
    """

    blocks: list[Block] = field(default_factory=list)
    named: int = 0
    reused: int = 0
    is_sealed: bool = False


class BlockManager:
    """`total_blocks` blocks of `block_size` tokens each.

    `events` is for the owner to drain (`take_events`); it grows until then.
    corrupt_pages: blocks that were found spoilt, each counted once.
    Raises ValueError when a size is below 1.
    """

    __slots__ = (
        *("_by_name", "_contents", "_free", "_idle", "_last_stamp", "_owners", "_touched"),
        *("_transfers", "block_size", "corrupt_pages", "events", "total_blocks"),
    )

    def __init__(self, total_blocks: int, block_size: int) -> None:
        if total_blocks < 1 or block_size < 1:
            raise ValueError(f"total_blocks, block_size: {total_blocks}, {block_size}: want >= 1")
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.events: list[KvEvent] = []
        self.corrupt_pages = 0
        # Free pages; the last is taken first, so that what writes too late is found out.
        self._free = list(range(total_blocks))
        # What each page holds, and which block lies there.
        self._contents = [0] * total_blocks
        self._owners: list[Block | None] = [None] * total_blocks
        # Stamps of blocks that are computed here: -1, -2, ...; those of transfers are not negative.
        self._last_stamp = 0
        # Pages that transfers wrote to since the last `take_damaged`.
        self._touched: set[int] = set()
        self._by_name: dict[int, Block] = {}
        # Idle blocks in the order in which they became idle; a dict, for its order.
        self._idle: dict[Block, None] = {}
        self._transfers: set[Holding] = set()

    @property
    def used_blocks(self) -> int:
        """Blocks somebody holds."""
        return self.total_blocks - self.available_blocks

    @property
    def available_blocks(self) -> int:
        """Blocks that can be had, free or by eviction."""
        return len(self._free) + len(self._idle)

    @property
    def cached_blocks(self) -> int:
        """Named blocks, held or idle."""
        return len(self._by_name)

    @property
    def open_transfers(self) -> int:
        """Pins not yet undone."""
        return len(self._transfers)

    def names(self) -> list[int]:
        """All names, parents before children."""
        return list(self._by_name)

    def take_events(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events, self.events = self.events, []
        return events

    def match(self, names: Sequence[int]) -> int:
        """How many leading blocks of this prefix are cached."""
        return len(self._matched(names, len(names)))

    def admit(self, names: Sequence[int], tokens: int) -> Holding | None:
        """A holding for `tokens` tokens that reuses what is cached of `names`; None without room.

        At least the last token is left to compute, so at most (tokens - 1) // block_size blocks are
        reused. Nothing changes where None is returned.
        """
        assert tokens >= 1, "nobody needs blocks for nothing"
        shared = self._matched(names, min(len(names), (tokens - 1) // self.block_size))
        idle = sum(not block.holders for block in shared)
        missing = self._blocks_for(tokens) - len(shared)
        if missing > len(self._free) + len(self._idle) - idle:
            return None
        for block in shared:
            self._hold(block)
        holding = Holding(list(shared), named=len(shared), reused=len(shared))
        self._add_blocks(holding, missing)
        return holding

    def grow(self, holding: Holding, tokens: int) -> bool:
        """Makes the holding large enough for `tokens` tokens; False, unchanged, without room."""
        missing = self._blocks_for(tokens) - len(holding.blocks)
        if missing > len(self._free) + len(self._idle):
            return False
        self._add_blocks(holding, missing)
        return True

    def name(
        self, holding: Holding, names: Sequence[int], token_ids: bytes, lora_name: str = ""
    ) -> None:
        """Names the next len(names) blocks of the holding, which are full now.

        token_ids: what is in them, as in `BlocksStored`. A block whose name is taken is given back
        for the one that has it; where a transfer holds it, it and those after it stay private.
        """
        assert holding.named + len(names) <= len(holding.blocks), "only held blocks are named"
        assert len(token_ids) == 4 * self.block_size * len(names), "named blocks are full"
        run: list[int] = []
        run_start = 0
        for index, name in enumerate(names):
            if holding.is_sealed:
                break
            if self._name_next(holding, name):
                run_start = run_start if run else index
                run.append(name)
            else:
                self._stored(run, run_start, token_ids, lora_name)
                run = []
        self._stored(run, run_start, token_ids, lora_name)

    def release(self, holding: Holding) -> None:
        """Gives all blocks of the holding back; it is empty afterwards."""
        assert holding not in self._transfers, "a transfer's blocks are given back by unpin"
        self._give_back(holding)

    def pin(self, holding: Holding) -> Holding:
        """Another holding of the same blocks, for a transfer that reads or writes them.

        They stay where they are until `unpin`, whatever becomes of the first holding.
        """
        for block in holding.blocks:
            self._hold(block)
        transfer = Holding(list(holding.blocks), named=holding.named, is_sealed=True)
        self._transfers.add(transfer)
        return transfer

    def unpin(self, transfer: Holding) -> None:
        """Ends a transfer's hold."""
        assert transfer in self._transfers, "a pin is undone once"
        self._transfers.remove(transfer)
        self._give_back(transfer)

    def fill(self, holding: Holding, first: int, stop: int) -> None:
        """Blocks first..stop-1 of the holding are written, from their beginnings, by their owner.

        What is appended to a block later changes nothing: it neither spoils nor repairs the rest.
        """
        for block in holding.blocks[first:stop]:
            block.is_filled = True
            self._contents[block.page] = block.stamp

    def expect(self, holding: Holding, stamps: Sequence[int]) -> None:
        """A transfer is going to write the first len(stamps) blocks, which are private."""
        for block, stamp in zip(holding.blocks, stamps, strict=False):
            assert block.name is None, "cached blocks are never written again"
            assert stamp >= 0, "negative stamps are those of blocks computed here"
            block.stamp = stamp

    def write(self, page: int, stamp: int) -> None:
        """Another worker writes to a page, whoever has it now. Raises IndexError for no page."""
        if page < 0:
            raise IndexError(f"there is no page {page}")
        self._contents[page] = stamp
        self._touched.add(page)

    def read(self, block: Block) -> int:
        """What is on the block's page."""
        return self._contents[block.page]

    def is_intact(self, holding: Holding, first: int, stop: int) -> bool:
        """Whether the pages of blocks first..stop-1 hold what they should; counts the rest."""
        return sum(map(self._is_spoilt, holding.blocks[first:stop])) == 0

    def settle(self, holding: Holding, count: int) -> bool:
        """A transfer has filled the first `count` blocks; whether with what was expected."""
        for block in holding.blocks[:count]:
            block.is_filled = True
        return self.is_intact(holding, 0, count)

    def take_damaged(self) -> set[Block]:
        """The blocks that transfers have spoilt since the last call; counts them."""
        if not self._touched:
            return set()
        touched, self._touched = self._touched, set()
        owners = (self._owners[page] for page in touched)
        return {block for block in owners if block is not None and self._is_spoilt(block)}

    def flush(self) -> int:
        """Evicts all idle blocks; how many. Held ones keep their names."""
        evicted = len(self._idle)
        self._evict(evicted)
        return evicted

    def check(self) -> None:
        """Asserts the invariants; takes time in proportion to the cache, so meant for tests."""
        assert len(self._free) == len(set(self._free)), "a page is free once"
        assert all(self._owners[page] is None for page in self._free), "free pages have no owner"
        for page, owner in enumerate(self._owners):
            assert owner is None or owner.page == page, "a block lies on the page it owns"
        assert self._owners.count(None) == len(self._free), "a page is free or has an owner"
        children: dict[Block, int] = {}
        for name, block in self._by_name.items():
            assert block.name == name, "the index and the block agree"
            assert (block in self._idle) == (block.holders == 0), "idle means that nobody holds it"
            if block.parent is not None:
                assert block.parent.name is not None, "the parent of a cached block is cached"
                assert self._by_name[block.parent.name] is block.parent
                children[block.parent] = children.get(block.parent, 0) + 1
        for block in self._by_name.values():
            assert block.children == children.get(block, 0), "children are counted"
        assert set(self._idle) <= set(self._by_name.values()), "idle blocks have names"
        seen: set[Block] = set()
        for block in self._idle:
            assert block.parent is None or block.parent not in seen, "children are evicted first"
            seen.add(block)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _matched(self, names: Sequence[int], limit: int) -> list[Block]:
        matched: list[Block] = []
        parent: Block | None = None
        for index in range(limit):
            block = self._by_name.get(names[index])
            if block is None or block.parent is not parent:
                break
            matched.append(block)
            parent = block
        return matched

    def _hold(self, block: Block) -> None:
        if block.holders == 0:
            del self._idle[block]
        block.holders += 1

    def _add_blocks(self, holding: Holding, count: int) -> None:
        if count > len(self._free):
            self._evict(count - len(self._free))
        for _ in range(count):
            page = self._free.pop()
            self._last_stamp -= 1
            block = self._owners[page] = Block(page, self._last_stamp)
            holding.blocks.append(block)

    def _free_page(self, block: Block) -> None:
        self._owners[block.page] = None
        self._free.append(block.page)

    def _is_spoilt(self, block: Block) -> bool:
        if not block.is_filled or self._contents[block.page] == block.stamp:
            return False
        if not block.is_damaged:
            block.is_damaged = True
            self.corrupt_pages += 1
        return True

    def _evict(self, count: int) -> None:
        removed: list[int] = []
        for _ in range(count):
            block = next(iter(self._idle))
            assert block.holders == 0, "only idle blocks are evicted"
            assert block.children == 0, "a parent is never evicted before its child"
            assert block.name is not None, "idle blocks have names"
            del self._idle[block]
            del self._by_name[block.name]
            if block.parent is not None:
                block.parent.children -= 1
            removed.append(block.name)
            self._free_page(block)
        if removed:
            self.events.append(BlocksRemoved(tuple(removed)))

    def _name_next(self, holding: Holding, name: int) -> bool:
        """Names the holding's next block; whether that brought a new name into the cache."""
        index = holding.named
        block = holding.blocks[index]
        parent = holding.blocks[index - 1] if index else None
        taken = self._by_name.get(name)
        assert block.name is None, "a block is named once"
        if taken is None:
            block.name, block.parent = name, parent
            self._by_name[name] = block
            if parent is not None:
                parent.children += 1
            holding.named += 1
            return True
        # A transfer that goes on holding the block would hold its children without their parent.
        if taken.parent is not parent or block.holders > 1:
            holding.is_sealed = True
            return False
        self._hold(taken)
        holding.blocks[index] = taken
        self._drop(block)
        holding.named += 1
        return False

    def _stored(self, run: list[int], start: int, token_ids: bytes, lora_name: str) -> None:
        if not run:
            return
        first = self._by_name[run[0]]
        parent = None if first.parent is None else first.parent.name
        bytes_each = 4 * self.block_size
        content = token_ids[start * bytes_each : (start + len(run)) * bytes_each]
        self.events.append(BlocksStored(tuple(run), parent, content, lora_name))

    def _give_back(self, holding: Holding) -> None:
        while holding.blocks:
            self._drop(holding.blocks.pop())
        holding.named = 0

    def _drop(self, block: Block) -> None:
        assert block.holders > 0, "a block is given back as often as it was taken"
        block.holders -= 1
        if block.holders:
            return
        if block.name is None:
            self._free_page(block)
        else:
            self._idle[block] = None

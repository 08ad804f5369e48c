"""The paged KV cache of the simulated engine: block ownership, prefix cache and page contents.
Pure.

A full block may have a *name*, the prefix hash of all tokens up to its end; sequences that start
with the same tokens share it. A user of blocks has a `BlockTable`: all blocks of its prefix, in
order. An unreferenced block is free if it has no name, and *idle* if it has one: idle blocks are
the prefix cache, reused by the next hit or evicted to free memory.

Invariants:
- referenced + idle + free == total_blocks at all times; no reference count is negative.
- A name belongs to one block. A named block's parent is named and is not evicted before it.
- A block table is a chain: each named block's parent is the block before it.
- A name is on the device or in the host tier (`host_tier.py`), if there is one: an evicted block
  goes there, and returns to the device when it is used.
- The events, in order, describe a set of names that holds every name's parent at every point.

Eviction needs no tree walk: a table that references a block references its parent too, and tables
release their blocks deepest first. Therefore blocks become idle child before parent, and the oldest
idle block is a leaf.

Names are 64-bit hashes and are not verified against the tokens: no tokens are stored here, so a
collision causes a wrong count. If a name exists under another parent, which only a collision can
cause, the block and those after it stay private.

Pages. Each block lies on a page of memory, which remembers its last write. A worker that computes a
block writes the block's stamp to its page (`fill`). A transfer from another worker writes to the
page numbers it was given (`write`), like RDMA, without a check of the page's present owner. A page
that is released while a transfer still writes to it therefore corrupts its next block. `is_intact`,
`verify_received` and `take_corrupt_blocks` compare the content of a page with the stamp of its
block; `corrupt_pages` counts the corrupt blocks they find.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.kv.events import Tier
from worker_svc.engines.sim.host_tier import BlockContent, HostBlock, HostTier
from worker_svc.kv_events.external_events import PagesRemoved, PagesStored


@dataclass(slots=True, eq=False)
class Block:
    """One block."""

    page: int
    """Its location."""

    stamp: int
    """The correct content of the page."""

    ref_count: int = 1
    """Number of block tables that contain it."""

    is_filled: bool = False
    """Whether the block was written; before that the page's content does not matter."""

    is_corrupt: bool = False
    """Whether wrong content was found."""

    name: int | None = None
    # Not in the repr, which would contain the whole prefix.
    parent: Block | None = field(default=None, repr=False)
    children: int = 0
    """Number of named blocks that follow it."""

    content: BlockContent | None = field(default=None, repr=False)
    """Of a named block, if there is a host tier."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence or transfer, in order of the prefix; the first `named` have names.

    reused_count: blocks found in the cache; host_count: those of them that were on the host.
    is_sealed: no further block gets a name.
    """

    blocks: list[Block] = field(default_factory=list)
    named: int = 0
    reused_count: int = 0
    host_count: int = 0
    is_sealed: bool = False


class BlockManager:
    """`total_blocks` blocks of `block_size` tokens each. host_blocks: size of the host tier.

    events: changes of the cache; the owner drains them with `take_events`.
    corrupt_pages: corrupt blocks found, each counted once.
    Raises ValueError if a size is below 1, or that of the host tier below 0.
    """

    def __init__(self, total_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        if total_blocks < 1 or block_size < 1:
            raise ValueError(
                f"total_blocks, block_size: {total_blocks}, {block_size}: must be at least 1"
            )
        if host_blocks < 0:
            raise ValueError(f"host_blocks: {host_blocks}: must not be negative")
        self.total_blocks = total_blocks
        self.block_size = block_size
        self._host = HostTier(host_blocks) if host_blocks else None
        self.events: list[PagesStored | PagesRemoved] = []
        self.corrupt_pages = 0
        # Free pages. The last one released is reused first, so that late writes are detected.
        self._free_pages = list(range(total_blocks))
        # Content of each page, and the block that lies there.
        self._page_contents = [0] * total_blocks
        self._page_owners: list[Block | None] = [None] * total_blocks
        # Stamps of blocks computed here: -1, -2, ...; those of transfers are not negative.
        self._last_stamp = 0
        # Pages written by transfers since the last `take_corrupt_blocks`.
        self._written_pages: set[int] = set()
        self._block_by_name: dict[int, Block] = {}
        # Idle blocks in the order in which they became idle. A dict would be slow to find the next
        # one, since its first entries are always deleted.
        self._idle_blocks: OrderedDict[Block, None] = OrderedDict()
        self._pinned_tables: set[BlockTable] = set()

    @property
    def used_blocks(self) -> int:
        """Returns the number of referenced blocks."""
        return self.total_blocks - self.available_blocks

    @property
    def available_blocks(self) -> int:
        """Returns the number of blocks that are free or can be evicted."""
        return len(self._free_pages) + len(self._idle_blocks)

    @property
    def cached_blocks(self) -> int:
        """Returns the number of named blocks, referenced or idle."""
        return len(self._block_by_name)

    @property
    def host_blocks(self) -> int:
        """Returns the number of blocks on the host."""
        return 0 if self._host is None else len(self._host)

    @property
    def open_transfers(self) -> int:
        return len(self._pinned_tables)

    def names(self) -> list[int]:
        """Returns all names, parents before children."""
        return list(self._block_by_name)

    def take_events(self) -> list[PagesStored | PagesRemoved]:
        """Returns the events since the last call, in order."""
        events, self.events = self.events, []
        return events

    def cached_tokens(self, names: Sequence[int], tokens: int) -> int:
        """Returns how many of `tokens` tokens `admit` would find in the cache."""
        limit = (tokens - 1) // self.block_size
        shared = self._cached_prefix(names, limit)
        return (len(shared) + len(self._host_names(names, limit, shared))) * self.block_size

    def admit(self, names: Sequence[int], tokens: int) -> BlockTable | None:
        """Returns a table that reuses cached blocks of `names`; None, unchanged, without capacity.
        Blocks on the host move to the device.

        At least the last token is left to compute: at most (tokens - 1) // block_size are reused.
        """
        assert tokens >= 1, "a table has at least one token"
        limit = (tokens - 1) // self.block_size
        shared = self._cached_prefix(names, limit)
        on_host = self._host_names(names, limit, shared)
        idle = sum(not block.ref_count for block in shared)
        missing = self._blocks_for(tokens) - len(shared)
        if missing > self.available_blocks - idle:
            return None
        for block in shared:
            self._add_ref(block)
        block_table = BlockTable(
            list(shared),
            named=len(shared),
            reused_count=len(shared) + len(on_host),
            host_count=len(on_host),
        )
        # Taken first: blocks that the new ones evict could replace them.
        loaded = [] if self._host is None else self._host.take(on_host)
        self._add_blocks(block_table, missing)
        self._load(block_table, on_host, loaded)
        return block_table

    def grow(self, block_table: BlockTable, tokens: int) -> bool:
        """Extends the table to `tokens` tokens. Returns False, unchanged, without capacity."""
        missing = self._blocks_for(tokens) - len(block_table.blocks)
        if missing > self.available_blocks:
            return False
        self._add_blocks(block_table, missing)
        return True

    def name(
        self,
        block_table: BlockTable,
        names: Sequence[int],
        token_ids: bytes,
        lora_name: str = "",
        salt: str = "",
    ) -> None:
        """Names the next len(names) blocks of the table, which are now full.

        token_ids, lora_name, salt: as in `PagesStored`. If a name exists already, the table's block
        is replaced by the existing one; if a transfer references the table's block, it and those
        after it stay private.
        """
        assert block_table.named + len(names) <= len(block_table.blocks), "names have blocks"
        assert len(token_ids) == 4 * self.block_size * len(names), "named blocks are full"
        run: list[int] = []
        run_start = 0
        for index, name in enumerate(names):
            if block_table.is_sealed:
                break
            if self._name_next(block_table, name):
                if self._host is not None:
                    block_bytes = 4 * self.block_size
                    part = token_ids[block_bytes * index : block_bytes * (index + 1)]
                    named = block_table.blocks[block_table.named - 1]
                    named.content = BlockContent(part, lora_name, salt)
                run_start = run_start if run else index
                run.append(name)
            else:
                self._emit_stored(run, run_start, token_ids, lora_name, salt)
                run = []
        self._emit_stored(run, run_start, token_ids, lora_name, salt)
        if self._host is not None:
            on_device = [name for name in names if name in self._block_by_name]
            if moved := self._host.discard(on_device):
                self.events.append(PagesRemoved(tuple(moved), Tier.HOST))

    def release(self, block_table: BlockTable) -> None:
        """Releases all blocks of the table, which is empty afterwards."""
        assert block_table not in self._pinned_tables, "a transfer's blocks are released by unpin"
        self._release_blocks(block_table)

    def pin(self, block_table: BlockTable) -> BlockTable:
        """Returns a second table, for a transfer; the blocks keep their pages until `unpin`."""
        for block in block_table.blocks:
            self._add_ref(block)
        transfer = BlockTable(list(block_table.blocks), named=block_table.named, is_sealed=True)
        self._pinned_tables.add(transfer)
        return transfer

    def unpin(self, transfer: BlockTable) -> None:
        assert transfer in self._pinned_tables, "a pin is undone once"
        self._pinned_tables.remove(transfer)
        self._release_blocks(transfer)

    def fill(self, block_table: BlockTable, first: int, stop: int) -> None:
        """Records that the owner began to write blocks first..stop-1; appends change nothing."""
        for block in block_table.blocks[first:stop]:
            block.is_filled = True
            self._page_contents[block.page] = block.stamp

    def expect_stamps(self, block_table: BlockTable, stamps: Sequence[int]) -> None:
        """Sets the stamps that a transfer will write to the first, private blocks."""
        for block, stamp in zip(block_table.blocks, stamps, strict=False):
            assert block.name is None, "cached blocks are never written again"
            assert stamp >= 0, "negative stamps are those of blocks computed here"
            block.stamp = stamp

    def write(self, page: int, stamp: int) -> None:
        """Writes a page for another worker, whatever its owner. Raises IndexError if unknown."""
        if page < 0:
            raise IndexError(f"there is no page {page}")
        self._page_contents[page] = stamp
        self._written_pages.add(page)

    def read(self, block: Block) -> int:
        return self._page_contents[block.page]

    def is_intact(self, block_table: BlockTable, first: int, stop: int) -> bool:
        """Returns whether the pages of blocks first..stop-1 have the expected content; counts
        others."""
        return not sum(map(self._is_corrupt, block_table.blocks[first:stop]))

    def verify_received(self, block_table: BlockTable, count: int) -> bool:
        """Marks the first `count` blocks as received. Returns whether they are intact."""
        for block in block_table.blocks[:count]:
            block.is_filled = True
        return self.is_intact(block_table, 0, count)

    def take_corrupt_blocks(self) -> set[Block]:
        """Returns the blocks corrupted by transfers since the last call; counts them."""
        if not self._written_pages:
            return set()
        touched, self._written_pages = self._written_pages, set()
        owners = (self._page_owners[page] for page in touched)
        return {block for block in owners if block is not None and self._is_corrupt(block)}

    def flush(self) -> int:
        """Evicts all idle blocks, and those on the host. Returns how many. Referenced ones keep
        their names."""
        evicted = len(self._idle_blocks) + self.host_blocks
        self._evict(len(self._idle_blocks), moves_to_host=False)
        if self._host is not None and (removed := self._host.clear()):
            self.events.append(PagesRemoved(tuple(removed), Tier.HOST))
        return evicted

    def check(self) -> None:
        """Asserts the invariants, in time linear in the cache; for tests."""
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
            assert (block in self._idle_blocks) == (block.ref_count == 0), "idle means unreferenced"
            if block.parent is not None:
                assert block.parent.name is not None, "the parent of a cached block is cached"
                assert self._block_by_name[block.parent.name] is block.parent
                children[block.parent] = children.get(block.parent, 0) + 1
        for block in self._block_by_name.values():
            assert block.children == children.get(block, 0), "children are counted"
        assert set(self._idle_blocks) <= set(self._block_by_name.values()), "idle blocks have names"
        assert self._host is None or not any(name in self._host for name in self._block_by_name), (
            "a block is on the device or on the host"
        )
        seen: set[Block] = set()
        for block in self._idle_blocks:
            assert block.parent is None or block.parent not in seen, "children are evicted first"
            seen.add(block)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _cached_prefix(self, names: Sequence[int], limit: int) -> list[Block]:
        matched: list[Block] = []
        for name in names[:limit]:
            block = self._block_by_name.get(name)
            if block is None or block.parent is not (matched[-1] if matched else None):
                break
            matched.append(block)
        return matched

    def _host_names(
        self, names: Sequence[int], limit: int, shared: Sequence[Block]
    ) -> Sequence[int]:
        """Returns the names after those of `shared` that are on the host."""
        if not self._host:
            return ()
        start = len(shared)
        parent = shared[-1].name if shared else None
        return names[start : start + self._host.chain_length(names[start:limit], parent)]

    def _load(
        self, block_table: BlockTable, names: Sequence[int], loaded: Sequence[HostBlock]
    ) -> None:
        """Names the next blocks of the table, which have the content of blocks of the host."""
        if not loaded:
            return
        for name, source in zip(names, loaded, strict=True):
            block = block_table.blocks[block_table.named]
            parent = block_table.blocks[block_table.named - 1] if block_table.named else None
            block.is_filled, block.content = True, source.content
            self._page_contents[block.page] = block.stamp if source.is_intact else 0
            self._set_name(block, name, parent)
            block_table.named += 1
        content = loaded[0].content
        token_ids = b"".join(source.content.token_ids for source in loaded)
        self.events.append(
            PagesStored(
                tuple(names),
                loaded[0].parent,
                token_ids,
                self.block_size,
                lora=content.lora_name,
                salt=content.salt,
            )
        )
        self.events.append(PagesRemoved(tuple(names), Tier.HOST))

    def _set_name(self, block: Block, name: int, parent: Block | None) -> None:
        block.name, block.parent = name, parent
        self._block_by_name[name] = block
        if parent is not None:
            parent.children += 1

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

    def _evict(self, count: int, *, moves_to_host: bool = True) -> None:
        removed: list[int] = []
        for _ in range(count):
            block, _ = self._idle_blocks.popitem(last=False)
            assert block.ref_count == 0, "only idle blocks are evicted"
            assert block.children == 0, "a parent is never evicted before its child"
            assert block.name is not None, "idle blocks have names"
            del self._block_by_name[block.name]
            if block.parent is not None:
                block.parent.children -= 1
            removed.append(block.name)
            if self._host is not None and moves_to_host:
                self._move_to_host(self._host, block)
            self._return_page(block)
        if removed:
            self.events.append(PagesRemoved(tuple(removed)))

    def _move_to_host(self, host: HostTier, block: Block) -> None:
        content, name = block.content, block.name
        assert content is not None, "named blocks have their content if there is a host tier"
        assert name is not None, "only named blocks move"
        parent = None if block.parent is None else block.parent.name
        stored = PagesStored(
            (name,),
            parent,
            content.token_ids,
            self.block_size,
            tier=Tier.HOST,
            lora=content.lora_name,
            salt=content.salt,
        )
        self.events.append(stored)
        replaced = host.put(name, HostBlock(parent, content, not self._is_corrupt(block)))
        if replaced is not None:
            self.events.append(PagesRemoved((replaced,), Tier.HOST))

    def _name_next(self, block_table: BlockTable, name: int) -> bool:
        """Names the table's next block. Returns whether the name is new in the cache."""
        index = block_table.named
        block = block_table.blocks[index]
        parent = block_table.blocks[index - 1] if index else None
        existing = self._block_by_name.get(name)
        assert block.name is None, "a block is named once"
        if existing is None:
            self._set_name(block, name, parent)
            block_table.named += 1
            return True
        # A transfer that keeps the block would reference its children without their parent.
        if existing.parent is not parent or block.ref_count > 1:
            block_table.is_sealed = True
            return False
        self._add_ref(existing)
        block_table.blocks[index] = existing
        self._drop_ref(block)
        block_table.named += 1
        return False

    def _emit_stored(
        self, run: list[int], start: int, token_ids: bytes, lora_name: str, salt: str
    ) -> None:
        if not run:
            return
        first = self._block_by_name[run[0]]
        parent = None if first.parent is None else first.parent.name
        block_bytes = 4 * self.block_size
        content = token_ids[start * block_bytes : (start + len(run)) * block_bytes]
        self.events.append(
            PagesStored(tuple(run), parent, content, self.block_size, lora=lora_name, salt=salt)
        )

    def _release_blocks(self, block_table: BlockTable) -> None:
        while block_table.blocks:
            self._drop_ref(block_table.blocks.pop())
        block_table.named = 0

    def _drop_ref(self, block: Block) -> None:
        assert block.ref_count > 0, "a block is released as often as it was referenced"
        block.ref_count -= 1
        if block.ref_count:
            return
        if block.name is None:
            self._return_page(block)
        else:
            self._idle_blocks[block] = None

"""Which source holds how much of a chain of prefix hashes: the index of one partition (pure).

One table maps a prefix hash to a mask with a bit for each (source, tier) that holds the block.
Published sets are prefix-closed (`common/kv/events.py`), so along a chain a mask only ever loses
bits, and
bisection finds every place where it does: a query costs a few probes for each such place, however
many sources there are (docs/adr/0001-index-structure.md).

The table is split into SHARDS dicts, because a dict that grows, or is worn by churn, is rebuilt as
a whole: one of a million entries stops everything for 30 ms, a shard of it for 0.1 ms.

A source's blocks are `Claims`, a handle that can be filled unseen, shown, hidden and retired. What
is not shown does not match. Retiring costs O(1): the bits are cleared later by `sweep`, in slices,
and only then used again. Each Claims keeps a log of what it stored (8 bytes a block), which is how
its blocks are listed and swept without walking those of others.

Invariants: a hash is in the table exactly when some bit of its mask is set; every held block of a
Claims is in its log; no bit belongs to two Claims.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from common.kv.events import CHUNK_BLOCKS, Hashes, Source, Tier

SHARDS = 256
"""Parts of the table; a power of two. 8M blocks make shards whose rebuilding takes about 1 ms."""

SWEEP_STEP = 256
"""Blocks between two looks at the budget of a sweep."""

LOG_SLACK = 8192
"""Entries a log may have beyond twice the held blocks before it is compacted."""

_SHARD_MASK = SHARDS - 1
# Measured (bench/bench_index.py): table and hash of one block, and one entry of a log.
_BLOCK_BYTES = 100
_LOG_BYTES = 8
# A Python int: 28 bytes with its first digit of 30 bits, and 4 for each digit more.
_MASK_BYTES = 28
_MASK_BIT_BYTES = 4 / 30


class Matched(NamedTuple):
    """How many leading blocks of a chain a source holds: on the device, there or on the host, and
    anywhere; each at least the one before."""

    source: Source
    device_blocks: int
    host_blocks: int
    disk_blocks: int


class Claims:
    """The blocks of one source in one index; made by `PrefixIndex.open`.

    blocks: how many are held, over all tiers' sets. retired: it will never hold or match again.
    """

    __slots__ = ("_bits", "_held", "_is_compacting", "_logs", "retired", "shown", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.shown = False
        self.retired = False
        self._bits = [0, 0, 0]
        self._held = [0, 0, 0]
        self._logs = [array("Q"), array("Q"), array("Q")]
        self._is_compacting = False

    @property
    def blocks(self) -> int:
        """Blocks held, counted once for each tier set that holds them."""
        return sum(self._held)

    def blocks_on(self, tier: Tier) -> int:
        """Blocks of one tier's set."""
        return self._held[tier]


class PrefixIndex:
    """The index of one partition.

    `blocks` counts a block held by n sources n times, `len()` counts it once. Claims passed in must
    be this index's and not retired.
    """

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._sources: dict[int, Source] = {}
        self._shown = 0
        self._tier_bits = [0, 0, 0]
        self._free_bits: list[int] = []
        self._bit_count = 0
        self._chores: deque[Iterator[None]] = deque()
        self._log_entries = 0
        self.blocks = 0

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    @property
    def used_bytes(self) -> int:
        """An estimate from what is held: memory that the tables keep for later is left out."""
        return _BLOCK_BYTES * len(self) + _LOG_BYTES * self._log_entries + self._mask_bytes()

    @property
    def needs_sweep(self) -> bool:
        """Whether `sweep` has something to do."""
        return bool(self._chores)

    # Questions.

    def match(self, hashes: Hashes) -> list[Matched]:
        """One row for each shown source that holds the chain's first block, deepest first.

        hashes: a chain of prefix hashes, contiguous, shape (n,).
        """
        if not len(hashes):
            return []
        # Few elements are looked at, and a memoryview makes a Python int of those only.
        keys = hashes.data
        key = keys[0]
        held = self._shards[key & _SHARD_MASK].get(key, 0) & self._shown
        if not held:
            return []
        ends = self._ends(keys, held)
        if held & ~self._tier_bits[Tier.DEVICE]:
            return self._rows_by_tier(ends)
        return self._rows(ends)

    def holds(self, claims: Claims, key: int, tier: Tier = Tier.DEVICE) -> bool:
        """Whether one block is held."""
        return bool(self._shards[key & _SHARD_MASK].get(key, 0) & claims._bits[tier])

    def chunks(self, claims: Claims, size: int = CHUNK_BLOCKS) -> Iterator[tuple[Tier, Hashes]]:
        """The blocks held, tier by tier, in at most `size` at a time.

        May be read slowly while the index changes. What was stored or removed since the first
        chunk may then be missing, there, or there twice; all else is there. Ends early when the
        claims are retired.
        """
        for tier in Tier:
            log, bit, stop = claims._logs[tier], claims._bits[tier], len(claims._logs[tier])
            for start in range(0, stop, size):
                if claims.retired:
                    return
                part = log[start : min(stop, start + size)]
                yield tier, np.array(self._held_of(part, bit), dtype=np.uint64)

    # Changes.

    def open(self, source: Source) -> Claims:
        """New claims, empty and not shown."""
        return Claims(source)

    def store(self, claims: Claims, hashes: Hashes, tier: Tier = Tier.DEVICE) -> None:
        """Blocks are held now, distinct ones; those held already stay so."""
        assert not claims.retired, "retired claims take nothing"
        bit = claims._bits[tier] or self._allot(claims, tier)
        shards = self._shards
        added = 0
        numbers = (hashes & _SHARD_MASK).tolist()
        for key, number in zip(hashes.tolist(), numbers, strict=True):
            table = shards[number]
            mask = table.get(key)
            if mask is None:
                table[key] = bit  # One object for all blocks that are held by one source only.
                added += 1
            elif not mask & bit:
                table[key] = mask | bit
                added += 1
        if added:
            claims._logs[tier].frombytes(hashes.tobytes())
            self._log_entries += len(hashes)
            self._count(claims, tier, added)
            self._plan_compaction(claims, tier)

    def remove(self, claims: Claims, hashes: Hashes, tier: Tier = Tier.DEVICE) -> None:
        """Blocks are gone; those that were not held do not matter."""
        assert not claims.retired, "retired claims hold nothing"
        if bit := claims._bits[tier]:
            self._count(claims, tier, -self._clear(hashes.tolist(), bit))
            self._plan_compaction(claims, tier)

    def show(self, claims: Claims, shown: bool) -> None:
        """Whether the claims match."""
        assert not (shown and claims.retired), "retired claims stay hidden"
        claims.shown = shown
        for bit in claims._bits:
            self._shown = self._shown | bit if shown else self._shown & ~bit

    def retire(self, claims: Claims) -> None:
        """The claims are gone, at once and for ever; `sweep` frees what they used."""
        assert not claims.retired, "retired once"
        self.show(claims, False)
        claims.retired = True
        self.blocks -= claims.blocks
        claims._held = [0, 0, 0]
        for tier in Tier:
            if claims._bits[tier]:
                self._chores.append(self._bury(claims, tier))

    def sweep(self, blocks: int) -> bool:
        """Does about `blocks` blocks' worth of put-off work; whether there is more to do."""
        while self._chores and blocks > 0:
            if next(self._chores[0], self) is self:
                self._chores.popleft()
            blocks -= SWEEP_STEP
        return self.needs_sweep

    # Inside.

    def _mask_bytes(self) -> int:
        """Of blocks that several sources hold: each has a mask of its own, as wide as its highest
        bit, of k random ones of n: k n / (k + 1). Others share one mask a source."""
        held = len(self)
        shared = min(held, self.blocks - held)
        if shared <= 0:
            return 0
        each = self.blocks / held
        width = self._bit_count * each / (each + 1)
        return round(shared * (_MASK_BYTES + _MASK_BIT_BYTES * width))

    def _ends(self, keys: memoryview, held: int) -> list[tuple[int, int]]:
        """(depth, bits that end there), shallow first. held: the mask of the first block."""
        shards = self._shards
        count = len(keys)
        ends = []
        # Right ends of intervals still to be looked at, with their masks; nobody holds block n.
        rights = [(count, 0)]
        if count > 1:
            key = keys[count - 1]
            rights.append((count - 1, shards[key & _SHARD_MASK].get(key, 0)))
        left = 0
        while held:
            right, mask = rights[-1]
            # For sets that are not closed, against the rules: a lost bit stays lost.
            mask &= held
            if mask != held and right - left > 1:
                middle = (left + right) // 2
                key = keys[middle]
                rights.append((middle, shards[key & _SHARD_MASK].get(key, 0)))
                continue
            if mask != held:
                ends.append((right, held ^ mask))
            left, held = right, mask
            rights.pop()
        return ends

    def _rows(self, ends: list[tuple[int, int]]) -> list[Matched]:
        sources, new = self._sources, tuple.__new__
        rows = []
        for depth, bits in reversed(ends):
            while bits:
                bit = bits & -bits
                bits ^= bit
                # Half the time of calling the class, and there may be hundreds of rows.
                rows.append(new(Matched, (sources[bit], depth, depth, depth)))
        return rows

    def _rows_by_tier(self, ends: list[tuple[int, int]]) -> list[Matched]:
        depths: dict[Source, list[int]] = {}
        for depth, bits in reversed(ends):
            while bits:
                bit = bits & -bits
                bits ^= bit
                tier = next(tier for tier in Tier if bit & self._tier_bits[tier])
                depths.setdefault(self._sources[bit], [0, 0, 0])[tier] = depth
        rows = [
            # A publisher without lower tiers need not repeat its device's blocks there.
            Matched(source, device, max(device, host), max(device, host, disk))
            for source, (device, host, disk) in depths.items()
        ]
        return sorted(rows, key=lambda row: row[:0:-1], reverse=True)

    def _held_of(self, keys: array[int], bit: int) -> list[int]:
        shards = self._shards
        return [key for key in keys if shards[key & _SHARD_MASK].get(key, 0) & bit]

    def _clear(self, keys: list[int] | array[int], bit: int) -> int:
        """Clears a bit; how many had it."""
        shards = self._shards
        cleared = 0
        for key in keys:
            table = shards[key & _SHARD_MASK]
            mask = table.get(key, 0)
            if mask == bit:
                del table[key]
            elif mask & bit:
                table[key] = mask ^ bit
            else:
                continue
            cleared += 1
        return cleared

    def _count(self, claims: Claims, tier: Tier, change: int) -> None:
        claims._held[tier] += change
        self.blocks += change
        assert claims._held[tier] >= 0, "no more is removed than was stored"

    def _allot(self, claims: Claims, tier: Tier) -> int:
        """Gives claims a bit; the lowest free one, so that masks stay narrow."""
        if self._free_bits:
            bit = heapq.heappop(self._free_bits)
        else:
            bit = 1 << self._bit_count
            self._bit_count += 1
        claims._bits[tier] = bit
        self._sources[bit] = claims.source
        self._tier_bits[tier] |= bit
        if claims.shown:
            self._shown |= bit
        return bit

    def _bury(self, claims: Claims, tier: Tier) -> Iterator[None]:
        """Clears the bits of retired claims, then lets others have the bit."""
        bit, log = claims._bits[tier], claims._logs[tier]
        entries = iter(log)
        while part := list(islice(entries, SWEEP_STEP)):
            self._clear(part, bit)
            yield
        self._log_entries -= len(log)
        claims._logs[tier] = array("Q")
        claims._bits[tier] = 0
        del self._sources[bit]
        self._tier_bits[tier] ^= bit
        heapq.heappush(self._free_bits, bit)

    def _plan_compaction(self, claims: Claims, tier: Tier) -> None:
        worn = len(claims._logs[tier]) > 2 * claims._held[tier] + LOG_SLACK
        if worn and not claims._is_compacting:
            claims._is_compacting = True
            self._chores.append(self._compact(claims, tier))

    def _compact(self, claims: Claims, tier: Tier) -> Iterator[None]:
        """Replaces a log by one that names each held block once."""
        log, bit, start = claims._logs[tier], claims._bits[tier], 0
        kept: dict[int, None] = {}
        # The end moves while others store; what they add is read too.
        while start < len(log) and not claims.retired:
            kept.update(dict.fromkeys(self._held_of(log[start : start + SWEEP_STEP], bit)))
            start += SWEEP_STEP
            yield
        claims._is_compacting = False
        if not claims.retired:
            claims._logs[tier] = array("Q", kept)
            self._log_entries += len(kept) - len(log)

"""Index of one partition: how much of a chain of prefix hashes each source holds. Pure.

One table maps a prefix hash to a mask with a bit for each (source, tier) that holds the block.
Published sets are prefix-closed (`common/kv/events.py`), so along a chain a mask only loses bits,
and bisection finds each position where it does: a query costs a few probes per such position,
regardless of the number of sources (docs/adr/0001-index-structure.md).

The table is split into SHARD_COUNT dicts, because a dict that grows or has many deletions is
rebuilt as a whole: with a million entries this blocks for 30 ms, with one shard of it for 0.1 ms.
The low bits of a hash are the number of its shard, the others its key there: the int object of such
a key is 16 bytes smaller.

The blocks of a source are `AdvertisedBlocks`, a handle that is filled while hidden, then made
visible, hidden and retired. Hidden blocks do not match. `retire` costs O(1): `sweep` clears the bit
later, in slices, and only then frees it. Each handle has a log of stored blocks (8 bytes per
block), so that its blocks are listed and swept without a scan of the table.

Invariants: a hash is in the table exactly if its mask is not 0; every held block of a handle is in
its log; no bit belongs to two handles.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.kv.events import SNAPSHOT_CHUNK_BLOCKS, Hashes, Source, Tier

SHARD_BITS = 8
SHARD_COUNT = 1 << SHARD_BITS
"""Dicts of the table. With 8M blocks, one rebuild takes about 1 ms."""

LARGE_BATCH_BLOCKS = 256
"""Blocks above which a batch is stored without Python code for each block."""

MASKS_CACHED_MAX = 1024
"""Limit of masks with cached sources."""

SWEEP_STEP_BLOCKS = 256
"""Blocks between two checks of the budget of a sweep."""

LOG_SLACK_ENTRIES = 8192
"""Entries above twice the held blocks at which a log is compacted."""

WIDE_MASK_SOURCES = 32
"""Sources of a mask above which its bits are found all at once."""

_SHARD_MASK = SHARD_COUNT - 1
# Measured (bench/bench_index.py): table and hash of one block, and one entry of a log.
_BLOCK_BYTES = 84
_LOG_BYTES = 8
# A Python int: 28 bytes including the first digit of 30 bits, 4 for each further digit.
_MASK_BYTES = 28
_MASK_BIT_BYTES = 4 / 30


class SourceMatch(NamedTuple):
    """Leading blocks of a chain on the device, on device or host, and on any tier of a source."""

    source: Source
    device_blocks: int
    host_blocks: int
    disk_blocks: int


@dataclass(slots=True, eq=False)
class AdvertisedBlocks:
    """Handle of a source's blocks in one index. retired: final; holds nothing, never matches."""

    source: Source
    is_visible: bool = False
    retired: bool = False
    _bits: list[int] = field(default_factory=lambda: [0, 0, 0])
    _held_counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    _logs: list[array[int]] = field(default_factory=lambda: [array("Q") for _ in Tier])
    _is_compacting: bool = False

    @property
    def blocks(self) -> int:
        """Blocks held; a block counts once per tier set that holds it."""
        return sum(self._held_counts)

    def blocks_on(self, tier: Tier) -> int:
        """Blocks of one tier's set."""
        return self._held_counts[tier]


class PrefixIndex:
    """The index of one partition. rows_max: most rows of a match; None: one for each source.

    `blocks` counts a block held by n sources n times, `len()` counts it once. Handles passed in
    must belong to this index and must not be retired.
    """

    def __init__(self, rows_max: int | None = None) -> None:
        self._rows_max = rows_max
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARD_COUNT)]
        self._shard_array = np.array(self._shards, dtype=object)
        self._sources: dict[int, Source] = {}
        # The same by the number of the bit; those of free bits are outdated.
        self._numbered_sources: list[Source] = []
        # Cached for `match`; a mask is of bits that are in use.
        self._sources_by_mask: dict[int, tuple[Source, ...]] = {}
        self._visible_bits = 0
        self._tier_bits = [0, 0, 0]
        self._free_bits: list[int] = []
        self._bit_count = 0
        self._deferred_work: deque[Iterator[None]] = deque()
        self._log_entries = 0
        self.blocks = 0

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    @property
    def used_bytes(self) -> int:
        """Estimate from the held blocks; spare capacity of the dicts is not included."""
        return _BLOCK_BYTES * len(self) + _LOG_BYTES * self._log_entries + self._mask_bytes()

    @property
    def needs_sweep(self) -> bool:
        return bool(self._deferred_work)

    # Queries.

    def match(self, hashes: Hashes) -> list[SourceMatch]:
        """Returns a row per visible source of the first block, deepest first; if there are more
        than `rows_max`, some of those of the last depth are missing, other ones for other prompts.
        hashes: contiguous."""
        if not len(hashes):
            return []
        # Few elements are read; memoryviews convert only those to Python ints.
        keys, shard_indexes = (hashes >> SHARD_BITS).data, (hashes & _SHARD_MASK).data
        held = self._shards[shard_indexes[0]].get(keys[0], 0) & self._visible_bits
        if not held:
            return []
        match_ends = self._find_match_ends(keys, shard_indexes, held)
        if held & ~self._tier_bits[Tier.DEVICE]:
            return self._matches_by_tier(match_ends)
        return self._matches_on_device(match_ends, keys[len(keys) - 1])

    def chunks(
        self, advertised: AdvertisedBlocks, size: int = SNAPSHOT_CHUNK_BLOCKS
    ) -> Iterator[tuple[Tier, Hashes]]:
        """Returns the held blocks, tier by tier, at most `size` at a time.

        The index may change while the iterator is read. A block stored or removed since the first
        chunk may then be missing, present, or present twice; all others are present. Ends early
        if the handle is retired.
        """
        for tier in Tier:
            log, bit = advertised._logs[tier], advertised._bits[tier]
            stop = len(log)
            for start in range(0, stop, size):
                if advertised.retired:
                    return
                part = log[start : min(stop, start + size)]
                yield tier, np.array(self._held_keys(part, bit), dtype=np.uint64)

    # Changes.

    def add_source(self, source: Source) -> AdvertisedBlocks:
        """Returns a new handle, empty and hidden."""
        return AdvertisedBlocks(source)

    def store(self, advertised: AdvertisedBlocks, hashes: Hashes, tier: Tier = Tier.DEVICE) -> None:
        """Adds distinct blocks; a block that is held already is a no-op."""
        assert not advertised.retired, "a retired handle stores nothing"
        bit = advertised._bits[tier] or self._allocate_bit(advertised, tier)
        keys, shard_indexes = (hashes >> SHARD_BITS).tolist(), hashes & _SHARD_MASK
        # If the index lacks the first block of a chain, it lacks the others too.
        if len(keys) >= LARGE_BATCH_BLOCKS and keys[0] not in self._shards[shard_indexes[0]]:
            added = self._store_new(keys, self._shard_array[shard_indexes].tolist(), bit)
        else:
            added = self._store_few(keys, shard_indexes.tolist(), bit)
        if added:
            advertised._logs[tier].frombytes(hashes.tobytes())
            self._log_entries += len(hashes)
            self._adjust_count(advertised, tier, added)
            self._schedule_compaction(advertised, tier)

    def remove(
        self, advertised: AdvertisedBlocks, hashes: Hashes, tier: Tier = Tier.DEVICE
    ) -> None:
        """Removes blocks; a block that is not held is a no-op."""
        assert not advertised.retired, "a retired handle holds nothing"
        if bit := advertised._bits[tier]:
            self._adjust_count(advertised, tier, -self._clear_bit(hashes.tolist(), bit))
            self._schedule_compaction(advertised, tier)

    def set_visible(self, advertised: AdvertisedBlocks, is_visible: bool) -> None:
        assert not (is_visible and advertised.retired), "a retired handle stays hidden"
        advertised.is_visible = is_visible
        for bit in advertised._bits:
            self._visible_bits = (
                self._visible_bits | bit if is_visible else self._visible_bits & ~bit
            )

    def retire(self, advertised: AdvertisedBlocks) -> None:
        """Removes all blocks of the handle for good; `sweep` frees their memory."""
        assert not advertised.retired, "retired once"
        self.set_visible(advertised, False)
        advertised.retired = True
        self.blocks -= advertised.blocks
        advertised._held_counts = [0, 0, 0]
        for tier in Tier:
            if advertised._bits[tier]:
                self._deferred_work.append(self._release_bit(advertised, tier))

    def sweep(self, blocks: int) -> bool:
        """Does deferred work for about `blocks` blocks; returns whether more is left."""
        while self._deferred_work and blocks > 0:
            if next(self._deferred_work[0], self) is self:
                self._deferred_work.popleft()
            blocks -= SWEEP_STEP_BLOCKS
        return self.needs_sweep

    # Inside.

    def _mask_bytes(self) -> int:
        """Estimates the masks of blocks that several sources hold; others share one per source.

        A mask is as wide as its highest bit: of k random bits of n, k n / (k + 1).
        """
        held = len(self)
        shared_blocks = min(held, self.blocks - held)
        if shared_blocks <= 0:
            return 0
        sources_per_block = self.blocks / held
        mask_bits = self._bit_count * sources_per_block / (sources_per_block + 1)
        return round(shared_blocks * (_MASK_BYTES + _MASK_BIT_BYTES * mask_bits))

    def _find_match_ends(
        self, keys: memoryview, shard_indexes: memoryview, held: int
    ) -> list[tuple[int, int]]:
        """Returns (depth, bits that end there), shallow first. held: mask of the first block."""
        shards = self._shards
        count = len(keys)
        match_ends = []
        # Right ends of the intervals left, with their masks; no source holds block n.
        right_bounds = [(count, 0)]
        if count > 1:
            mask = shards[shard_indexes[count - 1]].get(keys[count - 1], 0)
            right_bounds.append((count - 1, mask))
        left = 0
        while held:
            right, mask = right_bounds[-1]
            # A lost bit stays lost, also for a set that violates the prefix-closed rule.
            mask &= held
            if mask != held and right - left > 1:
                middle = (left + right) // 2
                mask = shards[shard_indexes[middle]].get(keys[middle], 0)
                right_bounds.append((middle, mask))
                continue
            if mask != held:
                match_ends.append((right, held ^ mask))
            left, held = right, mask
            right_bounds.pop()
        return match_ends

    def _matches_on_device(
        self, match_ends: list[tuple[int, int]], last_key: int
    ) -> list[SourceMatch]:
        sources_of, new_tuple, rows_max = self._sources_by_mask, tuple.__new__, self._rows_max
        rows: list[SourceMatch] = []
        for depth, bits in reversed(match_ends):
            if rows_max is not None and (room := rows_max - len(rows)) < bits.bit_count():
                some = self._some_sources(bits, room, last_key)
                return rows + [SourceMatch(source, depth, depth, depth) for source in some]
            if (sources := sources_of.get(bits)) is None:
                sources = self._sources_of(bits)
            # Takes half the time of a call of the class; there may be hundreds of rows.
            rows += [new_tuple(SourceMatch, (source, depth, depth, depth)) for source in sources]
        return rows

    def _sources_of(self, bits: int) -> tuple[Source, ...]:
        """Returns the sources of a mask, lowest bit first, and keeps them for the next query."""
        if len(self._sources_by_mask) >= MASKS_CACHED_MAX:
            self._sources_by_mask.clear()
        if bits.bit_count() > WIDE_MASK_SOURCES:
            numbered = self._numbered_sources
            sources = [numbered[number] for number in _bit_numbers(bits).tolist()]
        else:
            sources, mask = [], bits
            while mask:
                bit = mask & -mask
                mask ^= bit
                sources.append(self._sources[bit])
        found = self._sources_by_mask[bits] = tuple(sources)
        return found

    def _some_sources(self, bits: int, count: int, key: int) -> list[Source]:
        """Returns so many sources of a mask, in equal distances from a place that `key` chooses."""
        numbers = _bit_numbers(bits)
        places = (key + np.arange(count) * len(numbers) // max(1, count)) % len(numbers)
        return [self._numbered_sources[number] for number in numbers[places].tolist()]

    def _matches_by_tier(self, match_ends: list[tuple[int, int]]) -> list[SourceMatch]:
        depths: dict[Source, list[int]] = {}
        for depth, bits in reversed(match_ends):
            while bits:
                bit = bits & -bits
                bits ^= bit
                tier = next(tier for tier in Tier if bit & self._tier_bits[tier])
                depths.setdefault(self._sources[bit], [0, 0, 0])[tier] = depth
        rows = [
            # A publisher without lower tiers does not repeat its device blocks there.
            SourceMatch(source, device, max(device, host), max(device, host, disk))
            for source, (device, host, disk) in depths.items()
        ]
        return sorted(rows, key=lambda row: row[:0:-1], reverse=True)

    def _held_keys(self, keys: array[int], bit: int) -> list[int]:
        shards = self._shards
        return [key for key in keys if shards[key & _SHARD_MASK].get(key >> SHARD_BITS, 0) & bit]

    def _store_few(self, keys: list[int], shard_indexes: list[int], bit: int) -> int:
        """Sets a bit; returns how many blocks did not have it."""
        shards = self._shards
        added = 0
        # The blocks of a chain often have one mask; then they share the int of the new one, too.
        old, new = 0, 0
        for key, shard_index in zip(keys, shard_indexes, strict=True):
            table = shards[shard_index]
            mask = table.get(key)
            if mask is None:
                table[key] = bit  # One int object, shared by all blocks of a single source.
                added += 1
            elif not mask & bit:
                if mask != old:
                    old, new = mask, mask | bit
                table[key] = new
                added += 1
        return added

    def _store_new(self, keys: list[int], tables: list[dict[int, int]], bit: int) -> int:
        """Stores as `_store_few` does, without Python code for each block that is new to the
        index."""
        held_before = len(self)
        masks = list(map(dict.setdefault, tables, keys, repeat(bit)))
        added = len(self) - held_before
        if added < len(keys):
            old, new = 0, 0
            for key, table, mask in zip(keys, tables, masks, strict=True):
                if not mask & bit:
                    if mask != old:
                        old, new = mask, mask | bit
                    table[key] = new
                    added += 1
        return added

    def _clear_bit(self, keys: list[int] | array[int], bit: int) -> int:
        """Clears a bit; returns how many blocks had it."""
        shards = self._shards
        cleared = 0
        old, new = 0, 0
        for key in keys:
            table = shards[key & _SHARD_MASK]
            key >>= SHARD_BITS
            mask = table.get(key, 0)
            if mask == bit:
                del table[key]
            elif mask & bit:
                if mask != old:
                    old, new = mask, mask ^ bit
                table[key] = new
            else:
                continue
            cleared += 1
        return cleared

    def _adjust_count(self, advertised: AdvertisedBlocks, tier: Tier, delta: int) -> None:
        advertised._held_counts[tier] += delta
        self.blocks += delta
        assert advertised._held_counts[tier] >= 0, "removals do not exceed stores"

    def _allocate_bit(self, advertised: AdvertisedBlocks, tier: Tier) -> int:
        """Returns a new bit for a handle: the lowest free one, so that masks stay narrow."""
        if self._free_bits:
            bit = heapq.heappop(self._free_bits)
        else:
            bit = 1 << self._bit_count
            self._bit_count += 1
            self._numbered_sources.append(advertised.source)
        advertised._bits[tier] = bit
        self._sources[bit] = advertised.source
        self._numbered_sources[bit.bit_length() - 1] = advertised.source
        self._tier_bits[tier] |= bit
        if advertised.is_visible:
            self._visible_bits |= bit
        return bit

    def _release_bit(self, advertised: AdvertisedBlocks, tier: Tier) -> Iterator[None]:
        """Clears the bit of a retired handle in steps, then frees it."""
        bit, log = advertised._bits[tier], advertised._logs[tier]
        entries = iter(log)
        while part := list(islice(entries, SWEEP_STEP_BLOCKS)):
            self._clear_bit(part, bit)
            yield
        self._log_entries -= len(log)
        advertised._logs[tier] = array("Q")
        advertised._bits[tier] = 0
        del self._sources[bit]
        self._sources_by_mask.clear()
        self._tier_bits[tier] ^= bit
        heapq.heappush(self._free_bits, bit)

    def _schedule_compaction(self, advertised: AdvertisedBlocks, tier: Tier) -> None:
        entries_max = 2 * advertised._held_counts[tier] + LOG_SLACK_ENTRIES
        if len(advertised._logs[tier]) > entries_max and not advertised._is_compacting:
            advertised._is_compacting = True
            self._deferred_work.append(self._compact(advertised, tier))

    def _compact(self, advertised: AdvertisedBlocks, tier: Tier) -> Iterator[None]:
        """Replaces a log in steps by one with each held block once."""
        log, bit, start = advertised._logs[tier], advertised._bits[tier], 0
        held_keys: dict[int, None] = {}
        # The log may grow between steps; the loop reads new entries too.
        while start < len(log) and not advertised.retired:
            held_keys.update(
                dict.fromkeys(self._held_keys(log[start : start + SWEEP_STEP_BLOCKS], bit))
            )
            start += SWEEP_STEP_BLOCKS
            yield
        advertised._is_compacting = False
        if not advertised.retired:
            advertised._logs[tier] = array("Q", held_keys)
            self._log_entries += len(held_keys) - len(log)


def _bit_numbers(mask: int) -> NDArray[np.int64]:
    """Returns the numbers of the bits of a mask, lowest first."""
    data = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(data, bitorder="little"))

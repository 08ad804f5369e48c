"""An approximate index: what ranks probably hold, derived from where prompts were sent (pure).

One ordered map has the time of the last decision that touched each (rank, block), oldest first. A
prompt is touched deepest block first, so that removal at the old end leaves no hole in a chain. If
the map is full, the oldest entries are dropped, a few at each step, down to `prune_target_ratio`,
so that no step takes longer than the size of the prompt just added.

Invariants: entries are ordered by time; on one rank a block's ancestors come after it; therefore
the valid blocks of a rank are prefix-closed at any moment, and bisection finds their number. There
are never more than `blocks_max` entries. A rank that left matches nothing from then on (O(1)); its
entries are dropped when they expire or when the map is full. A rank without entries has no state.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from common.kv.events import Source
from common.kv.hashing import hashes_from_bytes
from common.kv.prefix_index import SourceMatch
from router_svc.core.query import Query
from router_svc.core.types import Placement

# Chains are per model, tokens per block and hash scheme.
_Partition = tuple[str, int, int]

_NEVER_TOUCHED = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApproxLimits:
    """ttl_s: seconds for which an entry counts. blocks_max: entries, a block on n ranks counting n
    times. prune_target_ratio: the part of blocks_max that remains after pruning. Defaults: NVIDIA
    Dynamo's. At most about 230 bytes per block (1M blocks: 225 MiB).
    """

    ttl_s: float = 120.0
    blocks_max: int = 1 << 20
    prune_target_ratio: float = 0.8

    def __post_init__(self) -> None:
        assert self.ttl_s > 0, "ttl_s must be positive"
        assert self.blocks_max > 0, "blocks_max must be positive"
        assert 0 < self.prune_target_ratio <= 1, "prune_target_ratio must be within 0..1"


@dataclass(slots=True, eq=False)
class _RankEntries:
    """One rank's entries: their keys are `number << 64 | hash`. Numbers are never reused."""

    number: int
    partition: _Partition
    placement: Placement
    blocks: int = 0


class ApproxIndex:
    """Approximate entries by rank. Times are seconds of one clock and never go back."""

    def __init__(self, limits: ApproxLimits | None = None) -> None:
        self.limits = ApproxLimits() if limits is None else limits
        self._touched_at: OrderedDict[int, float] = OrderedDict()
        self._entries_by_number: dict[int, _RankEntries] = {}
        self._by_partition: dict[_Partition, dict[Placement, _RankEntries]] = {}
        self._last_number = 0
        self._now = _NEVER_TOUCHED
        self._is_pruning = False

    @property
    def blocks(self) -> int:
        """Entries, including expired ones that are not dropped yet."""
        return len(self._touched_at)

    def match(self, query: Query) -> list[SourceMatch]:
        """One row per rank that has the first block, by the latest time of `touch` or `expire`."""
        entries_by_rank = self._by_partition.get(_partition_of(query))
        if not (entries_by_rank and query.prefix_hashes):
            return []
        # A memoryview creates ints only for the few elements that are read.
        keys = hashes_from_bytes(query.prefix_hashes).data
        horizon = self._now - self.limits.ttl_s
        rows = []
        expected_depth = len(keys)
        for placement, rank_entries in entries_by_rank.items():
            if depth := self._depth(rank_entries.number << 64, keys, horizon, expected_depth):
                rows.append(SourceMatch(Source(*placement), depth, depth, depth))
                expected_depth = depth
        return rows

    def touch(self, query: Query, placement: Placement, now: float) -> None:
        """Enter a prompt sent to a rank. O(1) for each of its blocks."""
        if not query.prefix_hashes:
            return
        self._now = now = max(self._now, now)
        hashes = hashes_from_bytes(query.prefix_hashes)[: self.limits.blocks_max]
        rank_entries = self._rank_entries(_partition_of(query), placement)
        touched_at, base = self._touched_at, rank_entries.number << 64
        count_before = len(touched_at)
        for key in hashes[::-1].tolist():
            touched_at[base | key] = now
            touched_at.move_to_end(base | key)
        added = len(touched_at) - count_before
        rank_entries.blocks += added
        while len(touched_at) > self.limits.blocks_max:
            self._is_pruning = True
            self._drop_oldest()
        self.expire(now, 2 * added)

    def expire(self, now: float, blocks: int) -> bool:
        """Advance the time and drop up to `blocks` due entries; returns whether there are more."""
        self._now = max(self._now, now)
        for _ in range(blocks):
            if not self._must_drop_oldest():
                return False
            self._drop_oldest()
        return self._must_drop_oldest()

    def forget(self, worker_id: int) -> None:
        """Drop a worker that left. The cost grows with the number of ranks, not blocks."""
        for rank_entries in list(self._entries_by_number.values()):
            if rank_entries.placement.worker_id == worker_id:
                self._drop_rank(rank_entries)

    def _depth(self, base: int, keys: memoryview, horizon: float, expected_depth: int) -> int:
        """The number of leading blocks held, by bisection that starts at the expected depth."""
        get_touched_at = self._touched_at.get
        if get_touched_at(base | keys[0], _NEVER_TOUCHED) <= horizon:
            return 0
        held, not_held = 1, len(keys) + 1  # Depths.
        middle = expected_depth
        while not_held - held > 1:
            if not held < middle < not_held:
                middle = (held + not_held) // 2
            if get_touched_at(base | keys[middle - 1], _NEVER_TOUCHED) > horizon:
                held = middle
                # Ranks that share a prefix usually share its length.
                middle = expected_depth + 1
            else:
                not_held = middle
        return held

    def _must_drop_oldest(self) -> bool:
        """Whether the oldest entry is due."""
        blocks = len(self._touched_at)
        if blocks <= self.limits.prune_target_ratio * self.limits.blocks_max:
            self._is_pruning = False
        if not blocks or self._is_pruning:
            return blocks > 0
        oldest = next(iter(self._touched_at.values()))
        return oldest <= self._now - self.limits.ttl_s

    def _drop_oldest(self) -> None:
        key, _ = self._touched_at.popitem(last=False)
        rank_entries = self._entries_by_number.get(key >> 64)
        if rank_entries is None:
            return  # Its worker left.
        rank_entries.blocks -= 1
        assert rank_entries.blocks >= 0, "negative blocks of a rank"
        if not rank_entries.blocks:
            self._drop_rank(rank_entries)

    def _rank_entries(self, partition: _Partition, placement: Placement) -> _RankEntries:
        entries_by_rank = self._by_partition.setdefault(partition, {})
        rank_entries = entries_by_rank.get(placement)
        if rank_entries is None:
            self._last_number += 1
            rank_entries = _RankEntries(self._last_number, partition, placement)
            entries_by_rank[placement] = self._entries_by_number[rank_entries.number] = rank_entries
        return rank_entries

    def _drop_rank(self, rank_entries: _RankEntries) -> None:
        entries_by_rank = self._by_partition[rank_entries.partition]
        del entries_by_rank[rank_entries.placement], self._entries_by_number[rank_entries.number]
        if not entries_by_rank:
            del self._by_partition[rank_entries.partition]


def _partition_of(query: Query) -> _Partition:
    return (query.model, query.block_size, query.hash_scheme)

"""What ranks probably hold, guessed from where their prompts were sent (pure).

One ordered map has an entry for each (rank, block) with the time of the last decision that touched
it, oldest first. A prompt is touched deepest block first, so its beginning is younger than its end,
and whatever leaves at the old end leaves no hole in a chain. An entry counts for `ttl_s`. When the
map is full the oldest entries make room, and go on leaving until it is down to
`prune_target_ratio`, a few at each step: nothing here takes longer than what was just added.

Invariants: entries stand in order of time; on one rank a block's ancestors stand behind it; hence
the blocks of a rank that count are prefix-closed at any moment, and bisection answers. There are
never more than `blocks_max` entries. A rank that left matches nothing from then on (O(1)); what is
left of it goes with its time, or to make room. A rank without entries leaves no trace.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from common.kv.events import Source
from common.kv.hashing import hashes_from_bytes
from common.kv.prefix_index import Matched
from router_svc.core.fleet import Placement
from router_svc.core.query import Query

# What separates chains: model, tokens a block, how hashes are made.
_Partition = tuple[str, int, int]

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApproxLimits:
    """How long a guess counts, in seconds; how many blocks there may be, one held by n ranks
    counting n times; and the part of them that is left when it was too many.

    Defaults: NVIDIA Dynamo's. At most about 230 bytes a block (1M of them: 225 MiB).
    """

    ttl_s: float = 120.0
    blocks_max: int = 1 << 20
    prune_target_ratio: float = 0.8

    def __post_init__(self) -> None:
        assert self.ttl_s > 0, "a guess counts for some time"
        assert self.blocks_max > 0, "there is room for a block"
        assert 0 < self.prune_target_ratio <= 1, "a part of what there may be"


@dataclass(slots=True, eq=False)
class _Trail:
    """One rank's entries: their keys are `number << 64 | hash`. Numbers are not used again."""

    number: int
    partition: _Partition
    placement: Placement
    blocks: int = 0


class ApproxIndex:
    """Guesses by rank. Times are seconds of one clock and never go back."""

    def __init__(self, limits: ApproxLimits | None = None) -> None:
        self.limits = ApproxLimits() if limits is None else limits
        self._touched: OrderedDict[int, float] = OrderedDict()
        self._trails: dict[int, _Trail] = {}
        self._known: dict[_Partition, dict[Placement, _Trail]] = {}
        self._last_number = 0
        self._now = _NEVER
        self._is_pruning = False

    @property
    def blocks(self) -> int:
        """Entries, with those that count no more and have not left yet."""
        return len(self._touched)

    def match(self, query: Query) -> list[Matched]:
        """One row for each rank that holds the prompt's first block.

        What counts is judged by the latest time that `touch` or `expire` was told.
        """
        trails = self._known.get(_partition_of(query))
        if not (trails and query.prefix_hashes):
            return []
        # A memoryview makes an int of the few elements that are looked at, and of no others.
        keys = hashes_from_bytes(query.prefix_hashes).data
        horizon = self._now - self.limits.ttl_s
        rows = []
        likely = len(keys)
        for placement, trail in trails.items():
            if depth := self._depth(trail.number << 64, keys, horizon, likely):
                rows.append(Matched(Source(*placement), depth, depth, depth))
                likely = depth
        return rows

    def touch(self, query: Query, placement: Placement, now: float) -> None:
        """The prompt was sent there. O(1) for each of its blocks."""
        if not query.prefix_hashes:
            return
        self._now = now = max(self._now, now)
        hashes = hashes_from_bytes(query.prefix_hashes)[: self.limits.blocks_max]
        trail = self._trail(_partition_of(query), placement)
        touched, base, before = self._touched, trail.number << 64, len(self._touched)
        for key in hashes[::-1].tolist():
            touched[base | key] = now
            touched.move_to_end(base | key)
        added = len(touched) - before
        trail.blocks += added
        while len(touched) > self.limits.blocks_max:
            self._is_pruning = True
            self._drop_oldest()
        self.expire(now, 2 * added)

    def expire(self, now: float, blocks: int) -> bool:
        """Time has passed: drops up to `blocks` entries that are due; whether there are more."""
        self._now = max(self._now, now)
        for _ in range(blocks):
            if not self._is_due():
                return False
            self._drop_oldest()
        return self._is_due()

    def forget(self, worker_id: int) -> None:
        """The worker left. Costs as much as there are ranks, not blocks."""
        for trail in [t for t in self._trails.values() if t.placement.worker_id == worker_id]:
            self._drop_trail(trail)

    def _depth(self, base: int, keys: memoryview, horizon: float, likely: int) -> int:
        """How many leading blocks are there, by bisection that begins at what is likely."""
        at = self._touched.get
        if at(base | keys[0], _NEVER) <= horizon:
            return 0
        held, missed = 1, len(keys) + 1  # So many are there; so many are not.
        middle = likely
        while missed - held > 1:
            if not held < middle < missed:
                middle = (held + missed) // 2
            if at(base | keys[middle - 1], _NEVER) > horizon:
                held = middle
                # Ranks that share a beginning mostly share its length.
                middle = likely + 1
            else:
                missed = middle
        return held

    def _is_due(self) -> bool:
        """Whether the oldest entry has to go."""
        blocks = len(self._touched)
        if blocks <= self.limits.prune_target_ratio * self.limits.blocks_max:
            self._is_pruning = False
        if not blocks or self._is_pruning:
            return blocks > 0
        oldest = next(iter(self._touched.values()))
        return oldest <= self._now - self.limits.ttl_s

    def _drop_oldest(self) -> None:
        key, _ = self._touched.popitem(last=False)
        trail = self._trails.get(key >> 64)
        if trail is None:
            return  # Its worker has left.
        trail.blocks -= 1
        assert trail.blocks >= 0, "a rank loses no more than it had"
        if not trail.blocks:
            self._drop_trail(trail)

    def _trail(self, partition: _Partition, placement: Placement) -> _Trail:
        trails = self._known.setdefault(partition, {})
        trail = trails.get(placement)
        if trail is None:
            self._last_number += 1
            trail = _Trail(self._last_number, partition, placement)
            trails[placement] = self._trails[trail.number] = trail
        return trail

    def _drop_trail(self, trail: _Trail) -> None:
        trails = self._known[trail.partition]
        del trails[trail.placement], self._trails[trail.number]
        if not trails:
            del self._known[trail.partition]


def _partition_of(query: Query) -> _Partition:
    return (query.model, query.block_size, query.hash_scheme)

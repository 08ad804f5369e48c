"""An approximate index: what ranks probably hold, derived from where prompts were sent (pure).

The prompts form a tree of *runs*, consecutive blocks of one chain. Each run has the ranks that a
prompt with all of its blocks was sent to, with the number of the last such decision; a run is split
where a prompt ends or differs. So a decision costs a few steps for each run of its prompt, not for
each block, and a query finds all ranks in one walk. A queue has the decisions, the oldest first,
each with the last run of its prompt; a run knows its parent, so that the entries of a decision are
dropped from the deepest block on, and no chain gets a hole. If the index is full, the oldest
entries are dropped, a few at each step, down to `prune_target_ratio`, so that no step takes longer
than the size of the prompt just added.

An entry is a block on a rank. Invariants: a rank of a run is one of its parent's too, by the same
or a later decision, so that the valid blocks of a rank are prefix-closed at any moment; every run
has a rank. There are never more than `blocks_max` entries. A rank that left matches nothing from
then on (O(1)); its entries are dropped when they expire or when the index is full. A rank without
entries has no state.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from math import ceil

from common.kv.hashing import hash_view
from common.request.placement import Placement, Query
from router_svc.core.query import HASH_BYTES

# Chains are per model, tokens per block and hash scheme.
_Partition = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApproxLimits:
    """Limits of the entries. Defaults: NVIDIA Dynamo's.

    Memory: 8 bytes per block of a run, and about 800 per run.
    """

    ttl_s: float = 120.0
    """Seconds for which an entry counts."""

    blocks_max: int = 1 << 20
    """Limit of entries; a block on n ranks counts n times."""

    prune_target_ratio: float = 0.8
    """The part of blocks_max that remains after pruning."""

    def __post_init__(self) -> None:
        assert self.ttl_s > 0, "ttl_s must be positive"
        assert self.blocks_max > 0, "blocks_max must be positive"
        assert 0 < self.prune_target_ratio <= 1, "prune_target_ratio must be within 0..1"


@dataclass(slots=True, eq=False)
class _Run:
    """A part of one or more chains, without a branch."""

    keys: array[int]
    """Hashes of its blocks."""

    start: int
    """Blocks before it."""

    parent: _Run | None
    siblings: dict[int, _Run]
    """The runs that start at the same place, by first hash, including this one."""

    children: dict[int, _Run] = field(default_factory=dict)
    decisions: dict[_Rank, int] = field(default_factory=dict)
    """By rank, the number of the last decision."""

    def common_blocks(self, keys: memoryview) -> int:
        """Returns the number of leading blocks of the run that the chain `keys` has after
        `start`; the first is one."""
        own, start = self.keys, self.start
        count = min(len(own), len(keys) - start)
        if own[count - 1] == keys[start + count - 1]:
            return count
        equal, different = 1, count
        while different - equal > 1:
            middle = (equal + different) // 2
            if own[middle - 1] == keys[start + middle - 1]:
                equal = middle
            else:
                different = middle
        return equal


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank in one partition, until its worker leaves or its last entry is dropped."""

    partition: _Partition
    placement: Placement
    blocks: int = 0
    is_gone: bool = False


class ApproxIndex:
    """Approximate entries by rank. Times are seconds of one clock and never go back."""

    def __init__(self, limits: ApproxLimits | None = None) -> None:
        self.limits = ApproxLimits() if limits is None else limits
        self._runs: dict[_Partition, dict[int, _Run]] = {}
        self._ranks: dict[_Partition, dict[Placement, _Rank]] = {}
        # Decision, last run of its prompt that the rank has, rank. Outdated unless it is the rank's
        # last decision for the run; then it is for the runs before, too.
        self._oldest: deque[tuple[int, _Run, _Rank]] = deque()
        # Decisions that have not expired, and their times; the last one of each time.
        self._times: deque[tuple[int, float]] = deque()
        self._last_decision = self._expired_decision = 0
        self._now = float("-inf")
        self._is_pruning = False
        self.blocks = 0  # Entries, including expired ones that are not dropped yet.

    def depths(self, query: Query, ranks_max: int | None = None) -> list[tuple[Placement, int]]:
        """Returns how many leading blocks each rank has, by the latest time of `touch` or `expire`;
        of more than `ranks_max` ranks, some of those with the fewest are missing. Absent: none.
        """
        runs = self._runs.get(_partition_of(query))
        if not (runs and query.prefix_hashes):
            return []
        path: list[tuple[dict[_Rank, int], int]] = []
        keys, depth, expired = hash_view(query.prefix_hashes), 0, self._expired_decision
        while depth < len(keys) and (run := runs.get(keys[depth])) is not None:
            common = run.common_blocks(keys)
            depth += common
            path.append((run.decisions, depth))
            if common < len(run.keys):
                break
            runs = run.children
        # Deepest run first: each has the ranks of those below it, and often no others.
        found: dict[_Rank, int] = {}
        for decisions, depth in reversed(path):
            if len(decisions) > len(found):
                for rank, decision in decisions.items():
                    if len(found) == ranks_max:
                        break
                    if decision > expired and rank not in found:
                        found[rank] = depth
        return [(rank.placement, depth) for rank, depth in found.items() if not rank.is_gone]

    def touch(self, query: Query, placement: Placement, now: float) -> None:
        """Enters a prompt sent to a rank."""
        if not query.prefix_hashes:
            return
        self._set_time(now)
        decision = self._last_decision = self._last_decision + 1
        if self._times and self._times[-1][1] == self._now:
            self._times.pop()
        self._times.append((decision, self._now))
        partition, added = _partition_of(query), 0
        rank = self._rank(partition, placement)
        path = self._path(partition, query.prefix_hashes[: HASH_BYTES * self.limits.blocks_max])
        for run in path:
            if rank not in run.decisions:
                added += len(run.keys)
            run.decisions[rank] = decision
        self._oldest.append((decision, path[-1], rank))
        rank.blocks += added
        self.blocks += added
        if self.blocks > self.limits.blocks_max:
            self._is_pruning = True
            while self.blocks > self.limits.blocks_max:
                self._drop_oldest(self.blocks - self.limits.blocks_max)
        self.expire(now, 2 * max(added, len(path)))

    def expire(self, now: float, blocks: int) -> bool:
        """Advances the time and drops up to `blocks` due entries; returns whether there are
        more."""
        self._set_time(now)
        while blocks > 0 and (due := self._due_blocks()):
            blocks -= self._drop_oldest(min(blocks, due))
        return self._due_blocks() > 0

    def forget(self, worker_id: int) -> None:
        """Drops a worker that left. The cost grows with the number of ranks, not blocks."""
        for rank in [rank for ranks in self._ranks.values() for rank in ranks.values()]:
            if rank.placement.worker_id == worker_id:
                self._drop_rank(rank)

    def _set_time(self, now: float) -> None:
        self._now = max(self._now, now)
        horizon, times = self._now - self.limits.ttl_s, self._times
        while times and times[0][1] <= horizon:
            self._expired_decision = times.popleft()[0]

    def _path(self, partition: _Partition, hashes: bytes) -> list[_Run]:
        """Returns the runs of a prompt, shallow first, after adding what is missing."""
        keys = hash_view(hashes)
        runs = self._runs.setdefault(partition, {})
        path: list[_Run] = []
        depth = 0
        while depth < len(keys):
            run = runs.get(keys[depth])
            if run is None:
                own = array("Q", keys[depth:].tobytes())
                run = runs[own[0]] = _Run(own, depth, path[-1] if path else None, runs)
            elif (common := run.common_blocks(keys)) < len(run.keys):
                run = self._split(run, common)
            path.append(run)
            depth += len(run.keys)
            runs = run.children
        return path

    def _split(self, run: _Run, size: int) -> _Run:
        """Moves the first `size` blocks of a run to a new parent, which it returns. So the last run
        of a decision remains the last one.
        """
        siblings = run.siblings
        head = _Run(run.keys[:size], run.start, run.parent, siblings, {}, dict(run.decisions))
        siblings[head.keys[0]] = head
        run.keys, run.start = run.keys[size:], run.start + size
        run.parent, run.siblings = head, head.children
        head.children[run.keys[0]] = run
        return head

    def _due_blocks(self) -> int:
        """Returns how many of the oldest entries may be dropped now, at least 1 if any may."""
        excess = ceil(self.blocks - self.limits.prune_target_ratio * self.limits.blocks_max)
        if excess <= 0:
            self._is_pruning = False
        if self._is_pruning:
            return excess
        if self._oldest and self._oldest[0][0] <= self._expired_decision:
            return max(1, self.blocks)
        return 0

    def _drop_oldest(self, blocks_max: int) -> int:
        """Drops the blocks of the oldest decision's last run, the deepest ones first, at most
        `blocks_max`; or an outdated decision, which counts as one.
        """
        decision, run, rank = self._oldest[0]
        if run.decisions.get(rank) != decision:
            self._oldest.popleft()
            return 1
        if len(run.keys) > blocks_max:
            self._split(run, len(run.keys) - blocks_max)
        size, parent = len(run.keys), run.parent
        del run.decisions[rank]
        if parent is not None and parent.decisions.get(rank) == decision:
            self._oldest[0] = (decision, parent, rank)
        else:
            self._oldest.popleft()
        self.blocks -= size
        rank.blocks -= size
        assert rank.blocks >= 0, "negative blocks of a rank"
        if not (rank.blocks or rank.is_gone):
            self._drop_rank(rank)
        if not run.decisions:
            del run.siblings[run.keys[0]]
            if not (run.start or run.siblings):
                self._runs = {key: runs for key, runs in self._runs.items() if runs}
        return size

    def _rank(self, partition: _Partition, placement: Placement) -> _Rank:
        ranks = self._ranks.setdefault(partition, {})
        rank = ranks.get(placement)
        if rank is None:
            rank = ranks[placement] = _Rank(partition, placement)
        return rank

    def _drop_rank(self, rank: _Rank) -> None:
        rank.is_gone = True
        ranks = self._ranks[rank.partition]
        del ranks[rank.placement]
        if not ranks:
            del self._ranks[rank.partition]


def _partition_of(query: Query) -> _Partition:
    return (query.model, query.block_size, query.hash_scheme)

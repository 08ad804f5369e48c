"""Memory budget of the index. Pure.

Over budget, the index requests each worker to withdraw its share of the excess, because only
publishers evict. If that does not help within SHRINK_GRACE_S, the largest source becomes load-only:
its blocks are dropped, its load still counts. It is indexed again once its blocks fit. A publisher
that connects again is indexed at once, with the same grace period.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.kv.events import Source

SHRINK_INTERVAL_S = 1.0
SHRINK_GRACE_S = 10.0
# Shrinking aims below the budget and readmission well below it, to avoid oscillation.
TARGET_FRACTION = 0.9
READMIT_FRACTION = 0.7


@dataclass(frozen=True, slots=True)
class BudgetActions:
    """shrink: blocks to withdraw, by worker. drop, end_load_only: one source, or None."""

    shrink: Mapping[int, int] = field(default_factory=dict)
    drop: Source | None = None
    end_load_only: Source | None = None


class Budget:
    """Plans actions against a budget in bytes; 0: no limit."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._shrink_requested_at = -math.inf
        self._over_since: float | None = None
        # Load-only sources, with the bytes per block when they were dropped.
        self._load_only: dict[Source, float] = {}

    def plan_actions(
        self,
        now: float,
        used_bytes: int,
        blocks: Mapping[Source, int],
        unindexed: Mapping[Source, int],
    ) -> BudgetActions:
        """Returns actions of one tick. blocks: retained; unindexed: estimated, of load-only
        sources."""
        self._load_only = {s: cost for s, cost in self._load_only.items() if s in unindexed}
        if not self.budget_bytes or used_bytes <= self.budget_bytes:
            self._over_since = None
            return self._readmit(used_bytes, unindexed)
        if self._over_since is None:
            self._over_since = now
        if now - self._shrink_requested_at < SHRINK_INTERVAL_S:
            return BudgetActions()
        self._shrink_requested_at = now
        if now - self._over_since >= SHRINK_GRACE_S and any(blocks.values()):
            largest = max(blocks, key=lambda source: blocks[source])
            self._load_only[largest] = used_bytes / sum(blocks.values())
            self._over_since = now
            return BudgetActions(drop=largest)
        return BudgetActions(shrink=self._shares(used_bytes, blocks))

    def _shares(self, used_bytes: int, blocks: Mapping[Source, int]) -> dict[int, int]:
        excess = 1 - TARGET_FRACTION * self.budget_bytes / used_bytes
        shares: Counter[int] = Counter()
        for source, held in blocks.items():
            shares[source.worker_id] += math.ceil(excess * held)
        return +shares

    def _readmit(self, used_bytes: int, unindexed: Mapping[Source, int]) -> BudgetActions:
        for source, block_bytes in self._load_only.items():
            if used_bytes + unindexed[source] * block_bytes <= READMIT_FRACTION * self.budget_bytes:
                del self._load_only[source]
                return BudgetActions(end_load_only=source)
        return BudgetActions()

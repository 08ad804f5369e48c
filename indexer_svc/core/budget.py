"""Keeps the index within its memory: only publishers evict, so it asks them to (pure).

Over budget, every worker is asked for its share of what is too much. If that has not helped for
PATIENCE_S, the largest source becomes load-only: its claims are dropped, its load still counts.
Once there is room for what it then holds, it is admitted. A publisher that dials again comes back
unasked, and is given the same patience again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.kv.events import Source

SHRINK_INTERVAL_S = 1.0
SHRINK_GRACE_S = 10.0
# Shrinking aims below the budget, and room means well below it, or both would flap.
TARGET_FRACTION = 0.9
READMIT_FRACTION = 0.7


@dataclass(frozen=True, slots=True)
class BudgetActions:
    """shrink: blocks to withdraw by worker; drop, admit: a source to make load-only, or no more."""

    shrink: Mapping[int, int] = field(default_factory=dict)
    drop: Source | None = None
    end_load_only: Source | None = None


class Budget:
    """budget_bytes 0: no bound."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._shrink_requested_at = -math.inf
        self._over_since: float | None = None
        # Load-only sources, with what a block cost when they were dropped.
        self._load_only: dict[Source, float] = {}

    def plan_actions(
        self,
        now: float,
        used_bytes: int,
        blocks: Mapping[Source, int],
        unindexed: Mapping[Source, int],
    ) -> BudgetActions:
        """What to do; to be called often.

        blocks: what is kept of each source that is known. withheld: what each load-only source
        holds.
        """
        self._load_only = {
            source: cost for source, cost in self._load_only.items() if source in unindexed
        }
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
        shares: dict[int, int] = {}
        for source, held in blocks.items():
            if held:
                share = shares.get(source.worker_id, 0) + math.ceil(excess * held)
                shares[source.worker_id] = share
        return shares

    def _readmit(self, used_bytes: int, unindexed: Mapping[Source, int]) -> BudgetActions:
        for source, block_bytes in self._load_only.items():
            if used_bytes + unindexed[source] * block_bytes <= READMIT_FRACTION * self.budget_bytes:
                del self._load_only[source]
                return BudgetActions(end_load_only=source)
        return BudgetActions()

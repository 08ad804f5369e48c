"""The recent prefill work of each rank: a decaying sum of blocks (pure).

Every prompt placed on a rank adds the blocks that the rank did not hold. All sums halve in each
half-life, idle or not. They are stored undecayed and scaled when read: an addition at time t is
stored times 2^(t / half_life), and all are divided by 2^(now / half_life).

Invariant: one entry per rank that was added to and not forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from router_svc.core.types import Placement

# Move the reference time before the powers of two reach the limits of a float.
_REBASE_HALF_LIVES = 500.0


class RecentPrefill:
    """Decayed blocks by rank. Times are seconds of one clock; half_life_s must be above 0."""

    def __init__(self, half_life_s: float) -> None:
        assert half_life_s > 0, "half_life_s must be positive"
        self._half_life_s = half_life_s
        self._reference_s: float | None = None
        self._scaled_blocks: dict[Placement, float] = {}

    def add(self, placement: Placement, blocks: float, now: float) -> None:
        """Count a placed prompt of which `blocks` must be computed."""
        if (
            self._reference_s is None
            or now - self._reference_s > _REBASE_HALF_LIVES * self._half_life_s
        ):
            self._rebase(now)
        self._scaled_blocks[placement] = self._scaled_blocks.get(
            placement, 0.0
        ) + blocks / self._decay_factor(now)

    def blocks_of(self, placements: Iterable[Placement], now: float) -> list[float]:
        """The decayed blocks of each rank, in the given order."""
        scaled_blocks = self._scaled_blocks
        if not scaled_blocks:
            return [0.0 for _ in placements]
        decay_factor = self._decay_factor(now)
        return [scaled_blocks.get(placement, 0.0) * decay_factor for placement in placements]

    def forget(self, worker_id: int) -> None:
        """Drop the ranks of a worker that left."""
        for placement in [p for p in self._scaled_blocks if p.worker_id == worker_id]:
            del self._scaled_blocks[placement]

    def __len__(self) -> int:
        return len(self._scaled_blocks)

    def _decay_factor(self, now: float) -> float:
        assert self._reference_s is not None, "call add first"
        # Older blocks are below the range of a float: count them as 0.
        return float(2.0 ** -min((now - self._reference_s) / self._half_life_s, 1000.0))

    def _rebase(self, now: float) -> None:
        if self._reference_s is not None:
            decay_factor = self._decay_factor(now)
            self._scaled_blocks = {p: v * decay_factor for p, v in self._scaled_blocks.items()}
        self._reference_s = now

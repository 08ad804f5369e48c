"""What each rank had to compute lately: a sum that forgets (pure).

Every prompt placed on a rank adds the blocks it did not hold. The sums of all ranks halve in each
half-life, idle or not. They are kept as if that never happened and scaled when read: an addition
at time t is stored times 2^(t / half_life), and all are divided by 2^(now / half_life).

Invariant: as many entries as there are ranks that were added to and not forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from router_svc.core.fleet import Placement

# Powers of two stay far from the limits of a float; then the zero of time moves.
_REBASE_AT = 500.0


class RecentMisses:
    """Decayed blocks by rank. Times are seconds of one clock; half_life_s must be above 0."""

    def __init__(self, half_life_s: float) -> None:
        assert half_life_s > 0, "a half-life is longer than nothing"
        self._half_life_s = half_life_s
        self._zero_s: float | None = None
        self._scaled: dict[Placement, float] = {}

    def add(self, placement: Placement, blocks: float, now: float) -> None:
        """A prompt was placed of which `blocks` must be computed."""
        if self._zero_s is None or now - self._zero_s > _REBASE_AT * self._half_life_s:
            self._rebase(now)
        self._scaled[placement] = self._scaled.get(placement, 0.0) + blocks / self._scale(now)

    def read(self, placements: Iterable[Placement], now: float) -> list[float]:
        """The blocks of each rank as they count now, in the order asked for."""
        scaled = self._scaled
        if not scaled:
            return [0.0 for _ in placements]
        scale = self._scale(now)
        return [scaled.get(placement, 0.0) * scale for placement in placements]

    def forget(self, worker_id: int) -> None:
        """The worker left."""
        for placement in [p for p in self._scaled if p.worker_id == worker_id]:
            del self._scaled[placement]

    def __len__(self) -> int:
        return len(self._scaled)

    def _scale(self, now: float) -> float:
        assert self._zero_s is not None, "nothing was added yet"
        # What is older than the floats reach is nothing.
        return float(2.0 ** -min((now - self._zero_s) / self._half_life_s, 1000.0))

    def _rebase(self, now: float) -> None:
        if self._zero_s is not None:
            scale = self._scale(now)
            self._scaled = {p: v * scale for p, v in self._scaled.items()}
        self._zero_s = now

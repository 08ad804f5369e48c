"""Finds the decode legs that wait for KV blocks, from an engine's count per rank. Pure.

The order in which legs get blocks is up to the engine: a leg may pass others that have not
reached their prefill worker. The count therefore identifies legs only if it equals all open legs
of the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

# Maximum age of a count, and maximum time for which an engine counts an ended leg.
COUNT_AGE_MAX_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Leg:
    rank: int | None
    opened_at: float


class StarvationDetector:
    """Legs without output so far. blocks_timeout_s: limit of a leg's wait for blocks."""

    def __init__(self, blocks_timeout_s: float) -> None:
        self._blocks_timeout_s = blocks_timeout_s
        self._legs: dict[str, _Leg] = {}
        # By rank, the time at which a leg was last closed.
        self._closed_at: dict[int | None, float] = {}

    def open(self, leg_id: str, rank: int | None, now: float) -> None:
        """Adds a leg sent to the engine. rank None: the engine chooses the rank."""
        self._legs[leg_id] = _Leg(rank, now)

    def close(self, leg_id: str, now: float) -> None:
        """Removes a leg that has its first token or ended; no effect on an unknown leg."""
        leg = self._legs.pop(leg_id, None)
        if leg is not None:
            self._closed_at[leg.rank] = now

    def find_starved(self, rank: int, waiting: int, age: float, now: float) -> list[str]:
        """Returns the legs that have waited too long for blocks.

        waiting: number of the rank's legs that waited for blocks `age` seconds ago.
        """
        if not waiting or not 0 <= age < COUNT_AGE_MAX_S:
            return []
        counted_at, ranks = now - age, (rank, None)
        closed_at = max(self._closed_at.get(queue_rank, -inf) for queue_rank in ranks)
        if counted_at - closed_at < COUNT_AGE_MAX_S:
            return []
        legs = {
            leg_id: counted_at - leg.opened_at
            for leg_id, leg in self._legs.items()
            if leg.rank in ranks and leg.opened_at <= counted_at
        }
        if waiting < len(legs):
            return []
        return [leg_id for leg_id, waited in legs.items() if waited >= self._blocks_timeout_s]

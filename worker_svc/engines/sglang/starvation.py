"""Which decode legs wait for KV blocks, where an engine says only how many of a rank do. Pure.

In which order they get blocks is the engine's affair: a leg may pass others whose prefill worker
has not been reached yet. So how many wait tells which only when it is all that were there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

# How old a count may be, and how long an engine may count a leg that has ended.
COUNT_AGE_MAX_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Leg:
    rank: int | None
    opened_at: float


class StarvationDetector:
    """The legs of which nothing was heard yet. blocks_s: how long one may wait for blocks."""

    def __init__(self, blocks_timeout_s: float) -> None:
        self._blocks_timeout_s = blocks_timeout_s
        self._legs: dict[str, _Leg] = {}
        # By rank, when a leg was last closed.
        self._closed_at: dict[int | None, float] = {}

    def open(self, leg_id: str, rank: int | None, now: float) -> None:
        """A leg was given to the engine. rank None: it chooses, and the leg may be anywhere."""
        self._legs[leg_id] = _Leg(rank, now)

    def close(self, leg_id: str, now: float) -> None:
        """It has its first token, or is over; no matter if it is not here."""
        leg = self._legs.pop(leg_id, None)
        if leg is not None:
            self._closed_at[leg.rank] = now

    def find_starved(self, rank: int, waiting: int, age: float, now: float) -> list[str]:
        """Legs that have waited for blocks for too long.

        waiting: how many of the rank's legs did, `age` seconds ago.
        """
        if not waiting or not 0 <= age < COUNT_AGE_MAX_S:
            return []
        counted_at, ranks = now - age, (rank, None)
        if (
            counted_at - max(self._closed_at.get(queue_rank, -inf) for queue_rank in ranks)
            < COUNT_AGE_MAX_S
        ):
            return []
        legs = {
            leg_id: counted_at - leg.opened_at
            for leg_id, leg in self._legs.items()
            if leg.rank in ranks and leg.opened_at <= counted_at
        }
        if waiting < len(legs):
            return []
        return [leg_id for leg_id, waited in legs.items() if waited >= self._blocks_timeout_s]

"""Which decode legs wait for KV blocks, where an engine says only how many of a rank do. Pure.

An engine gives legs their blocks in order: those of a higher priority first, then those that came
first. So if n legs of a rank wait for blocks, a leg is one of them for certain when at most n of
the rank's legs, itself included, may stand behind it. Of the others nothing is known: they may
wait for their partners. What the engine says is a little old, so legs that have just ended may be
among those that wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# How old it may be what an engine says.
OLD_S = 1.0


@dataclass(slots=True)
class _Leg:
    rank: int | None
    priority: int
    opened_at: float
    closed_at: float | None = None


class DecodeQueue:
    """The legs of which nothing was heard yet. blocks_s: how long one may wait for blocks."""

    def __init__(self, blocks_s: float) -> None:
        self._blocks_s = blocks_s
        # In the order in which they came.
        self._legs: dict[str, _Leg] = {}

    def open(self, leg_id: str, rank: int | None, priority: int, now: float) -> None:
        """A leg was given to the engine. rank None: it chooses, and the leg may be anywhere."""
        self._legs[leg_id] = _Leg(rank, priority, now)

    def close(self, leg_id: str, now: float) -> None:
        """It has its first token, or is over; no matter if it is not here."""
        leg = self._legs.get(leg_id)
        if leg is not None and leg.closed_at is None:
            leg.closed_at = now

    def starved(self, waiting: Mapping[int, int], now: float) -> list[str]:
        """Legs that have waited for blocks for too long. waiting: how many do, by rank."""
        self._legs = {
            leg_id: leg
            for leg_id, leg in self._legs.items()
            if leg.closed_at is None or now - leg.closed_at < OLD_S
        }
        return [
            leg_id
            for leg_id, leg in self._legs.items()
            if leg.closed_at is None
            and now - leg.opened_at >= self._blocks_s
            and leg.rank is not None
            and self._may_be_behind(leg_id, leg) <= waiting.get(leg.rank, 0)
        ]

    def _may_be_behind(self, leg_id: str, leg: _Leg) -> int:
        """Legs that are not surely ahead; itself is one."""
        count, is_before = 0, True
        for other_id, other in self._legs.items():
            is_before = is_before and other_id != leg_id
            if other.rank in (leg.rank, None):
                count += not (is_before and other.priority >= leg.priority)
        return count

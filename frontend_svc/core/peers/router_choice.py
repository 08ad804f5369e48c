"""Which router a frontend asks (pure): all share out the frontends, and agree on it unasked.

Every frontend has a *home* router, computed from who is there alone, so that all frontends come to
the same result without a word. A router that failed a frontend is avoided by it for AVOID_S; then
the frontend goes home again.

Invariants: each of r routers is home to floor(f/r) or ceil(f/r) of f frontends; the choice is
always one of the routers there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

# A router that was lost is left alone for so long, if another one answers.
AVOID_S = 5.0

_MASK = 2**64 - 1


def home_of(frontend_id: int, frontends: Iterable[int], routers: Collection[int]) -> int | None:
    """The home of a frontend, whether it is among `frontends` or not; None without routers.

    In order of their ids, each frontend takes the router that it ranks highest and that has room.
    """
    everyone = sorted({frontend_id, *frontends})
    if not routers:
        return None
    room, extras = divmod(len(everyone), len(routers))
    taken = dict.fromkeys(routers, 0)
    for one in everyone:
        open_ = [r for r in routers if taken[r] < room or (taken[r] == room and extras)]
        best = max(open_, key=lambda router: rank(one, router))
        extras -= taken[best] == room
        taken[best] += 1
        if one == frontend_id:
            return best
    raise AssertionError("the frontend is one of everyone")


def rank(frontend_id: int, router_id: int) -> int:
    """How much a frontend likes a router: 64 mixed bits (splitmix64's finalizer) of both ids."""
    x = (frontend_id * 0x9E3779B97F4A7C15 ^ router_id) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


class RouterChoice:
    """One frontend's choice, and what it has against whom. Times are seconds."""

    def __init__(self, frontend_id: int) -> None:
        self._frontend_id = frontend_id
        self._lost_at: dict[int, float] = {}
        self._seen: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self._home: int | None = None

    def lost(self, router_id: int, now: float) -> None:
        """A router failed us."""
        self._lost_at[router_id] = now

    def choose(self, frontends: Iterable[int], routers: Iterable[int], now: float) -> int | None:
        """Home; if that is avoided, the best liked other; if all are, the one lost longest ago.

        None without routers.
        """
        seen = frozenset(frontends), frozenset(routers)
        if seen != self._seen:
            self._seen, self._home = seen, home_of(self._frontend_id, *seen)
            self._lost_at = {r: at for r, at in self._lost_at.items() if r in seen[1]}
        there = seen[1]
        if not there:
            return None
        fit = [r for r in there if now - self._lost_at.get(r, -AVOID_S) >= AVOID_S]
        if self._home in fit:
            return self._home
        if fit:
            return max(fit, key=lambda router: rank(self._frontend_id, router))
        return min(there, key=lambda router: self._lost_at[router])

"""Selects the router of a frontend (pure); frontends are spread evenly over the routers.

Every frontend has a *home* router. It is a function of the present frontends and routers, so all
frontends compute the same assignment without communication. After a failure of a router the
frontend avoids it for AVOID_FAILED_ROUTER_S, then it returns to its home.

Invariants: each of r routers is home to floor(f/r) or ceil(f/r) of f frontends; the choice is
always a present router.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

# How long a failed router is avoided if there is another one.
AVOID_FAILED_ROUTER_S = 5.0

_MASK = 2**64 - 1


def home_router(frontend_id: int, frontends: Iterable[int], routers: Collection[int]) -> int | None:
    """Returns the home of a frontend, which may be missing in `frontends`; None without routers.
    In order of their ids, each frontend takes the highest-weighted router below its quota."""
    all_frontends = sorted({frontend_id, *frontends})
    if not routers:
        return None
    quota, extra_slots = divmod(len(all_frontends), len(routers))
    assigned = dict.fromkeys(routers, 0)
    for frontend in all_frontends:
        below_quota = [
            r for r in routers if assigned[r] < quota or (assigned[r] == quota and extra_slots)
        ]
        best = max(below_quota, key=lambda router: rendezvous_weight(frontend, router))
        extra_slots -= assigned[best] == quota
        assigned[best] += 1
        if frontend == frontend_id:
            return best
    raise AssertionError("the frontend is one of all frontends")


def rendezvous_weight(frontend_id: int, router_id: int) -> int:
    """Rendezvous weight of a pair: 64 mixed bits (splitmix64's finalizer) of both ids."""
    x = (frontend_id * 0x9E3779B97F4A7C15 ^ router_id) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


class RouterSelector:
    """One frontend's choice of a router, and the failures of routers. Times are seconds."""

    def __init__(self, frontend_id: int) -> None:
        self._frontend_id = frontend_id
        self._failed_at: dict[int, float] = {}
        self._home: int | None = None
        # Frontends and routers of the last update.
        self._present: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    def mark_failed(self, router_id: int, now: float) -> None:
        self._failed_at[router_id] = now

    def update(self, frontends: Iterable[int], routers: Iterable[int]) -> None:
        """Takes the present frontends and routers."""
        present = (frozenset(frontends), frozenset(routers))
        if present != self._present:  # O(frontends * routers); most snapshots change only workers.
            self._present = present
            self._failed_at = {r: at for r, at in self._failed_at.items() if r in present[1]}
            self._home = home_router(self._frontend_id, *present)

    def choose(self, now: float) -> int | None:
        """Returns the home router; if avoided, the best other one; if all are, the one that
        failed first. None without routers."""
        _, present = self._present
        if not present:
            return None
        avoided_since = now - AVOID_FAILED_ROUTER_S
        not_avoided = [r for r in present if self._failed_at.get(r, -math.inf) <= avoided_since]
        home = self._home
        if home in not_avoided:
            return home
        if not_avoided:
            return max(not_avoided, key=lambda router: rendezvous_weight(self._frontend_id, router))
        return min(present, key=lambda router: self._failed_at[router])

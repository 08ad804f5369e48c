"""The candidates that a decision in a large fleet computes costs of (pure).

A decision of ten thousand ranks would take ten milliseconds. Only a rank that holds much of the
prompt or has little load can be the cheapest one. So the ranks that hold most are taken, and others
at random: the least loaded one of some hundred is about as good as that of all.
"""

from __future__ import annotations

from random import Random

from common.kv.prefix_index import SourceMatch
from common.request.placement import Placement
from router_svc.core.candidate import Candidates, Matches

CANDIDATES_MAX = 512

# The other candidates are drawn.
_HOLDERS_SHARE = 0.75


def _depth(row: SourceMatch) -> int:
    return row[3]


class Shortlist:
    """Chooses at most `size` candidates; of fewer ones, all."""

    def __init__(self, size: int) -> None:
        assert size > 0, "a decision needs a candidate"
        self._size = size
        # Of the last candidates.
        self._candidates: Candidates = ()
        self._positions: dict[Placement, int] = {}

    def choose(
        self,
        candidates: Candidates,
        matches: Matches,
        rng: Random,
        preferred: Placement | None = None,
    ) -> Candidates:
        """Returns the chosen candidates in their order; the same sequence object if all are.
        preferred: chosen if it is a candidate."""
        count, size = len(candidates), self._size
        if count <= size:
            return candidates
        if candidates is not self._candidates:
            self._candidates = candidates
            self._positions = {c.placement: at for at, c in enumerate(candidates)}
        chosen: set[int] = set()
        if preferred is not None and (at := self._positions.get(preferred)) is not None:
            chosen.add(at)
        holders_max = int(size * _HOLDERS_SHARE)
        for row in sorted(matches.values(), key=_depth, reverse=True):
            if len(chosen) >= holders_max:
                break
            at = self._positions.get(Placement(*row[0]))
            if at is not None:
                chosen.add(at)
        while len(chosen) < size:
            chosen.add(rng.randrange(count))
        return [candidates[at] for at in sorted(chosen)]

"""Candidates with their costs, as selectors return them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router_svc.core.candidate import Candidate, Candidates, LoadTotals
from router_svc.core.cost import Terms


class ScoredCandidate(NamedTuple):
    """A candidate and its cost in the selector's unit; lower is better. terms: None if unknown."""

    candidate: Candidate
    cost: float
    load: LoadTotals
    terms: Terms | None = None


# The fields of `Terms`.
TermValues = tuple[float, float, float, float, float, float]


@dataclass(slots=True, eq=False)
class CandidateCosts:
    """A sequence of candidates with costs, in columns: few of many are read singly. parts: the
    fields of `Terms`; make_parts: returns those of some candidates; None: not reported.
    """

    candidates: Candidates
    costs: Sequence[float]
    loads: Sequence[LoadTotals]
    parts: Sequence[TermValues | None] | None = None
    make_parts: Callable[[Sequence[int]], Sequence[TermValues]] | None = None

    @classmethod
    def of(cls, scored: Scored) -> CandidateCosts:
        if isinstance(scored, CandidateCosts):
            return scored
        candidates, costs, loads, parts = zip(*scored, strict=True) if scored else ((),) * 4
        return cls(candidates, costs, loads, parts)

    def terms(self, at: int) -> Terms | None:
        parts = self._parts_of((at,))
        return None if parts is None or parts[0] is None else Terms._make(parts[0])

    def subset(self, indexes: Sequence[int]) -> CandidateCosts:
        candidates, costs, loads = self.candidates, self.costs, self.loads
        return CandidateCosts(
            [candidates[at] for at in indexes],
            [costs[at] for at in indexes],
            [loads[at] for at in indexes],
            self._parts_of(indexes),
        )

    def _parts_of(self, indexes: Sequence[int]) -> Sequence[TermValues | None] | None:
        if self.make_parts is not None:
            return self.make_parts(indexes)
        parts = self.parts
        return None if parts is None else [parts[at] for at in indexes]

    def __len__(self) -> int:
        return len(self.costs)

    def __iter__(self) -> Iterator[ScoredCandidate]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, at: int) -> ScoredCandidate:
        return ScoredCandidate(self.candidates[at], self.costs[at], self.loads[at], self.terms(at))


# Of any selector.
Scored = CandidateCosts | Sequence[ScoredCandidate]

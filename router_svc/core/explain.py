"""Explains decisions: one row per candidate, made when a caller asks for it (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from common.request.placement import Placement
from router_svc.core.candidate import Candidate, Candidates, Leg, LoadTotals
from router_svc.core.candidate_costs import CandidateCosts
from router_svc.core.cost import Terms
from router_svc.core.eligibility import Excluded
from router_svc.core.overlap import UNKNOWN_STATUS, IndexStatus, IndexStatusProvider
from router_svc.core.scoring import View
from router_svc.core.selectors import Selection


class CandidateRow(NamedTuple):
    """One row of an explanation."""

    placement: Placement
    load: LoadTotals
    cost: float | None = None
    """In the selector's unit; None if not scored or excluded."""

    overlap_blocks: int = 0
    report_age_s: float | None = None
    """Seconds; None without a report."""

    excluded_reason: str = ""
    """Empty if the candidate was eligible."""

    leg: Leg = "whole"
    terms: Terms | None = None
    """None if the selector reports none."""

    index_status: IndexStatus = UNKNOWN_STATUS
    name: str = ""
    """Stable name of the worker; empty: it has none."""


@dataclass(slots=True)
class LegPlan:
    """The selection of one leg. kept: the eligible candidates."""

    choice: Selection
    view: View
    kept: Candidates
    excluded: Sequence[Excluded]

    @property
    def chosen(self) -> Candidate:
        return self.choice.candidate


@dataclass(slots=True, eq=False)
class LegRecord:
    """What the rows of one leg show, in columns: each decision stores one, few are read.

    The columns contain the `scored` candidates first, then the `others`.
    """

    leg: Leg
    now: float
    index: IndexStatusProvider
    scored: CandidateCosts
    """Candidates with `costs`, `loads` and `terms`."""

    others: Sequence[tuple[Candidate, str, LoadTotals]]
    """Candidates without a cost; those that are excluded have a reason."""

    overlaps: Sequence[int]
    """Blocks of the prompt that each candidate holds, the scored ones first."""

    reported_at: Sequence[float | None]
    """Time of the last load report of each candidate, the scored ones first."""

    def rows(self) -> list[CandidateRow]:
        """Returns scored candidates, cheapest first, then the others. The state of the index is the
        present one.
        """
        costs, scored = self.scored.costs, self.scored
        by_cost = sorted(range(len(costs)), key=costs.__getitem__)
        rows = [
            self._row(scored.candidates[at], scored.loads[at], at, "", costs[at], scored.terms(at))
            for at in by_cost
        ]
        for at, (candidate, reason, load) in enumerate(self.others, len(costs)):
            rows.append(self._row(candidate, load, at, reason, None, None))
        return rows

    def _row(
        self,
        candidate: Candidate,
        load: LoadTotals,
        at: int,
        reason: str,
        cost: float | None,
        terms: Terms | None,
    ) -> CandidateRow:
        placement = candidate.placement
        status = self.index.index_status(placement, self.now)
        overlap, reported_at = self.overlaps[at], self.reported_at[at]
        age_s = None if reported_at is None else self.now - reported_at
        name, leg = candidate.instance.stable_name, self.leg
        return CandidateRow(placement, load, cost, overlap, age_s, reason, leg, terms, status, name)


def record_leg(leg_plan: LegPlan, index: IndexStatusProvider, rows_max: int | None) -> LegRecord:
    """Returns the record of at most `rows_max` rows, None for all: of the scored candidates,
    cheapest first, then of the others, the chosen one first, then of the excluded ones. The chosen
    candidate is always included.
    """
    view, scored = leg_plan.view, CandidateCosts.of(leg_plan.choice.scored)
    count, are_all_scored = len(scored), len(scored) == len(leg_plan.kept)
    if rows_max is not None and (count > rows_max or (count == rows_max and not are_all_scored)):
        scored = scored.subset(_with_chosen(scored, leg_plan.chosen, rows_max))
    others: Sequence[tuple[Candidate, str, LoadTotals]] = ()
    if (leg_plan.excluded or not are_all_scored) and len(scored) != rows_max:
        unscored = chain(
            ((candidate, "") for candidate in _without_cost(scored.candidates, leg_plan)),
            leg_plan.excluded,
        )
        remaining = None if rows_max is None else rows_max - len(scored)
        others = [
            (candidate, why, view.load(candidate.placement))
            for candidate, why in islice(unscored, remaining)
        ]
    placements = [candidate.placement for candidate in scored.candidates]
    placements += [candidate.placement for candidate, _, _ in others]
    matches = view.matches
    return LegRecord(
        view.leg,
        view.now,
        index,
        scored,
        others,
        [matches[at].disk_blocks if at in matches else 0 for at in placements],
        list(map(view.load_tracker.ranks.reported_at, placements)),
    )


def _with_chosen(scored: CandidateCosts, chosen: Candidate, rows_max: int) -> Sequence[int]:
    """Returns the cheapest ones. The chosen candidate replaces the last if it costs more, and gets
    a row without a cost later if it has none: some selectors score other candidates only.
    """
    costs, candidates = scored.costs, scored.candidates
    limit = sorted(costs)[rows_max - 1]
    within_limit = [at for at, cost in enumerate(costs) if cost <= limit]
    cheapest = sorted(within_limit, key=costs.__getitem__)[:rows_max]
    for at in (*cheapest, *range(len(costs))):
        if candidates[at].placement == chosen.placement:
            return cheapest if at in cheapest else [*cheapest[:-1], at]
    return cheapest[:-1]


def _without_cost(scored: Candidates, leg_plan: LegPlan) -> Iterator[Candidate]:
    """Yields the eligible candidates without a cost, the chosen one first."""
    if len(scored) == len(leg_plan.kept):
        return
    with_cost, chosen = {candidate.placement for candidate in scored}, leg_plan.chosen
    if chosen.placement not in with_cost:
        yield chosen
        with_cost.add(chosen.placement)
    yield from (candidate for candidate in leg_plan.kept if candidate.placement not in with_cost)


def candidate_row(candidate: Candidate, view: View, index: IndexStatusProvider) -> CandidateRow:
    """Returns a row without a cost."""
    at, now, ranks = candidate.placement, view.now, view.load_tracker.ranks
    age_s, status = ranks.report_age_s(at, now), index.index_status(at, now)
    load, overlap, name = view.load(at), view.overlap(at), candidate.instance.stable_name
    return CandidateRow(at, load, None, overlap, age_s, index_status=status, name=name)

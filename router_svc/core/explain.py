"""Explains decisions: one row per candidate (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from router_svc.core.cost import Terms
from router_svc.core.eligibility import Excluded
from router_svc.core.overlap import UNKNOWN_STATUS, IndexStatus, IndexStatusProvider
from router_svc.core.selectors import CandidateCosts, Selection, View
from router_svc.core.types import Candidate, Candidates, Leg, LoadTotals, Placement


class CandidateRow(NamedTuple):
    """One row of an explanation. A tuple, because every decision makes some. cost: in the
    selector's unit; None if not scored or excluded. terms: None if the selector reports none.
    report_age_s: seconds; None without a report. excluded_reason: empty if the candidate was
    eligible.
    """

    placement: Placement
    load: LoadTotals
    cost: float | None = None
    overlap_blocks: int = 0
    report_age_s: float | None = None
    excluded_reason: str = ""
    leg: Leg = "whole"
    terms: Terms | None = None
    index_status: IndexStatus = UNKNOWN_STATUS


@dataclass(frozen=True, slots=True)
class LegPlan:
    """The selection of one leg. kept: the eligible candidates."""

    choice: Selection
    view: View
    kept: Candidates
    excluded: Sequence[Excluded]

    @property
    def chosen(self) -> Candidate:
        return self.choice.candidate


def explain(
    leg_plan: LegPlan, index: IndexStatusProvider, rows_max: int | None
) -> list[CandidateRow]:
    """Rows of the scored candidates, cheapest first, then of the others, the chosen one first, then
    of the excluded ones. rows_max: None for all; the chosen candidate is always included.
    """
    choice, view = leg_plan.choice, leg_plan.view
    candidate_costs = CandidateCosts.of(choice.scored)
    candidates, costs = candidate_costs.candidates, candidate_costs.costs
    loads = candidate_costs.loads
    shown_indexes: Sequence[int] = sorted(range(len(costs)), key=costs.__getitem__)
    if rows_max is not None and len(shown_indexes) >= rows_max:
        shown_indexes = _with_chosen(shown_indexes, candidates, leg_plan.chosen, rows_max)
    rows = [
        candidate_row(candidates[at], view, index, loads[at], costs[at], candidate_costs.terms(at))
        for at in shown_indexes
    ]
    if rows_max == len(rows):
        return rows
    others = ((candidate, "") for candidate in _without_cost(candidates, leg_plan))
    remaining = None if rows_max is None else rows_max - len(rows)
    unscored = islice(chain(others, leg_plan.excluded), remaining)
    rows += [candidate_row(candidate, view, index, reason=reason) for candidate, reason in unscored]
    return rows


def _with_chosen(
    by_cost: Sequence[int], candidates: Candidates, chosen: Candidate, rows_max: int
) -> Sequence[int]:
    """The cheapest ones. The chosen candidate replaces the last if it costs more, and gets a row
    without a cost later if it has none: some selectors score other candidates only.
    """
    for number, at in enumerate(by_cost):
        if candidates[at].placement == chosen.placement:
            return by_cost[:rows_max] if number < rows_max else [*by_cost[: rows_max - 1], at]
    return by_cost[: rows_max - 1]


def _without_cost(scored: Candidates, leg_plan: LegPlan) -> Iterator[Candidate]:
    """The eligible candidates without a cost, the chosen one first."""
    if len(scored) == len(leg_plan.kept):
        return
    with_cost, chosen = {one.placement for one in scored}, leg_plan.chosen
    if chosen.placement not in with_cost:
        yield chosen
        with_cost.add(chosen.placement)
    yield from (one for one in leg_plan.kept if one.placement not in with_cost)


def candidate_row(
    candidate: Candidate,
    view: View,
    index: IndexStatusProvider,
    load: LoadTotals | None = None,
    cost: float | None = None,
    terms: Terms | None = None,
    *,
    reason: str = "",
) -> CandidateRow:
    at, now, load_tracker = candidate.placement, view.now, view.load_tracker
    if load is None:
        load = load_tracker.load(at, now)
    age_s, index_status = load_tracker.ranks.report_age_s(at, now), index.index_status(at, now)
    fields = (at, load, cost, view.overlap(at), age_s, reason, view.leg, terms, index_status)
    return tuple.__new__(CandidateRow, fields)  # Half the time of the call that does the same.

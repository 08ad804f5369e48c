"""Why a decision was made: one row for each candidate (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from router_svc.core.cost import Terms
from router_svc.core.eligibility import Excluded
from router_svc.core.overlap import UNKNOWN_STATUS, IndexStatus, IndexStatusProvider
from router_svc.core.selectors import CandidateCosts, Selection, View
from router_svc.core.types import Candidate, Leg, LoadTotals, Placement


class CandidateRow(NamedTuple):
    """One row of an explanation. A tuple, because every decision makes some.

    cost: in the selector's unit, None if it put no price on it or must not choose it; terms: what
    it is made of, None if the selector does not say. report_age_s: None without report.
    excluded_why: empty if it could have been chosen. leg: what it was considered for.
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
    """Who was chosen for a leg, among whom, by what view. of: how many there were at first."""

    choice: Selection
    view: View
    kept: Sequence[Candidate]
    excluded: Sequence[Excluded]
    of: int

    @property
    def chosen(self) -> Candidate:
        return self.choice.candidate


def explain(pick: LegPlan, index: IndexStatusProvider, rows_max: int | None) -> list[CandidateRow]:
    """The priced ones, cheapest first, then the unpriced, the chosen one first, then the excluded.

    With a limit: of all these as many, always the chosen one among them, with its price if it has
    one.
    """
    choice, view = pick.choice, pick.view
    candidate_costs = CandidateCosts.of(choice.scored)
    candidates, costs, loads = (
        candidate_costs.candidates,
        candidate_costs.costs,
        candidate_costs.loads,
    )
    shown_indexes: Sequence[int] = sorted(range(len(costs)), key=costs.__getitem__)
    if rows_max is not None and len(shown_indexes) >= rows_max:
        shown_indexes = _with_chosen(shown_indexes, candidates, pick.chosen, rows_max)
    rows = [
        candidate_row(candidates[at], view, index, loads[at], costs[at], candidate_costs.terms(at))
        for at in shown_indexes
    ]
    remaining = None if rows_max is None else rows_max - len(rows)
    if remaining == 0:
        return rows
    without_cost = islice(_without_cost(candidates, pick), remaining)
    rows += [candidate_row(candidate, view, index) for candidate in without_cost]
    remaining = None if rows_max is None else rows_max - len(rows)
    excluded = islice(pick.excluded, remaining)
    rows += [candidate_row(candidate, view, index, reason=reason) for candidate, reason in excluded]
    return rows


def _with_chosen(
    by_cost: Sequence[int], candidates: Sequence[Candidate], chosen: Candidate, rows_max: int
) -> Sequence[int]:
    """The cheapest, of which the last gives way to the chosen one if that is priced higher, or not
    at all: some selectors price others only.
    """
    for number, at in enumerate(by_cost):
        if candidates[at].placement == chosen.placement:
            return by_cost[:rows_max] if number < rows_max else [*by_cost[: rows_max - 1], at]
    return by_cost[: rows_max - 1]


def _without_cost(scored: Sequence[Candidate], pick: LegPlan) -> Iterator[Candidate]:
    """Those that could have been chosen and have no price, the chosen one first."""
    if len(scored) == len(pick.kept):
        return
    with_cost, chosen = {one.placement for one in scored}, pick.chosen
    if chosen.placement not in with_cost:
        yield chosen
        with_cost.add(chosen.placement)
    yield from (one for one in pick.kept if one.placement not in with_cost)


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
    """One candidate as the view shows it."""
    at, now, book = candidate.placement, view.now, view.book
    if load is None:
        load = book.load(at, now)
    age_s, index_status = book.ranks.report_age_s(at, now), index.index_status(at, now)
    fields = (at, load, cost, view.overlap(at), age_s, reason, view.leg, terms, index_status)
    return tuple.__new__(CandidateRow, fields)  # Half the time of the call that does the same.

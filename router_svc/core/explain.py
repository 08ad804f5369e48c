"""Why a decision was made: one row for each candidate (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from router_svc.core.cost import Terms
from router_svc.core.filters import Excluded, Leg
from router_svc.core.fleet import Candidate, Placement
from router_svc.core.load import Totals
from router_svc.core.overlap import UNKNOWN, Standing, Standings
from router_svc.core.select import Choice, View

_by_cost = attrgetter("cost")


class Considered(NamedTuple):
    """One row of an explanation. A tuple, because every decision makes some.

    cost: in the selector's unit, None if it put no price on it; terms: what it is made of, None if
    the selector does not say. report_age_s: None without report. excluded_why: empty if it could
    have been chosen. leg: what it was considered for.
    """

    placement: Placement
    load: Totals
    cost: float | None = None
    overlap_blocks: int = 0
    report_age_s: float | None = None
    excluded_why: str = ""
    leg: Leg = "whole"
    terms: Terms | None = None
    standing: Standing = UNKNOWN


@dataclass(frozen=True, slots=True)
class Pick:
    """Who was chosen for a leg, among whom, by what view. of: how many there were at first."""

    choice: Choice
    view: View
    kept: Sequence[Candidate]
    excluded: Sequence[Excluded]
    of: int

    @property
    def chosen(self) -> Candidate:
        return self.choice.candidate


def explain(pick: Pick, index: Standings, rows_max: int | None) -> list[Considered]:
    """The priced ones, cheapest first, then (without a limit) the unpriced, then the excluded.

    With a limit the chosen one is always among the rows.
    """
    choice, view = pick.choice, pick.view
    ranked = sorted(choice.scored, key=_by_cost)[:rows_max]
    rows = [
        row(one.candidate, view, index, load=one.load, cost=one.cost, terms=one.terms)
        for one in ranked
    ]
    excluded = pick.excluded
    if rows_max is None:
        priced = {priced.placement for priced in rows}
        rows += [row(one, view, index) for one in pick.kept if one.placement not in priced]
    else:
        chosen = pick.chosen
        if all(other.placement != chosen.placement for other in rows):
            rows.insert(0, row(chosen, view, index))
        excluded = excluded[: max(0, rows_max - len(rows))]
    rows += [row(one.candidate, view, index, why=one.why) for one in excluded]
    return rows


def row(
    candidate: Candidate,
    view: View,
    index: Standings,
    *,
    load: Totals | None = None,
    cost: float | None = None,
    terms: Terms | None = None,
    why: str = "",
) -> Considered:
    """One candidate as the view shows it."""
    at, now = candidate.placement, view.now
    return Considered(
        at,
        view.load(at) if load is None else load,
        cost,
        view.overlap(at),
        view.book.report_age_s(at, now),
        why,
        view.leg,
        terms,
        index.standing(at, now),
    )

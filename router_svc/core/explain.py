"""Why a decision was made: one row for each candidate (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from router_svc.core.cost import Terms
from router_svc.core.filters import Excluded, Leg
from router_svc.core.fleet import Candidate, Placement
from router_svc.core.load import Totals
from router_svc.core.overlap import UNKNOWN, Standing, Standings
from router_svc.core.select import Choice, Scored, View

_by_cost = attrgetter("cost")


class Considered(NamedTuple):
    """One row of an explanation. A tuple, because every decision makes some.

    cost: in the selector's unit, None if it put no price on it or must not choose it; terms: what
    it is made of, None if the selector does not say. report_age_s: None without report.
    excluded_why: empty if it could have been chosen. leg: what it was considered for.
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
    """The priced ones, cheapest first, then the unpriced, the chosen one first, then the excluded.

    With a limit: of all these as many, always the chosen one among them, with its price if it has
    one.
    """
    choice, view = pick.choice, pick.view
    ranked = sorted(choice.scored, key=_by_cost)
    shown = ranked if rows_max is None else _with_chosen(ranked, pick.chosen, rows_max)
    rows = [
        row(one.candidate, view, index, load=one.load, cost=one.cost, terms=one.terms)
        for one in shown
    ]
    left = None if rows_max is None else rows_max - len(rows)
    unpriced = islice(_unpriced(ranked, pick), left)
    rows += [row(candidate, view, index) for candidate in unpriced]
    left = None if rows_max is None else rows_max - len(rows)
    excluded = islice(pick.excluded, left)
    rows += [row(one.candidate, view, index, why=one.why) for one in excluded]
    return rows


def _with_chosen(ranked: Sequence[Scored], chosen: Candidate, rows_max: int) -> Sequence[Scored]:
    """The cheapest, of which the last gives way to the chosen one if that is priced higher."""
    at = chosen.placement
    shown = ranked[:rows_max]
    if all(one.candidate.placement != at for one in shown):
        priced = (one for one in ranked[rows_max:] if one.candidate.placement == at)
        if (its := next(priced, None)) is not None:
            return [*shown[:-1], its]
        # A selector that priced others only.
        return ranked[: rows_max - 1]
    return shown


def _unpriced(ranked: Sequence[Scored], pick: Pick) -> Iterator[Candidate]:
    """Those that could have been chosen and have no price, the chosen one first."""
    if len(ranked) == len(pick.kept):
        return
    priced, chosen = {one.candidate.placement for one in ranked}, pick.chosen
    if chosen.placement not in priced:
        yield chosen
        priced.add(chosen.placement)
    yield from (one for one in pick.kept if one.placement not in priced)


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

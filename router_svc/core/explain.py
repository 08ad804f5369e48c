"""Why a decision was made: one row for each candidate (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from router_svc.core.cost import Terms
from router_svc.core.eligibility import Excluded, Leg
from router_svc.core.fleet import Candidate, Placement
from router_svc.core.load_tracker import Totals
from router_svc.core.overlap import UNKNOWN, Standing, Standings
from router_svc.core.selectors import Choice, Prices, View


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
    prices = Prices.of(choice.scored)
    candidates, costs, loads = prices.candidates, prices.costs, prices.loads
    shown: Sequence[int] = sorted(range(len(costs)), key=costs.__getitem__)
    if rows_max is not None and len(shown) >= rows_max:
        shown = _with_chosen(shown, candidates, pick.chosen, rows_max)
    rows = [
        row(candidates[at], view, index, loads[at], costs[at], prices.terms(at)) for at in shown
    ]
    left = None if rows_max is None else rows_max - len(rows)
    if left == 0:
        return rows
    unpriced = islice(_unpriced(candidates, pick), left)
    rows += [row(candidate, view, index) for candidate in unpriced]
    left = None if rows_max is None else rows_max - len(rows)
    excluded = islice(pick.excluded, left)
    rows += [row(candidate, view, index, why=why) for candidate, why in excluded]
    return rows


def _with_chosen(
    ranked: Sequence[int], candidates: Sequence[Candidate], chosen: Candidate, rows_max: int
) -> Sequence[int]:
    """The cheapest, of which the last gives way to the chosen one if that is priced higher, or not
    at all: some selectors price others only.
    """
    for number, at in enumerate(ranked):
        if candidates[at].placement == chosen.placement:
            return ranked[:rows_max] if number < rows_max else [*ranked[: rows_max - 1], at]
    return ranked[: rows_max - 1]


def _unpriced(scored: Sequence[Candidate], pick: Pick) -> Iterator[Candidate]:
    """Those that could have been chosen and have no price, the chosen one first."""
    if len(scored) == len(pick.kept):
        return
    priced, chosen = {one.placement for one in scored}, pick.chosen
    if chosen.placement not in priced:
        yield chosen
        priced.add(chosen.placement)
    yield from (one for one in pick.kept if one.placement not in priced)


def row(
    candidate: Candidate,
    view: View,
    index: Standings,
    load: Totals | None = None,
    cost: float | None = None,
    terms: Terms | None = None,
    *,
    why: str = "",
) -> Considered:
    """One candidate as the view shows it."""
    at, now, book = candidate.placement, view.now, view.book
    if load is None:
        load = book.load(at, now)
    age_s, standing = book.report_age_s(at, now), index.standing(at, now)
    facts = (at, load, cost, view.overlap(at), age_s, why, view.leg, terms, standing)
    return tuple.__new__(Considered, facts)  # Half the time of the call that does the same.

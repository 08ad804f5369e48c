"""Whether a worker has room for one more prompt, and whom those wait for who find none (pure).

A rank has room for a leg if it is not prefill-busy, where the leg computes a prompt, and its worker
is not above a busy threshold for that leg; a decode worker that is to compute a prompt which could
be split must have room by `Bypass`. A request waits while none of those who may compute its prompt
has room. For it to be placed, one rank that has no room now must get some: those are the *spots*
that it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from common.errors import InvalidRequest, Overloaded, Unavailable
from router_svc.core.admission import Spot
from router_svc.core.busy import busy_workers
from router_svc.core.eligibility import Leg, eligible
from router_svc.core.fleet import Candidate, Fleet, Placement
from router_svc.core.load_tracker import LoadBook
from router_svc.core.placement import Ask, Picker, Picks
from router_svc.core.policy import Rules
from router_svc.core.query import Query

LEGS: tuple[Leg, ...] = get_args(Leg)


class Room:
    """Of the ranks of one router's fleet. Times are seconds of one clock."""

    def __init__(self, fleet: Fleet, book: LoadBook, picker: Picker, rules: Rules) -> None:
        self._fleet = fleet
        self._book = book
        self._picker = picker
        self._rules = rules
        # Whether only prefill-busy workers make anybody wait; otherwise load also says who may
        # serve at all.
        self._has_gate = rules.bypass.decode_busy_threshold is not None
        self._is_simple = rules.busy.are_off and not self._has_gate and rules.bypass.policy == "off"

    def has(self, spot: Spot, now: float, query: Query | None = None) -> bool:
        """Whether the rank has room for the leg; query: also by the gate, for that one."""
        at = self._fleet.candidate(spot.placement)
        if at is None or not self._takes(at, spot.leg, now, query):
            return False
        return not self._busy((at,), spot.leg, now)

    def is_gated(self, ask: Ask) -> bool:
        """Whether a decode worker computes the prompt only if `Bypass` finds room there: whoever
        cannot be split has no other choice, and is let in.
        """
        return self._has_gate and self._picker.can_split(ask)

    def spots(self, ask: Ask, picks: Picks | None) -> frozenset[Spot]:
        """Whom the query waits for, of whom nobody has room now. picks: in vain, None if they
        failed because all are busy.
        """
        if self._is_simple and picks is not None:
            return frozenset(Spot(at.placement, _prefilling(at)) for at in picks.waits_for)
        spots: set[Spot] = set()
        gated = ask.query if self.is_gated(ask) else None
        for leg in LEGS:
            among = self._may_serve(ask, leg)
            busy = self._busy(among, leg, ask.now)
            spots.update(
                Spot(at.placement, leg)
                for at in among
                if at.placement.worker_id in busy or not self._takes(at, leg, ask.now, gated)
            )
        return frozenset(spots)

    def everywhere(self, ask: Ask) -> frozenset[Spot]:
        """All by whom the prompt might be computed, whether they have room or not."""
        legs: tuple[Leg, ...] = ("prefill", "whole")
        return frozenset(
            Spot(at.placement, leg) for leg in legs for at in self._may_serve(ask, leg)
        )

    def near(self, placement: Placement) -> Sequence[Placement]:
        """The ranks that may have got room when this one was relieved."""
        at = None if self._rules.busy.are_off else self._fleet.candidate(placement)
        if at is None or at.instance.dp_size == 1:
            return (placement,)
        return [c.placement for c in self._fleet.ranks_of(placement.worker_id)]

    def _takes(self, at: Candidate, leg: Leg, now: float, query: Query | None) -> bool:
        """Whether the rank has room, if its worker is not busy."""
        if leg != "decode" and self._picker.are_full((at,), now):
            return False
        if query is None or leg != "whole" or at.instance.role != "decode":
            return True
        return self._picker.passes_gate(query, at, now)

    def _busy(self, among: Sequence[Candidate], leg: Leg, now: float) -> frozenset[int]:
        """Ids of the workers of `among` that are above a busy threshold, by all of their ranks."""
        limits, book, fleet = self._rules.busy, self._book, self._fleet
        if limits.are_off:
            return frozenset()
        workers = {at.placement.worker_id for at in among}
        ranks = [rank for worker_id in workers for rank in fleet.ranks_of(worker_id)]
        return busy_workers(ranks, lambda rank: book.load(rank, now), limits, leg)

    def _may_serve(self, ask: Ask, leg: Leg) -> Sequence[Candidate]:
        """Whoever could, were nobody busy; wishes are put aside."""
        model, fleet = ask.query.model, self._fleet
        if leg == "whole":
            local = [c for c in fleet.candidates(model, "decode") if c.instance.local_prefill]
            among: Sequence[Candidate] = (*fleet.candidates(model, "aggregated"), *local)
        else:
            among = fleet.candidates(model, leg)
        if not among:
            return ()
        tie = ask.tie(leg)
        try:
            kept, _ = eligible(
                ask.query,
                among,
                leg,
                tie=tie if tie is not None and tie.is_hard else None,
                residency=self._rules.lora_residency,
                has_room=_anybody,
            )
        except (Unavailable, InvalidRequest, Overloaded):
            return ()
        return kept


def _prefilling(at: Candidate) -> Leg:
    """The leg for which the rank computes prompts."""
    return "prefill" if at.instance.role == "prefill" else "whole"


def _anybody(candidate: Candidate) -> bool:
    return True

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
from router_svc.core.busy import busy_worker_ids
from router_svc.core.eligibility import eligible
from router_svc.core.fleet import Fleet
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.placement import PlacementRequest, Planner, ServingPlan
from router_svc.core.policy import Policy
from router_svc.core.query import Query
from router_svc.core.types import Candidate, Leg, Placement, RankCapacity

LEGS: tuple[Leg, ...] = get_args(Leg)


class Capacity:
    """Of the ranks of one router's fleet. Times are seconds of one clock."""

    def __init__(self, fleet: Fleet, book: LoadTracker, planner: Planner, policy: Policy) -> None:
        self._fleet = fleet
        self._book = book
        self._planner = planner
        self._policy = policy
        # Whether only prefill-busy workers make anybody wait; otherwise load also says who may
        # serve at all.
        self._has_decode_gate = policy.bypass.decode_busy_threshold is not None
        self._blocks_on_prefill_only = (
            policy.busy.is_disabled and not self._has_decode_gate and policy.bypass.policy == "off"
        )

    def has(self, slot: RankCapacity, now: float, query: Query | None = None) -> bool:
        """Whether the rank has room for the leg; query: also by the gate, for that one."""
        at = self._fleet.candidate(slot.placement)
        if at is None or not self._accepts(at, slot.leg, now, query):
            return False
        return not self._busy((at,), slot.leg, now)

    def is_gated(self, placement_request: PlacementRequest) -> bool:
        """Whether a decode worker computes the prompt only if `Bypass` finds room there: whoever
        cannot be split has no other choice, and is let in.
        """
        return self._has_decode_gate and self._planner.can_split(placement_request)

    def slots(
        self, placement_request: PlacementRequest, plan: ServingPlan | None
    ) -> frozenset[RankCapacity]:
        """Whom the query waits for, of whom nobody has room now. picks: in vain, None if they
        failed because all are busy.
        """
        if self._blocks_on_prefill_only and plan is not None:
            return frozenset(
                RankCapacity(at.placement, _prompt_leg(at)) for at in plan.blocked_candidates
            )
        slots: set[RankCapacity] = set()
        gated_query = placement_request.query if self.is_gated(placement_request) else None
        for leg in LEGS:
            candidates = self._may_serve(placement_request, leg)
            busy = self._busy(candidates, leg, placement_request.now)
            slots.update(
                RankCapacity(at.placement, leg)
                for at in candidates
                if at.placement.worker_id in busy
                or not self._accepts(at, leg, placement_request.now, gated_query)
            )
        return frozenset(slots)

    def all_slots(self, placement_request: PlacementRequest) -> frozenset[RankCapacity]:
        """All by whom the prompt might be computed, whether they have room or not."""
        legs: tuple[Leg, ...] = ("prefill", "whole")
        return frozenset(
            RankCapacity(at.placement, leg)
            for leg in legs
            for at in self._may_serve(placement_request, leg)
        )

    def affected_ranks(self, placement: Placement) -> Sequence[Placement]:
        """The ranks that may have got room when this one was relieved."""
        at = None if self._policy.busy.is_disabled else self._fleet.candidate(placement)
        if at is None or at.instance.dp_size == 1:
            return (placement,)
        return [c.placement for c in self._fleet.ranks_of(placement.worker_id)]

    def _accepts(self, at: Candidate, leg: Leg, now: float, query: Query | None) -> bool:
        """Whether the rank has room, if its worker is not busy."""
        if leg != "decode" and self._planner.are_prefill_busy((at,), now):
            return False
        if query is None or leg != "whole" or at.instance.role != "decode":
            return True
        return self._planner.passes_gate(query, at, now)

    def _busy(self, candidates: Sequence[Candidate], leg: Leg, now: float) -> frozenset[int]:
        """Ids of the workers of `candidates` that are above a busy threshold, by all of their
        ranks."""
        busy_limits, book, fleet = self._policy.busy, self._book, self._fleet
        if busy_limits.is_disabled:
            return frozenset()
        workers = {at.placement.worker_id for at in candidates}
        ranks = [rank for worker_id in workers for rank in fleet.ranks_of(worker_id)]
        return busy_worker_ids(ranks, lambda rank: book.load(rank, now), busy_limits, leg)

    def _may_serve(self, placement_request: PlacementRequest, leg: Leg) -> Sequence[Candidate]:
        """Whoever could, were nobody busy; wishes are put aside."""
        model, fleet = placement_request.query.model, self._fleet
        if leg == "whole":
            local = [c for c in fleet.candidates(model, "decode") if c.instance.local_prefill]
            candidates: Sequence[Candidate] = (*fleet.candidates(model, "aggregated"), *local)
        else:
            candidates = fleet.candidates(model, leg)
        if not candidates:
            return ()
        affinity_constraint = placement_request.affinity_constraint(leg)
        try:
            kept, _ = eligible(
                placement_request.query,
                candidates,
                leg,
                affinity_constraint=affinity_constraint
                if affinity_constraint is not None and affinity_constraint.is_hard
                else None,
                residency=self._policy.lora_residency,
                has_capacity=_accept_all,
            )
        except (Unavailable, InvalidRequest, Overloaded):
            return ()
        return kept


def _prompt_leg(at: Candidate) -> Leg:
    """The leg for which the rank computes prompts."""
    return "prefill" if at.instance.role == "prefill" else "whole"


def _accept_all(candidate: Candidate) -> bool:
    return True

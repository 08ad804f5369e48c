"""The result of a placement: the decision, its reasons and its booking (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.request.placement import Decision, Query
from router_svc.core.booking import Booking, BookingKey
from router_svc.core.explain import CandidateRow, LegRecord, record_leg
from router_svc.core.key_affinity import key_outcome
from router_svc.core.overlap import Overlaps
from router_svc.core.pairing import make_bootstrap_info
from router_svc.core.placement import PlacementAttempt, ServingPlan, cached_tokens
from router_svc.core.query import block_size_of, bookable_decode_blocks, bookable_prefill_tokens

# Candidates per leg that a stored decision keeps, cheapest first; a preview keeps all.
CONSIDERED_MAX = 8


@dataclass(slots=True)
class DecisionRecord:
    """A decision, and what only this router keeps of it."""

    decision: Decision
    selector: str
    """Name of the selector."""

    made_at: float
    """`now` of the decision."""

    fallback: str = ""
    """One of `placement.FALLBACK_REASONS`, or empty."""

    bypass: str = ""
    """One of `pairing.BYPASS_REASONS`, or empty."""

    affinity: str = ""
    """One of `sessions.AFFINITY_OUTCOMES`, or empty."""

    key_affinity: str = ""
    """One of `key_affinity.KEY_OUTCOMES`, or empty."""

    legs: tuple[LegRecord, ...] = field(default=(), compare=False)
    """What `considered` shows."""

    @property
    def considered(self) -> list[CandidateRow]:
        """Candidates per leg, cheapest first."""
        return [row for leg in self.legs for row in leg.rows()]


def make_decision(
    attempt: PlacementAttempt,
    plan: ServingPlan,
    overlaps: Overlaps,
    considered_max: int | None,
    queued_s: float | None = None,
    session_revision: int = 0,
) -> DecisionRecord:
    """Returns the decision of a plan. considered_max: rows per leg, None: all. queued_s: None:
    unqueued."""
    query, prefill, worker = attempt.query, plan.prefill, plan.worker.chosen
    at, selector = plan.prompt_leg.chosen, attempt.planner.selector.name
    overlap = plan.prompt_leg.view.overlap(at.placement)
    predicted_cached = cached_tokens(query, plan.prompt_leg)
    session = attempt.session_constraint
    affinity = "" if session is None else session.outcome(worker.placement)
    legs = [leg for leg in (prefill, plan.worker) if leg is not None]
    reasons = _reasons(query, plan, overlaps, selector)
    if affinity:
        reasons.append(f"session {affinity}")
    key_affinity = ""
    if query.affinity_key:
        key_affinity = key_outcome(attempt.key_home, at.placement)
        reasons.append(f"affinity key {key_affinity}")
    if queued_s is not None:
        reasons.append(f"queued for {queued_s * 1000:.0f} ms")
    decision = Decision(
        worker.placement,
        None if prefill is None else at.placement,
        overlap_blocks=overlap,
        bootstrap=None if prefill is None else make_bootstrap_info(at, attempt.rng),
        reasons=tuple(reasons),
        predicted_cached_tokens=predicted_cached,
        queued_ms=round(queued_s * 1000) if queued_s else 0,
        prefill_tokens=bookable_prefill_tokens(query, predicted_cached, attempt.cost_settings),
        decode_blocks=bookable_decode_blocks(
            query, block_size_of(query, worker.instance.block_size), attempt.cost_settings
        ),
        session_revision=session_revision,
    )
    return DecisionRecord(
        decision,
        selector,
        attempt.now,
        fallback=plan.fallback,
        bypass=plan.bypass,
        affinity=affinity,
        key_affinity=key_affinity,
        legs=tuple([record_leg(leg, overlaps, considered_max) for leg in legs]),
    )


def booking_of(key: BookingKey, query: Query, decision: Decision, generation: int = 0) -> Booking:
    routing = query.routing
    control = routing.session_control if routing is not None else None
    has_session = control is not None and decision.session_revision > 0
    lora_name = (routing.lora_name or "") if routing is not None and has_session else ""
    return Booking(
        key,
        query.model,
        decision.worker,
        decision.prefill,
        decision.prefill_tokens,
        decision.decode_blocks,
        generation=generation,
        session_id=control.session_id if control is not None and has_session else "",
        session_revision=decision.session_revision,
        lora_name=lora_name,
        affinity_key=query.affinity_key,
    )


def _reasons(query: Query, plan: ServingPlan, overlaps: Overlaps, selector: str) -> list[str]:
    at = plan.prompt_leg.chosen
    reasons = []
    if overlap := plan.prompt_leg.view.overlap(at.placement):
        whole = query.total_tokens // block_size_of(query, at.instance.block_size)
        approximate = ", approximate" if overlaps.is_approximate(at.placement) else ""
        reasons.append(f"prefix hit: {overlap} of {whole} blocks{approximate}")
    for leg_plan in (plan.prefill, plan.worker):
        if leg_plan is not None:
            leg = "" if leg_plan.view.leg == "whole" else f"{leg_plan.view.leg} by "
            reasons.append(f"{selector}: {leg}{leg_plan.choice.reason}")
            kept = len(leg_plan.kept)
            reasons.append(f"{kept} of {kept + len(leg_plan.excluded)} eligible")
    if unused_reason := overlaps.unused_reason(query, plan.prompt_leg.kept):
        reasons.append(f"kv_index=none: {unused_reason}")
    if plan.fallback:
        reasons.append(f"aggregated fallback: {plan.fallback.replace('_', ' ')}")
    if plan.bypass:
        eff_isl = max(0, query.total_tokens - cached_tokens(query, plan.worker))
        reasons.append(
            f"remote prefill bypassed: {plan.bypass.replace('_', ' ')}, {eff_isl} of "
            f"{query.total_tokens} tokens to compute"
        )
    return reasons

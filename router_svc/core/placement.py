"""Chooses the ranks of a request: filters, pairing of legs and selector put together (pure).

A request is served in the first of these serving modes that is open:

1. a pair, if the model has prefill and decode workers. Prefill is selected by the cost of the
   prompt (cached blocks count), decode by load alone, in the same transfer group and domain. If
   `Bypass` has a reason, mode 2 or 3 comes first although the request could be split;
2. an aggregated worker;
3. a decode worker with `local_prefill`, if no prefill worker can serve the request.

If no mode is open, planning raises Unavailable, which names the missing role, or Overloaded if
every worker that could serve the request is busy.

A mode is closed if each of its workers is above a busy threshold, and full if every rank that may
compute the prompt is prefill-busy. A mode with capacity precedes a full one. If all open modes are
full, the request has to wait (`ServingPlan.is_blocked`). A background request counts a rank as
busy above `BackgroundLimits`. Preferences (a soft session, a preferred
adapter) make no mode full: ranks with capacity precede preferred ranks.

A request that pins an aggregated worker, or has its session on one, is served there first; one that
pins its prefill leg by a pair or not at all. A request that is not split although the model has
prefill or decode workers is a fallback: it is counted and its reason reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from random import Random

from common.errors import (
    InternalError,
    InvalidRequest,
    MeshError,
    Overloaded,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from router_svc.core.candidate import AffinityConstraint, Candidate, Candidates, Leg, Matches
from router_svc.core.cost import CostSettings, RecentPrefill
from router_svc.core.eligibility import (
    RETRY_AFTER_S,
    AdapterResidency,
    Excluded,
    all_busy_error,
    busy_worker_ids,
    eligible,
    is_prefill_busy,
    pinned_worker_id,
)
from router_svc.core.explain import LegPlan
from router_svc.core.fleet import Fleet
from router_svc.core.key_affinity import KeyHome
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.pairing import TransferDomain, decode_partners, pairable
from router_svc.core.policy import Policy
from router_svc.core.query import block_size_of, bookable_decode_blocks, predicted_cached_tokens
from router_svc.core.scoring import View
from router_svc.core.selectors import COST_SELECTORS, WorkerSelector
from router_svc.core.sessions import SessionConstraint
from router_svc.core.shortlist import Shortlist
from router_svc.core.targets import slow_ranks_error

# Why a request of a model with prefill or decode workers was not split.
FALLBACK_REASONS = (
    "no_prefill_worker",
    "no_decode_worker",
    "no_transfer_group",
    "no_transfer_domain",
    "prefill_busy",
    "decode_busy",
)
# Reason of the error if the selector fails.
SELECTOR_FAILED = "SELECTOR_FAILED"
_BUSY_REASON = "busy: above a configured threshold"
_BUSY_OR_SLOW_REASON = f"{_BUSY_REASON}, or slower than the request's ITL target"
_GATED_REASON = "busy: too few free KV blocks for the bypass"

# Errors of a serving mode that is closed.
_NOT_PLANNED = (Unavailable, InvalidRequest, Overloaded)

# Of one leg: the eligible candidates, and the excluded ones with reasons.
_Eligibility = tuple[Candidates, list[Excluded]]


@dataclass(slots=True)
class ServingPlan:
    """The selected ranks."""

    worker: LegPlan
    prefill: LegPlan | None = None
    """None if the request is not split."""

    fallback: str = ""
    """One of FALLBACK_REASONS, or empty."""

    bypass: str = ""
    """One of `pairing.BYPASS_REASONS`, or empty."""

    is_blocked: bool = False
    """Whether every rank that may compute the prompt is prefill-busy."""

    @property
    def prompt_leg(self) -> LegPlan:
        return self.worker if self.prefill is None else self.prefill


@dataclass(slots=True, eq=False)
class Planner:
    """Plans placements from the present fleet and load; books nothing.

    last_placements: by model and leg, for selectors that rotate.
    """

    fleet: Fleet
    tracker: LoadTracker
    selector: WorkerSelector
    policy: Policy
    recent_prefill: RecentPrefill
    shortlist: Shortlist
    adapter_residency: AdapterResidency = field(default_factory=AdapterResidency)
    last_placements: dict[tuple[str, Leg], Placement] = field(default_factory=dict)

    def update_workers(self, workers: Iterable[Instance], now: float) -> None:
        """Applies a fleet change, after the fleet itself. workers: all present workers."""
        models = self.fleet.models
        self.last_placements = {k: at for k, at in self.last_placements.items() if k[0] in models}
        self.adapter_residency.update(workers, now)

    def record_placement(self, model: str, plan: ServingPlan) -> None:
        """Records a plan that was carried out, for selectors that rotate."""
        for leg_plan in (plan.worker, plan.prefill):
            if leg_plan is not None:
                self.last_placements[model, leg_plan.view.leg] = leg_plan.chosen.placement

    def no_worker_error(
        self, model: str, now: float, missing: str = "worker"
    ) -> UnknownModel | Unavailable:
        """Returns the error of a model without workers. missing: prefill_worker, decode_worker,
        worker."""
        roles = self.fleet.roles(model)
        if not roles and self.fleet.has_snapshot and not self.fleet.is_known_model(model, now):
            return UnknownModel(model)
        if not self.fleet.has_snapshot:
            reason, cause = "FLEET_UNKNOWN", "the router has received no fleet snapshot yet"
        elif not roles:
            reason, cause = "NO_WORKER", "its last worker left"
        else:
            reason = f"NO_{missing.upper()}"
            cause = f"it has {' and '.join(sorted(roles))} workers only"
        return _unavailable(model, reason, cause)


_MakePlan = Callable[["PlacementAttempt"], ServingPlan]


@dataclass(slots=True)
class PlacementAttempt:
    """Plans one query at one moment. session_constraint: None if the query names no session.
    prefers_capacity: capacity is the only preference on legs that compute prompts. is_whole: the
    cost of every eligible candidate is computed, however many there are.
    """

    planner: Planner
    query: Query
    cost_settings: CostSettings
    matches: Matches
    now: float
    rng: Random
    session_constraint: SessionConstraint | None = None
    prefers_capacity: bool = False
    is_whole: bool = False
    key_home: KeyHome | None = None
    """Where the affinity key of the query was last placed; None: unknown, or no key."""

    def plan(self) -> ServingPlan:
        """Returns the plan of the first serving mode that is open and not full, else of the first
        open one. Raises, if no mode is open, the first Overloaded, else the first error.
        """
        if (candidates := self._unrestricted_candidates()) is not None:
            return ServingPlan(self._select("whole", candidates, ()))
        errors: list[MeshError] = []
        full_plan: ServingPlan | None = None
        for plan in self._plans_by_mode():
            if isinstance(plan, MeshError):
                errors.append(plan)
            elif not self._is_full(plan):
                return plan
            elif full_plan is None:
                full_plan = plan
        if full_plan is not None:
            return replace(full_plan, is_blocked=True)
        raise next((error for error in errors if isinstance(error, Overloaded)), errors[0])

    def _unrestricted_candidates(self) -> Candidates | None:
        """Returns the aggregated workers, if they serve the only open mode and nothing excludes or
        delays any; else None. Most requests of most meshes: this takes a tenth of the general case.
        """
        planner, query = self.planner, self.query
        policy, fleet = planner.policy, planner.fleet
        if (
            query.routing is not None
            or query.is_background
            or query.excluded_worker_ids
            or query.itl_target_ms is not None
            or policy.queue.threshold is not None
            or not policy.busy.is_disabled
            or fleet.roles(query.model) != ("aggregated",)
        ):
            return None
        return fleet.candidates(query.model, "aggregated")

    @property
    def required_placements(self) -> tuple[Placement, ...]:
        """All placements that a hard session requires; empty: any."""
        constraint = self.session_constraint
        return () if constraint is None else constraint.required_placements

    def _affinity_constraint(self, leg: Leg) -> AffinityConstraint | None:
        """Returns the session's constraint of the leg; None for a soft one that does not count
        here."""
        if self.session_constraint is None:
            return None
        constraint = self.session_constraint.affinity_constraint(leg)
        if constraint is None or constraint.is_hard or self._uses_preferences(leg):
            return constraint
        return None

    def _uses_preferences(self, leg: Leg) -> bool:
        return not self.prefers_capacity or leg == "decode"

    def _is_full(self, plan: ServingPlan) -> bool:
        """Returns whether the request has to wait for a rank of a leg."""
        if self._are_prefill_busy(plan.prompt_leg.kept):
            return True
        is_pair = plan.prefill is not None
        return is_pair and self.query.is_background and self._are_prefill_busy(plan.worker.kept)

    def _are_prefill_busy(self, candidates: Candidates) -> bool:
        """Returns whether each candidate is prefill-busy; for a background request, whether each
        exceeds `BackgroundLimits`. Other requests without an admission queue: False."""
        policy, tracker = self.planner.policy, self.planner.tracker
        if self.query.is_background:
            limits = policy.background
            return all(
                limits.is_exceeded(c, tracker.load(c.placement, self.now)) for c in candidates
            )
        threshold = policy.queue.threshold
        return threshold is not None and all(
            is_prefill_busy(c, tracker.load(c.placement, self.now), threshold) for c in candidates
        )

    def _has_capacity(self, candidate: Candidate) -> bool:
        return not self._are_prefill_busy((candidate,))

    def _plans_by_mode(self) -> Iterator[ServingPlan | MeshError]:
        """Yields the plan of each serving mode in order, made when requested; its error if
        closed."""
        query, planner = self.query, self.planner
        prefill = planner.fleet.candidates(query.model, "prefill")
        decode = planner.fleet.candidates(query.model, "decode")
        aggregated = planner.fleet.candidates(query.model, "aggregated")
        if not (prefill or decode or aggregated):
            raise planner.no_worker_error(query.model, self.now)
        if planner.policy.lora_residency == "required":
            planner.adapter_residency.check(query, self.now)
        prefill_pin_field = _prefill_pin_field(query)
        requires_unsplit = self._requires_unsplit(aggregated)
        local_prefill_workers = [c for c in decode if c.instance.local_prefill]
        fallback, needs_local_prefill = "", False
        if prefill and decode and (prefill_pin_field or not requires_unsplit):
            pair = self._plan_with_capacity(lambda attempt: attempt._plan_pair(prefill, decode))
            if not prefill_pin_field:
                bypass_plan = self._plan_bypass(pair, (*local_prefill_workers, *aggregated))
                if bypass_plan is not None:
                    yield bypass_plan
            yield pair
            if isinstance(pair, MeshError):
                fallback = _fallback_reason(pair)
                needs_local_prefill = fallback != "no_decode_worker"
            else:
                fallback = "prefill_busy"
        elif (prefill or decode) and not requires_unsplit:
            fallback = f"no_{'decode' if prefill else 'prefill'}_worker"
            needs_local_prefill = not prefill
        if prefill_pin_field:
            if not (prefill and decode):
                yield self._no_pair_error(prefill_pin_field, fallback)
            return
        if aggregated:
            yield self._plan_unsplit(aggregated, fallback)
        if local_prefill_workers and needs_local_prefill:
            is_gated = fallback in ("prefill_busy", "decode_busy")
            yield self._plan_unsplit(local_prefill_workers, fallback, is_gated=is_gated)
        yield planner.no_worker_error(query.model, self.now, fallback.removeprefix("no_"))

    def _plan_unsplit(
        self, candidates: Candidates, fallback: str, *, is_gated: bool = False
    ) -> ServingPlan | MeshError:
        """Plans one worker. is_gated: the decode threshold of the bypass closes workers like a
        busy threshold."""
        passing = self._passing_gate(candidates) if is_gated else candidates
        if not passing:
            return all_busy_error(self.query.model, "whole")

        def plan(attempt: PlacementAttempt) -> ServingPlan:
            kept, excluded = attempt._eligible_and_free(passing, "whole")
            excluded += _exclusions(candidates, passing, _GATED_REASON)
            return ServingPlan(attempt._select("whole", kept, excluded), fallback=fallback)

        return self._plan_with_capacity(plan)

    def _plan_with_capacity(self, make_plan: _MakePlan) -> ServingPlan | MeshError:
        """Returns the plan with all preferences; if that is full, the one that prefers capacity."""
        plan = _try_plan(make_plan, self)
        if isinstance(plan, MeshError) or not self._has_preferences():
            return plan
        if not self._are_prefill_busy(plan.prompt_leg.kept):
            return plan
        relaxed_plan = _try_plan(make_plan, replace(self, prefers_capacity=True))
        return plan if isinstance(relaxed_plan, MeshError) else relaxed_plan

    def _has_preferences(self) -> bool:
        session, routing = self.session_constraint, self.query.routing
        if session is not None and session.placement is not None and not session.is_hard:
            return True
        is_preferred = self.planner.policy.lora_residency == "preferred"
        return is_preferred and routing is not None and bool(routing.lora_name)

    def _requires_unsplit(self, aggregated: Candidates) -> bool:
        """Returns whether a pin or the session places the request on one of these."""
        pin = pinned_worker_id(self.query.routing)
        if pin is not None:
            return any(c.placement.worker_id == pin for c in aggregated)
        constraint = self._affinity_constraint("whole")
        if constraint is None:
            return False
        session_candidates = [c for c in aggregated if c.placement == constraint.placement]
        if not session_candidates or constraint.is_hard:
            return bool(session_candidates)
        try:
            self._eligible_and_free(session_candidates, "whole")
        except _NOT_PLANNED:
            return False
        return not self._are_prefill_busy(session_candidates)

    def _plan_pair(self, prefill: Candidates, decode: Candidates) -> ServingPlan:
        """Returns prefill first; then decode in its transfer group and domain."""
        domain = self.planner.policy.domain
        prefill_eligibility, (pairable_decode, excluded_decode) = self._pairable(prefill, decode)
        first = self._select("prefill", *prefill_eligibility)
        partners = decode_partners(first.chosen, pairable_decode, domain)
        excluded_decode += _exclusions(pairable_decode, partners, _outside_domain_reason(domain))
        decode_query = domain.prefer_domain_of(first.chosen, self.query)
        attempt = self if decode_query is self.query else replace(self, query=decode_query)
        return ServingPlan(attempt._select("decode", partners, excluded_decode), first)

    def _pairable(
        self, prefill: Candidates, decode: Candidates
    ) -> tuple[_Eligibility, _Eligibility]:
        """Returns the free candidates of each side with a free partner; Overloaded if all are
        busy."""
        free_prefill = self._without_busy(prefill, "prefill")
        free_decode = self._without_busy(decode, "decode")
        try:
            first, second = self._match_pairs(free_prefill, free_decode)
        except (Unavailable, InvalidRequest):
            if free_prefill is prefill and free_decode is decode:
                raise
            self._match_pairs(prefill, decode)  # Raises if the cause is not a busy worker.
            try:
                self._match_pairs(prefill, free_decode)
            except (Unavailable, InvalidRequest):
                raise all_busy_error(self.query.model, "decode") from None
            raise all_busy_error(self.query.model, "prefill") from None
        first[1].extend(_exclusions(prefill, free_prefill, _BUSY_REASON))
        second[1].extend(_exclusions(decode, free_decode, self._busy_reason))
        return first, second

    def _match_pairs(
        self, prefill: Candidates, decode: Candidates
    ) -> tuple[_Eligibility, _Eligibility]:
        """Returns the eligible candidates of each side that have a partner."""
        domain = self.planner.policy.domain
        eligible_prefill, excluded_prefill = self._filter(prefill, "prefill")
        eligible_decode, excluded_decode = self._filter(decode, "decode")
        pairable_prefill, pairable_decode = pairable(eligible_prefill, eligible_decode, domain)
        if not pairable_prefill:
            domain_name = domain.name if pairable(eligible_prefill, eligible_decode)[0] else ""
            raise _no_pairable_error(self.query.model, domain_name)
        reason = "has no partner to send its KV cache to"
        excluded_prefill += _exclusions(eligible_prefill, pairable_prefill, reason)
        reason = _outside_domain_reason(domain)
        excluded_decode += _exclusions(eligible_decode, pairable_decode, reason)
        return (pairable_prefill, excluded_prefill), (pairable_decode, excluded_decode)

    def _plan_bypass(
        self, pair: ServingPlan | MeshError, unsplit_candidates: Candidates
    ) -> ServingPlan | None:
        """Returns a plan without the pair, if `Bypass` has a reason; else None. Prefill workers
        that accept no more requests, or would queue them, count as busy at any threshold of the
        bypass.
        """
        query, bypass = self.query, self.planner.policy.bypass
        if bypass.policy == "off" or not unsplit_candidates or not query.total_tokens:
            return None
        prefill_tokens = None
        if isinstance(pair, MeshError):
            if _fallback_reason(pair) != "prefill_busy":
                return None
            is_busy = True
        else:
            first = pair.prompt_leg
            waiting_tokens = first.view.load(first.chosen.placement).prefill_tokens
            prefill_tokens = waiting_tokens + query.total_tokens - cached_tokens(query, first)
            is_busy = bypass.is_busy(waiting_tokens, first.chosen.instance.max_num_batched_tokens)
            if self._are_prefill_busy(first.kept):
                is_busy, prefill_tokens = True, None
        sorted_candidates = sorted(unsplit_candidates, key=attrgetter("placement"))
        plan = self._plan_unsplit(sorted_candidates, "", is_gated=True)
        if isinstance(plan, MeshError):
            return None
        waiting_tokens = plan.worker.view.load(plan.worker.chosen.placement).prefill_tokens
        cached = cached_tokens(query, plan.worker)
        cause = bypass.cause(query.total_tokens, cached, is_busy, waiting_tokens, prefill_tokens)
        return replace(plan, bypass=cause) if cause else None

    def _passing_gate(self, candidates: Candidates) -> Candidates:
        """Returns the candidates below the decode threshold of the bypass."""
        bypass = self.planner.policy.bypass
        if bypass.decode_busy_threshold is None:
            return candidates

        def passes(at: Candidate) -> bool:
            booked = self.planner.tracker.load(at.placement, self.now).decode_blocks
            block_size = block_size_of(self.query, at.instance.block_size)
            blocks = bookable_decode_blocks(self.query, block_size)
            return bypass.has_capacity(booked, blocks, at.instance.total_kv_blocks)

        return [c for c in candidates if passes(c)]

    def _eligible_and_free(self, candidates: Candidates, leg: Leg) -> _Eligibility:
        """Returns the eligible, free candidates; the others with reasons. Raises Overloaded if
        all are busy."""
        eligibility = self._filter(candidates, leg)
        free = self._without_busy(candidates, leg)
        if free is candidates:
            return eligibility
        if not free:
            raise all_busy_error(self.query.model, leg)
        try:
            kept, excluded = self._filter(free, leg)
        except (Unavailable, InvalidRequest) as error:
            raise all_busy_error(self.query.model, leg) from error
        return kept, excluded + _exclusions(candidates, free, self._busy_reason)

    @property
    def _busy_reason(self) -> str:
        has_target = self.query.itl_target_ms is not None
        return _BUSY_OR_SLOW_REASON if has_target else _BUSY_REASON

    def _filter(self, candidates: Candidates, leg: Leg) -> _Eligibility:
        return eligible(
            self.query,
            candidates,
            leg,
            affinity_constraint=self._affinity_constraint(leg),
            residency=self.planner.policy.lora_residency,
            has_capacity=None if self._uses_preferences(leg) else self._has_capacity,
        )

    def _without_busy(self, candidates: Candidates, leg: Leg) -> Candidates:
        """Returns the candidates below all busy thresholds and within the request's target for
        further tokens; the same sequence object if all are. Raises Overloaded (TARGET_UNMET) if
        none is within the target."""
        tracker, limits = self.planner.tracker, self.planner.policy.busy
        busy = busy_worker_ids(candidates, lambda at: tracker.load(at, self.now), limits, leg)
        if busy:
            candidates = [c for c in candidates if c.placement.worker_id not in busy]
        target_ms = self.query.itl_target_ms
        if target_ms is None or leg == "prefill" or not candidates:
            return candidates
        itls_s = [tracker.ranks.itl_s(c.placement, self.now) for c in candidates]
        within = [c for c, s in zip(candidates, itls_s, strict=True) if s * 1000 <= target_ms]
        if not within:
            raise slow_ranks_error(self.query, min(itls_s))
        return candidates if len(within) == len(candidates) else within

    def _select(self, leg: Leg, kept: Candidates, excluded: Sequence[Excluded]) -> LegPlan:
        planner, query = self.planner, self.query
        view = View(
            planner.tracker,
            self.now,
            planner.last_placements.get((query.model, leg)),
            self.matches,
            leg,
            self.cost_settings.for_decode_leg() if leg == "decode" else self.cost_settings,
            planner.recent_prefill,
        )
        home = self.key_home
        if home is not None and home.blocks and leg != "decode":
            view.key_home = home
        offered = kept
        if not self.is_whole and planner.selector.name in COST_SELECTORS:
            preferred = None if view.key_home is None else view.key_home.placement
            offered = planner.shortlist.choose(kept, self.matches, self.rng, preferred)
        try:
            choice = planner.selector.select(query, offered, view, self.rng)
            chosen = choice.candidate
        except MeshError:
            raise
        except Exception as error:
            # The text of a foreign exception goes to the log only: it may contain anything.
            cause = f"it raised {type(error).__name__}"
            failure = _selector_error(planner.selector.name, query.model, cause)
            failure.__cause__ = error  # compiled code ignores `from`
            raise failure from error
        if not any(candidate is chosen for candidate in offered):
            raise _selector_error(planner.selector.name, query.model, "it chose no candidate")
        if offered is not kept:
            choice.reason = f"{choice.reason}, of {len(offered)} compared"
        return LegPlan(choice, view, kept, excluded)

    def _no_pair_error(self, pin_field: str, fallback: str) -> MeshError:
        """Returns the error of a request that pins its prefill leg, for a model without pairs."""
        if not fallback:
            return Unsupported(f"query.routing.{pin_field}", "requests are not split here")
        missing = fallback.removeprefix("no_")
        return self.planner.no_worker_error(self.query.model, self.now, missing)


def cached_tokens(query: Query, leg_plan: LegPlan) -> int:
    """Returns prompt tokens that the selected rank has cached."""
    at = leg_plan.chosen
    block_size = block_size_of(query, at.instance.block_size)
    return predicted_cached_tokens(query, leg_plan.view.overlap(at.placement), block_size)


def _try_plan(make_plan: _MakePlan, attempt: PlacementAttempt) -> ServingPlan | MeshError:
    try:
        return make_plan(attempt)
    except _NOT_PLANNED as error:
        return error


def _exclusions(candidates: Candidates, kept: Candidates, reason: str) -> list[Excluded]:
    if len(kept) == len(candidates):
        return []
    kept_placements = {c.placement for c in kept}
    return [Excluded(c, reason) for c in candidates if c.placement not in kept_placements]


def _outside_domain_reason(domain: TransferDomain) -> str:
    boundary = "transfer group or domain" if domain.is_required else "transfer group"
    return f"in another {boundary} than prefill"


def _prefill_pin_field(query: Query) -> str:
    """Returns the field by which the request pins its prefill leg; empty if none."""
    if query.routing is not None:
        for name in ("prefill_worker_id", "prefill_dp_rank"):
            if getattr(query.routing, name) is not None:
                return name
    return ""


def _selector_error(selector: str, model: str, cause: str) -> InternalError:
    """Returns the error of a failed selector, which may be foreign code. Nothing is booked. It is
    retryable: another router, or this one in another state, may succeed.
    """
    metadata = {"selector": selector, "model": model}
    error = InternalError(
        f"the selector {selector!r} failed: {cause}", reason=SELECTOR_FAILED, metadata=metadata
    )
    error.retryable = True
    return error


def _no_pairable_error(model: str, domain: str) -> Unavailable:
    """Returns an error. domain: the one that separates prefill from decode; empty: the transfer
    group."""
    boundary = f"value of the domain {domain!r}" if domain else "transfer group"
    reason = "NO_TRANSFER_DOMAIN" if domain else "NO_TRANSFER_GROUP"
    return _unavailable(model, reason, f"its prefill and decode workers share no {boundary}")


def _unavailable(model: str, reason: str, cause: str) -> Unavailable:
    return Unavailable(
        f"no worker can serve {model!r}: {cause}",
        RETRY_AFTER_S,
        reason=reason,
        metadata={"model": model},
    )


def _fallback_reason(error: MeshError) -> str:
    """Returns the one of FALLBACK_REASONS for the error of planning a pair."""
    if error.reason in ("NO_TRANSFER_GROUP", "NO_TRANSFER_DOMAIN"):
        return error.reason.lower()
    leg = "prefill" if error.metadata.get("leg") == "prefill" else "decode"
    return f"{leg}_busy" if isinstance(error, Overloaded) else f"no_{leg}_worker"

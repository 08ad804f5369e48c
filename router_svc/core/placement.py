"""On whom a request runs: filters, the pairing of legs and the selector put together (pure).

Which workers a request runs on, in this order:

1. a pair, where the model has prefill and decode workers: prefill by the cost of a prompt (its
   cache counts there), decode in the same transfer group and domain by its load alone; unless
   `Bypass` has a reason to serve it as in 2 or 3 although it could be split;
2. an aggregated worker;
3. a decode worker that can prefill by itself (`local_prefill`), where no prefill worker can serve;
4. nobody: Unavailable names the role that is missing, Overloaded says that whoever could serve it
   is busy.

A way whose workers are all above a busy threshold is closed. One where all who may compute the
prompt are prefill-busy is *full*: the next that is not comes before it, and where all that are open
are full, the first of them is picked, and `ServingPlan.blocked_candidates` says who has to get
room. Wishes (a
soft session, a preferred adapter) make no way full: they are put aside for whoever has room.

A request that pins an aggregated worker, or whose session is bound to one, goes there first; one
that pins its prefill is served by a pair or not at all. What is not a pair although the model has
halves of pairs is a *fallback*: counted, and named in the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from router_svc.core.adapters import AdapterResidency
from router_svc.core.admission import ConstraintClass, constraint_class_of
from router_svc.core.busy import busy_worker_ids, is_prefill_busy
from router_svc.core.cost import CostSettings, RecentPrefill
from router_svc.core.eligibility import (
    RETRY_AFTER_S,
    Excluded,
    all_busy_error,
    eligible,
    pinned_worker_id,
)
from router_svc.core.explain import LegPlan
from router_svc.core.fleet import Fleet
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.pairing import TransferDomain, decode_partners, pairable
from router_svc.core.policy import Policy
from router_svc.core.query import (
    Query,
    block_size_of,
    bookable_decode_blocks,
    predicted_cached_tokens,
)
from router_svc.core.selectors import View, WorkerSelector
from router_svc.core.sessions import SessionConstraint
from router_svc.core.types import AffinityConstraint, Candidate, Leg, Matches, Placement

# Why a model with halves of pairs served a request in one piece.
FALLBACK_REASONS = (
    "no_prefill_worker",
    "no_decode_worker",
    "no_transfer_group",
    "no_transfer_domain",
    "prefill_busy",
    "decode_busy",
)
# The reason of the error where the selector itself fails.
SELECTOR_FAILED = "SELECTOR_FAILED"
_BUSY_REASON = "busy: above a configured threshold"
_GATED_REASON = "its KV blocks leave no room by the gate of the bypass"

# Of one leg: those who can serve it, and the others with the reason.
_Eligibility = tuple[Sequence[Candidate], list[Excluded]]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """One query on its way to a decision. stay: what its session asks, None if it names none.

    has_room: of those who compute prompts; if given, who has is wished for, and nothing else is.
    """

    query: Query
    cost_settings: CostSettings
    matches: Matches
    now: float
    rng: Random
    session_constraint: SessionConstraint | None = None
    has_capacity: Callable[[Candidate], bool] | None = None

    def affinity_constraint(self, leg: Leg) -> AffinityConstraint | None:
        """Where its session is bound for the leg; a soft one only if that is wished for."""
        affinity_constraint = (
            None
            if self.session_constraint is None
            else self.session_constraint.affinity_constraint(leg)
        )
        return (
            affinity_constraint
            if affinity_constraint is None
            or affinity_constraint.is_hard
            or self.uses_preferences(leg)
            else None
        )

    def uses_preferences(self, leg: Leg) -> bool:
        """Whether its own wishes count for the leg."""
        return self.has_capacity is None or leg == "decode"

    @property
    def constraint_class(self) -> ConstraintClass:
        """Where it waits, if it must."""
        return constraint_class_of(
            self.query,
            () if self.session_constraint is None else self.session_constraint.required_placements,
        )


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """Who was chosen: `prefill` is None where the request is not split.

    waits_for: all who may compute the prompt, if each of them is prefill-busy; else nobody.
    """

    worker: LegPlan
    prefill: LegPlan | None = None
    fallback: str = ""
    bypass: str = ""
    blocked_candidates: Sequence[Candidate] = ()

    @property
    def prompt_leg_plan(self) -> LegPlan:
        """The leg that computes the prompt."""
        return self.worker if self.prefill is None else self.prefill


class Planner:
    """Picks by what fleet, book and misses say at the moment; books nothing."""

    def __init__(
        self,
        fleet: Fleet,
        book: LoadTracker,
        selector: WorkerSelector,
        policy: Policy,
        recent_prefill: RecentPrefill,
    ) -> None:
        self._fleet = fleet
        self._book = book
        self._selector = selector
        self._policy = policy
        self._recent_prefill = recent_prefill
        self._adapter_residency = AdapterResidency()
        # The last choice by model and leg, for selectors that go round.
        self._last_placements: dict[tuple[str, Leg], Placement] = {}

    def update_workers(self, workers: Iterable[Instance], now: float) -> None:
        """The fleet has changed; these are its workers now."""
        self._last_placements = {
            key: at for key, at in self._last_placements.items() if key[0] in self._fleet.models
        }
        self._adapter_residency.update(workers, now)

    def record_placement(self, model: str, plan: ServingPlan) -> None:
        """The picks became a decision, which selectors that go round go on from."""
        for pick in (plan.worker, plan.prefill):
            if pick is not None:
                self._last_placements[model, pick.view.leg] = pick.chosen.placement

    def pick(self, placement_request: PlacementRequest) -> ServingPlan:
        """The first way, in the order of the module's docstring, that is open and not full.

        If none is open, raises why: that all are busy, where they are, else the first reason.
        """
        first_error: MeshError | None = None
        prefill_busy_plans: list[ServingPlan] = []
        for mode_plan in self._plans_by_mode(placement_request):
            if isinstance(mode_plan, MeshError):
                takes_precedence = isinstance(mode_plan, Overloaded) and not isinstance(
                    first_error, Overloaded
                )
                first_error = mode_plan if first_error is None or takes_precedence else first_error
            elif self.are_prefill_busy(mode_plan.prompt_leg_plan.kept, placement_request.now):
                prefill_busy_plans.append(mode_plan)
            else:
                return mode_plan
        if prefill_busy_plans:
            return replace(
                prefill_busy_plans[0],
                blocked_candidates=_union(
                    mode_plan.prompt_leg_plan.kept for mode_plan in prefill_busy_plans
                ),
            )
        assert first_error is not None, "a way is open or there is a reason why not"
        raise first_error

    def are_prefill_busy(self, candidates: Sequence[Candidate], now: float) -> bool:
        """Whether each of them is prefill-busy, so that who needs one waits in the queue."""
        threshold, book = self._policy.queue.threshold, self._book
        if threshold is None:
            return False
        return all(is_prefill_busy(c, book.load(c.placement, now), threshold) for c in candidates)

    def passes_gate(self, query: Query, at: Candidate, now: float) -> bool:
        """Whether the bypass's gate at decode lets the request in there."""
        booked_blocks = self._book.load(at.placement, now).decode_blocks
        request_blocks = bookable_decode_blocks(query, block_size_of(query, at.instance.block_size))
        return self._policy.bypass.has_capacity(
            booked_blocks, request_blocks, at.instance.total_kv_blocks
        )

    def can_split(self, placement_request: PlacementRequest) -> bool:
        """Whether a pair may serve the request, busy or not."""
        of = partial(self._fleet.candidates, placement_request.query.model)
        try:
            self._match_pairs(placement_request, of("prefill"), of("decode"))
        except (Unavailable, InvalidRequest):
            return False
        return True

    def _plans_by_mode(
        self, placement_request: PlacementRequest
    ) -> Iterator[ServingPlan | MeshError]:
        """The ways to serve a request, in order, each picked for when it is asked for; for one that
        is closed, why.
        """
        query, fleet = placement_request.query, self._fleet
        prefill = fleet.candidates(query.model, "prefill")
        decode = fleet.candidates(query.model, "decode")
        aggregated = fleet.candidates(query.model, "aggregated")
        if not (prefill or decode or aggregated):
            raise self.no_worker_error(query.model, placement_request.now)
        if self._policy.lora_residency == "required":
            self._adapter_residency.check(query, placement_request.now)
        prefill_pin_field, requires_unsplit = (
            _prefill_pin_field(query),
            self._requires_unsplit(placement_request, aggregated),
        )
        local_prefill_workers = [c for c in decode if c.instance.local_prefill]
        fallback, needs_local_prefill = "", False
        if prefill and decode and (prefill_pin_field or not requires_unsplit):
            pair = self._plan_with_capacity(
                placement_request,
                lambda placement_request: self._plan_pair(placement_request, prefill, decode),
            )
            if not prefill_pin_field:
                bypass_plan = self._plan_bypass(
                    placement_request, pair, (*local_prefill_workers, *aggregated)
                )
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
                yield self._no_pair_error(placement_request, prefill_pin_field, fallback)
            return
        if aggregated:
            yield self._plan_unsplit(placement_request, aggregated, fallback)
        if local_prefill_workers and needs_local_prefill:
            is_busy_fallback = fallback in ("prefill_busy", "decode_busy")
            yield self._plan_unsplit(
                placement_request, local_prefill_workers, fallback, is_gated=is_busy_fallback
            )
        yield self.no_worker_error(query.model, placement_request.now, fallback.removeprefix("no_"))

    def _plan_unsplit(
        self,
        placement_request: PlacementRequest,
        candidates: Sequence[Candidate],
        fallback: str,
        *,
        is_gated: bool = False,
    ) -> ServingPlan | MeshError:
        """is_gated: the gate of the bypass closes workers like a busy threshold."""
        passing_gate = self._passing_gate(placement_request, candidates) if is_gated else candidates
        if not passing_gate:
            return all_busy_error(placement_request.query.model, "whole")

        def pick(placement_request: PlacementRequest) -> ServingPlan:
            kept, excluded = self._eligible_and_free(placement_request, passing_gate, "whole")
            excluded += _exclusions(candidates, passing_gate, _GATED_REASON)
            return ServingPlan(
                self._select(placement_request, "whole", kept, excluded), fallback=fallback
            )

        return self._plan_with_capacity(placement_request, pick)

    def _plan_with_capacity(
        self, placement_request: PlacementRequest, pick: Callable[[PlacementRequest], ServingPlan]
    ) -> ServingPlan | MeshError:
        """As its wishes have it; but where that is full, with whoever has room."""
        now = placement_request.now
        plan = _try_plan(lambda: pick(placement_request))
        if isinstance(plan, MeshError) or not self._has_preferences(placement_request):
            return plan
        if not self.are_prefill_busy(plan.prompt_leg_plan.kept, now):
            return plan
        relaxed_request = replace(
            placement_request, has_capacity=lambda at: not self.are_prefill_busy((at,), now)
        )
        relaxed_plan = _try_plan(lambda: pick(relaxed_request))
        return plan if isinstance(relaxed_plan, MeshError) else relaxed_plan

    def _has_preferences(self, placement_request: PlacementRequest) -> bool:
        """Whether it wishes for some of those who may serve it."""
        session_constraint, routing = (
            placement_request.session_constraint,
            placement_request.query.routing,
        )
        if (
            session_constraint is not None
            and session_constraint.placement is not None
            and not session_constraint.is_hard
        ):
            return True
        is_preferred = self._policy.lora_residency == "preferred"
        return is_preferred and routing is not None and bool(routing.lora_name)

    def _requires_unsplit(
        self, placement_request: PlacementRequest, aggregated: Sequence[Candidate]
    ) -> bool:
        """Whether a pin or the session wants the request in one piece, on one of these."""
        pin = pinned_worker_id(placement_request.query.routing)
        if pin is not None:
            return any(c.placement.worker_id == pin for c in aggregated)
        affinity_constraint = placement_request.affinity_constraint("whole")
        if affinity_constraint is None:
            return False
        session_candidates = [c for c in aggregated if c.placement == affinity_constraint.placement]
        if not session_candidates or affinity_constraint.is_hard:
            return bool(session_candidates)
        return self._may_serve(placement_request, session_candidates) and not self.are_prefill_busy(
            session_candidates, placement_request.now
        )

    def _may_serve(
        self, placement_request: PlacementRequest, candidates: Sequence[Candidate]
    ) -> bool:
        try:
            return bool(self._eligible_and_free(placement_request, candidates, "whole")[0])
        except (Unavailable, InvalidRequest, Overloaded):
            return False

    def _plan_pair(
        self,
        placement_request: PlacementRequest,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
    ) -> ServingPlan:
        """Prefill first; then decode in its transfer group and domain."""
        domain = self._policy.domain
        first_leg, (pairable_decode, excluded_decode) = self._pairable(
            placement_request, prefill, decode
        )
        first = self._select(placement_request, "prefill", *first_leg)
        decode_partner_candidates = decode_partners(first.chosen, pairable_decode, domain)
        excluded_decode += _exclusions(
            pairable_decode, decode_partner_candidates, _outside_domain_reason(domain)
        )
        decode_request = replace(
            placement_request, query=domain.prefer_domain_of(first.chosen, placement_request.query)
        )
        return ServingPlan(
            self._select(decode_request, "decode", decode_partner_candidates, excluded_decode),
            first,
        )

    def _pairable(
        self,
        placement_request: PlacementRequest,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
    ) -> tuple[_Eligibility, _Eligibility]:
        """Of each side those who are free and have a free partner, with those left out and why.

        Raises Overloaded where there are mates, but not among the free.
        """
        unloaded_prefill = self._without_busy(placement_request, prefill, "prefill")
        unloaded_decode = self._without_busy(placement_request, decode, "decode")
        try:
            first, second = self._match_pairs(placement_request, unloaded_prefill, unloaded_decode)
        except (Unavailable, InvalidRequest):
            if unloaded_prefill is prefill and unloaded_decode is decode:
                raise
            self._match_pairs(
                placement_request, prefill, decode
            )  # Raises where it is not for being busy.
            try:
                self._match_pairs(placement_request, prefill, unloaded_decode)
            except (Unavailable, InvalidRequest):
                raise all_busy_error(placement_request.query.model, "decode") from None
            raise all_busy_error(placement_request.query.model, "prefill") from None
        return (
            (first[0], first[1] + _exclusions(prefill, unloaded_prefill, _BUSY_REASON)),
            (second[0], second[1] + _exclusions(decode, unloaded_decode, _BUSY_REASON)),
        )

    def _match_pairs(
        self,
        placement_request: PlacementRequest,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
    ) -> tuple[_Eligibility, _Eligibility]:
        """Of each side those who may serve and have a partner, with those left out and why."""
        domain = self._policy.domain
        eligible_prefill, excluded_prefill = self._filter_candidates(
            placement_request, prefill, "prefill"
        )
        eligible_decode, excluded_decode = self._filter_candidates(
            placement_request, decode, "decode"
        )
        pairable_prefill, pairable_decode = pairable(eligible_prefill, eligible_decode, domain)
        if not pairable_prefill:
            domain_name = domain.name if pairable(eligible_prefill, eligible_decode)[0] else ""
            raise _no_pairable_error(placement_request.query.model, domain_name)
        excluded_prefill += _exclusions(
            eligible_prefill, pairable_prefill, "has no partner to send its cache to"
        )
        excluded_decode += _exclusions(
            eligible_decode, pairable_decode, _outside_domain_reason(domain)
        )
        return (pairable_prefill, excluded_prefill), (pairable_decode, excluded_decode)

    def _plan_bypass(
        self,
        placement_request: PlacementRequest,
        pair: ServingPlan | MeshError,
        unsplit_candidates: Sequence[Candidate],
    ) -> ServingPlan | None:
        """One of `unsplit_candidates` instead of the pair, where `Bypass` has a reason; else None.

        Prefill workers that take no more requests, or let them wait, are busy whatever the
        threshold of the bypass.
        """
        query, policy = placement_request.query, self._policy.bypass
        if policy.policy == "off" or not unsplit_candidates or not query.total_tokens:
            return None
        if isinstance(pair, MeshError):
            if _fallback_reason(pair) != "prefill_busy":
                return None
            is_busy = True
        else:
            at, view = pair.prompt_leg_plan.chosen, pair.prompt_leg_plan.view
            waiting = view.load(at.placement).prefill_tokens
            is_busy = policy.is_busy(waiting, at.instance.max_num_batched_tokens)
            is_busy = is_busy or self.are_prefill_busy(
                pair.prompt_leg_plan.kept, placement_request.now
            )
        sorted_candidates = sorted(unsplit_candidates, key=attrgetter("placement"))
        mode_plan = self._plan_unsplit(placement_request, sorted_candidates, "", is_gated=True)
        if isinstance(mode_plan, MeshError):
            return None
        cause = policy.cause(query.total_tokens, cached_tokens(query, mode_plan.worker), is_busy)
        return replace(mode_plan, bypass=cause) if cause else None

    def _passing_gate(
        self, placement_request: PlacementRequest, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """Those where the bypass's gate at decode lets the request in."""
        if self._policy.bypass.decode_busy_threshold is None:
            return candidates
        return [
            c
            for c in candidates
            if self.passes_gate(placement_request.query, c, placement_request.now)
        ]

    def _eligible_and_free(
        self, placement_request: PlacementRequest, candidates: Sequence[Candidate], leg: Leg
    ) -> _Eligibility:
        """Those who may serve the leg and are not busy, with the others and why.

        Raises Overloaded where those who may serve it are all busy.
        """
        eligibility = self._filter_candidates(placement_request, candidates, leg)
        unloaded = self._without_busy(placement_request, candidates, leg)
        if unloaded is candidates:
            return eligibility
        if not unloaded:
            raise all_busy_error(placement_request.query.model, leg)
        try:
            kept, excluded = self._filter_candidates(placement_request, unloaded, leg)
        except (Unavailable, InvalidRequest) as error:
            raise all_busy_error(placement_request.query.model, leg) from error
        return kept, excluded + _exclusions(candidates, unloaded, _BUSY_REASON)

    def _filter_candidates(
        self, placement_request: PlacementRequest, candidates: Sequence[Candidate], leg: Leg
    ) -> _Eligibility:
        """Those whom the filters leave, with the others and why."""
        residency = self._policy.lora_residency
        has_capacity = (
            None if placement_request.uses_preferences(leg) else placement_request.has_capacity
        )
        affinity_constraint = placement_request.affinity_constraint(leg)
        return eligible(
            placement_request.query,
            candidates,
            leg,
            affinity_constraint=affinity_constraint,
            residency=residency,
            has_capacity=has_capacity,
        )

    def _without_busy(
        self, placement_request: PlacementRequest, candidates: Sequence[Candidate], leg: Leg
    ) -> Sequence[Candidate]:
        """Those that are not above a busy threshold; the very same sequence if all are not."""
        limits, book = self._policy.busy, self._book
        busy = busy_worker_ids(
            candidates, lambda at: book.load(at, placement_request.now), limits, leg
        )
        if not busy:
            return candidates
        return [c for c in candidates if c.placement.worker_id not in busy]

    def _select(
        self,
        placement_request: PlacementRequest,
        leg: Leg,
        kept: Sequence[Candidate],
        excluded: Sequence[Excluded],
    ) -> LegPlan:
        view = View(
            self._book,
            placement_request.now,
            self._last_placements.get((placement_request.query.model, leg)),
            placement_request.matches,
            leg,
            placement_request.cost_settings.for_decode_leg()
            if leg == "decode"
            else placement_request.cost_settings,
            self._recent_prefill,
        )
        try:
            choice = self._selector.select(
                placement_request.query, kept, view, placement_request.rng
            )
            chosen = choice.candidate
        except MeshError:
            raise
        except Exception as error:
            # What it says is for the log: it may be anything.
            cause = f"it raised {type(error).__name__}"
            raise _selector_error(
                self._selector.name, placement_request.query.model, cause
            ) from error
        for one in kept:
            if one is chosen:
                return LegPlan(choice, view, kept, excluded, len(kept) + len(excluded))
        raise _selector_error(
            self._selector.name, placement_request.query.model, "it chose no candidate"
        )

    def _no_pair_error(
        self, placement_request: PlacementRequest, pin_field: str, fallback: str
    ) -> MeshError:
        """Why a request that pins its prefill cannot be served where there are no pairs."""
        if not fallback:
            return Unsupported(f"query.routing.{pin_field}", "requests are not split here")
        return self.no_worker_error(
            placement_request.query.model, placement_request.now, fallback.removeprefix("no_")
        )

    def no_worker_error(
        self, model: str, now: float, missing: str = "worker"
    ) -> UnknownModel | Unavailable:
        """Why there is none. missing: prefill_worker, decode_worker, or worker."""
        roles = self._fleet.roles(model)
        if not roles and self._fleet.has_snapshot and not self._fleet.is_known_model(model, now):
            return UnknownModel(model)
        if not self._fleet.has_snapshot:
            reason, cause = "FLEET_UNKNOWN", "the router has not seen the fleet yet"
        elif not roles:
            reason, cause = "NO_WORKER", "its last worker left"
        else:
            reason = f"NO_{missing.upper()}"
            cause = f"it has {' and '.join(sorted(roles))} workers only"
        return Unavailable(
            f"nobody can serve {model!r}: {cause}",
            RETRY_AFTER_S,
            reason=reason,
            metadata={"model": model},
        )


def _try_plan(pick: Callable[[], ServingPlan]) -> ServingPlan | MeshError:
    try:
        return pick()
    except (Unavailable, InvalidRequest, Overloaded) as error:
        return error


def _union(parts: Iterable[Sequence[Candidate]]) -> Sequence[Candidate]:
    """All of them once; one part alone stays the object that it is."""
    parts_list = list(parts)
    if len(parts_list) == 1:
        return parts_list[0]
    return list({c.placement: c for part in parts_list for c in part}.values())


def cached_tokens(query: Query, pick: LegPlan) -> int:
    """Prompt tokens that the chosen one has in its cache."""
    at = pick.chosen
    block_size = block_size_of(query, at.instance.block_size)
    return predicted_cached_tokens(query, pick.view.overlap(at.placement), block_size)


def _exclusions(
    candidates: Sequence[Candidate], kept: Sequence[Candidate], cause: str
) -> list[Excluded]:
    if len(kept) == len(candidates):
        return []
    session_constraint = {c.placement for c in kept}
    return [Excluded(c, cause) for c in candidates if c.placement not in session_constraint]


def _outside_domain_reason(domain: TransferDomain) -> str:
    boundary = "transfer group or domain" if domain.is_required else "transfer group"
    return f"in another {boundary} than prefill"


def _prefill_pin_field(query: Query) -> str:
    """The field by which the request pins its prefill; empty if by none."""
    if query.routing is not None:
        for name in ("prefill_worker_id", "prefill_dp_rank"):
            if getattr(query.routing, name) is not None:
                return name
    return ""


def _selector_error(selector: str, model: str, cause: str) -> InternalError:
    """Whatever is wrong with a selector, which may be somebody else's code: nothing is booked, and
    another router, or this one in another state, may well choose.
    """
    metadata = {"selector": selector, "model": model}
    bug = InternalError(
        f"the selector {selector!r} failed: {cause}", reason=SELECTOR_FAILED, metadata=metadata
    )
    bug.retryable = True
    return bug


def _no_pairable_error(model: str, domain: str) -> Unavailable:
    """Nobody can pair: across the borders of `domain`, or of a transfer group if that is empty."""
    what = f"place of the domain {domain!r}" if domain else "transfer group"
    return Unavailable(
        f"nobody can serve {model!r}: its prefill and decode workers share no {what}",
        RETRY_AFTER_S,
        reason="NO_TRANSFER_DOMAIN" if domain else "NO_TRANSFER_GROUP",
        metadata={"model": model},
    )


def _fallback_reason(error: MeshError) -> str:
    """Which of FALLBACKS the failure to find a pair is."""
    if error.reason in ("NO_TRANSFER_GROUP", "NO_TRANSFER_DOMAIN"):
        return error.reason.lower()
    if isinstance(error, Overloaded):
        return "prefill_busy" if error.metadata.get("leg") == "prefill" else "decode_busy"
    return "no_prefill_worker" if error.metadata.get("leg") == "prefill" else "no_decode_worker"

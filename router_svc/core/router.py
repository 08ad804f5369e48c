"""The router's core: fleet, load book, index and selector put together (pure).

`Router.decide` filters, selects and books in one step, so that the next decision sees the booking
before the first caller has its answer. `Router.admit` does the same, or parks the request in the
queue, from which `Router.rescan` takes it when a worker has room: again deciding and booking in
one step. Nothing here waits, and nobody else changes fleet or book, so decisions are serial however
many callers there are. `Planner` says on whom.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from random import Random

from common.errors import InternalError, MeshError, Overloaded
from common.registry.instances import Snapshot, SnapshotDiff
from common.request.preprocessed import BootstrapInfo
from router_svc.core.admission import AdmissionQueue, Blockers, QueuedRequest, QueueOrder
from router_svc.core.capacity import LEGS, Capacity
from router_svc.core.cost import DEFAULT_COST_SETTINGS, CostSettings, RecentPrefill
from router_svc.core.explain import CandidateRow, LegPlan, candidate_row, explain
from router_svc.core.fleet import Fleet
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.overlap import EVENT_INDEX_SETTINGS, Index, IndexSettings, NoIndex, Overlaps
from router_svc.core.pairing import make_bootstrap_info
from router_svc.core.placement import PlacementRequest, Planner, ServingPlan, cached_tokens
from router_svc.core.policy import DEFAULT_POLICY, Policy
from router_svc.core.query import (
    Query,
    block_size_of,
    bookable_decode_blocks,
    bookable_prefill_tokens,
    predicted_cached_tokens,
    validate_query,
)
from router_svc.core.selectors import SELECTORS, KvSelector, View, WorkerSelector
from router_svc.core.sessions import SessionAffinity
from router_svc.core.types import (
    Booking,
    BookingKey,
    Candidate,
    LoadTotals,
    Matches,
    Placement,
    RankCapacity,
    SessionName,
)

RECENT_MAX = 4096
# Candidates of each leg that a remembered decision keeps, cheapest first; a preview keeps all.
CONSIDERED_MAX = 8


@dataclass(frozen=True, slots=True)
class Decision:
    """A placement. `prefill` is None where the request is not split, `bootstrap` also where prefill
    completes first.

    overlap_blocks: what the prefilling worker holds of the prompt. prefill_tokens, decode_blocks:
    what its booking is charged. queued_s: how long it was parked. fallback: one of
    `plan.FALLBACK_REASONS`, or empty. bypass: one of `disagg.BYPASS_REASONS`, or empty. affinity:
    one of
    `affinity.AFFINITY_OUTCOMES`, or empty without a session; session_revision: of its session's
    bond, 0
    without one. considered: by leg, cheapest first; made_at: the `now` of its making.
    """

    worker: Placement
    selector: str
    made_at: float
    prefill: Placement | None = None
    bootstrap: BootstrapInfo | None = None
    overlap_blocks: int = 0
    predicted_cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0
    queued_s: float = 0.0
    reasons: tuple[str, ...] = ()
    fallback: str = ""
    bypass: str = ""
    affinity: str = ""
    session_revision: int = 0
    considered: tuple[CandidateRow, ...] = field(default=(), compare=False)


# One who waited, and what became of it; None: it was picked for, but must wait on.
AdmissionResult = tuple[QueuedRequest, Decision | MeshError | None]


@dataclass(frozen=True, slots=True)
class PotentialLoad:
    """A rank's load as if the request were placed there."""

    placement: Placement
    load: LoadTotals


class Router:
    """The decisions of one router process. Times are seconds of one clock.

    index: who holds how many blocks of a query's prompt, by events; choice: what else is used to
    know it. knobs: of the cost and the charges. rules: what holds beside the cost.
    """

    def __init__(
        self,
        selector: WorkerSelector,
        *,
        index: Index | None = None,
        choice: IndexSettings = EVENT_INDEX_SETTINGS,
        cost_settings: CostSettings = DEFAULT_COST_SETTINGS,
        policy: Policy = DEFAULT_POLICY,
        book: LoadTracker | None = None,
        recent_max: int = RECENT_MAX,
        epoch_s: float | None = None,
    ) -> None:
        self.fleet = Fleet()
        self.book = LoadTracker() if book is None else book
        self.overlaps = Overlaps(NoIndex() if index is None else index, choice)
        self.selector = selector
        self.recent_prefill = RecentPrefill(cost_settings.recent_miss_half_life_s)
        self.events = self.book.events
        self.affinity = SessionAffinity(
            policy.session_ttl_s, policy.session_mode, epoch_s=epoch_s, events=self.events
        )
        self.queue = AdmissionQueue(policy.queue)
        self._knobs = cost_settings
        self._policy = policy
        self._planner = Planner(self.fleet, self.book, selector, policy, self.recent_prefill)
        self.capacity = Capacity(self.fleet, self.book, self._planner, policy)
        # Booked decisions by request, oldest first, with the attempt each is of.
        self._recent: OrderedDict[str, tuple[BookingKey, Decision]] = OrderedDict()
        self._recent_max = recent_max
        self._fleet_version = 0  # How many snapshots changed the workers.
        self._rescan_number = (
            1  # The number of the sweep through the queue that is next or underway.
        )

    def update(self, snapshot: Snapshot, now: float) -> SnapshotDiff:
        """Take a discovery snapshot: the fleet changes at once, lost frontends' orphans go."""
        changes = self.fleet.update(snapshot, now)
        for instance in changes.left:
            if instance.service == "worker":
                self.book.ranks.worker_left(instance.id)
                self.recent_prefill.forget(instance.id)
                self.overlaps.forget(instance.id)
            elif instance.service == "frontend":
                self.book.frontend_left(instance.id)
        for instance in changes.joined:
            if instance.service == "frontend":
                self.book.frontend_joined(instance.id)
        self.overlaps.update_workers(snapshot.of("worker"))
        self._planner.update_workers(snapshot.of("worker"), now)
        changed = (*changes.joined, *changes.left, *changes.changed)
        if any(instance.service == "worker" for instance in changed):
            self._fleet_version += 1
            self.queue.mark_all_dirty()
            self.events.fleet_changed()
        return changes

    def expire(self, now: float) -> None:
        """Time has passed: orphans whose time is over are freed, idle sessions forgotten."""
        self.book.expire(now)
        self.affinity.expire(now)

    def match(self, query: Query) -> Matches:
        """Who holds what of the prompt; InvalidRequest for a query that nobody could place."""
        validate_query(query)
        return self.overlaps.matches(query)

    def decide(
        self,
        query: Query,
        key: BookingKey | None,
        now: float,
        rng: Random,
        session: int | None = None,
        matches: Matches | None = None,
    ) -> Decision:
        """Place the query, and book it under `key` unless that is None.

        The same key gets the same answer, unless its worker is gone. session: see
        `LoadTracker.book`.
        matches: what `match` said just now; None: ask.
        Raises InvalidRequest, UnknownModel, Unavailable (its reason says what is missing),
        Overloaded; then nothing is booked.
        """
        self.expire(now)
        if key is not None and (existing := self._existing_booking(key, now, rng)) is not None:
            self.book.book(existing[0], session, now)
            return existing[1]
        placement_request = self._placement_request(query, now, rng, matches)
        return self._place(placement_request, self._planner.pick(placement_request), key, session)

    def admit(
        self,
        query: Query,
        key: BookingKey,
        now: float,
        rng: Random,
        session: int | None = None,
        matches: Matches | None = None,
    ) -> Decision | QueuedRequest:
        """Like `decide`, but where the queue says so the request is parked, and nothing booked.

        A key must not be parked twice. Raises as `decide` does, and Overloaded (QUEUE_FULL).
        """
        self.expire(now)
        if (existing := self._existing_booking(key, now, rng)) is not None:
            self.book.book(existing[0], session, now)
            return existing[1]
        placement_request = self._placement_request(query, now, rng, matches)
        plan = self._planner.pick(placement_request)
        if not self.queue and not plan.blocked_candidates:
            return self._place(placement_request, plan, key, session)
        constraint_class = placement_request.constraint_class
        predicted_cached = self._max_cached_tokens(query, plan.prompt_leg_plan)
        if plan.blocked_candidates:
            slots = self.capacity.slots(placement_request, plan)
        elif self.queue.has_backlog(constraint_class):
            slots = self.queue.blockers(constraint_class).slots
        elif self._overtakes(
            plan, self.queue.order(query, now, predicted_cached), placement_request
        ):
            slots = self.capacity.all_slots(placement_request)
        else:
            return self._place(placement_request, plan, key, session)
        queued = self.queue.enqueue(
            query,
            key,
            now,
            blockers=Blockers(
                self._fleet_version, slots, is_gated=self.capacity.is_gated(placement_request)
            ),
            constraint_class=constraint_class,
            session=session,
            cached_tokens=predicted_cached,
        )
        if not plan.blocked_candidates:
            self._notify_capacity(plan, slots, now)
        return queued

    def reregister(self, booking: Booking, session: int | None, now: float) -> bool:
        """A frontend holds this booking: see `LoadTracker.reregister`. One that nobody told of here
        teaches its session's bond.
        """
        was_booked = self.book.get(booking.key) is not None
        is_new = self.book.reregister(booking, session, now)
        if not was_booked:
            self.affinity.booking_reregistered(booking, now)
        return is_new

    def capacity_freed(
        self, placement: Placement, now: float, rng: Random
    ) -> Iterator[AdmissionResult]:
        """Whoever need not wait any more now that this rank has less to do than before, best first.

        Looks only at those who wait for it, and at no more of them than it has room for, and those
        who find that they must wait for somebody else. The iteration may be left at any of them.
        What caches hold is looked up anew: it may have changed since the request was parked.
        """
        self.expire(now)
        for at in self.capacity.affected_ranks(placement):
            for leg in LEGS:
                if self.queue.has_waiters(slot := RankCapacity(at, leg)):
                    yield from self._fill_slot(slot, now, rng)

    def rebound_requests(
        self, session: SessionName, now: float, rng: Random
    ) -> Iterator[AdmissionResult]:
        """The same for those who wait for workers that their session is bound to no more."""
        for queued in self.queue.bound(session):
            session_constraint = self.affinity.session_constraint(queued.query, self.fleet.has)
            if queued.constraint_class.placements != (
                () if session_constraint is None else session_constraint.required_placements
            ):
                yield self._admit_head(queued, now, rng)

    def has_waiters_for(self, placement: Placement) -> bool:
        """Whether somebody may be helped if this rank is relieved; never wrongly False."""
        has_waiters = self.queue.has_waiters
        return any(
            has_waiters(RankCapacity(at, leg))
            for at in self.capacity.affected_ranks(placement)
            for leg in LEGS
        )

    def next_wakeup_at(self, now: float) -> float:
        """When those who wait are to be looked at though nothing happens: inf if never.

        Then a worker's report is too old to count, an orphan's time is over, or somebody's wait is.
        """
        report_expiries = (
            self.book.ranks.estimate_expires_at(slot.placement, now) for slot in self.queue.slots
        )
        return min(self.queue.next_overdue_at, self.book.next_orphan_deadline, *report_expiries)

    @property
    def needs_periodic_rescan(self) -> bool:
        """Whether more than a relief may let somebody in, so that all are to be looked at at times:
        a worker that got busier is a reason for `Bypass`.
        """
        return self._policy.bypass.policy != "off"

    def rescan(self, now: float, rng: Random) -> Iterator[AdmissionResult]:
        """A sweep: whoever need not wait any more, best first, after the fleet changed.

        The iteration may be left at any of them: the next one then goes on with the same sweep,
        which picks in vain for a lane once, and so gets to the last lane.
        """
        self.expire(now)
        # Those without room stay so here, where load only grows. Many lanes wait for the very same
        # spots, the whole fleet, so that one look does for all of them.
        still_blocked: set[frozenset[RankCapacity]] = set()
        for queued in self.queue.heads():
            blockers = self.queue.blockers(queued.constraint_class)
            is_same_fleet = blockers.fleet_version == self._fleet_version
            was_seen = (
                blockers.rescan_number == self._rescan_number or blockers.slots in still_blocked
            )
            if is_same_fleet and was_seen:
                continue
            if (
                is_same_fleet
                and not self.needs_periodic_rescan
                and self._is_still_blocked(blockers, now)
            ):
                still_blocked.add(blockers.slots)
                continue
            yield self._admit_head(queued, now, rng)
        self._rescan_number += 1
        self.queue.drop_stale_slots()

    def preview(
        self, query: Query, now: float, rng: Random, matches: Matches | None = None
    ) -> Decision:
        """The decision as if made now, with every candidate; nothing is booked or remembered."""
        self.expire(now)
        placement_request = self._placement_request(query, now, rng, matches)
        return self._decision(placement_request, self._planner.pick(placement_request), None)

    def recent(self, request_id: str) -> Decision | None:
        """The latest booked decision for a request, while it is among the last RECENT_MAX."""
        found = self._recent.get(request_id)
        return None if found is None else found[1]

    def potential_loads(self, query: Query, now: float) -> list[PotentialLoad]:
        """One row for each (worker, rank) of the model; filters do not apply.

        Halves of pairs are charged their leg: prefill workers the tokens, decode workers the
        blocks, unless there is no prefill worker. Raises InvalidRequest, UnknownModel, Unavailable.
        """
        validate_query(query)
        self.expire(now)
        if not self.fleet.roles(query.model):
            raise self._planner.no_worker_error(query.model, now)
        view = View(self.book, now, matches=self.overlaps.matches(query))
        cost_settings = self._settings_for(query)
        return [
            self._potential_load(query, candidate, view, cost_settings)
            for candidate in self.fleet.all_candidates(query.model)
        ]

    def loads(self, model: str, now: float) -> Iterator[CandidateRow]:
        """Every (worker, rank) with its estimated load, of one model or (\"\") of all."""
        self.expire(now)
        view = View(self.book, now)
        for candidate in self.fleet.all_candidates(model):
            yield candidate_row(candidate, view, self.overlaps)

    # Inside.

    def _place(
        self,
        placement_request: PlacementRequest,
        plan: ServingPlan,
        key: BookingKey | None,
        session: int | None,
        queued_s: float | None = None,
    ) -> Decision:
        """The decision, booked unless key is None. queued_s: None if it never waited."""
        query, now = placement_request.query, placement_request.now
        record = None
        if key is not None and placement_request.session_constraint is not None:
            worker, prefill = plan.worker.chosen.placement, plan.prefill
            prefill_placement = None if prefill is None else prefill.chosen.placement
            record = placement_request.session_constraint.record(
                worker, prefill_placement, key, self.affinity.revision_min(now)
            )
        revision = record.revision if record is not None and record.placement is not None else 0
        decision = self._decision(placement_request, plan, CONSIDERED_MAX, queued_s, revision)
        if key is not None:
            self.book.book(_booking(key, query, decision), session, now)
            self._record_prefill_work(query, decision, plan, now)
            self.overlaps.record_placement(query, plan.prompt_leg_plan.chosen.placement, now)
            if record is not None:
                self.affinity.record_booking(record, now)
            self._store_recent(key, decision)
        self._planner.record_placement(query.model, plan)
        return decision

    # The queue.

    def _is_still_blocked(self, blockers: Blockers, now: float) -> bool:
        """Whether nobody whom a lane waits for has room, seen without deciding anything."""
        return not any(self.capacity.has(slot, now) for slot in blockers.slots)

    def _fill_slot(self, slot: RankCapacity, now: float, rng: Random) -> Iterator[AdmissionResult]:
        """Those who wait for it, until it has no room."""
        with closing(self.queue.queued_heads_at(slot)) as heads:
            for queued in heads:
                if not self.capacity.has(slot, now):
                    return
                is_gated = self.queue.blockers(queued.constraint_class).is_gated
                if not is_gated or self.capacity.has(slot, now, queued.query):
                    yield self._admit_head(queued, now, rng)

    def _admit_head(self, queued: QueuedRequest, now: float, rng: Random) -> AdmissionResult:
        """What becomes of a lane's head; None: it must wait on. Else it has left the queue."""
        try:
            decision = self._try_admit(queued, now, rng)
        except MeshError as error:
            self.queue.withdraw(queued.key)
            return queued, error
        except Exception as error:
            # One request fails, the others go on.
            self.queue.withdraw(queued.key)
            bug = InternalError("the router failed to decide")
            bug.__cause__ = error
            return queued, bug
        return queued, decision

    def _overtakes(
        self, plan: ServingPlan, order: QueueOrder, placement_request: PlacementRequest
    ) -> bool:
        """Whether it would take room for which somebody waits who comes before it."""
        pick = plan.prompt_leg_plan
        if self._planner.are_prefill_busy((pick.chosen,), placement_request.now):
            return False  # It takes none: others have some, but this one was chosen.
        slot = RankCapacity(pick.chosen.placement, pick.view.leg)
        return self.queue.overtakes(order, placement_request.query.model, slot)

    def _try_admit(self, queued: QueuedRequest, now: float, rng: Random) -> Decision | None:
        placement_request = self._placement_request(queued.query, now, rng, None)
        plan: ServingPlan | None = None
        try:
            plan = self._planner.pick(placement_request)
        except Overloaded:
            # All are above a busy threshold again: who was let in to wait waits on.
            if self._policy.busy.is_disabled:
                raise
        if plan is None or plan.blocked_candidates:
            self._mark_blocked(
                queued, placement_request, self.capacity.slots(placement_request, plan)
            )
            return None
        if self._overtakes(plan, queued.order, placement_request):
            # Room has come that another waits for: that one is looked at first.
            slots = self.capacity.all_slots(placement_request)
            self._mark_blocked(queued, placement_request, slots)
            self._notify_capacity(plan, slots, now)
            return None
        decision = self._place(
            placement_request, plan, queued.key, queued.session, now - queued.queued_at
        )
        self.queue.withdraw(queued.key)
        return decision

    def _notify_capacity(
        self, plan: ServingPlan, slots: frozenset[RankCapacity], now: float
    ) -> None:
        """Whoever comes first where there is room is to be let in: at the chosen one, and then at
        all others, which may still have some for who made way.
        """
        chosen = plan.prompt_leg_plan.chosen.placement
        with_capacity = {slot.placement for slot in slots if self.capacity.has(slot, now)}
        for at in (chosen, *sorted(with_capacity - {chosen})):
            self.events.capacity_freed(at)

    def _mark_blocked(
        self,
        queued: QueuedRequest,
        placement_request: PlacementRequest,
        slots: frozenset[RankCapacity],
    ) -> None:
        gated = self.capacity.is_gated(placement_request)
        blockers = Blockers(self._fleet_version, slots, self._rescan_number, gated)
        self.queue.mark_blocked(queued, placement_request.constraint_class, blockers)

    def _max_cached_tokens(self, query: Query, pick: LegPlan) -> int:
        """Prompt tokens that the best of those who may compute it has cached."""
        if not pick.view.matches:
            return 0
        return max(
            predicted_cached_tokens(
                query,
                pick.view.overlap(c.placement),
                block_size_of(query, c.instance.block_size),
            )
            for c in pick.kept
        )

    def _existing_booking(
        self, key: BookingKey, now: float, rng: Random
    ) -> tuple[Booking, Decision] | None:
        """The booking of `key` with its answer; a booking on workers that left is ended.

        A booking that came by announcement has no answer here: it gets one with its workers and, if
        it is a pair, a fresh room, since whoever asks was never told of another.
        """
        booking = self.book.get(key)
        if booking is None:
            return None
        legs = (booking.worker,) if booking.prefill is None else (booking.worker, booking.prefill)
        if not all(self.fleet.has(leg) for leg in legs):
            self.book.free(key)
            return None
        existing = self._recent.get(key.request_id)
        if existing is not None and existing[0] == key:
            return booking, existing[1]
        prefill = None if booking.prefill is None else self.fleet.candidate(booking.prefill)
        decision = Decision(
            booking.worker,
            self.selector.name,
            now,
            prefill=booking.prefill,
            bootstrap=None if prefill is None else make_bootstrap_info(prefill, rng),
            prefill_tokens=booking.prefill_tokens,
            decode_blocks=booking.decode_blocks,
            reasons=("booked before",),
            session_revision=booking.session_revision,
        )
        self._store_recent(key, decision)
        return booking, decision

    def _settings_for(self, query: Query) -> CostSettings:
        """Those of one request. A selector of somebody else's may do with them what it likes."""
        name = self.selector.name
        if name in SELECTORS and name != KvSelector.name:
            self._knobs.reject_cost_overrides(query.override, name)
        cost_settings = self._knobs.with_override(query.override)
        if name == KvSelector.name and self.overlaps.settings.kind == "none":
            cost_settings.reject_overlap_overrides(query.override, self.overlaps.settings.reason)
        return cost_settings

    def _placement_request(
        self, query: Query, now: float, rng: Random, matches: Matches | None
    ) -> PlacementRequest:
        validate_query(query)
        cost_settings = self._settings_for(query)
        matches = self.overlaps.matches(query) if matches is None else matches
        session_constraint = self.affinity.session_constraint(query, self.fleet.has)
        return PlacementRequest(query, cost_settings, matches, now, rng, session_constraint)

    # The answer.

    def _decision(
        self,
        placement_request: PlacementRequest,
        plan: ServingPlan,
        considered_max: int | None,
        queued_s: float | None = None,
        session_revision: int = 0,
    ) -> Decision:
        query, prefill, prompt_leg = placement_request.query, plan.prefill, plan.prompt_leg_plan
        at = prompt_leg.chosen
        overlap = prompt_leg.view.overlap(at.placement)
        block_size = block_size_of(query, at.instance.block_size)
        decode_block_size = block_size_of(query, plan.worker.chosen.instance.block_size)
        predicted_cached = predicted_cached_tokens(query, overlap, block_size)
        affinity = (
            ""
            if placement_request.session_constraint is None
            else placement_request.session_constraint.outcome(plan.worker.chosen.placement)
        )
        rows = [] if prefill is None else explain(prefill, self.overlaps, considered_max)
        rows += explain(plan.worker, self.overlaps, considered_max)
        return Decision(
            plan.worker.chosen.placement,
            self.selector.name,
            placement_request.now,
            prefill=None if prefill is None else at.placement,
            bootstrap=None if prefill is None else make_bootstrap_info(at, placement_request.rng),
            overlap_blocks=overlap,
            predicted_cached_tokens=predicted_cached,
            prefill_tokens=bookable_prefill_tokens(
                query, predicted_cached, placement_request.cost_settings
            ),
            decode_blocks=bookable_decode_blocks(
                query, decode_block_size, placement_request.cost_settings
            ),
            queued_s=queued_s or 0.0,
            reasons=(
                *self._explain_reasons(query, plan, overlap, block_size),
                *_session_reasons(affinity),
                *_queue_reasons(queued_s),
            ),
            fallback=plan.fallback,
            bypass=plan.bypass,
            affinity=affinity,
            session_revision=session_revision,
            considered=tuple(rows),
        )

    def _explain_reasons(
        self, query: Query, plan: ServingPlan, overlap: int, block_size: int | None
    ) -> tuple[str, ...]:
        name = self.selector.name
        reasons = []
        if overlap and block_size:
            whole = query.total_tokens // block_size
            at = plan.prompt_leg_plan.chosen.placement
            approximate = ", guessed" if self.overlaps.is_approximate(at) else ""
            reasons.append(f"prefix hit: {overlap} of {whole} blocks{approximate}")
        for pick in (plan.prefill, plan.worker):
            if pick is not None:
                leg = "" if pick.view.leg == "whole" else f"{pick.view.leg} by "
                reasons.append(f"{name}: {leg}{pick.choice.reason}")
                reasons.append(f"{len(pick.kept)} of {pick.of} eligible")
        if unused_reason := self.overlaps.unused_reason(query, plan.prompt_leg_plan.kept):
            reasons.append(f"kv_index=none: {unused_reason}")
        if plan.fallback:
            reasons.append(f"aggregated fallback: {plan.fallback.replace('_', ' ')}")
        if plan.bypass:
            eff_isl = max(0, query.total_tokens - cached_tokens(query, plan.worker))
            reason = plan.bypass.replace("_", " ")
            reasons.append(
                f"remote prefill bypassed: {reason}, {eff_isl} of {query.total_tokens} tokens to "
                "compute"
            )
        return tuple(reasons)

    def _potential_load(
        self, query: Query, at: Candidate, view: View, cost_settings: CostSettings
    ) -> PotentialLoad:
        load, role = view.load(at.placement), at.instance.role
        block_size = block_size_of(query, at.instance.block_size)
        predicted_cached = predicted_cached_tokens(query, view.overlap(at.placement), block_size)
        has_prefill_workers = bool(self.fleet.candidates(query.model, "prefill"))
        tokens = (
            0
            if role == "decode" and has_prefill_workers
            else bookable_prefill_tokens(query, predicted_cached, cost_settings)
        )
        blocks = (
            0 if role == "prefill" else bookable_decode_blocks(query, block_size, cost_settings)
        )
        load_with_request = LoadTotals(
            load.prefill_tokens + tokens, load.decode_blocks + blocks, load.requests + 1
        )
        return PotentialLoad(at.placement, load_with_request)

    def _record_prefill_work(
        self, query: Query, decision: Decision, plan: ServingPlan, now: float
    ) -> None:
        uncached_tokens = query.total_tokens - decision.predicted_cached_tokens
        if uncached_tokens > 0:
            at = plan.prompt_leg_plan.chosen
            block_size = block_size_of(query, at.instance.block_size)
            self.recent_prefill.add(at.placement, uncached_tokens / block_size, now)

    def _store_recent(self, key: BookingKey, decision: Decision) -> None:
        self._recent.pop(key.request_id, None)
        self._recent[key.request_id] = (key, decision)
        if len(self._recent) > self._recent_max:
            self._recent.popitem(last=False)


def _booking(key: BookingKey, query: Query, decision: Decision) -> Booking:
    routing = query.routing
    control = routing.session_control if routing is not None else None
    is_bound = control is not None and decision.session_revision > 0
    lora_name = (routing.lora_name or "") if routing is not None and is_bound else ""
    return Booking(
        key,
        query.model,
        decision.worker,
        decision.prefill,
        decision.prefill_tokens,
        decision.decode_blocks,
        session_id=control.session_id if control is not None and is_bound else "",
        session_revision=decision.session_revision,
        lora_name=lora_name,
    )


def _session_reasons(affinity: str) -> tuple[str, ...]:
    return (f"session {affinity}",) if affinity else ()


def _queue_reasons(queued_s: float | None) -> tuple[str, ...]:
    return () if queued_s is None else (f"queued for {queued_s * 1000:.0f} ms",)

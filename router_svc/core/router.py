"""The router's core: fleet, load tracker, index, selector and admission queue (pure).

`Router.decide` filters, selects and books in one step, so that the next decision includes the
booking before the first caller has its response. `Router.admit` does the same, or queues the
request; `Router.rescan` places it once a rank has capacity, again in one step. Nothing here waits
and all calls come from one event loop, so decisions are serial at any number of callers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from mypy_extensions import mypyc_attr

from common.errors import InternalError, MeshError, Overloaded
from common.registry.instances import Snapshot, SnapshotDiff
from common.request.placement import Decision, Placement, Query
from router_svc.core.admission import AdmissionQueue, QueuedRequest, constraint_class_of
from router_svc.core.booking import Booking, BookingKey, SessionName
from router_svc.core.candidate import Candidate, LoadTotals, Matches
from router_svc.core.cost import DEFAULT_COST_SETTINGS, CostSettings, RecentPrefill
from router_svc.core.decision import CONSIDERED_MAX, DecisionRecord, booking_of, make_decision
from router_svc.core.explain import CandidateRow, LegPlan, candidate_row
from router_svc.core.fleet import Fleet
from router_svc.core.key_affinity import KeyAffinity, KeyHome
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.overlap import EVENT_INDEX_SETTINGS, Index, IndexSettings, NoIndex, Overlaps
from router_svc.core.pairing import make_bootstrap_info
from router_svc.core.placement import PlacementAttempt, Planner, ServingPlan, cached_tokens
from router_svc.core.policy import DEFAULT_POLICY, Policy
from router_svc.core.query import (
    UNKNOWN_PROMPT_TOKENS,
    block_size_of,
    bookable_decode_blocks,
    bookable_prefill_tokens,
    predicted_cached_tokens,
    validate_query,
)
from router_svc.core.scoring import View
from router_svc.core.selectors import COST_SELECTORS, SELECTORS, WorkerSelector
from router_svc.core.sessions import SessionAffinity
from router_svc.core.shortlist import Shortlist
from router_svc.core.targets import FirstToken, check_first_token

RECENT_MAX = 4096

# A queued request that was tried, and its result; None: it stays queued.
AdmissionResult = tuple[QueuedRequest, DecisionRecord | MeshError | None]


@mypyc_attr(allow_interpreted_subclasses=True)
class Router:
    """The decisions of one router process. Times are seconds of one clock. index: blocks that ranks
    hold, from KV events; index_settings: what else is used.
    """

    def __init__(
        self,
        selector: WorkerSelector,
        *,
        index: Index | None = None,
        index_settings: IndexSettings = EVENT_INDEX_SETTINGS,
        cost_settings: CostSettings = DEFAULT_COST_SETTINGS,
        policy: Policy = DEFAULT_POLICY,
        load_tracker: LoadTracker | None = None,
        recent_max: int = RECENT_MAX,
        epoch_s: float | None = None,
    ) -> None:
        self.fleet = Fleet()
        self.load_tracker = LoadTracker() if load_tracker is None else load_tracker
        self.events = self.load_tracker.events
        self.overlaps = Overlaps(
            NoIndex() if index is None else index, index_settings, policy.candidates_max
        )
        self.selector = selector
        self.recent_prefill = RecentPrefill(cost_settings.recent_miss_half_life_s)
        self.affinity = SessionAffinity(
            policy.session_ttl_s, policy.session_mode, epoch_s=epoch_s, events=self.events
        )
        self.key_affinity = KeyAffinity(self.events)
        self.queue = AdmissionQueue(policy.queue)
        self._cost_settings = cost_settings
        self._policy = policy
        self._planner = Planner(
            self.fleet,
            self.load_tracker,
            selector,
            policy,
            self.recent_prefill,
            Shortlist(policy.candidates_max),
        )
        # Booked decisions by request id, oldest first, with the key of their attempt.
        self._recent: OrderedDict[str, tuple[BookingKey, DecisionRecord]] = OrderedDict()
        self._recent_max = recent_max
        # Client sessions that moved since the last rescan.
        self._moved_sessions: set[SessionName] = set()
        self.events.capacity_freed.subscribe(self._mark_capacity_freed)
        self.events.session_moved.subscribe(self._mark_session_moved)

    def update(
        self, snapshot: Snapshot, now: float, changes: SnapshotDiff | None = None
    ) -> SnapshotDiff:
        """Applies a discovery snapshot; see `Fleet.update`.

        Orphans of frontends that left are freed at once.
        """
        changes = self.fleet.update(snapshot, now, changes)
        for instance in changes.left:
            if instance.service == "worker":
                self.load_tracker.ranks.worker_left(instance.id)
                self.recent_prefill.forget(instance.id)
                self.overlaps.forget(instance.id)
            elif instance.service == "frontend":
                self.load_tracker.frontend_left(instance.id)
        for instance in changes.joined:
            if instance.service == "frontend":
                self.load_tracker.frontend_joined(instance.id)
        self.overlaps.update_workers(snapshot.of("worker"))
        self._planner.update_workers(snapshot.of("worker"), now)
        changed = (*changes.joined, *changes.left, *changes.changed)
        if any(instance.service == "worker" for instance in changed):
            self.queue.mark_all_dirty()
            self.events.fleet_changed()
        return changes

    def expire(self, now: float) -> None:
        """Frees orphans past their deadline and drops idle sessions."""
        self.load_tracker.expire(now)
        self.affinity.expire(now)

    def match(self, query: Query) -> Matches:
        """Returns the blocks of the prompt that ranks hold. Raises InvalidRequest for a
        malformed query."""
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
    ) -> DecisionRecord:
        """Places the query, and books it under `key` unless that is None; again the same for the
        same key, unless one of its workers left. session: see `LoadTracker.book`. matches: of
        `match`;
        None: made here. Raises InvalidRequest, UnknownModel, Unavailable or Overloaded; then
        nothing is booked.
        """
        self.expire(now)
        if key is not None and (record := self._renew_booking(key, session, now, rng)):
            return record
        attempt = self._attempt(query, now, rng, matches)
        return self._place(attempt, attempt.plan(), key, session)

    def admit(
        self,
        query: Query,
        key: BookingKey,
        now: float,
        rng: Random,
        session: int | None = None,
        matches: Matches | None = None,
    ) -> DecisionRecord | QueuedRequest:
        """Decides like `decide`, but queues the request, without a booking, if it has to wait.
        `key` must not be queued. Raises what `decide` does, and Overloaded (QUEUE_FULL).
        """
        self.expire(now)
        if record := self._renew_booking(key, session, now, rng):
            return record
        attempt = self._attempt(query, now, rng, matches)
        plan = attempt.plan()
        # Without a threshold, only background requests wait.
        may_wait = query.is_background or self.queue.settings.threshold is not None
        if not plan.is_blocked and not (may_wait and self.queue):
            self._check_first_token(attempt, plan, now - query.waited_ms / 1000)
            return self._place(attempt, plan, key, session)
        constraint_class = constraint_class_of(query, attempt.required_placements)
        is_queued = plan.is_blocked or self.queue.must_wait(constraint_class)
        arrived_at = now - query.waited_ms / 1000
        self._check_first_token(attempt, plan, arrived_at, is_queued=is_queued)
        if not is_queued:
            self.queue.admitted(query)
            return self._place(attempt, plan, key, session)
        queued = self.queue.enqueue(
            query,
            key,
            now,
            constraint_class=constraint_class,
            session=session,
            cached_tokens=_max_cached_tokens(query, plan.prompt_leg),
        )
        if not plan.is_blocked:
            self.queue.mark_dirty(constraint_class)
        return queued

    def reregister(self, booking: Booking, session: int | None, now: float) -> bool:
        """Registers as `LoadTracker.reregister` does. A new booking also restores its session
        record."""
        was_booked = self.load_tracker.get(booking.key) is not None
        is_new = self.load_tracker.reregister(booking, session, now)
        if not was_booked:
            self.affinity.booking_reregistered(booking, now)
        return is_new

    def rescan(self, now: float, rng: Random) -> Iterator[AdmissionResult]:
        """Tries the heads of the dirty constraint classes until none is dirty. A request with a
        decision or an error has left the queue. The caller may stop at any result: the next rescan
        continues the round. Caches are matched again, since they may have changed.
        """
        self.expire(now)
        while self._moved_sessions:
            for queued in self.queue.of_session(self._moved_sessions.pop()):
                self._reclassify(queued)
        while (head := self.queue.next_dirty()) is not None:
            yield head, None if self._reclassify(head) else self._admit_head(head, now, rng)

    def preview(
        self, query: Query, now: float, rng: Random, matches: Matches | None = None
    ) -> DecisionRecord:
        """Returns the decision as if made now, with every candidate; nothing is booked or
        stored."""
        self.expire(now)
        attempt = replace(self._attempt(query, now, rng, matches), is_whole=True)
        return make_decision(attempt, attempt.plan(), self.overlaps, None)

    def recent(self, request_id: str) -> DecisionRecord | None:
        """Returns the latest booked decision of a request; None if not among the last
        RECENT_MAX."""
        found = self._recent.get(request_id)
        return None if found is None else found[1]

    def potential_loads(self, query: Query, now: float) -> dict[Placement, LoadTotals]:
        """Returns the load of each rank of the model as if the request ran there; filters do not
        apply. Prefill workers get the tokens, decode workers the blocks; also the tokens if there
        is no prefill worker. Raises InvalidRequest, UnknownModel, Unavailable.
        """
        validate_query(query)
        self.expire(now)
        if not self.fleet.roles(query.model):
            raise self._planner.no_worker_error(query.model, now)
        view = View(self.load_tracker, now, matches=self.overlaps.matches(query))
        cost_settings = self._settings_for(query)
        return {
            candidate.placement: self._potential_load(query, candidate, view, cost_settings)
            for candidate in self.fleet.all_candidates(query.model)
        }

    def loads(self, model: str, now: float) -> Iterator[CandidateRow]:
        """Yields every rank with its estimated load, of one model or (\"\") of all."""
        self.expire(now)
        view = View(self.load_tracker, now)
        for candidate in self.fleet.all_candidates(model):
            yield candidate_row(candidate, view, self.overlaps)

    # The queue.

    def _mark_capacity_freed(self, placement: Placement) -> None:
        if self.queue and (at := self.fleet.candidate(placement)) is not None:
            self.queue.mark_model_dirty(at.instance.model)

    def _mark_session_moved(self, session: SessionName) -> None:
        if self.queue.of_session(session):
            self._moved_sessions.add(session)
            self.queue.mark_model_dirty(session.model)

    def _reclassify(self, queued: QueuedRequest) -> bool:
        """Moves the request to its present constraint class; whether that is another one."""
        constraint = self.affinity.session_constraint(queued.query, self.fleet.has)
        placements = constraint.required_placements if constraint else ()
        constraint_class = constraint_class_of(queued.query, placements)
        if constraint_class == queued.constraint_class:
            return False
        self.queue.reclassify(queued, constraint_class)
        return True

    def _admit_head(
        self, queued: QueuedRequest, now: float, rng: Random
    ) -> DecisionRecord | MeshError | None:
        """Returns the decision or error, after which the request has left the queue; None: it
        stays."""
        outcome: DecisionRecord | MeshError | None
        try:
            outcome = self._try_admit(queued, now, rng)
        except MeshError as error:
            outcome = error
        except Exception as error:
            # One request fails, the others go on.
            outcome = InternalError("the router failed to decide")
            outcome.__cause__ = error
        if outcome is not None:
            if isinstance(outcome, DecisionRecord):
                self.queue.admitted(queued.query)
            self.queue.withdraw(queued.key)
            self.queue.continue_round(queued.constraint_class)
        return outcome

    def _try_admit(self, queued: QueuedRequest, now: float, rng: Random) -> DecisionRecord | None:
        attempt = self._attempt(queued.query, now, rng, None)
        try:
            plan = attempt.plan()
        except Overloaded:
            # All workers are above a busy threshold again: a queued request stays queued.
            if self._policy.busy.is_disabled:
                raise
            return None
        self._check_first_token(attempt, plan, queued.arrived_at)
        if plan.is_blocked:
            return None
        return self._place(attempt, plan, queued.key, queued.session, now - queued.queued_at)

    def _check_first_token(
        self,
        attempt: PlacementAttempt,
        plan: ServingPlan,
        arrived_at: float,
        *,
        is_queued: bool = False,
    ) -> None:
        """Raises Overloaded (TARGET_UNMET) if the request has a target for its first token that it
        cannot meet. is_queued: it would be queued behind others."""
        query, leg_plan, now = attempt.query, plan.prompt_leg, attempt.now
        if query.ttft_target_ms is None:
            return
        ranks, ahead = self.load_tracker.ranks, 0.0
        if is_queued:
            ahead = self.queue.tokens_ahead(query, now, _max_cached_tokens(query, leg_plan))
        works, slownesses = ranks.prefill_work((leg_plan.chosen.placement,), now)
        uncached = query.total_tokens - cached_tokens(query, leg_plan)
        expected = FirstToken(
            now - arrived_at,
            ahead,
            len(leg_plan.kept),
            works[0],
            uncached,
            ranks.prompt_token_s,
            slownesses[0],
        )
        check_first_token(query, expected)

    # The decision.

    def _attempt(
        self, query: Query, now: float, rng: Random, matches: Matches | None
    ) -> PlacementAttempt:
        validate_query(query)
        cost_settings = self._settings_for(query)
        matches = self.overlaps.matches(query) if matches is None else matches
        session_constraint = self.affinity.session_constraint(query, self.fleet.has)
        attempt = PlacementAttempt(
            self._planner,
            query,
            cost_settings,
            matches,
            now,
            rng,
            session_constraint,
            prefers_capacity=query.is_background,
        )
        if query.affinity_key:
            attempt.key_home = self._key_home(query, cost_settings, now)
        return attempt

    def _key_home(self, query: Query, cost_settings: CostSettings, now: float) -> KeyHome | None:
        """Returns the rank of the query's affinity key, with the blocks that count as cached
        there."""
        home = self.key_affinity.home(query.affinity_key)
        if home is None:
            return None
        blocks = home.blocks or -(-UNKNOWN_PROMPT_TOKENS // block_size_of(query, None))
        weight = cost_settings.affinity_weight
        if query.prefix_hashes:
            status = self.overlaps.index_status(home.placement, now)
            if status.state == "exact":
                weight = 0.0  # The index reports what is left there.
        return KeyHome(home.placement, round(weight * blocks))

    def _settings_for(self, query: Query) -> CostSettings:
        """Returns the cost settings of one request. Selectors from outside may use them as they
        like."""
        name = self.selector.name
        if name in SELECTORS and name not in COST_SELECTORS:
            self._cost_settings.reject_cost_overrides(query.config_override, name)
        cost_settings = self._cost_settings.with_override(query.config_override)
        if name in COST_SELECTORS and self.overlaps.settings.kind == "none":
            cost_settings.reject_overlap_overrides(
                query.config_override, self.overlaps.settings.reason
            )
        return cost_settings

    def _place(
        self,
        attempt: PlacementAttempt,
        plan: ServingPlan,
        key: BookingKey | None,
        session: int | None,
        queued_s: float | None = None,
    ) -> DecisionRecord:
        """Returns the decision, booked unless key is None. queued_s: None if it was never
        queued."""
        query, now = attempt.query, attempt.now
        session_record, revision = None, 0
        constraint = attempt.session_constraint
        if key is not None and constraint is not None:
            worker, revision_min = plan.worker.chosen.placement, self.affinity.revision_min(now)
            prefill = None if plan.prefill is None else plan.prefill.chosen.placement
            session_record = constraint.record(worker, prefill, key, revision_min)
            if session_record is not None and session_record.placement is not None:
                revision = session_record.revision
        record = make_decision(attempt, plan, self.overlaps, CONSIDERED_MAX, queued_s, revision)
        if key is not None:
            generation = self.load_tracker.generation_of(session)
            decision = record.decision
            self.load_tracker.book(booking_of(key, query, decision, generation), session, now)
            self._record_prefill_work(query, decision, plan, now)
            prompt_at = plan.prompt_leg.chosen.placement
            if self.overlaps.record_placement(query, prompt_at, now):
                self.events.prompt_entered(query, prompt_at)
            if session_record is not None:
                self.affinity.record_booking(session_record, now)
            self._store_recent(key, record)
        self._planner.record_placement(query.model, plan)
        return record

    def _renew_booking(
        self, key: BookingKey, session: int | None, now: float, rng: Random
    ) -> DecisionRecord | None:
        """Returns the decision of a booking under `key`, renewed for the session; None without one.
        A booking on workers that left is freed. A re-registered booking gets a decision with its
        workers and, for a pair, a fresh bootstrap room, since the frontend has received none for
        it.
        """
        booking = self.load_tracker.get(key)
        if booking is None:
            return None
        legs = (booking.worker,) if booking.prefill is None else (booking.worker, booking.prefill)
        if not all(self.fleet.has(leg) for leg in legs):
            self.load_tracker.free(key)
            return None
        existing = self._recent.get(key.request_id)
        if existing is not None and existing[0] == key:
            record = existing[1]
        else:
            prefill = None if booking.prefill is None else self.fleet.candidate(booking.prefill)
            decision = Decision(
                booking.worker,
                booking.prefill,
                bootstrap=None if prefill is None else make_bootstrap_info(prefill, rng),
                reasons=("booked before",),
                prefill_tokens=booking.prefill_tokens,
                decode_blocks=booking.decode_blocks,
                session_revision=booking.session_revision,
            )
            record = DecisionRecord(decision, self.selector.name, now)
            self._store_recent(key, record)
        self.load_tracker.book(booking, session, now)
        return record

    def _potential_load(
        self, query: Query, at: Candidate, view: View, cost_settings: CostSettings
    ) -> LoadTotals:
        load, role = view.load(at.placement), at.instance.role
        block_size = block_size_of(query, at.instance.block_size)
        tokens, blocks, requests = load
        if role != "decode" or not self.fleet.candidates(query.model, "prefill"):
            cached = predicted_cached_tokens(query, view.overlap(at.placement), block_size)
            tokens += bookable_prefill_tokens(query, cached, cost_settings)
        if role != "prefill":
            blocks += bookable_decode_blocks(query, block_size, cost_settings)
        return LoadTotals(tokens, blocks, requests + 1)

    def _record_prefill_work(
        self, query: Query, decision: Decision, plan: ServingPlan, now: float
    ) -> None:
        uncached_tokens = query.total_tokens - decision.predicted_cached_tokens
        if uncached_tokens > 0:
            at = plan.prompt_leg.chosen
            block_size = block_size_of(query, at.instance.block_size)
            self.recent_prefill.add(at.placement, uncached_tokens / block_size, now)

    def _store_recent(self, key: BookingKey, record: DecisionRecord) -> None:
        self._recent.pop(key.request_id, None)
        self._recent[key.request_id] = (key, record)
        if len(self._recent) > self._recent_max:
            self._recent.popitem(last=False)


def _max_cached_tokens(query: Query, leg_plan: LegPlan) -> int:
    """Returns the most prompt tokens that an eligible rank has cached."""
    view = leg_plan.view
    if not view.matches:
        return 0
    kept = ((view.overlap(c.placement), c.instance.block_size) for c in leg_plan.kept)
    return max(
        predicted_cached_tokens(query, overlap, block_size_of(query, block_size))
        for overlap, block_size in kept
    )

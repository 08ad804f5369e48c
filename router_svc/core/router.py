"""The router's core: fleet, load book, index and selector put together (pure).

`Router.decide` filters, selects and books in one step, so that the next decision sees the booking
before the first caller has its answer. `Router.admit` does the same, or parks the request in the
queue, from which `Router.admitted` takes it when a worker has room: again deciding and booking in
one step. Nothing here waits, and nobody else changes fleet or book, so decisions are serial however
many callers there are. `Picker` says on whom.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from random import Random

from common.errors import Bug, MeshError, Overloaded
from common.registry.instances import Changes, Snapshot
from common.request.preprocessed import BootstrapInfo
from router_svc.core.admission import AdmissionQueue, Hindrance, Order, Parked, Spot
from router_svc.core.capacity import LEGS, Room
from router_svc.core.cost import DEFAULT_KNOBS, CostKnobs
from router_svc.core.explain import Considered, Pick, explain, row
from router_svc.core.fleet import Candidate, Fleet, Placement
from router_svc.core.load_tracker import Booking, BookingKey, LoadBook, Totals
from router_svc.core.overlap import EVENTS, Index, IndexChoice, NoIndex, Overlaps
from router_svc.core.pairing import bootstrap_of
from router_svc.core.placement import Ask, Picker, Picks, cached_tokens
from router_svc.core.policy import DEFAULT_RULES, Rules
from router_svc.core.query import (
    Query,
    block_size_of,
    check,
    decode_charge,
    predicted_cached_tokens,
    prefill_charge,
)
from router_svc.core.recent_prefill import RecentMisses
from router_svc.core.selectors import SELECTORS, Kv, Matches, View, WorkerSelector
from router_svc.core.sessions import Affinity, SessionName

RECENT_MAX = 4096
# Candidates of each leg that a remembered decision keeps, cheapest first; a preview keeps all.
CONSIDERED_MAX = 8


@dataclass(frozen=True, slots=True)
class Decision:
    """A placement. `prefill` is None where the request is not split, `bootstrap` also where prefill
    completes first.

    overlap_blocks: what the prefilling worker holds of the prompt. prefill_tokens, decode_blocks:
    what its booking is charged. queued_s: how long it was parked. fallback: one of
    `picks.FALLBACKS`, or empty. bypass: one of `disagg.BYPASSES`, or empty. affinity: one of
    `affinity.AFFINITIES`, or empty without a session; session_revision: of its session's bond, 0
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
    considered: tuple[Considered, ...] = field(default=(), compare=False)


# One who waited, and what became of it; None: it was picked for, but must wait on.
Outcome = tuple[Parked, Decision | MeshError | None]


@dataclass(frozen=True, slots=True)
class PotentialLoad:
    """A rank's load as if the request were placed there."""

    placement: Placement
    load: Totals


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
        choice: IndexChoice = EVENTS,
        knobs: CostKnobs = DEFAULT_KNOBS,
        rules: Rules = DEFAULT_RULES,
        book: LoadBook | None = None,
        recent_max: int = RECENT_MAX,
        epoch_s: float | None = None,
    ) -> None:
        self.fleet = Fleet()
        self.book = LoadBook() if book is None else book
        self.overlaps = Overlaps(NoIndex() if index is None else index, choice)
        self.selector = selector
        self.misses = RecentMisses(knobs.recent_miss_half_life_s)
        self.affinity = Affinity(rules.session_ttl_s, rules.session_mode, epoch_s=epoch_s)
        self.book.uses = self.affinity
        self.queue = AdmissionQueue(rules.queue)
        # Called when other workers may serve than before; must not call back.
        self.fleet_changed: Callable[[], None] = _nobody_waits
        self._knobs = knobs
        self._rules = rules
        self._picker = Picker(self.fleet, self.book, selector, rules, self.misses)
        self.room = Room(self.fleet, self.book, self._picker, rules)
        # Booked decisions by request, oldest first, with the attempt each is of.
        self._recent: OrderedDict[str, tuple[BookingKey, Decision]] = OrderedDict()
        self._recent_max = recent_max
        self._fleet_version = 0  # How many snapshots changed the workers.
        self._sweep = 1  # The number of the sweep through the queue that is next or underway.

    def update(self, snapshot: Snapshot, now: float) -> Changes:
        """Take a discovery snapshot: the fleet changes at once, lost frontends' orphans go."""
        changes = self.fleet.update(snapshot, now)
        for instance in changes.left:
            if instance.service == "worker":
                self.book.worker_left(instance.id)
                self.misses.forget(instance.id)
                self.overlaps.forget(instance.id)
            elif instance.service == "frontend":
                self.book.frontend_left(instance.id)
        for instance in changes.joined:
            if instance.service == "frontend":
                self.book.frontend_joined(instance.id)
        self.overlaps.follow(snapshot.of("worker"))
        self._picker.follow(snapshot.of("worker"), now)
        changed = (*changes.joined, *changes.left, *changes.changed)
        if any(instance.service == "worker" for instance in changed):
            self._fleet_version += 1
            self.queue.unsee()
            self.fleet_changed()
        return changes

    def expire(self, now: float) -> None:
        """Time has passed: orphans whose time is over are freed, idle sessions forgotten."""
        self.book.expire(now)
        self.affinity.expire(now)

    def match(self, query: Query) -> Matches:
        """Who holds what of the prompt; InvalidRequest for a query that nobody could place."""
        check(query)
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

        The same key gets the same answer, unless its worker is gone. session: see `LoadBook.book`.
        matches: what `match` said just now; None: ask.
        Raises InvalidRequest, UnknownModel, Unavailable (its reason says what is missing),
        Overloaded; then nothing is booked.
        """
        self.expire(now)
        if key is not None and (known := self._known(key, now, rng)) is not None:
            self.book.book(known[0], session, now)
            return known[1]
        ask = self._ask(query, now, rng, matches)
        return self._place(ask, self._picker.pick(ask), key, session)

    def admit(
        self,
        query: Query,
        key: BookingKey,
        now: float,
        rng: Random,
        session: int | None = None,
        matches: Matches | None = None,
    ) -> Decision | Parked:
        """Like `decide`, but where the queue says so the request is parked, and nothing booked.

        A key must not be parked twice. Raises as `decide` does, and Overloaded (QUEUE_FULL).
        """
        self.expire(now)
        if (known := self._known(key, now, rng)) is not None:
            self.book.book(known[0], session, now)
            return known[1]
        ask = self._ask(query, now, rng, matches)
        picks = self._picker.pick(ask)
        if not self.queue and not picks.waits_for:
            return self._place(ask, picks, key, session)
        lane = ask.lane
        cached = self._most_cached(query, picks.prefilling)
        if picks.waits_for:
            spots = self.room.spots(ask, picks)
        elif self.queue.has_backlog(lane):
            spots = self.queue.hindrance(lane).spots
        elif self._overtakes(picks, self.queue.order(query, now, cached), ask):
            spots = self.room.everywhere(ask)
        else:
            return self._place(ask, picks, key, session)
        parked = self.queue.park(
            query,
            key,
            now,
            hindrance=Hindrance(self._fleet_version, spots, is_gated=self.room.is_gated(ask)),
            lane=lane,
            session=session,
            cached_tokens=cached,
        )
        if not picks.waits_for:
            self._make_way(picks, spots, now)
        return parked

    def announce(self, booking: Booking, session: int | None, now: float) -> bool:
        """A frontend holds this booking: see `LoadBook.announce`. One that nobody told of here
        teaches its session's bond.
        """
        is_known = self.book.get(booking.key) is not None
        is_new = self.book.announce(booking, session, now)
        if not is_known:
            self.affinity.announced(booking, now)
        return is_new

    def relieved(self, placement: Placement, now: float, rng: Random) -> Iterator[Outcome]:
        """Whoever need not wait any more now that this rank has less to do than before, best first.

        Looks only at those who wait for it, and at no more of them than it has room for, and those
        who find that they must wait for somebody else. The iteration may be left at any of them.
        What caches hold is looked up anew: it may have changed since the request was parked.
        """
        self.expire(now)
        for at in self.room.near(placement):
            for leg in LEGS:
                if self.queue.is_awaited(spot := Spot(at, leg)):
                    yield from self._filling(spot, now, rng)

    def strays(self, session: SessionName, now: float, rng: Random) -> Iterator[Outcome]:
        """The same for those who wait for workers that their session is bound to no more."""
        for parked in self.queue.bound(session):
            stay = self.affinity.stay(parked.query, self.fleet.has)
            if parked.lane.places != (() if stay is None else stay.must):
                yield self._let_in(parked, now, rng)

    def awaits(self, placement: Placement) -> bool:
        """Whether somebody may be helped if this rank is relieved; never wrongly False."""
        awaited = self.queue.is_awaited
        return any(awaited(Spot(at, leg)) for at in self.room.near(placement) for leg in LEGS)

    def wakes_at(self, now: float) -> float:
        """When those who wait are to be looked at though nothing happens: inf if never.

        Then a worker's report is too old to count, an orphan's time is over, or somebody's wait is.
        """
        fades = (self.book.fades_at(spot.placement, now) for spot in self.queue.spots)
        return min(self.queue.overdue_at, self.book.orphan_until, *fades)

    @property
    def sweeps(self) -> bool:
        """Whether more than a relief may let somebody in, so that all are to be looked at at times:
        a worker that got busier is a reason for `Bypass`.
        """
        return self._rules.bypass.policy != "off"

    def admitted(self, now: float, rng: Random) -> Iterator[Outcome]:
        """A sweep: whoever need not wait any more, best first, after the fleet changed.

        The iteration may be left at any of them: the next one then goes on with the same sweep,
        which picks in vain for a lane once, and so gets to the last lane.
        """
        self.expire(now)
        # Those without room stay so here, where load only grows. Many lanes wait for the very same
        # spots, the whole fleet, so that one look does for all of them.
        stuck: set[frozenset[Spot]] = set()
        for parked in self.queue.heads():
            hindrance = self.queue.hindrance(parked.lane)
            is_same_fleet = hindrance.fleet_version == self._fleet_version
            was_seen = hindrance.sweep == self._sweep or hindrance.spots in stuck
            if is_same_fleet and was_seen:
                continue
            if is_same_fleet and not self.sweeps and self._is_stuck(hindrance, now):
                stuck.add(hindrance.spots)
                continue
            yield self._let_in(parked, now, rng)
        self._sweep += 1
        self.queue.tidy()

    def preview(
        self, query: Query, now: float, rng: Random, matches: Matches | None = None
    ) -> Decision:
        """The decision as if made now, with every candidate; nothing is booked or remembered."""
        self.expire(now)
        ask = self._ask(query, now, rng, matches)
        return self._decision(ask, self._picker.pick(ask), None)

    def recent(self, request_id: str) -> Decision | None:
        """The latest booked decision for a request, while it is among the last RECENT_MAX."""
        found = self._recent.get(request_id)
        return None if found is None else found[1]

    def potential_loads(self, query: Query, now: float) -> list[PotentialLoad]:
        """One row for each (worker, rank) of the model; filters do not apply.

        Halves of pairs are charged their leg: prefill workers the tokens, decode workers the
        blocks, unless there is no prefill worker. Raises InvalidRequest, UnknownModel, Unavailable.
        """
        check(query)
        self.expire(now)
        if not self.fleet.roles(query.model):
            raise self._picker.nobody(query.model, now)
        view = View(self.book, now, matches=self.overlaps.matches(query))
        knobs = self._knobs_for(query)
        return [
            self._potential_load(query, candidate, view, knobs)
            for candidate in self.fleet.all_candidates(query.model)
        ]

    def loads(self, model: str, now: float) -> Iterator[Considered]:
        """Every (worker, rank) with its estimated load, of one model or (\"\") of all."""
        self.expire(now)
        view = View(self.book, now)
        for candidate in self.fleet.all_candidates(model):
            yield row(candidate, view, self.overlaps)

    # Inside.

    def _place(
        self,
        ask: Ask,
        picks: Picks,
        key: BookingKey | None,
        session: int | None,
        queued_s: float | None = None,
    ) -> Decision:
        """The decision, booked unless key is None. queued_s: None if it never waited."""
        query, now = ask.query, ask.now
        bond = None
        if key is not None and ask.stay is not None:
            worker, prefill = picks.worker.chosen.placement, picks.prefill
            split_at = None if prefill is None else prefill.chosen.placement
            bond = ask.stay.bond(worker, split_at, key, self.affinity.revision_min(now))
        revision = bond.revision if bond is not None and bond.binding is not None else 0
        decision = self._decision(ask, picks, CONSIDERED_MAX, queued_s, revision)
        if key is not None:
            self.book.book(_booking(key, query, decision), session, now)
            self._count_misses(query, decision, picks, now)
            self.overlaps.routed(query, picks.prefilling.chosen.placement, now)
            if bond is not None:
                self.affinity.booked(bond, now)
            self._remember(key, decision)
        self._picker.went(query.model, picks)
        return decision

    # The queue.

    def _is_stuck(self, hindrance: Hindrance, now: float) -> bool:
        """Whether nobody whom a lane waits for has room, seen without deciding anything."""
        return not any(self.room.has(spot, now) for spot in hindrance.spots)

    def _filling(self, spot: Spot, now: float, rng: Random) -> Iterator[Outcome]:
        """Those who wait for it, until it has no room."""
        with closing(self.queue.waiting_at(spot)) as heads:
            for parked in heads:
                if not self.room.has(spot, now):
                    return
                is_gated = self.queue.hindrance(parked.lane).is_gated
                if not is_gated or self.room.has(spot, now, parked.query):
                    yield self._let_in(parked, now, rng)

    def _let_in(self, parked: Parked, now: float, rng: Random) -> Outcome:
        """What becomes of a lane's head; None: it must wait on. Else it has left the queue."""
        try:
            decision = self._admitted(parked, now, rng)
        except MeshError as error:
            self.queue.withdraw(parked.key)
            return parked, error
        except Exception as error:
            # One request fails, the others go on.
            self.queue.withdraw(parked.key)
            bug = Bug("the router failed to decide")
            bug.__cause__ = error
            return parked, bug
        return parked, decision

    def _overtakes(self, picks: Picks, order: Order, ask: Ask) -> bool:
        """Whether it would take room for which somebody waits who comes before it."""
        pick = picks.prefilling
        if self._picker.are_full((pick.chosen,), ask.now):
            return False  # It takes none: others have some, but this one was chosen.
        spot = Spot(pick.chosen.placement, pick.view.leg)
        return self.queue.overtakes(order, ask.query.model, spot)

    def _admitted(self, parked: Parked, now: float, rng: Random) -> Decision | None:
        ask = self._ask(parked.query, now, rng, None)
        picks: Picks | None = None
        try:
            picks = self._picker.pick(ask)
        except Overloaded:
            # All are above a busy threshold again: who was let in to wait waits on.
            if self._rules.busy.are_off:
                raise
        if picks is None or picks.waits_for:
            self._hinder(parked, ask, self.room.spots(ask, picks))
            return None
        if self._overtakes(picks, parked.order, ask):
            # Room has come that another waits for: that one is looked at first.
            spots = self.room.everywhere(ask)
            self._hinder(parked, ask, spots)
            self._make_way(picks, spots, now)
            return None
        decision = self._place(ask, picks, parked.key, parked.session, now - parked.parked_at)
        self.queue.withdraw(parked.key)
        return decision

    def _make_way(self, picks: Picks, spots: frozenset[Spot], now: float) -> None:
        """Whoever comes first where there is room is to be let in: at the chosen one, and then at
        all others, which may still have some for who made way.
        """
        chosen = picks.prefilling.chosen.placement
        roomy = {spot.placement for spot in spots if self.room.has(spot, now)}
        for at in (chosen, *sorted(roomy - {chosen})):
            self.book.relieved(at)

    def _hinder(self, parked: Parked, ask: Ask, spots: frozenset[Spot]) -> None:
        gated = self.room.is_gated(ask)
        hindrance = Hindrance(self._fleet_version, spots, self._sweep, gated)
        self.queue.hinder(parked, ask.lane, hindrance)

    def _most_cached(self, query: Query, pick: Pick) -> int:
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

    def _known(self, key: BookingKey, now: float, rng: Random) -> tuple[Booking, Decision] | None:
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
        known = self._recent.get(key.request_id)
        if known is not None and known[0] == key:
            return booking, known[1]
        prefill = None if booking.prefill is None else self.fleet.candidate(booking.prefill)
        decision = Decision(
            booking.worker,
            self.selector.name,
            now,
            prefill=booking.prefill,
            bootstrap=None if prefill is None else bootstrap_of(prefill, rng),
            prefill_tokens=booking.prefill_tokens,
            decode_blocks=booking.decode_blocks,
            reasons=("booked before",),
            session_revision=booking.session_revision,
        )
        self._remember(key, decision)
        return booking, decision

    def _knobs_for(self, query: Query) -> CostKnobs:
        """Those of one request. A selector of somebody else's may do with them what it likes."""
        name = self.selector.name
        if name in SELECTORS and name != Kv.name:
            self._knobs.check_without_cost(query.override, name)
        knobs = self._knobs.overridden(query.override)
        if name == Kv.name and self.overlaps.choice.kind == "none":
            knobs.check_without_index(query.override, self.overlaps.choice.why)
        return knobs

    def _ask(self, query: Query, now: float, rng: Random, matches: Matches | None) -> Ask:
        check(query)
        knobs = self._knobs_for(query)
        matches = self.overlaps.matches(query) if matches is None else matches
        stay = self.affinity.stay(query, self.fleet.has)
        return Ask(query, knobs, matches, now, rng, stay)

    # The answer.

    def _decision(
        self,
        ask: Ask,
        picks: Picks,
        considered_max: int | None,
        queued_s: float | None = None,
        session_revision: int = 0,
    ) -> Decision:
        query, prefill, computes = ask.query, picks.prefill, picks.prefilling
        at = computes.chosen
        overlap = computes.view.overlap(at.placement)
        block_size = block_size_of(query, at.instance.block_size)
        held_in = block_size_of(query, picks.worker.chosen.instance.block_size)
        cached = predicted_cached_tokens(query, overlap, block_size)
        affinity = "" if ask.stay is None else ask.stay.outcome(picks.worker.chosen.placement)
        rows = [] if prefill is None else explain(prefill, self.overlaps, considered_max)
        rows += explain(picks.worker, self.overlaps, considered_max)
        return Decision(
            picks.worker.chosen.placement,
            self.selector.name,
            ask.now,
            prefill=None if prefill is None else at.placement,
            bootstrap=None if prefill is None else bootstrap_of(at, ask.rng),
            overlap_blocks=overlap,
            predicted_cached_tokens=cached,
            prefill_tokens=prefill_charge(query, cached, ask.knobs),
            decode_blocks=decode_charge(query, held_in, ask.knobs),
            queued_s=queued_s or 0.0,
            reasons=(
                *self._reasons(query, picks, overlap, block_size),
                *_affinity_reason(affinity),
                *_queue_reason(queued_s),
            ),
            fallback=picks.fallback,
            bypass=picks.bypass,
            affinity=affinity,
            session_revision=session_revision,
            considered=tuple(rows),
        )

    def _reasons(
        self, query: Query, picks: Picks, overlap: int, block_size: int | None
    ) -> tuple[str, ...]:
        name = self.selector.name
        reasons = []
        if overlap and block_size:
            whole = query.total_tokens // block_size
            at = picks.prefilling.chosen.placement
            guessed = ", guessed" if self.overlaps.is_guessed(at) else ""
            reasons.append(f"prefix hit: {overlap} of {whole} blocks{guessed}")
        for pick in (picks.prefill, picks.worker):
            if pick is not None:
                leg = "" if pick.view.leg == "whole" else f"{pick.view.leg} by "
                reasons.append(f"{name}: {leg}{pick.choice.reason}")
                reasons.append(f"{len(pick.kept)} of {pick.of} eligible")
        if unused := self.overlaps.why_unused(query, picks.prefilling.kept):
            reasons.append(f"kv_index=none: {unused}")
        if picks.fallback:
            reasons.append(f"aggregated fallback: {picks.fallback.replace('_', ' ')}")
        if picks.bypass:
            eff_isl = max(0, query.total_tokens - cached_tokens(query, picks.worker))
            why = picks.bypass.replace("_", " ")
            reasons.append(
                f"remote prefill bypassed: {why}, {eff_isl} of {query.total_tokens} tokens to "
                "compute"
            )
        return tuple(reasons)

    def _potential_load(
        self, query: Query, at: Candidate, view: View, knobs: CostKnobs
    ) -> PotentialLoad:
        load, role = view.load(at.placement), at.instance.role
        block_size = block_size_of(query, at.instance.block_size)
        cached = predicted_cached_tokens(query, view.overlap(at.placement), block_size)
        splits = bool(self.fleet.candidates(query.model, "prefill"))
        tokens = 0 if role == "decode" and splits else prefill_charge(query, cached, knobs)
        blocks = 0 if role == "prefill" else decode_charge(query, block_size, knobs)
        with_it = Totals(
            load.prefill_tokens + tokens, load.decode_blocks + blocks, load.requests + 1
        )
        return PotentialLoad(at.placement, with_it)

    def _count_misses(self, query: Query, decision: Decision, picks: Picks, now: float) -> None:
        missed = query.total_tokens - decision.predicted_cached_tokens
        if missed > 0:
            at = picks.prefilling.chosen
            block_size = block_size_of(query, at.instance.block_size)
            self.misses.add(at.placement, missed / block_size, now)

    def _remember(self, key: BookingKey, decision: Decision) -> None:
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


def _affinity_reason(affinity: str) -> tuple[str, ...]:
    return (f"session {affinity}",) if affinity else ()


def _queue_reason(queued_s: float | None) -> tuple[str, ...]:
    return () if queued_s is None else (f"queued for {queued_s * 1000:.0f} ms",)


def _nobody_waits() -> None:
    """A router that nobody asks to wait."""

"""The router's core: fleet, load book, index and selector put together (pure).

`Router.decide` filters, selects and books in one step, so that the next decision sees the booking
before the first caller has its answer. Nothing here waits, and nobody else changes fleet or book,
so decisions are serial however many callers there are.

Which workers a request runs on, in this order:

1. a pair, where the model has prefill and decode workers: prefill by the cost of a prompt (its
   cache counts there), decode in the same transfer group by its load alone;
2. an aggregated worker;
3. a decode worker that can prefill by itself (`local_prefill`), where no prefill worker can serve;
4. nobody: Unavailable names the role that is missing.

A request that pins an aggregated worker goes there first; one that pins its prefill is served by a
pair or not at all. What is not a pair although the model has halves of pairs is a *fallback*:
counted, and named in the reasons.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from common.errors import Bug, InvalidRequest, MeshError, Unavailable, UnknownModel, Unsupported
from common.instances import Changes, Snapshot
from common.preprocessed import BootstrapInfo
from router_svc.core.cost import DEFAULT_KNOBS, CostKnobs
from router_svc.core.disagg import bootstrap_of, mates
from router_svc.core.explain import Considered, Pick, explain, row
from router_svc.core.filters import RETRY_AFTER_S, Excluded, Leg, eligible, pinned_worker
from router_svc.core.fleet import Candidate, Fleet, Placement
from router_svc.core.load import Booking, BookingKey, LoadBook, Totals
from router_svc.core.misses import RecentMisses
from router_svc.core.overlap import Index, NoIndex
from router_svc.core.query import (
    Query,
    block_size_of,
    check,
    decode_charge,
    predicted_cached_tokens,
    prefill_charge,
)
from router_svc.core.select import NO_MATCHES, SELECTORS, Matches, View, WorkerSelector

RECENT_MAX = 4096
# Candidates of each leg that a remembered decision keeps, cheapest first; a preview keeps all.
CONSIDERED_MAX = 8
# Why a model with halves of pairs served a request in one piece.
FALLBACKS = ("no_prefill_worker", "no_decode_worker", "no_transfer_group")


@dataclass(frozen=True, slots=True)
class Decision:
    """A placement. `prefill` is None where the request is not split, `bootstrap` also where prefill
    completes first.

    overlap_blocks: what the prefilling worker holds of the prompt. fallback: one of FALLBACKS, or
    empty. considered: by leg, cheapest first; made_at: the `now` of its making.
    """

    worker: Placement
    selector: str
    made_at: float
    prefill: Placement | None = None
    bootstrap: BootstrapInfo | None = None
    overlap_blocks: int = 0
    predicted_cached_tokens: int = 0
    queued_s: float = 0.0
    reasons: tuple[str, ...] = ()
    fallback: str = ""
    considered: tuple[Considered, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class PotentialLoad:
    """A rank's load as if the request were placed there."""

    placement: Placement
    load: Totals


@dataclass(frozen=True, slots=True)
class _Ask:
    """One query on its way to a decision."""

    query: Query
    knobs: CostKnobs
    matches: Matches
    now: float
    rng: Random


@dataclass(frozen=True, slots=True)
class _Picks:
    """Who was chosen: `prefill` is None where the request is not split."""

    worker: Pick
    prefill: Pick | None = None
    fallback: str = ""

    @property
    def prefilling(self) -> Pick:
        """The leg that computes the prompt."""
        return self.worker if self.prefill is None else self.prefill


class Router:
    """The decisions of one router process. Times are seconds of one clock.

    index: who holds how many blocks of a query's prompt. knobs: of the cost and the charges.
    """

    def __init__(
        self,
        selector: WorkerSelector,
        *,
        index: Index | None = None,
        knobs: CostKnobs = DEFAULT_KNOBS,
        book: LoadBook | None = None,
        recent_max: int = RECENT_MAX,
    ) -> None:
        self.fleet = Fleet()
        self.book = LoadBook() if book is None else book
        self.index: Index = NoIndex() if index is None else index
        self.selector = selector
        self.misses = RecentMisses(knobs.recent_miss_half_life_s)
        self._knobs = knobs
        # Workers that publish what their cache holds; the index counts for nobody else.
        self._publishers: frozenset[int] = frozenset()
        # The last choice by model and leg, for selectors that go round.
        self._last: dict[tuple[str, Leg], Placement] = {}
        # Booked decisions by request, oldest first, with the attempt each is of.
        self._recent: OrderedDict[str, tuple[BookingKey, Decision]] = OrderedDict()
        self._recent_max = recent_max

    def update(self, snapshot: Snapshot, now: float) -> Changes:
        """Take a discovery snapshot: the fleet changes at once, lost frontends' orphans go."""
        changes = self.fleet.update(snapshot, now)
        for instance in changes.left:
            if instance.service == "worker":
                self.book.worker_left(instance.id)
                self.misses.forget(instance.id)
            elif instance.service == "frontend":
                self.book.frontend_left(instance.id)
        for instance in changes.joined:
            if instance.service == "frontend":
                self.book.frontend_joined(instance.id)
        self._last = {key: at for key, at in self._last.items() if key[0] in self.fleet.models}
        self._publishers = frozenset(
            worker.id for worker in snapshot.of("worker") if worker.kv_index == "events"
        )
        return changes

    def match(self, query: Query) -> Matches:
        """Who holds what of the prompt; InvalidRequest for a query that nobody could place."""
        check(query)
        return self._matches(query)

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
        self.book.expire(now)
        if key is not None and (known := self._known(key, now, rng)) is not None:
            self.book.book(known[0], session, now)
            return known[1]
        ask = self._ask(query, now, rng, matches)
        picks = self._pick(ask)
        decision = self._decision(ask, picks, CONSIDERED_MAX)
        if key is not None:
            self.book.book(_booking(key, ask, decision, picks), session, now)
            self._count_misses(query, decision, picks, now)
            self._remember(key, decision)
        self._last[query.model, picks.worker.view.leg] = decision.worker
        if decision.prefill is not None:
            self._last[query.model, "prefill"] = decision.prefill
        return decision

    def preview(
        self, query: Query, now: float, rng: Random, matches: Matches | None = None
    ) -> Decision:
        """The decision as if made now, with every candidate; nothing is booked or remembered."""
        self.book.expire(now)
        ask = self._ask(query, now, rng, matches)
        return self._decision(ask, self._pick(ask), None)

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
        self.book.expire(now)
        if not self.fleet.roles(query.model):
            raise self._nobody(query.model, "worker", now)
        view = View(self.book, now, matches=self._matches(query))
        knobs = self._knobs.overridden(query.override)
        return [
            self._potential_load(query, candidate, view, knobs)
            for candidate in self.fleet.all_candidates(query.model)
        ]

    def loads(self, model: str, now: float) -> Iterator[Considered]:
        """Every (worker, rank) with its estimated load, of one model or (\"\") of all."""
        self.book.expire(now)
        view = View(self.book, now)
        for candidate in self.fleet.all_candidates(model):
            yield row(candidate, view, self.index)

    # Inside.

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
            reasons=("booked before",),
        )
        self._remember(key, decision)
        return booking, decision

    def _ask(self, query: Query, now: float, rng: Random, matches: Matches | None) -> _Ask:
        check(query)
        knobs = self._knobs.overridden(query.override)
        return _Ask(query, knobs, self._matches(query) if matches is None else matches, now, rng)

    def _matches(self, query: Query) -> Matches:
        if not (query.prefix_hashes and self._publishers):
            return NO_MATCHES
        publishers = self._publishers
        return {row[0]: row for row in self.index.match(query) if row[0].worker_id in publishers}

    # Who.

    def _pick(self, ask: _Ask) -> _Picks:
        """Whom the order in the module's docstring gives; its first error if that is nobody."""
        query, fleet = ask.query, self.fleet
        prefill = fleet.candidates(query.model, "prefill")
        decode = fleet.candidates(query.model, "decode")
        whole = fleet.candidates(query.model, "aggregated")
        if not (prefill or decode or whole):
            raise self._nobody(query.model, "worker", ask.now)
        pin, pins_prefill = pinned_worker(query.routing), _pinned_prefill(query)
        pins_whole = pin is not None and any(c.placement.worker_id == pin for c in whole)
        refused: MeshError | None = None
        fallback = ""
        if prefill and decode and (pins_prefill or not pins_whole):
            try:
                return self._pick_pair(ask, prefill, decode)
            except (Unavailable, InvalidRequest) as error:
                refused, fallback = error, _fallback_of(error)
        elif prefill or decode:
            missing = "decode" if prefill else "prefill"
            fallback = "" if pins_whole else f"no_{missing}_worker"
        if pins_prefill:
            raise refused or self._no_pair(ask, pins_prefill, fallback)
        if whole:
            try:
                return _Picks(self._pick_leg(ask, "whole", whole), fallback=fallback)
            except (Unavailable, InvalidRequest) as error:
                refused = refused or error
        local = [c for c in decode if c.instance.local_prefill]
        if local and fallback in ("no_prefill_worker", "no_transfer_group"):
            try:
                return _Picks(self._pick_leg(ask, "whole", local), fallback=fallback)
            except (Unavailable, InvalidRequest) as error:
                refused = refused or error
        raise refused or self._nobody(query.model, fallback.removeprefix("no_"), ask.now)

    def _pick_pair(
        self, ask: _Ask, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> _Picks:
        """Prefill first; then decode in its transfer group."""
        query = ask.query
        may_prefill, left_prefill = eligible(query, prefill, "prefill")
        may_decode, left_decode = eligible(query, decode, "decode")
        can_prefill, can_decode = mates(may_prefill, may_decode)
        if not can_prefill:
            raise Unavailable(
                f"nobody can serve {query.model!r}: its prefill and decode workers share no "
                "transfer group",
                RETRY_AFTER_S,
                reason="NO_TRANSFER_GROUP",
                metadata={"model": query.model},
            )
        left_prefill += _without(may_prefill, can_prefill, "has no partner to send its cache to")
        first = self._select(ask, "prefill", can_prefill, left_prefill)
        group = first.chosen.instance.transfer_group
        partners = [c for c in can_decode if c.instance.transfer_group == group]
        left_decode += _without(may_decode, partners, "in another transfer group than prefill")
        return _Picks(self._select(ask, "decode", partners, left_decode), first)

    def _pick_leg(self, ask: _Ask, leg: Leg, candidates: Sequence[Candidate]) -> Pick:
        kept, excluded = eligible(ask.query, candidates, leg)
        return self._select(ask, leg, kept, excluded)

    def _select(
        self, ask: _Ask, leg: Leg, kept: Sequence[Candidate], excluded: Sequence[Excluded]
    ) -> Pick:
        view = View(
            self.book,
            ask.now,
            self._last.get((ask.query.model, leg)),
            ask.matches,
            leg,
            ask.knobs.for_decode_leg() if leg == "decode" else ask.knobs,
            self.misses,
        )
        choice = self.selector.select(ask.query, kept, view, ask.rng)
        chosen = choice.candidate
        if not any(chosen is one for one in kept):
            raise Bug(f"selector {self.selector.name} chose {chosen.placement}, no candidate")
        return Pick(choice, view, kept, excluded, len(kept) + len(excluded))

    def _no_pair(self, ask: _Ask, pin_field: str, fallback: str) -> MeshError:
        """Why a request that pins its prefill cannot be served where there are no pairs."""
        if not fallback:
            return Unsupported(f"query.routing.{pin_field}", "requests are not split here")
        return self._nobody(ask.query.model, fallback.removeprefix("no_"), ask.now)

    def _nobody(self, model: str, missing: str, now: float) -> UnknownModel | Unavailable:
        """missing: prefill_worker, decode_worker, or worker."""
        roles = self.fleet.roles(model)
        if not roles and self.fleet.was_seen and not self.fleet.knows(model, now):
            return UnknownModel(model)
        if not self.fleet.was_seen:
            reason, why = "FLEET_UNKNOWN", "the router has not seen the fleet yet"
        elif not roles:
            reason, why = "NO_WORKER", "its last worker left"
        else:
            reason = f"NO_{missing.upper()}"
            why = f"it has {' and '.join(sorted(roles))} workers only"
        return Unavailable(
            f"nobody can serve {model!r}: {why}",
            RETRY_AFTER_S,
            reason=reason,
            metadata={"model": model},
        )

    # The answer.

    def _decision(self, ask: _Ask, picks: _Picks, considered_max: int | None) -> Decision:
        query, prefill, computes = ask.query, picks.prefill, picks.prefilling
        at = computes.chosen
        overlap = computes.view.overlap(at.placement)
        block_size = block_size_of(query, at.instance.block_size)
        rows = [] if prefill is None else explain(prefill, self.index, considered_max)
        rows += explain(picks.worker, self.index, considered_max)
        return Decision(
            picks.worker.chosen.placement,
            self.selector.name,
            ask.now,
            prefill=None if prefill is None else at.placement,
            bootstrap=None if prefill is None else bootstrap_of(at, ask.rng),
            overlap_blocks=overlap,
            predicted_cached_tokens=predicted_cached_tokens(query, overlap, block_size),
            reasons=self._reasons(query, picks, overlap, block_size),
            fallback=picks.fallback,
            considered=tuple(rows),
        )

    def _reasons(
        self, query: Query, picks: _Picks, overlap: int, block_size: int | None
    ) -> tuple[str, ...]:
        name = self.selector.name
        reasons = []
        if overlap and block_size:
            whole = query.total_tokens // block_size
            reasons.append(f"prefix hit: {overlap} of {whole} blocks")
        for pick in (picks.prefill, picks.worker):
            if pick is not None:
                leg = "" if pick.view.leg == "whole" else f"{pick.view.leg} by "
                reasons.append(f"{name}: {leg}{pick.choice.reason}")
                reasons.append(f"{len(pick.kept)} of {pick.of} eligible")
        if picks.fallback:
            reasons.append(f"aggregated fallback: {picks.fallback.replace('_', ' ')}")
        routing, override = query.routing, query.override
        if routing is not None and routing.session_control is not None:
            reasons.append("session affinity is not kept by this router")
        if routing is not None and routing.lora_name:
            reasons.append("adapter residency is not known to this router")
        if override is not None and name in SELECTORS and name != "kv":
            reasons.append("of config_override only track_prefill_tokens counts here")
        if override is not None and override.shared_cache_multiplier is not None:
            reasons.append("no shared cache is known to this router")
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

    def _count_misses(self, query: Query, decision: Decision, picks: _Picks, now: float) -> None:
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


def _booking(key: BookingKey, ask: _Ask, decision: Decision, picks: _Picks) -> Booking:
    query = ask.query
    block_size = block_size_of(query, picks.worker.chosen.instance.block_size)
    return Booking(
        key,
        query.model,
        decision.worker,
        decision.prefill,
        prefill_charge(query, decision.predicted_cached_tokens, ask.knobs),
        decode_charge(query, block_size, ask.knobs),
    )


def _without(
    candidates: Sequence[Candidate], kept: Sequence[Candidate], why: str
) -> list[Excluded]:
    if len(kept) == len(candidates):
        return []
    stay = {c.placement for c in kept}
    return [Excluded(c, why) for c in candidates if c.placement not in stay]


def _pinned_prefill(query: Query) -> str:
    """The field by which the request pins its prefill; empty if by none."""
    if query.routing is not None:
        for name in ("prefill_worker_id", "prefill_dp_rank"):
            if getattr(query.routing, name) is not None:
                return name
    return ""


def _fallback_of(error: MeshError) -> str:
    """Which of FALLBACKS the failure to find a pair is."""
    if error.reason == "NO_TRANSFER_GROUP":
        return "no_transfer_group"
    return "no_prefill_worker" if error.metadata.get("leg") == "prefill" else "no_decode_worker"

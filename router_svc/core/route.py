"""The router's core: fleet, load book and selector put together (pure).

`Router.decide` filters, selects and books in one step, so that the next decision sees the booking
before the first caller has its answer. Nothing here waits, and nobody else changes fleet or book,
so decisions are serial however many callers there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random

from common.errors import Bug, Unavailable, UnknownModel, Unsupported
from common.instances import Changes, Role, Snapshot
from common.preprocessed import BootstrapInfo
from router_svc.core.fleet import Candidate, Fleet, Placement
from router_svc.core.load import Booking, BookingKey, LoadBook, Totals
from router_svc.core.query import (
    Query,
    block_size_of,
    check,
    decode_charge,
    predicted_cached_tokens,
    prefill_charge,
)
from router_svc.core.select import (
    RETRY_AFTER_S,
    SELECTORS,
    Choice,
    Excluded,
    View,
    WorkerSelector,
    eligible,
)

RECENT_MAX = 4096
# Candidates that a remembered decision keeps, cheapest first; a preview keeps all.
CONSIDERED_MAX = 16

_by_cost = attrgetter("cost")

Overlaps = Callable[[Query], Mapping[Placement, int]]


@dataclass(frozen=True, slots=True)
class Considered:
    """One row of an explanation.

    cost: in the selector's unit, None if it put no price on it. report_age_s: None without report.
    excluded_why: empty if it could have been chosen.
    """

    placement: Placement
    load: Totals
    cost: float | None = None
    overlap_blocks: int = 0
    report_age_s: float | None = None
    excluded_why: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """A placement. `prefill` and `bootstrap` are None while requests are not split.

    considered: cheapest first; made_at: the `now` of its making.
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
    considered: tuple[Considered, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class PotentialLoad:
    """A rank's load as if the request were placed there."""

    placement: Placement
    load: Totals


def no_overlaps(query: Query) -> Mapping[Placement, int]:
    """The answer of a router without an index."""
    return {}


class Router:
    """The decisions of one router process. Times are seconds of one clock.

    overlaps: who holds how many blocks of a query's prompt; an index replica answers it.
    """

    def __init__(
        self,
        selector: WorkerSelector,
        *,
        overlaps: Overlaps = no_overlaps,
        book: LoadBook | None = None,
        recent_max: int = RECENT_MAX,
    ) -> None:
        self.fleet = Fleet()
        self.book = LoadBook() if book is None else book
        self.selector = selector
        self._overlaps = overlaps
        # The last choice by model and role, for selectors that go round.
        self._last: dict[tuple[str, Role], Placement] = {}
        # Decisions by request id, oldest first, and those behind live bookings.
        self._recent: OrderedDict[str, Decision] = OrderedDict()
        self._recent_max = recent_max

    def update(self, snapshot: Snapshot, now: float) -> Changes:
        """Take a discovery snapshot: the fleet changes at once, lost frontends' orphans go."""
        changes = self.fleet.update(snapshot, now)
        for instance in changes.left:
            if instance.service == "worker":
                self.book.worker_left(instance.id)
            elif instance.service == "frontend":
                self.book.frontend_left(instance.id)
        for instance in changes.joined:
            if instance.service == "frontend":
                self.book.frontend_joined(instance.id)
        self._last = {key: at for key, at in self._last.items() if key[0] in self.fleet.models}
        return changes

    def decide(
        self,
        query: Query,
        key: BookingKey | None,
        now: float,
        rng: Random,
        session: int | None = None,
    ) -> Decision:
        """Place the query, and book it under `key` unless that is None.

        The same key gets the same answer, unless its worker is gone. session: see `LoadBook.book`.
        Raises InvalidRequest, UnknownModel, Unavailable (its reason says what is missing),
        Overloaded; then nothing is booked.
        """
        self.book.expire(now)
        if key is not None and (known := self._known(key, now)) is not None:
            self.book.book(known[0], session, now)
            return known[1]
        decision, chosen = self._place(query, now, rng, CONSIDERED_MAX)
        if key is not None:
            self.book.book(_booking(key, query, decision, chosen), session, now)
            self._remember(key.request_id, decision)
        self._last[query.model, chosen.instance.role] = chosen.placement
        return decision

    def preview(self, query: Query, now: float, rng: Random) -> Decision:
        """The decision as if made now, with every candidate; nothing is booked or remembered."""
        self.book.expire(now)
        return self._place(query, now, rng, None)[0]

    def recent(self, request_id: str) -> Decision | None:
        """The latest booked decision for a request, while it is among the last RECENT_MAX."""
        return self._recent.get(request_id)

    def potential_loads(self, query: Query, now: float) -> list[PotentialLoad]:
        """One row for each (worker, rank) of the model, whatever its role; filters do not apply.

        Raises InvalidRequest, UnknownModel, Unavailable.
        """
        check(query)
        self.book.expire(now)
        self._check_served(query.model, now)
        overlaps = self._overlaps(query)
        return [
            self._potential_load(query, candidate, overlaps.get(candidate.placement, 0), now)
            for candidate in self.fleet.all_candidates(query.model)
        ]

    def loads(self, model: str, now: float) -> Iterator[Considered]:
        """Every (worker, rank) with its estimated load, of one model or (\"\") of all."""
        self.book.expire(now)
        view = View(self.book, now)
        for candidate in self.fleet.all_candidates(model):
            yield _row(candidate, view)

    # Inside.

    def _known(self, key: BookingKey, now: float) -> tuple[Booking, Decision] | None:
        """The booking of `key` with its answer; a booking on workers that left is ended."""
        booking = self.book.get(key)
        if booking is None:
            return None
        legs = (booking.worker,) if booking.prefill is None else (booking.worker, booking.prefill)
        if not all(self.fleet.has(leg) for leg in legs):
            self.book.free(key)
            return None
        decision = self._recent.get(key.request_id)
        if decision is None or (decision.worker, decision.prefill) != (
            booking.worker,
            booking.prefill,
        ):
            decision = Decision(
                booking.worker,
                self.selector.name,
                now,
                prefill=booking.prefill,
                reasons=("booked before",),
            )
        return booking, decision

    def _place(
        self, query: Query, now: float, rng: Random, considered_max: int | None
    ) -> tuple[Decision, Candidate]:
        check(query)
        _refuse_what_needs_pairs(query)
        role: Role = "aggregated"
        candidates = self.fleet.candidates(query.model, role)
        if not candidates:
            raise self._nobody(query.model, role, now)
        kept, excluded = eligible(query, candidates)
        view = View(self.book, now, self._last.get((query.model, role)), self._overlaps(query))
        choice = self.selector.select(query, kept, view, rng)
        chosen = choice.candidate
        if not any(chosen is one for one in kept):
            raise Bug(f"selector {self.selector.name} chose {chosen.placement}, no candidate")
        overlap = view.overlap(chosen.placement)
        block_size = block_size_of(query, chosen.instance.block_size)
        cached = predicted_cached_tokens(query, overlap, block_size)
        decision = Decision(
            chosen.placement,
            self.selector.name,
            now,
            overlap_blocks=overlap,
            predicted_cached_tokens=cached,
            reasons=self._reasons(query, choice, len(kept), len(candidates)),
            considered=self._considered(choice, kept, excluded, view, considered_max),
        )
        return decision, chosen

    def _nobody(self, model: str, role: Role, now: float) -> UnknownModel | Unavailable:
        roles = self.fleet.roles(model)
        if not roles and self.fleet.was_seen and not self.fleet.knows(model, now):
            return UnknownModel(model)
        if not self.fleet.was_seen:
            reason, why = "FLEET_UNKNOWN", "the router has not seen the fleet yet"
        elif not roles:
            reason, why = "NO_WORKER", "its last worker left"
        else:
            reason = f"NO_{role.upper()}_WORKER"
            why = f"it has {' and '.join(sorted(roles))} workers only"
        return Unavailable(
            f"nobody can serve {model!r}: {why}",
            RETRY_AFTER_S,
            reason=reason,
            metadata={"model": model},
        )

    def _check_served(self, model: str, now: float) -> None:
        if not self.fleet.roles(model):
            raise self._nobody(model, "aggregated", now)

    def _reasons(self, query: Query, choice: Choice, kept: int, total: int) -> tuple[str, ...]:
        reasons = [f"{self.selector.name}: {choice.reason}", f"{kept} of {total} eligible"]
        routing = query.routing
        if routing is not None and routing.session_control is not None:
            reasons.append("session affinity is not kept by this router")
        if routing is not None and routing.lora_name:
            reasons.append("adapter residency is not known to this router")
        if query.override is not None and self.selector.name in SELECTORS:
            reasons.append("of config_override only track_prefill_tokens counts here")
        return tuple(reasons)

    def _considered(
        self,
        choice: Choice,
        kept: Sequence[Candidate],
        excluded: Sequence[Excluded],
        view: View,
        considered_max: int | None,
    ) -> tuple[Considered, ...]:
        """The priced ones, cheapest first, then (for a preview) the unpriced, then the excluded."""
        ranked = sorted(choice.scored, key=_by_cost)[:considered_max]
        rows = [_row(one.candidate, view, one.load, one.cost) for one in ranked]
        if considered_max is None:
            priced = {row.placement for row in rows}
            rows += [_row(one, view) for one in kept if one.placement not in priced]
        else:
            if all(row.placement != choice.candidate.placement for row in rows):
                rows.insert(0, _row(choice.candidate, view))
            excluded = excluded[: max(0, considered_max - len(rows))]
        rows += [_row(one.candidate, view, why=one.why) for one in excluded]
        return tuple(rows)

    def _potential_load(
        self, query: Query, at: Candidate, overlap: int, now: float
    ) -> PotentialLoad:
        load = self.book.load(at.placement, now)
        block_size = block_size_of(query, at.instance.block_size)
        cached = predicted_cached_tokens(query, overlap, block_size)
        with_it = Totals(
            load.prefill_tokens + prefill_charge(query, cached),
            load.decode_blocks + decode_charge(query, block_size),
            load.requests + 1,
        )
        return PotentialLoad(at.placement, with_it)

    def _remember(self, request_id: str, decision: Decision) -> None:
        self._recent.pop(request_id, None)
        self._recent[request_id] = decision
        if len(self._recent) > self._recent_max:
            self._recent.popitem(last=False)


def _booking(key: BookingKey, query: Query, decision: Decision, chosen: Candidate) -> Booking:
    block_size = block_size_of(query, chosen.instance.block_size)
    return Booking(
        key,
        query.model,
        decision.worker,
        decision.prefill,
        prefill_charge(query, decision.predicted_cached_tokens),
        decode_charge(query, block_size),
    )


def _row(
    candidate: Candidate,
    view: View,
    load: Totals | None = None,
    cost: float | None = None,
    why: str = "",
) -> Considered:
    at = candidate.placement
    return Considered(
        at,
        view.load(at) if load is None else load,
        cost,
        view.overlap(at),
        view.book.report_age_s(at, view.now),
        why,
    )


def _refuse_what_needs_pairs(query: Query) -> None:
    """A request is placed on one worker here, so a pin of its prefill cannot be honoured."""
    routing = query.routing
    if routing is None:
        return
    for name in ("prefill_worker_id", "prefill_dp_rank"):
        if getattr(routing, name) is not None:
            raise Unsupported(f"query.routing.{name}", "requests are not split here")

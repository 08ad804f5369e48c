"""Which worker the requests of one client session stay on (pure).

A *binding* says where a session's last request was placed. It is made with a booking, so that the
session's next request follows even if the first is still on its way. While a booking of the session
lives, whatever router has it, the binding is *active* and does not age; when none does any more it
is *idle*, and after `ttl_s` of that it is forgotten: never early.

A worker that is gone, or that failed the very request that is to be placed, binds nobody, nor does
a binding outvote the pins of a request: such a session moves with its request. `open` begins anew
wherever the session was, `close` forgets it with the request's booking.

Routers tell each other what became of a session as a *bond*: the binding, or that it is closed,
with a revision that grows with each of the session's bonds (of what is forgotten too, since it goes
with the time of day) and the key of the request that made it. Of two bonds every router keeps the
same one, whatever the order in which it hears of them: that of the higher revision, or of equal
ones (two routers bound the session at once) the one of the least key. Who hears of a bond that does
not win tells its own. Where clocks are more than `ttl_s` apart, what one router has just forgotten
and bound anew may go back to where it was at others. What a clock gone mad has bound is outgrown by
whoever knows of it and binds anew. A closed session is remembered like an idle one, lest a router
that has not heard of it bring it back.

Invariants: a bond is either active or idle, a closed one always idle; there are never more than
`records_max`, of `bytes_max` in all: a newcomer takes the place of the one closed longest ago, or
of
the one idle longest, or else of the one made longest ago.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from common.errors import InvalidRequest, Unsupported
from common.request.preprocessed import RoutingHints, SessionAction, SessionControl
from router_svc.core.events import RouterEvents
from router_svc.core.query import Query
from router_svc.core.types import (
    AffinityConstraint,
    Booking,
    BookingKey,
    Leg,
    Placement,
    SessionName,
)

# hard: a session's requests run on its worker or not at all, while it is there; soft: there if it
# may serve them and has room, else elsewhere.
AffinityMode = Literal["hard", "soft"]

# What became of a request's session: bound for the first time, or anew by its own wish; on its
# worker; on another one; or forgotten by its own wish.
AFFINITY_OUTCOMES = ("bound", "kept", "moved", "closed")
RECORDS_MAX = 65_536
BYTES_MAX = 64 * 1024 * 1024
# What a bond takes beside its names, about.
RECORD_OVERHEAD_BYTES = 768
# Bonds forgotten at once because their time is over: about 1 ms.
EXPIRE_BATCH_MAX = 1024
SESSION_ID_CHARS_MAX = 256
_SESSION_FIELD = "query.routing.session_control"
_PIN_FIELDS = (
    "backend_instance_id",
    "prefill_worker_id",
    "decode_worker_id",
    "dp_rank",
    "prefill_dp_rank",
)


@dataclass(frozen=True, slots=True)
class SessionPlacement:
    """Where a session is. worker: of whole requests or decode legs; prefill: None if not split."""

    worker: Placement
    prefill: Placement | None = None

    def at(self, leg: Leg) -> Placement | None:
        """The place of one leg, None if the binding leaves it open."""
        return self.prefill if leg == "prefill" else self.worker

    @property
    def placements(self) -> tuple[Placement, ...]:
        """All of them."""
        return (self.worker,) if self.prefill is None else (self.worker, self.prefill)


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What became of a session. binding: None, it was closed; revision: counts its bonds, from 1;
    key: of the request that made this one.
    """

    session: SessionName
    session_placement: SessionPlacement | None
    revision: int
    key: BookingKey

    def supersedes(self, other: SessionRecord) -> bool:
        """Whether routers that know of both keep this one; never both of two, nor one itself."""
        return self._precedence < other._precedence

    @property
    def _precedence(self) -> tuple[int, BookingKey, tuple[Placement, ...]]:
        """Least wins. One request may have been placed by two routers: then where decides."""
        return (
            -self.revision,
            self.key,
            () if self.session_placement is None else self.session_placement.placements,
        )

    @property
    def size(self) -> int:
        """Bytes it takes in memory, about."""
        names = (*self.session, self.key.request_id)
        return RECORD_OVERHEAD_BYTES + sum(len(name.encode()) for name in names)


class SessionUpdate(NamedTuple):
    """A bond as routers tell it. idle_s: since its session's last use; 0 while a request lives."""

    record: SessionRecord
    idle_s: float


@dataclass(frozen=True, slots=True)
class SessionConstraint:
    """What its session asks of one request's placement.

    last: what was known of the session. binding: where it is, or None where that does not count.
    """

    session: SessionName
    action: SessionAction | None
    previous_record: SessionRecord | None
    session_placement: SessionPlacement | None
    is_hard: bool

    def affinity_constraint(self, leg: Leg) -> AffinityConstraint | None:
        """The place of a leg that is to be, or has to be, chosen; None: any."""
        at = None if self.session_placement is None else self.session_placement.at(leg)
        return None if at is None else AffinityConstraint(at, self.is_hard)

    @property
    def required_placements(self) -> tuple[Placement, ...]:
        """All places that the request has to run at; empty: it may run anywhere."""
        return (
            self.session_placement.placements
            if self.is_hard and self.session_placement is not None
            else ()
        )

    def outcome(self, worker: Placement) -> str:
        """One of AFFINITIES, for a request that was placed on `worker`."""
        if self.action is SessionAction.CLOSE:
            return "closed"
        previous_placement = (
            None if self.previous_record is None else self.previous_record.session_placement
        )
        if self.action is SessionAction.OPEN or previous_placement is None:
            return "bound"
        return "kept" if previous_placement.worker == worker else "moved"

    def record(
        self, worker: Placement, prefill: Placement | None, key: BookingKey, revision_min: int = 1
    ) -> SessionRecord | None:
        """That of the session once its request `key` is placed there; None: it has none.

        revision_min: of a new one, see `SessionAffinity.revision_min`.
        """
        session_placement: SessionPlacement | None = None
        if self.action is not SessionAction.CLOSE:
            if (
                prefill is None
                and self.session_placement is not None
                and self.session_placement.worker == worker
            ):
                prefill = self.session_placement.prefill  # Who was not split leaves it where it is.
            session_placement = SessionPlacement(worker, prefill)
        if self.previous_record is None:
            return (
                None
                if session_placement is None
                else SessionRecord(self.session, session_placement, revision_min, key)
            )
        if (
            self.previous_record.session_placement == session_placement
            and self.action is not SessionAction.OPEN
        ):
            return self.previous_record
        return SessionRecord(
            self.session,
            session_placement,
            max(self.previous_record.revision + 1, revision_min),
            key,
        )


class SessionAffinity:
    """The bonds that one router knows. Times are seconds of one clock; ttl_s 0 keeps no sessions.

    epoch_s: the time of day at `now` 0, in seconds since 1970; None: revisions just count.

    evicted: bonds forgotten for want of room.
    """

    def __init__(
        self,
        ttl_s: float,
        mode: AffinityMode = "hard",
        *,
        records_max: int = RECORDS_MAX,
        bytes_max: int = BYTES_MAX,
        epoch_s: float | None = None,
        events: RouterEvents | None = None,
    ) -> None:
        assert records_max > 0, "there is room for one"
        self._ttl_s = ttl_s
        self._is_hard = mode == "hard"
        self._epoch_s = epoch_s
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._records: dict[SessionName, SessionRecord] = {}
        self._closed_sessions: dict[
            SessionName, None
        ] = {}  # Those of them that are, in order of closing.
        self._live_bookings: dict[SessionName, int] = {}  # Bookings that live, of whatever session.
        # Since when each bond is idle, and all of that in a heap with some that it is no more.
        self._idle_since: dict[SessionName, float] = {}
        self._idle_heap: list[tuple[float, SessionName]] = []
        self._newly_idle: dict[SessionName, None] = {}  # Idle from the next `expire` on.
        self._events = RouterEvents() if events is None else events
        self._events.booking_added.subscribe(self.booking_began)
        self._events.booking_removed.subscribe(self.booking_ended)
        self.size = 0  # Bytes, about.
        self.evicted = 0

    # One request.

    def session_constraint(
        self, query: Query, is_alive: Callable[[Placement], bool]
    ) -> SessionConstraint | None:
        """What the query's session asks; None if it names none. `expire` comes first.

        is_there: whether a worker is. Raises InvalidRequest for a name that is none, Unsupported
        where no sessions are kept.
        """
        routing = query.routing
        if routing is None or (control := routing.session_control) is None:
            return None
        session = self._session_name(query.model, control, routing.lora_name or "")
        previous_record = self._records.get(session)
        session_placement = None if previous_record is None else previous_record.session_placement
        if session_placement is not None and (
            control.action is SessionAction.OPEN
            or _pins_any_worker(routing)
            or any(at.worker_id in query.excluded_worker_ids for at in session_placement.placements)
            or not all(map(is_alive, session_placement.placements))
        ):
            session_placement = None
        return SessionConstraint(
            session, control.action, previous_record, session_placement, self._is_hard
        )

    def revision_min(self, now: float) -> int:
        """Of a new bond: the milliseconds of the day's time, so that it beats those made before it
        which only others still remember. Clocks need not agree for routers to.
        """
        return 1 if self._epoch_s is None else max(1, round((now + self._epoch_s) * 1000))

    def record_booking(self, record: SessionRecord, now: float) -> None:
        """The request that asked to stay was booked, which made this bond or kept it."""
        if self._records.get(record.session) != record:
            self._store(record)
            self._events.session_changed(record.session)
        self._mark_used(record.session, now)

    # Bookings, of whatever router.

    def booking_began(self, booking: Booking) -> None:
        """See `RouterEvents.booking_added`."""
        session = SessionName(*booking.session)
        self._live_bookings[session] = self._live_bookings.get(session, 0) + 1
        self._newly_idle.pop(session, None)
        if session not in self._closed_sessions:
            self._idle_since.pop(session, None)

    def booking_ended(self, booking: Booking, is_own: bool) -> None:
        """See `RouterEvents.booking_removed`.

        Peers get an update, since they may never have received so short a booking.
        """
        session = SessionName(*booking.session)
        self._live_bookings[session] -= 1
        if self._live_bookings[session]:
            return
        del self._live_bookings[session]
        if session in self._records and session not in self._closed_sessions:
            self._newly_idle[session] = None
            if is_own:
                self._events.session_changed(session)

    def announced(self, booking: Booking, now: float) -> None:
        """A frontend holds this booking: what nobody here remembers of its session, it teaches."""
        if not (self._ttl_s and booking.session_id):
            return
        session = SessionName(*booking.session)
        existing = self._records.get(session)
        if existing is None or existing.revision < booking.session_revision:
            session_placement = SessionPlacement(booking.worker, booking.prefill)
            self.record_booking(
                SessionRecord(session, session_placement, booking.session_revision, booking.key),
                now,
            )

    # Peers.

    def receive(self, told: SessionUpdate, now: float) -> None:
        """What a peer knows of a session."""
        record, idle_s = told
        existing = self._records.get(record.session)
        if not self._ttl_s or (existing is None and idle_s >= self._ttl_s):
            return
        if existing is None or record.supersedes(existing):
            self._store(record)
        elif existing.supersedes(record):
            self._events.session_changed(record.session)
        self._mark_used(record.session, now - idle_s)

    def told(self, session: SessionName, now: float) -> SessionUpdate | None:
        """What to tell peers of a session; None if nothing is known of it (any more)."""
        record = self._records.get(session)
        return (
            None
            if record is None
            else SessionUpdate(record, now - self._idle_since.get(session, now))
        )

    def sessions(self) -> list[SessionName]:
        """All of which there is something to tell."""
        return list(self._records)

    # Time.

    def expire(self, now: float) -> int:
        """Forget what has been idle for ttl_s, FORGET_MAX bonds at most; how many."""
        for session in self._newly_idle:
            self._mark_idle(session, now)
        self._newly_idle.clear()
        expired_count = 0
        while expired_count < EXPIRE_BATCH_MAX and (oldest := self._longest_idle()) is not None:
            if now - self._idle_since[oldest] < self._ttl_s:
                break
            self._remove(oldest)
            expired_count += 1
        return expired_count

    def __len__(self) -> int:
        """Sessions that are bound."""
        return len(self._records) - len(self._closed_sessions)

    @property
    def active_count(self) -> int:
        """Those not known to be idle."""
        return len(self._records) - len(self._idle_since)

    # Inside.

    def _session_name(self, model: str, control: SessionControl, lora_name: str) -> SessionName:
        if not self._ttl_s:
            raise Unsupported(f"{_SESSION_FIELD}.session_id", "this router keeps no sessions")
        length = len(control.session_id)
        if not 0 < length <= SESSION_ID_CHARS_MAX:
            raise InvalidRequest(
                f"a session id has 1 to {SESSION_ID_CHARS_MAX} characters, not {length}",
                f"{_SESSION_FIELD}.session_id",
            )
        return SessionName(model, control.session_id, lora_name)

    def _store(self, record: SessionRecord) -> None:
        """In the place of what was known of its session."""
        session = record.session
        if (old := self._records.pop(session, None)) is not None:
            self.size -= old.size
            self._closed_sessions.pop(session, None)
        self._records[session] = record
        self.size += record.size
        if record.session_placement is None:
            self._closed_sessions[session] = None
        if old is None or old.session_placement != record.session_placement:
            self._events.session_moved(session)
        while len(self._records) > self._records_max or self.size > self._bytes_max:
            self._evict_one(session)

    def _mark_used(self, session: SessionName, at: float) -> None:
        """A request of the session lived at that time, or does now."""
        if session not in self._records:
            return  # There was no room for it.
        if session in self._live_bookings and session not in self._closed_sessions:
            self._idle_since.pop(session, None)
        else:
            self._mark_idle(session, max(at, self._idle_since.get(session, at)))

    def _mark_idle(self, session: SessionName, since: float) -> None:
        if self._idle_since.get(session) == since:
            return
        self._idle_since[session] = since
        heappush(self._idle_heap, (since, session))
        if len(self._idle_heap) > 2 * len(self._idle_since) + 64:
            self._idle_heap = [(since, session) for session, since in self._idle_since.items()]
            heapify(self._idle_heap)

    def _longest_idle(self) -> SessionName | None:
        while self._idle_heap:
            since, session = self._idle_heap[0]
            if self._idle_since.get(session) == since:
                return session
            heappop(self._idle_heap)
        return None

    def _evict_one(self, protected: SessionName) -> None:
        """Somebody else than the newcomer, unless there is nobody."""
        eviction_order = (
            next(iter(self._closed_sessions), None),
            self._longest_idle(),
            next(iter(self._records)),
        )
        victim = next((one for one in eviction_order if one not in (None, protected)), protected)
        assert victim is not None, "somebody is there"
        self._remove(victim)
        self.evicted += 1

    def _remove(self, session: SessionName) -> None:
        self.size -= self._records.pop(session).size
        self._closed_sessions.pop(session, None)
        self._idle_since.pop(session, None)
        self._newly_idle.pop(session, None)
        self._events.session_moved(session)


def _pins_any_worker(routing: RoutingHints) -> bool:
    """Whether the request says by itself where it, or a leg of it, has to run."""
    return any(getattr(routing, name) is not None for name in _PIN_FIELDS)

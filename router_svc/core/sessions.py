"""Session affinity: on which worker the requests of one client session stay (pure).

A *session placement* is where a session's last request was placed. It is made with a booking, so
that the session's next request follows even while the first runs. It is *active* while any router
has a booking of the session, else *idle*, and dropped after `ttl_s` of that, never earlier.

A placement has no effect if its worker is gone, has failed this very request, or if the request
pins a worker: the session then moves with its request. `open` ignores the previous placement,
`close` drops it with the request's booking.

Routers exchange *session records*: the placement, or that the session is closed, with a revision
that grows with each record of the session (it follows the time of day) and the key of the request
that made it. Of two records every router keeps the same one, in whatever order they arrive: the
higher revision, or of equal ones (two routers placed the session at once) the least key. A router
that receives a losing record sends its own. If clocks are more than `ttl_s` apart, a session that
one router has just dropped and placed again may return to its earlier worker at others. A closed
session is kept like an idle one, so that a router without that update cannot bring it back.

Invariants: a record is active or idle, a closed one always idle; there are at most `records_max`,
of `bytes_max` in all. A new record evicts the one closed longest ago, else the one idle longest,
else the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from common.errors import InvalidRequest, Unsupported
from common.request.placement import Placement, Query
from common.request.preprocessed import SessionAction, SessionControl
from router_svc.core.booking import Booking, BookingKey, SessionName
from router_svc.core.candidate import AffinityConstraint, Leg
from router_svc.core.events import RouterEvents

# hard: while its worker is present, a session's requests run only there; soft: they run there if it
# is eligible and has capacity, else on another worker.
AffinityMode = Literal["hard", "soft"]

# Outcome for a request's session: placed for the first time or by `open`; on its worker; on another
# one; closed by the request.
AFFINITY_OUTCOMES = ("bound", "kept", "moved", "closed")
RECORDS_MAX = 65_536
BYTES_MAX = 64 * 1024 * 1024
# Approximate memory of a record without its names.
RECORD_OVERHEAD_BYTES = 768
# Expired records dropped per call: about 1 ms.
EXPIRE_BATCH_MAX = 1024
SESSION_ID_CHARS_MAX = 256
_SESSION_FIELD = "query.routing.session_control"
# A request that pins a worker or rank for any of its legs.
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
        """Returns the placement of one leg; None: open."""
        return self.prefill if leg == "prefill" else self.worker

    @property
    def placements(self) -> tuple[Placement, ...]:
        return (self.worker,) if self.prefill is None else (self.worker, self.prefill)


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The last state of a session, and the unit of replication. placement: None: closed. revision:
    number of its records, from 1. key: of the request that made this record.
    """

    session: SessionName
    placement: SessionPlacement | None
    revision: int
    key: BookingKey

    def supersedes(self, other: SessionRecord) -> bool:
        """Returns whether every router keeps this one of the two; a strict order."""
        return self._precedence < other._precedence

    @property
    def _precedence(self) -> tuple[int, BookingKey, tuple[Placement, ...]]:
        """Least wins. Two routers may place one request: then the placements decide."""
        placements = () if self.placement is None else self.placement.placements
        return (-self.revision, self.key, placements)

    @property
    def size(self) -> int:
        """Approximate bytes in memory."""
        names = (*self.session, self.key.request_id)
        return RECORD_OVERHEAD_BYTES + sum(len(name.encode()) for name in names)


class SessionUpdate(NamedTuple):
    """A record as routers send it. idle_s: since the session's last use; 0 while a request runs."""

    record: SessionRecord
    idle_s: float


@dataclass(frozen=True, slots=True)
class SessionConstraint:
    """previous: the last known state. placement: where the request should run; None: free."""

    session: SessionName
    action: SessionAction | None
    previous: SessionRecord | None
    placement: SessionPlacement | None
    is_hard: bool

    def affinity_constraint(self, leg: Leg) -> AffinityConstraint | None:
        """Returns the preferred or required placement of a leg; None: any."""
        at = None if self.placement is None else self.placement.at(leg)
        return None if at is None else AffinityConstraint(at, self.is_hard)

    @property
    def required_placements(self) -> tuple[Placement, ...]:
        """All placements that the request must use; empty: any."""
        return self.placement.placements if self.is_hard and self.placement is not None else ()

    def outcome(self, worker: Placement) -> str:
        """Returns one of AFFINITY_OUTCOMES, for a request placed on `worker`."""
        if self.action is SessionAction.CLOSE:
            return "closed"
        last = None if self.previous is None else self.previous.placement
        if self.action is SessionAction.OPEN or last is None:
            return "bound"
        return "kept" if last.worker == worker else "moved"

    def record(
        self, worker: Placement, prefill: Placement | None, key: BookingKey, revision_min: int = 1
    ) -> SessionRecord | None:
        """Returns the session's record once its request `key` is placed there; None: there is none.
        revision_min: of a new record, see `SessionAffinity.revision_min`.
        """
        placement: SessionPlacement | None = None
        if self.action is not SessionAction.CLOSE:
            kept = self.placement
            if prefill is None and kept is not None and kept.worker == worker:
                prefill = kept.prefill  # A whole request keeps it.
            placement = SessionPlacement(worker, prefill)
        previous = self.previous
        if previous is None:
            is_closed = placement is None
            return None if is_closed else SessionRecord(self.session, placement, revision_min, key)
        if previous.placement == placement and self.action is not SessionAction.OPEN:
            return previous
        revision = max(previous.revision + 1, revision_min)
        return SessionRecord(self.session, placement, revision, key)


class SessionAffinity:
    """The session records of one router. Times are seconds of one clock; ttl_s 0: no sessions.
    epoch_s: the time of day at `now` 0, in seconds since 1970; None: revisions are plain counts.
    evicted: records dropped for lack of capacity.
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
        assert records_max > 0, "records_max must be positive"
        self._ttl_s = ttl_s
        self._is_hard = mode == "hard"
        self._epoch_s = epoch_s
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._records: dict[SessionName, SessionRecord] = {}
        self._closed_sessions: dict[SessionName, None] = {}  # In order of closing.
        self._live_bookings: dict[SessionName, int] = {}  # Also of sessions without a record.
        # Since when each record is idle; the heap also contains outdated pairs.
        self._idle_since: dict[SessionName, float] = {}
        self._idle_heap: list[tuple[float, SessionName]] = []
        self._newly_idle: dict[SessionName, None] = {}  # Idle from the next `expire` on.
        self._events = RouterEvents() if events is None else events
        self._events.booking_added.subscribe(self.booking_began)
        self._events.booking_removed.subscribe(self.booking_ended)
        self.size = 0  # Approximate bytes.
        self.evicted = 0

    # One request.

    def session_constraint(
        self, query: Query, is_alive: Callable[[Placement], bool]
    ) -> SessionConstraint | None:
        """Returns the constraint of the query's session; None if it names none. Call `expire`
        first.
        is_alive: whether a placement's worker is present. Raises InvalidRequest for an invalid
        session id, Unsupported if this router keeps no sessions.
        """
        routing = query.routing
        if routing is None or (control := routing.session_control) is None:
            return None
        session = self._session_name(query.model, control, routing.lora_name or "")
        previous = self._records.get(session)
        placement = None if previous is None else previous.placement
        if placement is not None and (
            control.action is SessionAction.OPEN
            or any(getattr(routing, name) is not None for name in _PIN_FIELDS)
            or any(at.worker_id in query.excluded_worker_ids for at in placement.placements)
            or not all(map(is_alive, placement.placements))
        ):
            placement = None
        return SessionConstraint(session, control.action, previous, placement, self._is_hard)

    def revision_min(self, now: float) -> int:
        """Returns the least revision of a new record: Unix time in milliseconds, so that it
        supersedes earlier ones that only other routers still have. Routers converge even if
        their clocks differ.
        """
        return 1 if self._epoch_s is None else max(1, round((now + self._epoch_s) * 1000))

    def record_booking(self, record: SessionRecord, now: float) -> None:
        """Records a booking of the session, which made or kept this record."""
        if self._records.get(record.session) != record:
            self._store(record)
            self._events.session_changed(record.session)
        self._mark_used(record.session, now)

    # Bookings of all routers.

    def booking_began(self, booking: Booking) -> None:
        session = SessionName(*booking.session)
        self._live_bookings[session] = self._live_bookings.get(session, 0) + 1
        self._newly_idle.pop(session, None)
        if session not in self._closed_sessions:
            self._idle_since.pop(session, None)

    def booking_ended(self, booking: Booking, is_own: bool) -> None:
        """Handles `RouterEvents.booking_removed`. Peers may have missed so short a booking."""
        session = SessionName(*booking.session)
        self._live_bookings[session] -= 1
        if self._live_bookings[session]:
            return
        del self._live_bookings[session]
        if session in self._records and session not in self._closed_sessions:
            self._newly_idle[session] = None
            if is_own:
                self._events.session_changed(session)

    def booking_reregistered(self, booking: Booking, now: float) -> None:
        """Learns the session record of a booking that was registered again, if it is newer."""
        if not (self._ttl_s and booking.session_id):
            return
        session = SessionName(*booking.session)
        existing = self._records.get(session)
        if existing is None or existing.revision < booking.session_revision:
            placement = SessionPlacement(booking.worker, booking.prefill)
            record = SessionRecord(session, placement, booking.session_revision, booking.key)
            self.record_booking(record, now)

    # Peers.

    def receive(self, update: SessionUpdate, now: float) -> None:
        record, idle_s = update
        existing = self._records.get(record.session)
        if not self._ttl_s or (existing is None and idle_s >= self._ttl_s):
            return
        if existing is None or record.supersedes(existing):
            self._store(record)
        elif existing.supersedes(record):
            self._events.session_changed(record.session)
        self._mark_used(record.session, now - idle_s)

    def updates(self, sessions: Iterable[SessionName], now: float) -> tuple[SessionUpdate, ...]:
        """Returns the present records of those sessions that have one."""
        return tuple(
            SessionUpdate(record, now - self._idle_since.get(session, now))
            for session in sessions
            if (record := self._records.get(session)) is not None
        )

    def sessions(self) -> list[SessionName]:
        return list(self._records)

    # Time.

    def expire(self, now: float) -> int:
        """Drops records that were idle for ttl_s, EXPIRE_BATCH_MAX at most; returns how many."""
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
        """Returns the number of sessions with a placement."""
        return len(self._records) - len(self._closed_sessions)

    @property
    def active_count(self) -> int:
        """Records that are not idle."""
        return len(self._records) - len(self._idle_since)

    # Inside.

    def _session_name(self, model: str, control: SessionControl, lora_name: str) -> SessionName:
        if not self._ttl_s:
            raise Unsupported(f"{_SESSION_FIELD}.session_id", "session_affinity_ttl_s is 0")
        length = len(control.session_id)
        if not 0 < length <= SESSION_ID_CHARS_MAX:
            raise InvalidRequest(
                f"session_id must have 1..{SESSION_ID_CHARS_MAX} characters, not {length}",
                f"{_SESSION_FIELD}.session_id",
            )
        return SessionName(model, control.session_id, lora_name)

    def _store(self, record: SessionRecord) -> None:
        session = record.session
        if (old := self._records.pop(session, None)) is not None:
            self.size -= old.size
            self._closed_sessions.pop(session, None)
        self._records[session] = record
        self.size += record.size
        if record.placement is None:
            self._closed_sessions[session] = None
        if old is None or old.placement != record.placement:
            self._events.session_moved(session)
        while len(self._records) > self._records_max or self.size > self._bytes_max:
            self._evict_one(session)

    def _mark_used(self, session: SessionName, at: float) -> None:
        """Records that a request of the session ran at that time, or runs now."""
        if session not in self._records:
            return  # Evicted.
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
        """Evicts one record; `protected`, the new one, only if there is no other."""
        closed, oldest = next(iter(self._closed_sessions), None), next(iter(self._records))
        eviction_order = (closed, self._longest_idle(), oldest)
        victim = next((name for name in eviction_order if name not in (None, protected)), protected)
        assert victim is not None, "no record to evict"
        self._remove(victim)
        self.evicted += 1

    def _remove(self, session: SessionName) -> None:
        self.size -= self._records.pop(session).size
        self._closed_sessions.pop(session, None)
        self._idle_since.pop(session, None)
        self._newly_idle.pop(session, None)
        self._events.session_moved(session)

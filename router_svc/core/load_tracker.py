"""All bookings, with their owners and leases, and the load of each worker rank (pure).

A *booking* is the load of one attempt of one request: prompt tokens to compute and KV blocks to
hold. It is a *lease*: the frontend renews it by registering it again, at any revision; if an open
session does not renew it for `expiry_s`, router and frontend both drop it.

Invariants (asserted): no sum is negative; the sums of a rank equal those of its bookings; a booking
is owned by an open session of its frontend at this router, or held by a peer router, or orphaned
with a deadline.

A booking's revision starts at 1 and grows by 1 with each change: prefill done (the first time) and
each report of output blocks; the frontend counts alike. Its *generation* is that of the session
that owned it last: a frontend has one session at a time, so the highest generation is right.

Bookings of a worker that left stay until they are freed; decisions read only ranks of the fleet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from common.errors import InvalidRequest, Overloaded
from common.kv.load import Load
from common.request.placement import Placement
from router_svc.core.booking import Booking, BookingKey, SessionHello
from router_svc.core.candidate import LoadTotals
from router_svc.core.events import RouterEvents
from router_svc.core.frontend_sessions import FrontendSessions
from router_svc.core.rank_load import RankLoads, block_weight

# An orphan counts this long; a live frontend registers it again within 200 ms.
ORPHAN_S = 3.0
BOOKINGS_MAX = 262_144
# Limit of received counts and revisions, so that the sums of a full tracker fit into 64 bits.
COUNTER_MAX = 1 << 44
# Frontends renew their bookings each 100 s.
BOOKING_EXPIRY_S = 300.0
# One scan takes some 10 ms if the tracker is full.
EXPIRY_SCAN_INTERVAL_S = 30.0


@dataclass(slots=True)
class _BookingEntry:
    """A booking, owned by a session, orphaned, or (both None) held by a peer. is_own: this router
    sends it to the peers, because a session here owned it last.
    """

    booking: Booking
    session: int | None
    orphan_deadline: float | None
    prefill_done: bool
    is_own: bool = False
    renewed_at: float = 0.0
    made_at: float = 0.0
    # `report_count` of its ranks when it was booked there.
    worker_report_count: int = 0
    prefill_report_count: int = 0


class LoadTracker:
    """All bookings, and their sums per (worker, rank). Times are seconds of one clock."""

    def __init__(
        self,
        bookings_max: int = BOOKINGS_MAX,
        expiry_s: float = BOOKING_EXPIRY_S,
        events: RouterEvents | None = None,
    ) -> None:
        self._bookings_max = bookings_max
        self._expiry_s = expiry_s
        self._last_expiry_scan_at = -math.inf
        self.expired = 0  # Bookings that ended because no frontend renewed them.
        self._entries: dict[BookingKey, _BookingEntry] = {}
        self._keys_by_frontend: dict[int, set[BookingKey]] = {}
        self.ranks = RankLoads()
        self._sessions = FrontendSessions()
        self._absent_frontends: set[int] = set()  # Gone from discovery, with a session still open.
        self._orphans: deque[tuple[float, BookingKey]] = deque()  # In order of deadline.
        self.orphan_count = 0  # Bookings without an owner.
        self._peer_bookings: dict[int, Container[BookingKey]] = {}
        self.events = RouterEvents() if events is None else events

    def add_peer(self, router_id: int, keys: Container[BookingKey]) -> None:
        """Adds a peer router, which owns the bookings in `keys`; it is read at each use."""
        self._peer_bookings[router_id] = keys

    def remove_peer(self, router_id: int) -> None:
        """Removes a lost peer. The caller then calls `holder_lost` for each of its bookings."""
        del self._peer_bookings[router_id]

    # Bookings.

    def book(self, booking: Booking, session: int | None, now: float) -> bool:
        """Adds a booking; False if its key exists, which assigns it to `session` and changes no
        load. session: the requesting one; None: the newest open session of its frontend, else the
        booking starts as an orphan. Raises Overloaded if the tracker is full.
        """
        entry = self._entries.get(booking.key)
        if entry is not None:
            self._assign_owner(entry, session, now)
            return False
        self._assign_owner(self._add(booking, now, prefill_done=False), session, now)
        return True

    def reregister(self, booking: Booking, session: int | None, now: float) -> bool:
        """Takes over a booking of another router or an earlier session. The newest version wins;
        False if the existing one was as new. Raises Overloaded if full.
        """
        entry = self._entries.get(booking.key)
        booking = self._with_session_generation(booking, session)
        is_new = entry is None or booking.version > entry.booking.version
        if entry is None:
            entry = self._add(booking, now, prefill_done=booking.prefill_tokens == 0)
        elif is_new:
            self._update_booking(entry, booking)
        self._assign_owner(entry, session, now)
        return is_new

    def mark_prefill_done(self, key: BookingKey) -> bool:
        """Removes its prefill tokens from the load, once. False if the key is not owned here."""
        entry = self._entries.get(key)
        if entry is None or not entry.is_own:
            return False
        if not entry.prefill_done:
            booking = entry.booking
            self._apply_load(entry, -1)
            self._record_prefill_done(booking)
            entry.prefill_done = True
            self.events.first_token(booking, self.ranks.now - entry.made_at)
            entry.booking = replace(booking, prefill_tokens=0, revision=booking.revision + 1)
            self._apply_load(entry, +1)
            self.ranks.discard_if_empty(booking.prefill)
            self._notify_peers(entry)
            self.events.capacity_freed(booking.prefill or booking.worker)
        return True

    def add_output_blocks(
        self, key: BookingKey, blocks: int, decay_fraction: float | None = None
    ) -> bool:
        """Adds `blocks` of output; False if the key is not owned here. decay_fraction: share of the
        expected output still to come, 0..1: the new weight of each block of the booking; None keeps
        it. Raises InvalidRequest for blocks < 1 or a fraction outside 0..1.
        """
        if blocks < 1:
            raise InvalidRequest(f"blocks must be at least 1, not {blocks}", "blocks")
        if decay_fraction is not None and not 0.0 <= decay_fraction <= 1.0:
            raise InvalidRequest(
                f"decay_fraction must be within 0..1, not {decay_fraction}", "decay_fraction"
            )
        entry = self._entries.get(key)
        if entry is None or not entry.is_own:
            return False  # The owner receives this progress.
        self._apply_load(entry, -1)
        booking = entry.booking
        entry.booking = replace(
            booking,
            revision=booking.revision + 1,
            decode_blocks=booking.decode_blocks + blocks,
            decay=booking.decay if decay_fraction is None else decay_fraction,
        )
        self._apply_load(entry, +1)
        self._notify_peers(entry)
        if entry.booking.decay < booking.decay:
            self.events.capacity_freed(booking.worker)
        return True

    def free(self, key: BookingKey) -> bool:
        """Ends the booking in any state; False if the key is unknown."""
        entry = self._entries.get(key)
        if entry is not None:
            self._drop(entry)
        self.events.booking_changed(key)  # An orphan of theirs ends with it.
        return entry is not None

    def get(self, key: BookingKey) -> Booking | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.booking

    def keys(self) -> list[BookingKey]:
        return list(self._entries)

    def __iter__(self) -> Iterator[Booking]:
        return (entry.booking for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    # Peers.

    def get_own(self, key: BookingKey) -> Booking | None:
        """Returns the booking, if this router sends it to the peers."""
        entry = self._entries.get(key)
        return entry.booking if entry is not None and entry.is_own else None

    def receive(self, booking: Booking, now: float) -> None:
        """Applies a booking that a peer owns: the newest version wins, and an orphan becomes the
        peer's. An open session here keeps its booking, unless the peer has a later one. Raises
        Overloaded if full.
        """
        entry = self._entries.get(booking.key)
        if entry is None:
            entry = self._add(booking, now, prefill_done=booking.prefill_tokens == 0)
        elif booking.version > entry.booking.version:
            self._update_booking(entry, booking)
            self._notify_peers(entry)
        session = entry.session
        if session is None or self._sessions.generation(session) < entry.booking.generation:
            self._hand_over_to_peer(entry)

    def add_expected(self, booking: Booking, now: float) -> None:
        """Adds one of a peer's snapshot: an orphan until the peer sends it. Raises Overloaded."""
        if booking.key not in self._entries:
            entry = self._add(booking, now, prefill_done=booking.prefill_tokens == 0)
            self._orphan_or_hand_over(entry, now)

    def extend_expected(self, key: BookingKey, now: float) -> None:
        """Restarts the orphan period: the peer is alive and has not sent the booking yet."""
        entry = self._entries.get(key)
        if entry is not None and entry.orphan_deadline is not None and not entry.is_own:
            self._orphan_or_hand_over(entry, now)

    def booking_ended(self, key: BookingKey) -> None:
        """Ends a peer's booking, unless a session here or another peer owns it."""
        entry = self._entries.get(key)
        if entry is not None and entry.session is None and not self._is_held_by_peer(key):
            self._drop(entry)
            self._notify_peers(entry)

    def holder_lost(self, key: BookingKey, now: float) -> None:
        """Orphans a booking that its peer lost or gave up, unless another peer holds it."""
        entry = self._entries.get(key)
        if entry is not None and entry.session is None and entry.orphan_deadline is None:
            self._orphan_or_hand_over(entry, now)

    # Owners.

    def open_session(self, frontend_id: int, generation: int = 0, now: float = 0.0) -> int:
        """Registers a connected frontend; the number of its session, never used again. generation:
        the frontend's count of its sessions at all routers; earlier ones are superseded. 0: not
        sent.
        """
        hello = SessionHello(frontend_id, generation)
        self.supersede_sessions(hello, now)
        return self._sessions.open(hello)

    def end_session(self, session: int, now: float) -> int:
        """Ends a session; returns how many bookings it orphans, or frees if discovery lost the
        frontend."""
        frontend_id = self._sessions.close(session)
        count = self._release_session(session, frontend_id, now)
        if frontend_id in self._absent_frontends and not self._sessions.has_frontend(frontend_id):
            self._absent_frontends.discard(frontend_id)
            self.frontend_left(frontend_id)
        return count

    def generation_of(self, session: int | None) -> int:
        """Returns the generation of a booking that the session makes; 0: unknown."""
        return 0 if session is None else self._sessions.generation(session)

    def sessions(self) -> Iterator[SessionHello]:
        """Yields the open sessions here that have a generation."""
        return (hello for hello in self._sessions if hello.generation)

    def supersede_sessions(self, hello: SessionHello, now: float) -> None:
        """Orphans what earlier sessions of the frontend own here, since it opened one, here or
        at a peer. This router may notice their end much later: a cut connection sends no end.
        """
        for session in self._sessions.supersede(hello):
            self._release_session(session, hello.frontend_id, now)
            self.events.frontend_session_superseded(session)

    def is_superseded(self, session: int) -> bool:
        """Returns whether its frontend has a later session, so that its requests do not count any
        more."""
        return self._sessions.is_superseded(session)

    def frontend_left(self, frontend_id: int) -> int:
        """Frees the orphans of a frontend that discovery lost; returns how many there were.
        Bookings of its open sessions stay until those end: a stream is more reliable evidence.
        """
        if self._sessions.has_frontend(frontend_id):
            self._absent_frontends.add(frontend_id)
        entries = self._entries_of(frontend_id)
        orphans = [entry for entry in entries if entry.orphan_deadline is not None]
        for entry in orphans:
            self._drop_and_notify(entry)
        return len(orphans)

    def frontend_joined(self, frontend_id: int) -> None:
        """Records that discovery shows the frontend (again)."""
        self._absent_frontends.discard(frontend_id)

    def expire(self, now: float) -> int:
        """Frees overdue orphans and unrenewed bookings; returns how many. Call it before reading
        loads."""
        freed = 0
        self.ranks.set_time(now)
        if now >= self._last_expiry_scan_at + EXPIRY_SCAN_INTERVAL_S:
            freed = self._expire_unrenewed(now)
        while self._orphans and self._orphans[0][0] <= now:
            deadline, key = self._orphans.popleft()
            entry = self._entries.get(key)
            if entry is not None and entry.orphan_deadline == deadline:
                self._drop_and_notify(entry)
                freed += 1
        return freed

    # Load.

    def load(self, placement: Placement, now: float) -> LoadTotals:
        return self.ranks.load(placement, now)

    def report(self, worker_id: int, dp_rank: int, load: Load | None, now: float) -> None:
        """Stores a load report. None: no other follows the last one, which is dropped."""
        placement = Placement(worker_id, dp_rank)
        if load is None:
            self.ranks.drop_report(placement)
        else:
            self.ranks.report(placement, load, now)
        self.events.capacity_freed(placement)

    def _apply_load(self, entry: _BookingEntry, sign: int) -> None:
        """Adds (+1) or subtract (-1) the load of the entry in its present state."""
        booking = entry.booking
        weight = sign * block_weight(booking.decode_blocks, booking.decay)
        tokens = 0 if entry.prefill_done else sign * booking.prefill_tokens
        worker_tokens = tokens if booking.prefill is None else 0
        self.ranks.add(booking.worker, entry.worker_report_count, worker_tokens, weight, sign)
        if booking.prefill is not None and not entry.prefill_done:
            self.ranks.add(booking.prefill, entry.prefill_report_count, tokens, 0, sign)

    def _record_prefill_done(self, booking: Booking) -> None:
        self.ranks.prefill_done(booking.prefill or booking.worker, booking.prefill_tokens)

    def _record_report_counts(self, entry: _BookingEntry) -> None:
        booking = entry.booking
        entry.worker_report_count = self.ranks.report_count(booking.worker)
        if booking.prefill is not None:
            entry.prefill_report_count = self.ranks.report_count(booking.prefill)

    # Inside.

    def _add(self, booking: Booking, now: float, *, prefill_done: bool) -> _BookingEntry:
        """Returns a new entry, at first an orphan; the caller assigns its owner."""
        if len(self._entries) >= self._bookings_max:
            raise Overloaded(
                1.0,
                f"too many bookings: {len(self._entries)}/{self._bookings_max}; retry after 1 s",
                reason="BOOK_FULL",
            )
        entry = _BookingEntry(booking, None, now, prefill_done, renewed_at=now, made_at=now)
        self._record_report_counts(entry)
        self._entries[booking.key] = entry
        self._keys_by_frontend.setdefault(booking.key.frontend_id, set()).add(booking.key)
        self.orphan_count += 1
        self._apply_load(entry, +1)
        self.ranks.discard_if_empty(booking.prefill)
        if booking.session_id:
            self.events.booking_added(booking)
        if booking.affinity_key:
            self.events.key_placed(booking)
        return entry

    def _update_booking(self, entry: _BookingEntry, booking: Booking) -> None:
        """Replaces a booking by a newer version, whichever router owns it."""
        old, revision, generation = entry.booking, booking.revision, booking.generation
        if replace(old, revision=revision, generation=generation) == booking:
            entry.booking = booking
            return
        self._apply_load(entry, -1)
        if not entry.prefill_done and booking.prefill_tokens == 0:
            self._record_prefill_done(old)
        entry.booking = booking
        entry.prefill_done = booking.prefill_tokens == 0
        self._record_report_counts(entry)
        self._apply_load(entry, +1)
        for placement in (old.worker, old.prefill, booking.prefill):
            self.ranks.discard_if_empty(placement)
        if booking.session != old.session:
            if booking.session_id:
                self.events.booking_added(booking)
            if old.session_id:
                self.events.booking_removed(old, entry.is_own)
        self._notify_capacity_freed(old)
        self._notify_capacity_freed(booking)

    def _drop(self, entry: _BookingEntry) -> None:
        key = entry.booking.key
        del self._entries[key]
        self._apply_load(entry, -1)
        if entry.orphan_deadline is not None:
            self.orphan_count -= 1
        frontend_keys = self._keys_by_frontend[key.frontend_id]
        frontend_keys.remove(key)
        if not frontend_keys:
            del self._keys_by_frontend[key.frontend_id]
        self.ranks.discard_if_empty(entry.booking.worker)
        self.ranks.discard_if_empty(entry.booking.prefill)
        if entry.booking.session_id:
            self.events.booking_removed(entry.booking, entry.is_own)
        self._notify_capacity_freed(entry.booking)

    def _notify_capacity_freed(self, booking: Booking) -> None:
        self.events.capacity_freed(booking.worker)
        if booking.prefill is not None:
            self.events.capacity_freed(booking.prefill)

    def _expire_unrenewed(self, now: float) -> int:
        """Ends bookings that a session here owns and did not renew in time; returns how many."""
        self._last_expiry_scan_at = now
        unrenewed = [
            entry
            for entry in self._entries.values()
            if entry.session is not None and now - entry.renewed_at >= self._expiry_s
        ]
        for entry in unrenewed:
            self._drop_and_notify(entry)
        self.expired += len(unrenewed)
        return len(unrenewed)

    def _drop_and_notify(self, entry: _BookingEntry) -> None:
        """Drops a booking; peers detect its end, except for bookings owned here."""
        self._drop(entry)
        self._notify_peers(entry)

    def _notify_peers(self, entry: _BookingEntry) -> None:
        if entry.is_own:
            self.events.booking_changed(entry.booking.key)

    def _assign_owner(self, entry: _BookingEntry, session: int | None, now: float) -> None:
        """Makes `session`, or the frontend's newest one, the owner; without any, releases the
        booking. One of a later session, here or at a peer, keeps its owner.
        """
        owner = self._sessions.newest(entry.booking.key.frontend_id) if session is None else session
        if owner is not None:
            booking = self._with_session_generation(entry.booking, owner)
            if booking.generation < entry.booking.generation:
                return
            entry.booking = booking
        entry.is_own, entry.renewed_at = True, now
        if owner is None or self.is_superseded(owner):
            self._orphan_or_hand_over(entry, now)
        else:
            self._set_owner(entry, owner, None)
        self._notify_peers(entry)

    def _orphan_or_hand_over(self, entry: _BookingEntry, now: float) -> None:
        """Gives a booking without a session here to a peer that holds it, or orphans it."""
        if self._is_held_by_peer(entry.booking.key):
            self._hand_over_to_peer(entry)
            return
        deadline = now + ORPHAN_S
        self._set_owner(entry, None, deadline)
        self._orphans.append((deadline, entry.booking.key))

    def _set_owner(
        self, entry: _BookingEntry, session: int | None, orphan_deadline: float | None
    ) -> None:
        """Sets the owner: an open session, or an orphan deadline, or (both None) a peer."""
        was_orphan, is_orphan = entry.orphan_deadline is not None, orphan_deadline is not None
        self.orphan_count += is_orphan - was_orphan
        entry.session, entry.orphan_deadline = session, orphan_deadline

    def _release_session(self, session: int, frontend_id: int, now: float) -> int:
        entries = [entry for entry in self._entries_of(frontend_id) if entry.session == session]
        for entry in entries:
            self._orphan_or_hand_over(entry, now)
        return len(entries)

    def _entries_of(self, frontend_id: int) -> Iterator[_BookingEntry]:
        return (self._entries[key] for key in self._keys_by_frontend.get(frontend_id, ()))

    def _hand_over_to_peer(self, entry: _BookingEntry) -> None:
        """Gives a booking to the peer that holds it: not owned here any more, no orphan."""
        self._set_owner(entry, None, None)
        if entry.is_own:
            entry.is_own = False
            self.events.booking_changed(entry.booking.key)

    def _is_held_by_peer(self, key: BookingKey) -> bool:
        return any(key in keys for keys in self._peer_bookings.values())

    def _with_session_generation(self, booking: Booking, session: int | None) -> Booking:
        generation = self.generation_of(session)
        if generation == booking.generation:
            return booking
        return replace(booking, generation=generation)

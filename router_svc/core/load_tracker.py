"""The load book: what this router believes each worker has to do (pure).

A *booking* is the charge of one attempt of one request: prompt tokens to compute and KV blocks to
hold. It is made with the decision, changed as the frontend tells of progress, and ends with `free`,
or because nobody claims it any more.

Invariants (asserted): no sum is ever negative; the sums of a rank are exactly those of the bookings
on it; a booking is owned by an open session of its frontend here, or else held by a peer router, or
else orphaned with a deadline.

A booking is a *lease*: whoever has a session renews it by announcing it again, at any revision. One
that an open session has not renewed for `expiry_s` is forgotten by both, and ends.

A booking's revision is 1 when it is made and grows by 1 with each change: prefill done (the first
time) and each word of output blocks. The frontend counts likewise, and announces the same number.
Its *generation* is that of the session that had it last: a frontend has one session at a time, so
the latest is right wherever it is open, and one that claims less has only not ended yet.

Bookings of a worker that left stay until they are freed. They weigh on nobody, since only ranks of
the fleet are ever asked for; but should discovery merely have blinked, the load is still known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace

from common.errors import InvalidRequest, Overloaded
from common.kv.load import Load
from router_svc.core.events import RouterEvents
from router_svc.core.types import Booking, BookingKey, LoadTotals, Placement, SessionHello

# An orphan is counted this long; a frontend that lives announces it again within 200 ms.
ORPHAN_S = 3.0
# A report older than this says nothing any more.
REPORT_MAX_AGE_S = 0.5
BOOKINGS_MAX = 262_144
# No count or revision that somebody tells is above this, so that those of a full book can be summed
# and go on growing in 64 bits.
COUNTER_MAX = 1 << 44
# A booking that nobody announces for so long is forgotten; frontends announce theirs each 100 s.
BOOKING_EXPIRY_S = 300.0
# How often such ones are looked for: some 10 ms for the fullest book.
EXPIRY_SCAN_INTERVAL_S = 30.0
# Blocks are weighed in parts of 1 / 2^16, as integers, so that sums stay exact.
_WEIGHT_BITS = 16
_HALF_WEIGHT = 1 << (_WEIGHT_BITS - 1)


@dataclass(slots=True)
class _LoadSums:
    """block_weight: in parts of 1 / 2^_WEIGHT_BITS blocks."""

    prefill_tokens: int = 0
    block_weight: int = 0
    requests: int = 0

    def add(self, prefill_tokens: int, block_weight: int, requests: int) -> None:
        self.prefill_tokens += prefill_tokens
        self.block_weight += block_weight
        self.requests += requests
        assert self.prefill_tokens >= 0, "prefill tokens of a rank went negative"
        assert self.block_weight >= 0, "decode blocks of a rank went negative"
        assert self.requests >= 0, "requests of a rank went negative"

    @property
    def decode_blocks(self) -> int:
        """The sum of fractional weights, rounded: as NVIDIA Dynamo documents it."""
        return (self.block_weight + _HALF_WEIGHT) >> _WEIGHT_BITS


@dataclass(slots=True)
class _RankState:
    """`since_report` sums the bookings made since the last report: `report_count` tells which
    those are.

    A counter, because two things may happen at the same `now`.

    estimate: what `LoadTracker.load` answers until `estimated_until`, or until one of the others
    changes; None: to be computed.
    """

    booked: _LoadSums = field(default_factory=_LoadSums)
    since_report: _LoadSums = field(default_factory=_LoadSums)
    report: Load | None = None
    reported_at: float = 0.0
    report_count: int = 0
    estimate: LoadTotals | None = None
    estimated_until: float = math.inf

    @property
    def is_empty(self) -> bool:
        return self.report is None and self.booked.requests == 0


@dataclass(slots=True)
class _BookingEntry:
    """A booking in the book, of a session, orphaned, or (both None) held by a peer.

    is_own: a session here had it last, so that it is for this router to tell its peers of it.
    """

    booking: Booking
    session: int | None
    orphan_deadline: float | None
    prefill_done: bool
    is_own: bool = False
    renewed_at: float = 0.0
    # How many reports the ranks had seen when it was booked there.
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
        self.expired = 0  # Bookings that ended because nobody renewed them.
        self._entries: dict[BookingKey, _BookingEntry] = {}
        self._keys_by_frontend: dict[int, set[BookingKey]] = {}
        self._ranks: dict[Placement, _RankState] = {}
        self._sessions: dict[int, SessionHello] = {}  # In order of opening.
        self._next_session = 1
        self._latest_generation: dict[
            int, int
        ] = {}  # The latest generation of who has a session here.
        self._absent_frontends: set[int] = set()  # Gone from discovery, with a session still open.
        self._orphans: deque[tuple[float, BookingKey]] = deque()  # In order of deadline.
        self._orphan_count = 0
        self._peer_bookings: dict[int, Container[BookingKey]] = {}
        self.events = RouterEvents() if events is None else events

    def add_peer(self, router_id: int, keys: Container[BookingKey]) -> None:
        """A peer router owns the bookings in `keys`, which is read at each use."""
        self._peer_bookings[router_id] = keys

    def remove_peer(self, router_id: int) -> None:
        """The peer was lost. The caller then calls `holder_lost` for each of its bookings."""
        del self._peer_bookings[router_id]

    # Bookings.

    def book(self, booking: Booking, session: int | None, now: float) -> bool:
        """Add a booking; False if its key is there already, which adopts it and changes no load.

        session: the one that asked. None (a caller without a session) stands for the newest open
        session of its frontend; where there is none, the booking is an orphan from the start.
        Raises Overloaded when the book is full.
        """
        entry = self._entries.get(booking.key)
        if entry is not None:
            self._assign_owner(entry, session, now)
            return False
        self._assign_owner(self._add(booking, now, prefill_done=False), session, now)
        return True

    def reregister(self, booking: Booking, session: int | None, now: float) -> bool:
        """Take over a booking made elsewhere or by an earlier session, and adopt it.

        The newest wins; False if ours was as new. Raises Overloaded when full.
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
        """Prefill is over: its tokens leave the load, once. False for a key that is not our own."""
        entry = self._entries.get(key)
        if entry is None or not entry.is_own:
            return False
        if not entry.prefill_done:
            self._apply_load(entry, -1)
            entry.prefill_done = True
            entry.booking = _next_revision(entry.booking, prefill_tokens=0)
            self._apply_load(entry, +1)
            self._discard_if_empty(entry.booking.prefill)
            self._notify_peers(entry)
            self.events.capacity_freed(entry.booking.prefill or entry.booking.worker)
        return True

    def add_output_blocks(
        self, key: BookingKey, blocks: int, decay_fraction: float | None = None
    ) -> bool:
        """The answer grew by `blocks`; False for a key that is not our own.

        decay_fraction: share of the expected output still to come, 0..1. Each block of the booking
        weighs that much from now on; the weights of a rank are summed, then rounded. None leaves
        the weight as it is.
        Raises InvalidRequest for blocks < 1 or a fraction outside 0..1.
        """
        if blocks < 1:
            raise InvalidRequest(f"blocks must be at least 1, not {blocks}", "blocks")
        if decay_fraction is not None and not 0.0 <= decay_fraction <= 1.0:
            raise InvalidRequest(
                f"decay_fraction must be within 0..1, not {decay_fraction}", "decay_fraction"
            )
        entry = self._entries.get(key)
        if entry is None or not entry.is_own:
            return False  # Whoever has it now hears, or has heard, all of this.
        self._apply_load(entry, -1)
        booking = entry.booking
        entry.booking = _next_revision(
            booking,
            decode_blocks=booking.decode_blocks + blocks,
            decay=booking.decay if decay_fraction is None else decay_fraction,
        )
        self._apply_load(entry, +1)
        self._notify_peers(entry)
        if entry.booking.decay < booking.decay:
            self.events.capacity_freed(booking.worker)
        return True

    def free(self, key: BookingKey) -> bool:
        """The booking ended, in whatever state it was; False if the key is not known."""
        entry = self._entries.get(key)
        if entry is not None:
            self._drop(entry)
        self.events.booking_changed(key)  # An orphan of theirs ends with it.
        return entry is not None

    def get(self, key: BookingKey) -> Booking | None:
        """The booking as it is now."""
        entry = self._entries.get(key)
        return None if entry is None else entry.booking

    def keys(self) -> list[BookingKey]:
        """Those of all bookings."""
        return list(self._entries)

    def __iter__(self) -> Iterator[Booking]:
        return (entry.booking for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def orphan_count(self) -> int:
        """Bookings that nobody owns at the moment."""
        return self._orphan_count

    # Peers.

    def own(self, key: BookingKey) -> Booking | None:
        """The booking, if it is this router that tells the others of it."""
        entry = self._entries.get(key)
        return entry.booking if entry is not None and entry.is_own else None

    def receive(self, booking: Booking, now: float) -> None:
        """A peer holds it: the newest wins, and an orphan of ours is the peer's.

        What an open session here owns stays with it, unless the peer has it of a later one. Raises
        Overloaded when the book is full.
        """
        entry = self._entries.get(booking.key)
        if entry is None:
            entry = self._add(booking, now, prefill_done=booking.prefill_tokens == 0)
        elif booking.version > entry.booking.version:
            self._update_booking(entry, booking)
            self._notify_peers(entry)
        session = entry.session
        if session is None or self._sessions[session].generation < entry.booking.generation:
            self._hand_over_to_peer(entry)

    def add_expected(self, booking: Booking, now: float) -> None:
        """A peer's snapshot has it: an orphan, until the peer tells of it as it does later on.

        Raises Overloaded when the book is full.
        """
        if booking.key not in self._entries:
            entry = self._add(booking, now, prefill_done=booking.prefill_tokens == 0)
            self._orphan_or_hand_over(entry, now)

    def extend_expected(self, key: BookingKey, now: float) -> None:
        """That peer still lives and has not told of it yet: the orphan's time begins anew."""
        entry = self._entries.get(key)
        if entry is not None and entry.orphan_deadline is not None and not entry.is_own:
            self._orphan_or_hand_over(entry, now)

    def booking_ended(self, key: BookingKey) -> None:
        """A peer's booking ended; also here, unless a session here or another peer has it."""
        entry = self._entries.get(key)
        if entry is not None and entry.session is None and not self._is_held_by_peer(key):
            self._drop(entry)
            self._notify_peers(entry)

    def holder_lost(self, key: BookingKey, now: float) -> None:
        """The peer that held it was lost, or gave it up: an orphan, unless another holds it too."""
        entry = self._entries.get(key)
        if entry is not None and entry.session is None and entry.orphan_deadline is None:
            self._orphan_or_hand_over(entry, now)

    # Owners.

    def open_session(self, frontend_id: int, generation: int = 0, now: float = 0.0) -> int:
        """A frontend connected; the number of its session, never used again.

        generation: which of its sessions, at whatever router, it is; those before are over. 0: it
        does not say, and `now` does not matter.
        """
        hello = SessionHello(frontend_id, generation)
        self.supersede_sessions(hello, now)
        self._latest_generation.setdefault(frontend_id, generation)
        session = self._next_session
        self._next_session += 1
        self._sessions[session] = hello
        return session

    def end_session(self, session: int, now: float) -> int:
        """The session is over: orphan its bookings; how many there were.

        Where discovery has lost the frontend already, they are freed instead.
        """
        frontend_id = self._sessions.pop(session).frontend_id
        count = self._release_session(session, frontend_id, now)
        if self._newest_session(frontend_id) is None:
            del self._latest_generation[frontend_id]
            if frontend_id in self._absent_frontends:
                self._absent_frontends.discard(frontend_id)
                self.frontend_left(frontend_id)
        return count

    def sessions(self) -> Iterator[SessionHello]:
        """Those open here that say which they are."""
        return (hello for hello in self._sessions.values() if hello.generation)

    def supersede_sessions(self, hello: SessionHello, now: float) -> None:
        """A frontend has that session, here or at a peer: what earlier ones here have is orphaned.

        Its end may be seen here much later, for nobody says goodbye through a link that is cut.
        """
        previous = self._latest_generation.get(hello.frontend_id, hello.generation)
        if previous >= hello.generation:
            return
        self._latest_generation[hello.frontend_id] = hello.generation
        for session, (frontend_id, generation) in self._sessions.items():
            if frontend_id == hello.frontend_id and generation >= previous:
                self._release_session(session, frontend_id, now)
                self.events.frontend_session_superseded(session)

    def is_superseded(self, session: int) -> bool:
        """Whether its frontend has a later one, so that nothing it asks counts any more."""
        frontend_id, generation = self._sessions[session]
        return generation < self._latest_generation[frontend_id]

    def frontend_left(self, frontend_id: int) -> int:
        """Discovery lost a frontend: free its orphans at once; how many there were.

        What an open session of it owns stays until that ends: the stream is the better witness.
        """
        if frontend_id in self._latest_generation:
            self._absent_frontends.add(frontend_id)
        orphans = [
            key
            for key in self._keys_by_frontend.get(frontend_id, ())
            if self._entries[key].orphan_deadline is not None
        ]
        for key in orphans:
            self._drop_and_notify(self._entries[key])
        return len(orphans)

    def frontend_joined(self, frontend_id: int) -> None:
        """Discovery shows the frontend (again)."""
        self._absent_frontends.discard(frontend_id)

    def expire(self, now: float) -> int:
        """Free the orphans whose time is over, and bookings that nobody renews; how many.

        To be called before reading any load.
        """
        freed = (
            self._expire_unrenewed(now)
            if now >= self._last_expiry_scan_at + EXPIRY_SCAN_INTERVAL_S
            else 0
        )
        while self._orphans and self._orphans[0][0] <= now:
            deadline, key = self._orphans.popleft()
            entry = self._entries.get(key)
            if entry is not None and entry.orphan_deadline == deadline:
                self._drop_and_notify(entry)
                freed += 1
        return freed

    # Load.

    def report(self, worker_id: int, dp_rank: int, load: Load, now: float) -> None:
        """What a worker says of one rank; replaces what it said before."""
        rank = self._rank(Placement(worker_id, dp_rank))
        rank.report = load
        rank.reported_at = now
        rank.report_count += 1
        rank.since_report = _LoadSums()
        rank.estimate = None
        self.events.capacity_freed(Placement(worker_id, dp_rank))

    def worker_left(self, worker_id: int) -> None:
        """Discovery lost a worker: what it reported is void."""
        for placement in [p for p in self._ranks if p.worker_id == worker_id]:
            self._ranks[placement].report = None
            self._ranks[placement].estimate = None
            self._discard_if_empty(placement)

    def load(self, placement: Placement, now: float) -> LoadTotals:
        """The estimate, per field: max(last report + bookings newer than it, bookings).

        A report counts waiting tokens, KV blocks in use, and requests running or waiting; one older
        than REPORT_MAX_AGE_S counts nothing.
        """
        rank = self._ranks.get(placement)
        if rank is None:
            return _ZERO_LOAD
        estimate = rank.estimate
        if estimate is None or now > rank.estimated_until:
            estimate = rank.estimate = _compute_estimate(rank, now)
        return estimate

    def report_age_s(self, placement: Placement, now: float) -> float | None:
        """Seconds since the rank's last report; None if there is none."""
        rank = self._ranks.get(placement)
        return None if rank is None or rank.report is None else now - rank.reported_at

    def stale_report_count(self, now: float) -> int:
        """Ranks whose last report is too old to count."""
        return sum(
            rank.report is not None and now - rank.reported_at > REPORT_MAX_AGE_S
            for rank in self._ranks.values()
        )

    # Inside.

    def _add(self, booking: Booking, now: float, *, prefill_done: bool) -> _BookingEntry:
        """A new entry, at first an orphan; whose it is, the caller has to say."""
        if len(self._entries) >= self._bookings_max:
            raise Overloaded(
                1.0, f"the router holds {self._bookings_max} bookings", reason="BOOK_FULL"
            )
        entry = _BookingEntry(booking, None, now, prefill_done, renewed_at=now)
        self._record_report_counts(entry)
        self._entries[booking.key] = entry
        self._keys_by_frontend.setdefault(booking.key.frontend_id, set()).add(booking.key)
        self._orphan_count += 1
        self._apply_load(entry, +1)
        self._discard_if_empty(booking.prefill)
        if booking.session_id:
            self.events.booking_added(booking)
        return entry

    def _update_booking(self, entry: _BookingEntry, booking: Booking) -> None:
        """Newer facts about the same booking, whoever has it."""
        if replace(entry.booking, revision=booking.revision, generation=booking.generation) == (
            booking
        ):
            entry.booking = booking
            return
        self._apply_load(entry, -1)
        old, entry.booking = entry.booking, booking
        entry.prefill_done = booking.prefill_tokens == 0
        self._record_report_counts(entry)
        self._apply_load(entry, +1)
        for placement in (old.worker, old.prefill, booking.prefill):
            self._discard_if_empty(placement)
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
            self._orphan_count -= 1
        frontend_keys = self._keys_by_frontend[key.frontend_id]
        frontend_keys.remove(key)
        if not frontend_keys:
            del self._keys_by_frontend[key.frontend_id]
        self._discard_if_empty(entry.booking.worker)
        self._discard_if_empty(entry.booking.prefill)
        if entry.booking.session_id:
            self.events.booking_removed(entry.booking, entry.is_own)
        self._notify_capacity_freed(entry.booking)

    def _notify_capacity_freed(self, booking: Booking) -> None:
        self.events.capacity_freed(booking.worker)
        if booking.prefill is not None:
            self.events.capacity_freed(booking.prefill)

    def _expire_unrenewed(self, now: float) -> int:
        """End those that a session here has and has not renewed in time."""
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
        """By time or discovery, which tell peers by themselves of what is not ours."""
        self._drop(entry)
        self._notify_peers(entry)

    def _notify_peers(self, entry: _BookingEntry) -> None:
        if entry.is_own:
            self.events.booking_changed(entry.booking.key)

    def _assign_owner(self, entry: _BookingEntry, session: int | None, now: float) -> None:
        """Make `session`, or the frontend's newest one, the owner; without any, release it.

        What a later session has, here or elsewhere, stays its own.
        """
        owner = self._newest_session(entry.booking.key.frontend_id) if session is None else session
        if owner is not None:
            booking = self._with_session_generation(entry.booking, owner)
            if booking.generation < entry.booking.generation:
                return
            entry.booking = booking
        entry.is_own, entry.renewed_at = True, now
        if owner is None or self.is_superseded(owner):
            self._orphan_or_hand_over(entry, now)
        else:
            if entry.orphan_deadline is not None:
                self._orphan_count -= 1
            entry.session, entry.orphan_deadline = owner, None
        self._notify_peers(entry)

    def _orphan_or_hand_over(self, entry: _BookingEntry, now: float) -> None:
        """No session here has it: a peer holds it, or it is an orphan (anew)."""
        if self._is_held_by_peer(entry.booking.key):
            self._hand_over_to_peer(entry)
            return
        if entry.orphan_deadline is None:
            self._orphan_count += 1
        entry.session, entry.orphan_deadline = None, now + ORPHAN_S
        self._orphans.append((entry.orphan_deadline, entry.booking.key))

    def _release_session(self, session: int, frontend_id: int, now: float) -> int:
        session_entries = [
            entry
            for key in self._keys_by_frontend.get(frontend_id, ())
            if (entry := self._entries[key]).session == session
        ]
        for entry in session_entries:
            self._orphan_or_hand_over(entry, now)
        return len(session_entries)

    def _hand_over_to_peer(self, entry: _BookingEntry) -> None:
        """To the peer that holds it: no longer ours, no orphan."""
        if entry.orphan_deadline is not None:
            self._orphan_count -= 1
        entry.session = entry.orphan_deadline = None
        if entry.is_own:
            entry.is_own = False
            self.events.booking_changed(entry.booking.key)

    def _is_held_by_peer(self, key: BookingKey) -> bool:
        return any(key in keys for keys in self._peer_bookings.values())

    def _newest_session(self, frontend_id: int) -> int | None:
        sessions = reversed(self._sessions.items())
        return next((s for s, hello in sessions if hello.frontend_id == frontend_id), None)

    def _with_session_generation(self, booking: Booking, session: int | None) -> Booking:
        generation = 0 if session is None else self._sessions[session].generation
        return (
            booking if booking.generation == generation else replace(booking, generation=generation)
        )

    def _apply_load(self, entry: _BookingEntry, sign: int) -> None:
        """Add (+1) or take away (-1) what the entry weighs as it is now."""
        booking = entry.booking
        blocks = booking.decode_blocks << _WEIGHT_BITS
        if booking.decay != 1.0:
            blocks = round(blocks * booking.decay)
        tokens = 0 if entry.prefill_done else booking.prefill_tokens
        if booking.prefill is None:
            self._apply_rank_load(
                booking.worker, entry.worker_report_count, sign * tokens, sign * blocks, sign
            )
            return
        self._apply_rank_load(booking.worker, entry.worker_report_count, 0, sign * blocks, sign)
        if not entry.prefill_done:
            self._apply_rank_load(
                booking.prefill, entry.prefill_report_count, sign * tokens, 0, sign
            )

    def _apply_rank_load(
        self,
        placement: Placement,
        report_count_at_booking: int,
        tokens: int,
        block_weight: int,
        requests: int,
    ) -> None:
        rank = self._ranks[placement]
        rank.estimate = None
        rank.booked.add(tokens, block_weight, requests)
        if report_count_at_booking == rank.report_count:
            rank.since_report.add(tokens, block_weight, requests)

    def _record_report_counts(self, entry: _BookingEntry) -> None:
        """Its ranks' next reports will be the first ones that can count it."""
        booking = entry.booking
        entry.worker_report_count = self._rank(booking.worker).report_count
        if booking.prefill is not None:
            entry.prefill_report_count = self._rank(booking.prefill).report_count

    def _rank(self, placement: Placement) -> _RankState:
        rank = self._ranks.get(placement)
        if rank is None:
            rank = self._ranks[placement] = _RankState()
        return rank

    def _discard_if_empty(self, placement: Placement | None) -> None:
        """Forget a rank that carries nothing, so that the book does not grow with churn."""
        if placement is not None and (rank := self._ranks.get(placement)) and rank.is_empty:
            del self._ranks[placement]


_ZERO_LOAD = LoadTotals()


def _compute_estimate(rank: _RankState, now: float) -> LoadTotals:
    """The load of a rank, and until when it holds if nothing happens."""
    booked, since_report, report = rank.booked, rank.since_report, rank.report
    expires_at = rank.reported_at + REPORT_MAX_AGE_S
    if report is None or now > expires_at:
        rank.estimated_until = math.inf
        return LoadTotals(booked.prefill_tokens, booked.decode_blocks, booked.requests)
    rank.estimated_until = expires_at
    return LoadTotals(
        max(report.waiting_tokens + since_report.prefill_tokens, booked.prefill_tokens),
        max(report.kv_used_blocks + since_report.decode_blocks, booked.decode_blocks),
        max(report.running + report.waiting + since_report.requests, booked.requests),
    )


def _next_revision(
    booking: Booking,
    *,
    prefill_tokens: int | None = None,
    decode_blocks: int | None = None,
    decay: float | None = None,
) -> Booking:
    return replace(
        booking,
        prefill_tokens=booking.prefill_tokens if prefill_tokens is None else prefill_tokens,
        decode_blocks=booking.decode_blocks if decode_blocks is None else decode_blocks,
        decay=booking.decay if decay is None else decay,
        revision=booking.revision + 1,
    )

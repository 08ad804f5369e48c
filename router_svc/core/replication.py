"""The bookings of several routers kept alike: what to tell a peer, what its words mean (pure).

Each router tells every peer of its *own* bookings: those of its sessions, and those whose session
died a moment ago. What a peer told is kept as its *claims*, apart from the load book, so that a
digest over them can be compared with the peer's whatever the book made of them. The book holds, of
all claims to one booking, that of its frontend's latest session, there the highest revision; what
an open session here has is given up only to a later one. What is given up has not ended: a router
that hears of that first, or in the same moment gives up its own, counts an orphan until it hears
who has it. When a peer is lost, what only it claimed becomes an orphan too: it still counts, until
its frontend announces it somewhere, or ORPHAN_S is over.

A router that starts learns from a *snapshot* of each peer, which is all that the peer counts: also
what it heard of others, and orphans, for whoever told of those may be gone by now. What only a
snapshot told is an orphan too, but does not end as long as the peer answers and has not yet told by
itself, however late discovery shows us to it.

Client sessions go along (`affinity`), told by whoever changed them and, when everything is told, by
all. Bonds converge whatever the order, so that neither claims nor digests are kept of them.

Charges are exchanged, never prompt content. Digests find what was lost on the way; the cure is to
tell everything anew: what the peer holds and is not told again has ended.

Invariants: claims are those of peers whose stream is open; a telling tells each change after it was
made, and all bookings before it says that all are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from struct import Struct

from common.errors import InvalidRequest, Overloaded
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.sessions import SessionAffinity, SessionUpdate
from router_svc.core.types import Booking, BookingKey, SessionHello, SessionName

# Bookings, and client sessions, in one frame: what a peer's loop can take in a few milliseconds.
FRAME_ENTRIES_MAX = 512
# Between digests, and so between frames of a router that has nothing to tell.
DIGEST_S = 1.0
# Changes that one peer may be behind with; above it, it is told everything anew instead.
BACKLOG_MAX = 65_536

_EMPTY_DIGEST = 0x6B766D6573680001
_FOUR_UINT64 = Struct("<QQQQ")
_UINT64 = Struct("<Q")


@dataclass(frozen=True, slots=True)
class Frame:
    """What one router tells another; see `router.v1.SyncRequest`. digest: 0, there is none.

    refused: what is wrong with entries that were left out. refused_bonds: the same of
    `session_records`,
    which no digest counts.
    """

    sequence: int
    upserts: tuple[Booking, ...] = ()
    removals: tuple[BookingKey, ...] = ()
    digest: int = 0
    begins_all: bool = False
    ends_all: bool = False
    sessions: tuple[SessionHello, ...] = ()
    session_records: tuple[SessionUpdate, ...] = ()
    released: tuple[BookingKey, ...] = ()
    refused: tuple[InvalidRequest, ...] = ()
    refused_session_records: tuple[InvalidRequest, ...] = ()


def fingerprint(booking: Booking) -> int:
    """64 bits of a booking's key, generation and revision, the same in every process.

    Of one generation only one router makes and changes it, so that these tell all of it.
    """
    frontend_id, request_id, attempt = booking.key
    packed = _FOUR_UINT64.pack(frontend_id, attempt, booking.generation, booking.revision)
    fingerprint: int
    (fingerprint,) = _UINT64.unpack(blake2b(packed + request_id.encode(), digest_size=8).digest())
    return fingerprint


class Digest:
    """The exclusive or of the fingerprints of a set of bookings, kept up as it changes."""

    def __init__(self) -> None:
        self._xor = _EMPTY_DIGEST
        self._fingerprints: dict[BookingKey, int] = {}

    @property
    def value(self) -> int:
        """Never 0."""
        return self._xor or 1

    def put(self, booking: Booking) -> None:
        """The booking is in the set, as it is now."""
        part = fingerprint(booking)
        self._xor ^= self._fingerprints.get(booking.key, 0) ^ part
        self._fingerprints[booking.key] = part

    def discard(self, key: BookingKey) -> None:
        """It is not (any more)."""
        self._xor ^= self._fingerprints.pop(key, 0)

    def __len__(self) -> int:
        return len(self._fingerprints)


@dataclass(slots=True)
class _PeerState:
    """What one peer said on its stream. round: counts the times it began to tell everything.

    has_told_all: once, whatever has become of that stream. is_partial: entries of this round were
    refused, so that digests differ and telling them again is no cure.
    """

    stream: int
    sequence: int = 0
    round: int = 0
    awaits_full_sync: bool = False
    has_full_sync: bool = False
    is_partial: bool = False
    bookings: dict[BookingKey, tuple[Booking, int]] = field(default_factory=dict)
    digest: Digest = field(default_factory=Digest)

    def discard(self, key: BookingKey) -> None:
        self.bookings.pop(key, None)
        self.digest.discard(key)


@dataclass(slots=True)
class _SnapshotBookings:
    """What the snapshot of a peer said that has not told all of its own yet."""

    renewed_at: float
    keys: set[BookingKey] = field(default_factory=set)


class OutboundSync:
    """What one peer has still to be told, on one stream. Made by `Replica.open_outbound`."""

    def __init__(self, book: LoadTracker, own: Digest, affinity: SessionAffinity) -> None:
        self._load_tracker = book
        self._own_digest = own
        self._affinity = affinity
        # Whether the booking had ended by then: it may be back as a peer's when that is told.
        self._changed_bookings: dict[BookingKey, bool] = {}
        self._changed_sessions: dict[SessionName, None] = {}
        self._full_sync_remaining = 0
        self._is_full_sync_start = self._is_full_sync = True
        self._sequence = 0
        self._last_digest_at = float("-inf")

    def request_full_sync(self) -> None:
        """Everything anew: when the peer asks, and when it is too far behind."""
        self._changed_bookings.clear()
        self._is_full_sync_start = self._is_full_sync = True

    def changed(self, key: BookingKey) -> None:
        """Tell what became of a booking."""
        if self._is_full_sync_start:
            return
        self._changed_bookings[key] = self._load_tracker.get(key) is None
        if len(self._changed_bookings) > max(BACKLOG_MAX, 2 * self._full_sync_remaining):
            self.request_full_sync()

    def session_changed(self, session: SessionName) -> None:
        """Tell what became of a client session."""
        if self._is_full_sync_start:
            return
        self._changed_sessions[session] = None
        if len(self._changed_sessions) > 2 * BACKLOG_MAX:
            self.request_full_sync()

    def seconds_until_due(self, now: float) -> float:
        """Seconds until there is something to tell: 0 for changes, else until the next digest."""
        if self._changed_bookings or self._is_full_sync or self._changed_sessions:
            return 0.0
        return max(0.0, self._last_digest_at + DIGEST_S - now)

    @property
    def is_frame_full(self) -> bool:
        """Whether a frame would be full: no use in gathering more."""
        return max(len(self._changed_bookings), len(self._changed_sessions)) >= FRAME_ENTRIES_MAX

    def frame(self, now: float) -> Frame:
        """The next frame. All that it says is as it is at this moment."""
        begins_all, self._is_full_sync_start = self._is_full_sync_start, False
        if begins_all:
            # Those of others too: one that was given up is untold yet.
            self._changed_bookings = dict.fromkeys(self._load_tracker.keys(), False)
            self._full_sync_remaining = len(self._changed_bookings)
            self._changed_sessions = dict.fromkeys(self._affinity.sessions())
        keys = tuple(islice(self._changed_bookings, FRAME_ENTRIES_MAX))
        upserts: list[Booking] = []
        removals: list[BookingKey] = []
        released: list[BookingKey] = []
        for key in keys:
            was_ended = self._changed_bookings.pop(key)
            booking = self._load_tracker.own(key)
            if booking is not None:
                upserts.append(booking)
            elif was_ended or self._load_tracker.get(key) is None:
                removals.append(key)
            else:
                released.append(key)
        # New changes queue up behind what is left of all.
        self._full_sync_remaining = max(0, self._full_sync_remaining - len(keys))
        ends_all = self._is_full_sync and not self._full_sync_remaining
        if ends_all:
            self._is_full_sync = False
        self._sequence += 1
        digest = self._take_digest(now)
        return Frame(
            self._sequence,
            tuple(upserts),
            tuple(removals),
            digest,
            begins_all,
            ends_all,
            tuple(self._load_tracker.sessions()) if digest else (),
            self._take_session_records(now),
            tuple(released),
        )

    def _take_session_records(self, now: float) -> tuple[SessionUpdate, ...]:
        sessions = tuple(islice(self._changed_sessions, FRAME_ENTRIES_MAX))
        for session in sessions:
            del self._changed_sessions[session]
        told = (self._affinity.told(session, now) for session in sessions)
        return tuple(record for record in told if record is not None)

    def _take_digest(self, now: float) -> int:
        if self._changed_bookings or self._is_full_sync or now < self._last_digest_at + DIGEST_S:
            return 0
        self._last_digest_at = now
        return self._own_digest.value


def _ignore() -> None:
    """For a router whose changes nobody waits for."""


class Replica:
    """One router's part: its tellings, and the claims of its peers. Times are seconds.

    on_change: called whenever there is something new to tell. refused: entries of peers that were
    left out, for they cannot be or the book had no room for them. resends: how often a peer was
    asked to tell everything anew. affinity: which client sessions to tell of; without it, none.
    """

    def __init__(
        self,
        book: LoadTracker,
        on_change: Callable[[], None] = _ignore,
        affinity: SessionAffinity | None = None,
    ) -> None:
        self._load_tracker = book
        self._affinity = SessionAffinity(0.0, events=book.events) if affinity is None else affinity
        self._on_change = on_change
        self._own_digest = Digest()
        self._outbound_syncs: set[OutboundSync] = set()
        self._peer_states: dict[int, _PeerState] = {}
        self._snapshot_bookings: dict[int, _SnapshotBookings] = {}
        self._last_stream = 0
        self.refused = 0
        self.resends = 0
        book.events.booking_changed.subscribe(self._booking_changed)
        book.events.session_changed.subscribe(self._session_changed)

    def _booking_changed(self, key: BookingKey) -> None:
        booking = self._load_tracker.own(key)
        if booking is not None:
            self._own_digest.put(booking)
        else:
            self._own_digest.discard(key)
        for outbound in self._outbound_syncs:
            outbound.changed(key)
        self._on_change()

    # Telling.

    def open_outbound(self) -> OutboundSync:
        """For a stream to a peer that was just opened."""
        outbound = OutboundSync(self._load_tracker, self._own_digest, self._affinity)
        self._outbound_syncs.add(outbound)
        return outbound

    def told(self, outbound: OutboundSync) -> None:
        """Its stream has ended."""
        self._outbound_syncs.discard(outbound)

    def snapshot(self) -> Iterable[tuple[Booking, ...]]:
        """The whole book, FRAME_MAX bookings at a time, as they are when each part is taken."""
        keys = self._load_tracker.keys()
        for at in range(0, len(keys), FRAME_ENTRIES_MAX):
            found = map(self._load_tracker.get, keys[at : at + FRAME_ENTRIES_MAX])
            yield tuple(booking for booking in found if booking is not None)

    def snapshot_session_records(self, now: float) -> Iterable[tuple[SessionUpdate, ...]]:
        """All client sessions, in the same way."""
        sessions = self._affinity.sessions()
        for at in range(0, len(sessions), FRAME_ENTRIES_MAX):
            told = (
                self._affinity.told(name, now) for name in sessions[at : at + FRAME_ENTRIES_MAX]
            )
            yield tuple(record for record in told if record is not None)

    # Hearing.

    @property
    def peers(self) -> tuple[int, ...]:
        """Routers that tell us of their bookings now."""
        return tuple(self._peer_states)

    def stream_opened(self, router_id: int) -> int:
        """A peer opened a stream; its number. It takes the place of an older one of that peer."""
        self._last_stream += 1
        peer_state = self._peer_states.setdefault(router_id, _PeerState(self._last_stream))
        self._load_tracker.add_peer(router_id, peer_state.bookings)
        peer_state.stream, peer_state.sequence, peer_state.awaits_full_sync = (
            self._last_stream,
            0,
            False,
        )
        return self._last_stream

    def is_current(self, router_id: int, stream: int) -> bool:
        """Whether no newer stream has taken the place of this one."""
        peer_state = self._peer_states.get(router_id)
        return peer_state is not None and peer_state.stream == stream

    def apply_frame(self, router_id: int, stream: int, frame: Frame, now: float) -> bool:
        """Apply what a peer says on its newest stream; True: it should tell everything once."""
        peer_state = self._peer_states[router_id]
        assert peer_state.stream == stream, "words of a stream that was replaced"
        if frame.sequence <= peer_state.sequence:
            return False  # Said before.
        has_gap = frame.sequence != peer_state.sequence + 1 and not frame.begins_all
        peer_state.sequence = frame.sequence
        if frame.begins_all:
            peer_state.round += 1
            peer_state.awaits_full_sync = peer_state.is_partial = False
        self.refused += len(frame.refused) + len(frame.refused_session_records)
        peer_state.is_partial |= bool(frame.refused)
        for booking in frame.upserts:
            self._apply_upsert(peer_state, booking, now)
        for key in frame.removals:
            self._apply_removal(peer_state, key)
        for key in frame.released:
            peer_state.discard(key)
            self._load_tracker.holder_lost(key, now)
        for hello in frame.sessions:
            self._load_tracker.supersede_sessions(hello, now)
        if frame.ends_all and not (has_gap or peer_state.awaits_full_sync):
            unconfirmed = [
                key for key, (_, told) in peer_state.bookings.items() if told != peer_state.round
            ]
            for key in unconfirmed:
                self._apply_removal(peer_state, key)
            peer_state.has_full_sync = True
            self._snapshot_bookings.pop(router_id, None)
        for record in frame.session_records:
            self._affinity.receive(record, now)
        differs = frame.digest not in (0, peer_state.digest.value) and not peer_state.is_partial
        # What was missed while everything is awaited may have been the beginning of that.
        if not (has_gap or (differs and not peer_state.awaits_full_sync)):
            return False
        peer_state.awaits_full_sync = True
        self.resends += 1
        return True

    def receive_snapshot(
        self,
        router_id: int,
        bookings: Iterable[Booking],
        now: float,
        session_records: Iterable[SessionUpdate] = (),
    ) -> None:
        """Part of what a peer counts; for a router that starts, and knows no better."""
        for record in session_records:
            self._affinity.receive(record, now)
        peer_state = self._peer_states.get(router_id)
        expected = _SnapshotBookings(now)
        if peer_state is None or not peer_state.has_full_sync:
            expected = self._snapshot_bookings.setdefault(router_id, expected)
        for booking in bookings:
            try:
                self._load_tracker.add_expected(booking, now)
                expected.keys.add(booking.key)
            except Overloaded:
                self.refused += 1

    def peer_responded(self, router_id: int, now: float) -> None:
        """A peer lives: what its snapshot said goes on, until it tells by itself."""
        expected = self._snapshot_bookings.get(router_id)
        if expected is not None and now >= expected.renewed_at + DIGEST_S:
            expected.renewed_at = now
            for key in expected.keys:
                self._load_tracker.extend_expected(key, now)

    def peer_stream_ended(self, router_id: int) -> None:
        """The stream to a peer ended: what its snapshot said has as long as any orphan."""
        self._snapshot_bookings.pop(router_id, None)

    def stream_closed(self, router_id: int, stream: int, now: float) -> int:
        """A peer's stream ended; how many bookings it claimed. One that was replaced: nothing."""
        if not self.is_current(router_id, stream):
            return 0
        peer_state = self._peer_states.pop(router_id)
        self._load_tracker.remove_peer(router_id)
        for key in peer_state.bookings:
            self._load_tracker.holder_lost(key, now)
        return len(peer_state.bookings)

    # Inside.

    def _session_changed(self, session: SessionName) -> None:
        for outbound in self._outbound_syncs:
            outbound.session_changed(session)
        self._on_change()

    def _apply_upsert(self, peer_state: _PeerState, booking: Booking, now: float) -> None:
        peer_state.bookings[booking.key] = (booking, peer_state.round)
        peer_state.digest.put(booking)
        try:
            self._load_tracker.receive(booking, now)
        except Overloaded:
            self.refused += 1

    def _apply_removal(self, peer_state: _PeerState, key: BookingKey) -> None:
        peer_state.discard(key)
        self._load_tracker.booking_ended(key)

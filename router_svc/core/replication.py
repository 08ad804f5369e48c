"""Replication of bookings between routers: what to send, how to apply what arrives (pure).

Each router sends every peer its *own* bookings: those of its sessions, and those of sessions that
ended a moment ago. The *reported bookings* of a peer are stored apart from the load tracker, so
that a digest over them can be compared with the peer's. Of all reports of one booking, the tracker
keeps that of its frontend's latest session, and of that the highest revision. A booking that was
given up has not ended: a router that receives the release first counts an orphan until the new
owner reports it. What only a lost peer reported becomes an orphan too: it counts until its frontend
registers it again at some router, or until ORPHAN_S is over.

A router that starts receives a *snapshot* of each peer: all that the peer counts, also what it
received from others, and orphans. What only a snapshot contains is an orphan that does not expire
while the peer responds and has not yet sent a full sync, however late discovery shows this router.

Client sessions (`sessions`) are replicated too: sent by the router that changed them and, in a full
sync, by all. Session records converge in any order, so that no reported state and no digest of
them is kept. Loads and hashes are exchanged, never prompt content. Digests detect lost updates; the
repair is a full sync: what the peer holds and does not receive again has ended.

Prompts that made approximate or predicted entries (`overlap`) are sent once, to the peers connected
then, so that all routers expect the same caches. A lost one costs at most a cache hit: no digest
covers them, and no full sync repeats them.

Invariants: reported bookings are those of peers with an open stream; an update is sent after its
change was made, and all bookings are sent before the end of a full sync.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from struct import Struct
from typing import NamedTuple

from common.errors import InvalidRequest, Overloaded
from common.request.placement import Placement, Query
from router_svc.core.booking import Booking, BookingKey, SessionHello, SessionName
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.overlap import Overlaps
from router_svc.core.query import HASH_BYTES
from router_svc.core.sessions import SessionAffinity, SessionUpdate

# Bookings, and client sessions, in one frame: a peer applies them in a few milliseconds.
FRAME_ENTRIES_MAX = 512
# Seconds between digests, and so between frames of an idle router.
DIGEST_S = 1.0
# Unsent changes for one peer; above it, the peer gets a full sync instead.
BACKLOG_MAX = 65_536
# Blocks of prompts in one frame, which the last one may exceed: a peer enters them in about 4 ms.
FRAME_BLOCKS_MAX = 8192
# Blocks of unsent prompts for one peer; above it, the oldest prompts are not sent.
BACKLOG_BLOCKS_MAX = 1 << 18

_EMPTY_DIGEST = 0x6B766D6573680001
_FOUR_UINT64 = Struct("<QQQQ")


class PlacedPrompt(NamedTuple):
    """A prompt by its hashes, and the rank that it was sent to. query: no other fields are set."""

    query: Query
    placement: Placement


@dataclass(frozen=True, slots=True)
class Frame:
    """One message to a peer; see `router.v1.SyncRequest`. digest: 0 for none. refused,
    refused_uncounted: why entries were left out; no digest covers the latter.
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
    prompts: tuple[PlacedPrompt, ...] = ()
    refused: tuple[InvalidRequest, ...] = ()
    refused_uncounted: tuple[InvalidRequest, ...] = ()


def fingerprint(booking: Booking) -> int:
    """Returns 64 bits of a booking's key, generation and revision, the same in every process.
    They identify its state, since only one router changes a booking of one generation.
    """
    frontend_id, request_id, attempt = booking.key
    packed = _FOUR_UINT64.pack(frontend_id, attempt, booking.generation, booking.revision)
    digest = blake2b(packed + request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Digest:
    """The exclusive or of the fingerprints of a set of bookings, updated incrementally."""

    def __init__(self) -> None:
        self._xor = _EMPTY_DIGEST
        self._fingerprints: dict[BookingKey, int] = {}

    @property
    def value(self) -> int:
        """Never 0."""
        return self._xor or 1

    def put(self, booking: Booking) -> None:
        part = fingerprint(booking)
        self._xor ^= self._fingerprints.get(booking.key, 0) ^ part
        self._fingerprints[booking.key] = part

    def discard(self, key: BookingKey) -> None:
        self._xor ^= self._fingerprints.pop(key, 0)

    def __len__(self) -> int:
        return len(self._fingerprints)


@dataclass(slots=True)
class _PeerState:
    """The state that one peer reported on its stream. round: number of full syncs that the peer
    began. has_full_sync: the peer completed one, on any stream. is_partial: entries of this round
    were refused: digests differ, and another full sync does not help.
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
    """Bookings of the snapshot of a peer that has not completed a full sync."""

    renewed_at: float
    keys: set[BookingKey] = field(default_factory=set)


class OutboundSync:
    """Unsent updates for one peer, on one stream. Made by `Replica.open_outbound`."""

    def __init__(
        self,
        load_tracker: LoadTracker,
        own: Digest,
        affinity: SessionAffinity,
        on_change: Callable[[], object],
    ) -> None:
        self._load_tracker = load_tracker
        self._own_digest = own
        self._affinity = affinity
        self._on_change = on_change
        # Whether the booking had ended at the change: a peer may have it again when this is sent.
        self._changed_bookings: dict[BookingKey, bool] = {}
        self._changed_sessions: dict[SessionName, None] = {}
        self._prompts: deque[PlacedPrompt] = deque()
        self._prompt_blocks = 0
        self._full_sync_remaining = 0
        self._is_full_sync_start = self._is_full_sync = True
        self._sequence = 0
        self._last_digest_at = float("-inf")

    def request_full_sync(self) -> None:
        """Sends everything again: on request of the peer, or if it is too far behind."""
        self._changed_bookings.clear()
        self._is_full_sync_start = self._is_full_sync = True

    def changed(self, key: BookingKey) -> None:
        if self._is_full_sync_start:
            return
        self._changed_bookings[key] = self._load_tracker.get(key) is None
        if len(self._changed_bookings) > max(BACKLOG_MAX, 2 * self._full_sync_remaining):
            self.request_full_sync()
        self._on_change()

    def session_changed(self, session: SessionName) -> None:
        if self._is_full_sync_start:
            return
        self._changed_sessions[session] = None
        if len(self._changed_sessions) > 2 * BACKLOG_MAX:
            self.request_full_sync()
        self._on_change()

    def prompt_entered(self, prompt: PlacedPrompt) -> None:
        self._prompts.append(prompt)
        self._prompt_blocks += _blocks_of(prompt)
        while self._prompt_blocks > BACKLOG_BLOCKS_MAX:
            self._prompt_blocks -= _blocks_of(self._prompts.popleft())
        self._on_change()

    def seconds_until_due(self, now: float) -> float:
        """Returns the seconds until a frame is due: 0 if there are changes, else until the next
        digest."""
        if self._changed_bookings or self._is_full_sync or self._changed_sessions or self._prompts:
            return 0.0
        return max(0.0, self._last_digest_at + DIGEST_S - now)

    @property
    def is_frame_full(self) -> bool:
        """Whether enough changes wait to fill a frame."""
        changes = max(len(self._changed_bookings), len(self._changed_sessions))
        return changes >= FRAME_ENTRIES_MAX or self._prompt_blocks >= FRAME_BLOCKS_MAX

    def frame(self, now: float) -> Frame:
        """Returns the next frame, with the present state of all it contains."""
        begins_all, self._is_full_sync_start = self._is_full_sync_start, False
        if begins_all:
            # Also bookings owned elsewhere: a release may not have been sent yet.
            self._changed_bookings = dict.fromkeys(self._load_tracker.keys(), False)
            self._full_sync_remaining = len(self._changed_bookings)
            self._changed_sessions = dict.fromkeys(self._affinity.sessions())
        keys = tuple(islice(self._changed_bookings, FRAME_ENTRIES_MAX))
        upserts: list[Booking] = []
        removals: list[BookingKey] = []
        released: list[BookingKey] = []
        for key in keys:
            was_ended = self._changed_bookings.pop(key)
            if (booking := self._load_tracker.get_own(key)) is not None:
                upserts.append(booking)
            elif was_ended or self._load_tracker.get(key) is None:
                removals.append(key)
            else:
                released.append(key)
        # New changes are queued behind the rest of the full sync.
        self._full_sync_remaining = max(0, self._full_sync_remaining - len(keys))
        ends_all = self._is_full_sync and not self._full_sync_remaining
        if ends_all:
            self._is_full_sync = False
        self._sequence += 1
        digest = self._take_digest(now)
        changed_sessions = tuple(islice(self._changed_sessions, FRAME_ENTRIES_MAX))
        for session in changed_sessions:
            del self._changed_sessions[session]
        return Frame(
            self._sequence,
            tuple(upserts),
            tuple(removals),
            digest,
            begins_all,
            ends_all,
            tuple(self._load_tracker.sessions()) if digest else (),
            self._affinity.updates(changed_sessions, now),
            tuple(released),
            self._take_prompts(),
        )

    def _take_prompts(self) -> tuple[PlacedPrompt, ...]:
        taken: list[PlacedPrompt] = []
        blocks = 0
        while self._prompts and blocks < FRAME_BLOCKS_MAX:
            taken.append(self._prompts.popleft())
            blocks += _blocks_of(taken[-1])
        self._prompt_blocks -= blocks
        return tuple(taken)

    def _take_digest(self, now: float) -> int:
        if self._changed_bookings or self._is_full_sync or now < self._last_digest_at + DIGEST_S:
            return 0
        self._last_digest_at = now
        return self._own_digest.value


class Replica:
    """This router's side of the replication. Times are seconds.

    refused: entries of peers left out: invalid, or the tracker was full.
    resends: full syncs requested from peers.
    affinity: the client sessions to replicate; None: none.
    overlaps: the approximate entries; None: none.
    """

    def __init__(
        self,
        load_tracker: LoadTracker,
        affinity: SessionAffinity | None = None,
        overlaps: Overlaps | None = None,
    ) -> None:
        self._load_tracker = load_tracker
        self._overlaps = overlaps
        self._affinity = (
            SessionAffinity(0.0, events=load_tracker.events) if affinity is None else affinity
        )
        self._own_digest = Digest()
        self._outbound_syncs: set[OutboundSync] = set()
        self._peer_states: dict[int, _PeerState] = {}
        self._snapshot_bookings: dict[int, _SnapshotBookings] = {}
        self._last_stream = 0
        self.refused = 0
        self.resends = 0
        load_tracker.events.booking_changed.subscribe(self._booking_changed)
        load_tracker.events.session_changed.subscribe(self._session_changed)
        load_tracker.events.prompt_entered.subscribe(self._prompt_entered)

    def _booking_changed(self, key: BookingKey) -> None:
        if (booking := self._load_tracker.get_own(key)) is not None:
            self._own_digest.put(booking)
        else:
            self._own_digest.discard(key)
        for outbound in self._outbound_syncs:
            outbound.changed(key)

    # Outbound.

    def open_outbound(self, on_change: Callable[[], object] = lambda: None) -> OutboundSync:
        """Returns the unsent updates for a newly opened stream to a peer.

        on_change: called when there is something new to send on it.
        """
        outbound = OutboundSync(self._load_tracker, self._own_digest, self._affinity, on_change)
        self._outbound_syncs.add(outbound)
        return outbound

    def close_outbound(self, outbound: OutboundSync) -> None:
        self._outbound_syncs.discard(outbound)

    def snapshot(self) -> Iterable[tuple[Booking, ...]]:
        """Yields all bookings, FRAME_ENTRIES_MAX at a time, each part as it is when it is taken."""
        keys = self._load_tracker.keys()
        for at in range(0, len(keys), FRAME_ENTRIES_MAX):
            found = map(self._load_tracker.get, keys[at : at + FRAME_ENTRIES_MAX])
            yield tuple(booking for booking in found if booking is not None)

    def snapshot_session_records(self, now: float) -> Iterable[tuple[SessionUpdate, ...]]:
        """Yields all client sessions, in the same way."""
        sessions = self._affinity.sessions()
        for at in range(0, len(sessions), FRAME_ENTRIES_MAX):
            yield self._affinity.updates(sessions[at : at + FRAME_ENTRIES_MAX], now)

    # Inbound.

    @property
    def peers(self) -> tuple[int, ...]:
        """Ids of the routers with an open stream to this one."""
        return tuple(self._peer_states)

    def stream_opened(self, router_id: int) -> int:
        """Records that a peer opened a stream, which replaces its older one; returns its number."""
        self._last_stream += 1
        peer_state = self._peer_states.setdefault(router_id, _PeerState(self._last_stream))
        self._load_tracker.add_peer(router_id, peer_state.bookings)
        peer_state.stream = self._last_stream
        peer_state.sequence, peer_state.awaits_full_sync = 0, False
        return self._last_stream

    def is_current(self, router_id: int, stream: int) -> bool:
        """Returns whether no newer stream has replaced this one."""
        peer_state = self._peer_states.get(router_id)
        return peer_state is not None and peer_state.stream == stream

    def apply_frame(self, router_id: int, stream: int, frame: Frame, now: float) -> bool:
        """Applies a frame of the peer's newest stream; True: request a full sync."""
        peer_state = self._peer_states[router_id]
        assert peer_state.stream == stream, "frame of a replaced stream"
        if frame.sequence <= peer_state.sequence:
            return False  # A duplicate.
        has_gap = frame.sequence != peer_state.sequence + 1 and not frame.begins_all
        peer_state.sequence = frame.sequence
        if frame.begins_all:
            peer_state.round += 1
            peer_state.awaits_full_sync = peer_state.is_partial = False
        self.refused += len(frame.refused) + len(frame.refused_uncounted)
        peer_state.is_partial |= bool(frame.refused)
        self._apply_bookings(peer_state, frame, now)
        if frame.ends_all and not (has_gap or peer_state.awaits_full_sync):
            self._finish_full_sync(router_id, peer_state)
        for record in frame.session_records:
            self._affinity.receive(record, now)
        if self._overlaps is not None:
            for query, placement in frame.prompts:
                self._overlaps.record_placement(query, placement, now)
        differs = frame.digest not in (0, peer_state.digest.value) and not peer_state.is_partial
        # A gap counts even while a full sync is awaited: it may have hidden the beginning of that.
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
        """Applies part of a peer's snapshot; for a router that starts without state."""
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
        """Keeps the orphans of the snapshot of a live peer until it completes a full sync."""
        expected = self._snapshot_bookings.get(router_id)
        if expected is not None and now >= expected.renewed_at + DIGEST_S:
            expected.renewed_at = now
            for key in expected.keys:
                self._load_tracker.extend_expected(key, now)

    def peer_stream_ended(self, router_id: int) -> None:
        """Records the end of the stream to a peer: its snapshot's orphans expire like others."""
        self._snapshot_bookings.pop(router_id, None)

    def stream_closed(self, router_id: int, stream: int, now: float) -> int:
        """Records the end of a peer's stream; returns how many bookings it reported. 0 for a
        replaced stream."""
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

    def _prompt_entered(self, query: Query, placement: Placement) -> None:
        if not self._outbound_syncs:
            return
        hashes = (query.prefix_hashes, query.hash_scheme, query.block_size)
        prompt = PlacedPrompt(Query(query.model, query.total_tokens, *hashes), placement)
        for outbound in self._outbound_syncs:
            outbound.prompt_entered(prompt)

    def _apply_bookings(self, peer_state: _PeerState, frame: Frame, now: float) -> None:
        for booking in frame.upserts:
            peer_state.bookings[booking.key] = (booking, peer_state.round)
            peer_state.digest.put(booking)
            try:
                self._load_tracker.receive(booking, now)
            except Overloaded:
                self.refused += 1
        for key in frame.removals:
            self._apply_removal(peer_state, key)
        for key in frame.released:
            peer_state.discard(key)
            self._load_tracker.holder_lost(key, now)
        for hello in frame.sessions:
            self._load_tracker.supersede_sessions(hello, now)

    def _finish_full_sync(self, router_id: int, peer_state: _PeerState) -> None:
        """Ends the bookings that the full sync did not contain."""
        for key, (_, sync_round) in tuple(peer_state.bookings.items()):
            if sync_round != peer_state.round:
                self._apply_removal(peer_state, key)
        peer_state.has_full_sync = True
        self._snapshot_bookings.pop(router_id, None)

    def _apply_removal(self, peer_state: _PeerState, key: BookingKey) -> None:
        peer_state.discard(key)
        self._load_tracker.booking_ended(key)


def _blocks_of(prompt: PlacedPrompt) -> int:
    return len(prompt.query.prefix_hashes) // HASH_BYTES

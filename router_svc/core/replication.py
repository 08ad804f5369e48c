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
from router_svc.core.load_tracker import Booking, BookingKey, LoadBook, SessionHello
from router_svc.core.sessions import Affinity, SessionName, ToldBond

# Bookings, and client sessions, in one frame: what a peer's loop can take in a few milliseconds.
FRAME_MAX = 512
# Between digests, and so between frames of a router that has nothing to tell.
DIGEST_S = 1.0
# Changes that one peer may be behind with; above it, it is told everything anew instead.
BEHIND_MAX = 65_536

_DIGEST_OF_NONE = 0x6B766D6573680001
_WORDS = Struct("<QQQQ")
_WORD = Struct("<Q")


@dataclass(frozen=True, slots=True)
class Frame:
    """What one router tells another; see `router.v1.SyncRequest`. digest: 0, there is none.

    refused: what is wrong with entries that were left out. refused_bonds: the same of `bonds`,
    which no digest counts.
    """

    sequence: int
    upserts: tuple[Booking, ...] = ()
    removals: tuple[BookingKey, ...] = ()
    digest: int = 0
    begins_all: bool = False
    ends_all: bool = False
    sessions: tuple[SessionHello, ...] = ()
    bonds: tuple[ToldBond, ...] = ()
    released: tuple[BookingKey, ...] = ()
    refused: tuple[InvalidRequest, ...] = ()
    refused_bonds: tuple[InvalidRequest, ...] = ()


def fingerprint(booking: Booking) -> int:
    """64 bits of a booking's key, generation and revision, the same in every process.

    Of one generation only one router makes and changes it, so that these tell all of it.
    """
    frontend_id, request_id, attempt = booking.key
    words = _WORDS.pack(frontend_id, attempt, booking.generation, booking.revision)
    fingerprint: int
    (fingerprint,) = _WORD.unpack(blake2b(words + request_id.encode(), digest_size=8).digest())
    return fingerprint


class Digest:
    """The exclusive or of the fingerprints of a set of bookings, kept up as it changes."""

    def __init__(self) -> None:
        self._sum = _DIGEST_OF_NONE
        self._parts: dict[BookingKey, int] = {}

    @property
    def value(self) -> int:
        """Never 0."""
        return self._sum or 1

    def put(self, booking: Booking) -> None:
        """The booking is in the set, as it is now."""
        part = fingerprint(booking)
        self._sum ^= self._parts.get(booking.key, 0) ^ part
        self._parts[booking.key] = part

    def discard(self, key: BookingKey) -> None:
        """It is not (any more)."""
        self._sum ^= self._parts.pop(key, 0)

    def __len__(self) -> int:
        return len(self._parts)


@dataclass(slots=True)
class _Claims:
    """What one peer said on its stream. round: counts the times it began to tell everything.

    has_told_all: once, whatever has become of that stream. is_partial: entries of this round were
    refused, so that digests differ and telling them again is no cure.
    """

    stream: int
    sequence: int = 0
    round: int = 0
    awaits_all: bool = False
    has_told_all: bool = False
    is_partial: bool = False
    bookings: dict[BookingKey, tuple[Booking, int]] = field(default_factory=dict)
    digest: Digest = field(default_factory=Digest)

    def discard(self, key: BookingKey) -> None:
        self.bookings.pop(key, None)
        self.digest.discard(key)


@dataclass(slots=True)
class _Expected:
    """What the snapshot of a peer said that has not told all of its own yet."""

    renewed_at: float
    keys: set[BookingKey] = field(default_factory=set)


class Telling:
    """What one peer has still to be told, on one stream. Made by `Replica.tell`."""

    def __init__(self, book: LoadBook, own: Digest, affinity: Affinity) -> None:
        self._book = book
        self._own = own
        self._affinity = affinity
        # Whether the booking had ended by then: it may be back as a peer's when that is told.
        self._changed: dict[BookingKey, bool] = {}
        self._sessions: dict[SessionName, None] = {}
        self._left_of_all = 0
        self._begins_all = self._tells_all = True
        self._sequence = 0
        self._digest_at = float("-inf")

    def tell_all(self) -> None:
        """Everything anew: when the peer asks, and when it is too far behind."""
        self._changed.clear()
        self._begins_all = self._tells_all = True

    def changed(self, key: BookingKey) -> None:
        """Tell what became of a booking."""
        if self._begins_all:
            return
        self._changed[key] = self._book.get(key) is None
        if len(self._changed) > max(BEHIND_MAX, 2 * self._left_of_all):
            self.tell_all()

    def session_changed(self, session: SessionName) -> None:
        """Tell what became of a client session."""
        if self._begins_all:
            return
        self._sessions[session] = None
        if len(self._sessions) > 2 * BEHIND_MAX:
            self.tell_all()

    def due_in(self, now: float) -> float:
        """Seconds until there is something to tell: 0 for changes, else until the next digest."""
        if self._changed or self._tells_all or self._sessions:
            return 0.0
        return max(0.0, self._digest_at + DIGEST_S - now)

    @property
    def is_behind(self) -> bool:
        """Whether a frame would be full: no use in gathering more."""
        return max(len(self._changed), len(self._sessions)) >= FRAME_MAX

    def frame(self, now: float) -> Frame:
        """The next frame. All that it says is as it is at this moment."""
        begins_all, self._begins_all = self._begins_all, False
        if begins_all:
            # Those of others too: one that was given up is untold yet.
            self._changed = dict.fromkeys(self._book.keys(), False)
            self._left_of_all = len(self._changed)
            self._sessions = dict.fromkeys(self._affinity.sessions())
        keys = tuple(islice(self._changed, FRAME_MAX))
        upserts: list[Booking] = []
        removals: list[BookingKey] = []
        released: list[BookingKey] = []
        for key in keys:
            has_ended = self._changed.pop(key)
            booking = self._book.own(key)
            if booking is not None:
                upserts.append(booking)
            elif has_ended or self._book.get(key) is None:
                removals.append(key)
            else:
                released.append(key)
        # New changes queue up behind what is left of all.
        self._left_of_all = max(0, self._left_of_all - len(keys))
        ends_all = self._tells_all and not self._left_of_all
        if ends_all:
            self._tells_all = False
        self._sequence += 1
        digest = self._take_digest(now)
        return Frame(
            self._sequence,
            tuple(upserts),
            tuple(removals),
            digest,
            begins_all,
            ends_all,
            tuple(self._book.sessions()) if digest else (),
            self._take_bonds(now),
            tuple(released),
        )

    def _take_bonds(self, now: float) -> tuple[ToldBond, ...]:
        sessions = tuple(islice(self._sessions, FRAME_MAX))
        for session in sessions:
            del self._sessions[session]
        told = (self._affinity.told(session, now) for session in sessions)
        return tuple(bond for bond in told if bond is not None)

    def _take_digest(self, now: float) -> int:
        if self._changed or self._tells_all or now < self._digest_at + DIGEST_S:
            return 0
        self._digest_at = now
        return self._own.value


def _nothing() -> None:
    """For a router whose changes nobody waits for."""


class Replica:
    """One router's part: its tellings, and the claims of its peers. Times are seconds.

    on_change: called whenever there is something new to tell. refused: entries of peers that were
    left out, for they cannot be or the book had no room for them. resends: how often a peer was
    asked to tell everything anew. affinity: which client sessions to tell of; without it, none.
    """

    def __init__(
        self,
        book: LoadBook,
        on_change: Callable[[], None] = _nothing,
        affinity: Affinity | None = None,
    ) -> None:
        self._book = book
        self._affinity = Affinity(0.0) if affinity is None else affinity
        self._affinity.changed = self._session_changed
        self._on_change = on_change
        self._own = Digest()
        self._tellings: set[Telling] = set()
        self._claims: dict[int, _Claims] = {}
        self._expected: dict[int, _Expected] = {}
        self._last_stream = 0
        self.refused = 0
        self.resends = 0
        book.join(self)

    # The book's Peers.

    def hold(self, key: BookingKey) -> bool:
        """See `Peers`."""
        return any(key in claims.bookings for claims in self._claims.values())

    def changed(self, key: BookingKey) -> None:
        """See `Peers`."""
        booking = self._book.own(key)
        if booking is not None:
            self._own.put(booking)
        else:
            self._own.discard(key)
        for telling in self._tellings:
            telling.changed(key)
        self._on_change()

    # Telling.

    def tell(self) -> Telling:
        """For a stream to a peer that was just opened."""
        telling = Telling(self._book, self._own, self._affinity)
        self._tellings.add(telling)
        return telling

    def told(self, telling: Telling) -> None:
        """Its stream has ended."""
        self._tellings.discard(telling)

    def snapshot(self) -> Iterable[tuple[Booking, ...]]:
        """The whole book, FRAME_MAX bookings at a time, as they are when each part is taken."""
        keys = self._book.keys()
        for at in range(0, len(keys), FRAME_MAX):
            found = map(self._book.get, keys[at : at + FRAME_MAX])
            yield tuple(booking for booking in found if booking is not None)

    def snapshot_bonds(self, now: float) -> Iterable[tuple[ToldBond, ...]]:
        """All client sessions, in the same way."""
        sessions = self._affinity.sessions()
        for at in range(0, len(sessions), FRAME_MAX):
            told = (self._affinity.told(name, now) for name in sessions[at : at + FRAME_MAX])
            yield tuple(bond for bond in told if bond is not None)

    # Hearing.

    @property
    def peers(self) -> tuple[int, ...]:
        """Routers that tell us of their bookings now."""
        return tuple(self._claims)

    def joined(self, router_id: int) -> int:
        """A peer opened a stream; its number. It takes the place of an older one of that peer."""
        self._last_stream += 1
        claims = self._claims.setdefault(router_id, _Claims(self._last_stream))
        claims.stream, claims.sequence, claims.awaits_all = self._last_stream, 0, False
        return self._last_stream

    def is_current(self, router_id: int, stream: int) -> bool:
        """Whether no newer stream has taken the place of this one."""
        claims = self._claims.get(router_id)
        return claims is not None and claims.stream == stream

    def take(self, router_id: int, stream: int, frame: Frame, now: float) -> bool:
        """Apply what a peer says on its newest stream; True: it should tell everything once."""
        claims = self._claims[router_id]
        assert claims.stream == stream, "words of a stream that was replaced"
        if frame.sequence <= claims.sequence:
            return False  # Said before.
        is_missing = frame.sequence != claims.sequence + 1 and not frame.begins_all
        claims.sequence = frame.sequence
        if frame.begins_all:
            claims.round += 1
            claims.awaits_all = claims.is_partial = False
        self.refused += len(frame.refused) + len(frame.refused_bonds)
        claims.is_partial |= bool(frame.refused)
        for booking in frame.upserts:
            self._claimed(claims, booking, now)
        for key in frame.removals:
            self._ended(claims, key)
        for key in frame.released:
            claims.discard(key)
            self._book.lost(key, now)
        for hello in frame.sessions:
            self._book.superseded(hello, now)
        if frame.ends_all and not (is_missing or claims.awaits_all):
            untold = [key for key, (_, told) in claims.bookings.items() if told != claims.round]
            for key in untold:
                self._ended(claims, key)
            claims.has_told_all = True
            self._expected.pop(router_id, None)
        for bond in frame.bonds:
            self._affinity.heard(bond, now)
        differs = frame.digest not in (0, claims.digest.value) and not claims.is_partial
        # What was missed while everything is awaited may have been the beginning of that.
        if not (is_missing or (differs and not claims.awaits_all)):
            return False
        claims.awaits_all = True
        self.resends += 1
        return True

    def heard_snapshot(
        self,
        router_id: int,
        bookings: Iterable[Booking],
        now: float,
        bonds: Iterable[ToldBond] = (),
    ) -> None:
        """Part of what a peer counts; for a router that starts, and knows no better."""
        for bond in bonds:
            self._affinity.heard(bond, now)
        claims = self._claims.get(router_id)
        expected = _Expected(now)
        if claims is None or not claims.has_told_all:
            expected = self._expected.setdefault(router_id, expected)
        for booking in bookings:
            try:
                self._book.expect(booking, now)
                expected.keys.add(booking.key)
            except Overloaded:
                self.refused += 1

    def answered(self, router_id: int, now: float) -> None:
        """A peer lives: what its snapshot said goes on, until it tells by itself."""
        expected = self._expected.get(router_id)
        if expected is not None and now >= expected.renewed_at + DIGEST_S:
            expected.renewed_at = now
            for key in expected.keys:
                self._book.expect_longer(key, now)

    def unanswered(self, router_id: int) -> None:
        """The stream to a peer ended: what its snapshot said has as long as any orphan."""
        self._expected.pop(router_id, None)

    def left(self, router_id: int, stream: int, now: float) -> int:
        """A peer's stream ended; how many bookings it claimed. One that was replaced: nothing."""
        if not self.is_current(router_id, stream):
            return 0
        claims = self._claims.pop(router_id)
        for key in claims.bookings:
            self._book.lost(key, now)
        return len(claims.bookings)

    # Inside.

    def _session_changed(self, session: SessionName) -> None:
        for telling in self._tellings:
            telling.session_changed(session)
        self._on_change()

    def _claimed(self, claims: _Claims, booking: Booking, now: float) -> None:
        claims.bookings[booking.key] = (booking, claims.round)
        claims.digest.put(booking)
        try:
            self._book.heard(booking, now)
        except Overloaded:
            self.refused += 1

    def _ended(self, claims: _Claims, key: BookingKey) -> None:
        claims.discard(key)
        self._book.ended(key)

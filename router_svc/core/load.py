"""The load book: what this router believes each worker has to do (pure).

A *booking* is the charge of one attempt of one request: prompt tokens to compute and KV blocks to
hold. It is made with the decision, changed as the frontend tells of progress, and ends with `free`,
or because nobody claims it any more.

Invariants (asserted): no sum is ever negative; the sums of a rank are exactly those of the bookings
on it; a booking is owned by an open session of its frontend, or is orphaned with a deadline.

A booking's revision is 1 when it is made and grows by 1 with each change: prefill done (the first
time) and each word of output blocks. The frontend counts likewise, and announces the same number.

Bookings of a worker that left stay until they are freed. They weigh on nobody, since only ranks of
the fleet are ever asked for; but should discovery merely have blinked, the load is still known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from common.errors import InvalidRequest, Overloaded
from common.load import Load
from router_svc.core.fleet import Placement

# An orphan is counted this long; a frontend that lives announces it again within 200 ms.
ORPHAN_S = 3.0
# A report older than this says nothing any more.
REPORT_MAX_AGE_S = 0.5
BOOKINGS_MAX = 262_144


class BookingKey(NamedTuple):
    """What a booking is known by, whatever router holds it: (frontend incarnation, id, try)."""

    frontend_id: int
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Booking:
    """A charge. Tokens and blocks are counts; `prefill` None means that prefill is on `worker`.

    prefill_tokens are charged to `prefill` (or `worker`) and 0 once prefill is done;
    decode_blocks are charged to `worker`.
    """

    key: BookingKey
    model: str
    worker: Placement
    prefill: Placement | None = None
    prefill_tokens: int = 0
    decode_blocks: int = 0
    revision: int = 1

    def __post_init__(self) -> None:
        for name in ("prefill_tokens", "decode_blocks"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} must not be negative", name)
        if self.revision < 1:
            raise InvalidRequest("revision counts from 1", "revision")


class Totals(NamedTuple):
    """Prompt tokens to compute, KV blocks held, requests running or waiting.

    A tuple, because every decision reads one of each rank.
    """

    prefill_tokens: int = 0
    decode_blocks: int = 0
    requests: int = 0


@dataclass(slots=True)
class _Sums:
    prefill_tokens: int = 0
    decode_blocks: int = 0
    requests: int = 0

    def add(self, prefill_tokens: int, decode_blocks: int, requests: int) -> None:
        self.prefill_tokens += prefill_tokens
        self.decode_blocks += decode_blocks
        self.requests += requests
        assert self.prefill_tokens >= 0, "prefill tokens of a rank went negative"
        assert self.decode_blocks >= 0, "decode blocks of a rank went negative"
        assert self.requests >= 0, "requests of a rank went negative"


@dataclass(slots=True)
class _Rank:
    """`newer` sums the bookings made since the last report: `report_count` tells which those are.

    A counter, because two things may happen at the same `now`.

    estimate: what `LoadBook.load` answers until `estimated_until`, or until one of the others
    changes; None: to be computed.
    """

    booked: _Sums = field(default_factory=_Sums)
    newer: _Sums = field(default_factory=_Sums)
    report: Load | None = None
    reported_at: float = 0.0
    report_count: int = 0
    estimate: Totals | None = None
    estimated_until: float = math.inf

    @property
    def is_blank(self) -> bool:
        return self.report is None and self.booked.requests == 0


@dataclass(slots=True)
class _Entry:
    """A booking in the book. Exactly one of session and orphaned_until is None."""

    booking: Booking
    session: int | None
    orphaned_until: float | None
    prefill_done: bool
    # Weight of the blocks, 0..1: a nearly finished request weighs less.
    decay: float = 1.0
    # How many reports the ranks had seen when it was booked there.
    worker_mark: int = 0
    prefill_mark: int = 0


class LoadBook:
    """All bookings, and their sums per (worker, rank). Times are seconds of one clock."""

    def __init__(self, bookings_max: int = BOOKINGS_MAX) -> None:
        self._bookings_max = bookings_max
        self._entries: dict[BookingKey, _Entry] = {}
        self._of_frontend: dict[int, set[BookingKey]] = {}
        self._ranks: dict[Placement, _Rank] = {}
        self._sessions: dict[int, int] = {}  # Session to frontend, in order of opening.
        self._next_session = 1
        self._absent_frontends: set[int] = set()  # Gone from discovery, with a session still open.
        self._orphans: deque[tuple[float, BookingKey]] = deque()  # In order of deadline.
        self._orphan_count = 0

    # Bookings.

    def book(self, booking: Booking, session: int | None, now: float) -> bool:
        """Add a booking; False if its key is there already, which adopts it and changes no load.

        session: the one that asked. None (a caller without a session) stands for the newest open
        session of its frontend; where there is none, the booking is an orphan from the start.
        Raises Overloaded when the book is full.
        """
        entry = self._entries.get(booking.key)
        if entry is not None:
            self._own(entry, session, now)
            return False
        if len(self._entries) >= self._bookings_max:
            raise Overloaded(
                1.0, f"the router holds {self._bookings_max} bookings", reason="BOOK_FULL"
            )
        self._add(booking, session, now, prefill_done=False)
        return True

    def announce(self, booking: Booking, session: int | None, now: float) -> bool:
        """Take over a booking made elsewhere or by an earlier session, and adopt it.

        The highest revision wins; False if ours was as new. Raises Overloaded when full.
        """
        entry = self._entries.get(booking.key)
        if entry is None:
            if len(self._entries) >= self._bookings_max:
                raise Overloaded(
                    1.0, f"the router holds {self._bookings_max} bookings", reason="BOOK_FULL"
                )
            self._add(booking, session, now, prefill_done=booking.prefill_tokens == 0)
            return True
        if booking.revision <= entry.booking.revision:
            self._own(entry, session, now)
            return False
        self.free(booking.key)
        self._add(booking, session, now, prefill_done=booking.prefill_tokens == 0)
        return True

    def mark_prefill_done(self, key: BookingKey) -> bool:
        """Prefill is over: its tokens leave the load, once. False if the key is not known."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        if not entry.prefill_done:
            self._charge(entry, -1)
            entry.prefill_done = True
            entry.booking = _changed(entry.booking, prefill_tokens=0)
            self._charge(entry, +1)
            self._discard_blank(entry.booking.prefill)
        return True

    def add_output_blocks(
        self, key: BookingKey, blocks: int, decay_fraction: float | None = None
    ) -> bool:
        """The answer grew by `blocks`; False if the key is not known.

        decay_fraction: share of the expected output still to come, 0..1. The booking weighs
        round(decay_fraction * its blocks) from now on. None leaves the weight as it is.
        Raises InvalidRequest for blocks < 1 or a fraction outside 0..1.
        """
        if blocks < 1:
            raise InvalidRequest(f"blocks must be at least 1, not {blocks}", "blocks")
        if decay_fraction is not None and not 0.0 <= decay_fraction <= 1.0:
            raise InvalidRequest(
                f"decay_fraction must be within 0..1, not {decay_fraction}", "decay_fraction"
            )
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._charge(entry, -1)
        entry.booking = _changed(entry.booking, decode_blocks=entry.booking.decode_blocks + blocks)
        if decay_fraction is not None:
            entry.decay = decay_fraction
        self._charge(entry, +1)
        return True

    def free(self, key: BookingKey) -> bool:
        """The booking ended, in whatever state it was; False if the key is not known."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._charge(entry, -1)
        if entry.orphaned_until is not None:
            self._orphan_count -= 1
        mates = self._of_frontend[key.frontend_id]
        mates.remove(key)
        if not mates:
            del self._of_frontend[key.frontend_id]
        self._discard_blank(entry.booking.worker)
        self._discard_blank(entry.booking.prefill)
        return True

    def get(self, key: BookingKey) -> Booking | None:
        """The booking as it is now."""
        entry = self._entries.get(key)
        return None if entry is None else entry.booking

    def __iter__(self) -> Iterator[Booking]:
        return (entry.booking for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def orphan_count(self) -> int:
        """Bookings that nobody owns at the moment."""
        return self._orphan_count

    # Owners.

    def open_session(self, frontend_id: int) -> int:
        """A frontend connected; the number of its session, never used again."""
        session = self._next_session
        self._next_session += 1
        self._sessions[session] = frontend_id
        return session

    def end_session(self, session: int, now: float) -> int:
        """The session is over: orphan its bookings; how many there were.

        Where discovery has lost the frontend already, they are freed instead.
        """
        frontend_id = self._sessions.pop(session)
        mine = [
            entry
            for key in self._of_frontend.get(frontend_id, ())
            if (entry := self._entries[key]).session == session
        ]
        for entry in mine:
            self._orphan(entry, now)
        if self._newest_session(frontend_id) is None and frontend_id in self._absent_frontends:
            self._absent_frontends.discard(frontend_id)
            self.frontend_left(frontend_id)
        return len(mine)

    def frontend_left(self, frontend_id: int) -> int:
        """Discovery lost a frontend: free its orphans at once; how many there were.

        What an open session of it owns stays until that ends: the stream is the better witness.
        """
        if self._newest_session(frontend_id) is not None:
            self._absent_frontends.add(frontend_id)
        orphans = [
            key
            for key in self._of_frontend.get(frontend_id, ())
            if self._entries[key].session is None
        ]
        for key in orphans:
            self.free(key)
        return len(orphans)

    def frontend_joined(self, frontend_id: int) -> None:
        """Discovery shows the frontend (again)."""
        self._absent_frontends.discard(frontend_id)

    def expire(self, now: float) -> int:
        """Free the orphans whose time is over; how many. To be called before reading any load."""
        freed = 0
        while self._orphans and self._orphans[0][0] <= now:
            deadline, key = self._orphans.popleft()
            entry = self._entries.get(key)
            if entry is not None and entry.orphaned_until == deadline:
                self.free(key)
                freed += 1
        return freed

    # Load.

    def report(self, worker_id: int, dp_rank: int, load: Load, now: float) -> None:
        """What a worker says of one rank; replaces what it said before."""
        rank = self._rank(Placement(worker_id, dp_rank))
        rank.report = load
        rank.reported_at = now
        rank.report_count += 1
        rank.newer = _Sums()
        rank.estimate = None

    def worker_left(self, worker_id: int) -> None:
        """Discovery lost a worker: what it reported is void."""
        for placement in [p for p in self._ranks if p.worker_id == worker_id]:
            self._ranks[placement].report = None
            self._ranks[placement].estimate = None
            self._discard_blank(placement)

    def load(self, placement: Placement, now: float) -> Totals:
        """The estimate, per field: max(last report + bookings newer than it, bookings).

        A report counts waiting tokens, KV blocks in use, and requests running or waiting; one older
        than REPORT_MAX_AGE_S counts nothing.
        """
        rank = self._ranks.get(placement)
        if rank is None:
            return _NO_LOAD
        estimate = rank.estimate
        if estimate is None or now > rank.estimated_until:
            estimate = rank.estimate = _estimate(rank, now)
        return estimate

    def report_age_s(self, placement: Placement, now: float) -> float | None:
        """Seconds since the rank's last report; None if there is none."""
        rank = self._ranks.get(placement)
        return None if rank is None or rank.report is None else now - rank.reported_at

    def stale_reports(self, now: float) -> int:
        """Ranks whose last report is too old to count."""
        return sum(
            rank.report is not None and now - rank.reported_at > REPORT_MAX_AGE_S
            for rank in self._ranks.values()
        )

    # Inside.

    def _add(
        self, booking: Booking, session: int | None, now: float, *, prefill_done: bool
    ) -> None:
        entry = _Entry(booking, None, now, prefill_done)
        entry.worker_mark = self._rank(booking.worker).report_count
        if booking.prefill is not None:
            entry.prefill_mark = self._rank(booking.prefill).report_count
        self._entries[booking.key] = entry
        self._of_frontend.setdefault(booking.key.frontend_id, set()).add(booking.key)
        self._orphan_count += 1
        self._own(entry, session, now)
        self._charge(entry, +1)
        self._discard_blank(booking.prefill)

    def _own(self, entry: _Entry, session: int | None, now: float) -> None:
        """Make `session`, or the frontend's newest one, the owner; without any, orphan it anew."""
        owner = self._newest_session(entry.booking.key.frontend_id) if session is None else session
        if owner is None:
            self._orphan(entry, now)
            return
        if entry.orphaned_until is not None:
            self._orphan_count -= 1
        entry.session, entry.orphaned_until = owner, None

    def _orphan(self, entry: _Entry, now: float) -> None:
        if entry.orphaned_until is None:
            self._orphan_count += 1
        entry.session, entry.orphaned_until = None, now + ORPHAN_S
        self._orphans.append((entry.orphaned_until, entry.booking.key))

    def _newest_session(self, frontend_id: int) -> int | None:
        owners = (s for s, frontend in reversed(self._sessions.items()) if frontend == frontend_id)
        return next(owners, None)

    def _charge(self, entry: _Entry, sign: int) -> None:
        """Add (+1) or take away (-1) what the entry weighs as it is now."""
        booking = entry.booking
        blocks = booking.decode_blocks
        if entry.decay != 1.0:
            blocks = int(blocks * entry.decay + 0.5)
        tokens = 0 if entry.prefill_done else booking.prefill_tokens
        if booking.prefill is None:
            self._charge_rank(booking.worker, entry.worker_mark, sign * tokens, sign * blocks, sign)
            return
        self._charge_rank(booking.worker, entry.worker_mark, 0, sign * blocks, sign)
        if not entry.prefill_done:
            self._charge_rank(booking.prefill, entry.prefill_mark, sign * tokens, 0, sign)

    def _charge_rank(
        self, placement: Placement, mark: int, tokens: int, blocks: int, requests: int
    ) -> None:
        rank = self._ranks[placement]
        rank.estimate = None
        rank.booked.add(tokens, blocks, requests)
        if mark == rank.report_count:
            rank.newer.add(tokens, blocks, requests)

    def _rank(self, placement: Placement) -> _Rank:
        rank = self._ranks.get(placement)
        if rank is None:
            rank = self._ranks[placement] = _Rank()
        return rank

    def _discard_blank(self, placement: Placement | None) -> None:
        """Forget a rank that carries nothing, so that the book does not grow with churn."""
        if placement is not None and (rank := self._ranks.get(placement)) and rank.is_blank:
            del self._ranks[placement]


_NO_LOAD = Totals()


def _estimate(rank: _Rank, now: float) -> Totals:
    """The load of a rank, and until when it holds if nothing happens."""
    booked, newer, report = rank.booked, rank.newer, rank.report
    expires_at = rank.reported_at + REPORT_MAX_AGE_S
    if report is None or now > expires_at:
        rank.estimated_until = math.inf
        return Totals(booked.prefill_tokens, booked.decode_blocks, booked.requests)
    rank.estimated_until = expires_at
    return Totals(
        max(report.waiting_tokens + newer.prefill_tokens, booked.prefill_tokens),
        max(report.kv_used_blocks + newer.decode_blocks, booked.decode_blocks),
        max(report.running + report.waiting + newer.requests, booked.requests),
    )


def _changed(
    booking: Booking, *, prefill_tokens: int | None = None, decode_blocks: int | None = None
) -> Booking:
    return replace(
        booking,
        prefill_tokens=booking.prefill_tokens if prefill_tokens is None else prefill_tokens,
        decode_blocks=booking.decode_blocks if decode_blocks is None else decode_blocks,
        revision=booking.revision + 1,
    )

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
`bonds_max`, of `bytes_max` in all: a newcomer takes the place of the one closed longest ago, or of
the one idle longest, or else of the one made longest ago.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from common.errors import InvalidRequest, Unsupported
from common.request.preprocessed import RoutingHints, SessionAction, SessionControl
from router_svc.core.eligibility import Leg, Tie
from router_svc.core.fleet import Placement
from router_svc.core.load_tracker import Booking, BookingKey
from router_svc.core.query import Query

# hard: a session's requests run on its worker or not at all, while it is there; soft: there if it
# may serve them and has room, else elsewhere.
AffinityMode = Literal["hard", "soft"]

# What became of a request's session: bound for the first time, or anew by its own wish; on its
# worker; on another one; or forgotten by its own wish.
AFFINITIES = ("bound", "kept", "moved", "closed")
BONDS_MAX = 65_536
BYTES_MAX = 64 * 1024 * 1024
# What a bond takes beside its names, about.
BOND_BYTES = 768
# Bonds forgotten at once because their time is over: about 1 ms.
FORGET_MAX = 1024
SESSION_ID_CHARS_MAX = 256
_FIELD = "query.routing.session_control"
_PINS = (
    "backend_instance_id",
    "prefill_worker_id",
    "decode_worker_id",
    "dp_rank",
    "prefill_dp_rank",
)


class SessionName(NamedTuple):
    """A session of one model, or adapter of it, for adapters reuse nothing of each other's KV and
    other workers may have them.
    """

    model: str
    session_id: str
    lora_name: str = ""


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a session is. worker: of whole requests or decode legs; prefill: None if not split."""

    worker: Placement
    prefill: Placement | None = None

    def at(self, leg: Leg) -> Placement | None:
        """The place of one leg, None if the binding leaves it open."""
        return self.prefill if leg == "prefill" else self.worker

    @property
    def places(self) -> tuple[Placement, ...]:
        """All of them."""
        return (self.worker,) if self.prefill is None else (self.worker, self.prefill)


@dataclass(frozen=True, slots=True)
class Bond:
    """What became of a session. binding: None, it was closed; revision: counts its bonds, from 1;
    key: of the request that made this one.
    """

    session: SessionName
    binding: Binding | None
    revision: int
    key: BookingKey

    def beats(self, other: Bond) -> bool:
        """Whether routers that know of both keep this one; never both of two, nor one itself."""
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[int, BookingKey, tuple[Placement, ...]]:
        """Least wins. One request may have been placed by two routers: then where decides."""
        return -self.revision, self.key, () if self.binding is None else self.binding.places

    @property
    def size(self) -> int:
        """Bytes it takes in memory, about."""
        names = (*self.session, self.key.request_id)
        return BOND_BYTES + sum(len(name.encode()) for name in names)


class ToldBond(NamedTuple):
    """A bond as routers tell it. idle_s: since its session's last use; 0 while a request lives."""

    bond: Bond
    idle_s: float


@dataclass(frozen=True, slots=True)
class Stay:
    """What its session asks of one request's placement.

    last: what was known of the session. binding: where it is, or None where that does not count.
    """

    session: SessionName
    action: SessionAction | None
    last: Bond | None
    binding: Binding | None
    is_hard: bool

    def tie(self, leg: Leg) -> Tie | None:
        """The place of a leg that is to be, or has to be, chosen; None: any."""
        at = None if self.binding is None else self.binding.at(leg)
        return None if at is None else Tie(at, self.is_hard)

    @property
    def must(self) -> tuple[Placement, ...]:
        """All places that the request has to run at; empty: it may run anywhere."""
        return self.binding.places if self.is_hard and self.binding is not None else ()

    def outcome(self, worker: Placement) -> str:
        """One of AFFINITIES, for a request that was placed on `worker`."""
        if self.action is SessionAction.CLOSE:
            return "closed"
        before = None if self.last is None else self.last.binding
        if self.action is SessionAction.OPEN or before is None:
            return "bound"
        return "kept" if before.worker == worker else "moved"

    def bond(
        self, worker: Placement, prefill: Placement | None, key: BookingKey, revision_min: int = 1
    ) -> Bond | None:
        """That of the session once its request `key` is placed there; None: it has none.

        revision_min: of a new one, see `Affinity.revision_min`.
        """
        binding: Binding | None = None
        if self.action is not SessionAction.CLOSE:
            if prefill is None and self.binding is not None and self.binding.worker == worker:
                prefill = self.binding.prefill  # Who was not split leaves it where it is.
            binding = Binding(worker, prefill)
        if self.last is None:
            return None if binding is None else Bond(self.session, binding, revision_min, key)
        if self.last.binding == binding and self.action is not SessionAction.OPEN:
            return self.last
        return Bond(self.session, binding, max(self.last.revision + 1, revision_min), key)


class Affinity:
    """The bonds that one router knows. Times are seconds of one clock; ttl_s 0 keeps no sessions.

    epoch_s: the time of day at `now` 0, in seconds since 1970; None: revisions just count.

    It is the load book's `Uses`. changed: called with a session of which peers are to be told;
    moved: with one that is bound elsewhere than before, or no more; it must not call back.
    evicted: bonds forgotten for want of room.
    """

    def __init__(
        self,
        ttl_s: float,
        mode: AffinityMode = "hard",
        *,
        bonds_max: int = BONDS_MAX,
        bytes_max: int = BYTES_MAX,
        epoch_s: float | None = None,
    ) -> None:
        assert bonds_max > 0, "there is room for one"
        self._ttl_s = ttl_s
        self._is_hard = mode == "hard"
        self._epoch_s = epoch_s
        self._bonds_max = bonds_max
        self._bytes_max = bytes_max
        self._bonds: dict[SessionName, Bond] = {}
        self._closed: dict[SessionName, None] = {}  # Those of them that are, in order of closing.
        self._live: dict[SessionName, int] = {}  # Bookings that live, of whatever session.
        # Since when each bond is idle, and all of that in a heap with some that it is no more.
        self._idle: dict[SessionName, float] = {}
        self._by_idle: list[tuple[float, SessionName]] = []
        self._ended: dict[SessionName, None] = {}  # Idle from the next `expire` on.
        self.changed: Callable[[SessionName], None] = _nobody_is_told
        self.moved: Callable[[SessionName], None] = _nobody_is_told
        self.size = 0  # Bytes, about.
        self.evicted = 0

    # One request.

    def stay(self, query: Query, is_there: Callable[[Placement], bool]) -> Stay | None:
        """What the query's session asks; None if it names none. `expire` comes first.

        is_there: whether a worker is. Raises InvalidRequest for a name that is none, Unsupported
        where no sessions are kept.
        """
        routing = query.routing
        if routing is None or (control := routing.session_control) is None:
            return None
        session = self._session(query.model, control, routing.lora_name or "")
        last = self._bonds.get(session)
        binding = None if last is None else last.binding
        if binding is not None and (
            control.action is SessionAction.OPEN
            or _pins_any(routing)
            or any(at.worker_id in query.excluded_worker_ids for at in binding.places)
            or not all(map(is_there, binding.places))
        ):
            binding = None
        return Stay(session, control.action, last, binding, self._is_hard)

    def revision_min(self, now: float) -> int:
        """Of a new bond: the milliseconds of the day's time, so that it beats those made before it
        which only others still remember. Clocks need not agree for routers to.
        """
        return 1 if self._epoch_s is None else max(1, round((now + self._epoch_s) * 1000))

    def booked(self, bond: Bond, now: float) -> None:
        """The request that asked to stay was booked, which made this bond or kept it."""
        if self._bonds.get(bond.session) != bond:
            self._keep(bond)
            self.changed(bond.session)
        self._used(bond.session, now)

    # Bookings, of whatever router.

    def began(self, booking: Booking) -> None:
        """See `Uses`."""
        session = SessionName(*booking.session)
        self._live[session] = self._live.get(session, 0) + 1
        self._ended.pop(session, None)
        if session not in self._closed:
            self._idle.pop(session, None)

    def ended(self, booking: Booking, *, is_own: bool) -> None:
        """See `Uses`. A peer that never heard of so short a booking is told that there was one."""
        session = SessionName(*booking.session)
        self._live[session] -= 1
        if self._live[session]:
            return
        del self._live[session]
        if session in self._bonds and session not in self._closed:
            self._ended[session] = None
            if is_own:
                self.changed(session)

    def announced(self, booking: Booking, now: float) -> None:
        """A frontend holds this booking: what nobody here remembers of its session, it teaches."""
        if not (self._ttl_s and booking.session_id):
            return
        session = SessionName(*booking.session)
        known = self._bonds.get(session)
        if known is None or known.revision < booking.session_revision:
            binding = Binding(booking.worker, booking.prefill)
            self.booked(Bond(session, binding, booking.session_revision, booking.key), now)

    # Peers.

    def heard(self, told: ToldBond, now: float) -> None:
        """What a peer knows of a session."""
        bond, idle_s = told
        known = self._bonds.get(bond.session)
        if not self._ttl_s or (known is None and idle_s >= self._ttl_s):
            return
        if known is None or bond.beats(known):
            self._keep(bond)
        elif known.beats(bond):
            self.changed(bond.session)
        self._used(bond.session, now - idle_s)

    def told(self, session: SessionName, now: float) -> ToldBond | None:
        """What to tell peers of a session; None if nothing is known of it (any more)."""
        bond = self._bonds.get(session)
        return None if bond is None else ToldBond(bond, now - self._idle.get(session, now))

    def sessions(self) -> list[SessionName]:
        """All of which there is something to tell."""
        return list(self._bonds)

    # Time.

    def expire(self, now: float) -> int:
        """Forget what has been idle for ttl_s, FORGET_MAX bonds at most; how many."""
        for session in self._ended:
            self._rest(session, now)
        self._ended.clear()
        forgotten = 0
        while forgotten < FORGET_MAX and (oldest := self._longest_idle()) is not None:
            if now - self._idle[oldest] < self._ttl_s:
                break
            self._forget(oldest)
            forgotten += 1
        return forgotten

    def __len__(self) -> int:
        """Sessions that are bound."""
        return len(self._bonds) - len(self._closed)

    @property
    def active(self) -> int:
        """Those not known to be idle."""
        return len(self._bonds) - len(self._idle)

    # Inside.

    def _session(self, model: str, control: SessionControl, lora_name: str) -> SessionName:
        if not self._ttl_s:
            raise Unsupported(f"{_FIELD}.session_id", "this router keeps no sessions")
        length = len(control.session_id)
        if not 0 < length <= SESSION_ID_CHARS_MAX:
            raise InvalidRequest(
                f"a session id has 1 to {SESSION_ID_CHARS_MAX} characters, not {length}",
                f"{_FIELD}.session_id",
            )
        return SessionName(model, control.session_id, lora_name)

    def _keep(self, bond: Bond) -> None:
        """In the place of what was known of its session."""
        session = bond.session
        if (old := self._bonds.pop(session, None)) is not None:
            self.size -= old.size
            self._closed.pop(session, None)
        self._bonds[session] = bond
        self.size += bond.size
        if bond.binding is None:
            self._closed[session] = None
        if old is None or old.binding != bond.binding:
            self.moved(session)
        while len(self._bonds) > self._bonds_max or self.size > self._bytes_max:
            self._evict(session)

    def _used(self, session: SessionName, at: float) -> None:
        """A request of the session lived at that time, or does now."""
        if session not in self._bonds:
            return  # There was no room for it.
        if session in self._live and session not in self._closed:
            self._idle.pop(session, None)
        else:
            self._rest(session, max(at, self._idle.get(session, at)))

    def _rest(self, session: SessionName, since: float) -> None:
        if self._idle.get(session) == since:
            return
        self._idle[session] = since
        heappush(self._by_idle, (since, session))
        if len(self._by_idle) > 2 * len(self._idle) + 64:
            self._by_idle = [(since, session) for session, since in self._idle.items()]
            heapify(self._by_idle)

    def _longest_idle(self) -> SessionName | None:
        while self._by_idle:
            since, session = self._by_idle[0]
            if self._idle.get(session) == since:
                return session
            heappop(self._by_idle)
        return None

    def _evict(self, newcomer: SessionName) -> None:
        """Somebody else than the newcomer, unless there is nobody."""
        some = (next(iter(self._closed), None), self._longest_idle(), next(iter(self._bonds)))
        victim = next((one for one in some if one not in (None, newcomer)), newcomer)
        assert victim is not None, "somebody is there"
        self._forget(victim)
        self.evicted += 1

    def _forget(self, session: SessionName) -> None:
        self.size -= self._bonds.pop(session).size
        self._closed.pop(session, None)
        self._idle.pop(session, None)
        self._ended.pop(session, None)
        self.moved(session)


def _pins_any(routing: RoutingHints) -> bool:
    """Whether the request says by itself where it, or a leg of it, has to run."""
    return any(getattr(routing, name) is not None for name in _PINS)


def _nobody_is_told(session: SessionName) -> None:
    """A router on its own."""

"""Which worker the requests of one client session stay on (pure).

A *binding* says where a session's last request was placed. It is made with a booking, so that the
session's next request follows even if the first is still on its way. While a booking of the session
lives the binding is *active* and does not age; when none is found to live any more, which is looked
for about each LOOK_S, it is *idle*, and after `ttl_s` of that it is forgotten: never early.

A worker that is gone, or that failed the very request that is to be placed, binds nobody, nor does
a binding outvote the pins of a request: such a session moves with its request. `open` begins anew
wherever the session was, `close` forgets it with the request's booking.

Invariants: a binding is either active or idle; the idle ones stand in order of the time since which
they are; there are never more than `bindings_max`: a newcomer takes the place of the one that was
idle longest, or if none is, of the one that was looked at longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from common.errors import InvalidRequest, Unsupported
from common.preprocessed import RoutingHints, SessionAction, SessionControl
from router_svc.core.filters import Leg, Tie
from router_svc.core.fleet import Placement
from router_svc.core.load import BookingKey
from router_svc.core.query import Query

# hard: a session's requests run on its worker or not at all, while it is there; soft: there if it
# may serve them, else elsewhere.
AffinityMode = Literal["hard", "soft"]

# What became of a request's session: bound for the first time, or anew by its own wish; on its
# worker; on another one; or forgotten by its own wish.
AFFINITIES = ("bound", "kept", "moved", "closed")
BINDINGS_MAX = 65_536
# Active bindings are looked at this often, and this many at a time: some 30 µs.
LOOK_S = 1.0
LOOKS_MAX = 64
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
    """A session of one model: an id means nothing to another model's workers."""

    model: str
    session_id: str


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
class Stay:
    """What its session asks of one request's placement.

    before: where the session was; binding: the same, or None where that does not count.
    """

    session: SessionName
    action: SessionAction | None
    before: Binding | None
    binding: Binding | None
    is_hard: bool

    def tie(self, leg: Leg) -> Tie | None:
        """The place of a leg that is to be, or has to be, chosen; None: any."""
        at = None if self.binding is None else self.binding.at(leg)
        return None if at is None else Tie(at, self.is_hard)

    def outcome(self, worker: Placement) -> str:
        """One of AFFINITIES, for a request that was placed on `worker`."""
        if self.action is SessionAction.CLOSE:
            return "closed"
        if self.action is SessionAction.OPEN or self.before is None:
            return "bound"
        return "kept" if self.before.worker == worker else "moved"


@dataclass(slots=True)
class _Entry:
    """keys: its bookings that live, and some that have ended since they were looked at."""

    binding: Binding
    keys: set[BookingKey] = field(default_factory=set)


class Affinity:
    """The bindings of one router. Times are seconds of one clock; ttl_s 0 keeps no sessions.

    evicted: bindings forgotten for want of room.
    """

    def __init__(
        self, ttl_s: float, mode: AffinityMode = "hard", *, bindings_max: int = BINDINGS_MAX
    ) -> None:
        assert bindings_max > 0, "there is room for one"
        self._ttl_s = ttl_s
        self._is_hard = mode == "hard"
        self._bindings_max = bindings_max
        self._entries: dict[SessionName, _Entry] = {}
        # When each was looked at, and since when each is idle; oldest first.
        self._active: OrderedDict[SessionName, float] = OrderedDict()
        self._idle: OrderedDict[SessionName, float] = OrderedDict()
        self.evicted = 0

    def stay(self, query: Query, is_there: Callable[[Placement], bool]) -> Stay | None:
        """What the query's session asks; None if it names none. `expire` comes first.

        is_there: whether a worker is. Raises InvalidRequest for a name that is none, Unsupported
        where no sessions are kept.
        """
        routing = query.routing
        control = None if routing is None else routing.session_control
        if control is None:
            return None
        session = self._session(query.model, control)
        before = self._binding(session)
        voided = (
            before is None
            or control.action is SessionAction.OPEN
            or _pins_any(routing)
            or any(at.worker_id in query.excluded_worker_ids for at in before.places)
            or not all(map(is_there, before.places))
        )
        binding = None if voided else before
        return Stay(session, control.action, before, binding, self._is_hard)

    def booked(
        self, stay: Stay, worker: Placement, prefill: Placement | None, key: BookingKey, now: float
    ) -> None:
        """The request that asked to stay was booked there under `key`."""
        if stay.action is SessionAction.CLOSE:
            self._forget(stay.session)
            return
        if prefill is None and stay.binding is not None and stay.binding.worker == worker:
            prefill = stay.binding.prefill  # A request that was not split leaves it where it is.
        self._bind(stay.session, Binding(worker, prefill), key, now)

    def expire(self, now: float, lives: Callable[[BookingKey], bool]) -> int:
        """Forget the bindings that have been idle for ttl_s; how many. lives: of a booking."""
        self._look(now, lives)
        forgotten = 0
        while self._idle and now - next(iter(self._idle.values())) >= self._ttl_s:
            self._forget(next(iter(self._idle)))
            forgotten += 1
        return forgotten

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def active(self) -> int:
        """Bindings not found to be idle."""
        return len(self._active)

    def _session(self, model: str, control: SessionControl) -> SessionName:
        if not self._ttl_s:
            raise Unsupported(_FIELD, "this router keeps no sessions")
        length = len(control.session_id)
        if not 0 < length <= SESSION_ID_CHARS_MAX:
            raise InvalidRequest(
                f"a session id has 1 to {SESSION_ID_CHARS_MAX} characters, not {length}",
                f"{_FIELD}.session_id",
            )
        return SessionName(model, control.session_id)

    def _binding(self, session: SessionName) -> Binding | None:
        entry = self._entries.get(session)
        return None if entry is None else entry.binding

    def _bind(self, session: SessionName, binding: Binding, key: BookingKey, now: float) -> None:
        entry = self._entries.get(session)
        if entry is None:
            if len(self._entries) >= self._bindings_max:
                self._evict()
            entry = self._entries[session] = _Entry(binding)
        entry.binding = binding
        entry.keys.add(key)
        self._idle.pop(session, None)
        # A busy session keeps its turn: else nobody would ever drop the keys that it gathers.
        self._active.setdefault(session, now)

    def _forget(self, session: SessionName) -> None:
        self._entries.pop(session, None)
        self._active.pop(session, None)
        self._idle.pop(session, None)

    def _look(self, now: float, lives: Callable[[BookingKey], bool]) -> None:
        """Tell the active ones whose turn it is from the idle."""
        for _ in range(min(LOOKS_MAX, len(self._active))):
            session, looked_at = next(iter(self._active.items()))
            if now - looked_at < LOOK_S:
                return
            entry = self._entries[session]
            entry.keys = {key for key in entry.keys if lives(key)}
            del self._active[session]
            (self._active if entry.keys else self._idle)[session] = now

    def _evict(self) -> None:
        self.evicted += 1
        self._forget(next(iter(self._idle or self._active)))


def _pins_any(routing: RoutingHints | None) -> bool:
    """Whether the request says by itself where it, or a leg of it, has to run."""
    return routing is not None and any(getattr(routing, name) is not None for name in _PINS)

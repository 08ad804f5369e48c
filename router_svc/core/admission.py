"""The admission queue: who waits for a worker with room for a prompt, and who goes first (pure).

A request is parked if those who may wait for the same workers already do, if every worker that may
compute its prompt has more than `threshold` batches of prompt tokens before it (see
`busy.prefill_busy`), or if it would take the room of one who waits and comes before it. Whoever is
parked has booked nothing.

Order, least first: (-strict_priority, -key, number of parking), where with jump = max(0,
priority_jump) and the time of arrival at the frontend, both in seconds,

    fcfs  key = jump - arrival
    lcfs  key = jump + arrival
    wspt  key = (1 + jump) / max(1, total_tokens - most tokens that an eligible worker has cached)

Keys as NVIDIA Dynamo 1.6 documents them. Arrival counts, not parking: who is routed again after a
failure keeps its place.

Requests wait in *lanes*: those of one lane may run on exactly the same workers, so that its head
speaks for all of it (head of line), and who is pinned to a busy worker holds up nobody else. Heads
of different lanes compete by the same order, and no newcomer overtakes one that waits for the room
that it would take. A wish (a soft session, a preferred adapter) is no
reason to wait, and makes no lane: who has one waits for all who may serve it.

A lane waits for *spots*: ranks that have no room for one of its legs, one of which has to get some
before its head need be looked at again. Lanes stand at each of their spots, so that a rank that
was relieved finds those who wait for it, best first, whatever the number of the others.

Who waits where its session was bound is found by the session, should that be bound anew.

Invariants: a key is parked at most once; every lane has somebody in it and stands in order; it is
to be found at every spot that it waits for; `tokens` is the sum over the parked; nobody is parked
beyond `requests_max`, nor once `tokens_max` is reached.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Literal, NamedTuple

from common.errors import Overloaded
from router_svc.core.eligibility import Leg
from router_svc.core.fleet import Placement
from router_svc.core.load_tracker import BookingKey
from router_svc.core.query import Query
from router_svc.core.sessions import SessionName

QueuePolicy = Literal["fcfs", "wspt", "lcfs"]

# Hint to callers that were turned away: about the time in which a prompt is computed.
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """threshold: batches of prompt tokens before a worker counts as busy; None: nobody ever waits.

    requests_max: who may wait. tokens_max: the prompt tokens of those; whoever crosses it is still
    let in. wait_max_s: the longest anybody waits at this router, from when it was parked here. Time
    since arrival does not count: it contains the computing of attempts that failed later.
    """

    threshold: float | None = None
    policy: QueuePolicy = "fcfs"
    requests_max: int = 4096
    tokens_max: int = 64_000_000
    wait_max_s: float = 60.0


NO_QUEUE = QueueRules()


class Spot(NamedTuple):
    """A rank that somebody waits for, and what it is wanted for."""

    placement: Placement
    leg: Leg


class Lane(NamedTuple):
    """All that decides who is eligible for a query; equal lanes have equal workers.

    places: where a hard session is bound, empty without one.
    """

    model: str
    worker_id: int | None
    decode_worker_id: int | None
    dp_rank: int | None
    prefill_worker_id: int | None
    prefill_dp_rank: int | None
    allowed_worker_ids: frozenset[int] | None
    required_taints: frozenset[str]
    lora_name: str
    excluded_worker_ids: frozenset[int]
    places: tuple[Placement, ...]


class Order(NamedTuple):
    """Least first."""

    level: int
    key: float
    number: int


_Head = tuple[Order, Lane]


@dataclass(slots=True, eq=False)
class Parked:
    """One who waits. parked_at: `now` then, seconds. order: unique to it. lane: changes with the
    binding of its session.
    """

    order: Order
    lane: Lane
    key: BookingKey
    query: Query
    session: int | None
    parked_at: float

    @property
    def number(self) -> int:
        """Counts those ever parked, from 1."""
        return self.order.number


class Hindrance(NamedTuple):
    """Whom a lane waits for: none of the spots has room, as long as the fleet is the same.

    fleet_version: see `Router`. sweep: the last one in which its head was picked for, in vain.
    is_gated: see `Room.is_gated`.
    """

    fleet_version: int
    spots: frozenset[Spot]
    sweep: int = 0
    is_gated: bool = False


@dataclass(slots=True, eq=False)
class _Line:
    """The parked of one lane, in order. is_seen: its head was looked at since the fleet changed."""

    hindrance: Hindrance
    is_seen: bool = True
    entries: list[tuple[Order, Parked]] = field(default_factory=list)

    @property
    def head(self) -> Order:
        return self.entries[0][0]


class AdmissionQueue:
    """All who wait at one router. Times are seconds of one clock."""

    def __init__(self, rules: QueueRules = NO_QUEUE) -> None:
        self.rules = rules
        self._lines: dict[Lane, _Line] = {}
        self._parked: dict[BookingKey, Parked] = {}  # In order of parking.
        # Those who wait because their session is bound.
        self._bound: dict[SessionName, dict[BookingKey, Parked]] = {}
        # The heads of the lanes that wait for each spot, as heaps; among them some that do no more.
        self._at: dict[Spot, list[_Head]] = {}
        # Likewise those of the lanes that are unseen, by model.
        self._unseen_at: dict[str, list[_Head]] = {}
        self._number = 0
        self.tokens = 0  # Prompt tokens of the parked.

    def __len__(self) -> int:
        return len(self._parked)

    def has_backlog(self, lane: Lane) -> bool:
        """Whether somebody waits for the same workers."""
        return lane in self._lines

    def overtakes(self, order: Order, model: str, spot: Spot) -> bool:
        """Whether one of that order that took the room there would overtake one who waits for it.

        Whoever was not looked at since the fleet changed may be waiting for any spot of its model.
        """
        at_spot = _first(self._at.get(spot), lambda head: self._stands(head, spot))
        unseen = _first(self._unseen_at.get(model), self._is_unseen)
        return any(first is not None and first < order for first in (at_spot, unseen))

    def order(self, query: Query, now: float, cached_tokens: int = 0) -> Order:
        """That of a newcomer that were parked now. cached_tokens: as for `park`."""
        return _order(self.rules.policy, query, now, cached_tokens, self._number + 1)

    def unsee(self) -> None:
        """The fleet has changed: for whom anybody waits must be looked at anew."""
        for line in self._lines.values():
            line.is_seen = False
        self._gather_unseen()

    def park(
        self,
        query: Query,
        key: BookingKey,
        now: float,
        *,
        hindrance: Hindrance,
        lane: Lane | None = None,
        session: int | None = None,
        cached_tokens: int = 0,
    ) -> Parked:
        """Add one at its place. lane: that of the query without a session, if not given.
        cached_tokens: the most that an eligible worker has of its prompt.

        Raises Overloaded (QUEUE_FULL) whose metadata name the limit that is reached: limit_kind
        (requests or tokens), current, limit.
        """
        assert key not in self._parked, "who waits already must be withdrawn first"
        self._check_room(query.model)
        self._number += 1
        order = _order(self.rules.policy, query, now, cached_tokens, self._number)
        parked = Parked(order, lane or lane_of(query), key, query, session, now)
        self._enter(parked, hindrance)
        self._parked[key] = parked
        self.tokens += query.total_tokens
        return parked

    def withdraw(self, key: BookingKey) -> Parked | None:
        """Take one out, for whatever reason; None if it does not wait."""
        parked = self._parked.pop(key, None)
        if parked is None:
            return None
        self._exit(parked)
        self.tokens -= parked.query.total_tokens
        return parked

    def withdraw_session(self, session: int) -> list[Parked]:
        """Take out all that a session has parked."""
        return self._withdraw_all([p for p in self._parked.values() if p.session == session])

    def overdue(self, now: float) -> list[Parked]:
        """Take out all that have waited for `wait_max_s`."""
        late = []
        for parked in self._parked.values():
            if now - parked.parked_at < self.rules.wait_max_s:
                break
            late.append(parked)
        return self._withdraw_all(late)

    def clear(self) -> list[Parked]:
        """Take out all."""
        return self._withdraw_all(list(self._parked.values()))

    def heads(self) -> Iterator[Parked]:
        """The first of each lane, best first.

        One that is withdrawn, or goes to another lane, before the next is asked for is followed by
        the next of its lane; one that stays holds its lane up.
        """
        best = [line.entries[0] for line in self._lines.values()]
        heapify(best)
        while best:
            _, parked = heappop(best)
            lane = parked.lane
            yield parked
            line = self._lines.get(lane)
            if line is not None and line.entries[0][1] is not parked:
                heappush(best, line.entries[0])

    def hindrance(self, lane: Lane) -> Hindrance:
        """Whom a lane waits for, as far as was seen."""
        return self._lines[lane].hindrance

    def hinder(self, parked: Parked, lane: Lane, hindrance: Hindrance) -> None:
        """A lane's head was looked at, and must wait; in `lane`, if that is another one by now."""
        if lane != parked.lane:
            self._exit(parked)
            parked.lane = lane
            self._enter(parked, hindrance)
            return
        line = self._lines[lane]
        line.is_seen = True
        added = hindrance.spots - line.hindrance.spots
        line.hindrance = hindrance
        self._stand(lane, line, added)

    def is_bound(self, session: SessionName) -> bool:
        """Whether somebody waits because that session is bound."""
        return session in self._bound

    def bound(self, session: SessionName) -> list[Parked]:
        """Those who wait because that session is bound, best first."""
        return sorted(self._bound.get(session, {}).values(), key=attrgetter("order"))

    @property
    def overdue_at(self) -> float:
        """When the first of all will have waited for `wait_max_s`: inf if nobody waits."""
        first = next(iter(self._parked.values()), None)
        return math.inf if first is None else first.parked_at + self.rules.wait_max_s

    # Spots.

    def is_awaited(self, spot: Spot) -> bool:
        """Whether somebody may wait for it: never wrongly False."""
        return spot in self._at

    @property
    def spots(self) -> list[Spot]:
        """Those that somebody may wait for."""
        return list(self._at)

    def waiting_at(self, spot: Spot) -> Generator[Parked, None, None]:
        """The heads of the lanes that wait for it, best first, as `heads` goes on from one to the
        next.
        """
        passed: set[_Head] = set()
        try:
            while heap := self._at.get(spot):
                head = heappop(heap)
                if head not in passed and self._stands(head, spot):
                    passed.add(head)
                    yield self._lines[head[1]].entries[0][1]
        finally:
            stay = [head for head in passed if self._stands(head, spot)]
            for head in stay:
                heappush(self._at.setdefault(spot, []), head)
            if not stay and not self._at.get(spot):
                self._at.pop(spot, None)

    def tidy(self) -> None:
        """Forget the spots that nobody waits for any more."""
        for spot in self.spots:
            self._compact(spot)

    def _enter(self, parked: Parked, hindrance: Hindrance) -> None:
        line = self._lines.get(parked.lane)
        if line is None:
            line = self._lines[parked.lane] = _Line(hindrance)
        insort(line.entries, (parked.order, parked))
        if parked.lane.places:
            self._bound.setdefault(_session_of(parked.query), {})[parked.key] = parked
        if line.head is parked.order:
            self._stand(parked.lane, line, line.hindrance.spots)

    def _exit(self, parked: Parked) -> None:
        line = self._lines[parked.lane]
        was_head = line.head is parked.order
        del line.entries[bisect_left(line.entries, (parked.order,))]
        if parked.lane.places:
            mates = self._bound[session := _session_of(parked.query)]
            del mates[parked.key]
            if not mates:
                del self._bound[session]
        if not line.entries:
            del self._lines[parked.lane]
            if not self._lines:
                self._at.clear()
                self._unseen_at.clear()
        elif was_head:
            self._stand(parked.lane, line, line.hindrance.spots)

    def _stand(self, lane: Lane, line: _Line, spots: Iterable[Spot]) -> None:
        """Let the lane be found at these by its head."""
        item = line.head, lane
        heap_max = 2 * len(self._lines) + 16
        for spot in spots:
            heap = self._at.setdefault(spot, [])
            heappush(heap, item)
            if len(heap) > heap_max:
                self._compact(spot)
        if not line.is_seen:
            heap = self._unseen_at[lane.model]
            heappush(heap, item)
            if len(heap) > heap_max:
                self._gather_unseen()

    def _stands(self, item: _Head, spot: Spot) -> bool:
        order, lane = item
        line = self._lines.get(lane)
        return line is not None and line.head == order and spot in line.hindrance.spots

    def _is_unseen(self, item: _Head) -> bool:
        order, lane = item
        line = self._lines.get(lane)
        return line is not None and line.head == order and not line.is_seen

    def _gather_unseen(self) -> None:
        self._unseen_at = {}
        for lane, line in self._lines.items():
            if not line.is_seen:
                self._unseen_at.setdefault(lane.model, []).append((line.head, lane))
        for heap in self._unseen_at.values():
            heapify(heap)

    def _compact(self, spot: Spot) -> None:
        heap = self._at[spot]
        heap[:] = {item for item in heap if self._stands(item, spot)}
        heapify(heap)
        if not heap:
            del self._at[spot]

    def _withdraw_all(self, parked: Sequence[Parked]) -> list[Parked]:
        for one in parked:
            self.withdraw(one.key)
        return list(parked)

    def _check_room(self, model: str) -> None:
        limits = (
            ("requests", len(self._parked), self.rules.requests_max),
            ("tokens", self.tokens, self.rules.tokens_max),
        )
        for kind, current, limit in limits:
            if current >= limit:
                what = "requests" if kind == "requests" else "prompt tokens"
                raise Overloaded(
                    RETRY_AFTER_S,
                    f"the router's queue is full: {current} {what} wait, and {limit} may",
                    reason="QUEUE_FULL",
                    metadata={
                        "model": model,
                        "limit_kind": kind,
                        "current": str(current),
                        "limit": str(limit),
                    },
                )


def lane_of(query: Query, places: tuple[Placement, ...] = ()) -> Lane:
    """Where the query waits. places: see Lane."""
    routing, excluded = query.routing, query.excluded_worker_ids
    if routing is None:
        return Lane(
            query.model, None, None, None, None, None, None, frozenset(), "", excluded, places
        )
    constraints = routing.routing_constraints
    return Lane(
        query.model,
        routing.backend_instance_id,
        routing.decode_worker_id,
        routing.dp_rank,
        routing.prefill_worker_id,
        routing.prefill_dp_rank,
        routing.allowed_worker_ids,
        frozenset() if constraints is None else frozenset(constraints.required_taints),
        routing.lora_name or "",
        excluded,
        places,
    )


def _session_of(query: Query) -> SessionName:
    routing = query.routing
    assert routing is not None, "who waits for a session's place names the session"
    assert routing.session_control is not None
    return SessionName(query.model, routing.session_control.session_id, routing.lora_name or "")


def _first(heap: list[_Head] | None, counts: Callable[[_Head], bool]) -> Order | None:
    """The first that counts; those before it are dropped."""
    while heap:
        if counts(heap[0]):
            return heap[0][0]
        heappop(heap)
    return None


def overdue_error(parked: Parked, waited_s: float) -> Overloaded:
    """Why one who waited too long is turned away."""
    return Overloaded(
        RETRY_AFTER_S,
        f"no worker had room for the prompt within {waited_s:.0f} s",
        reason="QUEUE_TIMEOUT",
        metadata={"model": parked.query.model},
    )


def _order(policy: QueuePolicy, query: Query, now: float, cached_tokens: int, number: int) -> Order:
    routing = query.routing
    jump = max(0.0, routing.priority_jump or 0.0) if routing is not None else 0.0
    arrival = now - query.waited_s
    if policy == "wspt":
        key = (1.0 + jump) / max(1, query.total_tokens - cached_tokens)
    else:
        key = jump - arrival if policy == "fcfs" else jump + arrival
    return Order(-query.strict_priority, -key, number)

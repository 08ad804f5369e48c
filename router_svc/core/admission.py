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
from router_svc.core.query import Query
from router_svc.core.types import BookingKey, Placement, RankCapacity, SessionName

QueuePolicy = Literal["fcfs", "wspt", "lcfs"]

# Hint to callers that were turned away: about the time in which a prompt is computed.
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
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


NO_QUEUE = QueueSettings()


class ConstraintClass(NamedTuple):
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
    placements: tuple[Placement, ...]


class QueueOrder(NamedTuple):
    """Least first."""

    level: int
    key: float
    number: int


_ClassHead = tuple[QueueOrder, ConstraintClass]


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One who waits. parked_at: `now` then, seconds. order: unique to it. lane: changes with the
    binding of its session.
    """

    order: QueueOrder
    constraint_class: ConstraintClass
    key: BookingKey
    query: Query
    session: int | None
    queued_at: float

    @property
    def number(self) -> int:
        """Counts those ever parked, from 1."""
        return self.order.number


class Blockers(NamedTuple):
    """Whom a lane waits for: none of the spots has room, as long as the fleet is the same.

    fleet_version: see `Router`. sweep: the last one in which its head was picked for, in vain.
    is_gated: see `Room.is_gated`.
    """

    fleet_version: int
    slots: frozenset[RankCapacity]
    rescan_number: int = 0
    is_gated: bool = False


@dataclass(slots=True, eq=False)
class _ClassQueue:
    """The parked of one lane, in order. is_seen: its head was looked at since the fleet changed."""

    blockers: Blockers
    is_clean: bool = True
    entries: list[tuple[QueueOrder, QueuedRequest]] = field(default_factory=list)

    @property
    def head(self) -> QueueOrder:
        return self.entries[0][0]


class AdmissionQueue:
    """All who wait at one router. Times are seconds of one clock."""

    def __init__(self, policy: QueueSettings = NO_QUEUE) -> None:
        self.policy = policy
        self._class_queues: dict[ConstraintClass, _ClassQueue] = {}
        self._queued: dict[BookingKey, QueuedRequest] = {}  # In order of parking.
        # Those who wait because their session is bound.
        self._queued_by_session: dict[SessionName, dict[BookingKey, QueuedRequest]] = {}
        # The heads of the lanes that wait for each spot, as heaps; among them some that do no more.
        self._heads_by_slot: dict[RankCapacity, list[_ClassHead]] = {}
        # Likewise those of the lanes that are unseen, by model.
        self._dirty_heads_by_model: dict[str, list[_ClassHead]] = {}
        self._last_number = 0
        self.tokens = 0  # Prompt tokens of the parked.

    def __len__(self) -> int:
        return len(self._queued)

    def has_backlog(self, constraint_class: ConstraintClass) -> bool:
        """Whether somebody waits for the same workers."""
        return constraint_class in self._class_queues

    def overtakes(self, order: QueueOrder, model: str, slot: RankCapacity) -> bool:
        """Whether one of that order that took the room there would overtake one who waits for it.

        Whoever was not looked at since the fleet changed may be waiting for any spot of its model.
        """
        at_slot = _first_valid(
            self._heads_by_slot.get(slot), lambda head: self._is_current_head(head, slot)
        )
        dirty = _first_valid(self._dirty_heads_by_model.get(model), self._is_dirty_head)
        return any(first is not None and first < order for first in (at_slot, dirty))

    def order(self, query: Query, now: float, cached_tokens: int = 0) -> QueueOrder:
        """That of a newcomer that were parked now. cached_tokens: as for `enqueue`."""
        return _queue_order(self.policy.policy, query, now, cached_tokens, self._last_number + 1)

    def mark_all_dirty(self) -> None:
        """The fleet has changed: for whom anybody waits must be looked at anew."""
        for class_queue in self._class_queues.values():
            class_queue.is_clean = False
        self._rebuild_dirty_heads()

    def enqueue(
        self,
        query: Query,
        key: BookingKey,
        now: float,
        *,
        blockers: Blockers,
        constraint_class: ConstraintClass | None = None,
        session: int | None = None,
        cached_tokens: int = 0,
    ) -> QueuedRequest:
        """Add one at its place. lane: that of the query without a session, if not given.
        cached_tokens: the most that an eligible worker has of its prompt.

        Raises Overloaded (QUEUE_FULL) whose metadata name the limit that is reached: limit_kind
        (requests or tokens), current, limit.
        """
        assert key not in self._queued, "who waits already must be withdrawn first"
        self._check_limits(query.model)
        self._last_number += 1
        order = _queue_order(self.policy.policy, query, now, cached_tokens, self._last_number)
        queued = QueuedRequest(
            order, constraint_class or constraint_class_of(query), key, query, session, now
        )
        self._insert(queued, blockers)
        self._queued[key] = queued
        self.tokens += query.total_tokens
        return queued

    def withdraw(self, key: BookingKey) -> QueuedRequest | None:
        """Take one out, for whatever reason; None if it does not wait."""
        queued = self._queued.pop(key, None)
        if queued is None:
            return None
        self._remove(queued)
        self.tokens -= queued.query.total_tokens
        return queued

    def withdraw_session(self, session: int) -> list[QueuedRequest]:
        """Take out all that a session has parked."""
        return self._withdraw_all([p for p in self._queued.values() if p.session == session])

    def pop_overdue(self, now: float) -> list[QueuedRequest]:
        """Take out all that have waited for `wait_max_s`."""
        overdue_requests = []
        for queued in self._queued.values():
            if now - queued.queued_at < self.policy.wait_max_s:
                break
            overdue_requests.append(queued)
        return self._withdraw_all(overdue_requests)

    def clear(self) -> list[QueuedRequest]:
        """Take out all."""
        return self._withdraw_all(list(self._queued.values()))

    def heads(self) -> Iterator[QueuedRequest]:
        """The first of each lane, best first.

        One that is withdrawn, or goes to another lane, before the next is asked for is followed by
        the next of its lane; one that stays holds its lane up.
        """
        best = [class_queue.entries[0] for class_queue in self._class_queues.values()]
        heapify(best)
        while best:
            _, queued = heappop(best)
            constraint_class = queued.constraint_class
            yield queued
            class_queue = self._class_queues.get(constraint_class)
            if class_queue is not None and class_queue.entries[0][1] is not queued:
                heappush(best, class_queue.entries[0])

    def blockers(self, constraint_class: ConstraintClass) -> Blockers:
        """Whom a lane waits for, as far as was seen."""
        return self._class_queues[constraint_class].blockers

    def mark_blocked(
        self, queued: QueuedRequest, constraint_class: ConstraintClass, blockers: Blockers
    ) -> None:
        """A lane's head was looked at, and must wait; in `constraint_class`, if that is another
        one by now."""
        if constraint_class != queued.constraint_class:
            self._remove(queued)
            queued.constraint_class = constraint_class
            self._insert(queued, blockers)
            return
        class_queue = self._class_queues[constraint_class]
        class_queue.is_clean = True
        added_slots = blockers.slots - class_queue.blockers.slots
        class_queue.blockers = blockers
        self._push_head(constraint_class, class_queue, added_slots)

    def has_queued_for_session(self, session: SessionName) -> bool:
        """Whether somebody waits because that session is bound."""
        return session in self._queued_by_session

    def bound(self, session: SessionName) -> list[QueuedRequest]:
        """Those who wait because that session is bound, best first."""
        return sorted(self._queued_by_session.get(session, {}).values(), key=attrgetter("order"))

    @property
    def next_overdue_at(self) -> float:
        """When the first of all will have waited for `wait_max_s`: inf if nobody waits."""
        first = next(iter(self._queued.values()), None)
        return math.inf if first is None else first.queued_at + self.policy.wait_max_s

    # Spots.

    def has_waiters(self, slot: RankCapacity) -> bool:
        """Whether somebody may wait for it: never wrongly False."""
        return slot in self._heads_by_slot

    @property
    def slots(self) -> list[RankCapacity]:
        """Those that somebody may wait for."""
        return list(self._heads_by_slot)

    def queued_heads_at(self, slot: RankCapacity) -> Generator[QueuedRequest, None, None]:
        """The heads of the lanes that wait for it, best first, as `heads` goes on from one to the
        next.
        """
        yielded: set[_ClassHead] = set()
        try:
            while heap := self._heads_by_slot.get(slot):
                head = heappop(heap)
                if head not in yielded and self._is_current_head(head, slot):
                    yielded.add(head)
                    yield self._class_queues[head[1]].entries[0][1]
        finally:
            current_heads = [head for head in yielded if self._is_current_head(head, slot)]
            for head in current_heads:
                heappush(self._heads_by_slot.setdefault(slot, []), head)
            if not current_heads and not self._heads_by_slot.get(slot):
                self._heads_by_slot.pop(slot, None)

    def drop_stale_slots(self) -> None:
        """Forget the spots that nobody waits for any more."""
        for slot in self.slots:
            self._drop_stale_heads(slot)

    def _insert(self, queued: QueuedRequest, blockers: Blockers) -> None:
        class_queue = self._class_queues.get(queued.constraint_class)
        if class_queue is None:
            class_queue = self._class_queues[queued.constraint_class] = _ClassQueue(blockers)
        insort(class_queue.entries, (queued.order, queued))
        if queued.constraint_class.placements:
            self._queued_by_session.setdefault(_session_of(queued.query), {})[queued.key] = queued
        if class_queue.head is queued.order:
            self._push_head(queued.constraint_class, class_queue, class_queue.blockers.slots)

    def _remove(self, queued: QueuedRequest) -> None:
        class_queue = self._class_queues[queued.constraint_class]
        was_head = class_queue.head is queued.order
        del class_queue.entries[bisect_left(class_queue.entries, (queued.order,))]
        if queued.constraint_class.placements:
            queued_for_session = self._queued_by_session[session := _session_of(queued.query)]
            del queued_for_session[queued.key]
            if not queued_for_session:
                del self._queued_by_session[session]
        if not class_queue.entries:
            del self._class_queues[queued.constraint_class]
            if not self._class_queues:
                self._heads_by_slot.clear()
                self._dirty_heads_by_model.clear()
        elif was_head:
            self._push_head(queued.constraint_class, class_queue, class_queue.blockers.slots)

    def _push_head(
        self,
        constraint_class: ConstraintClass,
        class_queue: _ClassQueue,
        slots: Iterable[RankCapacity],
    ) -> None:
        """Let the lane be found at these by its head."""
        head_entry = class_queue.head, constraint_class
        heap_max = 2 * len(self._class_queues) + 16
        for slot in slots:
            heap = self._heads_by_slot.setdefault(slot, [])
            heappush(heap, head_entry)
            if len(heap) > heap_max:
                self._drop_stale_heads(slot)
        if not class_queue.is_clean:
            heap = self._dirty_heads_by_model[constraint_class.model]
            heappush(heap, head_entry)
            if len(heap) > heap_max:
                self._rebuild_dirty_heads()

    def _is_current_head(self, head_entry: _ClassHead, slot: RankCapacity) -> bool:
        order, constraint_class = head_entry
        class_queue = self._class_queues.get(constraint_class)
        return (
            class_queue is not None
            and class_queue.head == order
            and slot in class_queue.blockers.slots
        )

    def _is_dirty_head(self, head_entry: _ClassHead) -> bool:
        order, constraint_class = head_entry
        class_queue = self._class_queues.get(constraint_class)
        return class_queue is not None and class_queue.head == order and not class_queue.is_clean

    def _rebuild_dirty_heads(self) -> None:
        self._dirty_heads_by_model = {}
        for constraint_class, class_queue in self._class_queues.items():
            if not class_queue.is_clean:
                self._dirty_heads_by_model.setdefault(constraint_class.model, []).append(
                    (class_queue.head, constraint_class)
                )
        for heap in self._dirty_heads_by_model.values():
            heapify(heap)

    def _drop_stale_heads(self, slot: RankCapacity) -> None:
        heap = self._heads_by_slot[slot]
        heap[:] = {head_entry for head_entry in heap if self._is_current_head(head_entry, slot)}
        heapify(heap)
        if not heap:
            del self._heads_by_slot[slot]

    def _withdraw_all(self, queued: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        for one in queued:
            self.withdraw(one.key)
        return list(queued)

    def _check_limits(self, model: str) -> None:
        limits = (
            ("requests", len(self._queued), self.policy.requests_max),
            ("tokens", self.tokens, self.policy.tokens_max),
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


def constraint_class_of(query: Query, placements: tuple[Placement, ...] = ()) -> ConstraintClass:
    """Where the query waits. places: see Lane."""
    routing, excluded = query.routing, query.excluded_worker_ids
    if routing is None:
        return ConstraintClass(
            query.model, None, None, None, None, None, None, frozenset(), "", excluded, placements
        )
    constraints = routing.routing_constraints
    return ConstraintClass(
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
        placements,
    )


def _session_of(query: Query) -> SessionName:
    routing = query.routing
    assert routing is not None, "who waits for a session's place names the session"
    assert routing.session_control is not None
    return SessionName(query.model, routing.session_control.session_id, routing.lora_name or "")


def _first_valid(
    heap: list[_ClassHead] | None, is_valid: Callable[[_ClassHead], bool]
) -> QueueOrder | None:
    """The first that counts; those before it are dropped."""
    while heap:
        if is_valid(heap[0]):
            return heap[0][0]
        heappop(heap)
    return None


def queue_timeout_error(queued: QueuedRequest, waited_s: float) -> Overloaded:
    """Why one who waited too long is turned away."""
    return Overloaded(
        RETRY_AFTER_S,
        f"no worker had room for the prompt within {waited_s:.0f} s",
        reason="QUEUE_TIMEOUT",
        metadata={"model": queued.query.model},
    )


def _queue_order(
    policy: QueuePolicy, query: Query, now: float, cached_tokens: int, number: int
) -> QueueOrder:
    routing = query.routing
    jump = max(0.0, routing.priority_jump or 0.0) if routing is not None else 0.0
    arrival = now - query.waited_s
    if policy == "wspt":
        key = (1.0 + jump) / max(1, query.total_tokens - cached_tokens)
    else:
        key = jump - arrival if policy == "fcfs" else jump + arrival
    return QueueOrder(-query.strict_priority, -key, number)

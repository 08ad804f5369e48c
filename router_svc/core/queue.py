"""The admission queue: who waits for a worker with room for a prompt, and who goes first (pure).

A request is parked if those who may wait for the same workers already do, or if every worker that
may compute its prompt has more than `threshold` batches of prompt tokens before it (see
`busy.prefill_busy`). Whoever is parked has booked nothing.

Order, least first: (-strict_priority, -key, number of parking), where with jump = max(0,
priority_jump) and the time of arrival at the frontend, both in seconds,

    fcfs  key = jump - arrival
    lcfs  key = jump + arrival
    wspt  key = (1 + jump) / max(1, total_tokens - most tokens that an eligible worker has cached)

Keys as NVIDIA Dynamo 1.6 documents them. Arrival counts, not parking: who is routed again after a
failure keeps its place.

Requests wait in *lanes*: those of one lane may run on exactly the same workers, so that its head
speaks for all of it (head of line), and who is pinned to a busy worker holds up nobody else. Heads
of different lanes compete by the same order.

Invariants: a key is parked at most once; every lane has somebody in it and stands in order;
`tokens` is the sum over the parked; nobody is parked beyond `requests_max`, nor once `tokens_max`
is reached.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from common.errors import Overloaded
from common.preprocessed import SessionControl
from router_svc.core.fleet import Candidate
from router_svc.core.load import BookingKey
from router_svc.core.query import Query

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


class Lane(NamedTuple):
    """All of a query that decides who is eligible for it; equal lanes have equal workers."""

    model: str
    worker_id: int | None
    decode_worker_id: int | None
    dp_rank: int | None
    prefill_worker_id: int | None
    prefill_dp_rank: int | None
    allowed_worker_ids: frozenset[int] | None
    required_taints: frozenset[str]
    lora_name: str
    session: SessionControl | None
    excluded_worker_ids: frozenset[int]


class Order(NamedTuple):
    """Least first."""

    level: int
    key: float
    number: int


@dataclass(frozen=True, slots=True)
class Parked:
    """One who waits. parked_at: `now` then, seconds. order: unique to it."""

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
    """Whom a lane waits for: all of them are busy, as long as the fleet is the same.

    fleet_version: see `Router`. sweep: the last one in which its head was picked for, in vain.
    """

    fleet_version: int
    workers: Sequence[Candidate]
    sweep: int = 0


@dataclass(slots=True)
class _Line:
    """The parked of one lane, in order."""

    hindrance: Hindrance
    entries: list[tuple[Order, Parked]] = field(default_factory=list)


class AdmissionQueue:
    """All who wait at one router. Times are seconds of one clock."""

    def __init__(self, rules: QueueRules = NO_QUEUE) -> None:
        self.rules = rules
        self._lines: dict[Lane, _Line] = {}
        self._parked: dict[BookingKey, Parked] = {}  # In order of parking.
        self._number = 0
        self.tokens = 0  # Prompt tokens of the parked.

    def __len__(self) -> int:
        return len(self._parked)

    def has_backlog(self, query: Query) -> bool:
        """Whether somebody waits for the same workers."""
        return bool(self._lines) and lane_of(query) in self._lines

    def park(
        self,
        query: Query,
        key: BookingKey,
        now: float,
        *,
        hindrance: Hindrance,
        session: int | None = None,
        cached_tokens: int = 0,
    ) -> Parked:
        """Add one at its place. cached_tokens: the most that an eligible worker has of its prompt.

        Raises Overloaded (QUEUE_FULL) whose metadata name the limit that is reached: limit_kind
        (requests or tokens), current, limit.
        """
        assert key not in self._parked, "who waits already must be withdrawn first"
        self._check_room(query.model)
        self._number += 1
        lane = lane_of(query)
        order = _order(self.rules.policy, query, now, cached_tokens, self._number)
        parked = Parked(order, lane, key, query, session, now)
        line = self._lines.get(lane)
        if line is None:
            line = self._lines[lane] = _Line(hindrance)
        insort(line.entries, (order, parked))
        self._parked[key] = parked
        self.tokens += query.total_tokens
        return parked

    def withdraw(self, key: BookingKey) -> Parked | None:
        """Take one out, for whatever reason; None if it does not wait."""
        parked = self._parked.pop(key, None)
        if parked is None:
            return None
        entries = self._lines[parked.lane].entries
        del entries[bisect_left(entries, (parked.order,))]
        if not entries:
            del self._lines[parked.lane]
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

        One that is withdrawn before the next is asked for is followed by the next of its lane; one
        that stays holds its lane up.
        """
        best = [line.entries[0] for line in self._lines.values()]
        heapify(best)
        while best:
            _, parked = heappop(best)
            yield parked
            line = self._lines.get(parked.lane)
            if line is not None and self._parked.get(parked.key) is not parked:
                heappush(best, line.entries[0])

    def hindrance(self, lane: Lane) -> Hindrance:
        """Whom a lane waits for, as far as was seen."""
        return self._lines[lane].hindrance

    def hinder(self, lane: Lane, hindrance: Hindrance) -> None:
        """A lane's head was looked at, and must wait."""
        self._lines[lane].hindrance = hindrance

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


def lane_of(query: Query) -> Lane:
    """Where the query waits; see Lane."""
    routing, excluded = query.routing, query.excluded_worker_ids
    if routing is None:
        return Lane(
            query.model, None, None, None, None, None, None, frozenset(), "", None, excluded
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
        routing.session_control,
        excluded,
    )


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

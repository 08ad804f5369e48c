"""The admission queue: requests that wait for a rank with capacity for a prompt (pure).

A request is queued, without a booking, if every rank that may compute its prompt is prefill-busy
(`eligibility.is_prefill_busy`), or requests of its constraint class are queued, or a rescan is due.

Order, least first: (-strict_priority, -key, enqueue number), background requests after all others,
where with
jump = max(0, priority_jump) and arrival at the frontend, both in seconds,

    fcfs  key = jump - (arrival + ttft_target, or wait_max_s for a request without a target)
    lcfs  key = jump + arrival
    wspt  key = (1 + jump) / max(1, total_tokens - most tokens that an eligible rank has cached)

Without targets, fcfs is the order of arrival; with targets, the earliest deadline goes first, and a
request without one is not starved. Keys without targets as NVIDIA Dynamo 1.6 documents them.
Arrival counts, not the enqueue time: a request that is routed again after a failure keeps its
position.

Requests of one *constraint class* may run on exactly the same ranks, so the head is tried for all
of them (head-of-line blocking), and a request that is pinned to a busy worker delays no other
class. Background requests are classes of their own, which wait also without a threshold.
Preferences (a soft session, a preferred adapter) make no class.

A class is *dirty* if its head may have a rank with capacity now. A rescan tries the dirty classes
in rounds, in the queue order of their heads: a class stays in its round while its heads leave the
queue, and is clean once one stays, until capacity is freed for its model, the fleet changes, or the
periodic rescan. A class that becomes dirty during a round is tried in the next one, so that a
rescan reaches every class; across classes the order is approximate.

*Tenants* share by the prompt tokens that were admitted, divided by their weights: the requests of
each are classes of their own, and a round tries the classes of the tenant with the least tokens
first, within a level of strict priority. A tenant starts at the least of the others when its
first request waits; what was admitted is forgotten once none waits. Background requests have shares
of their own: what a tenant runs on idle capacity delays none of its others.

Invariants: a key is queued at most once; every class has a request and is in order; `tokens` is the
sum over the queued requests; none is queued beyond `requests_max`, nor once `tokens_max` is
reached. Background requests take no place of others: they are not counted for those.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import Literal, NamedTuple

from common.errors import Overloaded
from common.request.placement import Placement, Query
from common.request.preprocessed import RoutingHints
from router_svc.core.booking import BookingKey, SessionName

QueuePolicy = Literal["fcfs", "wspt", "lcfs"]

# Retry hint for rejected requests: about the time in which a prompt is computed.
RETRY_AFTER_S = 1.0
# Of background requests in the queue order: after those without a strict priority, which have 0.
BACKGROUND_LEVEL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """threshold: batches of prompt tokens above which a rank is prefill-busy; None: no queue.
    tokens_max: prompt tokens queued; the request that crosses it is accepted. wait_max_s: longest
    wait at this router, from the enqueue time: time since arrival contains the run time of earlier
    attempts.
    """

    threshold: float | None = None
    policy: QueuePolicy = "fcfs"
    requests_max: int = 4096
    tokens_max: int = 64_000_000
    wait_max_s: float = 60.0


NO_QUEUE = QueueSettings()
_NO_HINTS = RoutingHints()


class ConstraintClass(NamedTuple):
    """The tenant of a query, and what decides its ranks. placements: of a hard session."""

    tenant: str
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
    is_background: bool


class _Account(NamedTuple):
    """Whose admitted tokens are counted together."""

    tenant: str
    is_background: bool


class _RoundEntry(NamedTuple):
    """When a class is tried, least first. admitted: tokens of its tenant, by weight."""

    level: int
    admitted: float
    order: QueueOrder
    constraint_class: ConstraintClass


class QueueOrder(NamedTuple):
    """Least first. number: counts enqueued requests from 1, so that no two orders are equal."""

    level: int
    key: float
    number: int


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """queued_at: enqueue time, seconds. constraint_class: changes if its session moves.
    uncached_tokens: prompt tokens to compute, by the caches when it was queued."""

    order: QueueOrder
    constraint_class: ConstraintClass
    key: BookingKey
    query: Query
    session: int | None
    queued_at: float
    uncached_tokens: int = 0

    @property
    def arrived_at(self) -> float:
        """Arrival at the frontend in seconds."""
        return self.queued_at - self.query.waited_ms / 1000


class AdmissionQueue:
    """All queued requests of one router. Times are seconds of one clock."""

    def __init__(self, settings: QueueSettings = NO_QUEUE) -> None:
        self.settings = settings
        self.tokens = 0  # Prompt tokens of the queued requests.
        self._queued: dict[BookingKey, QueuedRequest] = {}  # In order of enqueuing.
        self._classes: dict[ConstraintClass, list[tuple[QueueOrder, QueuedRequest]]] = {}
        self._count_by_model: Counter[str] = Counter()
        self._keys_by_session: dict[SessionName, set[BookingKey]] = {}
        self._dirty_models: set[str] = set()  # Each class of these is dirty.
        self._dirty_classes: set[ConstraintClass] = set()
        # A heap of the dirty classes of the present round, with the heads that they had.
        self._round: list[_RoundEntry] = []
        self._last_number = 0
        self._count_by_account: Counter[_Account] = Counter()
        self._admitted_by_account: dict[_Account, float] = {}
        self._background_requests = self._background_tokens = 0

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Yields the queued requests, the oldest first."""
        return iter(self._queued.values())

    def enqueue(
        self,
        query: Query,
        key: BookingKey,
        now: float,
        *,
        constraint_class: ConstraintClass | None = None,
        session: int | None = None,
        cached_tokens: int = 0,
    ) -> QueuedRequest:
        """Adds a request. constraint_class: None for a query without a session. cached_tokens: the
        most prompt tokens that an eligible rank has cached. Raises Overloaded (QUEUE_FULL), with
        the limit reached in its metadata: limit_kind (requests or tokens), current, limit.
        """
        assert key not in self._queued, "a queued key must be withdrawn first"
        self._check_limits(query)
        self._last_number += 1
        order = _queue_order(self.settings, query, now, cached_tokens, self._last_number)
        in_class = constraint_class or constraint_class_of(query)
        uncached = max(0, query.total_tokens - cached_tokens)
        queued = QueuedRequest(order, in_class, key, query, session, now, uncached)
        self._insert(queued)
        self._queued[key] = queued
        self._count_by_model[query.model] += 1
        self._add_account(_account_of(query))
        if (name := _session_of(query)) is not None:
            self._keys_by_session.setdefault(name, set()).add(key)
        self.tokens += query.total_tokens
        if query.is_background:
            self._background_requests += 1
            self._background_tokens += query.total_tokens
        return queued

    def withdraw(self, key: BookingKey) -> QueuedRequest | None:
        """Removes a request; None if it is not queued."""
        queued = self._queued.pop(key, None)
        if queued is None:
            return None
        self._remove(queued)
        model = queued.query.model
        self._count_by_model[model] -= 1
        if not self._count_by_model[model]:
            del self._count_by_model[model]
            self._dirty_models.discard(model)
        self._remove_account(_account_of(queued.query))
        if (name := _session_of(queued.query)) is not None:
            self._keys_by_session[name].remove(key)
            if not self._keys_by_session[name]:
                del self._keys_by_session[name]
        self.tokens -= queued.query.total_tokens
        if queued.query.is_background:
            self._background_requests -= 1
            self._background_tokens -= queued.query.total_tokens
        return queued

    def tokens_ahead(self, query: Query, now: float, cached_tokens: int) -> float:
        """Returns the prompt tokens to compute that leave the queue before a request that is queued
        now: those of its tenant with an earlier order, then what other tenants get meanwhile by
        their shares, and what waits at higher levels. Takes time for each queued request.
        """
        number = self._last_number + 1
        order = _queue_order(self.settings, query, now, cached_tokens, number)
        own, higher, own_account = 0, 0, _account_of(query)
        others: dict[_Account, tuple[int, float]] = {}
        for constraint_class, entries in self._classes.items():
            if constraint_class.model != query.model:
                continue
            account = _Account(constraint_class.tenant, constraint_class.is_background)
            tokens, is_own = 0, account == own_account
            for other, queued in entries:
                is_behind = other > order if is_own else other.level > order.level
                if is_behind:
                    break
                if other.level < order.level and not is_own:
                    higher += queued.uncached_tokens
                else:
                    tokens += queued.uncached_tokens
            if is_own:
                own += tokens
            else:
                known, _ = others.get(account, (0, 1.0))
                others[account] = known + tokens, entries[0][1].query.tenant_weight
        admitted = self._admitted_by_account
        share = admitted.get(own_account, 0.0) + own / query.tenant_weight
        ahead = float(own + higher)
        for account, (waiting, weight) in others.items():
            due = (share - admitted.get(account, 0.0)) * weight
            ahead += min(float(waiting), max(0.0, due))
        return ahead

    def oldest_wait_s(self, now: float) -> float:
        """Returns how long the oldest queued request has waited that is no background request; 0
        without one."""
        # A copy, since a scrape reads in another thread.
        waiting = (q for q in tuple(self._queued.values()) if not q.query.is_background)
        oldest = next(waiting, None)
        return 0.0 if oldest is None else max(0.0, now - oldest.queued_at)

    def withdraw_session(self, session: int) -> list[QueuedRequest]:
        return self._withdraw_all([p for p in self._queued.values() if p.session == session])

    def pop_overdue(self, now: float) -> list[QueuedRequest]:
        wait_max_s = self.settings.wait_max_s
        overdue = takewhile(lambda q: now - q.queued_at >= wait_max_s, self._queued.values())
        return self._withdraw_all(list(overdue))

    def clear(self) -> list[QueuedRequest]:
        return self._withdraw_all(list(self._queued.values()))

    # Constraint classes.

    def must_wait(self, constraint_class: ConstraintClass) -> bool:
        """Returns whether a new request has to queue although a rank has capacity: its class has a
        backlog, or no rescan has offered freed capacity to the queued requests of its model yet.
        """
        model = constraint_class.model
        return (
            constraint_class in self._classes
            or model in self._dirty_models
            or any(entry.constraint_class.model == model for entry in self._round)
            or any(dirty.model == model for dirty in self._dirty_classes)
        )

    @property
    def has_dirty(self) -> bool:
        return bool(self._dirty_models or self._dirty_classes or self._round)

    def mark_dirty(self, constraint_class: ConstraintClass) -> None:
        """Marks a class: its head may have a rank with capacity."""
        if constraint_class in self._classes:
            self._dirty_classes.add(constraint_class)

    def mark_model_dirty(self, model: str) -> None:
        """Marks the classes of a model, after a worker of it freed capacity."""
        if model in self._count_by_model:
            self._dirty_models.add(model)

    def mark_all_dirty(self) -> None:
        """Marks all classes, after the fleet changed or time passed, by which reports expire."""
        self._dirty_models.update(self._count_by_model)

    def next_dirty(self) -> QueuedRequest | None:
        """Returns the head to try next, after marking its class clean; None if no class is
        dirty."""
        while self.has_dirty:
            if not self._round:
                self._start_round()
            elif (entries := self._classes.get(heappop(self._round).constraint_class)) is not None:
                return entries[0][1]
        return None

    def continue_round(self, constraint_class: ConstraintClass) -> None:
        """Adds a class to the round again: its head of `next_dirty` has left the queue."""
        if constraint_class in self._classes:
            heappush(self._round, self._round_entry(constraint_class))

    def admitted(self, query: Query) -> None:
        """Counts a request that was placed, from the queue or past it."""
        if self._count(query.is_background):
            tokens = max(1, query.total_tokens) / query.tenant_weight
            account = _account_of(query)
            admitted = self._admitted_by_account.get(account, 0.0)
            self._admitted_by_account[account] = admitted + tokens

    def reclassify(self, queued: QueuedRequest, constraint_class: ConstraintClass) -> None:
        """Moves a request to another class, after its session moved; both classes are dirty."""
        old_class = queued.constraint_class
        self._remove(queued)
        queued.constraint_class = constraint_class
        self._insert(queued)
        self.mark_dirty(old_class)
        self.mark_dirty(constraint_class)

    def of_session(self, name: SessionName) -> list[QueuedRequest]:
        return [self._queued[key] for key in self._keys_by_session.get(name, ())]

    def _start_round(self) -> None:
        dirty = {c for c in self._dirty_classes if c in self._classes}
        if self._dirty_models:
            dirty.update(c for c in self._classes if c.model in self._dirty_models)
        self._dirty_classes.clear()
        self._dirty_models.clear()
        self._round = [self._round_entry(constraint_class) for constraint_class in dirty]
        heapify(self._round)

    def _round_entry(self, constraint_class: ConstraintClass) -> _RoundEntry:
        order = self._classes[constraint_class][0][0]
        account = _Account(constraint_class.tenant, constraint_class.is_background)
        admitted = self._admitted_by_account.get(account, 0.0)
        return _RoundEntry(order.level, admitted, order, constraint_class)

    def _count(self, is_background: bool) -> int:
        """Returns the queued requests that are background requests, or those that are not."""
        background = self._background_requests
        return background if is_background else len(self._queued) - background

    def _add_account(self, account: _Account) -> None:
        if account not in self._count_by_account:
            admitted = self._admitted_by_account
            others = [
                admitted.get(other, 0.0)
                for other in self._count_by_account
                if other.is_background == account.is_background
            ]
            admitted[account] = max(admitted.get(account, 0.0), min(others, default=0.0))
        self._count_by_account[account] += 1

    def _remove_account(self, account: _Account) -> None:
        self._count_by_account[account] -= 1
        if self._count_by_account[account]:
            return
        del self._count_by_account[account]
        is_background = account.is_background
        if not any(other.is_background == is_background for other in self._count_by_account):
            admitted = self._admitted_by_account
            for other in [other for other in admitted if other.is_background == is_background]:
                del admitted[other]

    def _insert(self, queued: QueuedRequest) -> None:
        entries = self._classes.setdefault(queued.constraint_class, [])
        insort(entries, (queued.order, queued))

    def _remove(self, queued: QueuedRequest) -> None:
        entries = self._classes[queued.constraint_class]
        del entries[bisect_left(entries, (queued.order,))]
        if not entries:
            del self._classes[queued.constraint_class]
            self._dirty_classes.discard(queued.constraint_class)

    def _withdraw_all(self, queued: list[QueuedRequest]) -> list[QueuedRequest]:
        for request in queued:
            self.withdraw(request.key)
        return queued

    def _check_limits(self, query: Query) -> None:
        requests, tokens, model = len(self._queued), self.tokens, query.model
        if not query.is_background:
            requests -= self._background_requests
            tokens -= self._background_tokens
        limits = (
            ("requests", "requests", requests, self.settings.requests_max),
            ("tokens", "prompt tokens", tokens, self.settings.tokens_max),
        )
        for kind, unit, current, limit in limits:
            if current >= limit:
                raise Overloaded(
                    RETRY_AFTER_S,
                    f"router queue full: {current}/{limit} {unit}; retry after {RETRY_AFTER_S:g} s",
                    reason="QUEUE_FULL",
                    metadata={"model": model, "limit_kind": kind}
                    | {"current": str(current), "limit": str(limit)},
                )


def _account_of(query: Query) -> _Account:
    return _Account(query.tenant, query.is_background)


def constraint_class_of(query: Query, placements: tuple[Placement, ...] = ()) -> ConstraintClass:
    """Returns the class of a query. placements: see ConstraintClass."""
    routing, excluded = query.routing, query.excluded_worker_ids
    if routing is None:
        routing = _NO_HINTS
    constraints = routing.routing_constraints
    return ConstraintClass(
        query.tenant,
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
        query.is_background,
    )


def queue_timeout_error(queued: QueuedRequest, waited_s: float) -> Overloaded:
    return Overloaded(
        RETRY_AFTER_S,
        f"no worker had capacity for the prompt within {waited_s:.0f} s; retry after "
        f"{RETRY_AFTER_S:g} s",
        reason="QUEUE_TIMEOUT",
        metadata={"model": queued.query.model},
    )


def _session_of(query: Query) -> SessionName | None:
    routing = query.routing
    if routing is None or (control := routing.session_control) is None:
        return None
    return SessionName(query.model, control.session_id, routing.lora_name or "")


def _queue_order(
    settings: QueueSettings, query: Query, now: float, cached_tokens: int, number: int
) -> QueueOrder:
    routing = query.routing
    jump = max(0.0, routing.priority_jump or 0.0) if routing is not None else 0.0
    arrival = now - query.waited_ms / 1000
    match settings.policy:
        case "wspt":
            key = (1.0 + jump) / max(1, query.total_tokens - cached_tokens)
        case "lcfs":
            key = jump + arrival
        case "fcfs":
            target_ms = query.ttft_target_ms
            slack_s = settings.wait_max_s if target_ms is None else target_ms / 1000
            key = jump - (arrival + slack_s)
    level = BACKGROUND_LEVEL if query.is_background else -query.strict_priority
    return QueueOrder(level, -key, number)

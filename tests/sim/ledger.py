"""Independent checks of router decisions.

Checks by name: `session` (requests of a live session go to its placement); `queue` (queued requests
are served in order, and in time); `busy` (a busy worker gets no further requests); `overlap` (the
overlap of a decision is within what the index reports and what was routed there recently);
`departed` (a model is unavailable for a while after its last worker left, then unknown).

The expected state is derived here from requests and results only. Times are virtual seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from common.errors import MeshError, Unavailable, UnknownModel
from common.kv.hashing import hashes_from_bytes
from common.registry.instances import Instance, SnapshotDiff
from common.request.placement import Decision, Placement, Query
from common.request.preprocessed import RoutingHints, SessionAction
from router_svc.app import TICK_S
from router_svc.core.admission import ConstraintClass, QueuedRequest
from router_svc.core.booking import BookingKey
from router_svc.core.decision import DecisionRecord
from router_svc.core.eligibility import BusyLimits
from router_svc.core.fleet import GONE_MODEL_TTL_S
from router_svc.core.overlap import IndexSettings
from router_svc.core.policy import Policy
from router_svc.core.router import Router

# Approximate entries expire by the latest tick, and are dropped at one of the next.
APPROX_SLACK_S = TICK_S + 0.01
# A router's clock shows the same time in one turn of the loop, whatever it does.
CLOCK_TOLERANCE_S = 1e-9
# In an undisturbed mesh all routers have each other's decisions after this time.
SYNC_MAX_S = 1.5
# Idle sessions expire at the ticks of the router.
SESSION_EXPIRY_SLACK_S = 1.0 + 2 * TICK_S

ReportViolation = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class _SessionPlacement:
    """A placement of a session at some time, and the checker of the router that decided it."""

    at: float
    by: DecisionChecker
    worker: Placement
    prefill: Placement | None

    @property
    def placements(self) -> tuple[Placement, ...]:
        return (self.worker,) if self.prefill is None else (self.worker, self.prefill)


@dataclass(frozen=True, slots=True)
class _QueuedRequest:
    """A queued request. group: equal for requests that wait for the same workers; key: sort key by
    the queue's policy, larger first; None if the policy depends on caches.
    """

    query: Query
    at: float
    group: object
    key: float | None


class SessionHistory:
    """The session placements of all routers of a mesh, newest last.

    is_undisturbed: no fault has affected routers or their replication so far. used_at: when a
    request last ran at any router.
    """

    def __init__(self) -> None:
        self._bound: dict[tuple[str, str], list[_SessionPlacement]] = {}
        self._closed: dict[tuple[str, str], tuple[DecisionChecker, float]] = {}
        self.is_undisturbed = True
        self.used_at = float("-inf")

    def of(self, name: tuple[str, str]) -> list[_SessionPlacement]:
        """All placements of a session since it was last closed."""
        return self._bound.setdefault(name, [])

    def placement(
        self, name: tuple[str, str], decision_checker: DecisionChecker, now: float
    ) -> _SessionPlacement | None:
        """The certain placement of a session for one router; None if it is ambiguous.

        Routers replicate sessions. Of records made at about the same time either may win, and after
        a fault it is unknown which router has received which.
        """
        placements = self.of(name)
        if not placements:
            return None
        last = placements[-1]
        others = [
            one for one in placements if one.by is not last.by and last.at - one.at < SYNC_MAX_S
        ]
        by, at = self._closed.get(name, (last.by, 0.0))
        is_ambiguous = bool(others) or (by is not last.by and last.at - at < SYNC_MAX_S)
        if is_ambiguous or not (
            last.by is decision_checker or (self.is_undisturbed and now - last.at > SYNC_MAX_S)
        ):
            return None
        return last

    def close(self, name: tuple[str, str], by: DecisionChecker, now: float) -> None:
        """A decision of a router closed the session."""
        self._bound.pop(name, None)
        self._closed[name] = by, now


class DecisionChecker:
    """Checks the decisions of one router. violation: takes a check's name and a text. counts:
    events.

    sessions: those of all routers. policy, choice: the router's.
    """

    def __init__(
        self,
        violation: ReportViolation,
        counts: Counter[str],
        sessions: SessionHistory,
        policy: Policy,
        choice: IndexSettings,
    ) -> None:
        self._report_violation = violation
        self._counts = counts
        self._sessions = sessions
        self._policy = policy
        self._choice = choice
        self._waiting: dict[BookingKey, _QueuedRequest] = {}
        self._routed_blocks: dict[Placement, dict[tuple[str, int], float]] = {}
        self._last_approx_at = float("-inf")
        # Models that workers served, and when the last one was gone.
        self._models: dict[str, float | None] = {}

    # -- events of the router -------------------------------------------------------------------

    def updated(self, router: Router, changes: SnapshotDiff, now: float) -> None:
        """The fleet changed."""
        for instance in changes.left:
            if instance.service == "worker":
                for place in [p for p in self._routed_blocks if p.worker_id == instance.id]:
                    del self._routed_blocks[place]
        served = router.fleet.models
        for model in served:
            self._models[model] = None
        for model, gone_at in self._models.items():
            if gone_at is None and model not in served:
                self._models[model] = now

    def queued(self, query: Query, key: BookingKey, now: float) -> None:
        """A request was queued."""
        queued_request = _QueuedRequest(
            query, now, _eligibility_group(query), self._priority_key(query, now)
        )
        self._waiting[key] = queued_request
        self._counts["requests queued"] += 1

    def placed(
        self, router: Router, query: Query, key: BookingKey, record: DecisionRecord, now: float
    ) -> None:
        """A request was placed and booked, at once or after a wait."""
        mine = self._waiting.pop(key, None)
        if mine is None:
            ahead = list(self._still_waiting(router, _eligibility_group(query)))
            # Requests that wait for an earlier placement of their session are rescanned at a tick,
            # also if the session has the same placement again.
            if ahead and record.affinity in ("", "kept"):
                self._report_violation(
                    "queue", f"{key.request_id} was placed before {len(ahead)} queued requests"
                )
        else:
            self._check_order(router, key, mine)
        self._check_decision(router, query, record, now)

    def _check_order(self, router: Router, key: BookingKey, mine: _QueuedRequest) -> None:
        queued = router.queue._queued.get(key)  # None: it was requested again.
        constraint_class = None if queued is None else queued.constraint_class
        for name, other in self._still_waiting(router, mine.group, constraint_class):
            if other.query.strict_priority > mine.query.strict_priority:
                self._report_violation(
                    "queue",
                    f"{key.request_id} was placed before {name}, of a higher priority level",
                )
            elif other.query.strict_priority < mine.query.strict_priority:
                self._counts["levels passed"] += 1
            elif (
                mine.key is not None
                and other.key is not None
                and other.key > mine.key + CLOCK_TOLERANCE_S
            ):
                self._report_violation(
                    "queue", f"{key.request_id} was placed before {name}, which was ahead of it"
                )

    def refused(self, router: Router, query: Query, error: MeshError, now: float) -> None:
        """A request failed."""
        self._counts[f"refused: {error.reason}"] += 1
        if router.fleet.roles(query.model) or not router.fleet.has_snapshot:
            return
        gone_at = self._models.get(query.model)
        is_recent = gone_at is not None and now - gone_at < GONE_MODEL_TTL_S
        self._counts["models missed"] += is_recent
        self._counts["models forgotten"] += gone_at is not None and not is_recent
        if is_recent and not (isinstance(error, Unavailable) and error.retry_after_s):
            self._report_violation("departed", f"{query.model} left at {gone_at:.1f} s: {error!r}")
        if not is_recent and not isinstance(error, UnknownModel):
            self._report_violation(
                "departed", f"{query.model} is unknown, but the error is {error!r}"
            )

    # -- periodic checks ------------------------------------------------------------------------

    def check(self, router: Router, now: float) -> None:
        """No request is queued for too long."""
        if len(router.load_tracker):
            self._sessions.used_at = now
        wait_limit_s = self._policy.queue.wait_max_s + TICK_S + 0.1
        for name, queued_request in list(self._still_waiting(router, None)):
            if now - queued_request.at > wait_limit_s:
                self._report_violation(
                    "queue", f"{name} has waited for {now - queued_request.at:.1f} s"
                )

    def problems(self, router: Router, now: float) -> Iterator[str]:
        """State that the router should have dropped by now."""
        age_s, overlaps, choice = now - self._last_approx_at, router.overlaps, self._choice
        for index, limits in (
            (overlaps.approximate, choice.approximate),
            (overlaps.predicted, choice.predicted),
        ):
            is_due = limits is not None and age_s > limits.ttl_s + 2 * TICK_S
            if is_due and index is not None and index.blocks:
                yield f"{index.blocks} approximate entries are left after {age_s:.1f} s"
        idle_s = now - self._sessions.used_at
        if len(router.affinity) and idle_s > self._policy.session_ttl_s + SESSION_EXPIRY_SLACK_S:
            yield f"{len(router.affinity)} sessions are left after {idle_s:.1f} s"

    # -- decisions ------------------------------------------------------------------------------

    def _check_decision(
        self, router: Router, query: Query, record: DecisionRecord, now: float
    ) -> None:
        """Check a decision that was just made and booked."""
        self._counts[f"session {record.affinity}"] += bool(record.affinity)
        self._check_busy(router, record.decision, now)
        self._check_overlap(router, query, record.decision, now)
        routing = query.routing
        if routing is not None and routing.session_control is not None:
            self._check_session(router, query, record, now)

    def _check_session(
        self, router: Router, query: Query, record: DecisionRecord, now: float
    ) -> None:
        assert query.routing is not None, "a request with a session has routing hints"
        control = query.routing.session_control
        assert control is not None, "see above"
        name = (query.model, control.session_id)
        placements = self._sessions.of(name)
        mine = self._sessions.placement(name, self, now)
        decision = record.decision
        new_placement = _SessionPlacement(now, self, decision.worker, decision.prefill)
        if mine is not None and control.action is not SessionAction.OPEN:
            is_live = now - mine.at < self._policy.session_ttl_s
            is_present = all(router.fleet.has(place) for place in mine.placements)
            is_excluded = any(at.worker_id in query.excluded_worker_ids for at in mine.placements)
            is_bound = is_live and is_present and not is_excluded
            deviates = is_bound and _deviates(mine, new_placement)
            if deviates and not self._may_deviate(router, mine, record, now):
                message = (
                    f"{control.session_id} was at {_format_placement(mine)}, and "
                    f"went to {_format_placement(new_placement)}"
                )
                self._report_violation("session", message)
            if is_bound and new_placement.prefill is None and mine.worker == new_placement.worker:
                new_placement = replace(new_placement, prefill=mine.prefill)
            self._counts["sessions kept across"] += is_bound and mine.by is not self
        if control.action is SessionAction.CLOSE:
            self._sessions.close(name, self, now)
        else:
            placements.append(new_placement)
            self._sessions.used_at = now

    def _may_deviate(
        self, router: Router, placement: _SessionPlacement, record: DecisionRecord, now: float
    ) -> bool:
        """Whether a soft session's request may leave its own worker because that is busy."""
        policy = self._policy
        if policy.session_mode == "hard":
            return False
        if record.fallback:
            return True  # Its serving mode was full; the next one has other workers.
        load = _load_before(router, placement.prefill or placement.worker, record.decision, now)
        share, batch = policy.queue.threshold, load.worker.max_num_batched_tokens or 0
        is_full = share is not None and load.tokens > share * batch
        return is_full or not policy.busy.is_disabled

    def _check_busy(self, router: Router, decision: Decision, now: float) -> None:
        limits = self._policy.busy
        if limits.is_disabled:
            return
        worker = _load_before(router, decision.worker, decision, now)
        if decision.prefill is None:
            too_much = _too_many_tokens(worker, limits) or _too_many_blocks(worker, limits)
        else:
            prefill = _load_before(router, decision.prefill, decision, now)
            too_much = _too_many_tokens(prefill, limits) or _too_many_blocks(worker, limits)
        if too_much:
            self._report_violation("busy", f"{decision.worker.worker_id:x} was busy: {too_much}")

    def _check_overlap(self, router: Router, query: Query, decision: Decision, now: float) -> None:
        """The assumed overlap is within what the index reports and what was routed there."""
        place = decision.worker if decision.prefill is None else decision.prefill
        at = router.fleet.candidate(place)
        assert at is not None, "the worker of a decision is present"
        index_kind, limits = self._index_kind(at.instance), None
        if index_kind == "approx":
            limits = self._choice.approximate
        elif index_kind == "events":
            limits = self._choice.predicted
        indexed_blocks = 0
        if index_kind == "events" and query.prefix_hashes:
            index = router.overlaps._index
            rows = {row.source: row.disk_blocks for row in index.match(query)}
            indexed_blocks = next(
                (n for source, n in rows.items() if tuple(source) == tuple(place)), 0
            )
        lower_bound = upper_bound = indexed_blocks
        if limits is not None and query.prefix_hashes:
            hashes = hashes_from_bytes(query.prefix_hashes).tolist()
            routed_blocks = self._routed_blocks.setdefault(place, {})
            names = [(query.model, one) for one in hashes]
            upper_bound = max(
                indexed_blocks,
                _matched_depth(names, routed_blocks, now - limits.ttl_s - APPROX_SLACK_S),
            )
            if limits.blocks_max > 1 << 16:
                lower_bound = max(
                    indexed_blocks,
                    _matched_depth(names, routed_blocks, now - limits.ttl_s + CLOCK_TOLERANCE_S),
                )
            routed_blocks.update(dict.fromkeys(names, now))
            self._last_approx_at = now
        assumed_blocks = decision.overlap_blocks
        self._counts[f"blocks assumed: {index_kind}"] += assumed_blocks > indexed_blocks
        if not lower_bound <= assumed_blocks <= upper_bound:
            message = (
                f"{lower_bound} to {upper_bound} blocks of "
                f"{at.instance.stable_name}'s ({index_kind})"
            )
            self._report_violation(
                "overlap", f"the router assumed {assumed_blocks} blocks; expected {message}"
            )

    def _index_kind(self, worker: Instance) -> str:
        """The router's overlap source for a worker."""
        if self._choice.kind == "approx" and worker.kv_index == "events":
            return "approx"
        return worker.kv_index

    # -- the queue ------------------------------------------------------------------------------

    def _still_waiting(
        self, router: Router, group: object, constraint_class: ConstraintClass | None = None
    ) -> Iterator[tuple[str, _QueuedRequest]]:
        """Requests that are still queued. None: of every group, of any constraint class."""
        queued = router.queue._queued
        for key in [key for key in self._waiting if key not in queued]:
            del self._waiting[key]
        for key, queued_request in self._waiting.items():
            is_same_group = group == queued_request.group and _is_queued_correctly(
                router, queued[key]
            )
            if group is None or (
                is_same_group and constraint_class in (None, queued[key].constraint_class)
            ):
                yield key.request_id, queued_request

    def _priority_key(self, query: Query, now: float) -> float | None:
        jump = max(0.0, (query.routing and query.routing.priority_jump) or 0.0)
        arrived_at = now - query.waited_ms / 1000
        match self._policy.queue.policy:
            case "fcfs":
                return jump - arrived_at
            case "lcfs":
                return jump + arrived_at
        return None


def _deviates(placement: _SessionPlacement, new_placement: _SessionPlacement) -> bool:
    """Whether a request left the placement of its session."""
    splits = placement.prefill is not None and new_placement.prefill is not None
    return placement.worker != new_placement.worker or (
        splits and placement.prefill != new_placement.prefill
    )


def _is_queued_correctly(router: Router, queued: QueuedRequest) -> bool:
    """Whether the session placement is unchanged since queuing; else a tick rescans the request."""
    session_constraint = router.affinity.session_constraint(queued.query, router.fleet.has)
    return queued.constraint_class.placements == (
        () if session_constraint is None else session_constraint.required_placements
    )


def _eligibility_group(query: Query) -> object:
    """Equal for requests that may run on the same workers."""
    routing = replace(query.routing or RoutingHints(), priority_jump=None, priority=None)
    return (query.model, repr(routing), query.excluded_worker_ids)


def _matched_depth(
    names: Sequence[tuple[str, int]], routed_blocks: dict[tuple[str, int], float], since: float
) -> int:
    """Leading blocks that were touched after `since`."""
    for count, name in enumerate(names):
        if routed_blocks.get(name, float("-inf")) <= since:
            return count
    return len(names)


@dataclass(frozen=True, slots=True)
class _Load:
    worker: Instance
    tokens: int
    blocks: int


def _load_before(router: Router, place: Placement, decision: Decision, now: float) -> _Load:
    """The load of a rank before a decision was booked on it."""
    at = router.fleet.candidate(place)
    assert at is not None, "the worker of a decision is present"
    load = router.load_tracker.load(place, now)
    prefills = place == (decision.prefill or decision.worker)
    return _Load(
        at.instance,
        load.prefill_tokens - (decision.prefill_tokens if prefills else 0),
        load.decode_blocks - (decision.decode_blocks if place == decision.worker else 0),
    )


def _too_many_tokens(load: _Load, limits: BusyLimits) -> str:
    tokens, batch = load.tokens, load.worker.max_num_batched_tokens or 0
    upper_bound, share = limits.active_prefill_tokens, limits.active_prefill_tokens_frac
    if (upper_bound is not None and tokens > upper_bound) or (
        share is not None and tokens > share * batch
    ):
        return f"{tokens} tokens to compute"
    return ""


def _too_many_blocks(load: _Load, limits: BusyLimits) -> str:
    share = limits.active_decode_blocks
    if share is not None and load.blocks > share * (load.worker.total_kv_blocks or 0):
        return f"{load.blocks} blocks in use"
    return ""


def _format_placement(placement: _SessionPlacement) -> str:
    return " and ".join(f"{place.worker_id:x}" for place in placement.placements)

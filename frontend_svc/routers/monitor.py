"""Judges whether a router is responsive and which placements are overdue (pure).

A router is responsive if it answers. A router with a queue may keep a query there: while it queues
a request, heartbeats also count. Its hello does not: a router that crashes on a query sends a hello
after each restart. A router that does not know a model that this frontend sees served is not
responsive to that query: the frontend repeats the query, then leaves for another router.

A query that no router responds to for UNROUTED_AFTER_S is overdue: the frontend places it itself.
A background query is never overdue, and no sign of a router that does not respond: it waits there
for idle capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from common.errors import MeshError, UnknownModel, WorkerLost
from common.streams.silence import SESSION
from frontend_svc.request.placement_request import (
    UNKNOWN_ADAPTER,
    PlacementCallback,
    PlacementKey,
    PlacementRequest,
)
from frontend_svc.routers.choice import AVOID_FAILED_ROUTER_S

# Above the limit of SESSION: a router that hangs is no worse than one that is gone.
UNROUTED_AFTER_S = 3.0
# Time a new session has to respond to the queries that it was opened with.
SESSION_SETTLE_S = 1.0
# A query for an unknown model is repeated after REQUERY_DELAY_S. After STALE_ROUTER_AFTER_S the
# frontend leaves for another router. If there is none, it repeats the query at random intervals of
# up to REQUERY_DELAY_MAX_S, since each repetition sends a long prompt again.
REQUERY_DELAY_S = 0.1
STALE_ROUTER_AFTER_S = 0.5
REQUERY_DELAY_MAX_S = 1.0
# Errors of a router that has not seen the workers that could serve a query.
_UNKNOWN_MODEL_REASONS = frozenset({UnknownModel.kind, UNKNOWN_ADAPTER, "FLEET_UNKNOWN"})


class RunningTime(NamedTuple):
    """Loop time, and how long the loop had stalled before, both in seconds."""

    at: float
    stalled_before_s: float

    def since(self, earlier: RunningTime) -> float:
        return self.at - earlier.at - (self.stalled_before_s - earlier.stalled_before_s)


@dataclass(slots=True)
class PendingPlacement:
    """A query without a decision. unknown_since: since when routers report its model or adapter as
    unknown. requery_at: when it is, or was, sent again for that reason."""

    key: PlacementKey
    request: PlacementRequest
    callback: PlacementCallback
    since: RunningTime
    unknown_since: RunningTime | None = None
    requery_at: RunningTime | None = None

    @property
    def sent_at(self) -> RunningTime:
        return max(self.since, self.requery_at or self.since)

    @property
    def is_background(self) -> bool:
        return self.request.query.is_background

    def may_wait(self, now: RunningTime) -> bool:
        """Returns whether a router that responds may leave it open."""
        return self.is_background or self.is_reported_unknown(now)

    def is_reported_unknown(self, now: RunningTime) -> bool:
        """Returns whether the router reports it unknown. A repeated query without an immediate
        reply is queued, so its model is known."""
        return self.requery_at is not None and now.since(self.requery_at) < SESSION_SETTLE_S


def is_unknown_model(error: MeshError) -> bool:
    """Returns whether a router does not see any worker for a query."""
    return error.reason in _UNKNOWN_MODEL_REASONS


class RouterMonitor:
    """What a frontend has observed of its router. is_connected: a hello was acknowledged. is_stale:
    the frontend should leave this router, because it reports models as unknown that this frontend
    sees served."""

    def __init__(self, now: RunningTime) -> None:
        self.is_connected = False
        self.is_stale = False
        self._last_responsive_at = self._session_opened_at = now
        self._queue_wait_s: float | None = None
        self.left_stale_router_at = -math.inf

    def session_opening(self) -> None:
        self.is_stale = False

    def hello_received(self, now: RunningTime, queue_wait_s: float | None) -> None:
        """Records that the router acknowledged the session. queue_wait_s: how long it may queue a
        query; 0: it has no queue; None: unknown."""
        self.is_connected, self._session_opened_at = True, now
        self._queue_wait_s = queue_wait_s

    def frame_received(self, now: RunningTime, *, is_hello: bool, has_results: bool) -> None:
        """Records that a frame arrived; for a hello, called after `hello_received`."""
        if self._queue_wait_s != 0 and (has_results or not is_hello):
            self._last_responsive_at = now

    def check(self, now: RunningTime, pending: Iterable[PendingPlacement]) -> None:
        """Raises WorkerLost if the router leaves a query open for too long.

        pending: oldest first.
        """
        if self._queue_wait_s is None or not self.is_connected:
            return
        oldest = next((p for p in pending if not p.may_wait(now)), None)
        if oldest is None:
            return
        open_s = now.since(max(oldest.sent_at, self._session_opened_at))
        if open_s > self._queue_wait_s + SESSION.limit_s:
            text = f"the router has not answered a query for {open_s:.1f} s"
            raise WorkerLost(text, retryable=True)

    def unknown_reported(
        self, pending: PendingPlacement, now: RunningTime, *, has_other_router: bool, rng: Random
    ) -> float:
        """Records that the router reported a served model as unknown; returns when to repeat the
        query, a loop time. The router may see the workers at any moment, or
        another router may have seen them."""
        if pending.unknown_since is None or not pending.is_reported_unknown(now):
            pending.unknown_since = now
        is_overdue = now.since(pending.unknown_since) >= STALE_ROUTER_AFTER_S
        # Not back and forth all the time: possibly no router ever sees the workers.
        may_leave = now.at - self.left_stale_router_at >= AVOID_FAILED_ROUTER_S
        if is_overdue and may_leave and has_other_router:
            self.is_stale = True
        delay_s = REQUERY_DELAY_MAX_S * rng.uniform(0.5, 1.0) if is_overdue else REQUERY_DELAY_S
        pending.requery_at = now._replace(at=now.at + delay_s)
        return pending.requery_at.at

    def overdue(self, pending: Mapping[int, PendingPlacement], now: RunningTime) -> list[int]:
        """Returns the ids of the queries to place without a router."""
        is_settling = self.is_connected and now.since(self._session_opened_at) < SESSION_SETTLE_S
        found = []
        for query_id, placement in pending.items():
            if placement.is_background:
                continue
            is_unknown = placement.is_reported_unknown(now)
            since = max(placement.sent_at, self._last_responsive_at)
            if is_unknown and placement.unknown_since is not None:
                since = placement.unknown_since
            if now.since(since) >= UNROUTED_AFTER_S and (is_unknown or not is_settling):
                found.append(query_id)
        return found

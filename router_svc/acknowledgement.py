"""Which members this router acknowledges, and what it needs to be routable."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from common.registry.instances import Instance
from common.request.placement import Placement
from router_svc.core.fleet import Fleet
from router_svc.index_replica import IndexReplica

LOG = structlog.get_logger(__name__)

_ATTACHED = ("exact", "degraded")
# Requests are placed on a worker before it is in the index; they miss its cache at most.
INDEX_WAIT_S = 10.0


class Acknowledgement:
    """The view of one router.

    - follows_events: whether the router uses KV events.
    - clock: of decisions.
    """

    def __init__(
        self,
        fleet: Fleet,
        index: IndexReplica,
        clock: Callable[[], float],
        *,
        follows_events: bool,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._clock = clock
        self._follows_events = follows_events
        # By worker: since when it waits for the index only.
        self._waiting_since: dict[int, float] = {}

    def reason_against(self, member_id: int, is_leaving: bool) -> str:
        """Returns why the router does not use a member yet or, if it leaves, may still use it."""
        member = self._fleet.instance(member_id)
        if is_leaving or member is None:
            self._waiting_since.pop(member_id, None)
        if is_leaving:
            return "" if member is None else "discovery still shows it to this router"
        if member is None:
            return "discovery does not show it to this router"
        if member.service == "worker":
            return self._reason_against_worker(member)
        if member.service == "indexer" and self._index.indexer_id is None:
            return "the router follows no indexer"
        return ""

    def own_need(self, peer: Instance) -> str:
        """Returns why the router does not have its copy of the index, if there is an indexer."""
        if peer.service != "indexer" or self._index.is_caught_up:
            return ""
        return "the router has not received the index"

    def is_in_progress(self, peer: Instance) -> bool:
        """Returns whether the router receives the index."""
        return peer.service == "indexer" and self._index.indexer_id is not None

    def _reason_against_worker(self, worker: Instance) -> str:
        """Returns why requests cannot be placed on a worker, or not by its cache: for the second,
        it waits for INDEX_WAIT_S at most."""
        if not worker.model:
            return ""
        reason = ""
        for rank in range(worker.dp_rank_start, worker.dp_rank_start + worker.dp_size):
            placement = Placement(worker.id, rank)
            if not self._fleet.has(placement):
                return "it is not in the fleet of this router"
            # Without an indexer that the router follows, there is no index to be in.
            if worker.kv_index != "events" or not self._has_index:
                continue
            status = self._index.index_status(placement, self._clock())
            if status.state not in _ATTACHED and not reason:
                reason = f"its KV events are not in the index: {status.reason or status.state}"
        return self._limit_wait(worker, reason)

    def _limit_wait(self, worker: Instance, reason: str) -> str:
        """Returns the reason to wait for the index; "" once INDEX_WAIT_S have passed."""
        if not reason:
            self._waiting_since.pop(worker.id, None)
            return ""
        now = self._clock()
        if worker.id not in self._waiting_since:
            gone = [i for i in self._waiting_since if self._fleet.instance(i) is None]
            for worker_id in gone:
                del self._waiting_since[worker_id]
        if now - self._waiting_since.setdefault(worker.id, now) < INDEX_WAIT_S:
            return reason
        del self._waiting_since[worker.id]
        LOG.warning("acknowledged_without_index", worker_id=worker.id, reason=reason)
        return ""

    @property
    def _has_index(self) -> bool:
        return self._follows_events and self._index.indexer_id is not None

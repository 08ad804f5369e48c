"""Which members this router acknowledges, and what it needs to be routable."""

from __future__ import annotations

from collections.abc import Callable

from common.registry.instances import Instance
from common.request.placement import Placement
from router_svc.core.fleet import Fleet
from router_svc.index_replica import IndexReplica

_ATTACHED = ("exact", "degraded")


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

    def reason_against(self, member_id: int, is_leaving: bool) -> str:
        """Returns why the router does not use a member yet or, if it leaves, may still use it."""
        member = self._fleet.instance(member_id)
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
        """Returns why requests cannot be placed on a worker by its cache."""
        if not worker.model:
            return ""
        for rank in range(worker.dp_rank_start, worker.dp_rank_start + worker.dp_size):
            placement = Placement(worker.id, rank)
            if not self._fleet.has(placement):
                return "it is not in the fleet of this router"
            # Without an indexer that the router follows, there is no index to be in.
            if worker.kv_index != "events" or not self._has_index:
                continue
            status = self._index.index_status(placement, self._clock())
            if status.state not in _ATTACHED:
                return f"its KV events are not in the index: {status.reason or status.state}"
        return ""

    @property
    def _has_index(self) -> bool:
        return self._follows_events and self._index.indexer_id is not None

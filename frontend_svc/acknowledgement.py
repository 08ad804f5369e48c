"""Which members this frontend acknowledges, and what it needs to be routable."""

from __future__ import annotations

from common.registry.instances import Instance
from frontend_svc.members import Members
from frontend_svc.models.catalog import ModelCatalog
from frontend_svc.routers.client import RouterClient
from frontend_svc.workers.client import EngineClient


class Acknowledgement:
    """The view of one frontend process."""

    def __init__(
        self, members: Members, models: ModelCatalog, engines: EngineClient, router: RouterClient
    ) -> None:
        self._members = members
        self._models = models
        self._engines = engines
        self._router = router

    async def reason_against(self, member_id: int, is_leaving: bool) -> str:
        """Returns why the frontend does not use a member yet or, if it leaves, may still use it.

        Opens the stream to a worker, and a session with a router, to find out.
        """
        member = self._members.snapshot.instances.get(member_id)
        if is_leaving:
            return self._reason_to_stay(member_id, member)
        if member is None:
            return "discovery does not show it to this frontend"
        if member.service == "worker":
            unserved = self._models.reason_unserved(member)
            return unserved or self._engines.connect(member.id, member.stream_address)
        if member.service == "router" and not await self._router.is_reachable(member):
            return "this frontend cannot open a session with it"
        return ""

    def own_need(self, peer: Instance) -> str:
        """Returns what the frontend needs of a peer to serve what the mesh serves."""
        if peer.service == "worker":
            return self._models.reason_unserved(peer)
        if peer.service == "router" and not self._router.is_connected:
            return "this frontend has no session with a router"
        return ""

    def is_in_progress(self, peer: Instance) -> bool:
        """Returns whether the model of a worker is being loaded, except after a failed attempt."""
        models = self._models
        return peer.model in models.loading and peer.model not in models.not_ready

    def _reason_to_stay(self, member_id: int, member: Instance | None) -> str:
        if member is not None:
            return "discovery still shows it to this frontend"
        if self._router.session_router_id == member_id and self._router.has_routers:
            return "this frontend moves its session to another router"
        return ""

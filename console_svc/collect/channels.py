"""One channel to each member, which its queries share."""

from __future__ import annotations

from collections.abc import Collection

from common.registry.instances import Instance
from common.rpc import channel as rpc

# A channel to a member that does not respond is opened again, with the newest certificates.
KEEPALIVE_S = 60.0


class Channels:
    """The open channels of one console, by instance id."""

    def __init__(self, security: rpc.Security) -> None:
        self._security = security
        self._channels: dict[int, rpc.MeshChannel] = {}

    @property
    def ids(self) -> set[int]:
        return set(self._channels)

    def get(self, instance: Instance) -> rpc.MeshChannel:
        found = self._channels.get(instance.id)
        if found is None:
            found = self._channels[instance.id] = rpc.channel(
                instance.address,
                role=instance.service,
                security=self._security,
                keepalive_s=KEEPALIVE_S,
            )
        return found

    async def close(self, instance_ids: Collection[int]) -> None:
        """Closes channels, whose calls end. Idempotent."""
        for instance_id in tuple(instance_ids):
            found = self._channels.pop(instance_id, None)
            if found is not None:
                await found.close()

    async def close_all(self) -> None:
        await self.close(tuple(self._channels))

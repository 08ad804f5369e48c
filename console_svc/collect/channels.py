"""One channel to each member, which its queries share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.registry.instances import Instance
from common.rpc import channel as rpc

# A channel to a member that does not respond is opened again, with the newest certificates.
KEEPALIVE_S = 60.0


@dataclass(slots=True, eq=False)
class _Shared:
    """A channel, and how many queries use it."""

    channel: rpc.MeshChannel
    uses: int = 0


class Channels:
    """The open channels of one console, by instance id."""

    def __init__(self, security: rpc.Security) -> None:
        self._security = security
        self._channels: dict[int, _Shared] = {}

    @property
    def ids(self) -> set[int]:
        return set(self._channels)

    @asynccontextmanager
    async def use(self, instance: Instance) -> AsyncIterator[rpc.MeshChannel]:
        """Gives the channel to a member, which stays open during the block."""
        found = self._channels.get(instance.id)
        if found is None:
            channel = rpc.channel(
                instance.address,
                role=instance.service,
                security=self._security,
                keepalive_s=KEEPALIVE_S,
            )
            found = self._channels[instance.id] = _Shared(channel)
        found.uses += 1
        try:
            yield found.channel
        finally:
            found.uses -= 1
            if self._channels.get(instance.id) is not found:
                await _close_unused(found)

    async def close(self, instance_ids: Collection[int]) -> None:
        """Closes channels, those in use at the end of their last query. Idempotent."""
        # A channel that closes cancels its calls, and with them the tasks that wait for them.
        for instance_id in tuple(instance_ids):
            found = self._channels.pop(instance_id, None)
            if found is not None:
                await _close_unused(found)

    async def close_all(self) -> None:
        await self.close(self.ids)


async def _close_unused(shared: _Shared) -> None:
    if not shared.uses:
        await shared.channel.close()

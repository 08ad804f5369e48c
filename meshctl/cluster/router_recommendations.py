"""Reads what the routers of a mesh recommend."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from common.rpc import channel as rpc
from common.rpc.channel import security_from_config
from meshctl.cluster.deployment import Deployment
from meshctl.cluster.recommended import Recommendation
from meshctl.cluster.state import Observed, Phase
from meshctl.view.pools import read_pools

TIMEOUT_S = 2.0


async def read_recommendations(
    deployment: Deployment, replicas: Sequence[Observed]
) -> Iterable[Recommendation]:
    """Returns the recommendation of each router for each pool; none of one that does not
    respond."""
    security = security_from_config(deployment.read_options())
    addresses = [
        replica.addresses["grpc"]
        for replica in replicas
        if replica.role == "router" and replica.phase is Phase.ROUTABLE
    ]

    async def read(address: str) -> Iterable[Recommendation]:
        async with rpc.channel(address, role="router", security=security) as channel:
            pools = await read_pools(channel, timeout_s=TIMEOUT_S)
        return [Recommendation(pool.model, pool.role, pool.recommended) for pool in pools]

    found = await asyncio.gather(*map(read, addresses))
    return [one for of_router in found for one in of_router]

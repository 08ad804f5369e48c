"""The workers that routers recommend, joined over the routers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import grpc.aio

from common.rpc import channel as rpc
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from meshctl.view.screen import align

TITLES = ("MODEL", "ROLE", "WORKERS", "RECOMMENDED", "REASON", "STATE", "AWAITING")


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of a model and role, as one router or all routers see them."""

    model: str
    role: str
    workers: int
    recommended: int
    reason: str
    state: str
    awaiting: int
    """Requests that wait because no worker of the model can serve them."""

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> tuple[str, ...]:
        return tuple(str(value) for value in self.fields().values())


async def read_pools(channel: rpc.MeshChannel, *, timeout_s: float) -> tuple[Pool, ...]:
    """Returns the pools of a router; none of one that does not respond, or is of an earlier
    version."""
    try:
        response = await router_pb2_grpc.RouterServiceStub(channel).Replicas(
            router_pb2.ReplicasRequest(), timeout=timeout_s
        )
    except grpc.aio.AioRpcError:
        return ()
    return tuple(
        Pool(p.model, p.role, p.present, p.recommended, p.reason, p.state, p.awaiting)
        for p in response.pools
    )


def join_pools(pools: Iterable[Pool]) -> list[Pool]:
    """Returns each pool once, with the greatest recommendation of the routers, and the sum of the
    requests of their frontends that wait."""
    found: dict[tuple[str, str], Pool] = {}
    for pool in pools:
        key = pool.model, pool.role
        known = found.get(key)
        if known is None:
            found[key] = pool
            continue
        first = max(known, pool, key=lambda one: (one.recommended, one.workers))
        found[key] = Pool(
            *key,
            first.workers,
            first.recommended,
            first.reason,
            first.state,
            known.awaiting + pool.awaiting,
        )
    return [found[key] for key in sorted(found)]


def describe_pools(pools: Iterable[Pool]) -> str:
    """Returns the joined pools as a table after an empty line; "" without a pool."""
    joined = join_pools(pools)
    if not joined:
        return ""
    lines = align([TITLES, *(pool.cells() for pool in joined)])
    return "\n" + "".join(f"{line}\n" for line in lines)

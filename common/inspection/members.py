"""Health, load and readiness of one member, read from the process itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import MeshError
from common.rpc import channel as rpc
from common.service.routable.peers import Routable
from common.service.routable.service import read_routable
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.types.v1 import load_pb2

SERVING = "serving"
# Health of a worker that responds, but of which the engine fails its probes.
FAILING = "failing"


@dataclass(frozen=True, slots=True)
class MemberState:
    """What a member responded."""

    health: str
    """`serving`, `not_serving`, `failing`, or the gRPC status of a member that does not respond, in
    lower case."""

    loads: tuple[load_pb2.Load, ...] = ()
    """Empty except for workers that responded."""

    failure: str = ""
    """Why the engine of a worker fails, by its probe; "" if it does not."""

    routable: Routable | None = None
    """None if it does not report it."""

    has_responded: bool = True


async def read_member(
    channel: rpc.MeshChannel, service: str, *, timeout_s: float, reads_routable: bool = True
) -> MemberState:
    """Returns the state of the member at the other end of a channel, within a few times the
    timeout. reads_routable: whether to ask for `routable` too."""
    try:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods are not typed
        response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        health = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status).lower()
        routable = await _read_routable(channel, timeout_s) if reads_routable else None
        if service != "worker":
            return MemberState(health, routable=routable)
        load = await engine_pb2_grpc.EngineServiceStub(channel).GetLoad(
            engine_pb2.GetLoadRequest(), timeout=timeout_s
        )
    except grpc.aio.AioRpcError as error:
        return MemberState(error.code().name.lower(), has_responded=False)
    if load.engine_failure:
        health = FAILING
    return MemberState(health, tuple(load.loads), load.engine_failure, routable)


async def _read_routable(channel: rpc.MeshChannel, timeout_s: float) -> Routable | None:
    """Returns None for a member that does not respond, or is of an earlier version."""
    try:
        return await read_routable(channel, timeout_s=timeout_s)
    except MeshError:
        return None

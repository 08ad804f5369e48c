"""Health, load, readiness and clock of one member, read from the process itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import MeshError
from common.rpc import channel as rpc
from common.rpc.interceptors import TIME_KEY
from common.rpc.status import code_name, map_rpc_errors
from common.service.routable.peers import Routable
from common.service.routable.service import read_routable
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.types.v1 import load_pb2

SERVING = "serving"
# Health of a worker that responds, but of which the engine fails its probes.
FAILING = "failing"


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a member."""

    ahead_s: float
    """Its time minus that of this process."""

    error_s: float
    """Largest error of this difference: half of the round trip."""


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
    detail: str = ""
    """Of a member that does not respond: the text of the error."""

    clock: Clock | None = None
    """None if it has not sent its time."""


async def read_member(
    channel: rpc.MeshChannel, service: str, *, timeout_s: float, reads_routable: bool = True
) -> MemberState:
    """Returns the state of the member at the other end of a channel, within a few times the
    timeout. reads_routable: whether to ask for `routable` too."""
    try:
        health, clock = await _read_health(channel, timeout_s)
        routable = await read_routable(channel, timeout_s=timeout_s) if reads_routable else None
        if service != "worker":
            return MemberState(health, routable=routable, clock=clock)
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        load: engine_pb2.GetLoadResponse = await rpc.unary(
            stub.GetLoad, engine_pb2.GetLoadRequest(), timeout_s=timeout_s
        )
    except MeshError as error:
        return MemberState(code_name(error), has_responded=False, detail=error.message)
    if load.engine_failure:
        health = FAILING
    return MemberState(health, tuple(load.loads), load.engine_failure, routable, clock=clock)


async def _read_health(channel: rpc.MeshChannel, timeout_s: float) -> tuple[str, Clock | None]:
    stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods are not typed
    with map_rpc_errors():
        before_s = time.time()
        call = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        response = await call
        after_s = time.time()
        trailing = dict(await call.trailing_metadata() or ())
    clock = None
    if str(trailing.get(TIME_KEY, "")).isdecimal():
        ahead_s = int(trailing[TIME_KEY]) / 1000 - (before_s + after_s) / 2
        clock = Clock(ahead_s, (after_s - before_s) / 2)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status).lower(), clock

"""`meshctl status`: who is in the mesh, whether each answers, its load and KV use.

What it shows comes from discovery and from the processes themselves, never from a cache.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import rpc
from common.config import ServiceConfig
from common.discovery import open_registry
from common.instances import Instance
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.types.v1 import load_pb2

TIMEOUT_S = 1.0
_HEADER = (
    "SERVICE",
    "NAME",
    "ID",
    "ADDRESS",
    "MODEL",
    "ROLE",
    "HEALTH",
    "RUNNING",
    "WAITING",
    "KV",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One instance, as asked now. loads: empty for all but workers that answered."""

    instance: Instance
    health: str
    loads: tuple[load_pb2.Load, ...] = ()

    @property
    def kv(self) -> str:
        """Share of KV blocks in use by running requests."""
        total = sum(load.kv_total_blocks for load in self.loads)
        used = sum(load.kv_used_blocks for load in self.loads)
        return f"{100 * used / total:.0f} %" if total else "-"

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        one = self.instance
        is_worker = one.service == "worker"
        return (
            one.service,
            one.stable_name or "-",
            f"{one.id:x}",
            one.address,
            one.model or "-",
            one.role if is_worker else "-",
            self.health,
            str(sum(load.running for load in self.loads)) if self.loads else "-",
            str(sum(load.waiting for load in self.loads)) if self.loads else "-",
            self.kv,
        )

    def facts(self) -> dict[str, object]:
        """The row for programs."""
        return dict(zip((name.lower() for name in _HEADER), self.cells(), strict=True))


async def gather(config: ServiceConfig) -> list[Row]:
    """Asks discovery, then every instance at once."""
    registry = open_registry(config)
    try:
        snapshot = await registry.snapshot(config.namespace)
    finally:
        await registry.close()
    security = rpc.security_of(config)
    return list(await asyncio.gather(*(_ask(i, security) for i in snapshot.instances.values())))


async def _ask(instance: Instance, security: rpc.Security) -> Row:
    async with rpc.channel(instance.address, security=security) as channel:
        metadata = rpc.call_metadata(security)
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods are not typed
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, metadata=metadata
            )
            health = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status).lower()
            if instance.service != "worker":
                return Row(instance, health)
            load = await engine_pb2_grpc.EngineServiceStub(channel).GetLoad(
                engine_pb2.GetLoadRequest(), timeout=TIMEOUT_S, metadata=metadata
            )
        except grpc.aio.AioRpcError as error:
            return Row(instance, error.code().name.lower())
        return Row(instance, health, tuple(load.loads))


def status(config: ServiceConfig, *, as_json: bool) -> int:
    """Prints the table; 0 when everybody serves, 1 when somebody does not or nobody is there."""
    rows = asyncio.run(gather(config))
    if as_json:
        sys.stdout.write(json.dumps([row.facts() for row in rows]) + "\n")
    elif not rows:
        sys.stdout.write(f"nobody is registered in namespace {config.namespace!r}\n")
    else:
        table = [_HEADER, *(row.cells() for row in rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(_HEADER))]
        for line in table:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            sys.stdout.write("  ".join(cells).rstrip() + "\n")
    return 0 if rows and all(row.health == "serving" for row in rows) else 1

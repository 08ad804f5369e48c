"""The batches of all tenants, read from the batch service that runs them."""

from __future__ import annotations

from common.errors import Unavailable
from common.registry.instances import Snapshot
from common.rpc import channel as rpc
from kvmesh.batch.v1 import batch_pb2, batch_pb2_grpc

TIMEOUT_S = 5.0


async def read_progress(
    snapshot: Snapshot, security: rpc.Security, limit: int, *, timeout_s: float = TIMEOUT_S
) -> batch_pb2.ListProgressResponse:
    """Returns the newest batches, as the service that has the lease reports them, else as any does.
    Raises Unavailable without a batch service, and MeshError."""
    members = {member.id: member for member in snapshot.of("batch")}
    if not members:
        raise Unavailable("the mesh has no batch service", reason="NO_BATCH_SERVICE")
    member_id = next(reversed(members))
    response = await _read(members[member_id].address, security, limit, timeout_s)
    runner_id = response.runner_id
    if runner_id != member_id and runner_id in members:
        return await _read(members[runner_id].address, security, limit, timeout_s)
    return response


async def list_progress(
    channel: rpc.MeshChannel, limit: int, *, timeout_s: float = TIMEOUT_S
) -> batch_pb2.ListProgressResponse:
    """Returns the response of the batch service at the other end of a channel. Raises MeshError."""
    response: batch_pb2.ListProgressResponse = await rpc.unary(
        batch_pb2_grpc.BatchServiceStub(channel).ListProgress,
        batch_pb2.ListProgressRequest(limit=limit),
        timeout_s=timeout_s,
    )
    return response


async def _read(
    address: str, security: rpc.Security, limit: int, timeout_s: float
) -> batch_pb2.ListProgressResponse:
    async with rpc.channel(address, role="batch", security=security) as channel:
        return await list_progress(channel, limit, timeout_s=timeout_s)

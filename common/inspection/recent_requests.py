"""The last requests of a frontend process, sampled or not, read from the process itself."""

from __future__ import annotations

from common.rpc import channel as rpc
from kvmesh.frontend.v1 import frontend_pb2, frontend_pb2_grpc

TIMEOUT_S = 5.0


async def read_recent_requests(
    channel: rpc.MeshChannel,
    request: frontend_pb2.ListRecentRequestsRequest,
    *,
    timeout_s: float = TIMEOUT_S,
) -> frontend_pb2.ListRecentRequestsResponse:
    """Returns the response of the frontend at the other end of a channel. Raises MeshError:
    Unimplemented, if it is of an older version."""
    stub = frontend_pb2_grpc.RecentRequestServiceStub(channel)
    response: frontend_pb2.ListRecentRequestsResponse
    response = await rpc.unary(stub.ListRecentRequests, request, timeout_s=timeout_s)
    return response

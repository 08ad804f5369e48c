"""Why a router chose a worker, read from the router itself."""

from __future__ import annotations

from common.errors import NotFound
from common.rpc import channel as rpc
from kvmesh.router.v1 import router_pb2, router_pb2_grpc

TIMEOUT_S = 5.0


async def read_decision(
    channel: rpc.MeshChannel, request_id: str, *, timeout_s: float = TIMEOUT_S
) -> router_pb2.ExplainResponse | None:
    """Returns the explanation of the router at the other end of a channel; None if it has no such
    decision. Raises MeshError if it does not respond.

    request_id: the id of the mesh.
    """
    stub = router_pb2_grpc.RouterServiceStub(channel)
    request = router_pb2.ExplainRequest(request_id=request_id)
    try:
        response: router_pb2.ExplainResponse
        response = await rpc.unary(stub.Explain, request, timeout_s=timeout_s)
    except NotFound:
        return None
    return response

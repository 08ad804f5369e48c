"""Sessions with a router over gRPC, and the translation of their messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

from common.registry.instances import Instance
from common.request.preprocessed import RoutingHints
from common.rpc import channel as rpc
from common.rpc.stream import open_stream
from common.wire.preprocessed import dataclass_to_proto
from frontend_svc.request.placement_request import PlacementKey, PlacementRequest
from kvmesh.router.v1 import router_pb2


class Session(Protocol):
    """One open Session. `read` returns None at its end. `write` returns when the next frame can be
    taken. Both raise MeshError if the session failed."""

    async def read(self) -> router_pb2.SessionResponse | None: ...
    async def write(self, frame: router_pb2.SessionRequest) -> None: ...


# Opens a Session with a router; leaving the context ends it.
OpenRouterSession = Callable[[Instance], AbstractAsyncContextManager[Session]]


def grpc_session_opener(security: rpc.Security = rpc.PLAINTEXT) -> OpenRouterSession:
    """Returns an opener of gRPC sessions, each on a connection of its own."""

    def open_session(router: Instance) -> AbstractAsyncContextManager[Session]:
        return open_stream(
            router.stream_address,
            "/kvmesh.router.v1.RouterService/Session",
            router_pb2.SessionResponse,
            security,
            peer_id=router.id,
        )

    return open_session


def query_to_proto(
    query_id: int, key: PlacementKey, request: PlacementRequest, waited_ms: int
) -> router_pb2.New:
    query = request.query
    # The hashes contain the cache salt, so that it alone says nothing new to the router.
    if (hints := query.routing) is not None and hints == RoutingHints(cache_salt=hints.cache_salt):
        query = replace(query, routing=None)
    message = router_pb2.New(
        id=query_id,
        key=key_to_proto(key),
        traceparent=request.traceparent,
        query_only=request.is_query_only,
    )
    dataclass_to_proto(query, message.query).waited_ms = waited_ms
    return message


def key_to_proto(key: PlacementKey) -> router_pb2.BookingKey:
    return router_pb2.BookingKey(request_id=key[0], attempt=key[1])

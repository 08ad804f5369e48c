"""Sessions with a router over gRPC, and the translation of their messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from common.registry.instances import Instance
from common.request.preprocessed import BootstrapInfo, RoutingHints
from common.rpc import channel as rpc
from common.rpc.stream import open_stream
from common.wire.preprocessed import dataclass_from_proto, dataclass_to_proto
from frontend_svc.request.placement_query import PlacementKey, Query
from frontend_svc.request.types import Placement, RoutingDecision
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
        )

    return open_session


def query_to_proto(
    query_id: int, key: PlacementKey, query: Query, waited_ms: int
) -> router_pb2.New:
    message = router_pb2.Query(
        model=query.model,
        total_tokens=query.total_tokens,
        prefix_hashes=query.prefix_hashes,
        hash_scheme=query.hash_scheme,
        block_size=query.block_size,
        excluded_worker_ids=query.excluded,
        waited_ms=waited_ms,
        expected_output_tokens=query.expected_output_tokens,
        strict_priority=query.strict_priority,
        tenant=query.tenant,
        tenant_weight=query.tenant_weight,
    )
    # The hashes contain the cache salt, so that it alone says nothing new to the router.
    if (hints := query.routing) is not None and hints != RoutingHints(cache_salt=hints.cache_salt):
        dataclass_to_proto(hints, message.routing)
    if query.config_override is not None:
        dataclass_to_proto(query.config_override, message.config_override)
    return router_pb2.New(
        id=query_id,
        key=key_to_proto(key),
        query=message,
        traceparent=query.traceparent,
        query_only=query.is_query_only,
    )


def key_to_proto(key: PlacementKey) -> router_pb2.BookingKey:
    return router_pb2.BookingKey(request_id=key[0], attempt=key[1])


def decision_from_proto(decision: router_pb2.Decision) -> RoutingDecision:
    has = decision.HasField
    prefill = decision.prefill
    return RoutingDecision(
        worker_id=decision.worker.worker_id,
        dp_rank=decision.worker.dp_rank,
        overlap_blocks=decision.overlap_blocks,
        predicted_cached_tokens=decision.predicted_cached_tokens,
        reasons=tuple(decision.reasons),
        prefill=(
            Placement(prefill.worker_id, prefill.dp_rank, decision.prefill_address)
            if has("prefill")
            else None
        ),
        bootstrap=(
            dataclass_from_proto(BootstrapInfo, decision.bootstrap) if has("bootstrap") else None
        ),
        address=decision.worker_address,
    )

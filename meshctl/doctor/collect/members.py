"""Questions to members over gRPC. Each has a time limit, and none delays the others."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import MeshError
from common.registry.instances import Instance
from common.rpc import channel as rpc
from common.rpc.interceptors import TIME_KEY
from common.service.routable.service import read_routable
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from meshctl.doctor.facts import IndexerFacts, MemberFacts, RankState, VerifiedRank

# Verify reads whole lists of blocks.
CONCURRENT_VERIFIES_MAX = 8


# States of ranks that change only by themselves if something is wrong.
_SETTLED = ("exact", "degraded", "approx")


async def read_member(instance: Instance, security: rpc.Security, limit_s: float) -> MemberFacts:
    """Returns what a member answers. Its health first: the questions of its service follow only if
    it answers."""
    async with rpc.channel(instance.address, role=instance.service, security=security) as channel:
        member = await _read_health(instance, channel, limit_s)
        if member.health not in ("serving", "not_serving"):
            return member
        try:
            member = await _read_routable(member, channel, limit_s)
            match instance.service:
                case "worker":
                    return await _read_worker(member, channel, limit_s)
                case "router":
                    return await _read_router(member, channel, limit_s)
                case "indexer":
                    return await _read_indexer(member, channel, limit_s)
        except MeshError as error:
            code = type(error).__name__
            return replace(member, health=_CODES.get(code, code.lower()), detail=error.message)
    return member


_CODES = {
    "Unauthenticated": "unauthenticated",
    "PermissionDenied": "permission_denied",
    "DeadlineExceeded": "deadline_exceeded",
    "Unavailable": "unavailable",
}


def has_settled_index(member: MemberFacts) -> bool:
    """Returns whether the index of a router or an indexer has no rank that is about to change."""
    indexer = member.indexer
    ranks = member.ranks or (indexer.ranks if indexer else ())
    differs = (
        any(row.extra or row.missing or row.error for row in indexer.verified) if indexer else False
    )
    return not differs and all(state.state in _SETTLED for state in ranks)


async def _read_health(instance: Instance, channel: rpc.MeshChannel, limit_s: float) -> MemberFacts:
    stub: Any = health_pb2_grpc.HealthStub(channel)  # Its methods are not typed.
    before_s = time.time()
    call = stub.Check(health_pb2.HealthCheckRequest(), timeout=limit_s)
    try:
        response = await call
        trailing = dict(await call.trailing_metadata() or ())
    except grpc.aio.AioRpcError as error:
        return MemberFacts(instance, error.code().name.lower(), error.details() or "")
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status).lower()
    after_s = time.time()
    ahead_s = None
    if str(trailing.get(TIME_KEY, "")).isdecimal():
        ahead_s = int(trailing[TIME_KEY]) / 1000 - (before_s + after_s) / 2
    return MemberFacts(
        instance, status, clock_ahead_s=ahead_s, clock_error_s=(after_s - before_s) / 2
    )


async def _read_routable(
    member: MemberFacts, channel: rpc.MeshChannel, limit_s: float
) -> MemberFacts:
    routable = await read_routable(channel, timeout_s=limit_s)
    if routable is None:
        return member
    return replace(
        member,
        is_routable=routable.is_routable,
        missing_peers=tuple(map(str, routable.missing)),
        given_up_peers=tuple(map(str, routable.given_up)),
    )


async def _read_worker(
    member: MemberFacts, channel: rpc.MeshChannel, limit_s: float
) -> MemberFacts:
    stub = engine_pb2_grpc.EngineServiceStub(channel)
    load: engine_pb2.GetLoadResponse = await rpc.unary(
        stub.GetLoad, engine_pb2.GetLoadRequest(), timeout_s=limit_s
    )
    return replace(member, engine_failure=load.engine_failure)


async def _read_router(
    member: MemberFacts, channel: rpc.MeshChannel, limit_s: float
) -> MemberFacts:
    stub = router_pb2_grpc.RouterServiceStub(channel)
    dump: router_pb2.DumpResponse = await rpc.unary(
        stub.Dump, router_pb2.DumpRequest(), timeout_s=limit_s
    )
    ranks = tuple(
        RankState(row.worker.worker_id, row.worker.dp_rank, row.source_state, row.source_reason)
        for row in dump.workers
    )
    return replace(member, ranks=ranks)


async def _read_indexer(
    member: MemberFacts, channel: rpc.MeshChannel, limit_s: float
) -> MemberFacts:
    stub = indexer_pb2_grpc.IndexerServiceStub(channel)
    stats: indexer_pb2.StatsResponse = await rpc.unary(
        stub.Stats, indexer_pb2.StatsRequest(), timeout_s=limit_s
    )
    ranks = tuple(map(_rank_state, stats.sources))
    exact = {state.worker_id for state in ranks if state.state == "exact"}
    slots = asyncio.Semaphore(CONCURRENT_VERIFIES_MAX)
    rows = await asyncio.gather(
        *(_verify(stub, worker_id, slots, limit_s) for worker_id in sorted(exact))
    )
    indexer = IndexerFacts(
        ranks=ranks,
        used_bytes=stats.used_bytes,
        budget_bytes=stats.budget_bytes,
        verified=tuple(row for part in rows for row in part),
    )
    return replace(member, indexer=indexer)


def _rank_state(source: indexer_pb2.SourceStats) -> RankState:
    partition = source.partition
    return RankState(
        source.state.source.worker_id,
        source.state.source.dp_rank,
        source.status.state,
        source.status.reason,
        (partition.block_size, partition.hash_scheme, partition.adapter_version),
    )


async def _verify(
    stub: Any, worker_id: int, slots: asyncio.Semaphore, limit_s: float
) -> tuple[VerifiedRank, ...]:
    request = indexer_pb2.VerifyRequest(worker_id=worker_id)
    async with slots:
        try:
            response: indexer_pb2.VerifyResponse = await rpc.unary(
                stub.Verify, request, timeout_s=limit_s
            )
        except MeshError as error:
            return (VerifiedRank(worker_id, 0, error=error.message),)
    return tuple(
        VerifiedRank(row.source.worker_id, row.source.dp_rank, row.extra, row.missing, row.error)
        for row in response.sources
    )

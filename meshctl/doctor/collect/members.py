"""Questions to members over gRPC. Each has a time limit, and none delays the others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from common.errors import MeshError
from common.inspection import members
from common.registry.instances import Instance
from common.rpc import channel as rpc
from common.rpc.status import code_name
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from meshctl.doctor.facts import IndexerFacts, MemberFacts, RankState, VerifiedRank

# Verify reads whole lists of blocks.
CONCURRENT_VERIFIES_MAX = 8


# States of ranks that change only by themselves if something is wrong.
_SETTLED = ("exact", "degraded", "approx")


async def read_member(instance: Instance, security: rpc.Security, limit_s: float) -> MemberFacts:
    """Returns what a member answers. Its state first: the questions of its service follow only if
    it answers."""
    async with rpc.channel(instance.address, role=instance.service, security=security) as channel:
        state = await members.read_member(channel, instance.service, timeout_s=limit_s)
        member = _facts_of(instance, state)
        if not state.has_responded:
            return member
        try:
            match instance.service:
                case "router":
                    return await _read_router(member, channel, limit_s)
                case "indexer":
                    return await _read_indexer(member, channel, limit_s)
        except MeshError as error:
            return replace(member, health=code_name(error), detail=error.message)
    return member


def _facts_of(instance: Instance, state: members.MemberState) -> MemberFacts:
    clock, routable = state.clock, state.routable
    return MemberFacts(
        instance,
        state.health,
        state.detail,
        clock_ahead_s=None if clock is None else clock.ahead_s,
        clock_error_s=0.0 if clock is None else clock.error_s,
        is_routable=None if routable is None else routable.is_routable,
        missing_peers=() if routable is None else tuple(map(str, routable.missing)),
        given_up_peers=() if routable is None else tuple(map(str, routable.given_up)),
        engine_failure=state.failure,
    )


def has_settled_index(member: MemberFacts) -> bool:
    """Returns whether the index of a router or an indexer has no rank that is about to change."""
    indexer = member.indexer
    ranks = member.ranks or (indexer.ranks if indexer else ())
    differs = (
        any(row.extra or row.missing or row.error for row in indexer.verified) if indexer else False
    )
    return not differs and all(state.state in _SETTLED for state in ranks)


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

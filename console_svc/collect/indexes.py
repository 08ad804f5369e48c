"""What the indexers hold, from their statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common.errors import MeshError
from common.rpc import channel as rpc
from console_svc.state.members import IndexSource, IndexView, Member
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc

TIMEOUT_S = 5.0


async def read_index(
    channel: rpc.MeshChannel,
    name: str,
    before: IndexView | None,
    member: Callable[[str], Member | None],
) -> IndexView:
    """Returns the state of an indexer; if it does not respond, the one before with the reason.

    - name: of the indexer.
    - member: returns a member by its id.
    """
    stub = indexer_pb2_grpc.IndexerServiceStub(channel)
    try:
        stats: indexer_pb2.StatsResponse
        stats = await rpc.unary(stub.Stats, indexer_pb2.StatsRequest(), timeout_s=TIMEOUT_S)
    except MeshError as error:
        problem = f"{name} does not respond: {error.message}"
        return replace(before or IndexView(name, 0, 0, 0, 0), problem=problem)
    return IndexView(
        indexer=name,
        blocks=stats.blocks,
        batches_applied=stats.batches_applied,
        used_bytes=stats.used_bytes,
        budget_bytes=stats.budget_bytes,
        sources=tuple(
            sorted(
                (_source(found, name, member) for found in stats.sources),
                key=lambda source: (source.worker, source.dp_rank),
            )
        ),
    )


def _source(
    found: indexer_pb2.SourceStats, indexer: str, member: Callable[[str], Member | None]
) -> IndexSource:
    at = found.state.source
    worker = member(str(at.worker_id))
    ranks = () if worker is None else worker.ranks
    tiers = {"device": found.blocks, "host": found.host_blocks, "disk": found.disk_blocks}
    return IndexSource(
        indexer=indexer,
        worker=str(at.worker_id) if worker is None else worker.name,
        worker_id=str(at.worker_id),
        dp_rank=at.dp_rank,
        state=found.status.state,
        reason=found.status.reason,
        blocks=sum(tiers.values()),
        tiers=tiers,
        capacity_blocks=next((r.kv_total_blocks for r in ranks if r.dp_rank == at.dp_rank), None),
        epoch=found.state.epoch,
        sequence=found.state.sequence,
        age_s=found.age_ms / 1000,
        model=found.partition.model,
    )

"""Messages of the KV index to and from the values of `common/kv/events.py`.

Reading raises InvalidRequest with the invalid field; hashes are read without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import TypeVar

from common.errors import InvalidRequest
from common.kv.events import (
    SNAPSHOT_CHUNK_BLOCKS,
    SOURCE_STATES,
    EventBatch,
    EventKind,
    Hashes,
    KvEvent,
    Partition,
    SnapshotChunk,
    Source,
    SourcePosition,
    SourceStatus,
    Tier,
)
from common.kv.hashing import hashes_from_bytes, hashes_to_bytes
from common.kv.prefix_index import SourceMatch
from kvmesh.indexer.v1 import indexer_pb2

E = TypeVar("E", bound=IntEnum)

BATCH_BLOCKS_MAX = 2**20
"""Largest number of hashes in one batch, because a batch is applied as a whole."""

TIER_BY_NAME = {"device": Tier.DEVICE, "host_pinned": Tier.HOST, "disk": Tier.DISK}
"""Tier names in `ListKvBlocks`."""


def hashes_from_wire(data: bytes, field: str) -> Hashes:
    """Returns prefix hashes as a read-only array."""
    try:
        return hashes_from_bytes(data)
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", field) from error


def partition_to_proto(partition: Partition) -> indexer_pb2.Partition:
    return indexer_pb2.Partition(
        model=partition.model,
        block_size=partition.block_size,
        hash_scheme=partition.hash_scheme,
        adapter_version=partition.adapter_version,
    )


def partition_from_proto(message: indexer_pb2.Partition, field: str = "partition") -> Partition:
    """Returns a partition; model and block size are required."""
    if not message.model:
        raise InvalidRequest(f"{field}.model is required", f"{field}.model")
    if not message.block_size:
        raise InvalidRequest(f"{field}.block_size must be at least 1", f"{field}.block_size")
    return Partition(
        message.model, message.block_size, message.hash_scheme, message.adapter_version
    )


def source_to_proto(source: Source) -> indexer_pb2.Source:
    return indexer_pb2.Source(worker_id=source.worker_id, dp_rank=source.dp_rank)


def source_from_proto(message: indexer_pb2.Source, field: str = "source") -> Source:
    """Returns a source; the worker id is required."""
    if not message.worker_id:
        raise InvalidRequest(f"{field}.worker_id is required", f"{field}.worker_id")
    return Source(message.worker_id, message.dp_rank)


def source_state_to_proto(state: SourcePosition) -> indexer_pb2.SourceState:
    return indexer_pb2.SourceState(
        source=source_to_proto(state.source),
        epoch=state.epoch,
        sequence=state.sequence,
        degraded=state.degraded,
    )


def source_state_from_proto(
    message: indexer_pb2.SourceState, field: str = "state"
) -> SourcePosition:
    source = source_from_proto(message.source, f"{field}.source")
    return SourcePosition(source, message.epoch, message.sequence, message.degraded)


def source_status_to_proto(status: SourceStatus) -> indexer_pb2.SourceStatus:
    return indexer_pb2.SourceStatus(state=status.state, reason=status.reason)


def source_status_from_proto(
    message: indexer_pb2.SourceStatus, field: str = "status"
) -> SourceStatus:
    """Returns a status; an unknown state becomes gapped, which does not match."""
    if message.state not in SOURCE_STATES:
        return SourceStatus("gapped", f"{field} {message.state!r} is unknown")
    return SourceStatus(message.state, message.reason)


def batch_to_proto(batch: EventBatch) -> indexer_pb2.EventBatch:
    """Returns the message of a batch, without its worker id."""
    message = indexer_pb2.EventBatch(
        dp_rank=batch.source.dp_rank, epoch=batch.epoch, sequence=batch.sequence
    )
    for event in batch.events:
        message.events.add(
            kind=indexer_pb2.EventKind.ValueType(event.kind),
            prefix_hashes=hashes_to_bytes(event.hashes),
            tier=event.tier,
        )
    return message


def batch_from_proto(
    message: indexer_pb2.EventBatch, worker_id: int, field: str = "batch"
) -> EventBatch:
    """Returns a batch of one rank of a worker."""
    if not message.sequence:
        raise InvalidRequest(f"{field}.sequence must be at least 1", f"{field}.sequence")
    events = [_event_from_proto(event, f"{field}.events") for event in message.events]
    blocks = sum(len(event.hashes) for event in events)
    if blocks > BATCH_BLOCKS_MAX:
        raise InvalidRequest(
            f"{field}.events: too many blocks: {blocks}/{BATCH_BLOCKS_MAX}", f"{field}.events"
        )
    return EventBatch(Source(worker_id, message.dp_rank), message.epoch, message.sequence, events)


def snapshot_chunk_to_proto(chunk: SnapshotChunk) -> indexer_pb2.SnapshotChunk:
    return indexer_pb2.SnapshotChunk(
        source=source_to_proto(chunk.source),
        epoch=chunk.epoch,
        sequence=chunk.sequence,
        prefix_hashes=hashes_to_bytes(chunk.hashes),
        tier=chunk.tier,
        first=chunk.first,
        last=chunk.last,
    )


def snapshot_chunk_from_proto(
    message: indexer_pb2.SnapshotChunk, field: str = "snapshot"
) -> SnapshotChunk:
    """Returns a snapshot chunk of at most SNAPSHOT_CHUNK_BLOCKS hashes."""
    hashes = hashes_from_wire(message.prefix_hashes, f"{field}.prefix_hashes")
    if len(hashes) > SNAPSHOT_CHUNK_BLOCKS:
        raise InvalidRequest(
            f"{field}.prefix_hashes: too many hashes: {len(hashes)}/{SNAPSHOT_CHUNK_BLOCKS}",
            f"{field}.prefix_hashes",
        )
    return SnapshotChunk(
        source=source_from_proto(message.source, f"{field}.source"),
        epoch=message.epoch,
        sequence=message.sequence,
        hashes=hashes,
        tier=_enum_from_proto(Tier, message.tier, f"{field}.tier"),
        first=message.first,
        last=message.last,
    )


def matches_to_proto(rows: Iterable[SourceMatch]) -> indexer_pb2.MatchResponse:
    response = indexer_pb2.MatchResponse()
    add = response.matches.add
    for (worker_id, dp_rank), device, host, disk in rows:
        # Half the time of constructors: there may be hundreds of rows.
        message = add()
        message.device_blocks, message.host_blocks, message.disk_blocks = device, host, disk
        source = message.source
        source.worker_id, source.dp_rank = worker_id, dp_rank
    return response


def message_parts(
    message: indexer_pb2.SubscribeResponse,
) -> Iterator[indexer_pb2.SubscribeResponse]:
    """Returns a message of a subscription and the messages inside it, in order."""
    yield message
    yield from message.more


def _event_from_proto(message: indexer_pb2.Event, field: str) -> KvEvent:
    kind = _enum_from_proto(EventKind, message.kind, f"{field}.kind")
    hashes = hashes_from_wire(message.prefix_hashes, f"{field}.prefix_hashes")
    return KvEvent(kind, hashes, _enum_from_proto(Tier, message.tier, f"{field}.tier"))


def _enum_from_proto(cls: type[E], value: int, field: str) -> E:
    try:
        return cls(value)
    except ValueError as error:
        raise InvalidRequest(f"{field} has the unknown value {value}", field) from error

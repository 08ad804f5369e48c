"""Messages of the KV index: round trips and rejected input."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import InvalidRequest
from common.kv.events import (
    SNAPSHOT_CHUNK_BLOCKS,
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
from common.kv.prefix_index import SourceMatch
from common.wire import kv as kv_proto
from kvmesh.indexer.v1 import indexer_pb2 as pb

SOURCE = Source(2**63 - 1, 3)


def array(*keys: int) -> Hashes:
    return np.array(keys, dtype=np.uint64)


@pytest.mark.row("S1-29")
def test_partitions_positions_and_statuses_round_trip() -> None:
    partition = Partition("m", 16, 1, 2)
    assert kv_proto.partition_from_proto(kv_proto.partition_to_proto(partition)) == partition
    state = SourcePosition(SOURCE, 4, 2**40, degraded=True)
    assert kv_proto.source_state_from_proto(kv_proto.source_state_to_proto(state)) == state
    status = SourceStatus("stale", "its stream ended")
    assert kv_proto.source_status_from_proto(kv_proto.source_status_to_proto(status)) == status


@pytest.mark.row("S1-29", "S1-33")
def test_batches_with_64_bit_hashes_round_trip() -> None:
    events = [
        KvEvent(EventKind.STORED, array(1, 2**64 - 1), Tier.HOST),
        KvEvent(EventKind.REMOVED, array(2**63)),
        KvEvent(EventKind.CLEARED),
    ]
    sent = EventBatch(SOURCE, 5, 6, events)
    read = kv_proto.batch_from_proto(kv_proto.batch_to_proto(sent), SOURCE.worker_id)
    assert (read.source, read.epoch, read.sequence) == (SOURCE, 5, 6)
    for one, other in zip(read.events, events, strict=True):
        assert (one.kind, one.tier) == (other.kind, other.tier)
        assert one.hashes.tolist() == other.hashes.tolist()


def test_snapshot_chunks_and_match_rows_round_trip() -> None:
    sent = SnapshotChunk(SOURCE, 5, 6, array(7, 8), Tier.DISK, first=True, last=True)
    read = kv_proto.snapshot_chunk_from_proto(kv_proto.snapshot_chunk_to_proto(sent))
    assert (read.source, read.epoch, read.sequence, read.tier) == (SOURCE, 5, 6, Tier.DISK)
    assert (read.first, read.last, read.hashes.tolist()) == (True, True, [7, 8])
    (row,) = kv_proto.matches_to_proto([SourceMatch(SOURCE, 1, 2, 3)]).matches
    assert kv_proto.source_from_proto(row.source) == SOURCE
    assert (row.device_blocks, row.host_blocks, row.disk_blocks) == (1, 2, 3)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.EventBatch(), "batch.sequence"),
        (pb.EventBatch(sequence=1, events=[pb.Event()]), "batch.events.kind"),
        (
            pb.EventBatch(sequence=1, events=[pb.Event(kind=pb.EVENT_KIND_STORED, tier=3)]),
            "batch.events.tier",
        ),
        (
            pb.EventBatch(
                sequence=1, events=[pb.Event(kind=pb.EVENT_KIND_STORED, prefix_hashes=b"123")]
            ),
            "batch.events.prefix_hashes",
        ),
        (
            pb.EventBatch(
                sequence=1,
                events=[
                    pb.Event(
                        kind=pb.EVENT_KIND_STORED,
                        prefix_hashes=bytes(8 * (kv_proto.BATCH_BLOCKS_MAX + 1)),
                    )
                ],
            ),
            "batch.events",
        ),
    ],
)
def test_an_invalid_batch_is_rejected_with_its_field(message: pb.EventBatch, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        kv_proto.batch_from_proto(message, 1)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.SnapshotChunk(), "snapshot.source.worker_id"),
        (
            pb.SnapshotChunk(prefix_hashes=bytes(8 * (SNAPSHOT_CHUNK_BLOCKS + 1))),
            "snapshot.prefix_hashes",
        ),
        (pb.SnapshotChunk(source=pb.Source(worker_id=1), tier=9), "snapshot.tier"),
    ],
)
def test_an_invalid_snapshot_chunk_is_rejected_with_its_field(
    message: pb.SnapshotChunk, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        kv_proto.snapshot_chunk_from_proto(message)
    assert refused.value.field == field


def test_a_partition_needs_a_model_and_a_block_size() -> None:
    with pytest.raises(InvalidRequest, match="model"):
        kv_proto.partition_from_proto(pb.Partition(block_size=16))
    with pytest.raises(InvalidRequest, match="block_size"):
        kv_proto.partition_from_proto(pb.Partition(model="m"))


def test_an_unknown_state_of_a_newer_peer_becomes_gapped() -> None:
    assert kv_proto.source_status_from_proto(pb.SourceStatus(state="odd")).state == "gapped"

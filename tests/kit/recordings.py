"""Recordings of KV events, made of their entries."""

from __future__ import annotations

from common.kv.events import EventBatch, SnapshotChunk
from common.wire.kv import (
    batch_to_proto,
    partition_to_proto,
    snapshot_chunk_to_proto,
    source_status_to_proto,
    source_to_proto,
)
from indexer_svc.core.recording import IndexLost, RecordingEnd, RecordingEntry
from indexer_svc.core.subscriber import StatusUpdate
from indexer_svc.tools.recording_file import encode_message
from kvmesh.indexer.v1.indexer_pb2 import RecordedMessage, SubscribeResponse


def recorded(t: float, entry: RecordingEntry) -> bytes:
    """Returns a message of a recording file. t: seconds since the start of the recording."""
    time_us = round(t * 1e6)
    match entry:
        case IndexLost():
            return encode_message(RecordedMessage(time_us=time_us, index_lost=True))
        case RecordingEnd():
            return encode_message(RecordedMessage(time_us=time_us, ended=True))
        case _:
            return encode_message(RecordedMessage(time_us=time_us, received=update_of(entry)))


def update_of(entry: StatusUpdate | EventBatch | SnapshotChunk) -> SubscribeResponse:
    """Returns the message of a subscription that has this entry."""
    message = SubscribeResponse(source=source_to_proto(entry.source))
    match entry:
        case StatusUpdate(_, partition, status, at):
            message.status.CopyFrom(source_status_to_proto(status))
            message.epoch, message.sequence = at
            if partition is not None:
                message.partition.CopyFrom(partition_to_proto(partition))
        case EventBatch():
            message.batch.CopyFrom(batch_to_proto(entry))
        case SnapshotChunk():
            message.snapshot.CopyFrom(snapshot_chunk_to_proto(entry))
    return message

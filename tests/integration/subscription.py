"""Applies a subscription to a feed, as an index replica does."""

from __future__ import annotations

from collections.abc import Iterator

from common.kv.index_feed import IndexFeed
from common.wire.kv import (
    batch_from_proto,
    message_parts,
    partition_from_proto,
    snapshot_chunk_from_proto,
    source_from_proto,
    source_status_from_proto,
)
from kvmesh.indexer.v1 import indexer_pb2


def apply_subscription_message(
    feed: IndexFeed, message: indexer_pb2.SubscribeResponse, now: float
) -> Iterator[None]:
    """Apply one message of a subscription to a replica; steps as in `IndexFeed.apply`.

    The caller reads loads and `caught_up` from each of `message_parts`.
    """
    for part in message_parts(message):
        if part.HasField("status"):
            partition = partition_from_proto(part.partition) if part.HasField("partition") else None
            source = source_from_proto(part.source)
            position = (part.epoch, part.sequence)
            feed.apply_status(
                partition, source, source_status_from_proto(part.status), now, position
            )
        if part.HasField("batch"):
            batch = batch_from_proto(part.batch, part.source.worker_id)
            yield from feed.apply(batch, now)
        if part.HasField("snapshot"):
            yield from feed.load(snapshot_chunk_from_proto(part.snapshot), now)

"""One Publish stream to one indexer: hello, cursors, batches, snapshots and load.

A stream begins with a hello that states the position of each rank. The link then waits for the
indexer to name where each rank continues: after an acknowledged sequence or at the sequence of a
resend. One writer per stream sends snapshot chunks and batches, one of each rank in turn, and load
with the first of them.

A link has no queue: it has a cursor into each event log. If it falls behind the log's ring, or the
indexer requests batches that left the ring, it sends a snapshot and continues after it. It sends at
most UNACKED_BATCHES_MAX batches ahead of the acknowledgements, because socket windows hold
megabytes. A slow or dead indexer therefore costs one cursor and at most one snapshot (8 bytes per
block), and delays nothing else.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import NoReturn, Protocol, TypeAlias

import structlog

from common.errors import MeshError, Unavailable
from common.kv.events import Partition, SnapshotChunk, SourcePosition
from common.kv.load import LOAD_HEARTBEAT_S, Load
from common.registry.instances import Instance
from common.rpc import channel as rpc
from common.rpc.stream import open_stream
from common.runtime.tasks import TaskGroup
from common.streams.backoff import Backoff
from common.streams.peer import keep_connected
from common.streams.writer import FrameWriter
from common.wire.kv import (
    batch_to_proto,
    partition_to_proto,
    snapshot_chunk_to_proto,
    source_state_from_proto,
    source_state_to_proto,
)
from common.wire.load import load_to_proto
from kvmesh.indexer.v1 import indexer_pb2
from worker_svc.kv_events.event_log import PublishedSource

# Time for an indexer to name where to continue; then the link continues after its hello.
RESUME_TIMEOUT_S = 2.0
# Time for an indexer to end a stream that is about to restart.
STREAM_END_TIMEOUT_S = 1.0
# Limit of unacknowledged batches per rank.
UNACKED_BATCHES_MAX = 512
# Backoff before reconnecting to an indexer; jittered by half.
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0

log = structlog.get_logger()


class PublishCall(Protocol):
    """The part of a grpc.aio Publish call that a link uses."""

    async def write(self, request: indexer_pb2.PublishRequest, /) -> None:
        """Sends a frame. Returns when the next one can be sent."""

    async def done_writing(self) -> None:
        """Half-closes the stream."""

    def __aiter__(self) -> AsyncIterator[indexer_pb2.PublishResponse]:
        """Yields the indexer's responses until it ends the stream."""


# Opens a Publish call to an indexer; leaving the context ends it.
OpenCall: TypeAlias = Callable[[Instance], AbstractAsyncContextManager[PublishCall]]
# One of each rank.
Frames: TypeAlias = Sequence[indexer_pb2.PublishRequest]


def grpc_call_opener(security: rpc.Security = rpc.PLAINTEXT) -> OpenCall:
    """Returns an opener of Publish calls over gRPC; each call has a channel of its own."""

    @asynccontextmanager
    async def open_call(indexer: Instance) -> AsyncIterator[PublishCall]:
        async with open_stream(
            indexer.stream_address,
            "/kvmesh.indexer.v1.IndexerService/Publish",
            indexer_pb2.PublishResponse,
            security,
            peer_id=indexer.id,
        ) as call:
            await call.confirmed()
            yield call

    return open_call


@dataclass(frozen=True, slots=True)
class Publication:
    """What all links of a worker publish."""

    worker_id: int
    partition: Partition
    sources: Mapping[int, PublishedSource]
    """By rank."""

    open_call: OpenCall
    rng: Random
    """Shared by the links."""

    counters: Counter[str]
    """Shared by the links."""


@dataclass(slots=True)
class _Cursor:
    """Position of one stream in one rank: the batch after `sequence` or a snapshot chunk is next.

    is_degraded: as in the stream's hello. is_resumed: whether the indexer has named where to
    continue. resumed_at: the sequence after which it continued; batches up to there need no
    acknowledgement.
    """

    epoch: int
    sequence: int
    is_degraded: bool
    is_resumed: bool
    resumed_at: int
    chunks: deque[SnapshotChunk] = field(default_factory=deque)


class IndexerLink:
    """Publishes to one indexer.

    on_shrink: called with the blocks that the indexer requests to withdraw, and `acked`.
    acked: (epoch, sequence) by rank, as acknowledged on this stream.
    """

    def __init__(
        self,
        publication: Publication,
        indexer: Instance,
        on_shrink: Callable[[int, Mapping[int, tuple[int, int]]], None],
    ) -> None:
        self.indexer = indexer
        self.acked: dict[int, tuple[int, int]] = {}
        self._publication = publication
        self._on_shrink = on_shrink
        self._cursors: dict[int, _Cursor] = {}
        self._loads: Sequence[Load] = ()
        self._reported_loads: Sequence[Load] = ()
        self._reported_at = 0.0
        self._backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S, publication.rng)
        # Of the present stream, or of the last one.
        self._writer = FrameWriter(self._next_frames)

    def wake(self) -> None:
        self._writer.wake()

    def report(self, loads: Sequence[Load]) -> None:
        """Sends the load, in place of an unsent one, if it changed or LOAD_HEARTBEAT_S passed."""
        now = asyncio.get_running_loop().time()
        if loads != self._reported_loads or now - self._reported_at >= LOAD_HEARTBEAT_S:
            self._loads = self._reported_loads = loads
            self._reported_at = now
            self._writer.wake()

    async def run(self) -> None:
        """Keeps a stream open until cancelled."""
        await keep_connected(self._run_stream, self._backoff, self._on_lost)

    def _on_lost(self, error: Exception, pause_s: float) -> None:
        reason = error.message if isinstance(error, MeshError) else repr(error)
        if not isinstance(error, MeshError):
            log.exception("publish_failed", indexer=self.indexer.id)
        log.warning(
            "publish_stream_lost",
            indexer=self.indexer.id,
            reason=reason,
            backoff_s=round(pause_s, 3),
        )

    async def _run_stream(self) -> NoReturn:
        """Runs one stream. Raises the error that ended it, or Unavailable if none did."""
        async with self._publication.open_call(self.indexer) as call:
            self._publication.counters["streams"] += 1
            await self._exchange_frames(call)

    async def _exchange_frames(self, call: PublishCall) -> NoReturn:
        async def write(frames: Frames) -> None:
            for frame in frames:
                await call.write(frame)

        hello = self._build_hello()
        self._writer = writer = FrameWriter(self._next_frames)
        resume_timer = asyncio.get_running_loop().call_later(RESUME_TIMEOUT_S, self._resume_all)
        try:
            async with TaskGroup() as tasks:
                reader = tasks.create_task(self._read_responses(call, writer))
                await call.write(hello)
                await writer.run(write)
                # Half-close first: streams of one worker must not overlap at the indexer.
                await call.done_writing()
                await asyncio.wait([reader], timeout=STREAM_END_TIMEOUT_S)
                raise Unavailable("restart with a new hello")
        finally:
            resume_timer.cancel()

    def _build_hello(self) -> indexer_pb2.PublishRequest:
        """Returns a hello with the position of each rank, and resets the cursors."""
        publication = self._publication
        states: list[SourcePosition] = [
            source.event_log.state for source in publication.sources.values()
        ]
        self.acked = {}
        self._reported_loads = ()  # Of this stream.
        # A rank at sequence 0 has no batch that an indexer could miss.
        self._cursors = {
            state.source.dp_rank: _Cursor(
                state.epoch, state.sequence, state.degraded, state.sequence == 0, state.sequence
            )
            for state in states
        }
        return indexer_pb2.PublishRequest(
            hello=indexer_pb2.PublishHello(
                worker_id=publication.worker_id,
                partition=partition_to_proto(publication.partition),
                sources=map(source_state_to_proto, states),
            )
        )

    def _resume_all(self) -> None:
        for cursor in self._cursors.values():
            cursor.is_resumed = True
        self._writer.wake()

    # Writer.

    def _needs_new_hello(self) -> bool:
        """Returns whether the degraded flag of a rank changed, which only a hello carries."""
        return any(
            source.event_log.is_degraded != self._cursors[rank].is_degraded
            for rank, source in self._publication.sources.items()
        )

    def _next_frames(self) -> Frames | None:
        """Returns the next frames: one snapshot chunk or batch of each rank, load in the first.

        Returns None if there are none, and closes the writer when a new hello is needed.
        """
        if self._needs_new_hello():
            self._writer.close()
            return None
        sources = self._publication.sources
        found = [self._next_frame(sources[rank], cursor) for rank, cursor in self._cursors.items()]
        frames = [frame for frame in found if frame is not None]
        if self._loads:
            if not frames:
                frames.append(indexer_pb2.PublishRequest())
            frames[0].loads.extend(map(load_to_proto, self._loads))
            self._loads = ()
        return frames or None

    def _next_frame(
        self, source: PublishedSource, cursor: _Cursor
    ) -> indexer_pb2.PublishRequest | None:
        event_log = source.event_log
        if not cursor.is_resumed:
            return None
        if cursor.epoch != event_log.epoch:
            cursor.epoch, cursor.sequence, cursor.resumed_at = event_log.epoch, 0, 0
            cursor.chunks.clear()
        if not cursor.chunks:
            if cursor.sequence == event_log.sequence or self._is_window_full(
                event_log.source.dp_rank, cursor
            ):
                return None
            batch = event_log.batch(cursor.sequence + 1)
            if batch is not None:
                cursor.sequence += 1
                return indexer_pb2.PublishRequest(batch=batch_to_proto(batch))
            self._begin_snapshot(source, cursor)
        chunk = cursor.chunks.popleft()
        return indexer_pb2.PublishRequest(snapshot=snapshot_chunk_to_proto(chunk))

    def _is_window_full(self, rank: int, cursor: _Cursor) -> bool:
        epoch, acked = self.acked.get(rank, (0, 0))
        confirmed = max(cursor.resumed_at, acked if epoch == cursor.epoch else 0)
        return cursor.sequence - confirmed >= UNACKED_BATCHES_MAX

    def _begin_snapshot(self, source: PublishedSource, cursor: _Cursor) -> None:
        self._publication.counters["snapshots"] += 1
        cursor.chunks = deque(source.event_log.snapshot())
        cursor.epoch, cursor.sequence = log_position(source)
        cursor.resumed_at = cursor.sequence

    # Reader.

    async def _read_responses(self, call: PublishCall, writer: FrameWriter[Frames]) -> None:
        """Handles responses until the indexer ends the stream."""
        async for response in call:
            self._handle_response(response)
        writer.close(Unavailable("the indexer ended the stream"))

    def _handle_response(self, response: indexer_pb2.PublishResponse) -> None:
        self._backoff.reset()
        for message in response.acked:
            self._on_ack(source_state_from_proto(message, "acked"))
        for resend in response.resends:
            self._on_resend(resend)
        if response.shrink_blocks:
            self._on_shrink(response.shrink_blocks, self.acked)
        self._writer.wake()

    def _on_ack(self, state: SourcePosition) -> None:
        rank = state.source.dp_rank
        cursor = self._cursors.get(rank)
        if cursor is None:
            log.warning("ack_of_unknown_rank", indexer=self.indexer.id, dp_rank=rank)
            return
        self.acked[rank] = max(self.acked.get(rank, (0, 0)), (state.epoch, state.sequence))
        if not cursor.is_resumed:
            self._resume_after(rank, cursor, state.epoch, state.sequence)

    def _on_resend(self, message: indexer_pb2.Resend) -> None:
        cursor = self._cursors.get(message.dp_rank)
        if cursor is None:
            log.warning("resend_of_unknown_rank", indexer=self.indexer.id, dp_rank=message.dp_rank)
            return
        last_sequence = message.from_sequence - 1
        if cursor.chunks and (message.epoch, last_sequence) <= (cursor.epoch, cursor.sequence):
            return  # The indexer sent it before it received the snapshot in progress.
        self._publication.counters["replays"] += 1
        self._resume_after(message.dp_rank, cursor, message.epoch, last_sequence)

    def _resume_after(self, rank: int, cursor: _Cursor, epoch: int, last_sequence: int) -> None:
        """Continues a rank after `last_sequence`: with batches of the ring, else a snapshot."""
        source = self._publication.sources[rank]
        cursor.is_resumed = True
        cursor.chunks.clear()
        # State of an older epoch does not count.
        cursor.epoch, cursor.sequence = source.event_log.epoch, last_sequence
        if epoch != source.event_log.epoch:
            cursor.sequence = 0
        cursor.resumed_at = cursor.sequence
        if not source.event_log.has_batches_from(cursor.sequence + 1):
            self._begin_snapshot(source, cursor)


def log_position(source: PublishedSource) -> tuple[int, int]:
    return source.event_log.epoch, source.event_log.sequence

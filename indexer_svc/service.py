"""IndexerService over grpc.aio.

Every long stream has a FrameWriter: a slow connection gets larger frames.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import structlog

from common.errors import Conflict, InvalidRequest, MeshError, NotFound, Overloaded, Unavailable
from common.kv.events import Partition, SnapshotChunk, Source, SourcePosition, Tier
from common.kv.source_entry import EXACT
from common.rpc import channel as rpc
from common.rpc.claimed_id import check_claimed_id
from common.streams.writer import FrameWriter
from common.wire.kv import (
    batch_from_proto,
    batch_to_proto,
    hashes_from_wire,
    matches_to_proto,
    partition_from_proto,
    partition_to_proto,
    snapshot_chunk_from_proto,
    snapshot_chunk_to_proto,
    source_state_from_proto,
    source_state_to_proto,
    source_status_to_proto,
    source_to_proto,
)
from common.wire.load import load_from_proto, load_to_proto
from indexer_svc.core.subscriber import (
    BatchUpdate,
    CaughtUp,
    LoadUpdate,
    Outbound,
    StatusUpdate,
    Subscriber,
    snapshot_chunks,
)
from indexer_svc.ingest import Ingest
from indexer_svc.metrics import Metrics
from indexer_svc.outbox import MatchOutbox, PublisherOutbox
from indexer_svc.verify import compare
from indexer_svc.worker_presence import WorkerPresence
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc

LOG = structlog.get_logger(__name__)

SERVICE_NAME = "kvmesh.indexer.v1.IndexerService"
# Queries per turn of the event loop; about 1 ms.
QUERIES_PER_SLICE = 32
# Attempts to dump a source that is cleared during the dump.
DUMP_TRIES = 5

Context = grpc.aio.ServicerContext[Any, Any]


class IndexerService(indexer_pb2_grpc.IndexerServiceServicer):
    """gRPC service of one indexer process. clock: in seconds, the same as the core's."""

    def __init__(
        self,
        ingest: Ingest,
        presence: WorkerPresence,
        metrics: Metrics,
        *,
        security: rpc.Security,
        subscriber_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ingest = ingest
        self._presence = presence
        self._metrics = metrics
        self._security = security
        self._subscriber_bytes = subscriber_bytes
        self._clock = clock
        # Of the long streams.
        self._writers: set[FrameWriter[Any]] = set()
        self._is_ending = False

    def end_streams(self) -> None:
        """Closes every long stream, so that peers switch to another indexer."""
        self._is_ending = True
        for writer in self._writers:
            writer.close()

    @contextmanager
    def _ended_with_service(self, writer: FrameWriter[Any]) -> Iterator[None]:
        self._writers.add(writer)
        if self._is_ending:
            writer.close()
        try:
            yield
        finally:
            self._writers.discard(writer)

    # Publish.

    # grpc.aio accepts coroutines that write to the context; the generated types do not.
    async def Publish(  # type: ignore[override]
        self, request_iterator: AsyncIterator[indexer_pb2.PublishRequest], context: Context
    ) -> None:
        outbox = PublisherOutbox()
        with self._ended_with_service(outbox.writer):
            reading = self._read_publisher(request_iterator, outbox)
            await outbox.writer.serve(reading, context.write)

    async def _read_publisher(
        self, frames: AsyncIterator[indexer_pb2.PublishRequest], outbox: PublisherOutbox
    ) -> None:
        publishers = self._ingest.publishers
        hello: _Hello | None = None
        failure: MeshError | None = None
        try:
            async for frame in frames:
                if hello is None:
                    hello = _Hello(frame)
                    await self._open(hello, outbox)
                elif frame.HasField("hello"):
                    raise InvalidRequest("hello is allowed only in the first frame", "hello")
                if publishers.get(hello.worker_id) is not outbox:
                    break
                await self._take(frame, hello, outbox)
        except MeshError as error:
            LOG.warning("publisher_rejected", reason=error.message)
            failure = error
        finally:
            if hello is not None and publishers.get(hello.worker_id) is outbox:
                del publishers[hello.worker_id]
                self._ingest.publisher_lost(hello.worker_id)
            outbox.discard_all()
            outbox.writer.close(failure)

    async def _open(self, hello: _Hello, outbox: PublisherOutbox) -> None:
        feed, publishers = self._ingest.feed, self._ingest.publishers
        older = publishers.get(hello.worker_id)
        publishers[hello.worker_id] = outbox
        if older is not None:
            text = "replaced by a newer stream of this worker"
            older.writer.close(Conflict(text, reason="REPLACED"))
        async with self._ingest.exclusive():
            listed = {state.source for state in hello.states}
            for source in feed.sources_of(hello.worker_id):
                if source not in listed:
                    feed.forget(source, "its worker no longer publishes it")
            for state in hello.states:
                feed.register_source(hello.partition, state, self._clock())
        for state in hello.states:
            self._acknowledge(state.source, outbox)

    async def _take(
        self, frame: indexer_pb2.PublishRequest, hello: _Hello, outbox: PublisherOutbox
    ) -> None:
        ingest, now = self._ingest, self._clock()
        for state in hello.states:
            ingest.feed.mark_received(state.source, now)
        for message in frame.states:
            state = source_state_from_proto(message, "states")
            _require_own(state.source, hello, "states.source")
            async with ingest.exclusive():
                ingest.feed.set_degraded(state.source, state.degraded, now)
        if frame.HasField("batch"):
            batch = batch_from_proto(frame.batch, hello.worker_id)
            await ingest.run(ingest.feed.apply(batch, now))
            self._acknowledge(batch.source, outbox)
        if frame.HasField("snapshot"):
            chunk = snapshot_chunk_from_proto(frame.snapshot)
            _require_own(chunk.source, hello, "snapshot.source")
            await ingest.run(ingest.feed.load(chunk, now))
            if chunk.last:
                self._acknowledge(chunk.source, outbox)
        for load in frame.loads:
            source = Source(hello.worker_id, load.dp_rank)
            ingest.report_load(source, hello.partition, load_from_proto(load))

    def _acknowledge(self, source: Source, outbox: PublisherOutbox) -> None:
        feed = self._ingest.feed
        outbox.acknowledge(feed.position(source))
        if feed.status(source) == EXACT:
            self._ingest.first_published.set()

    # Subscribe.

    async def Subscribe(  # type: ignore[override]
        self, request: indexer_pb2.SubscribeRequest, context: Context
    ) -> None:
        resume = [source_state_from_proto(state, "resume") for state in request.resume]
        partition = None
        if request.HasField("partition"):
            partition = partition_from_proto(request.partition)
        async with self._ingest.exclusive():
            subscriber = self._create_subscriber(resume, partition, loads_only=request.loads_only)
            writer = FrameWriter(partial(self._next_updates, subscriber))
            self._ingest.subscribers[subscriber] = writer.wake
        try:
            with self._ended_with_service(writer):
                await writer.run(context.write)
        finally:
            del self._ingest.subscribers[subscriber]

    def _next_updates(self, subscriber: Subscriber) -> indexer_pb2.SubscribeResponse | None:
        """Returns what is next for a subscriber as one frame. Raises Overloaded if it is cut."""
        if self._is_ending:
            return None
        outbound = self._ingest.take(subscriber)
        if subscriber.is_overflowed:
            self._metrics.subscribers_cut.inc()
            raise Overloaded(
                0.1, "the subscriber reads too slowly; resume", reason="SUBSCRIBER_CUT"
            )
        if not outbound:
            return None
        return _updates_to_proto(outbound)

    def _create_subscriber(
        self, resume: Sequence[SourcePosition], partition: Partition | None, *, loads_only: bool
    ) -> Subscriber:
        ingest = self._ingest
        subscriber = Subscriber(
            ingest.feed,
            ingest.histories,
            resume,
            partition,
            self._subscriber_bytes,
            is_absent=self._presence.is_absent,
            loads_only=loads_only,
        )
        for source, (source_partition, load) in ingest.loads.items():
            subscriber.load(LoadUpdate(source, load), source_partition)
        return subscriber

    # Queries.

    async def Match(
        self, request: indexer_pb2.MatchRequest, context: Context
    ) -> indexer_pb2.MatchResponse:
        return self._match(request, "")

    async def MatchStream(  # type: ignore[override]
        self, request_iterator: AsyncIterator[indexer_pb2.MatchStreamRequest], context: Context
    ) -> None:
        answers = MatchOutbox()
        with self._ended_with_service(answers.writer):
            reading = self._read_questions(request_iterator, answers)
            await answers.writer.serve(reading, context.write)

    async def _read_questions(
        self, frames: AsyncIterator[indexer_pb2.MatchStreamRequest], answers: MatchOutbox
    ) -> None:
        failure: MeshError | None = None
        try:
            async for frame in frames:
                questions = frame.questions
                for start in range(0, len(questions), QUERIES_PER_SLICE):
                    part = questions[start : start + QUERIES_PER_SLICE]
                    await answers.put([self._answer(question) for question in part])
        except MeshError as error:
            failure = error
        finally:
            answers.writer.close(failure)

    def _answer(self, question: indexer_pb2.MatchQuestion) -> indexer_pb2.MatchAnswer:
        response = self._match(question.request, "questions.request.")
        return indexer_pb2.MatchAnswer(id=question.id, response=response)

    def _match(self, request: indexer_pb2.MatchRequest, prefix: str) -> indexer_pb2.MatchResponse:
        if not request.HasField("partition"):
            raise InvalidRequest(f"{prefix}partition is required", f"{prefix}partition")
        partition = partition_from_proto(request.partition, f"{prefix}partition")
        hashes = hashes_from_wire(request.prefix_hashes, f"{prefix}prefix_hashes")
        began = time.perf_counter()
        rows = self._ingest.feed.match(partition, hashes)
        self._metrics.match_seconds.observe(time.perf_counter() - began)
        if request.worker_ids:
            worker_ids = frozenset(request.worker_ids)
            rows = [row for row in rows if row.source.worker_id in worker_ids]
        return matches_to_proto(rows)

    async def Dump(
        self, request: indexer_pb2.DumpRequest, context: Context
    ) -> AsyncIterator[indexer_pb2.DumpResponse]:
        """Sends the blocks source by source; blocks that change meanwhile may be missing."""
        for source in self._sources_of(request.worker_id):
            is_complete, tries = False, 0
            while not is_complete:
                if tries == DUMP_TRIES:
                    rank = f"rank {source.dp_rank} of worker {source.worker_id}"
                    text = f"{rank} was cleared {tries} times during the dump"
                    raise Unavailable(text, reason="CLEARED")
                tries += 1
                async for part in self._dump(source):
                    is_complete = part.chunk.last
                    yield part
                if source not in self._ingest.feed:
                    break  # The source is gone.

    async def _dump(self, source: Source) -> AsyncIterator[indexer_pb2.DumpResponse]:
        """Returns one source; without a last chunk if it is cleared, replaced or gone meanwhile."""
        feed = self._ingest.feed
        async with self._ingest.exclusive():
            if source not in feed:
                return
            partition = partition_to_proto(feed.partition(source))
            index, advertised = feed.advertised(source)
            # The blocks of a load-only source at its position are unknown.
            known = not feed.is_load_only(source)
            at = feed.position(source) if known else SourcePosition(source, 0, 0)
            chunks = snapshot_chunks(at, index.chunks(advertised))
        while True:
            async with self._ingest.exclusive():
                chunk = next(chunks, None)
            if chunk is None or advertised.retired:
                return
            part = snapshot_chunk_to_proto(chunk)
            yield indexer_pb2.DumpResponse(partition=partition, chunk=part)

    async def Verify(
        self, request: indexer_pb2.VerifyRequest, context: Context
    ) -> indexer_pb2.VerifyResponse:
        response = indexer_pb2.VerifyResponse()
        for source in self._sources_of(request.worker_id):
            worker = self._presence.worker(source.worker_id)
            address = None if worker is None else worker.address
            row = await compare(self._ingest, source, address, self._security)
            response.sources.add(
                source=source_to_proto(source),
                extra=row.extra,
                missing=row.missing,
                equal=row.equal,
                error=row.error,
            )
        return response

    async def Stats(
        self, request: indexer_pb2.StatsRequest, context: Context
    ) -> indexer_pb2.StatsResponse:
        feed, now = self._ingest.feed, self._clock()
        response = indexer_pb2.StatsResponse(
            blocks=feed.blocks,
            batches_applied=feed.counters.batches,
            budget_bytes=self._ingest.budget.budget_bytes,
            used_bytes=self._ingest.used_bytes,
        )
        for source in feed.sources():
            response.sources.add(
                state=source_state_to_proto(feed.position(source)),
                status=source_status_to_proto(feed.status(source)),
                blocks=feed.blocks_of(source),
                host_blocks=feed.blocks_of(source, Tier.HOST),
                disk_blocks=feed.blocks_of(source, Tier.DISK),
                partition=partition_to_proto(feed.partition(source)),
                age_ms=max(0, round((now - feed.last_received_at(source)) * 1000)),
            )
        return response

    def _sources_of(self, worker_id: int) -> list[Source]:
        feed = self._ingest.feed
        if not worker_id:
            return feed.sources()
        sources = feed.sources_of(worker_id)
        if not sources:
            raise NotFound(f"worker {worker_id} is not in the index", field="worker_id")
        return sources


class _Hello:
    """The checked hello of a publisher. Raises Conflict, InvalidRequest, PermissionDenied."""

    def __init__(self, frame: indexer_pb2.PublishRequest) -> None:
        if not frame.HasField("hello"):
            raise Conflict("the first frame must carry hello", reason="HELLO_REQUIRED")
        message = frame.hello
        if not message.worker_id:
            raise InvalidRequest("hello.worker_id is required", "hello.worker_id")
        check_claimed_id(message.worker_id, "hello.worker_id")
        self.worker_id = message.worker_id
        self.partition = partition_from_proto(message.partition, "hello.partition")
        self.states = [
            source_state_from_proto(source, "hello.sources") for source in message.sources
        ]
        for state in self.states:
            _require_own(state.source, self, "hello.sources.source")


def _require_own(source: Source, hello: _Hello, field: str) -> None:
    if source.worker_id != hello.worker_id:
        error = f"{field}: worker {source.worker_id}, but hello has {hello.worker_id}"
        raise InvalidRequest(error, field)


def _updates_to_proto(outbound: Sequence[Outbound]) -> indexer_pb2.SubscribeResponse:
    """Returns the frame of these updates, which other streams may share: it must not be changed."""
    messages = list(map(_update_to_proto, outbound))
    if len(messages) == 1:
        return messages[0]
    frame = indexer_pb2.SubscribeResponse()
    frame.CopyFrom(messages[0])
    frame.more.extend(messages[1:])
    return frame


def _batch_update_to_proto(update: BatchUpdate) -> indexer_pb2.SubscribeResponse:
    """Returns the message of a batch, which is encoded once for all subscribers."""
    if update.message is None:
        batch = update.batch
        update.message = indexer_pb2.SubscribeResponse(
            source=source_to_proto(batch.source), batch=batch_to_proto(batch)
        )
    assert isinstance(update.message, indexer_pb2.SubscribeResponse), "encoded here"
    return update.message


def _load_update_to_proto(update: LoadUpdate) -> indexer_pb2.SubscribeResponse:
    """Returns the message of a load, which is encoded once for all subscribers."""
    if update.message is None:
        update.message = indexer_pb2.SubscribeResponse(
            source=source_to_proto(update.source), load=load_to_proto(update.load)
        )
    assert isinstance(update.message, indexer_pb2.SubscribeResponse), "encoded here"
    return update.message


def _update_to_proto(outbound: Outbound) -> indexer_pb2.SubscribeResponse:
    if isinstance(outbound, BatchUpdate):
        return _batch_update_to_proto(outbound)
    if isinstance(outbound, LoadUpdate):
        return _load_update_to_proto(outbound)
    if isinstance(outbound, CaughtUp):
        return indexer_pb2.SubscribeResponse(caught_up=True)
    message = indexer_pb2.SubscribeResponse(source=source_to_proto(outbound.source))
    match outbound:
        case SnapshotChunk():
            message.snapshot.CopyFrom(snapshot_chunk_to_proto(outbound))
        case StatusUpdate(_, partition, status, at):
            message.status.CopyFrom(source_status_to_proto(status))
            message.epoch, message.sequence = at
            if partition is not None:
                message.partition.CopyFrom(partition_to_proto(partition))
    return message

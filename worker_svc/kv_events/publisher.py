"""Publishes a worker's KV events and load: one Publish stream to each indexer in discovery.

Engine events pass through one `SourceFeed` per rank. All events of one loop turn form one batch. A
link has no queue: it has a cursor into each event log, whose ring is shared by all links. If a link
falls behind the ring, or the indexer requests batches that left the ring, it sends a snapshot and
continues after it. A link sends at most UNACKED_BATCHES_MAX batches ahead of the acknowledgements,
because socket windows hold megabytes. A slow or dead indexer therefore costs one cursor and at most
one snapshot (8 bytes per block), and delays nothing else.

A stream begins with a hello that states the position of each rank. The link then waits for the
indexer to name where each rank continues: after an acknowledged sequence or at the sequence of a
resend. One writer per stream sends load first, then snapshot chunks and batches, one of each rank
in turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Protocol, TypeAlias

import structlog

from common.errors import MeshError
from common.kv.events import Partition, SnapshotChunk, SourcePosition
from common.kv.load import Load
from common.registry.instances import Instance, Snapshot
from common.registry.registry import Registry
from common.rpc import channel as rpc
from common.rpc.interceptors import map_rpc_errors
from common.runtime.tasks import TaskGroup
from common.wire.kv import (
    batch_to_proto,
    partition_to_proto,
    snapshot_chunk_to_proto,
    source_state_from_proto,
    source_state_to_proto,
)
from common.wire.load import load_to_proto
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from worker_svc.kv_events.event_log import SourceFeed
from worker_svc.kv_events.normalizer import ExternalEvent

LOAD_EVERY_S = 0.1
# Time for an indexer to name where to continue; then the link continues after its hello.
RESUME_TIMEOUT_S = 2.0
# Time for an indexer to end a stream that is about to restart.
STREAM_END_TIMEOUT_S = 1.0
# Limit of unacknowledged batches per rank.
UNACKED_BATCHES_MAX = 512
# After this time without a shrink request, each interval publishes another tenth.
REGROW_INTERVAL_S = 30.0
REGROW_DIVISOR = 10
REGROW_BLOCKS_MIN = 1024
# Pages withdrawn, published or freed per loop turn: one or two milliseconds of work.
RESIZE_PAGES_PER_TURN = 1024
# Backoff before reconnecting to an indexer or the registry; jittered by half.
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0

log = structlog.get_logger()


class PublishCall(Protocol):
    """The part of a grpc.aio Publish call that a link uses."""

    async def write(self, request: indexer_pb2.PublishRequest, /) -> None:
        """Sends a frame. Returns when the next one can be sent."""

    async def done_writing(self) -> None:
        """Half-closes the stream."""

    def done(self) -> bool:
        """Whether the call has ended."""

    def __aiter__(self) -> AsyncIterator[indexer_pb2.PublishResponse]:
        """Yields the indexer's responses until it ends the stream."""


# Opens a Publish call to an indexer; leaving the context ends it.
OpenCall: TypeAlias = Callable[[Instance], AbstractAsyncContextManager[PublishCall]]


def grpc_call_opener(security: rpc.Security = rpc.PLAINTEXT) -> OpenCall:
    """Returns an opener of Publish calls over gRPC; each call has a channel of its own."""

    @asynccontextmanager
    async def open_call(indexer: Instance) -> AsyncIterator[PublishCall]:
        channel = rpc.channel(indexer.address, security=security)
        try:
            stub = indexer_pb2_grpc.IndexerServiceStub(channel)
            call = stub.Publish(metadata=rpc.call_metadata(security))
            async with rpc.cancelling(call):
                yield call
        finally:
            await channel.close()

    return open_call


class Publisher:
    """Publishes the feeds of one worker's ranks.

    feeds: by rank. loads: returns the load of each rank; called every load_every_s while there are
    links.
    open_call: opens a call to an indexer; None uses gRPC.
    counters: streams opened; snapshots and replays (gap repairs) started; batches sealed;
    events_lost; shrunk_blocks, regrown_blocks; unknown_rank (events dropped).
    """

    def __init__(
        self,
        worker_id: int,
        partition: Partition,
        feeds: Mapping[int, SourceFeed],
        loads: Callable[[], Sequence[Load]],
        registry: Registry,
        namespace: str,
        *,
        security: rpc.Security = rpc.PLAINTEXT,
        rng: Random | None = None,
        open_call: OpenCall | None = None,
        load_every_s: float = LOAD_EVERY_S,
    ) -> None:
        self.worker_id = worker_id
        self.partition = partition
        self.feeds = feeds
        self.open_call = open_call or grpc_call_opener(security)
        self.rng = rng or Random()
        self.counters: Counter[str] = Counter()
        self._loads = loads
        self._load_every_s = load_every_s
        self._registry = registry
        self._namespace = namespace
        self._links: dict[int, tuple[Link, asyncio.Task[None]]] = {}
        self._is_publish_scheduled = False
        # Whether a shrink started since the last regrow interval.
        self._has_shrunk_since_regrow = False
        # Whether the resize in progress is a shrink.
        self._is_shrinking = False
        # Log position of each rank at the end of the last shrink.
        self._shrink_positions: dict[int, tuple[int, int]] = {}

    @property
    def links(self) -> Sequence[Link]:
        """Returns the links, one per indexer in discovery."""
        return [link for link, _ in self._links.values()]

    def metric_values(self) -> dict[str, int]:
        """Returns all counters, including those of the feeds, prefixed with `kv_`."""
        total = self.counters.copy()
        for feed in self.feeds.values():
            total.update(feed.normalizer.counts)
            total["blocks"] += feed.normalizer.published_blocks
        return {f"kv_{name}": count for name, count in total.items()}

    def take(self, events: Iterable[ExternalEvent]) -> None:
        """Applies engine events, in order; never raises. Call it in the event loop."""
        for event in events:
            feed = self.feeds.get(event.rank)
            if feed is None:
                self.counters["unknown_rank"] += 1
                continue
            try:
                feed.apply(event)
            except Exception:
                self._on_apply_error(event.rank)
        self._schedule_publish()

    def record_loss(self, rank: int, reason: str) -> None:
        """Starts a new, degraded epoch of a rank, because its events were lost."""
        log.warning("kv_events_lost", dp_rank=rank, reason=reason)
        self.counters["events_lost"] += 1
        self.feeds[rank].record_loss()
        self._schedule_publish()

    def reset(self, rank: int) -> None:
        """Starts a new epoch of a rank, because its engine restarted with an empty cache."""
        self.feeds[rank].reset()
        self._schedule_publish()

    async def run(self) -> None:
        """Publishes until cancelled."""
        async with TaskGroup() as tasks:
            tasks.create_task(self._report_loads(), name="kv load reports")
            tasks.create_task(self._regrow(), name="kv regrowth")
            backoff_s = BACKOFF_FIRST_S
            while True:
                try:
                    async with self._registry.watch(self._namespace) as watch:
                        self._update_links(watch.current, tasks)
                        backoff_s = BACKOFF_FIRST_S
                        while True:
                            self._update_links(await watch.next(), tasks)
                except Exception as error:
                    # If the registry fails, publishing to the present indexers continues.
                    log.warning("indexer_watch_failed", error=repr(error), backoff_s=backoff_s)
                await asyncio.sleep(jittered(backoff_s, self.rng))
                backoff_s = min(BACKOFF_MAX_S, 2 * backoff_s)

    def shrink(self, blocks: int, acked: Mapping[int, tuple[int, int]]) -> None:
        """Starts to withdraw `blocks` blocks, spread over the ranks in proportion.

        acked: position by rank that the requesting indexer has acknowledged. A request sent before
        the indexer acknowledged the end of the last shrink concerns blocks already withdrawn, and
        is ignored.
        """
        if self._is_resizing or any(
            acked.get(rank, (0, 0)) < at for rank, at in self._shrink_positions.items()
        ):
            return
        published = {rank: feed.normalizer.published_blocks for rank, feed in self.feeds.items()}
        total = sum(published.values())
        if not total:
            return
        log.warning("kv_index_over_budget", requested=blocks, published=total)
        for rank, feed in self.feeds.items():
            # Rounded up: with fewer the indexer would request again.
            feed.normalizer.shrink(-(-blocks * published[rank] // total))
        self._is_shrinking = self._has_shrunk_since_regrow = True
        self._resize()

    @property
    def _is_resizing(self) -> bool:
        return any(feed.normalizer.is_resizing for feed in self.feeds.values())

    def _resize(self) -> None:
        """Performs one part of the resize, then yields to the loop.

        Engine events of the meantime are published in order with it.
        """
        for rank, feed in self.feeds.items():
            if feed.normalizer.is_resizing:
                try:
                    self._count_resized(feed.normalizer.resize(RESIZE_PAGES_PER_TURN))
                except Exception:
                    self._on_apply_error(rank)
                break
        self._publish_changes()
        if self._is_resizing:
            asyncio.get_running_loop().call_soon(self._resize)
        elif self._is_shrinking:
            self._is_shrinking = False
            self._shrink_positions = {
                rank: _log_position(feed) for rank, feed in self.feeds.items()
            }

    def _count_resized(self, blocks: int) -> None:
        if blocks:
            self.counters["regrown_blocks" if blocks > 0 else "shrunk_blocks"] += abs(blocks)

    def _schedule_publish(self) -> None:
        if not self._is_publish_scheduled:
            self._is_publish_scheduled = True
            asyncio.get_running_loop().call_soon(self._publish_changes)

    def _publish_changes(self) -> None:
        self._is_publish_scheduled = False
        for rank, feed in self.feeds.items():
            try:
                self.counters["batches"] += len(feed.seal_changes())
            except Exception:
                self._on_apply_error(rank)
            if feed.normalizer.free_deferred(RESIZE_PAGES_PER_TURN):
                self._schedule_publish()
        self._wake_links()

    def _on_apply_error(self, rank: int) -> None:
        # A defect of this process; the engine and its requests are not affected.
        log.exception("kv_events_failed", dp_rank=rank)
        self.record_loss(rank, "events could not be applied")

    def _wake_links(self) -> None:
        for link in self.links:
            link.wake()

    async def _report_loads(self) -> None:
        is_failing = False
        while True:
            await asyncio.sleep(self._load_every_s)
            if not self._links:
                continue
            try:
                loads = tuple(self._loads())
                is_failing = False
            except Exception:
                # Missing reports show the failure; events are useful without them.
                if not is_failing:
                    log.exception("engine_loads_failed")
                is_failing = True
                continue
            for link in self.links:
                link.report(loads)

    async def _regrow(self) -> None:
        # An indexer does not report free capacity; without capacity it sends another shrink
        # request.
        while True:
            await asyncio.sleep(REGROW_INTERVAL_S)
            if not self._has_shrunk_since_regrow:
                self.grow()
            self._has_shrunk_since_regrow = False

    def grow(self) -> None:
        """Starts to publish a share of the withheld blocks, if any."""
        if self._is_resizing:
            return
        for feed in self.feeds.values():
            share = feed.normalizer.published_blocks // REGROW_DIVISOR
            feed.normalizer.grow(max(REGROW_BLOCKS_MIN, share))
        self._resize()

    def _update_links(self, snapshot: Snapshot, tasks: TaskGroup) -> None:
        # Revision 0 is the state before the first read, so it removes no indexer.
        if snapshot.revision == 0 and self._links:
            return
        indexers = {one.id: one for one in snapshot.of("indexer")}
        for key, (link, task) in list(self._links.items()):
            if key not in indexers or indexers[key].address != link.indexer.address:
                task.cancel()
                del self._links[key]
        for key, indexer in indexers.items():
            if key not in self._links:
                link = Link(self, indexer)
                task = tasks.create_task(link.run(), name=f"publish to indexer {key}")
                self._links[key] = (link, task)


@dataclass(slots=True)
class _Cursor:
    """Position of one stream in one rank: the batch after `sequence` or a snapshot chunk is next.

    is_resumed: whether the indexer has named where to continue. resumed_at: the sequence after
    which it continued; batches up to there need no acknowledgement.
    """

    epoch: int
    sequence: int
    is_resumed: bool
    resumed_at: int
    chunks: deque[SnapshotChunk] = field(default_factory=deque)


class _StreamEnded(Exception):
    """The stream ended without an error."""


class Link:
    """Publishes to one indexer.

    acked: (epoch, sequence) by rank, as acknowledged on this stream.
    has_response: whether the indexer has sent a response on this stream.
    """

    def __init__(self, publisher: Publisher, indexer: Instance) -> None:
        self.indexer = indexer
        self.acked: dict[int, tuple[int, int]] = {}
        self.has_response = False
        self._publisher = publisher
        self._cursors: dict[int, _Cursor] = {}
        self._sent_degraded: dict[int, bool] = {}
        self._loads: Sequence[Load] = ()
        self._wakeup = asyncio.Event()

    def wake(self) -> None:
        """Wakes the writer."""
        self._wakeup.set()

    def report(self, loads: Sequence[Load]) -> None:
        """Sets the load to send; replaces an unsent one."""
        self._loads = loads
        self._wakeup.set()

    async def run(self) -> None:
        """Keeps a stream open until cancelled."""
        backoff_s = BACKOFF_FIRST_S
        while True:
            reason = "the indexer ended the stream"
            try:
                if await self._run_stream():
                    reason = "restart with a new hello"
            except MeshError as error:
                reason = error.message
            except Exception as error:
                log.exception("publish_failed", indexer=self.indexer.id)
                reason = repr(error)
            if self.has_response:
                backoff_s = BACKOFF_FIRST_S
            log.warning(
                "publish_stream_lost", indexer=self.indexer.id, reason=reason, backoff_s=backoff_s
            )
            self.has_response = False
            await asyncio.sleep(jittered(backoff_s, self._publisher.rng))
            backoff_s = min(BACKOFF_MAX_S, 2 * backoff_s)

    async def _run_stream(self) -> bool:
        """Runs one stream. Returns whether it ended in order to restart. Raises MeshError."""
        async with self._publisher.open_call(self.indexer) as call:
            self._publisher.counters["streams"] += 1
            return await self._exchange_frames(call)

    async def _exchange_frames(self, call: PublishCall) -> bool:
        loop = asyncio.get_running_loop()
        is_restart = False
        hello = self._build_hello()
        resume_timer = loop.call_later(RESUME_TIMEOUT_S, self._resume_all)
        try:
            async with TaskGroup() as tasks:
                reader = tasks.create_task(self._read_responses(call))
                with _call_end_as_error(call):
                    await self._write_frames(call, hello)
                    is_restart = True
                    # Half-close first: streams of one worker must not overlap at the indexer.
                    await call.done_writing()
                    await asyncio.wait([reader], timeout=STREAM_END_TIMEOUT_S)
                raise _StreamEnded
        except _StreamEnded:
            # The task group prefers other exceptions, but the reader's MeshError is the cause.
            if reader.done() and not reader.cancelled():
                error = reader.exception()
                if isinstance(error, MeshError):
                    raise error from None
            return is_restart
        finally:
            resume_timer.cancel()

    def _build_hello(self) -> indexer_pb2.PublishRequest:
        """Returns a hello with the position of each rank, and resets the cursors."""
        publisher = self._publisher
        states: list[SourcePosition] = [feed.event_log.state for feed in publisher.feeds.values()]
        self.acked = {}
        self.has_response = False
        # A rank at sequence 0 has no batch that an indexer could miss.
        self._cursors = {
            state.source.dp_rank: _Cursor(
                state.epoch, state.sequence, state.sequence == 0, state.sequence
            )
            for state in states
        }
        self._sent_degraded = {state.source.dp_rank: state.degraded for state in states}
        return indexer_pb2.PublishRequest(
            hello=indexer_pb2.PublishHello(
                worker_id=publisher.worker_id,
                partition=partition_to_proto(publisher.partition),
                sources=map(source_state_to_proto, states),
            )
        )

    def _resume_all(self) -> None:
        for cursor in self._cursors.values():
            cursor.is_resumed = True
        self._wakeup.set()

    # Writer.

    async def _write_frames(self, call: PublishCall, hello: indexer_pb2.PublishRequest) -> None:
        """Sends frames. Returns when a new hello is needed."""
        await call.write(hello)
        while not self._needs_new_hello():
            frames = self._next_frames()
            for frame in frames:
                await call.write(frame)
            if not frames:
                await self._wakeup.wait()
            self._wakeup.clear()

    def _needs_new_hello(self) -> bool:
        """Whether the degraded flag of a rank changed, which only a hello carries."""
        return any(
            feed.event_log.is_degraded != self._sent_degraded[rank]
            for rank, feed in self._publisher.feeds.items()
        )

    def _next_frames(self) -> list[indexer_pb2.PublishRequest]:
        """Returns the next frames: load, and one snapshot chunk or batch of each rank."""
        frames = []
        if self._loads:
            frames.append(indexer_pb2.PublishRequest(loads=map(load_to_proto, self._loads)))
            self._loads = ()
        for rank, cursor in self._cursors.items():
            frame = self._next_frame(self._publisher.feeds[rank], cursor)
            if frame is not None:
                frames.append(frame)
        return frames

    def _next_frame(self, feed: SourceFeed, cursor: _Cursor) -> indexer_pb2.PublishRequest | None:
        event_log = feed.event_log
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
            self._begin_snapshot(feed, cursor)
        chunk = cursor.chunks.popleft()
        return indexer_pb2.PublishRequest(snapshot=snapshot_chunk_to_proto(chunk))

    def _is_window_full(self, rank: int, cursor: _Cursor) -> bool:
        epoch, acked = self.acked.get(rank, (0, 0))
        acked_sequence = (
            max(cursor.resumed_at, acked) if epoch == cursor.epoch else cursor.resumed_at
        )
        return cursor.sequence - acked_sequence >= UNACKED_BATCHES_MAX

    def _begin_snapshot(self, feed: SourceFeed, cursor: _Cursor) -> None:
        self._publisher.counters["snapshots"] += 1
        cursor.chunks = deque(feed.event_log.snapshot())
        cursor.epoch, cursor.sequence = _log_position(feed)
        cursor.resumed_at = cursor.sequence

    # Reader.

    async def _read_responses(self, call: PublishCall) -> None:
        """Handles responses until the indexer ends the stream."""
        with _call_end_as_error(call):
            async for response in call:
                self._handle_response(response)
        raise _StreamEnded

    def _handle_response(self, response: indexer_pb2.PublishResponse) -> None:
        self.has_response = True
        for message in response.acked:
            self._on_ack(source_state_from_proto(message, "acked"))
        for resend in response.resends:
            self._on_resend(resend)
        if response.shrink_blocks:
            self._publisher.shrink(response.shrink_blocks, self.acked)
        self._wakeup.set()

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
        self._publisher.counters["replays"] += 1
        self._resume_after(message.dp_rank, cursor, message.epoch, last_sequence)

    def _resume_after(self, rank: int, cursor: _Cursor, epoch: int, last_sequence: int) -> None:
        """Continues a rank after `last_sequence`: with batches of the ring, else a snapshot."""
        feed = self._publisher.feeds[rank]
        cursor.is_resumed = True
        cursor.chunks.clear()
        # State of an older epoch does not count.
        cursor.epoch, cursor.sequence = feed.event_log.epoch, last_sequence
        if epoch != feed.event_log.epoch:
            cursor.sequence = 0
        cursor.resumed_at = cursor.sequence
        if not feed.event_log.has_batches_from(cursor.sequence + 1):
            self._begin_snapshot(feed, cursor)


@contextmanager
def _call_end_as_error(call: PublishCall) -> Iterator[None]:
    """Raises the MeshError of a call that ends inside, or _StreamEnded where the reader has the
    cause.
    """
    try:
        with map_rpc_errors():
            yield
    except asyncio.InvalidStateError:
        raise _StreamEnded from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not call.done() or (task is not None and task.cancelling()):
            raise
        raise _StreamEnded from None  # The call was cancelled, not this task.


def jittered(backoff_s: float, rng: Random) -> float:
    """Returns 0.5 to 1.5 times the backoff, so that a fleet does not reconnect at once."""
    return backoff_s * (0.5 + rng.random())


def _log_position(feed: SourceFeed) -> tuple[int, int]:
    return feed.event_log.epoch, feed.event_log.sequence

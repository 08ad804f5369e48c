"""Publishes a worker's KV events and load: one Publish stream to every indexer in discovery.

What the engine reports goes through a `Feed` for each rank (`core/kv_events.py`). All that arrives
in one tick of the loop becomes one batch. A link has no queue of its own: it has a cursor into each
ledger, whose ring is the buffer that all links share. A link that falls behind the ring, or is
asked for what the ring has no more, sends a snapshot and goes on behind it. It stays at most
UNACKED_MAX batches ahead of the acknowledgements, since the windows of sockets hold megabytes. So a
slow or dead indexer costs a cursor and at most one snapshot (8 bytes a block); nobody waits for it.

A stream: hello says where each rank stands; then the link waits to be told where each is to go on:
behind what is acknowledged, or at a resend's sequence. One writer a stream sends load first, then
parts of snapshots and batches, rank by rank in turn.
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
from common.kv.events import Partition, SnapshotChunk, SourceState
from common.kv.load import Load
from common.registry.instances import Instance, Snapshot
from common.registry.registry import Registry
from common.rpc import channel as rpc
from common.rpc.interceptors import raising_mesh_errors
from common.runtime.tasks import TaskGroup
from common.wire.kv import (
    batch_to_proto,
    chunk_to_proto,
    partition_to_proto,
    state_from_proto,
    state_to_proto,
)
from common.wire.load import load_to_proto
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from worker_svc.kv_events.normalizer import ExternalEvent, Feed

LOAD_EVERY_S = 0.1
# How long an indexer may take to say where to go on; after that the link does so behind its hello.
ANSWER_S = 2.0
# How long an indexer may take to end a stream that is to begin anew.
END_S = 1.0
# Batches of a rank that an indexer may have to acknowledge before more are sent.
UNACKED_MAX = 512
# After so long without a demand to shrink there may be room: a tenth more is announced each time.
REGROW_S = 30.0
REGROW_SHARE = 10
REGROW_BLOCKS_MIN = 1024
# Pages that are withdrawn, announced again or freed before the loop has its turn: a millisecond or
# two.
RESIZE_PAGES = 1024
# Pauses before a lost indexer, or the registry, is tried again; jittered by half.
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0

log = structlog.get_logger()


class PublishCall(Protocol):
    """One Publish call, as grpc.aio has it."""

    async def write(self, request: indexer_pb2.PublishRequest, /) -> None:
        """Sends a frame; returns when the next one can be taken."""

    async def done_writing(self) -> None:
        """Ends our side of the stream."""

    def done(self) -> bool:
        """Whether the call is over."""

    def __aiter__(self) -> AsyncIterator[indexer_pb2.PublishResponse]:
        """What the indexer says, until it ends the stream."""


# Opens a Publish call with an indexer; leaving the context ends it.
OpenCall: TypeAlias = Callable[[Instance], AbstractAsyncContextManager[PublishCall]]


def grpc_calls(security: rpc.Security = rpc.PLAINTEXT) -> OpenCall:
    """Publish over gRPC. The channel belongs to the call and dies with it."""

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

    feeds: by rank. loads: the ranks' load, asked for every load_every_s while somebody listens.
    open_call: how to reach an indexer; by default over gRPC.
    counters: streams opened; snapshots, replays begun; batches cut; events_lost; shrunk_blocks,
    regrown_blocks; unknown_rank events, dropped.
    """

    def __init__(
        self,
        worker_id: int,
        partition: Partition,
        feeds: Mapping[int, Feed],
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
        self.open_call = open_call or grpc_calls(security)
        self.rng = rng or Random()
        self.counters: Counter[str] = Counter()
        self._loads = loads
        self._load_every_s = load_every_s
        self._registry = registry
        self._namespace = namespace
        self._links: dict[int, tuple[Link, asyncio.Task[None]]] = {}
        self._is_cut_due = False
        # Whether it was shrunk since the last look for room.
        self._was_shrunk = False
        # Whether what goes on is a shrinking.
        self._is_shrinking = False
        # Where each rank stood when it was shrunk last.
        self._shrunk_at: dict[int, tuple[int, int]] = {}

    @property
    def links(self) -> Sequence[Link]:
        """One for each indexer in discovery."""
        return [link for link, _ in self._links.values()]

    def figures(self) -> dict[str, int]:
        """All counters by name, of the feeds too, with `kv_` before."""
        total = self.counters.copy()
        for feed in self.feeds.values():
            total.update(feed.canonicaliser.counts)
            total["blocks"] += feed.canonicaliser.published_blocks
        return {f"kv_{name}": count for name, count in total.items()}

    def take(self, events: Iterable[ExternalEvent]) -> None:
        """Takes in what the engine reports, in order; never raises. Call it in the loop."""
        for event in events:
            feed = self.feeds.get(event.rank)
            if feed is None:
                self.counters["unknown_rank"] += 1
                continue
            try:
                feed.apply(event)
            except Exception:
                self._broke(event.rank)
        self._plan_cut()

    def lose(self, rank: int, why: str) -> None:
        """Events of a rank were lost beyond repair: its claims begin anew, degraded."""
        log.warning("kv_events_lost", dp_rank=rank, why=why)
        self.counters["events_lost"] += 1
        self.feeds[rank].lose()
        self._plan_cut()

    def reset(self, rank: int) -> None:
        """The engine of a rank has begun anew, with an empty cache."""
        self.feeds[rank].reset()
        self._plan_cut()

    async def run(self) -> None:
        """Publish for ever; ends by cancellation only."""
        async with TaskGroup() as tasks:
            tasks.create_task(self._report_loads(), name="kv load reports")
            tasks.create_task(self._regrow(), name="kv regrowth")
            pause_s = PAUSE_FIRST_S
            while True:
                try:
                    async with self._registry.watch(self._namespace) as watch:
                        self._follow(watch.current, tasks)
                        pause_s = PAUSE_FIRST_S
                        while True:
                            self._follow(await watch.next(), tasks)
                except Exception as error:
                    # Whatever ails the registry: the indexers known go on being told.
                    log.warning("indexer_watch_failed", error=repr(error), pause_s=pause_s)
                await asyncio.sleep(jittered(pause_s, self.rng))
                pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    def shrink(self, blocks: int, acked: Mapping[int, tuple[int, int]]) -> None:
        """Begins to withdraw so many blocks, from each rank its share.

        acked: what the indexer that asks has seen, by rank. A demand made before the last shrinking
        has ended and was seen is about blocks that are gone already, and ignored.
        """
        if self._is_resizing or any(
            acked.get(rank, (0, 0)) < at for rank, at in self._shrunk_at.items()
        ):
            return
        published = {rank: feed.canonicaliser.published_blocks for rank, feed in self.feeds.items()}
        total = sum(published.values())
        if not total:
            return
        log.warning("kv_index_over_budget", asked=blocks, published=total)
        for rank, feed in self.feeds.items():
            # Rounded up: less than what was asked for would be asked for again.
            feed.canonicaliser.shrink(-(-blocks * published[rank] // total))
        self._is_shrinking = self._was_shrunk = True
        self._resize()

    @property
    def _is_resizing(self) -> bool:
        return any(feed.canonicaliser.is_resizing for feed in self.feeds.values())

    def _resize(self) -> None:
        """One part of what is to be withdrawn or announced; then the loop has its turn.

        What the engine says meanwhile comes behind what was said before, in batches as always.
        """
        for rank, feed in self.feeds.items():
            if feed.canonicaliser.is_resizing:
                try:
                    self._count_resized(feed.canonicaliser.resize(RESIZE_PAGES))
                except Exception:
                    self._broke(rank)
                break
        self._cut()
        if self._is_resizing:
            asyncio.get_running_loop().call_soon(self._resize)
        elif self._is_shrinking:
            self._is_shrinking = False
            self._shrunk_at = {rank: _position(feed) for rank, feed in self.feeds.items()}

    def _count_resized(self, blocks: int) -> None:
        if blocks:
            self.counters["regrown_blocks" if blocks > 0 else "shrunk_blocks"] += abs(blocks)

    def _plan_cut(self) -> None:
        if not self._is_cut_due:
            self._is_cut_due = True
            asyncio.get_running_loop().call_soon(self._cut)

    def _cut(self) -> None:
        self._is_cut_due = False
        for rank, feed in self.feeds.items():
            try:
                self.counters["batches"] += len(feed.cut())
            except Exception:
                self._broke(rank)
            if feed.canonicaliser.sweep(RESIZE_PAGES):
                self._plan_cut()
        self._wake()

    def _broke(self, rank: int) -> None:
        # Ours to mend, but the engine and its requests have no part in it.
        log.exception("kv_events_failed", dp_rank=rank)
        self.lose(rank, "they could not be applied")

    def _wake(self) -> None:
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
                # Reports that stay away say enough; the events are of use without them.
                if not is_failing:
                    log.exception("engine_loads_failed")
                is_failing = True
                continue
            for link in self.links:
                link.report(loads)

    async def _regrow(self) -> None:
        # Nobody says that an index has room again; one that has none asks again.
        while True:
            await asyncio.sleep(REGROW_S)
            if not self._was_shrunk:
                self.grow()
            self._was_shrunk = False

    def grow(self) -> None:
        """Begins to announce some more of what `shrink` withheld, if anything."""
        if self._is_resizing:
            return
        for feed in self.feeds.values():
            share = feed.canonicaliser.published_blocks // REGROW_SHARE
            feed.canonicaliser.grow(max(REGROW_BLOCKS_MIN, share))
        self._resize()

    def _follow(self, snapshot: Snapshot, tasks: TaskGroup) -> None:
        # Revision 0 has seen nothing yet, so it cannot take anybody away.
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
    """What one stream is to send next of one rank: the batch after `sequence`, or a snapshot.

    is_live: whether the indexer has said where to go on. base: where it went on, which needs no
    acknowledgement.
    """

    epoch: int
    sequence: int
    is_live: bool
    base: int
    chunks: deque[SnapshotChunk] = field(default_factory=deque)


class _Ended(Exception):
    """The stream is over, without an error."""


class Link:
    """The publication to one indexer.

    acked: (epoch, sequence) by rank, as the indexer acknowledged them on this stream.
    is_open: whether the indexer has said anything on it.
    """

    def __init__(self, publisher: Publisher, indexer: Instance) -> None:
        self.indexer = indexer
        self.acked: dict[int, tuple[int, int]] = {}
        self.is_open = False
        self._publisher = publisher
        self._cursors: dict[int, _Cursor] = {}
        self._told_degraded: dict[int, bool] = {}
        self._loads: Sequence[Load] = ()
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """There may be something to send."""
        self._changed.set()

    def report(self, loads: Sequence[Load]) -> None:
        """Load to send; replaces what has not been sent yet."""
        self._loads = loads
        self._changed.set()

    async def run(self) -> None:
        """Keeps a stream open for as long as the indexer is in discovery."""
        pause_s = PAUSE_FIRST_S
        while True:
            why = "the indexer ended the stream"
            try:
                if await self._stream():
                    why = "to begin anew"
            except MeshError as error:
                why = error.message
            except Exception as error:
                log.exception("publish_failed", indexer=self.indexer.id)
                why = repr(error)
            if self.is_open:
                pause_s = PAUSE_FIRST_S
            log.warning("publish_stream_lost", indexer=self.indexer.id, why=why, pause_s=pause_s)
            self.is_open = False
            await asyncio.sleep(jittered(pause_s, self._publisher.rng))
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    async def _stream(self) -> bool:
        """One stream from hello to end; whether it ended to begin anew. Raises MeshError."""
        async with self._publisher.open_call(self.indexer) as call:
            self._publisher.counters["streams"] += 1
            return await self._converse(call)

    async def _converse(self, call: PublishCall) -> bool:
        loop = asyncio.get_running_loop()
        ends_to_begin_anew = False
        hello = self._hello()
        patience = loop.call_later(ANSWER_S, self._go_live)
        try:
            async with TaskGroup() as tasks:
                reader = tasks.create_task(self._read(call))
                with _ending_with(call):
                    await self._write(call, hello)
                    ends_to_begin_anew = True
                    # Our end first: streams of one worker must not overlap at the indexer.
                    await call.done_writing()
                    await asyncio.wait([reader], timeout=END_S)
                raise _Ended
        except _Ended:
            # The group puts what is no MeshError first, but the reader's says why it ended.
            if reader.done() and not reader.cancelled():
                error = reader.exception()
                if isinstance(error, MeshError):
                    raise error from None
            return ends_to_begin_anew
        finally:
            patience.cancel()

    def _hello(self) -> indexer_pb2.PublishRequest:
        """Says where every rank stands, and starts over with the cursors."""
        publisher = self._publisher
        states: list[SourceState] = [feed.ledger.state for feed in publisher.feeds.values()]
        self.acked = {}
        self.is_open = False
        # Nothing can be missing of a rank that has said nothing yet.
        self._cursors = {
            state.source.dp_rank: _Cursor(
                state.epoch, state.sequence, state.sequence == 0, state.sequence
            )
            for state in states
        }
        self._told_degraded = {state.source.dp_rank: state.degraded for state in states}
        return indexer_pb2.PublishRequest(
            hello=indexer_pb2.PublishHello(
                worker_id=publisher.worker_id,
                partition=partition_to_proto(publisher.partition),
                sources=map(state_to_proto, states),
            )
        )

    def _go_live(self) -> None:
        for cursor in self._cursors.values():
            cursor.is_live = True
        self._changed.set()

    # The writer.

    async def _write(self, call: PublishCall, hello: indexer_pb2.PublishRequest) -> None:
        """Sends what there is; returns when hello has to be said anew."""
        await call.write(hello)
        while not self._must_begin_anew():
            frames = self._frames()
            for frame in frames:
                await call.write(frame)
            if not frames:
                await self._changed.wait()
            self._changed.clear()

    def _must_begin_anew(self) -> bool:
        """Only hello says whether a rank is degraded."""
        return any(
            feed.ledger.is_degraded != self._told_degraded[rank]
            for rank, feed in self._publisher.feeds.items()
        )

    def _frames(self) -> list[indexer_pb2.PublishRequest]:
        """The next frames: load, and one part or batch of each rank."""
        frames = []
        if self._loads:
            frames.append(indexer_pb2.PublishRequest(loads=map(load_to_proto, self._loads)))
            self._loads = ()
        for rank, cursor in self._cursors.items():
            frame = self._next_of(self._publisher.feeds[rank], cursor)
            if frame is not None:
                frames.append(frame)
        return frames

    def _next_of(self, feed: Feed, cursor: _Cursor) -> indexer_pb2.PublishRequest | None:
        ledger = feed.ledger
        if not cursor.is_live:
            return None
        if cursor.epoch != ledger.epoch:
            cursor.epoch, cursor.sequence, cursor.base = ledger.epoch, 0, 0
            cursor.chunks.clear()
        if not cursor.chunks:
            if cursor.sequence == ledger.sequence or self._is_ahead(ledger.source.dp_rank, cursor):
                return None
            batch = ledger.batch(cursor.sequence + 1)
            if batch is not None:
                cursor.sequence += 1
                return indexer_pb2.PublishRequest(batch=batch_to_proto(batch))
            self._begin_snapshot(feed, cursor)
        chunk = cursor.chunks.popleft()
        return indexer_pb2.PublishRequest(snapshot=chunk_to_proto(chunk))

    def _is_ahead(self, rank: int, cursor: _Cursor) -> bool:
        epoch, acked = self.acked.get(rank, (0, 0))
        known = max(cursor.base, acked) if epoch == cursor.epoch else cursor.base
        return cursor.sequence - known >= UNACKED_MAX

    def _begin_snapshot(self, feed: Feed, cursor: _Cursor) -> None:
        self._publisher.counters["snapshots"] += 1
        cursor.chunks = deque(feed.ledger.snapshot())
        cursor.epoch, cursor.sequence = _position(feed)
        cursor.base = cursor.sequence

    # The reader.

    async def _read(self, call: PublishCall) -> None:
        """Obeys the indexer until it ends the stream."""
        with _ending_with(call):
            async for response in call:
                self._obey(response)
        raise _Ended

    def _obey(self, response: indexer_pb2.PublishResponse) -> None:
        self.is_open = True
        for message in response.acked:
            self._acked(state_from_proto(message, "acked"))
        for resend in response.resends:
            self._resend(resend)
        if response.shrink_blocks:
            self._publisher.shrink(response.shrink_blocks, self.acked)
        self._changed.set()

    def _acked(self, state: SourceState) -> None:
        rank = state.source.dp_rank
        cursor = self._cursors.get(rank)
        if cursor is None:
            log.warning("ack_of_unknown_rank", indexer=self.indexer.id, dp_rank=rank)
            return
        self.acked[rank] = max(self.acked.get(rank, (0, 0)), (state.epoch, state.sequence))
        if not cursor.is_live:
            self._go_on(rank, cursor, state.epoch, state.sequence)

    def _resend(self, message: indexer_pb2.Resend) -> None:
        cursor = self._cursors.get(message.dp_rank)
        if cursor is None:
            log.warning("resend_of_unknown_rank", indexer=self.indexer.id, dp_rank=message.dp_rank)
            return
        last_had = message.from_sequence - 1
        if cursor.chunks and (message.epoch, last_had) <= (cursor.epoch, cursor.sequence):
            return  # It asked before it saw the snapshot that is on its way.
        self._publisher.counters["replays"] += 1
        self._go_on(message.dp_rank, cursor, message.epoch, last_had)

    def _go_on(self, rank: int, cursor: _Cursor, epoch: int, last_had: int) -> None:
        """Lets a rank go on behind what the indexer has, by replay or else by snapshot."""
        feed = self._publisher.feeds[rank]
        cursor.is_live = True
        cursor.chunks.clear()
        # Of an older epoch it has nothing that counts.
        cursor.epoch, cursor.sequence = feed.ledger.epoch, last_had
        if epoch != feed.ledger.epoch:
            cursor.sequence = 0
        cursor.base = cursor.sequence
        if not feed.ledger.can_replay(cursor.sequence + 1):
            self._begin_snapshot(feed, cursor)


@contextmanager
def _ending_with(call: PublishCall) -> Iterator[None]:
    """Inside, the end of the call raises its MeshError, or _Ended where the reader knows why."""
    try:
        with raising_mesh_errors():
            yield
    except asyncio.InvalidStateError:
        raise _Ended from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not call.done() or (task is not None and task.cancelling()):
            raise
        raise _Ended from None  # It was the call that was cancelled, not we.


def jittered(pause_s: float, rng: Random) -> float:
    """Between half and one and a half of the pause, so that a fleet does not return at once."""
    return pause_s * (0.5 + rng.random())


def _position(feed: Feed) -> tuple[int, int]:
    return feed.ledger.epoch, feed.ledger.sequence

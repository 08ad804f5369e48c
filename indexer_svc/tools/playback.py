"""`python -m indexer_svc.tools.playback --recording FILE [--indexer HOST:PORT]`: recorded KV
events again.

Without an indexer the events go into an index in this process, to see what it comes to; with one
they are published to it, as the recorded workers would. `--speed 1` keeps the recorded pace, 0 (the
default) knows no pause. The whole file is read first: a broken one is refused before anything is
sent. The last line of the output is a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.errors import InvalidRequest, MeshError, Unavailable, Unsupported
from common.kv.events import EventBatch, Partition, SnapshotChunk, Source, SourceState
from common.kv.index_feed import IndexFeed, exhaust
from common.rpc import channel as rpc
from common.rpc.interceptors import raising_mesh_errors
from common.runtime import env
from common.runtime.config import ServiceConfig, at_least, knob, read_config_or_exit
from common.runtime.tasks import TaskGroup
from common.wire.kv import (
    batch_to_proto,
    chunk_to_proto,
    partition_to_proto,
    state_from_proto,
    state_to_proto,
)
from indexer_svc.core.recording import (
    LINE_BYTES_MAX,
    BrokenRecording,
    Entry,
    Lost,
    Positions,
    Reading,
    play,
)
from indexer_svc.core.subscriber import StatusTold
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc

# How long an indexer may take to acknowledge what it was sent last.
ACK_S = 30.0
# What retired claims leave behind is cleared away by so many blocks an entry.
SWEEP_BLOCKS = 65_536
# Entries after which others get their turn, where nothing else makes them wait.
TURN_ENTRIES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig(ServiceConfig):
    """Flags of `python -m indexer_svc.tools.playback`, and the mesh-wide `KVMESH_*` variables."""

    recording: Path = field(metadata=knob("The file to read."))
    indexer: str | None = field(
        default=None,
        metadata=knob("The indexer to publish to, host:port; else into an index of its own."),
    )
    speed: float = field(
        default=0.0,
        metadata=knob("1: at the recorded pace, 2: twice as fast; 0: at once.", check=at_least(0)),
    )
    hold_s: float = field(
        default=0.0,
        metadata=knob(
            "Stay connected for so long afterwards: an indexer forgets workers that leave.",
            check=at_least(0),
        ),
    )


@dataclass(slots=True)
class Replayed:
    """What was played. is_cut: the file ends in the middle of a line, as after a crash.

    has_ended: the recording was ended in order. blocks: in the index at the end; -1: not known.
    shrinks: demands of the indexer to withdraw blocks, which a recording cannot obey.
    """

    lines: int = 0
    batches: int = 0
    chunks: int = 0
    sources: int = 0
    blocks: int = -1
    shrinks: int = 0
    seconds: float = 0.0
    is_cut: bool = False
    has_ended: bool = False

    def count(self, entry: Entry) -> None:
        """An entry was played."""
        self.batches += isinstance(entry, EventBatch)
        self.chunks += isinstance(entry, SnapshotChunk)

    def close(self, reading: Reading, began: float) -> Replayed:
        """All was played."""
        self.lines, self.is_cut = reading.lines_read, reading.is_cut
        self.has_ended = reading.has_ended
        self.seconds = round(time.perf_counter() - began, 3)
        return self


@asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[Reading]:
    with path.open("rb") as file:

        def lines() -> Iterator[bytes]:
            while line := file.readline(LINE_BYTES_MAX + 1):
                yield line

        yield Reading(lines())


async def replay_here(path: Path, feed: IndexFeed, speed: float = 0.0) -> Replayed:
    """Plays a file into an index of this process. Raises BrokenRecording, OSError."""
    began = time.perf_counter()
    replayed = Replayed()
    async with _opened(path) as reading:
        async for entry in _paced(reading, speed):
            try:
                exhaust(play(feed, entry, time.monotonic()))
            except InvalidRequest as error:
                raise BrokenRecording(reading.lines_read, error.message) from error
            feed.take_news()  # Nobody listens, and it would pile up.
            feed.sweep(SWEEP_BLOCKS)
            replayed.count(entry)
        replayed.sources, replayed.blocks = len(feed.sources()), feed.blocks
        return replayed.close(reading, began)


async def replay_to(
    path: Path,
    address: str,
    speed: float = 0.0,
    *,
    hold_s: float = 0.0,
    security: rpc.Security = rpc.PLAINTEXT,
) -> Replayed:
    """Publishes a file to an indexer. Raises BrokenRecording, OSError, MeshError."""
    cast = await _cast_of(path)
    began = time.perf_counter()
    async with rpc.channel(address, security=security) as channel, TaskGroup() as tasks:
        company = _Company(indexer_pb2_grpc.IndexerServiceStub(channel), security, cast, tasks)
        try:
            async with _opened(path) as reading:
                async for entry in _paced(reading, speed):
                    await company.play(entry)
                    company.replayed.count(entry)
                await company.acknowledged()
                replayed = company.replayed.close(reading, began)
            await asyncio.sleep(hold_s)
        finally:
            company.close()
        replayed.sources = sum(len(part.ranks) for part in cast.values())
        return replayed


async def _paced(reading: Reading, speed: float) -> AsyncIterator[Entry]:
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    for turns, (t, entry) in enumerate(reading, 1):
        late_s = loop.time() - began_at - t / speed if speed else 0.0
        if late_s < 0:
            await asyncio.sleep(-late_s)
        elif turns % TURN_ENTRIES == 0:
            await asyncio.sleep(0)
        yield entry


@dataclass(slots=True)
class _Part:
    """A worker of a recording: its partition and all its ranks."""

    partition: Partition
    ranks: dict[int, None] = field(default_factory=dict)


async def _cast_of(path: Path) -> dict[int, _Part]:
    """Who is in the recording; reads all of it. A hello has to name all ranks of a worker."""
    cast: dict[int, _Part] = {}
    async with _opened(path) as reading:
        async for entry in _paced(reading, 0.0):
            source = getattr(entry, "source", None)
            if not isinstance(source, Source):
                continue
            part = cast.get(source.worker_id)
            if isinstance(entry, StatusTold) and entry.partition is not None:
                if part is None:
                    part = cast[source.worker_id] = _Part(entry.partition)
                if part.partition != entry.partition:
                    why = f"line {reading.lines_read}: worker {source.worker_id} moves"
                    raise Unsupported("partition", why)
                part.ranks[source.dp_rank] = None
            if (part is None or source.dp_rank not in part.ranks) and not _is_farewell(entry):
                raise BrokenRecording(reading.lines_read, f"{source} was not told of before")
    return cast


def _is_farewell(entry: Entry) -> bool:
    return isinstance(entry, StatusTold) and entry.status.state == "gone"


class _Company:
    """The recorded workers, each with a Publish stream while it is there."""

    def __init__(
        self, stub: Any, security: rpc.Security, cast: dict[int, _Part], tasks: TaskGroup
    ) -> None:
        self.replayed = Replayed()
        self._stub = stub
        self._security = security
        self._cast = cast
        self._tasks = tasks
        self._streams: dict[int, _Stream] = {}
        self._positions = Positions()
        self._degraded: dict[Source, bool] = {}
        # Ranks that have left while others of their worker stay; workers to be said hello for anew,
        # and what is to be published of theirs then.
        self._gone: set[Source] = set()
        self._changed: set[int] = set()
        self._held: dict[int, list[Entry]] = {}

    async def play(self, entry: Entry) -> None:
        """Publishes one entry."""
        source = getattr(entry, "source", None)
        if isinstance(source, Source) and self._must_be_held(source, entry):
            self._held.setdefault(source.worker_id, []).append(entry)
        else:
            await self._play(entry)
        for worker_id in list(self._changed):
            # Not amid a snapshot, which the recording has only once.
            if not self._positions.is_loading(worker_id):
                self._changed.discard(worker_id)
                if worker_id in self._streams:
                    await self._begin_anew(worker_id)
                for held in self._held.pop(worker_id, ()):
                    await self._play(held)
                if isinstance(entry, Lost):
                    self._positions.take(entry)

    def _must_be_held(self, source: Source, entry: Entry) -> bool:
        """Whether it is of a rank that came back, and that its worker's stream does not list."""
        if source in self._gone and not _is_farewell(entry):
            self._gone.discard(source)
            self._changed.add(source.worker_id)
        stream = self._streams.get(source.worker_id)
        return stream is not None and source not in stream.sources and not _is_farewell(entry)

    async def _play(self, entry: Entry) -> None:
        match entry:
            case StatusTold(source, _, status):
                self._positions.take(entry)
                if status.state != "gone":
                    await self._tell_degraded(source, status.state == "degraded")
                elif self._is_left(source.worker_id):
                    self._gone.add(source)
                    self._changed.add(source.worker_id)
                else:
                    await self._end(source.worker_id)
            case EventBatch(source):
                await (await self._stream(source)).write(batch=batch_to_proto(entry))
                # Only now: a hello says what was there before.
                self._positions.take(entry)
            case SnapshotChunk(source):
                await (await self._stream(source)).write(snapshot=chunk_to_proto(entry))
                self._positions.take(entry)
            case Lost():
                self._positions.take(entry)
                # What was under way is not ended: hello says where each of them stands.
                # At once: an indexer forgets a worker that is not in discovery and has no stream.
                for worker_id in list(self._streams):
                    await self._begin_anew(worker_id)
            case _:
                pass

    async def acknowledged(self) -> None:
        """Returns when all is in the index. Raises Unavailable after ACK_S."""
        wanted = {one.source: (one.epoch, one.sequence) for one in self._positions.states()}
        for source in wanted:
            await self._stream(source)
        try:
            async with asyncio.timeout(ACK_S):
                for stream in self._streams.values():
                    await stream.acknowledged(wanted)
        except TimeoutError:
            raise Unavailable(f"the indexer has not taken all in {ACK_S} s") from None

    def close(self) -> None:
        """Ends all streams."""
        for stream in self._streams.values():
            stream.call.cancel()
            stream.reader.cancel()
            self.replayed.shrinks += stream.shrinks
        self._streams.clear()

    def _is_left(self, worker_id: int) -> bool:
        return any(one.source.worker_id == worker_id for one in self._positions.states())

    async def _tell_degraded(self, source: Source, is_degraded: bool) -> None:
        if self._degraded.get(source, False) == is_degraded:
            return
        self._degraded[source] = is_degraded
        if source.worker_id in self._streams:
            state = state_to_proto(self._state_of(source))
            await self._streams[source.worker_id].write(states=[state])

    def _state_of(self, source: Source) -> SourceState:
        known = {one.source: one for one in self._positions.states()}
        at = known.get(source, SourceState(source, 0, 0))
        return SourceState(source, at.epoch, at.sequence, self._degraded.get(source, False))

    async def _stream(self, source: Source) -> _Stream:
        stream = self._streams.get(source.worker_id)
        if stream is None:
            stream = self._streams[source.worker_id] = await self._begin(source.worker_id)
        return stream

    async def _begin(self, worker_id: int) -> _Stream:
        part = self._cast[worker_id]
        call = self._stub.Publish(metadata=rpc.call_metadata(self._security))
        ranks = (Source(worker_id, rank) for rank in part.ranks)
        sources = [source for source in ranks if source not in self._gone]
        stream = _Stream(call, sources, self._tasks)
        hello = indexer_pb2.PublishHello(
            worker_id=worker_id,
            partition=partition_to_proto(part.partition),
            sources=[state_to_proto(self._state_of(source)) for source in sources],
        )
        await stream.write(hello=hello)
        return stream

    async def _begin_anew(self, worker_id: int) -> None:
        await self._end(worker_id)
        self._streams[worker_id] = await self._begin(worker_id)

    async def _end(self, worker_id: int) -> None:
        stream = self._streams.pop(worker_id, None)
        if stream is not None:
            # Ours first, and to its end: streams of one worker must not overlap at the indexer.
            await stream.end()
            self.replayed.shrinks += stream.shrinks


class _Stream:
    """One Publish stream. Any: a call of grpc.aio."""

    def __init__(self, call: Any, sources: Sequence[Source], tasks: TaskGroup) -> None:
        self.call = call
        self.shrinks = 0
        self._acked = dict.fromkeys(sources, (-1, 0))
        self._changed = asyncio.Event()
        self.reader = tasks.create_task(self._read())

    async def write(self, **parts: Any) -> None:
        try:
            with raising_mesh_errors():
                await self.call.write(indexer_pb2.PublishRequest(**parts))
        except asyncio.InvalidStateError:
            raise Unavailable("the indexer has ended the stream") from None

    @property
    def sources(self) -> Collection[Source]:
        """Those that its hello listed."""
        return self._acked.keys()

    async def acknowledged(self, wanted: dict[Source, tuple[int, int]]) -> None:
        """Returns when all of this stream's sources have come as far; (0, 0) is the beginning."""
        while any(at < wanted.get(source, (0, 0)) for source, at in self._acked.items()):
            self._changed.clear()
            await self._changed.wait()

    async def end(self) -> None:
        with raising_mesh_errors():
            await self.call.done_writing()
        await self.reader

    async def _read(self) -> None:
        with raising_mesh_errors():
            async for response in self.call:
                self.shrinks += response.shrink_blocks > 0
                for message in response.acked:
                    state = state_from_proto(message, "acked")
                    self._acked[state.source] = (state.epoch, state.sequence)
                for resend in response.resends:
                    raise Unavailable(
                        f"the indexer lacks batch {resend.from_sequence} of rank {resend.dp_rank},"
                        " which the recording does not have"
                    )
                self._changed.set()


async def _replay(config: ReplayConfig) -> Replayed:
    if config.indexer is None:
        return await replay_here(config.recording, IndexFeed(), config.speed)
    return await replay_to(
        config.recording,
        config.indexer,
        config.speed,
        hold_s=config.hold_s,
        security=rpc.security_of(config),
    )


def main() -> None:
    """Exit status 0; 1 when the file is broken or the indexer did not take it."""
    config, _ = read_config_or_exit(ReplayConfig, None, env.environ(), sys.argv[1:], name="replay")
    try:
        replayed = asyncio.run(_replay(config))
    except (MeshError, OSError) as error:
        sys.stderr.write(f"replay: {error}\n")
        sys.exit(1)
    sys.stdout.write(json.dumps(asdict(replayed)) + "\n")


if __name__ == "__main__":
    main()

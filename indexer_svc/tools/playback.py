"""Plays recorded KV events back.

`python -m indexer_svc.tools.playback --recording FILE [--indexer HOST:PORT]` publishes the events
to an indexer as the recorded workers would, or without an indexer applies them to an index in this
process. `--speed 1` keeps the recorded pace, 0 (the default) has no pauses. The whole file is read
first, so that an invalid one is rejected before anything is sent. The last line of the output is a
JSON object. With `--to-json` the messages are printed as lines of JSON, and nothing is played.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from google.protobuf.json_format import MessageToJson
from pydantic import NonNegativeFloat

from common.errors import InvalidRequest, MeshError, Unavailable, Unsupported
from common.kv.events import EventBatch, Partition, SnapshotChunk, Source, SourcePosition
from common.kv.index_feed import IndexFeed, run_all_steps
from common.rpc import channel as rpc
from common.rpc.status import map_rpc_errors
from common.runtime import env
from common.runtime.config import ServiceConfig, read_config_or_exit
from common.runtime.tasks import TaskGroup
from common.wire.kv import (
    batch_to_proto,
    partition_to_proto,
    snapshot_chunk_to_proto,
    source_state_from_proto,
    source_state_to_proto,
)
from indexer_svc.core.recording import IndexLost, RecordingEntry, SourcePositions, play
from indexer_svc.core.subscriber import StatusUpdate
from indexer_svc.tools.recording_file import BrokenRecording, RecordingReader
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc

# Time limit for the indexer's acknowledgement of the last batch.
ACK_TIMEOUT_S = 30.0
# Retired blocks swept per entry.
SWEEP_BLOCKS = 65_536
# Entries per turn of the event loop without pauses.
ENTRIES_PER_TURN = 256


class PlaybackConfig(ServiceConfig):
    """Flags of `python -m indexer_svc.tools.playback`, and the mesh-wide `KVMESH_*` variables."""

    recording: Path
    """The recording to read."""
    indexer: str | None = None
    """host:port of the indexer to publish to. Unset: an index in this process."""
    speed: NonNegativeFloat = 0.0
    """1: at the recorded speed, 2: twice as fast. 0: without delays."""
    hold_s: NonNegativeFloat = 0.0
    """Seconds to stay connected at the end: an indexer removes workers that leave."""
    to_json: bool = False
    """Print the messages as lines of JSON instead: worker ids as text, hashes as base64 of 8 bytes
    each, little endian."""

    def problems(self) -> list[str]:
        found = super().problems()
        if self.to_json and self.indexer is not None:
            found.append("to_json: nothing is played; leave out --indexer")
        return found


@dataclass(slots=True)
class PlaybackStats:
    """Totals of a playback."""

    messages: int = 0
    batches: int = 0
    chunks: int = 0
    sources: int = 0
    blocks: int = -1
    """Blocks in the index at the end. -1: unknown."""
    shrinks: int = 0
    """Requests of the indexer to withdraw blocks, which a playback ignores."""
    seconds: float = 0.0
    is_cut: bool = False
    """Whether the last message is incomplete, as after a crash."""
    has_ended: bool = False
    """Whether the recording ended in order."""

    def count(self, entry: RecordingEntry) -> None:
        self.batches += isinstance(entry, EventBatch)
        self.chunks += isinstance(entry, SnapshotChunk)

    def close(self, reader: RecordingReader, began: float) -> PlaybackStats:
        """Completes the totals; returns self."""
        self.messages, self.is_cut = reader.messages_read, reader.is_cut
        self.has_ended = reader.has_ended
        self.seconds = round(time.perf_counter() - began, 3)
        return self


@contextmanager
def _open_recording(path: Path) -> Iterator[RecordingReader]:
    with path.open("rb") as file:
        yield RecordingReader(file)


def write_json_lines(path: Path, out: TextIO) -> None:
    """Writes the messages of a file as lines of JSON. Raises BrokenRecording, OSError."""
    with _open_recording(path) as reader:
        for message in reader.messages():
            out.write(MessageToJson(message, indent=None, preserving_proto_field_name=True) + "\n")


async def play_into_local_index(path: Path, feed: IndexFeed, speed: float = 0.0) -> PlaybackStats:
    """Plays a file into a local index. Raises BrokenRecording, OSError."""
    began = time.perf_counter()
    playback_stats = PlaybackStats()
    with _open_recording(path) as reader:
        async for entry in _paced(reader, speed):
            try:
                run_all_steps(play(feed, entry, time.monotonic()))
            except InvalidRequest as error:
                raise BrokenRecording(reader.messages_read, error.message) from error
            feed.take_events()  # Unused; they would accumulate.
            feed.sweep(SWEEP_BLOCKS)
            playback_stats.count(entry)
        playback_stats.sources, playback_stats.blocks = len(feed.sources()), feed.blocks
        return playback_stats.close(reader, began)


async def play_to_indexer(
    path: Path,
    address: str,
    speed: float = 0.0,
    *,
    hold_s: float = 0.0,
    security: rpc.Security = rpc.PLAINTEXT,
) -> PlaybackStats:
    """Publishes a file to an indexer. Raises BrokenRecording, OSError, MeshError."""
    workers = await _read_workers(path)
    began = time.perf_counter()
    async with (
        rpc.channel(address, role="indexer", security=security) as channel,
        TaskGroup() as tasks,
    ):
        stub = indexer_pb2_grpc.IndexerServiceStub(channel)
        publishers = _PublisherStreams(stub, workers, tasks)
        try:
            with _open_recording(path) as reader:
                async for entry in _paced(reader, speed):
                    await publishers.play(entry)
                    publishers.playback_stats.count(entry)
                await publishers.wait_until_acknowledged()
                playback_stats = publishers.playback_stats.close(reader, began)
            await asyncio.sleep(hold_s)
        finally:
            publishers.close()
        playback_stats.sources = sum(len(worker.ranks) for worker in workers.values())
        return playback_stats


async def _paced(reader: RecordingReader, speed: float) -> AsyncIterator[RecordingEntry]:
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    for turns, (t, entry) in enumerate(reader, 1):
        late_s = loop.time() - began_at - t / speed if speed else 0.0
        if late_s < 0:
            await asyncio.sleep(-late_s)
        elif turns % ENTRIES_PER_TURN == 0:
            await asyncio.sleep(0)
        yield entry


@dataclass(slots=True)
class _RecordedWorker:
    """Partition and ranks of a recorded worker."""

    partition: Partition
    ranks: dict[int, None] = field(default_factory=dict)


async def _read_workers(path: Path) -> dict[int, _RecordedWorker]:
    """Reads the whole recording for its workers, because a hello lists all ranks of a worker."""
    workers: dict[int, _RecordedWorker] = {}
    with _open_recording(path) as reader:
        async for entry in _paced(reader, 0.0):
            source = getattr(entry, "source", None)
            if not isinstance(source, Source):
                continue
            worker = workers.get(source.worker_id)
            if isinstance(entry, StatusUpdate) and entry.partition is not None:
                if worker is None:
                    worker = workers[source.worker_id] = _RecordedWorker(entry.partition)
                if worker.partition != entry.partition:
                    number, worker_id = reader.messages_read, source.worker_id
                    reason = f"message {number}: worker {worker_id} changes its partition"
                    raise Unsupported("partition", reason)
                worker.ranks[source.dp_rank] = None
            is_known = worker is not None and source.dp_rank in worker.ranks
            if not (is_known or _is_gone_status(entry)):
                raise BrokenRecording(reader.messages_read, f"no status of {source} before")
    return workers


def _is_gone_status(entry: RecordingEntry) -> bool:
    return isinstance(entry, StatusUpdate) and entry.status.state == "gone"


class _PublisherStreams:
    """One Publish stream for each recorded worker that is present."""

    def __init__(
        self,
        stub: Any,
        workers: dict[int, _RecordedWorker],
        tasks: TaskGroup,
    ) -> None:
        self.playback_stats = PlaybackStats()
        self._stub = stub
        self._workers = workers
        self._tasks = tasks
        self._streams: dict[int, _PublishStream] = {}
        self._positions = SourcePositions()
        self._degraded: dict[Source, bool] = {}
        # Ranks that are gone while others of their worker stay; workers with a stream to restart;
        # entries to publish after the restart.
        self._gone: set[Source] = set()
        self._changed: set[int] = set()
        self._deferred: dict[int, list[RecordingEntry]] = {}

    async def play(self, entry: RecordingEntry) -> None:
        source = getattr(entry, "source", None)
        if isinstance(source, Source) and self._must_defer(source, entry):
            self._deferred.setdefault(source.worker_id, []).append(entry)
        else:
            await self._play(entry)
        for worker_id in list(self._changed):
            # Not during a snapshot, which the recording has only once.
            if not self._positions.is_loading(worker_id):
                self._changed.discard(worker_id)
                if worker_id in self._streams:
                    await self._restart_stream(worker_id)
                for deferred_entry in self._deferred.pop(worker_id, ()):
                    await self._play(deferred_entry)
                if isinstance(entry, IndexLost):
                    self._positions.take(entry)

    def _must_defer(self, source: Source, entry: RecordingEntry) -> bool:
        """Returns whether the hello of the worker's stream does not list the entry's rank."""
        if source in self._gone and not _is_gone_status(entry):
            self._gone.discard(source)
            self._changed.add(source.worker_id)
        stream = self._streams.get(source.worker_id)
        return stream is not None and source not in stream.acked and not _is_gone_status(entry)

    async def _play(self, entry: RecordingEntry) -> None:
        match entry:
            case StatusUpdate(source, _, status):
                self._positions.take(entry)
                if status.state != "gone":
                    await self._send_degraded(source, status.state == "degraded")
                elif any(p.source.worker_id == source.worker_id for p in self._positions.states()):
                    self._gone.add(source)
                    self._changed.add(source.worker_id)
                else:
                    await self._close_stream(source.worker_id)
            case EventBatch(source):
                await (await self._stream(source)).write(batch=batch_to_proto(entry))
                # After the write: a hello has the position before this batch.
                self._positions.take(entry)
            case SnapshotChunk(source):
                await (await self._stream(source)).write(snapshot=snapshot_chunk_to_proto(entry))
                self._positions.take(entry)
            case IndexLost():
                self._positions.take(entry)
                # Unfinished snapshots are dropped; hello has the position of each source. At once,
                # because an indexer removes an unregistered worker without a stream.
                for worker_id in list(self._streams):
                    await self._restart_stream(worker_id)
            case _:
                pass

    async def wait_until_acknowledged(self) -> None:
        """Waits until the index has everything. Raises Unavailable after ACK_TIMEOUT_S."""
        required = {
            state.source: (state.epoch, state.sequence) for state in self._positions.states()
        }
        for source in required:
            await self._stream(source)
        try:
            async with asyncio.timeout(ACK_TIMEOUT_S):
                for stream in self._streams.values():
                    await stream.wait_until_acknowledged(required)
        except TimeoutError:
            error = f"no acknowledgement of all batches within {ACK_TIMEOUT_S} s"
            raise Unavailable(error) from None

    def close(self) -> None:
        for stream in self._streams.values():
            stream.call.cancel()
            stream.reader.cancel()
            self.playback_stats.shrinks += stream.shrinks
        self._streams.clear()

    async def _send_degraded(self, source: Source, is_degraded: bool) -> None:
        if self._degraded.get(source, False) == is_degraded:
            return
        self._degraded[source] = is_degraded
        if source.worker_id in self._streams:
            state = source_state_to_proto(self._state_of(source))
            await self._streams[source.worker_id].write(states=[state])

    def _state_of(self, source: Source) -> SourcePosition:
        known = {state.source: state for state in self._positions.states()}
        at = known.get(source, SourcePosition(source, 0, 0))
        return SourcePosition(source, at.epoch, at.sequence, self._degraded.get(source, False))

    async def _stream(self, source: Source) -> _PublishStream:
        stream = self._streams.get(source.worker_id)
        if stream is None:
            stream = self._streams[source.worker_id] = await self._open_stream(source.worker_id)
        return stream

    async def _open_stream(self, worker_id: int) -> _PublishStream:
        worker = self._workers[worker_id]
        call = self._stub.Publish()
        ranks = (Source(worker_id, rank) for rank in worker.ranks)
        sources = [source for source in ranks if source not in self._gone]
        stream = _PublishStream(call, sources, self._tasks)
        hello = indexer_pb2.PublishHello(
            worker_id=worker_id,
            partition=partition_to_proto(worker.partition),
            sources=[source_state_to_proto(self._state_of(source)) for source in sources],
        )
        await stream.write(hello=hello)
        return stream

    async def _restart_stream(self, worker_id: int) -> None:
        await self._close_stream(worker_id)
        self._streams[worker_id] = await self._open_stream(worker_id)

    async def _close_stream(self, worker_id: int) -> None:
        stream = self._streams.pop(worker_id, None)
        if stream is not None:
            # To its end: streams of one worker must not overlap at the indexer.
            await stream.end()
            self.playback_stats.shrinks += stream.shrinks


class _PublishStream:
    """One Publish stream. Any: a call of grpc.aio."""

    def __init__(self, call: Any, sources: Sequence[Source], tasks: TaskGroup) -> None:
        self.call = call
        self.shrinks = 0
        # Acknowledged position of each source that the hello listed.
        self.acked = dict.fromkeys(sources, (-1, 0))
        self._changed = asyncio.Event()
        self.reader = tasks.create_task(self._read())

    async def write(self, **parts: Any) -> None:
        try:
            with map_rpc_errors():
                await self.call.write(indexer_pb2.PublishRequest(**parts))
        except asyncio.InvalidStateError:
            raise Unavailable("the indexer ended the stream") from None

    async def wait_until_acknowledged(self, required: dict[Source, tuple[int, int]]) -> None:
        """Waits until all sources of this stream have reached `required`; (0, 0) is the start."""
        while any(at < required.get(source, (0, 0)) for source, at in self.acked.items()):
            self._changed.clear()
            await self._changed.wait()

    async def end(self) -> None:
        with map_rpc_errors():
            await self.call.done_writing()
        await self.reader

    async def _read(self) -> None:
        with map_rpc_errors():
            async for response in self.call:
                self.shrinks += response.shrink_blocks > 0
                for message in response.acked:
                    state = source_state_from_proto(message, "acked")
                    self.acked[state.source] = (state.epoch, state.sequence)
                for resend in response.resends:
                    raise Unavailable(
                        f"the indexer requests batch {resend.from_sequence} of rank"
                        f" {resend.dp_rank}, which is not in the recording"
                    )
                self._changed.set()


async def _run_playback(config: PlaybackConfig) -> PlaybackStats:
    recording, address, speed = config.recording, config.indexer, config.speed
    if address is None:
        return await play_into_local_index(recording, IndexFeed(), speed)
    security = rpc.security_from_config(config)
    return await play_to_indexer(recording, address, speed, hold_s=config.hold_s, security=security)


def main() -> None:
    """Exits status 0; 1 if the file is invalid or the indexer rejects it."""
    arguments = sys.argv[1:]
    config, _ = read_config_or_exit(PlaybackConfig, None, env.environ(), arguments, name="playback")
    try:
        if config.to_json:
            write_json_lines(config.recording, sys.stdout)
            return
        playback_stats = asyncio.run(_run_playback(config))
    except (MeshError, OSError) as error:
        sys.stderr.write(f"playback: {error}\n")
        sys.exit(1)
    sys.stdout.write(json.dumps(asdict(playback_stats)) + "\n")


if __name__ == "__main__":
    main()

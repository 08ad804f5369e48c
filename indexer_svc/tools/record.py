"""Records the KV events of an indexer to a file.

`python -m indexer_svc.tools.record --indexer HOST:PORT --out FILE` subscribes as a router does and
writes the format of `core/recording.py`. After the loss of the indexer it subscribes again and
resumes. SIGINT or SIGTERM ends the recording in order. The last line of the output is a JSON
object. `indexer_svc.tools.playback` reads the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import structlog
from pydantic import PositiveInt

from common.errors import InvalidRequest, MeshError, Unavailable
from common.rpc import channel as rpc
from common.rpc.interceptors import map_rpc_errors
from common.runtime import env
from common.runtime.config import ServiceConfig, read_config_or_exit
from common.runtime.tasks import TaskGroup
from common.wire.kv import (
    batch_from_proto,
    message_parts,
    partition_from_proto,
    snapshot_chunk_from_proto,
    source_from_proto,
    source_state_to_proto,
    source_status_from_proto,
)
from indexer_svc.core.recording import (
    IndexLost,
    RecordingEnd,
    RecordingEntry,
    SourcePositions,
    encode_header,
    encode_line,
)
from indexer_svc.core.subscriber import StatusUpdate
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc

MB = 1_000_000
# A crash of the machine loses at most this much of the recording.
SYNC_EVERY_S = 1.0
RETRY_S = 0.2
# Silence after which the indexer is lost.
INDEXER_TIMEOUT_S = 30.0

LOG = structlog.get_logger(__name__)


class RecordConfig(ServiceConfig):
    """Flags of `python -m indexer_svc.tools.record`, and the mesh-wide `KVMESH_*` variables."""

    indexer: str
    """host:port of the indexer to record."""
    out: Path
    """The file to write. It must not exist."""
    max_mb: PositiveInt = 1024
    """The recording ends with exit status 1 before the file exceeds this size."""
    seconds: float | None = None
    """Duration of the recording. Unset: until a signal."""


@dataclass(slots=True)
class RecordingStats:
    """Totals of a recording. is_full: the recording ended at the size limit."""

    lines: int = 0
    bytes: int = 0
    batches: int = 0
    blocks: int = 0
    losses: int = 0
    is_full: bool = False


class Recorder:
    """Writes entries to a file, one per line. clock: in seconds."""

    def __init__(self, file: BinaryIO, bytes_max: int, clock: Callable[[], float]) -> None:
        self.recording_stats = RecordingStats()
        self.positions = SourcePositions()
        self._file = file
        self._clock = clock
        self._began_at = clock()
        # Space for the end entry is reserved.
        self._bytes_max = bytes_max - len(encode_line(1e9, RecordingEnd()))
        self._write(encode_header())

    def add(self, entry: RecordingEntry) -> None:
        """Write an entry. Raises Unavailable, and writes nothing, if it does not fit."""
        recording_stats = self.recording_stats
        line = encode_line(self._clock() - self._began_at, entry)
        is_over = recording_stats.bytes + len(line) > self._bytes_max
        if is_over and not isinstance(entry, RecordingEnd):
            recording_stats.is_full = True
            text = f"recording full: {recording_stats.bytes}/{self._bytes_max} bytes"
            raise Unavailable(text, reason="RECORDING_FULL")
        self._write(line)
        self.positions.take(entry)
        recording_stats.losses += isinstance(entry, IndexLost)
        events = getattr(entry, "events", ())
        recording_stats.batches += bool(events)
        recording_stats.blocks += sum(len(one.hashes) for one in events)

    def flush(self) -> None:
        """Hand the written lines to the operating system."""
        self._file.flush()

    def sync(self) -> None:
        """Write the flushed lines to the disk; blocks."""
        os.fsync(self._file.fileno())

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self.recording_stats.lines += 1
        self.recording_stats.bytes += len(line)


async def record(address: str, recorder: Recorder, security: rpc.Security = rpc.PLAINTEXT) -> None:
    """Record until cancelled. Raises MeshError if full or INDEXER_TIMEOUT_S without indexer."""
    async with TaskGroup() as tasks:
        syncing = tasks.create_task(_sync_periodically(recorder))
        try:
            await _subscribe_until_cancelled(address, recorder, security)
        finally:
            syncing.cancel()


async def _subscribe_until_cancelled(
    address: str, recorder: Recorder, security: rpc.Security
) -> None:
    async with rpc.channel(address, role="indexer", security=security) as channel:
        stub = indexer_pb2_grpc.IndexerServiceStub(channel)
        last_received_at = time.monotonic()
        while True:
            lines = recorder.recording_stats.lines
            received = asyncio.Event()
            failure: MeshError = Unavailable("the indexer ended the stream")
            try:
                await _subscribe(stub, recorder, received)
            except MeshError as error:
                if recorder.recording_stats.is_full or isinstance(error, InvalidRequest):
                    raise
                failure = error
            finally:
                recorder.flush()
            if received.is_set():
                # The indexer was up until now.
                last_received_at = time.monotonic()
            if recorder.recording_stats.lines > lines:
                recorder.add(IndexLost())
            LOG.warning("indexer_lost", indexer=address, reason=failure.message)
            if time.monotonic() - last_received_at >= INDEXER_TIMEOUT_S:
                raise failure
            await asyncio.sleep(RETRY_S)


async def _subscribe(stub: Any, recorder: Recorder, received: asyncio.Event) -> None:
    resume = map(source_state_to_proto, recorder.positions.states())
    request = indexer_pb2.SubscribeRequest(resume=resume)
    call = stub.Subscribe(request)
    async with rpc.cancelling(call):
        with map_rpc_errors():
            async for message in call:
                received.set()
                for entry in entries_of(message):
                    recorder.add(entry)
                recorder.flush()


def entries_of(message: indexer_pb2.SubscribeResponse) -> Iterator[RecordingEntry]:
    """Return the KV entries of a subscription message, in order, without loads."""
    for part in message_parts(message):
        if part.HasField("status"):
            partition = partition_from_proto(part.partition) if part.HasField("partition") else None
            source = source_from_proto(part.source)
            yield StatusUpdate(source, partition, source_status_from_proto(part.status))
        if part.HasField("batch"):
            yield batch_from_proto(part.batch, part.source.worker_id)
        if part.HasField("snapshot"):
            yield snapshot_chunk_from_proto(part.snapshot)


async def _sync_periodically(recorder: Recorder) -> None:
    while True:
        await asyncio.sleep(SYNC_EVERY_S)
        await asyncio.to_thread(recorder.sync)


async def _record_until_signal(config: RecordConfig, recorder: Recorder) -> None:
    task = asyncio.current_task()
    assert task is not None, "this runs in a task"
    is_stopping = False

    def end() -> None:
        nonlocal is_stopping
        is_stopping = True
        task.cancel()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, end)
    if config.seconds is not None:
        loop.call_later(config.seconds, end)
    try:
        await record(config.indexer, recorder, rpc.security_from_config(config))
    except asyncio.CancelledError:
        if not is_stopping:
            raise
        # Cancelled by `end`: no other task waits for this one.
        task.uncancel()


def main() -> None:
    """Exit status 0; 1 if the file is full, exists or cannot be written, or the indexer is lost."""
    config, _ = read_config_or_exit(RecordConfig, None, env.environ(), sys.argv[1:], name="record")
    error = ""
    try:
        file = config.out.open("xb")
    except OSError as problem:
        sys.stderr.write(f"record: {problem}\n")
        sys.exit(1)
    recorder = Recorder(file, config.max_mb * MB, time.monotonic)
    try:
        with file:
            try:
                asyncio.run(_record_until_signal(config, recorder))
            except MeshError as problem:
                error = problem.message
            recorder.add(RecordingEnd())
            recorder.flush()
            recorder.sync()
    except OSError as problem:
        error = f"{config.out}: {problem}"
    sys.stdout.write(json.dumps(asdict(recorder.recording_stats) | {"error": error}) + "\n")
    sys.exit(1 if error else 0)


if __name__ == "__main__":
    main()

"""Records the KV events of an indexer to a file.

`python -m indexer_svc.tools.record --indexer HOST:PORT --out FILE` subscribes as a router does and
writes each message with KV events as it is (`recording_file.py`). After the loss of the indexer it
subscribes again and resumes. SIGINT or SIGTERM ends the recording in order. The last line of the
output is a JSON object. `indexer_svc.tools.playback` reads the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import structlog
from pydantic import PositiveInt

from common.errors import InvalidRequest, MeshError, Unavailable
from common.kv.events import EventBatch
from common.rpc import channel as rpc
from common.rpc.status import map_rpc_errors
from common.runtime import env
from common.runtime.config import ServiceConfig, read_config_or_exit
from common.runtime.tasks import TaskGroup
from common.streams.backoff import Backoff
from common.streams.peer import keep_connected
from common.wire.kv import source_state_to_proto
from indexer_svc.core.recording import IndexLost, SourcePositions
from indexer_svc.tools.recording_file import HEADER, encode_message, entries_of
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc

MB = 1_000_000
# A crash of the machine loses at most this much of the recording.
SYNC_EVERY_S = 1.0
RETRY_S = 0.2
# Size of the last message, with the longest time.
END_BYTES_MAX = len(encode_message(indexer_pb2.RecordedMessage(time_us=2**64 - 1, ended=True)))
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
    """Totals of a recording."""

    messages: int = 0
    bytes: int = 0
    batches: int = 0
    blocks: int = 0
    losses: int = 0
    """How often the recorder lost its index."""
    is_full: bool = False
    """Whether the recording ended at the size limit."""


class Recorder:
    """Writes the messages of subscriptions to a file. clock: in seconds."""

    def __init__(self, file: BinaryIO, bytes_max: int, clock: Callable[[], float]) -> None:
        self.recording_stats = RecordingStats()
        self.positions = SourcePositions()
        self._file = file
        self._clock = clock
        self._began_at = clock()
        # Space for the last message is reserved.
        self._bytes_max = bytes_max - END_BYTES_MAX
        self._write(HEADER)

    def add(self, received: indexer_pb2.SubscribeResponse) -> None:
        """Writes a message of a subscription, unless it has no KV entries.

        Raises Unavailable, and writes nothing, if it does not fit; InvalidRequest if it is invalid.
        """
        entries = list(entries_of(received))
        if not entries:
            return
        self._add(indexer_pb2.RecordedMessage(received=received))
        for entry in entries:
            self.positions.take(entry)
            events = entry.events if isinstance(entry, EventBatch) else ()
            self.recording_stats.batches += bool(events)
            self.recording_stats.blocks += sum(len(event.hashes) for event in events)

    def mark_index_lost(self) -> None:
        """Writes that the index was lost. Raises as `add` does."""
        self._add(indexer_pb2.RecordedMessage(index_lost=True))
        self.positions.take(IndexLost())
        self.recording_stats.losses += 1

    def end(self) -> None:
        """Writes that the recording ends in order; always fits."""
        self._write(self._encode(indexer_pb2.RecordedMessage(ended=True)))
        self.recording_stats.messages += 1

    def flush(self) -> None:
        """Hands the written messages to the operating system."""
        self._file.flush()

    def sync(self) -> None:
        """Writes the flushed messages to the disk; blocks."""
        os.fsync(self._file.fileno())

    def _add(self, message: indexer_pb2.RecordedMessage) -> None:
        data, recording_stats = self._encode(message), self.recording_stats
        if recording_stats.bytes + len(data) > self._bytes_max:
            recording_stats.is_full = True
            text = f"recording full: {recording_stats.bytes}/{self._bytes_max} bytes"
            raise Unavailable(text, reason="RECORDING_FULL")
        self._write(data)
        recording_stats.messages += 1

    def _encode(self, message: indexer_pb2.RecordedMessage) -> bytes:
        message.time_us = round((self._clock() - self._began_at) * 1e6)
        return encode_message(message)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.recording_stats.bytes += len(data)


async def record(address: str, recorder: Recorder, security: rpc.Security = rpc.PLAINTEXT) -> None:
    """Records until cancelled. Raises MeshError if full or INDEXER_TIMEOUT_S without indexer."""
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
        recording_stats = recorder.recording_stats
        received = asyncio.Event()
        last_received_at = time.monotonic()
        messages_before = 0

        async def connect() -> NoReturn:
            nonlocal messages_before
            messages_before = recording_stats.messages
            received.clear()
            try:
                await _subscribe(stub, recorder, received)
            finally:
                recorder.flush()
            raise Unavailable("the indexer ended the stream")

        def on_lost(error: Exception, _: float) -> None:
            nonlocal last_received_at
            is_invalid = isinstance(error, InvalidRequest)
            if recording_stats.is_full or is_invalid or not isinstance(error, MeshError):
                raise error
            if received.is_set():
                # The indexer was up until now.
                last_received_at = time.monotonic()
            if recording_stats.messages > messages_before:
                recorder.mark_index_lost()
            LOG.warning("indexer_lost", indexer=address, reason=error.message)
            if time.monotonic() - last_received_at >= INDEXER_TIMEOUT_S:
                raise error

        await keep_connected(connect, Backoff(RETRY_S, RETRY_S, None), on_lost)


async def _subscribe(stub: Any, recorder: Recorder, received: asyncio.Event) -> None:
    resume = map(source_state_to_proto, recorder.positions.states())
    request = indexer_pb2.SubscribeRequest(resume=resume)
    call = stub.Subscribe(request)
    async with rpc.cancelling(call):
        with map_rpc_errors():
            async for message in call:
                received.set()
                recorder.add(message)
                recorder.flush()


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
    """Exits status 0; 1 if the file is full, exists or cannot be written, or the indexer is
    lost."""
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
            recorder.end()
            recorder.flush()
            recorder.sync()
    except OSError as problem:
        error = f"{config.out}: {problem}"
    sys.stdout.write(json.dumps(asdict(recorder.recording_stats) | {"error": error}) + "\n")
    sys.exit(1 if error else 0)


if __name__ == "__main__":
    main()

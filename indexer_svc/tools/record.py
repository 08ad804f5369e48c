"""`python -m indexer_svc.tools.record --indexer HOST:PORT --out FILE`: an index's KV events into a
file.

It subscribes as a router does, and writes what it is told in the format of `core/recording.py`. An
indexer that is lost is subscribed to again, for what was missed. SIGINT or SIGTERM ends it in
order; the last line of its output is a JSON object. `python -m indexer_svc.tools.playback` reads
the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import structlog

from common.errors import InvalidRequest, MeshError, Unavailable
from common.rpc import channel as rpc
from common.rpc.interceptors import raising_mesh_errors
from common.runtime import env
from common.runtime.config import ServiceConfig, at_least, knob, read_config_or_exit
from common.runtime.tasks import TaskGroup
from common.wire.kv import (
    batch_from_proto,
    chunk_from_proto,
    partition_from_proto,
    parts_of,
    source_from_proto,
    state_to_proto,
    status_from_proto,
)
from indexer_svc.core.recording import End, Entry, Lost, Positions, header, line_of
from indexer_svc.core.subscriber import StatusTold
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc

MB = 1_000_000
# What a crash of the whole machine may take with it.
SYNC_EVERY_S = 1.0
RETRY_S = 0.2
# An indexer that says nothing for so long is given up.
GIVE_UP_S = 30.0

LOG = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordConfig(ServiceConfig):
    """Flags of `python -m indexer_svc.tools.record`, and the mesh-wide `KVMESH_*` variables."""

    indexer: str = field(metadata=knob("The indexer to listen to, host:port."))
    out: Path = field(metadata=knob("The file to write; it must not exist."))
    max_mb: int = field(
        default=1024,
        metadata=knob(
            "Recording ends, with exit status 1, before the file is larger.", check=at_least(1)
        ),
    )
    seconds: float | None = field(
        default=None, metadata=knob("Record for so long; not given: until a signal.")
    )


@dataclass(slots=True)
class Recorded:
    """What was written. is_full: it ended because more would not have fitted."""

    lines: int = 0
    bytes: int = 0
    batches: int = 0
    blocks: int = 0
    losses: int = 0
    is_full: bool = False


class Recorder:
    """Writes entries to a file, line by line; `clock` in seconds."""

    def __init__(self, file: BinaryIO, bytes_max: int, clock: Callable[[], float]) -> None:
        self.recorded = Recorded()
        self.positions = Positions()
        self._file = file
        self._clock = clock
        self._began_at = clock()
        # There must be room to say that it has ended.
        self._bytes_max = bytes_max - len(line_of(1e9, End()))
        self._write(header())

    def add(self, entry: Entry) -> None:
        """Writes an entry, whole; raises Unavailable, and writes nothing, when it does not fit."""
        recorded = self.recorded
        line = line_of(self._clock() - self._began_at, entry)
        if recorded.bytes + len(line) > self._bytes_max and not isinstance(entry, End):
            recorded.is_full = True
            raise Unavailable(
                f"the file would have more than {self._bytes_max} bytes", reason="RECORDING_FULL"
            )
        self._write(line)
        self.positions.take(entry)
        recorded.losses += isinstance(entry, Lost)
        events = getattr(entry, "events", ())
        recorded.batches += bool(events)
        recorded.blocks += sum(len(one.hashes) for one in events)

    def flush(self) -> None:
        """What was added survives this process."""
        self._file.flush()

    def sync(self) -> None:
        """What was flushed survives this machine; blocks."""
        os.fsync(self._file.fileno())

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self.recorded.lines += 1
        self.recorded.bytes += len(line)


async def record(address: str, recorder: Recorder, security: rpc.Security = rpc.PLAINTEXT) -> None:
    """Records until cancelled. Raises MeshError: full, or the indexer is gone for GIVE_UP_S."""
    async with TaskGroup() as tasks:
        syncing = tasks.create_task(_sync(recorder))
        try:
            await _subscribe_for_ever(address, recorder, security)
        finally:
            syncing.cancel()


async def _subscribe_for_ever(address: str, recorder: Recorder, security: rpc.Security) -> None:
    async with rpc.channel(address, security=security) as channel:
        stub = indexer_pb2_grpc.IndexerServiceStub(channel)
        heard_at = time.monotonic()
        while True:
            lines = recorder.recorded.lines
            heard = asyncio.Event()
            why: MeshError = Unavailable("the indexer ended the stream")
            try:
                await _subscribe(stub, recorder, security, heard)
            except MeshError as error:
                if recorder.recorded.is_full or isinstance(error, InvalidRequest):
                    raise
                why = error
            finally:
                recorder.flush()
            if heard.is_set():
                # It was there until now, however little it had to say.
                heard_at = time.monotonic()
            if recorder.recorded.lines > lines:
                recorder.add(Lost())
            LOG.warning("indexer lost", indexer=address, why=why.message)
            if time.monotonic() - heard_at >= GIVE_UP_S:
                raise why
            await asyncio.sleep(RETRY_S)


async def _subscribe(
    stub: Any, recorder: Recorder, security: rpc.Security, heard: asyncio.Event
) -> None:
    resume = map(state_to_proto, recorder.positions.states())
    request = indexer_pb2.SubscribeRequest(resume=resume)
    call = stub.Subscribe(request, metadata=rpc.call_metadata(security))
    async with rpc.cancelling(call):
        with raising_mesh_errors():
            async for message in call:
                heard.set()
                for entry in entries_of(message):
                    recorder.add(entry)
                recorder.flush()


def entries_of(message: indexer_pb2.SubscribeResponse) -> Iterator[Entry]:
    """What a message of a subscription says of KV events, in order. Loads are left out."""
    for part in parts_of(message):
        if part.HasField("status"):
            partition = partition_from_proto(part.partition) if part.HasField("partition") else None
            source = source_from_proto(part.source)
            yield StatusTold(source, partition, status_from_proto(part.status))
        if part.HasField("batch"):
            yield batch_from_proto(part.batch, part.source.worker_id)
        if part.HasField("snapshot"):
            yield chunk_from_proto(part.snapshot)


async def _sync(recorder: Recorder) -> None:
    while True:
        await asyncio.sleep(SYNC_EVERY_S)
        await asyncio.to_thread(recorder.sync)


async def _record_until_told(config: RecordConfig, recorder: Recorder) -> None:
    task = asyncio.current_task()
    assert task is not None, "this runs in a task"
    is_over = False

    def end() -> None:
        nonlocal is_over
        is_over = True
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    if config.seconds is not None:
        loop.call_later(config.seconds, end)
    try:
        await record(config.indexer, recorder, rpc.security_of(config))
    except asyncio.CancelledError:
        if not is_over:
            raise
        # Ours: nobody else waits for this task.
        task.uncancel()


def main() -> None:
    """Exit status 0; 1 when the file is full, exists, cannot be written, or nobody is heard."""
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
                asyncio.run(_record_until_told(config, recorder))
            except MeshError as problem:
                error = problem.message
            recorder.add(End())
            recorder.flush()
            recorder.sync()
    except OSError as problem:
        error = f"{config.out}: {problem}"
    sys.stdout.write(json.dumps(asdict(recorder.recorded) | {"error": error}) + "\n")
    sys.exit(1 if error else 0)


if __name__ == "__main__":
    main()

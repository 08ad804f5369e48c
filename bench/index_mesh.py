"""An indexer process and publishers in this process, for the benchmarks of the KV index.

The publishers are those of the product; their input are distinct chains of CHAIN_BLOCKS blocks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import structlog
from google.protobuf.message import Message

from bench.measure import ROOT
from common.kv.events import Partition, Source
from common.kv.hashing import PrefixHasher, hashes_from_bytes
from common.kv.load import Load
from common.registry.file import FileRegistry
from common.registry.instances import Instance
from common.rpc import channel as rpc
from common.rpc.stream import GrpcStream, open_stream
from common.runtime.tasks import TaskGroup
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from worker_svc.kv_events.event_log import PublishedSource
from worker_svc.kv_events.external_events import (
    DuplicatePolicy,
    KvEventFormat,
    PagesRemoved,
    PagesStored,
)
from worker_svc.kv_events.normalizer import Normalizer
from worker_svc.kv_events.publisher import Publisher

NAMESPACE = "default"
BLOCK_SIZE = 16
CHAIN_BLOCKS = 128
WAIT_S = 60.0
PARTITION = Partition("bench", BLOCK_SIZE, 1)
M = TypeVar("M", bound=Message)


class ServiceProcess:
    """A process of a service that can be killed and restarted. make_stub: its gRPC stub."""

    def __init__(
        self, module: str, make_stub: Callable[[Any], Any], registry_path: Path, *flags: str
    ) -> None:
        self._make_stub = make_stub
        self._command = [
            *(sys.executable, "-m", module, "--registry-path", str(registry_path)),
            *("--notice-s", "0", "--log-level", "error", *flags),
        ]
        self._process: asyncio.subprocess.Process | None = None
        self.address = self.stream_address = ""

    @property
    def pid(self) -> int:
        assert self._process is not None, "started"
        return self._process.pid

    async def start(self) -> None:
        read_fd, write_fd = os.pipe()
        path = os.pathsep.join([str(ROOT / "protos"), str(ROOT)])
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            *("--ready-fd", str(write_fd)),
            env={"PYTHONPATH": path, "PATH": os.environ["PATH"]},
            pass_fds=[write_fd],
        )
        os.close(write_fd)
        with os.fdopen(read_fd) as pipe:
            line = json.loads(await asyncio.to_thread(pipe.readline))
        self.address = line["addresses"]["grpc"]
        self.stream_address = line["addresses"]["streams"]

    async def kill(self) -> None:
        assert self._process is not None, "started"
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[Any]:
        """Yield a stub. Any: stubs of grpc.aio are untyped."""
        async with rpc.channel(self.address) as channel:
            yield self._make_stub(channel)

    def stream(
        self, method: str, response_type: type[M]
    ) -> AbstractAsyncContextManager[GrpcStream[Message, M]]:
        """A stream as the services of the mesh open it. method: `/package.Service/Method`."""
        return open_stream(self.stream_address, method, response_type, rpc.PLAINTEXT)


class IndexerProcess(ServiceProcess):
    def __init__(self, registry_path: Path, *flags: str) -> None:
        super().__init__("indexer_svc", indexer_pb2_grpc.IndexerServiceStub, registry_path, *flags)


def hasher_factory(lora: str, salt: str, block_size: int) -> PrefixHasher:
    return PrefixHasher(mesh_key=b"", model=PARTITION.model, block_size=block_size)


class Workers:
    """Publishers of one rank each. cached: chains of each engine, oldest first."""

    def __init__(self, count: int, registry: FileRegistry) -> None:
        self.cached: list[dict[int, None]] = [{} for _ in range(count)]
        self.publishers = [self._publisher(1 + number, registry) for number in range(count)]
        self._registry = registry
        self._rng = np.random.default_rng(7)
        self._chains = 0
        self._suffix = self._rng.integers(
            0, 2**17, CHAIN_BLOCKS * BLOCK_SIZE - 1, dtype="<u4"
        ).tobytes()

    async def register(self) -> None:
        """Register the workers, so that the indexer keeps them."""
        for publisher in self.publishers:
            worker = Instance(
                *(publisher.publication.worker_id, NAMESPACE, "worker", "", "127.0.0.1:1"),
                model=PARTITION.model,
                block_size=BLOCK_SIZE,
            )
            await self._registry.register(worker)

    def store(self, number: int) -> None:
        chain = self._chains = self._chains + 1
        tokens = chain.to_bytes(4, "little") + self._suffix
        self.cached[number][chain] = None
        names = range(chain * CHAIN_BLOCKS, (chain + 1) * CHAIN_BLOCKS)
        self.publishers[number].take([PagesStored(names, None, tokens, BLOCK_SIZE)])

    def evict(self, number: int) -> None:
        chain = next(iter(self.cached[number]))
        del self.cached[number][chain]
        names = range((chain + 1) * CHAIN_BLOCKS - 1, chain * CHAIN_BLOCKS - 1, -1)
        self.publishers[number].take([PagesRemoved(names)])

    def held_hashes(self, number: int) -> set[int]:
        """Return the prefix hashes of an engine's blocks."""
        hasher = hasher_factory("", "", BLOCK_SIZE)
        names: set[int] = set()
        for chain in self.cached[number]:
            tokens = chain.to_bytes(4, "little") + self._suffix
            names.update(hasher.prefix_hashes(np.frombuffer(tokens, dtype="<u4")).tolist())
        return names

    def published_hashes(self, number: int) -> set[int]:
        event_log = self.publishers[number].sources[0].event_log
        return {key for chunk in event_log.snapshot() for key in chunk.hashes.tolist()}

    def counters(self, name: str) -> int:
        return sum(publisher.counters[name] for publisher in self.publishers)

    async def wait_until_exact(self, stub: Any) -> int:
        """Wait until the index has the positions of all publishers; returns its blocks."""
        deadline = time.monotonic() + WAIT_S
        while True:
            stats = await stub.Stats(indexer_pb2.StatsRequest(), timeout=10.0)
            at = {
                row.state.source.worker_id: (row.state.epoch, row.state.sequence)
                for row in stats.sources
                if row.status.state == "exact"
            }
            ledgers = {p.publication.worker_id: p.sources[0].event_log for p in self.publishers}
            if all(
                at.get(n, (0, 0)) == (ledger.epoch, ledger.sequence)
                for n, ledger in ledgers.items()
            ):
                return int(stats.blocks)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the index is not exact after {WAIT_S} s: {at}")
            await asyncio.sleep(0.005)

    def _publisher(self, worker_id: int, registry: FileRegistry) -> Publisher:
        event_format = KvEventFormat(BLOCK_SIZE, BLOCK_SIZE, DuplicatePolicy.IDEMPOTENT)
        source = PublishedSource(Source(worker_id), Normalizer(event_format, hasher_factory))
        return Publisher(
            worker_id,
            PARTITION,
            {0: source},
            lambda: (Load(),),
            registry,
            NAMESPACE,
            rng=Random(worker_id),
        )


async def dump(stub: Any) -> Mapping[int, set[int]]:
    parts: dict[tuple[int, int], set[int]] = {}
    async for message in stub.Dump(indexer_pb2.DumpRequest(), timeout=WAIT_S):
        chunk = message.chunk
        part = parts.setdefault((chunk.source.worker_id, chunk.source.dp_rank), set())
        if chunk.first:
            part.clear()  # The source was replaced during the dump.
        part.update(hashes_from_bytes(chunk.prefix_hashes).tolist())
    advertised: dict[int, set[int]] = {}
    for (worker_id, _), part in parts.items():
        advertised.setdefault(worker_id, set()).update(part)
    return advertised


@asynccontextmanager
async def running_mesh(
    count: int, *flags: str
) -> AsyncIterator[tuple[Workers, IndexerProcess, Callable[[Coroutine[Any, Any, None]], None]]]:
    """Yield `count` publishers, a started indexer, and a function that runs work in a task.

    Logs of publishers are suppressed, because standard output is for the result.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "registry"
        registry, indexer = FileRegistry(path), IndexerProcess(path, *flags)
        workers = Workers(count, registry)
        try:
            async with TaskGroup() as tasks:
                await workers.register()
                running = [tasks.create_task(publisher.run()) for publisher in workers.publishers]
                try:
                    await indexer.start()
                    yield workers, indexer, lambda work: running.append(tasks.create_task(work))
                finally:
                    for task in running:
                        task.cancel()
        finally:
            await indexer.kill()
            await registry.close()


class LoopLagMonitor:
    """Measures the longest delay of a task by the event loop, in seconds."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        while True:
            at = time.perf_counter()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.perf_counter() - at - 0.001)

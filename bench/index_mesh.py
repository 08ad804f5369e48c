"""An indexer process and publishers in this one, for the benchmarks of the KV index.

The publishers are the real ones, fed with what an engine would say: chains of CHAIN blocks, each of
other content. `Dump` tells what the index claims, block by block.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import structlog

from bench.measure import ROOT
from common.kv.events import Partition, Source
from common.kv.hashing import PrefixHasher, hashes_from_bytes
from common.kv.load import Load
from common.registry.file import FileRegistry
from common.registry.instances import Instance
from common.rpc import channel as rpc
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from worker_svc.kv_events.event_log import SourceFeed
from worker_svc.kv_events.normalizer import (
    DuplicatePolicy,
    KvEventFormat,
    Normalizer,
    PagesRemoved,
    PagesStored,
)
from worker_svc.kv_events.publisher import Publisher

NAMESPACE = "default"
BLOCK_SIZE = 16
CHAIN_BLOCKS = 128
WAIT_S = 60.0
PARTITION = Partition("bench", BLOCK_SIZE, 1)


def silence_logs() -> None:
    """Standard output is for the result; what publishers log meanwhile is not asked for."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


class IndexerProcess:
    """`python -m indexer_svc`, which can be killed and started again."""

    def __init__(self, registry_path: Path, *flags: str) -> None:
        self._command = [
            *(sys.executable, "-m", "indexer_svc", "--registry-path", str(registry_path)),
            *("--notice-s", "0", "--log-level", "error", *flags),
        ]
        self._process: asyncio.subprocess.Process | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None, "started"
        return self._process.pid

    async def start(self) -> None:
        """Returns when it is ready."""
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

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        assert self._process is not None, "started"
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[Any]:
        """To ask it. Any: stubs of grpc.aio."""
        async with rpc.channel(self.address) as channel:
            yield indexer_pb2_grpc.IndexerServiceStub(channel)


def hasher_factory(lora: str, salt: str, block_size: int) -> PrefixHasher:
    """How this mesh names blocks."""
    return PrefixHasher(mesh_key=b"", model=PARTITION.model, block_size=block_size)


class Workers:
    """Publishers of one rank each. cached: the chains each engine holds, oldest first."""

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
        """Puts the workers into discovery, so that the indexer keeps them."""
        for publisher in self.publishers:
            worker = Instance(
                *(publisher.worker_id, NAMESPACE, "worker", "", "127.0.0.1:1"),
                model=PARTITION.model,
                block_size=BLOCK_SIZE,
            )
            await self._registry.register(worker)

    def store(self, number: int) -> None:
        """An engine computes one more chain."""
        chain = self._chains = self._chains + 1
        tokens = chain.to_bytes(4, "little") + self._suffix
        self.cached[number][chain] = None
        names = range(chain * CHAIN_BLOCKS, (chain + 1) * CHAIN_BLOCKS)
        self.publishers[number].take([PagesStored(names, None, tokens, BLOCK_SIZE)])

    def evict(self, number: int) -> None:
        """An engine drops the chain it has had for the longest."""
        chain = next(iter(self.cached[number]))
        del self.cached[number][chain]
        names = range((chain + 1) * CHAIN_BLOCKS - 1, chain * CHAIN_BLOCKS - 1, -1)
        self.publishers[number].take([PagesRemoved(names)])

    def held_hashes(self, number: int) -> set[int]:
        """The prefix hashes of all that an engine holds."""
        hasher = hasher_factory("", "", BLOCK_SIZE)
        names: set[int] = set()
        for chain in self.cached[number]:
            tokens = chain.to_bytes(4, "little") + self._suffix
            names.update(hasher.prefix_hashes(np.frombuffer(tokens, dtype="<u4")).tolist())
        return names

    def published_hashes(self, number: int) -> set[int]:
        """What a publisher says that it has announced."""
        event_log = self.publishers[number].feeds[0].event_log
        return {key for chunk in event_log.snapshot() for key in chunk.hashes.tolist()}

    def counters(self, name: str) -> int:
        """A counter of all publishers."""
        return sum(publisher.counters[name] for publisher in self.publishers)

    async def wait_until_exact(self, stub: Any) -> int:
        """Waits until the index stands where all publishers do; blocks it claims."""
        deadline = time.monotonic() + WAIT_S
        while True:
            stats = await stub.Stats(indexer_pb2.StatsRequest(), timeout=10.0)
            at = {
                row.state.source.worker_id: (row.state.epoch, row.state.sequence)
                for row in stats.sources
                if row.status.state == "exact"
            }
            ledgers = {p.worker_id: p.feeds[0].event_log for p in self.publishers}
            if all(at.get(n, (0, 0)) == (one.epoch, one.sequence) for n, one in ledgers.items()):
                return int(stats.blocks)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the index has not caught up in {WAIT_S} s: {at}")
            await asyncio.sleep(0.005)

    def _publisher(self, worker_id: int, registry: FileRegistry) -> Publisher:
        rules = KvEventFormat(BLOCK_SIZE, BLOCK_SIZE, DuplicatePolicy.IDEMPOTENT)
        feed = SourceFeed(Source(worker_id), Normalizer(rules, hasher_factory))
        return Publisher(
            worker_id,
            PARTITION,
            {0: feed},
            lambda: (Load(),),
            registry,
            NAMESPACE,
            rng=Random(worker_id),
        )


async def dump(stub: Any) -> Mapping[int, set[int]]:
    """The blocks that the index claims, by worker."""
    parts: dict[tuple[int, int], set[int]] = {}
    async for message in stub.Dump(indexer_pb2.DumpRequest(), timeout=WAIT_S):
        chunk = message.chunk
        part = parts.setdefault((chunk.source.worker_id, chunk.source.dp_rank), set())
        if chunk.first:
            part.clear()  # Perhaps anew: the source was replaced amid the dump.
        part.update(hashes_from_bytes(chunk.prefix_hashes).tolist())
    advertised: dict[int, set[int]] = {}
    for (worker_id, _), part in parts.items():
        advertised.setdefault(worker_id, set()).update(part)
    return advertised


class LoopLagMonitor:
    """The longest that the event loop kept a task waiting beyond 1 ms, in seconds."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            at = time.perf_counter()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.perf_counter() - at - 0.001)

"""CPU of an indexer and a router process for the load reports of many workers.

An indexer process receives the reports of `publishers` workers, and sends them to `subscribers`
routers in this process and to one router process. All over the connections of the product.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.index_mesh import BLOCK_SIZE, NAMESPACE, PARTITION, IndexerProcess, ServiceProcess
from bench.measure import cpu_s
from common.kv.events import Source, SourcePosition
from common.registry.file import FileRegistry
from common.registry.instances import Instance
from common.wire.kv import partition_to_proto, source_state_to_proto
from kvmesh.indexer.v1 import indexer_pb2
from kvmesh.router.v1 import router_pb2_grpc
from kvmesh.types.v1 import load_pb2

REPORT_S = 0.1
READY_S = 60.0
_PUBLISH = "/kvmesh.indexer.v1.IndexerService/Publish"
_SUBSCRIBE = "/kvmesh.indexer.v1.IndexerService/Subscribe"


@dataclass(slots=True)
class _Fleet:
    """The processes, and what subscribers have received."""

    indexer: IndexerProcess
    router: ServiceProcess
    streams: list[Any]
    ready: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """A permit for each subscription with a first message."""

    received_bytes: int = 0
    updates: int = 0


@dataclass(frozen=True, slots=True)
class ReportCosts:
    """Of one load report, by the subscribers of the indexer."""

    indexer_us: float
    router_us: float
    bytes: float
    """To each subscriber."""


async def measure(publishers: int, subscribers: int, seconds: float) -> ReportCosts:
    """Measures for so many seconds. subscribers: beside the router process."""
    async with _running(publishers, subscribers) as fleet:
        await _report(fleet, 1.0, 0)
        fleet.updates = fleet.received_bytes = 0
        before = cpu_s(fleet.indexer.pid), cpu_s(fleet.router.pid)
        sent = await _report(fleet, seconds, 1_000)
        after = cpu_s(fleet.indexer.pid), cpu_s(fleet.router.pid)
    return ReportCosts(
        (after[0] - before[0]) / sent * 1e6,
        (after[1] - before[1]) / sent * 1e6,
        fleet.received_bytes / fleet.updates if fleet.updates else 0.0,
    )


async def _report(fleet: _Fleet, seconds: float, first_step: int) -> int:
    """Sends a changed load on each stream each REPORT_S, spread over that time; returns how
    many."""
    loop = asyncio.get_running_loop()
    began, sent, ticks = loop.time(), 0, round(seconds / REPORT_S)
    parts = 10
    for tick in range(ticks * parts):
        step = first_step + tick
        load = load_pb2.Load(engine_step=step, running=8, waiting=2, waiting_tokens=step)
        request = indexer_pb2.PublishRequest(loads=[load])
        for stream in fleet.streams[tick % parts :: parts]:
            await stream.write(request)
            sent += 1
        # Sleep: the pace of the reports.
        await asyncio.sleep(max(0.0, began + (tick + 1) * REPORT_S / parts - loop.time()))
    return sent


@asynccontextmanager
async def _running(publishers: int, subscribers: int) -> AsyncIterator[_Fleet]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = Path(folder) / "registry"
        registry, indexer = FileRegistry(path), IndexerProcess(path)
        stack.push_async_callback(registry.close)
        router = ServiceProcess("router_svc", router_pb2_grpc.RouterServiceStub, path)
        for worker in range(1, publishers + 1):
            await registry.register(_instance(worker))
        await indexer.start()
        stack.push_async_callback(indexer.kill)
        await router.start()
        stack.push_async_callback(router.kill)
        fleet = _Fleet(indexer, router, [])
        for worker in range(1, publishers + 1):
            stream = await stack.enter_async_context(
                indexer.stream(_PUBLISH, indexer_pb2.PublishResponse)
            )
            await stream.write(_hello(worker))
            fleet.streams.append(stream)
        readers = [
            asyncio.create_task(_subscribe(stack, indexer, fleet)) for _ in range(subscribers)
        ]
        stack.callback(lambda: [reader.cancel() for reader in readers])
        async with asyncio.timeout(READY_S):
            for _ in readers:
                await fleet.ready.acquire()
        yield fleet


async def _subscribe(stack: AsyncExitStack, indexer: IndexerProcess, fleet: _Fleet) -> None:
    stream = await stack.enter_async_context(
        indexer.stream(_SUBSCRIBE, indexer_pb2.SubscribeResponse)
    )
    await stream.write(indexer_pb2.SubscribeRequest())
    await stream.read()
    fleet.ready.release()
    # Ends: its task is cancelled when the measurement is over.
    while (message := await stream.read()) is not None:
        fleet.updates += 1 + len(message.more)
        fleet.received_bytes += message.ByteSize()


def _instance(worker: int) -> Instance:
    return Instance(
        *(worker, NAMESPACE, "worker", "", "127.0.0.1:1"),
        model=PARTITION.model,
        block_size=BLOCK_SIZE,
        kv_index="events",
    )


def _hello(worker: int) -> indexer_pb2.PublishRequest:
    position = source_state_to_proto(SourcePosition(Source(worker), 1, 0))
    hello = indexer_pb2.PublishHello(
        worker_id=worker, partition=partition_to_proto(PARTITION), sources=[position]
    )
    return indexer_pb2.PublishRequest(hello=hello, loads=[load_pb2.Load()])

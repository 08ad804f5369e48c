"""Measure decisions of the router, in process and through its service; the last line is JSON.

    PYTHONPATH=protos:. python -m bench.bench_router [--seconds 5]

Every worker holds the system prompt, a quarter of each prompt; one or two of them hold half of it
or more; the end of each prompt is new. The selector is `kv` with its defaults.

- `decide_us_64x8`, `decide_us_512x64`: matching, decision and booking, by blocks of the prompt and
  number of workers; medians. 400 decisions per second of the router's clock; 4 requests run on each
  worker; `decide_dynamo_us_*`, `decide_least_loaded_us_*`: with these selectors;
- `free_us_*`: the end of a prefill and of a booking.

With a router and an indexer process, 64 blocks and 8 workers, and the client of frontends,
wall-clock time:

- `session_p50_us`, `session_p99_us`: one request at a time on a session, from New to its result;
- `session_per_s`: with 64 outstanding; `session_cpu_us`: CPU time of the router for each.

Each request also reports its prefill as done and ends, in later frames. With DYNAMO_PYTHON, the
Python of an environment with ai-dynamo, `dynamo_*` are figures of its SelectionService.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import uvloop
from google.protobuf.message import Message

from bench.index_mesh import BLOCK_SIZE, NAMESPACE, WAIT_S, IndexerProcess, ServiceProcess
from bench.measure import cpu_s, dynamo_figures, parse_settings, print_report
from common.kv.events import EventBatch, EventKind, Hashes, KvEvent, Partition, Source
from common.kv.events import SourcePosition as Position
from common.kv.hashing import HASH_SCHEME_ID, hashes_to_bytes
from common.kv.load import Load
from common.kv.prefix_index import PrefixIndex, SourceMatch
from common.registry.file import FileRegistry
from common.registry.instances import Instance, Snapshot
from common.request.placement import Placement, Query
from common.rpc.stream import GrpcStream
from common.service.lifecycle import freeze_startup_objects
from common.wire.kv import batch_to_proto, partition_to_proto, source_state_to_proto
from kvmesh.indexer.v1 import indexer_pb2
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from kvmesh.types.v1 import load_pb2
from router_svc.config import RouterConfig, load_selector
from router_svc.core.booking import BookingKey
from router_svc.core.decision import DecisionRecord
from router_svc.core.overlap import IndexStatus
from router_svc.core.router import Router

MODEL = "bench"
FRONTEND = 1 << 40
CONVERSATIONS = 256
DECISIONS = 4000
DECISION_INTERVAL_S = 0.0025
RUNNING_PER_WORKER = 4
OUTSTANDING = 64
PARTITION = Partition(MODEL, BLOCK_SIZE, HASH_SCHEME_ID)
SESSION = "/kvmesh.router.v1.RouterService/Session"
SessionStream = GrpcStream[Message, router_pb2.SessionResponse]


class Data:
    """held: by worker, the prefixes of prompts in its cache."""

    def __init__(self, blocks: int, workers: int) -> None:
        self.blocks, self.workers = blocks, workers
        self._rng = rng = np.random.default_rng(3)
        system = _hashes(rng, blocks // 4)
        self.conversations = _hashes(rng, CONVERSATIONS * blocks).reshape(-1, blocks)
        self.conversations[:, : len(system)] = system
        self.held: dict[int, list[Hashes]] = {1 + n: [system] for n in range(workers)}
        for number, chain in enumerate(self.conversations):
            for worker in {number % workers, int(rng.integers(workers))}:
                depth = int(rng.integers(blocks // 2, blocks))
                self.held[1 + worker].append(chain[:depth].copy())

    def prompts(self, count: int) -> Iterator[bytes]:
        for number in self._rng.integers(0, CONVERSATIONS, count):
            chain = self.conversations[number].copy()
            new = int(self._rng.integers(1, self.blocks // 2))
            chain[-new:] = _hashes(self._rng, new)
            yield hashes_to_bytes(chain)

    def instances(self) -> Iterator[Instance]:
        for worker in self.held:
            yield Instance(
                *(worker, NAMESPACE, "worker", "", "127.0.0.1:1"),
                model=MODEL,
                block_size=BLOCK_SIZE,
                total_kv_blocks=1 << 16,
                max_num_batched_tokens=8192,
                kv_index="events",
            )


def _hashes(rng: np.random.Generator, count: int) -> Hashes:
    return rng.integers(1, 2**64, count, dtype=np.uint64)


class LocalIndex:
    """The router's replica without its stream."""

    def __init__(self, data: Data) -> None:
        self._index = PrefixIndex()
        for worker, prefixes in data.held.items():
            advertised = self._index.add_source(Source(worker))
            self._index.set_visible(advertised, True)
            for prefix in prefixes:
                self._index.store(advertised, prefix)

    def match(self, query: Query) -> Sequence[SourceMatch]:
        return self._index.match(np.frombuffer(query.prefix_hashes, dtype=np.uint64))

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact")


def measure_decisions(data: Data, selector: str) -> tuple[float, float]:
    """Median microseconds of a decision, and of the end of a request."""
    config = RouterConfig()
    router = Router(
        load_selector(selector),
        index=LocalIndex(data),
        index_settings=config.index_settings,
        cost_settings=config.cost_settings,
    )
    freeze_startup_objects()
    router.update(Snapshot(2, {instance.id: instance for instance in data.instances()}), 0.0)
    session = router.load_tracker.open_session(FRONTEND, 1, 0.0)
    rng, now, running = Random(1), 0.0, deque[BookingKey]()
    decide_s, free_s = [], []
    for number, prompt in enumerate(data.prompts(DECISIONS)):
        now += DECISION_INTERVAL_S
        if number % 40 == 0:
            for worker in data.held:
                router.load_tracker.report(worker, 0, Load(kv_used_blocks=number), now)
        key = BookingKey(FRONTEND, f"request-{number}", 1)
        query = Query(MODEL, data.blocks * BLOCK_SIZE + 1, prompt, HASH_SCHEME_ID, BLOCK_SIZE)
        started_at = time.perf_counter()
        decision = router.admit(query, key, now, rng, session, router.match(query))
        decide_s.append(time.perf_counter() - started_at)
        assert isinstance(decision, DecisionRecord)
        running.append(key)
        if len(running) > RUNNING_PER_WORKER * data.workers:
            started_at = time.perf_counter()
            router.load_tracker.mark_prefill_done(running[0])
            router.load_tracker.free(running.popleft())
            free_s.append(time.perf_counter() - started_at)
    return _median_us(decide_s), _median_us(free_s)


def _median_us(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


# Through the service.


@asynccontextmanager
async def running_router(data: Data) -> AsyncIterator[ServiceProcess]:
    """Yields a router process that has the data in its index."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "registry"
        registry, indexer = FileRegistry(path), IndexerProcess(path)
        router = ServiceProcess("router_svc", router_pb2_grpc.RouterServiceStub, path)
        try:
            for instance in data.instances():
                await registry.register(instance)
            await indexer.start()
            async with indexer.stub() as stub:
                streams = [await _publish(stub, *held) for held in data.held.items()]
                await router.start()
                async with router.stub() as router_stub:
                    await _await_index(router_stub, data)
                yield router
                for stream in streams:
                    stream.cancel()
        finally:
            await router.kill()
            await indexer.kill()
            await registry.close()


async def _publish(stub: Any, worker: int, prefixes: Sequence[Hashes]) -> Any:
    stream, source = stub.Publish(), Source(worker)
    hello = indexer_pb2.PublishHello(
        worker_id=worker,
        partition=partition_to_proto(PARTITION),
        sources=[source_state_to_proto(Position(source, 1, 0))],
    )
    await stream.write(indexer_pb2.PublishRequest(hello=hello, loads=[load_pb2.Load()]))
    events = [KvEvent(EventKind.STORED, prefix) for prefix in prefixes]
    batch = batch_to_proto(EventBatch(source, 1, 1, events))
    await stream.write(indexer_pb2.PublishRequest(batch=batch))
    return stream


async def _await_index(stub: Any, data: Data) -> None:
    """Wait until the router finds what each worker holds."""
    deadline = time.monotonic() + WAIT_S
    for worker, prefixes in data.held.items():
        query = _query(data, hashes_to_bytes(prefixes[-1]))
        while True:
            explained = await stub.Explain(router_pb2.ExplainRequest(query=query))
            rows = {row.worker.worker_id: row.overlap_blocks for row in explained.candidates}
            if rows.get(worker) == len(prefixes[-1]):
                break
            assert time.monotonic() < deadline, f"worker {worker}: {rows}"
            await asyncio.sleep(0.02)


def _query(data: Data, hashes: bytes) -> router_pb2.Query:
    return router_pb2.Query(
        model=MODEL,
        total_tokens=data.blocks * BLOCK_SIZE + 1,
        prefix_hashes=hashes,
        hash_scheme=HASH_SCHEME_ID,
        block_size=BLOCK_SIZE,
    )


class SessionClient:
    """One frontend session, with requests prepared in advance."""

    def __init__(
        self, stream: SessionStream, data: Data, prompts: Sequence[bytes], frontend: int
    ) -> None:
        self._stream = stream
        self._frontend = frontend
        self._running: deque[router_pb2.BookingKey] = deque()
        self._running_max = RUNNING_PER_WORKER * data.workers + OUTSTANDING
        self._sent = 0
        self._news = [
            router_pb2.New(
                id=number,
                key=router_pb2.BookingKey(request_id=f"{frontend}-{number}", attempt=1),
                query=_query(data, prompt),
            )
            for number, prompt in enumerate(prompts)
        ]

    async def open(self) -> None:
        hello = router_pb2.SessionHello(frontend_id=self._frontend, generation=1)
        await self._stream.write(router_pb2.SessionRequest(hello=hello))
        await self._stream.read()

    async def send(self, count: int) -> None:
        """Send the next requests, and the ends of those that run too long."""
        new_requests = [self._news[(self._sent + n) % len(self._news)] for n in range(count)]
        self._sent += count
        ended = [
            self._running.popleft() for _ in range(len(self._running) + count - self._running_max)
        ]
        self._running.extend(new.key for new in new_requests)
        frame = router_pb2.SessionRequest(news=new_requests, prefills_done=ended, frees=ended)
        await self._stream.write(frame)

    async def receive(self) -> int:
        """The number of results in the next frame."""
        frame = await self._stream.read()
        assert frame is not None, "the session goes on"
        for result in frame.results:
            assert result.HasField("decision"), result
        return len(frame.results)


async def measure_session(seconds: int) -> dict[str, object]:
    data = Data(64, 8)
    prompts = list(data.prompts(20_000))
    async with running_router(data) as router:
        async with router.stream(SESSION, router_pb2.SessionResponse) as stream:
            client = SessionClient(stream, data, prompts, FRONTEND)
            await client.open()
            times, ends_at = [], time.perf_counter() + seconds
            while (started_at := time.perf_counter()) < ends_at:
                await client.send(1)
                assert await client.receive() == 1
                times.append(time.perf_counter() - started_at)
        async with router.stream(SESSION, router_pb2.SessionResponse) as stream:
            client = SessionClient(stream, data, prompts, FRONTEND + 1)
            await client.open()
            await client.send(OUTSTANDING)
            count, began_at, cpu_before_s = 0, time.perf_counter(), cpu_s(router.pid)
            while time.perf_counter() - began_at < seconds:
                received = await client.receive()
                count += received
                await client.send(received)
            wall_s = time.perf_counter() - began_at
            used_s = cpu_s(router.pid) - cpu_before_s
    return {
        "session_p50_us": round(statistics.median(times) * 1e6),
        "session_p99_us": round(statistics.quantiles(times, n=100)[-1] * 1e6),
        "session_per_s": round(count / wall_s),
        "session_cpu_us": round(used_s / count * 1e6, 1),
    }


def main() -> None:
    settings = parse_settings(__doc__, seconds=5)
    figures: dict[str, object] = {}
    for blocks, workers in ((64, 8), (512, 64)):
        data, shape = Data(blocks, workers), f"us_{blocks}x{workers}"
        figures[f"decide_{shape}"], figures[f"free_{shape}"] = measure_decisions(data, "kv")
        for selector in ("dynamo", "least_loaded"):
            figures[f"decide_{selector}_{shape}"], _ = measure_decisions(data, selector)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures |= runner.run(measure_session(settings.seconds))
    figures |= dynamo_figures("router")
    print_report("router", vars(settings), figures)


if __name__ == "__main__":
    main()

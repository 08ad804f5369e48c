"""An engine's KV events on real ZeroMQ sockets, a worker that reads them, and an indexer.

`EngineWire` publishes like SGLang and vLLM: PUB with [topic, number, msgpack of a batch], and the
last batches for replay by a ROUTER. A test chooses the events, can withhold a batch from the
subscribers, and can replace the engine by a new process on the same ports.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from common.kv.events import Hashes, Partition, Source, Tier
from common.kv.hashing import PrefixHasher, hashes_to_bytes
from common.registry.registry import MemoryRegistry, MemoryStore
from common.rpc import channel as rpc
from common.wire.kv import partition_to_proto
from indexer_svc.app import IndexerApp
from indexer_svc.config import IndexerConfig
from kvmesh.indexer.v1 import indexer_pb2 as pb
from kvmesh.indexer.v1 import indexer_pb2_grpc
from tests.kit.apps import living
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engines.contract import EngineConfig
from worker_svc.engines.echo import EchoConfig, EchoEngine
from worker_svc.kv_events.external_events import DuplicatePolicy, KvEventFormat, KvEventSink
from worker_svc.kv_events.zmq_reader import TOPIC, KvEventEndpoints, KvEventReader

BLOCK = 4
EVENT_FORMAT = KvEventFormat(BLOCK, BLOCK, DuplicatePolicy.IDEMPOTENT)

# Any: an event before it is packed.
WireEvent = Mapping[str, Any]


def stored(
    hashes: Sequence[int | bytes],
    parent: int | bytes | None,
    tokens: Sequence[int],
    *,
    block: int = BLOCK,
    medium: str | None = None,
    **more: Any,
) -> WireEvent:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block,
        "lora_id": None,
        "medium": medium,
        **more,
    }


def removed(*hashes: int | bytes, medium: str | None = None) -> WireEvent:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


CLEARED: WireEvent = {"type": "AllBlocksCleared"}


class Wire(Protocol):
    """The events of one rank of an engine."""

    rank: int
    endpoints: KvEventEndpoints

    async def serve(self) -> None: ...

    def close(self) -> None: ...


class EngineWire:
    """One rank's publisher. as_arrays: events as arrays, like earlier vLLM, not as maps. as_map:
    batches as maps, like vLLM's next version, not as arrays.

    keeps: batches kept for replay; 0: there is no replay service.
    """

    def __init__(
        self,
        *,
        keeps: int = 10_000,
        as_arrays: bool = False,
        as_map: bool = False,
        rank: int = 0,
    ) -> None:
        self.rank = rank
        self.sequence = 0
        self.replays = 0
        self._keeps = keeps
        self._as_arrays = as_arrays
        self._as_map = as_map
        # Held during a replacement or a replay.
        self._turn = asyncio.Lock()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keeps)
        self._context = zmq.asyncio.Context()
        self._live = self._bound(zmq.PUB, 0)
        self._router = self._bound(zmq.ROUTER, 0) if keeps else None
        self.endpoints = KvEventEndpoints(
            _port(self._live) - rank, None if self._router is None else _port(self._router) - rank
        )

    async def publish(self, *events: WireEvent, reaches: bool = True) -> None:
        """Publishes one batch. reaches: whether subscribers receive it."""
        batch = {
            "ts": float(self.sequence),
            "events": [self._packed(one) for one in events],
            "data_parallel_rank": self.rank,
        }
        payload = msgspec.msgpack.encode(batch if self._as_map else list(batch.values()))
        number = self.sequence.to_bytes(8, "big")
        self._kept.append((self.sequence, payload))
        self.sequence += 1
        if reaches:
            await self._live.send_multipart([TOPIC.encode(), number, payload])

    async def restart(self) -> None:
        """Starts a new process on the same ports: empty, its first batch has number 0."""
        async with self._turn:
            live, router = self._live, self._router
            self.sequence = 0
            self._kept.clear()
            self._live = await self._bound_again(live)
            if router is not None:
                self._router = await self._bound_again(router)

    async def serve(self) -> None:
        """Serves replay requests until cancelled."""
        # Ends: the test cancels it.
        while self._router is not None:
            async with self._turn:
                if await self._router.poll(20):
                    await self._replay(self._router)
            # Sleep: lets the publisher take the turn.
            await asyncio.sleep(0.001)

    async def _replay(self, router: zmq.asyncio.Socket) -> None:
        client, _, first = await router.recv_multipart()
        self.replays += 1
        for sequence, payload in tuple(self._kept):
            if sequence >= int.from_bytes(first, "big"):
                number = sequence.to_bytes(8, "big")
                await router.send_multipart([client, b"", TOPIC.encode(), number, payload])
        end = (-1).to_bytes(8, "big", signed=True)
        await router.send_multipart([client, b"", b"", end, b""])

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _packed(self, event: WireEvent) -> Any:
        return list(event.values()) if self._as_arrays else event

    def _bound(self, kind: int, port: int) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        try:
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket

    async def _bound_again(self, old: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
        kind, port = int(old.get(zmq.TYPE)), _port(old)
        old.close(linger=0)
        # A closed socket releases its port with a delay.

        def bound() -> zmq.asyncio.Socket | None:
            with contextlib.suppress(zmq.ZMQError):
                return self._bound(kind, port)
            return None

        socket = await until(bound, f"port {port} is released")
        assert socket is not None
        return socket


def _port(socket: zmq.asyncio.Socket) -> int:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.decode().rsplit(":", 1)[1])


class WiredEngine(EchoEngine):
    """An engine with KV events over the wire."""

    def __init__(self, wires: Sequence[Wire], event_format: KvEventFormat, model: str) -> None:
        super().__init__(EchoConfig(model=model))
        self.kv_event_format = event_format
        self.kv_events_off_reason = ""
        self.readers: list[KvEventReader] = []
        self._wires = wires
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, worker_id: int) -> EngineConfig:
        return replace(
            await super().start(worker_id),
            kv_index="events",
            kv_index_reason="",
            kv_cache_block_size=self.kv_event_format.block_size,
            dp_size=len(self._wires),
        )

    def publish_to(self, sink: KvEventSink) -> None:
        for wire in self._wires:
            reader = KvEventReader(wire.rank, wire.endpoints, sink)
            self.readers.append(reader)
            self._tasks.append(asyncio.create_task(reader.run()))
            self._tasks.append(asyncio.create_task(wire.serve()))

    async def cleanup(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await super().cleanup()


class WiredMesh:
    """An indexer with a gRPC client, and workers with engines on the wire."""

    def __init__(self, store: MemoryStore, indexer: IndexerApp) -> None:
        self.store = store
        self.indexer = indexer
        self.channel = rpc.channel(indexer.address)
        self.stub = indexer_pb2_grpc.IndexerServiceStub(self.channel)

    @asynccontextmanager
    async def worker(
        self,
        worker_id: int,
        *wires: Wire,
        event_format: KvEventFormat = EVENT_FORMAT,
        model: str = "m",
    ) -> AsyncIterator[WorkerApp]:
        """A worker in discovery that publishes to the indexer."""
        engine = WiredEngine(wires, event_format, model)
        config = WorkerConfig(registry="memory", block_size=event_format.block_size)
        registry = MemoryRegistry(self.store)
        app = WorkerApp(config, instance_id=worker_id, registry=registry, engine=engine)
        sources = [Source(worker_id, wire.rank) for wire in wires]
        feed = self.indexer.ingest.feed
        try:
            async with living(app):
                await until(
                    lambda: all(one in feed for one in sources),
                    "the indexer has received the hello",
                )
                await until(
                    lambda: self.indexer.presence.worker(worker_id),
                    "the indexer has received the hello",
                )
                yield app
        finally:
            for wire in wires:
                wire.close()

    async def rows(self, partition: Partition, hashes: Hashes) -> list[pb.MatchedDepth]:
        request = pb.MatchRequest(
            partition=partition_to_proto(partition), prefix_hashes=hashes_to_bytes(hashes)
        )
        response = await rpc.unary(self.stub.Match, request, timeout_s=WAIT_S)
        assert isinstance(response, pb.MatchResponse)
        return list(response.matches)

    async def depths(
        self,
        app: WorkerApp,
        tokens: Sequence[int],
        *,
        lora: str = "",
        salt: str = "",
        rank: int = 0,
    ) -> tuple[int, int, int]:
        """The depth of a prompt in the index for a worker: device, host, disk."""
        partition = partition_of(app)
        names = names_of(partition, tokens, lora=lora, salt=salt)
        for row in await self.rows(partition, names):
            if (row.source.worker_id, row.source.dp_rank) == (app.instance_id, rank):
                return row.device_blocks, row.host_blocks, row.disk_blocks
        return 0, 0, 0

    async def holds(
        self, app: WorkerApp, tokens: Sequence[int], depth: int | tuple[int, int, int], **how: Any
    ) -> None:
        """Waits until the index has this depth; a single depth applies to all tiers."""
        expected = depth if isinstance(depth, tuple) else (depth,) * 3

        async def has_depths() -> bool:
            return await self.depths(app, tokens, **how) == expected

        await until(has_depths, f"the index has the depths {expected}")

    async def wait_until_synced(self, app: WorkerApp) -> None:
        """Waits until the index is up to date with the worker."""
        await until(lambda: self.is_synced(app), "the index has caught up")

    def is_synced(self, app: WorkerApp) -> bool:
        """Whether the index is up to date with the worker."""
        assert app.publisher is not None
        feed = self.indexer.ingest.feed
        event_logs = [one.event_log for one in app.publisher.sources.values()]
        return all(feed.position(one.source) == one.state for one in event_logs)

    async def verified(self, app: WorkerApp) -> int:
        """Checks that `Verify` finds no difference; returns the equal blocks of all ranks and
        tiers."""
        await self.wait_until_synced(app)
        request = pb.VerifyRequest(worker_id=app.instance_id)

        async def compared() -> list[pb.VerifiedSource] | None:
            """The comparisons; None if one of them could not be made, as on a busy machine."""
            response = await rpc.unary(self.stub.Verify, request, timeout_s=WAIT_S)
            assert isinstance(response, pb.VerifyResponse)
            rows = list(response.sources)
            return None if any(row.error for row in rows) else rows

        rows = await until(compared, "the index can be compared with the worker")
        assert rows is not None
        for row in rows:
            assert (row.extra, row.missing) == (0, 0)
        return sum(row.equal for row in rows)

    def state(self, app: WorkerApp, rank: int = 0) -> str:
        return self.indexer.ingest.feed.status(Source(app.instance_id, rank)).state

    def published(self, app: WorkerApp, rank: int = 0, tier: Tier = Tier.DEVICE) -> set[int]:
        index, advertised = self.indexer.ingest.feed.advertised(Source(app.instance_id, rank))
        return {key for of, part in index.chunks(advertised) if of is tier for key in part.tolist()}


def partition_of(app: WorkerApp) -> Partition:
    assert app.publisher is not None
    return app.publisher.publication.partition


def names_of(
    partition: Partition, tokens: Sequence[int], *, lora: str = "", salt: str = ""
) -> Hashes:
    """The prefix hashes of a prompt in a partition."""
    hasher = PrefixHasher(
        mesh_key=b"",
        model=partition.model,
        block_size=partition.block_size,
        lora_name=lora,
        cache_salt=salt,
    )
    return hasher.prefix_hashes(list(tokens))


def reader_of(app: WorkerApp, rank: int = 0) -> KvEventReader:
    assert isinstance(app.engine, WiredEngine)
    return app.engine.readers[rank]


@asynccontextmanager
async def wired_mesh(**settings: Any) -> AsyncIterator[WiredMesh]:
    """An indexer of a mesh in this process."""
    store = MemoryStore()
    config = IndexerConfig(registry="memory", **settings)
    app = IndexerApp(config, registry=MemoryRegistry(store))
    async with living(app, grace_s=0.5):
        mesh = WiredMesh(store, app)
        async with mesh.channel:
            yield mesh

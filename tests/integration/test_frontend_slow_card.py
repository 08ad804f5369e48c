"""A frontend, a worker, and a peer that sends artifacts byte by byte, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from common.registry.card import Artifact, ModelCard
from common.registry.instances import Instance
from common.registry.registry import MemoryRegistry, MemoryStore
from common.rpc import channel as rpc
from frontend_svc.app import FrontendApp
from frontend_svc.config import FrontendConfig
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from tests.kit.apps import living
from tests.kit.waiting import until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engines.sim.config import SIM_MODEL_DIR

NS = "default"
TRICKLE_S = 0.02
FILES = ("tokenizer.json", "tokenizer_config.json")


class SlowPeer(engine_pb2_grpc.EngineServiceServicer):
    """Sends single bytes with pauses, and the rest at once when `hurry` is set."""

    def __init__(self) -> None:
        self.hurry = asyncio.Event()
        self.sent = 0

    async def GetArtifact(
        self, request: engine_pb2.GetArtifactRequest, context: object
    ) -> AsyncIterator[engine_pb2.GetArtifactResponse]:
        """See the proto."""
        data = (SIM_MODEL_DIR / request.name).read_bytes()
        one, at = Artifact.of(data), request.offset
        # Ends: the test sets it, or the call is cancelled.
        while not self.hurry.is_set():
            yield engine_pb2.GetArtifactResponse(
                data=data[at : at + 1], sha256=one.sha256, size=one.size
            )
            at, self.sent = at + 1, self.sent + 1
            # Sleep: the pace of a slow transfer.
            await asyncio.sleep(TRICKLE_S)
        yield engine_pb2.GetArtifactResponse(data=data[at:], sha256=one.sha256, size=one.size)


@asynccontextmanager
async def serving_slow_peer(store: MemoryStore) -> AsyncIterator[SlowPeer]:
    """A registered worker of the model `slow`."""
    registry, server = MemoryRegistry(store), rpc.server()
    peer = SlowPeer()  # type: ignore[abstract]  # Only GetArtifact is called.
    engine_pb2_grpc.add_EngineServiceServicer_to_server(peer, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    artifacts = {
        name: Artifact.of((SIM_MODEL_DIR / name).read_bytes(), inline=False) for name in FILES
    }
    card = ModelCard(name="slow", artifacts=artifacts)
    await registry.put_card(card)
    address = f"127.0.0.1:{port}"
    instance = Instance(
        9, NS, "worker", "", address, model="slow", card_checksum=card.checksum, kv_index="none"
    )
    lease = await registry.register(instance)
    try:
        yield peer
    finally:
        await lease.close()
        await server.stop(None)
        await registry.close()


@pytest.mark.row("S0-09")
async def test_a_slow_card_transfer_does_not_delay_other_models() -> None:
    store = MemoryStore()
    async with AsyncExitStack() as ended:
        peer = await ended.enter_async_context(serving_slow_peer(store))
        config = FrontendConfig(registry="memory", http_port=0)
        frontend = FrontendApp(config, registry=MemoryRegistry(store))
        await ended.enter_async_context(living(frontend, grace_s=1.0))
        http = await ended.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{frontend.http_address}", trust_env=False)
        )

        def serves(*names: str) -> Callable[[], Awaitable[bool]]:
            async def are_served() -> bool:
                models = (await http.get("/v1/models")).json()["data"]
                return {model["id"] for model in models} == set(names)

            return are_served

        async def has_started() -> bool:
            return peer.sent > 0

        await until(has_started, "the slow transfer has started")
        health = (await http.get("/health")).json()
        assert health["models_not_ready"] == {"slow": "the card is loading"}
        async with living(
            WorkerApp(
                WorkerConfig(registry="memory", speedup=0.0, loras=("french",)),
                registry=MemoryRegistry(store),
            )
        ):
            await until(serves("sim", "french"), "the other model, and its adapter, are served")
        await until(serves(), "the other model is removed")
        before = peer.sent

        async def continues() -> bool:
            return peer.sent > before

        await until(continues, "the slow transfer continued")
        peer.hurry.set()
        await until(serves("slow"), "the slow model is served after its transfer")

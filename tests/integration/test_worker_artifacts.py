"""Further duties of workers: serving artifacts of the card, and probing an idle engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import InvalidRequest, NotFound
from common.registry.registry import MemoryRegistry, MemoryStore
from common.rpc import channel as rpc
from common.rpc.status import map_rpc_errors
from frontend_svc.models.catalog import ModelCatalog
from kvmesh.engine.v1 import engine_pb2 as pb
from kvmesh.engine.v1 import engine_pb2_grpc
from tests.kit.apps import living
from tests.kit.catalogs import follow_and_load
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import SERVICE_NAME, WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engines.sim.config import SIM_MODEL_DIR
from worker_svc.engines.sim.engine import SimEngine

NS = "default"


def worker(
    store: MemoryStore | None = None, **settings: Any
) -> AbstractAsyncContextManager[WorkerApp]:
    config = WorkerConfig(registry="memory", speedup=0.0, **settings)
    return living(WorkerApp(config, registry=MemoryRegistry(store or MemoryStore())))


async def artifact(app: WorkerApp, name: str, offset: int = 0) -> list[pb.GetArtifactResponse]:
    async with rpc.channel(app.address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        call: Any = stub.GetArtifact(
            pb.GetArtifactRequest(name=name, offset=offset), timeout=WAIT_S
        )
        with map_rpc_errors():
            return [part async for part in call]


@pytest.mark.parametrize("offset", [0, 1, 50_000])
async def test_an_artifact_is_sent_from_an_offset_with_the_size_and_digest_of_the_whole(
    offset: int,
) -> None:
    data = (SIM_MODEL_DIR / "tokenizer.json").read_bytes()
    async with worker() as app:
        parts = await artifact(app, "tokenizer.json", offset)
        assert b"".join(part.data for part in parts) == data[offset:]
        assert (parts[0].sha256, parts[0].size) == (hashlib.sha256(data).hexdigest(), len(data))
        (nothing,) = await artifact(app, "tokenizer.json", len(data))
        assert (nothing.data, nothing.size) == (b"", len(data))
        with pytest.raises(InvalidRequest) as caught:
            await artifact(app, "tokenizer.json", len(data) + 1)
        assert caught.value.field == "offset"
        with pytest.raises(NotFound):
            await artifact(app, "../secrets")


async def test_a_frontend_fetches_files_that_the_card_does_not_carry() -> None:
    store = MemoryStore()
    async with AsyncExitStack() as ended:
        apps = [await ended.enter_async_context(worker(store, card_inline_bytes=0)) for _ in "ab"]
        registry = MemoryRegistry(store)
        ended.push_async_callback(registry.close)
        watch = await ended.enter_async_context(registry.watch(NS))
        snapshot = watch.current
        (checksum,) = {one.card_checksum for one in snapshot.of("worker")}
        thin = await registry.get_card(checksum)
        assert {name for name, one in thin.artifacts.items() if one.inline is None} >= {
            "tokenizer.json",
            "tokenizer_config.json",
        }
        models = ModelCatalog(registry.get_card, now_s=lambda: 0.0, mesh_key=b"")
        # One address is unreachable: the other is tried.
        await apps[0].close()
        assert await follow_and_load(models, snapshot)
        model = models.get("sim")
        assert model.checksum == checksum
        assert await model.encode("hello", special_tokens=True)
        assert models.artifacts.counters["fetched"] == len(thin.artifacts)
        assert models.artifacts.counters["mismatches"] == 0


async def test_small_files_travel_in_the_card() -> None:
    store = MemoryStore()
    async with worker(store, card_inline_bytes=5000):
        registry = MemoryRegistry(store)
        async with registry.watch(NS) as watch:
            (one,) = watch.current.of("worker")
        card = await registry.get_card(one.card_checksum)
        assert card.artifacts["tokenizer.json"].inline is None
        assert card.artifacts["tokenizer_config.json"].inline is not None
        await registry.close()


async def mesh_error_to_status(app: WorkerApp, service: str) -> Any:
    channel: Any  # The stubs' types cover synchronous channels only.
    async with rpc.channel(app.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        health_request = health_pb2.HealthCheckRequest(service=service)
        reply: health_pb2.HealthCheckResponse = await rpc.unary(
            stub.Check, health_request, timeout_s=WAIT_S
        )
        return reply.status


@pytest.mark.slow
async def test_a_worker_is_not_serving_while_its_idle_engine_fails_probes() -> None:
    serving, not_serving = (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )
    async with worker(canary_idle_s=0.02, canary_timeout_s=0.5) as app:
        assert isinstance(app.engine, SimEngine)

        async def both_are(status: Any) -> bool:
            return [await mesh_error_to_status(app, one) for one in ("", SERVICE_NAME)] == [
                status
            ] * 2

        await until(lambda: both_are(serving), "it serves")
        app.engine.freeze()
        await until(lambda: both_are(not_serving), "its engine is reported as frozen")
        app.engine.unfreeze()
        await until(lambda: both_are(serving), "the worker serves again")
        counts = app.runner.counts()
        assert counts["canaries"] >= counts["canaries_failed"] >= 1
        assert counts.get("accepted", 0) == 0


@pytest.mark.row("S2-77", "S2-78")
async def test_the_health_check_of_a_worker_needs_no_prefill_from_another() -> None:
    settings: dict[str, Any] = {"role": "decode", "local_prefill": False}
    async with worker(canary_idle_s=0.02, canary_timeout_s=5.0, **settings) as app:

        async def counters() -> Mapping[str, int]:
            async with rpc.channel(app.address) as channel:
                stub = engine_pb2_grpc.EngineServiceStub(channel)
                info = await rpc.unary(stub.GetInfo, pb.GetInfoRequest(), timeout_s=WAIT_S)
            assert isinstance(info, pb.GetInfoResponse)
            return dict(info.counters)

        async def has_probed() -> bool:
            return (await counters()).get("canaries", 0) > 2

        await until(has_probed, "its engine was probed")
        assert (await counters()).get("canaries_failed", 0) == 0
        assert await mesh_error_to_status(app, "") == health_pb2.HealthCheckResponse.SERVING


async def test_without_a_probe_interval_an_idle_engine_gets_no_probe() -> None:
    async with worker(canary_idle_s=0) as app:
        await asyncio.sleep(0)
        assert app.runner.counters["canaries"] == 0

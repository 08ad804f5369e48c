"""A worker's identity: its model, its engine, and rejections because of other workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.errors import Conflict, InvalidRequest, NotFound
from common.registry.registry import MemoryRegistry, MemoryStore
from common.request.preprocessed import PreprocessedRequest, StopConditions, TokenIds
from common.rpc import channel as rpc
from common.rpc.status import map_rpc_errors
from common.wire.preprocessed import to_proto
from kvmesh.engine.v1 import engine_pb2 as pb
from kvmesh.engine.v1 import engine_pb2_grpc
from tests.kit.apps import living
from tests.kit.waiting import WAIT_S
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engines.echo import EchoConfig, EchoEngine


class CustomEngine(EchoEngine):
    """A custom engine."""

    def __init__(self) -> None:
        super().__init__(EchoConfig(model="mine"))


def worker(
    engine: CustomEngine | None = None, store: MemoryStore | None = None, **settings: Any
) -> WorkerApp:
    config = WorkerConfig(registry="memory", speedup=0.0, **settings)
    return WorkerApp(config, registry=MemoryRegistry(store or MemoryStore()), engine=engine)


async def info_of(app: WorkerApp) -> pb.GetInfoResponse:
    async with living(app), rpc.channel(app.address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        info: pb.GetInfoResponse = await rpc.unary(
            stub.GetInfo, pb.GetInfoRequest(), timeout_s=WAIT_S
        )
        return info


@pytest.mark.parametrize(
    ("engine", "settings", "model"),
    [
        (CustomEngine, {}, "mine"),
        (CustomEngine, {"model_name": "cnt"}, "cnt"),
        (None, {}, "sim"),
        (None, {"model_name": "cnt"}, "cnt"),
    ],
)
async def test_a_model_is_named_by_its_flag_else_by_its_engine(
    engine: type[CustomEngine] | None, settings: dict[str, Any], model: str
) -> None:
    with capture_logs() as logs:
        info = await info_of(worker(engine() if engine else None, **settings))
    name = "CustomEngine" if engine else "sim"
    assert (info.model, info.engine) == (model, name)
    assert [one["engine"] for one in logs if one["event"] == "engine_started"] == [name]


async def test_a_card_conflict_names_the_differences_and_the_remedy() -> None:
    store = MemoryStore()
    async with living(worker(store=store, stable_name="w-0")):
        with pytest.raises(Conflict) as rejected:
            async with living(worker(store=store, block_size=32)):
                raise AssertionError("the worker registered")
    error = rejected.value
    assert error.reason == "CARD_CONFLICT"
    assert "model 'sim' is served in namespace 'default' under another card" in error.message
    assert "by w-0" in error.message
    assert ": kv_block_size (--block-size) 32, not 16. All workers" in error.message
    assert "--model-name" in error.message


class Forgetful(MemoryRegistry):
    """A registry without the cards of other workers."""

    async def get_card(self, checksum: str) -> Any:
        raise NotFound("no such card")


async def test_an_unreadable_card_leaves_the_conflict_error_unchanged() -> None:
    store = MemoryStore()
    async with living(worker(store=store)):
        config = WorkerConfig(registry="memory", speedup=0.0, block_size=32)
        app = WorkerApp(config, registry=Forgetful(store))
        with capture_logs() as logs, pytest.raises(Conflict) as rejected:
            async with living(app):
                raise AssertionError("the worker registered")
    assert rejected.value.reason == "CARD_CONFLICT"
    assert "under another card: " in rejected.value.message
    assert "served_card_unknown" in [one["event"] for one in logs]


async def generated(app: WorkerApp, *token_ids: int) -> list[int]:
    request = PreprocessedRequest(
        token_ids=TokenIds.of(token_ids), stop_conditions=StopConditions(max_tokens=2)
    )
    async with rpc.channel(app.address) as channel:
        call: Any = engine_pb2_grpc.EngineServiceStub(channel).Generate(
            pb.GenerateRequest(request=to_proto(request)), timeout=WAIT_S
        )
        with map_rpc_errors():
            return [token async for message in call for token in message.token_ids]


@pytest.mark.row("S2-34")
async def test_generate_rejects_token_ids_outside_the_vocabulary() -> None:
    async with living(worker()) as app:
        assert len(await generated(app, 5, 4095)) == 2
        for unknown_id in (4096, 9_999_999, 2**32 - 1):
            with pytest.raises(
                InvalidRequest, match=f"token_ids: {unknown_id} is above"
            ) as rejected:
                await generated(app, 5, unknown_id, 7)
            assert rejected.value.field == "token_ids"
            assert "above the largest token id 4095" in rejected.value.message


@pytest.mark.row("S2-91")
async def test_without_a_known_vocabulary_the_engine_checks_token_ids(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    async with living(worker(CustomEngine(), model_path=tmp_path)) as app:
        assert await generated(app, 5, 2**32 - 1) == [5, 2**32 - 1]

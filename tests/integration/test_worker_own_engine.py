"""`--engine module:factory`: a worker process with an engine that is not part of the worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from common.registry.registry import MemoryRegistry, MemoryStore
from common.request.preprocessed import PreprocessedRequest, StopConditions, TokenIds
from common.runtime.config import ConfigError, read_config
from common.wire.preprocessed import to_proto
from kvmesh.engine.v1 import engine_pb2 as pb
from kvmesh.engine.v1 import engine_pb2_grpc
from tests.kit.processes import Service
from tests.kit.waiting import WAIT_S
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engines.echo import EchoConfig, EchoEngine


@pytest.fixture
def plugin() -> Iterator[ModuleType]:
    module = ModuleType("test_engine_plugin")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def read(*flags: str) -> WorkerConfig:
    return read_config(WorkerConfig, "WORKER", {}, flags)[0]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Service]:
    flags = [f"--registry-path={tmp_path / 'registry'}", "--model-name=mine"]
    flags += ["--engine=tests.e2e.extra_args_engine:make", "--context-length=64"]
    worker = Service("worker", flags, tmp_path, "worker-1")
    try:
        yield worker.wait_ready()
    finally:
        worker.close()


@pytest.mark.slow
def test_a_worker_process_serves_requests_with_an_imported_engine(process: Service) -> None:
    stub = engine_pb2_grpc.EngineServiceStub(process.channel)
    request = PreprocessedRequest(
        token_ids=TokenIds.of([5, 6, 7]),
        stop_conditions=StopConditions(max_tokens=3),
        extra_args={"reverse": True},
    )
    messages: Any = stub.Generate(pb.GenerateRequest(request=to_proto(request)), timeout=WAIT_S)
    assert [token for message in messages for token in message.token_ids] == [7, 6, 5]
    info = stub.GetInfo(pb.GetInfoRequest(), timeout=WAIT_S)
    assert (info.engine, info.model) == ("ReversingEngine", "mine")


async def test_the_factory_receives_the_configuration(plugin: ModuleType) -> None:
    def make(config: WorkerConfig) -> EchoEngine:
        received.append(config)
        return EchoEngine(EchoConfig())

    received: list[WorkerConfig] = []
    plugin.make = make  # type: ignore[attr-defined]  # The module is defined in the test.
    flags = ("--block-size=32", "--engine-args=of my own", "--loras=a")
    config = read("--engine=test_engine_plugin:make", *flags)
    app = WorkerApp(config, registry=MemoryRegistry(MemoryStore()))
    await app.close()
    assert received == [config]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llm", "must be one of sim, echo, sglang, openai, or module:factory"),
        ("llm:", "must be one of"),
        ("no_such_module_here:make", "ModuleNotFoundError"),
        ("test_engine_plugin:absent", "AttributeError"),
        ("test_engine_plugin:number", "not callable"),
    ],
)
def test_an_engine_that_cannot_be_imported_stops_the_start(
    plugin: ModuleType, name: str, message: str
) -> None:
    plugin.__dict__.update(number=1)
    with pytest.raises(ConfigError) as refused:
        read("--engine", name)
    (problem,) = refused.value.problems
    assert problem.startswith(f"--engine: {name!r}: ")
    assert message in problem


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "failed: ZeroDivisionError"),
        ("nothing", "returned no LLMEngine: it needs start, generate"),
    ],
)
async def test_a_factory_that_returns_no_engine_stops_the_start(
    plugin: ModuleType, name: str, message: str
) -> None:
    plugin.__dict__.update(broken=lambda _: 1 // 0, nothing=lambda _: None)
    config = read("--engine", f"test_engine_plugin:{name}")
    with pytest.raises(ConfigError) as refused:
        WorkerApp(config, registry=MemoryRegistry(MemoryStore()))
    assert refused.value.problems[0].startswith(f"--engine: 'test_engine_plugin:{name}' {message}")


@pytest.mark.parametrize(
    "flags",
    [("--loras=a", "--engine=echo"), ("--engine-args={}", "--engine=sim")],
)
def test_built_in_engines_still_refuse_settings_that_they_lack(flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigError):
        read(*flags)

"""Guided decoding of a running sim worker: a slow constraint does not delay other streams."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from common.registry.registry import MemoryRegistry, MemoryStore
from common.request.grammar import compile_constraint
from common.rpc import channel as rpc
from kvmesh.engine.v1 import engine_pb2 as pb
from kvmesh.engine.v1 import engine_pb2_grpc
from kvmesh.types.v1 import request_pb2 as wire
from tests.kit.apps import living
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engines.sim import constraint


async def test_other_streams_continue_while_a_constraint_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, compiled = threading.Event(), list[str | None]()

    def compile_slowly(tokenizer: Any, guided: Any) -> Any:
        compiled.append(guided.regex)
        assert may_end.wait(WAIT_S)
        return compile_constraint(tokenizer, guided)

    monkeypatch.setattr(constraint, "compile_constraint", compile_slowly)
    config = WorkerConfig(registry="memory", canary_idle_s=0.0, speedup=0.0)
    app = WorkerApp(config, registry=MemoryRegistry(MemoryStore()))
    async with living(app, registered=False), rpc.channel(app.address) as channel:
        stub: Any = engine_pb2_grpc.EngineServiceStub(channel)

        async def generate(regex: str | None) -> list[int]:
            request = wire.PreprocessedRequest(token_ids=[5, 6, 7])
            request.stop_conditions.max_tokens = 40
            if regex:
                request.sampling_options.guided_decoding.regex = regex
            call = stub.Generate(pb.GenerateRequest(request=request), timeout=WAIT_S)
            return [token async for message in call for token in message.token_ids]

        plain = await generate(None)
        guided = [asyncio.create_task(generate(regex)) for regex in ("a", "b")]
        await until(lambda: compiled, "the worker compiles a constraint")
        assert await generate(None) == plain
        assert not any(task.done() for task in guided)
        assert len(compiled) == 1, "one compiles at a time"
        may_end.set()
        first, second = await asyncio.gather(*guided)
        assert first
        assert second
        assert first != second

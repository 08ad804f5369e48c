"""What one frontend, or a flood of open calls, can take from a running worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import InvalidRequest, MeshError, Overloaded
from common.registry.registry import MemoryRegistry, MemoryStore
from common.request.preprocessed import PreprocessedRequest, TokenIds
from common.request.token_stream import (
    ARRIVING_BYTES_MAX,
    ARRIVING_BYTES_MAX_PER_STREAM,
    PROMPT_PART_BYTES,
    Hello,
    LegRequest,
    PromptPart,
    RequestFrame,
)
from common.rpc import channel as rpc
from common.rpc.interceptors import OPEN_CALLS_MAX
from common.rpc.status import mesh_error_from_rpc
from common.wire.token_stream import request_frame_to_proto, response_frame_from_proto
from kvmesh.engine.v1 import engine_pb2_grpc
from tests.kit.apps import living
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig

PART = bytes(PROMPT_PART_BYTES)
LARGE_PART = bytes(62 << 20)


@asynccontextmanager
async def working() -> AsyncIterator[WorkerApp]:
    config = WorkerConfig(registry="memory", speedup=0.0)
    app = WorkerApp(config, registry=MemoryRegistry(MemoryStore()))
    async with living(app, registered=False):
        yield app


class Attach:
    """A frontend that sends any frame."""

    def __init__(self, app: WorkerApp, frontend_id: int) -> None:
        self.channel = rpc.channel(app.address)
        self._call: Any = engine_pb2_grpc.EngineServiceStub(self.channel).Attach()
        self._hello = Hello(frontend_id, app.instance_id, 1)
        self._write_lock = asyncio.Lock()

    async def __aenter__(self) -> Attach:
        await self.send(RequestFrame(hello=self._hello))
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._beating.cancel()
        await asyncio.wait([self._beating])
        self._call.cancel()
        await self.channel.close()

    async def send(self, frame: RequestFrame) -> None:
        async with self._write_lock:
            await self._call.write(request_frame_to_proto(frame))

    async def _beat(self) -> None:
        # Ends: the test cancels it.
        while True:
            # Sleep: the pace of heartbeats.
            await asyncio.sleep(0.2)
            await self.send(RequestFrame(heartbeat=True))

    async def rejections(self, count: int) -> dict[int, MeshError]:
        """The next `count` rejected slots."""
        found: dict[int, MeshError] = {}
        async with asyncio.timeout(WAIT_S):
            while len(found) < count:
                frame = response_frame_from_proto(await self._call.read())
                found |= {one.slot: one.error for one in frame.rejected}
        return found

    async def status(self) -> MeshError:
        """The error that ended the stream."""
        try:
            async with asyncio.timeout(WAIT_S):
                while await self._call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return mesh_error_from_rpc(error)
        raise AssertionError("the stream ended without an error")


def submit(slot: int, *token_ids: int, prompt_bytes: int = 0) -> tuple[int, LegRequest]:
    prompt = TokenIds(PART) if prompt_bytes else TokenIds.of(token_ids)
    request = PreprocessedRequest(model="sim", token_ids=prompt)
    return slot, LegRequest(f"r{slot}", request=request, prompt_bytes=prompt_bytes)


@pytest.mark.slow
async def test_begun_prompts_of_62_mb_are_held_up_to_the_limits_of_stream_and_worker() -> None:
    async with working() as app:
        held = app._attach._arriving

        async def begin(attach: Attach, count: int) -> None:
            for slot in range(1, count + 1):
                part = PromptPart(slot, PROMPT_PART_BYTES, LARGE_PART)
                begun = submit(slot, prompt_bytes=64 << 20)
                await attach.send(RequestFrame(submits=[begun], prompt_parts=[part]))

        async with Attach(app, 1) as one, Attach(app, 2) as two, Attach(app, 3) as three:
            await begin(one, 4)
            assert sorted(await one.rejections(2)) == [3, 4]
            assert held.size <= ARRIVING_BYTES_MAX_PER_STREAM
            await begin(two, 2)
            await begin(three, 1)
            (error,) = (await three.rejections(1)).values()
            assert isinstance(error, Overloaded)
            assert held.size <= ARRIVING_BYTES_MAX
        await until(lambda: not held.size, "all begun prompts are dropped")


async def test_a_token_id_outside_the_vocabulary_is_rejected_on_attach() -> None:
    async with working() as app, Attach(app, 1) as attach:
        await attach.send(RequestFrame(submits=[submit(1, 5, 4096, 7), submit(2, 2**32 - 1)]))
        for error in (await attach.rejections(2)).values():
            assert isinstance(error, InvalidRequest)
            assert error.field == "token_ids"
            assert "above the largest token id 4095" in error.message


async def test_a_frame_of_too_many_submits_ends_its_stream_only() -> None:
    async with working() as app, Attach(app, 1) as flood, Attach(app, 2) as other:
        await flood.send(RequestFrame(submits=[submit(slot, 5) for slot in range(1, 1026)]))
        assert "1025/1024 submits" in (await flood.status()).message
        await other.send(RequestFrame(submits=[submit(1, 9999)]))
        assert list(await other.rejections(1)) == [1]


async def test_health_watches_are_bounded_and_do_not_stay_counted() -> None:
    async with working() as app, rpc.channel(app.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        watches = [stub.Watch(request) for _ in range(OPEN_CALLS_MAX)]
        for watch in watches:
            await watch.read()
        with pytest.raises(Overloaded, match="too many health and reflection calls"):
            await rpc.unary(stub.Check, request, timeout_s=WAIT_S)
        for watch in watches:
            watch.cancel()

        async def is_free() -> bool:
            try:
                await rpc.unary(stub.Check, request, timeout_s=WAIT_S)
            except Overloaded:
                return False
            return True

        await until(is_free, "a call is free again")

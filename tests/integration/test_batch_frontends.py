"""The choice of a batch service between frontends: of an older version, and without a response."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from batch_svc.core.batch import Owner
from batch_svc.core.responses import ResponseRow, ResponseRun
from batch_svc.frontends import Frontends
from common.registry.instances import Instance, SnapshotDiff
from common.rpc import channel as rpc
from common.rpc.interceptors import RunningCalls
from kvmesh.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from tests.kit.instances import snapshot_of

OWNER = Owner("acme")
RUN = ResponseRun(OWNER, ResponseRow("r", b"{}", ()), b"{}", 7)


class Lines(frontend_pb2_grpc.BatchLineServiceServicer):
    async def RunLine(self, request: Any, context: Any) -> frontend_pb2.RunLineResponse:
        return frontend_pb2.RunLineResponse(status=200)


class Responses(frontend_pb2_grpc.BackgroundResponseServiceServicer):
    async def RunResponse(self, request: Any, context: Any) -> frontend_pb2.RunResponseResponse:
        return frontend_pb2.RunResponseResponse(status=200)

    async def RunStream(
        self, request: Any, context: Any
    ) -> AsyncIterator[frontend_pb2.RunStreamResponse]:
        yield frontend_pb2.RunStreamResponse(deltas=b'["content","Hi"]\n')
        if request.run.response_id != "resp_cut":
            ended = frontend_pb2.RunResponseResponse(status=200)
            yield frontend_pb2.RunStreamResponse(ended=ended)


def instance(instance_id: int, port: int) -> Instance:
    return Instance(instance_id, "mesh", "frontend", f"f-{instance_id}", f"127.0.0.1:{port}")


@asynccontextmanager
async def frontend(instance_id: int, *, is_old: bool = False) -> AsyncIterator[Instance]:
    """is_old: without the service of responses in the background."""
    addresses: set[str] = set()
    server = rpc.server(security=rpc.PLAINTEXT, addresses=addresses, calls=RunningCalls())
    # Any: the generated types are those of blocking servers.
    lines, responses = Lines(), Responses()
    frontend_pb2_grpc.add_BatchLineServiceServicer_to_server(lines, server)
    if not is_old:
        frontend_pb2_grpc.add_BackgroundResponseServiceServicer_to_server(responses, server)
    port = rpc.bind(server, "127.0.0.1", 0, security=rpc.PLAINTEXT)
    addresses |= rpc.own_addresses("127.0.0.1", port)
    await server.start()
    yield instance(instance_id, port)
    await server.stop(None)


@asynccontextmanager
async def frontends_of(*instances: Instance) -> AsyncIterator[Frontends]:
    frontends = Frontends(rpc.PLAINTEXT, 30.0)
    frontends.on_snapshot(snapshot_of(*instances), SnapshotDiff())
    yield frontends
    await frontends.close()


async def test_a_frontend_of_an_older_version_gets_lines_and_no_responses() -> None:
    async with (
        frontend(1, is_old=True) as old,
        frontend(2) as new,
        frontends_of(old, new) as frontends,
    ):
        assert [(await frontends.run_response(RUN)).status for _ in range(3)] == [200] * 3
    async with frontend(1, is_old=True) as old, frontends_of(old) as frontends:
        reply = await frontends.run_response(RUN)
        assert (reply.status, reply.retry_after_s) == (503, 0.5)
        assert b"older version" in reply.body
        line = await frontends.run(OWNER, "/v1/responses", b"{}", "id")
        assert line.status == 200


async def test_a_frontend_that_gave_no_response_is_the_last_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batch_svc.frontends._SILENT_S", 600.0)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        dead = instance(1, bound.getsockname()[1])
        async with frontend(2) as live, frontends_of(dead, live) as frontends:
            assert (await frontends.run_response(RUN)).status == 503
            for _ in range(3):
                assert (await frontends.run_response(RUN)).status == 200
        async with frontends_of(dead) as frontends:
            for _ in range(2):
                assert (await frontends.run_response(RUN)).status == 503


async def test_the_output_of_a_stream_arrives_before_its_end() -> None:
    parts: list[bytes] = []
    async with frontend(1) as one, frontends_of(one) as frontends:
        assert (await frontends.run_stream(RUN, parts.append)).status == 200
        assert parts == [b'["content","Hi"]\n']
        cut = ResponseRun(OWNER, ResponseRow("resp_cut", b"{}", ()), b"{}", 7)
        reply = await frontends.run_stream(cut, parts.append)
        assert (reply.status, reply.retry_after_s, len(parts)) == (503, 0.5, 2)
        assert b"without a response" in reply.body

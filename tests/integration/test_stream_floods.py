"""Floods of a stream port: other connections keep their turns and their places."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog.testing
import uvloop
from google.protobuf.wrappers_pb2 import BytesValue

from common import errors
from common.rpc import channel as rpc
from common.rpc import pending_connections, stream_server
from common.rpc.http2.call import MESSAGE_COST_BYTES, TURN_BYTES
from common.rpc.stream import open_stream
from common.rpc.stream_server import ServedCall, StreamServer
from tests.integration.rpc_bed import RunningServer, echo, serving, serving_streams
from tests.kit.http2_frames import DATA, FLOODS, PREFACE, calm_text, frame, prefixed, request
from tests.kit.waiting import WAIT_S, until

METHOD = "/test.Echo/stream_stream"
WITH_TOKEN = rpc.Security(token="a token of the mesh")
TURN_MESSAGES = TURN_BYTES // MESSAGE_COST_BYTES
EMPTY_MESSAGES = frame(DATA, payload=prefixed(b"") * 3000)


@asynccontextmanager
async def counting(handled: list[int]) -> AsyncIterator[tuple[int, StreamServer]]:
    """The port and the server of a method that counts its messages."""

    async def handle(requests: Any, _context: Any) -> None:
        async for _ in requests:
            handled[0] += 1

    server = StreamServer()
    method: Any = grpc.stream_stream_rpc_method_handler(handle)
    server.add_registered_method_handlers("test.Echo", {"stream_stream": method})
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        yield port, server
    finally:
        await server.close()


async def check_turns(handled: list[int], count: int) -> None:
    """Between two turns of another task, few messages are handled."""
    most, before = 0, 0
    async with asyncio.timeout(WAIT_S):
        while handled[0] < count:
            await asyncio.sleep(0)
            most = max(most, handled[0] - before)
            before = handled[0]
    assert most <= 2 * TURN_MESSAGES


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_server_handles_few_messages_a_turn(run: Callable[[Any], None]) -> None:
    async def flood() -> None:
        handled = [0]
        async with counting(handled) as (port, server):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(METHOD))
            await until(lambda: server.accepted_calls, "the call is accepted")
            writer.write(EMPTY_MESSAGES * 20)
            await check_turns(handled, 60_000)
            writer.close()

    run(flood())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_client_delivers_few_messages_a_turn(run: Callable[[Any], None]) -> None:
    count = 30_000

    async def send_many(_request: bytes, context: Any) -> bytes:
        for _ in range(count):
            await context.write(b"")
        return b""

    async def flood() -> None:
        delivered = [0]

        def receive(_message: BytesValue) -> None:
            delivered[0] += 1

        async with (
            serving_streams(send_many) as service,
            open_stream(f"127.0.0.1:{service.port}", METHOD, BytesValue, rpc.PLAINTEXT) as stream,
        ):
            await stream.write(BytesValue(value=b"x"))
            await stream.done_writing()
            with pytest.raises(errors.InternalError):
                await stream.read()  # the greeting is of another type
            delivery = asyncio.create_task(stream.deliver(receive))
            await check_turns(delivered, count + 1)
            await delivery

    run(flood())


@asynccontextmanager
async def opened(service: RunningServer) -> AsyncIterator[Any]:
    """An accepted call."""
    address = f"127.0.0.1:{service.port}"
    async with open_stream(address, METHOD, BytesValue, service.security) as stream:
        await stream.write(BytesValue(value=b"x"))
        with pytest.raises(errors.InternalError):
            await stream.read()  # the greeting is of another type
        yield stream


@pytest.mark.parametrize("sent", [b"", PREFACE, request(METHOD)], ids=["none", "preface", "call"])
async def test_connections_without_a_credential_keep_no_member_out(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_connections, "PENDING_MAX", 16)
    monkeypatch.setattr(stream_server, "PENDING_MAX", 16)
    async with (
        serving_streams(echo, security=WITH_TOKEN) as service,
        asyncio.timeout(WAIT_S),
        opened(service) as first,
    ):
        streams = service.streams
        assert streams is not None
        writers = []
        for _ in range(100):
            _, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(sent)
            writers.append(writer)
        await until(lambda: streams.ended["evicted"] >= 80, "the oldest are ended")
        assert len(streams.pending) <= 16
        assert streams.accepted_calls == 1
        async with opened(service) as later:
            for stream in (first, later):
                await stream.write(BytesValue(value=b"y"))
                assert await stream.read()
            assert streams.accepted_calls == 2
        for writer in writers:
            writer.close()


async def test_members_that_connect_beside_a_flood_are_all_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_connections, "PENDING_MAX", 16)
    monkeypatch.setattr(stream_server, "PENDING_MAX", 16)
    async with serving_streams(echo, security=WITH_TOKEN) as service, asyncio.timeout(WAIT_S):

        async def flood() -> None:
            # Ends: the test cancels its task.
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", service.port)
                    writer.write(request(METHOD))
                    writer.close()

        tasks = [asyncio.create_task(flood()) for _ in range(4)]
        for _ in range(30):
            async with opened(service) as stream:
                await stream.write(BytesValue(value=b"y"))
        for task in tasks:
            task.cancel()


async def test_a_call_above_the_limit_of_members_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_server, "CONNECTIONS_MAX", 2)
    async with (
        serving_streams(echo) as service,
        asyncio.timeout(WAIT_S),
        opened(service) as first,
    ):
        async with opened(service):
            address = f"127.0.0.1:{service.port}"
            async with open_stream(address, METHOD, BytesValue, rpc.PLAINTEXT) as third:
                with pytest.raises(errors.Overloaded, match="too many streams: 2/2"):
                    await third.read()
        streams = service.streams
        assert streams is not None
        assert streams.ended == {"connections": 1}
        await until(lambda: streams.accepted_calls == 1, "the second has ended")
        async with opened(service):
            await first.write(BytesValue(value=b"y"))
            assert await first.read()


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_of_frames_ends_with_a_goaway_that_names_the_limit(name: str) -> None:
    async with serving_streams(echo) as service, asyncio.timeout(WAIT_S), opened(service) as other:
        with structlog.testing.capture_logs() as logs:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(request(METHOD) + FLOODS[name] * 3000)
            received = await reader.read()
            writer.close()
        assert "too many control frames" in (calm_text(received) or "")
        assert [log["limit"] for log in logs if log["event"] == "streams_refused"] == [
            "control_frames"
        ]
        assert service.streams is not None
        assert service.streams.ended == {"control_frames": 1}
        await other.write(BytesValue(value=b"y"))
        assert await other.read()


async def test_a_client_that_takes_no_responses_to_its_pings_is_ended() -> None:
    async with serving_streams(echo) as service, asyncio.timeout(WAIT_S):
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(request(METHOD) + FLOODS["ping"] * 3000)
        assert service.streams is not None
        ended = service.streams.ended
        await until(lambda: ended["control_frames"], "the connection is ended")
        writer.close()


@pytest.mark.parametrize("serve", [serving, serving_streams])
async def test_a_long_quiet_and_a_busy_call_exceed_no_limit(serve: Any) -> None:
    async with serve(echo) as service, asyncio.timeout(WAIT_S), opened(service) as stream:
        for number in range(3000):
            message = BytesValue(value=bytes(number))
            await stream.write(message)
            await stream.read()


async def test_connections_that_ended_before_they_were_accepted_take_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    served_call = stream_server.ServedCall

    def make(*arguments: Any) -> stream_server.ServedCall:
        made.append(arguments)
        return served_call(*arguments)

    monkeypatch.setattr(stream_server, "ServedCall", make)
    async with serving_streams(echo) as service, asyncio.timeout(WAIT_S):
        for _ in range(100):
            socket.create_connection(("127.0.0.1", service.port)).close()
        async with opened(service):
            assert len(made) == 1


def test_a_connection_without_a_call_leaves_no_reference_cycle() -> None:
    """Otherwise the collection of a flood's connections stops the process for 0.2 s."""

    async def connect(port: int, server: StreamServer) -> weakref.ref[ServedCall]:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE)
        await until(lambda: server.connections, "the connection is served")
        (connection,) = map(weakref.ref, server.connections)
        writer.close()
        await until(lambda: not server.connections, "the connection has ended")
        return connection

    async def check() -> None:
        async with counting([0]) as (port, server):
            first = await connect(port, server)
            await connect(port, server)  # the server's loop no longer refers to the first one
            await until(lambda: first() is None, "the first connection is freed", 1.0)

    gc.disable()
    try:
        uvloop.run(check())
    finally:
        gc.enable()

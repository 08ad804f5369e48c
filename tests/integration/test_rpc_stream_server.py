"""The server of streams: clients of grpc.aio, hostile clients, credentials."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc
import pytest
import uvloop
from google.protobuf.wrappers_pb2 import BytesValue, StringValue

from common import errors
from common.rpc import channel as rpc
from common.rpc import stream_server
from common.rpc.claimed_id import check_claimed_id
from common.rpc.http2.ends import ClientCall
from common.rpc.message_stream import CLOSE_TIMEOUT_S
from common.rpc.status import map_rpc_errors
from common.rpc.stream import open_stream
from common.rpc.stream_server import StreamServer
from common.runtime.member_key import MemberKey, MemberKeys
from common.runtime.mesh_auth import CALL_VALID_S, MeshSecret
from tests.integration.rpc_bed import RunningServer, echo, serving, serving_streams
from tests.kit.waiting import WAIT_S, until

TOKEN = "a token of the mesh"
WITH_TOKEN = rpc.Security(token=TOKEN)
METHOD = "/test.Echo/stream_stream"


async def call_with(port: int, credential: str, header: str = "authorization") -> bytes:
    """The greeting, to a client of grpc.aio."""
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub: Any = channel.stream_stream(METHOD)
        call = stub(metadata=((header, credential),), timeout=WAIT_S)
        with map_rpc_errors():
            greeting: bytes = await call.read()
        call.cancel()
        return greeting


async def test_a_client_of_grpc_aio_is_served() -> None:
    async with (
        serving_streams(echo) as service,
        rpc.channel(f"127.0.0.1:{service.port}") as channel,
    ):
        stub: Any = channel.stream_stream(METHOD)
        call = stub(iter([b"a", bytes(3_000_000), b""]), timeout=WAIT_S)
        assert [message async for message in call] == [b"first", b"a", bytes(3_000_000), b""]
        assert await call.code() is grpc.StatusCode.OK


async def test_a_client_of_grpc_aio_gets_the_error_of_a_handler() -> None:
    async def refuse(_request: bytes, _context: object) -> bytes:
        raise errors.Overloaded(2.5, "full: 8/8 ✓")

    async with (
        serving_streams(refuse) as service,
        rpc.channel(f"127.0.0.1:{service.port}") as channel,
    ):
        stub: Any = channel.stream_stream(METHOD)
        call = stub(iter([b"a"]), timeout=WAIT_S)
        assert await call.read() == b"first"
        with pytest.raises(errors.Overloaded, match=r"full: 8/8 ✓") as raised, map_rpc_errors():
            await call.read()
        assert raised.value.retry_after_s == 2.5


async def test_a_stolen_credential_works_neither_twice_nor_elsewhere_nor_later() -> None:
    secret, now = MeshSecret(TOKEN), time.time()
    async with serving_streams(echo, security=WITH_TOKEN) as service:
        port = service.port
        address = f"127.0.0.1:{port}"
        credential = secret.sign_call(METHOD, address, now)
        assert await call_with(port, credential) == b"first"
        for refused, reason in (
            (credential, "used before"),
            (secret.sign_call("/test.Echo/Attach", address, now), "wrong"),
            (secret.sign_call(METHOD, f"127.0.0.1:{port + 1}", now), "the call is for"),
            (secret.sign_call(METHOD, address, now - CALL_VALID_S - 5), "check the clocks"),
            (MeshSecret("guess").sign_call(METHOD, address, now), "wrong"),
            (f"Bearer {TOKEN}", "proof"),
            ("", "proof"),
        ):
            with pytest.raises(errors.Unauthenticated, match=reason):
                await call_with(port, refused)


def keyed(key: MemberKey | None, token: str | None = TOKEN) -> rpc.Security:
    return rpc.Security(token=token, members=MemberKeys(key, is_required=True))


@pytest.mark.parametrize("serve", [serving, serving_streams])
@pytest.mark.parametrize("token", [TOKEN, None])
async def test_both_ends_of_a_stream_prove_their_ids(serve: Any, token: str | None) -> None:
    server, client, other = MemberKey(), MemberKey(), MemberKey()
    claims: list[int] = []

    async def claim(request: bytes, _context: object) -> bytes:
        claims.append(int(BytesValue.FromString(request).value))
        check_claimed_id(claims[-1], "id")
        return request

    async def call(claimed_id: int, peer_id: int, key: MemberKey | None) -> None:
        address = f"127.0.0.1:{service.port}"
        security = keyed(key, token)
        async with open_stream(
            address, "/test.Echo/stream_stream", BytesValue, security, peer_id=peer_id
        ) as stream:
            await stream.write(BytesValue(value=b"%d" % claimed_id))
            # The server's greeting is no message of this type, its echo is.
            with contextlib.suppress(errors.InternalError):
                await stream.read()
            assert await stream.read() is not None

    async with serve(claim, security=keyed(server, token)) as service, asyncio.timeout(WAIT_S):
        await call(client.id, server.id, client)
        await call(client.id, 0, client)
        await call(5, server.id, None)
        with pytest.raises(errors.PermissionDenied, match=f"is instance {client.id}, not"):
            await call(other.id, server.id, client)
        with pytest.raises(errors.PermissionDenied, match="has not proved"):
            await call(other.id, server.id, None)
        claims.clear()
        with pytest.raises(errors.Unauthenticated, match=f"is instance {server.id}, not"):
            await call(client.id, other.id, client)
        assert not claims, "the wrong peer gets no message"
    async with serve(claim, security=rpc.Security(token=token)) as service:
        with pytest.raises(errors.Unauthenticated, match="does not prove that it is instance"):
            await call(client.id, server.id, client)
        assert not claims, "a peer without a key gets no message"


async def test_the_proof_of_a_member_works_neither_twice_nor_elsewhere_nor_later() -> None:
    key, now = MemberKey(), time.time()
    async with serving_streams(echo, security=keyed(MemberKey(), None)) as service:
        port = service.port
        address = f"127.0.0.1:{port}"
        proof = key.sign_call(METHOD, address, now)
        assert await call_with(port, proof, "x-kvmesh-member") == b"first"
        for refused, reason in (
            (proof, "used before"),
            (key.sign_call("/test.Echo/Attach", address, now), "wrong"),
            (key.sign_call(METHOD, f"127.0.0.1:{port + 1}", now), "the call is for"),
            (key.sign_call(METHOD, address, now - CALL_VALID_S - 5), "check the clocks"),
            (key.sign_call(METHOD, "", now), "no time, nonce and address"),
            ("", "no proof"),
        ):
            with pytest.raises(errors.Unauthenticated, match=reason):
                await call_with(port, refused, "x-kvmesh-member")


@pytest.mark.parametrize("serve", [serving, serving_streams])
async def test_a_single_request_follows_the_proof_of_the_server(serve: Any) -> None:
    async with serve(echo, security=WITH_TOKEN) as service, asyncio.timeout(WAIT_S):
        address = f"127.0.0.1:{service.port}"
        request = BytesValue(value=b"once")
        async with open_stream(
            address, "/test.Echo/unary_stream", StringValue, WITH_TOKEN, request
        ) as stream:
            # The server's greeting is no message of this type, its echo is.
            with pytest.raises(errors.InternalError):
                await stream.read()
            assert await stream.read() == StringValue(value="once")
            assert await stream.read() is None


@pytest.mark.parametrize("serve", [serving, serving_streams])
async def test_a_call_without_its_request_is_refused(serve: Any) -> None:
    async with (
        serve(echo) as service,
        open_stream(
            f"127.0.0.1:{service.port}", "/test.Echo/unary_stream", StringValue, rpc.PLAINTEXT
        ) as stream,
    ):
        await stream.done_writing()
        with pytest.raises(errors.InvalidRequest, match="no request"):
            await stream.read()


async def test_handshakes_of_a_busy_process_succeed(certificates: dict[str, rpc.Security]) -> None:
    """The first bytes of clients are there before this process begins the handshakes."""
    security = certificates["good"]
    async with serving_streams(echo, security=security) as service, asyncio.timeout(WAIT_S):

        async def greeting() -> bytes:
            async with rpc.channel(f"127.0.0.1:{service.port}", security=security) as channel:
                stub: Any = channel.stream_stream(METHOD)
                call = stub(timeout=WAIT_S)
                first: bytes = await call.read()
                call.cancel()
                return first

        calls = [asyncio.create_task(greeting()) for _ in range(8)]
        while not all(call.done() for call in calls):
            # Sleep: a loop that is often blocked.
            await asyncio.sleep(0.01)
            # Sleep: a loop that is often blocked.
            time.sleep(0.05)  # noqa: ASYNC251
        assert [call.result() for call in calls] == [b"first"] * 8


async def test_a_draining_server_refuses_a_call_on_an_open_connection() -> None:
    async with serving_streams(echo) as service, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        call = client_call()
        call.receive(await reader.read(10_000))
        assert service.streams is not None
        service.streams.refuse()
        writer.write(call.take_output())
        while call.status is None and (data := await reader.read(10_000)):
            call.receive(data)
        assert call.status is not None
        assert call.status.code is grpc.StatusCode.UNAVAILABLE
        writer.close()


async def test_a_connection_whose_end_is_not_read_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_server, "STATUS_TIMEOUT_S", 0.2)

    async def fail_after_much(_request: bytes, context: Any) -> bytes:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await context.write(bytes(8_000_000))
        raise errors.Overloaded(1.0, "full")

    async with serving_streams(fail_after_much) as service, asyncio.timeout(WAIT_S):
        call = client_call()
        call.send(b"x")
        call.half_close()
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(call.take_output())
        await until(lambda: not service.calls.names(), "the handler has returned")
        assert service.streams is not None
        connections = service.streams.connections
        await until(lambda: not connections, "the connection is closed")
        writer.close()


async def test_a_handler_cannot_write_after_the_end() -> None:
    raised = asyncio.Event()

    async def answer(request: bytes, context: Any) -> bytes:
        try:
            # Ends: a write after the end raises.
            while True:
                try:
                    await context.write(bytes(1000))
                except asyncio.CancelledError:
                    await context.write(b"after the end")
        except errors.Unavailable:
            raised.set()
        return request

    async with (
        serving_streams(answer) as service,
        rpc.channel(f"127.0.0.1:{service.port}") as channel,
        asyncio.timeout(WAIT_S),
    ):
        stub: Any = channel.stream_stream(METHOD)
        call = stub(iter([b"a"]), timeout=WAIT_S)
        assert await call.read() == b"first"
        call.cancel()
        await raised.wait()


@pytest.mark.parametrize("sent", [b"", b"PRI * HTTP/2.0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_connection_without_a_call_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(stream_server, "HEADER_TIMEOUT_S", 0.2)
    async with serving_streams(echo) as service, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(sent)
        await reader.read()
        writer.close()


async def test_a_channel_opens_a_connection_for_each_call() -> None:
    async with (
        serving_streams(echo) as service,
        rpc.channel(f"127.0.0.1:{service.port}") as channel,
        rpc.channel(f"127.0.0.1:{service.port}") as other,
    ):
        calls = []
        for of in (channel, channel, other):
            stub: Any = of.stream_stream(METHOD)
            calls.append(stub(timeout=WAIT_S))
            if len(calls) == 1:
                await calls[0].read()
        for call in calls[1:]:
            assert await call.read() == b"first"
            call.cancel()
        await calls[0].done_writing()
        assert await calls[0].read() == grpc.aio.EOF
        again: Any = channel.stream_stream(METHOD)
        assert [one async for one in again(iter([b"a"]), timeout=WAIT_S)] == [b"first", b"a"]


async def test_the_handler_of_a_client_that_disconnects_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def hold(request: bytes, _context: object) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return request

    async with serving_streams(hold) as service, asyncio.timeout(WAIT_S):
        call = client_call()
        call.send(b"x")
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(call.take_output())
        await until(service.calls.names, "the handler runs")
        writer.transport.abort()
        await cancelled.wait()
        await until(lambda: not service.calls.names(), "it has returned")


@pytest.mark.parametrize("is_drained", [False, True])
async def test_the_cleanup_of_a_cancelled_handler_is_not_interrupted(is_drained: bool) -> None:
    cleaned = asyncio.Event()

    async def hold(request: bytes, _context: object) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            # Sleep: the cleanup takes time.
            await asyncio.sleep(0.1)
            cleaned.set()
        return request

    async with serving_streams(hold) as service, asyncio.timeout(WAIT_S):
        address = f"127.0.0.1:{service.port}"
        async with open_stream(address, METHOD, BytesValue, rpc.PLAINTEXT) as stream:
            await stream.write(BytesValue(value=b"x"))
            await until(service.calls.names, "the handler runs")
            if is_drained:
                assert service.streams is not None
                service.streams.end_calls()
                await cleaned.wait()
        await cleaned.wait()


def test_messages_that_were_received_are_read_after_the_connection_has_ended() -> None:
    """On uvloop, as in services: its transport raises for writes after the end."""
    message = BytesValue(value=bytes(500_000))

    async def send_many(_request: bytes, context: Any) -> bytes:
        for _ in range(5):
            await context.write(message.SerializeToString())
        return message.SerializeToString()

    async def read_late() -> None:
        async with (
            serving_streams(send_many) as service,
            open_stream(f"127.0.0.1:{service.port}", METHOD, BytesValue, rpc.PLAINTEXT) as stream,
        ):
            await stream.write(BytesValue(value=b"x"))
            await stream.done_writing()
            # Sleep: the stream is read long after its end.
            await asyncio.sleep(2 * CLOSE_TIMEOUT_S)
            with pytest.raises(errors.InternalError):
                await stream.read()  # the greeting is of another type
            assert [one async for one in stream] == [message] * 6
            await stream.done_writing()

    uvloop.run(read_late())


def client_call() -> ClientCall:
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", METHOD),
        ("content-type", "application/grpc"),
    ]
    return ClientCall(headers, message_bytes_max=1000, header_bytes_max=4096)


async def test_a_message_of_another_type_is_a_bad_request() -> None:
    service = RunningServer(echo)

    async def handle(requests: Any, _context: Any) -> None:
        async for _ in requests:
            pass

    server = StreamServer(calls=service.calls)
    method: Any = grpc.stream_stream_rpc_method_handler(handle, BytesValue.FromString)
    server.add_registered_method_handlers("test.Echo", {"stream_stream": method})
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            stub: Any = channel.stream_stream(METHOD)
            with pytest.raises(errors.InvalidRequest), map_rpc_errors():
                await stub(iter([b"\xff\xff"]), timeout=WAIT_S).read()
    finally:
        await server.close()


async def test_an_open_bind_without_token_or_tls_is_rejected_and_a_taken_port_is_a_conflict() -> (
    None
):
    server = StreamServer()
    with pytest.raises(errors.InvalidRequest, match="needs a token or mutual TLS"):
        server.bind("0.0.0.0", 0)
    async with serving_streams(echo) as service:
        with pytest.raises(errors.Conflict, match="--stream-port"):
            server.bind("127.0.0.1", service.port)

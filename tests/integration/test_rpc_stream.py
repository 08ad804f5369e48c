"""Streams on our HTTP/2 client, with servers of grpc.aio and with our own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from common import errors
from common.rpc import channel as rpc
from common.rpc import message_stream
from common.rpc.http2.frames import WINDOW_BYTES
from common.rpc.stream import GrpcStream, open_stream
from tests.integration.rpc_bed import RunningServer, echo, serving, serving_streams
from tests.kit.http2_frames import frame, headers, prefixed
from tests.kit.waiting import WAIT_S, until

Stream = GrpcStream[Any, BytesValue]
Serve = Callable[..., AbstractAsyncContextManager[RunningServer]]


@pytest.fixture(params=[serving, serving_streams], ids=["grpc.aio", "own"])
def serve(request: pytest.FixtureRequest) -> Serve:
    """Starts a server."""
    made: Serve = request.param
    return made


@asynccontextmanager
async def opened(
    service: RunningServer, method: str = "stream_stream", **options: Any
) -> AsyncIterator[Stream]:
    """An open call of the server."""
    security = options.pop("security", service.security)
    address = f"127.0.0.1:{service.port}"
    async with (
        asyncio.timeout(WAIT_S),
        open_stream(address, f"/test.Echo/{method}", BytesValue, security, **options) as stream,
    ):
        yield stream


@asynccontextmanager
async def listening(respond: Callable[[asyncio.StreamWriter], None]) -> AsyncIterator[int]:
    """A port whose server responds to the first bytes, and then reads until the client closes."""
    handled: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handled.add(task)
        with contextlib.suppress(OSError):
            await reader.read(1)
            respond(writer)
            await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.wait(handled)


def value(size: int, seed: int = 0) -> BytesValue:
    return BytesValue(value=bytes((seed + i) % 251 for i in range(min(size, 251))) * (size // 251))


async def first_of_wire(stream: Stream) -> None:
    """The echo server's greeting is no protobuf message."""
    with pytest.raises(errors.InternalError):
        await stream.read()


@pytest.mark.parametrize("size", [0, 1, 16_000, 70_000, 3_000_000, 20_000_000])
async def test_messages_of_all_sizes_return_unchanged(serve: Serve, size: int) -> None:
    sent = [value(size, seed) for seed in range(3)]
    async with serve(echo) as service, opened(service) as stream:
        await first_of_wire(stream)
        for message in sent:
            await stream.write(message)
            assert await stream.read() == message


async def test_messages_that_are_written_before_a_read_return_in_order(serve: Serve) -> None:
    sent = [value(i * 40, i) for i in range(500)]
    async with serve(echo) as service, opened(service) as stream:
        for message in sent:
            await stream.write(message)
        await stream.done_writing()
        await first_of_wire(stream)
        assert [message async for message in stream] == sent
        assert stream.done()


async def test_messages_are_delivered_in_order_until_the_end(serve: Serve) -> None:
    sent = [value(i * 40, i) for i in range(500)]
    delivered: list[BytesValue] = []
    async with serve(echo) as service, opened(service) as stream:
        await first_of_wire(stream)
        for message in sent[:100]:
            await stream.write(message)
        delivery = asyncio.create_task(stream.deliver(delivered.append))
        for message in sent[100:]:
            await stream.write(message)
        await stream.done_writing()
        await delivery
    assert delivered == sent


async def test_delivery_ends_with_the_error_of_the_receiver(serve: Serve) -> None:
    delivered = []

    def receive(message: BytesValue) -> None:
        delivered.append(message)
        if len(delivered) == 2:
            raise errors.InvalidRequest("the second message")

    async with serve(echo) as service, opened(service) as stream:
        await first_of_wire(stream)
        for i in range(5):
            await stream.write(value(500, i))
        with pytest.raises(errors.InvalidRequest, match="the second message"):
            await stream.deliver(receive)
        assert delivered == [value(500, 0), value(500, 1)]


async def test_delivery_raises_the_error_of_a_stream_that_fails(serve: Serve) -> None:
    async with serve(echo) as service, opened(service) as stream:
        await first_of_wire(stream)
        delivery = asyncio.create_task(stream.deliver(lambda _message: None))
        await asyncio.sleep(0)
        await service.stop(None)
        with pytest.raises(errors.Unavailable):
            await delivery


async def test_a_server_that_does_not_read_stops_the_writer_and_nothing_is_lost(
    serve: Serve,
) -> None:
    released, count = asyncio.Event(), 64

    async def hold(request: bytes, _context: object) -> bytes:
        await released.wait()
        return request

    async with serve(hold) as service, opened(service) as stream:
        written = 0

        async def write() -> None:
            nonlocal written
            for _ in range(count):
                await stream.write(value(1 << 20))
                written += 1

        task = asyncio.create_task(write())
        # Sleep: nothing more may be written.
        await asyncio.sleep(0.5)
        assert written < count, "HTTP/2 windows stop the writer"
        released.set()
        await first_of_wire(stream)
        for _ in range(count):
            assert await stream.read() == value(1 << 20)
        await task


async def test_messages_that_are_not_read_stop_the_server(serve: Serve) -> None:
    sent = 0

    async def flood(request: bytes, context: Any) -> bytes:
        nonlocal sent
        for _ in range(64):
            await context.write(value(1 << 20).SerializeToString())
            sent += 1
        return request

    async with serve(flood) as service, opened(service) as stream:
        await stream.write(BytesValue(value=b"end"))
        # Sleep: nothing more may be sent.
        await asyncio.sleep(0.5)
        assert sent << 20 < 3 * WINDOW_BYTES
        await first_of_wire(stream)
        for _ in range(64):
            assert await stream.read() == value(1 << 20)
        assert await stream.read() == BytesValue(value=b"end")


async def test_an_error_of_the_server_arrives_as_it_was_raised(serve: Serve) -> None:
    async def refuse(_request: bytes, _context: object) -> bytes:
        raise errors.Overloaded(2.5, "full: 8/8 ✓")

    async with serve(refuse) as service, opened(service) as stream:
        await stream.write(BytesValue(value=b"x"))
        await first_of_wire(stream)
        with pytest.raises(errors.Overloaded, match=r"full: 8/8 ✓") as raised:
            await stream.read()
        assert raised.value.retry_after_s == 2.5
        with pytest.raises(errors.Overloaded):
            await stream.write(BytesValue(value=b"x"))


async def test_a_method_that_the_server_lacks_is_unimplemented(serve: Serve) -> None:
    async with serve(echo) as service, opened(service, "absent") as stream:
        with pytest.raises(errors.Unimplemented):
            await stream.read()


async def test_a_message_over_the_limit_is_a_bad_request(serve: Serve) -> None:
    async def enlarge(_request: bytes, _context: object) -> bytes:
        return bytes(rpc.MESSAGE_BYTES_MAX)

    async with serve(enlarge) as service, opened(service) as stream:
        await stream.write(BytesValue(value=bytes(rpc.MESSAGE_BYTES_MAX)))
        with contextlib.suppress(errors.InternalError, errors.InvalidRequest):
            await stream.read()  # The greeting, if it comes before the error.
        with pytest.raises(errors.InvalidRequest, match="larger than max"):
            await stream.read()


async def test_leaving_the_context_cancels_the_handler(serve: Serve) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hold(request: bytes, _context: object) -> bytes:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return request

    async with serve(hold) as service:
        async with opened(service) as stream:
            await stream.write(BytesValue(value=b"x"))
            await started.wait()
        async with asyncio.timeout(WAIT_S):
            await cancelled.wait()


async def test_a_single_request_streams_its_responses(serve: Serve) -> None:
    async with (
        serve(echo) as service,
        opened(service, "unary_stream", request=BytesValue(value=b"only")) as stream,
    ):
        await first_of_wire(stream)
        assert [one async for one in stream] == [BytesValue(value=b"only")]


@pytest.mark.parametrize("grace_s", [None, 5.0])
async def test_a_server_that_stops_ends_the_stream_as_unavailable(
    serve: Serve, grace_s: float | None
) -> None:
    async with serve(echo) as service, opened(service) as stream:
        await first_of_wire(stream)
        stopping = asyncio.create_task(service.stop(grace_s))
        if grace_s is not None:  # a call that runs continues after GOAWAY
            # Sleep: the client receives GOAWAY meanwhile.
            await asyncio.sleep(0.2)
            await stream.write(BytesValue(value=b"still"))
            assert await stream.read() == BytesValue(value=b"still")
            await stream.done_writing()
            assert await stream.read() is None
        else:
            with pytest.raises(errors.Unavailable):
                await stream.read()
        await stopping


async def test_a_peer_that_refuses_or_is_silent_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_stream, "TICK_S", 0.05)
    async with (
        listening(lambda _: None) as port,
        open_stream(f"127.0.0.1:{port}", "/a/B", BytesValue, rpc.PLAINTEXT) as stream,
    ):
        with pytest.raises(errors.Unavailable, match="the peer is silent for"):
            await stream.read()
    with pytest.raises(errors.Unavailable, match=f"cannot connect to 127.0.0.1:{port}") as refused:
        async with open_stream(f"127.0.0.1:{port}", "/a/B", BytesValue, rpc.PLAINTEXT):
            pass
    assert refused.value.retryable


async def test_a_quiet_stream_outlives_its_pings(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_stream, "TICK_S", 0.02)
    async with serve(echo) as service, opened(service) as stream:
        await first_of_wire(stream)
        # Sleep: nothing may end the quiet stream.
        await asyncio.sleep(0.5)
        await stream.write(BytesValue(value=b"x"))
        assert await stream.read() == BytesValue(value=b"x")


async def test_a_peer_of_another_protocol_is_an_error() -> None:
    response = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"
    async with (
        listening(lambda writer: writer.write(response)) as port,
        asyncio.timeout(WAIT_S),
        open_stream(f"127.0.0.1:{port}", "/a/B", BytesValue, rpc.PLAINTEXT) as stream,
    ):
        with pytest.raises(errors.MeshError):
            await stream.read()


async def test_with_mutual_tls_only_a_peer_with_a_certificate_is_served(
    serve: Serve,
    certificates: dict[str, rpc.Security],
) -> None:
    good = certificates["good"]
    async with serve(echo, security=good) as service:
        async with opened(service) as stream:
            await first_of_wire(stream)
            await stream.write(value(1_000_000))
            assert await stream.read() == value(1_000_000)
        for other in (rpc.PLAINTEXT, certificates["other"]):
            with pytest.raises(errors.Unavailable):
                async with opened(service, security=other) as stream:
                    await stream.read()


async def test_a_peer_without_the_token_receives_no_message(serve: Serve) -> None:
    received: list[bytes] = []

    async def record(request: bytes, _context: object) -> bytes:
        received.append(request)
        return request

    token = rpc.Security(token="a token of the mesh")
    async with serve(record) as service, opened(service, security=token) as stream:
        with pytest.raises(errors.Unauthenticated):
            await stream.write(BytesValue(value=b"secret"))
    async with serve(record, security=token) as service:
        async with opened(service) as stream:
            await stream.write(BytesValue(value=b"secret"))
            await first_of_wire(stream)
            assert await stream.read() == BytesValue(value=b"secret")
        async with opened(service, security=rpc.PLAINTEXT) as stream:
            with pytest.raises(errors.Unauthenticated):
                await stream.read()
    assert len(received) == 1


@pytest.mark.parametrize("ends_in_one_segment", [False, True])
async def test_no_message_of_a_peer_without_the_token_is_read(ends_in_one_segment: bool) -> None:
    message = BytesValue(value=b"forged").SerializeToString()
    response = headers((":status", "200"), ("content-type", "application/grpc"))
    response += frame(0, 0, prefixed(message))
    if ends_in_one_segment:
        response += headers(("grpc-status", "0"), flags=5)
    token = rpc.Security(token="a token of the mesh")
    async with (
        listening(lambda writer: writer.write(response)) as port,
        asyncio.timeout(WAIT_S),
        open_stream(f"127.0.0.1:{port}", "/a/B", BytesValue, token) as stream,
    ):
        with pytest.raises(errors.Unauthenticated):
            await stream.read()


async def test_an_address_without_a_valid_host_is_unavailable() -> None:
    with pytest.raises(errors.Unavailable, match="cannot connect to"):
        async with open_stream("a..b:1", "/a/B", BytesValue, rpc.PLAINTEXT):
            pass


async def test_an_ended_stream_leaves_nothing(serve: Serve) -> None:
    def alive() -> int:
        gc.collect()
        return sum(isinstance(one, GrpcStream) for one in gc.get_objects())

    async with serve(echo) as service:
        before = alive()
        for _ in range(5):
            async with opened(service) as stream:
                await stream.write(BytesValue(value=b"x"))
                await first_of_wire(stream)
        del stream
        await until(lambda: alive() == before, "the ended streams are freed", poll_s=0.1)

"""The time and the bytes that a client of an HTTP connection may take."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from frontend_svc.edge.asgi import Receive, Scope, Send, send_response
from frontend_svc.edge.server import (
    PIPELINED_BODY_BYTES_MAX,
    PIPELINED_MAX,
    TURN_BYTES,
    BoundedProtocol,
    HttpServer,
)
from frontend_svc.edge.sockets import listen

GET = b"GET / HTTP/1.1\r\nhost: h\r\n"
TIME_S = 0.05
WAIT_S = 5.0

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("head_timeout_s", "linger_s", "write_timeout_s", "refused_s"):
        monkeypatch.setattr(BoundedProtocol, name, TIME_S)


@asynccontextmanager
async def serving(
    app: Callable[[Scope, Receive, Send], Awaitable[None]], connections_max: int = 10
) -> AsyncIterator[Callable[[], Awaitable[Client]]]:
    server = HttpServer(app, lambda: False, 0, connections_max)
    listener = listen("127.0.0.1", 0)
    task = asyncio.create_task(server.serve([listener]))
    host, port = listener.getsockname()

    async def connect() -> Client:
        return await asyncio.open_connection(host, port)

    # The socket listens already; the server accepts when it runs.
    listener.listen()
    try:
        yield connect
    finally:
        server.should_exit = True
        await task


async def respond(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send_response(send, 200, (), b"ok")


async def closed(client: Client) -> bytes:
    """What the server sends until it closes."""
    reader, writer = client
    received = b""
    try:
        # Ends: the server closes; each read has a limit.
        while part := await asyncio.wait_for(reader.read(1 << 16), WAIT_S):
            received += part
    except ConnectionError:
        pass
    writer.close()
    return received


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"", b""), (b"GET / HT", b"HTTP/1.1 408"), (GET + b"\r\n" + GET, b"HTTP/1.1 200")],
    ids=["no byte", "half a head", "half of the second head"],
)
async def test_a_connection_without_complete_headers_is_closed(sent: bytes, status: bytes) -> None:
    async with serving(respond) as connect:
        client = await connect()
        client[1].write(sent)
        assert (await closed(client)).startswith(status)


async def test_a_body_that_does_not_end_after_its_response_is_closed() -> None:
    async with serving(respond) as connect:
        client = await connect()
        client[1].write(GET + b"content-length: 100\r\n\r\nx")
        assert (await closed(client)).endswith(b"ok")


async def test_a_client_that_does_not_read_is_closed() -> None:
    ended = asyncio.Event()

    async def flood(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        ended.set()

    async with serving(flood) as connect:
        _, writer = await connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GET + b"\r\n")
        await asyncio.wait_for(ended.wait(), WAIT_S)
        writer.close()


async def test_a_large_body_before_the_response_to_another_request_is_not_buffered() -> None:
    async def never(_scope: Scope, receive: Receive, _send: Send) -> None:
        kind = ""
        # Ends: the server closes.
        while kind != "http.disconnect":
            with contextlib.suppress(TimeoutError):  # each call of `receive` reads on
                kind = (await asyncio.wait_for(receive(), TIME_S / 5))["type"]

    async with serving(never) as connect:
        client = await connect()
        size = 4 * PIPELINED_BODY_BYTES_MAX
        second = GET + b"content-length: %d\r\n\r\n" % size
        client[1].write(GET + b"\r\n" + second + b"x" * size)
        assert await closed(client) == b""


async def test_connections_above_the_limit_receive_503() -> None:
    async with serving(respond, connections_max=1) as connect:
        first, second, silent = await connect(), await connect(), await connect()
        second[1].write(GET + b"\r\n")
        assert (await closed(second)).startswith(b"HTTP/1.1 503")
        assert await closed(silent) == b""
        await closed(first)
        third = await connect()
        third[1].write(GET + b"connection: close\r\n\r\n")
        assert (await closed(third)).endswith(b"ok")


async def test_bytes_of_a_chunked_body_besides_its_content_are_limited() -> None:
    async def read(_scope: Scope, receive: Receive, send: Send) -> None:
        # Ends: the body or the connection ends.
        while (await receive()).get("more_body"):
            pass
        await send_response(send, 200, (), b"ok")

    head = GET + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    async with serving(read) as connect:
        small_chunks = await connect()
        small_chunks[1].write(head + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
        assert (await closed(small_chunks)).endswith(b"ok")
        for flood in (b"1;" + b"e" * 1_000_000 + b"\r\nx\r\n", b"0\r\nx: " + b"t" * 1_000_000):
            client = await connect()
            client[1].write(head + flood)
            assert b"ok" not in await closed(client)


async def test_a_turn_of_the_loop_parses_a_bounded_part_of_small_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk, count = b"1\r\n \r\n", 60_000
    parsed = [0]
    on_body = BoundedProtocol.on_body

    def counted(protocol: BoundedProtocol, body: bytes) -> None:
        parsed[0] += 1
        on_body(protocol, body)

    monkeypatch.setattr(BoundedProtocol, "on_body", counted)
    bodies: list[int] = []

    async def read_body(scope: Scope, receive: Receive, send: Send) -> None:
        size, has_more = 0, True
        # Ends: the body is complete; the test has a limit.
        while has_more:
            message = await receive()
            size += len(message["body"])
            has_more = message["more_body"]
        bodies.append(size)
        await respond(scope, receive, send)

    async with serving(read_body) as connect:
        reader, writer = await connect()
        writer.write(GET.replace(b"GET", b"POST") + b"transfer-encoding: chunked\r\n\r\n")
        writer.write(chunk * count + b"0\r\n\r\n")
        most = before = 0
        async with asyncio.timeout(WAIT_S):
            while parsed[0] < count:
                await asyncio.sleep(0)
                most, before = max(most, parsed[0] - before), parsed[0]
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
    assert bodies == [count]
    assert most <= 2 * TURN_BYTES // len(chunk)


async def test_pipelined_requests_above_the_limit_are_not_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = [0]
    on_header = BoundedProtocol.on_header

    def counted(protocol: BoundedProtocol, name: bytes, value: bytes) -> None:
        begun[0] += 1
        on_header(protocol, name, value)

    monkeypatch.setattr(BoundedProtocol, "on_header", counted)
    async with serving(respond) as connect:
        client = await connect()
        client[1].write((GET + b"\r\n") * 20_000)
        await closed(client)
    assert begun[0] <= PIPELINED_MAX + 2

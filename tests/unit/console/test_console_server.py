"""The HTTP server of the console closes connections that send no request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from console_svc.access.gate import Receive, Scope, Send, send_text
from console_svc.server import REFUSED_MAX, ConsoleServer, listen
from tests.kit.waiting import until

VIEWERS_MAX = 2
HEAD_TIMEOUT_S = 0.2


async def serve_text(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        # Ends: the server sends its shutdown.
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send_text(send, 200, "served")


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def console_server(head_timeout_s: float) -> AsyncIterator[int]:
    """Serves in the block; gives the port."""
    listen_socket = listen("127.0.0.1", 0)
    server = ConsoleServer(
        serve_text, viewers_max=VIEWERS_MAX, drain_s=1.0, head_timeout_s=head_timeout_s
    )
    serving = asyncio.create_task(server.serve([listen_socket]))
    await until(lambda: server.started, "it serves")
    try:
        yield listen_socket.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with console_server(HEAD_TIMEOUT_S) as port:
        yield port


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n"])
async def test_a_connection_without_a_whole_request_is_closed(port: int, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    async with asyncio.timeout(5.0):
        assert await reader.read() == b""
    await close(writer)


@pytest.mark.slow
async def test_connections_that_wait_for_their_next_request_stay_open(port: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        for _ in range(2):
            response = await http.get(f"http://127.0.0.1:{port}/")
            assert response.text == "served\n"
            # Sleep: longer than a request may take to arrive.
            await asyncio.sleep(2 * HEAD_TIMEOUT_S)
        (connection,) = http._transport._pool.connections  # type: ignore[attr-defined]
        assert connection.is_idle()


async def test_connections_above_the_limit_are_closed_at_once() -> None:
    async with console_server(head_timeout_s=60.0) as port:
        opened = [
            await asyncio.open_connection("127.0.0.1", port)
            for _ in range(VIEWERS_MAX + REFUSED_MAX + 1)
        ]
        async with asyncio.timeout(5.0):
            assert await opened[-1][0].read() == b""
        for _, writer in opened:
            await close(writer)

"""The limits of a WebSocket and the order of its events, with a stand-in for the Responses API."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import orjson
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from frontend_svc.edge import websocket
from frontend_svc.edge.asgi import (
    CONNECTION,
    STREAM_HEADERS,
    Receive,
    Scope,
    Send,
    body_part,
    last_part,
    response_start,
)
from frontend_svc.edge.server import BoundedProtocol, HttpServer
from frontend_svc.edge.sockets import listen
from frontend_svc.edge.websocket import WebSocket, handshake_response
from frontend_svc.responses.kept import KeptResponses
from frontend_svc.responses.store import ResponseStore
from frontend_svc.websocket import connection
from frontend_svc.websocket.connection import (
    LANES_MAX,
    RUNNING_MAX,
    WAITING_MAX,
    ResponsesConnection,
    SocketLimits,
)
from frontend_svc.websocket.messages import refusal
from tests.kit.waiting import WAIT_S, until

LIMITS = SocketLimits(idle_s=WAIT_S, age_s=WAIT_S, ping_s=WAIT_S, waiting_bytes=1 << 20)
BYTES_MAX = 1 << 20

# Any, here and below: JSON.
Json = dict[str, Any]


class Api:
    """Serves each request as a stream of two events, the second when the test lets it end."""

    def __init__(self) -> None:
        self.running: list[Json] = []
        self.ids: list[bytes] = []
        self.most = 0
        self.gone = 0
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = orjson.loads((await receive())["body"])
        self.running.append(body)
        self.ids.append(dict(scope["headers"])[b"x-request-id"])
        self.most = max(self.most, len(self.running))
        task = asyncio.current_task()
        assert task is not None

        def client_gone() -> None:
            self.gone += 1
            self.may_end.set()

        with scope["state"][CONNECTION].watched(client_gone):
            await send(response_start(200, STREAM_HEADERS))
            await send(body_part(event_of("begin", body)))
            await self.may_end.wait()
            await send(last_part(event_of("end", body)))
        self.running.remove(body)


def event_of(name: str, body: Json) -> bytes:
    data = orjson.dumps({"type": name, "input": body["input"]})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


@pytest.fixture
async def api() -> Api:
    return Api()


@asynccontextmanager
async def serving(
    api: Callable[[Scope, Receive, Send], Awaitable[None]],
    limits: SocketLimits = LIMITS,
    bytes_max: int = BYTES_MAX,
    connections: list[ResponsesConnection] | None = None,
) -> AsyncIterator[tuple[ClientConnection, HttpServer]]:
    """A connection to a server, and the server. connections: gets the end of the server."""
    connections = [] if connections is None else connections

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        response = handshake_response(scope["path"], scope["headers"], ())
        make = partial(WebSocket, bytes_max=bytes_max, refusal=refusal)
        opened = scope["state"][CONNECTION].upgrade(response, make)
        kept = KeptResponses(ResponseStore(1 << 20, 60), asyncio.get_running_loop().time)
        connections.append(ResponsesConnection(opened, api, scope, "c", kept, limits))
        await connections[-1].run()
        await opened.lost()

    server = HttpServer(app, lambda: False, 5.0, 10)
    listener = listen("127.0.0.1", 0)
    host, port = listener.getsockname()
    listener.listen()
    task = asyncio.create_task(server.serve([listener]))
    try:
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # soon full
        small.connect((host, port))
        url = f"ws://{host}:{port}/"
        async with connect(url, proxy=None, ping_interval=None, sock=small) as client:
            yield client, server
    finally:
        server.should_exit = True
        await task


async def create(client: ClientConnection, text: str, stream_id: str | None = None) -> None:
    event = {"type": "response.create", "input": text, "stream_id": stream_id}
    await client.send(json.dumps(event))


async def receive(client: ClientConnection) -> Json:
    async with asyncio.timeout(WAIT_S):
        event: Json = json.loads(await client.recv())
    return event


async def close_of(client: ClientConnection) -> tuple[int, str]:
    """Code and reason with which the server closes."""
    async with asyncio.timeout(WAIT_S):
        with suppress(ConnectionClosed):
            async for _ in client:
                pass
        await client.wait_closed()
    assert client.close_code is not None
    return client.close_code, client.close_reason or ""


async def test_events_of_a_lane_wait_for_those_before_them(api: Api) -> None:
    async with serving(api) as (client, _):
        await create(client, "1")
        await create(client, "2")
        await create(client, "3", "lane")
        begun = [await receive(client), await receive(client)]
        assert [(event["input"], event.get("stream_id")) for event in begun] == [
            ("1", None),
            ("3", "lane"),
        ]
        api.may_end.set()
        rest = [await receive(client) for _ in range(4)]
        of_lane = [event for event in rest if "stream_id" not in event]
        assert [(event["type"], event["input"]) for event in of_lane] == [
            ("end", "1"),
            ("begin", "2"),
            ("end", "2"),
        ]
        assert sorted(api.ids) == [b"c-1", b"c-2", b"c-3"]


async def test_a_connection_has_limits_of_lanes_running_and_waiting_events(api: Api) -> None:
    async with serving(api) as (client, _):
        for number in range(LANES_MAX):
            await create(client, "x", f"lane-{number}")
        await create(client, "x", "one more")
        events = [await receive(client) for _ in range(RUNNING_MAX + 1)]
        (error,) = [event for event in events if event["type"] == "error"]
        assert error["error"]["code"] == "websocket_stream_limit_reached"
        assert (error["error"]["param"], error["stream_id"]) == ("stream_id", "one more")
        assert api.most == RUNNING_MAX
        for number in range(WAITING_MAX - (LANES_MAX - RUNNING_MAX) + 1):
            await create(client, str(number))
        error = await receive(client)
        assert (error["status"], error["error"]["code"]) == (503, "overloaded")
        assert f"{WAITING_MAX} events" in error["error"]["message"]


async def test_the_bytes_of_waiting_events_are_limited(api: Api) -> None:
    limits = SocketLimits(WAIT_S, WAIT_S, WAIT_S, waiting_bytes=1000)
    async with serving(api, limits) as (client, _):
        await create(client, "a" * 2000)
        await receive(client)
        await create(client, "b" * 2000)
        await create(client, "c" * 2000)
        error = await receive(client)
        assert (error["status"], error["error"]["code"]) == (503, "overloaded")


async def test_a_message_above_the_limit_is_an_error_and_closes(api: Api) -> None:
    async with serving(api) as (client, _):
        await create(client, "a" * BYTES_MAX)
        error = await receive(client)
        assert (error["status"], error["error"]["code"]) == (413, "body_too_large")
        assert "1 MB" in error["error"]["message"]
        assert (await close_of(client))[0] == 1009


async def test_the_parts_of_a_message_count_together(api: Api) -> None:
    async with serving(api) as (client, _):
        await client.send(["a" * (BYTES_MAX // 2)] * 3)
        assert (await receive(client))["status"] == 413
        assert (await close_of(client))[0] == 1009


async def test_a_message_in_parts_is_one_event(api: Api) -> None:
    async with serving(api) as (client, _):
        text = json.dumps({"type": "response.create", "input": "in parts"})
        await client.send([text[:5], text[5:9], "", text[9:]])
        assert (await receive(client))["input"] == "in parts"


async def test_a_message_that_does_not_end_is_an_error(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "MESSAGE_TIMEOUT_S", 0.05)
    async with serving(api) as (client, _):
        client.transport.write(b"\x01\x80\x00\x00\x00\x00")  # the first part of a text
        error = await receive(client)
        assert (error["status"], error["error"]["code"]) == (504, "deadline_exceeded")
        assert (await close_of(client))[0] == 1008


async def test_a_binary_message_is_an_error(api: Api) -> None:
    async with serving(api) as (client, _):
        await client.send(b"{}")
        error = await receive(client)
        assert (error["status"], error["error"]["code"]) == (400, "invalid_type")
        await create(client, "x")
        assert (await receive(client))["type"] == "begin"


async def test_invalid_frames_close_the_connection(api: Api) -> None:
    async with serving(api) as (client, _):
        client.transport.write(b"\x83\x80\x00\x00\x00\x00")  # an unknown kind of frame
        assert (await close_of(client))[0] == 1002


async def test_an_idle_connection_is_closed(api: Api) -> None:
    limits = SocketLimits(0.05, WAIT_S, WAIT_S, 1 << 20)
    async with serving(api, limits) as (client, _):
        assert await close_of(client) == (1001, "no event arrived for 0.05 s")


async def test_an_old_connection_takes_no_more_events(api: Api) -> None:
    connections: list[ResponsesConnection] = []
    async with serving(api, connections=connections) as (client, _):
        await create(client, "x")
        await receive(client)
        connections[0]._expire()  # as its timer does
        await create(client, "y", "lane")
        error = await receive(client)
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        assert (error["status"], error["stream_id"]) == (400, "lane")
        api.may_end.set()
        assert (await receive(client))["type"] == "end"
        assert (await close_of(client))[0] == 1001


async def test_an_old_connection_without_a_response_is_closed_with_the_error(api: Api) -> None:
    limits = SocketLimits(WAIT_S, 0.05, WAIT_S, 1 << 20)
    async with serving(api, limits) as (client, _):
        error = await receive(client)
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        assert (await close_of(client))[0] == 1001


async def test_a_shutdown_waits_for_the_response_that_runs(api: Api) -> None:
    async with serving(api) as (client, server):
        await create(client, "1")
        await create(client, "2")
        await receive(client)
        server.should_exit = True
        await until(lambda: not any(one.is_serving() for one in server.servers), "it shuts down")
        # Sleep: the connection learns of it in the same turn of the loop.
        await asyncio.sleep(0.01)
        await create(client, "3", "lane")
        assert (await receive(client))["error"]["code"] == "unavailable"
        api.may_end.set()
        assert (await receive(client))["type"] == "end"
        assert (await receive(client))["error"]["code"] == "unavailable", "2 has not begun"
        assert (await close_of(client))[0] == 1012


async def test_a_shutdown_closes_an_idle_connection(api: Api) -> None:
    async with serving(api) as (client, server):
        server.should_exit = True
        assert (await close_of(client))[0] == 1012


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_response_ends_with_its_client(api: Api, how: str) -> None:
    async with serving(api) as (client, _):
        await create(client, "x")
        await receive(client)
        if how == "abort":
            client.transport.abort()
        else:
            await client.close()
        await until(lambda: not api.running, "the response ends")
        assert api.gone == 1


async def test_pings_are_sent_and_answered(api: Api) -> None:
    limits = SocketLimits(WAIT_S, WAIT_S, 0.01, 1 << 20)
    async with serving(api, limits) as (client, _):
        async with asyncio.timeout(WAIT_S):
            await (await client.ping())
        await create(client, "x")
        # Sleep: pings arrive meanwhile.
        await asyncio.sleep(0.05)
        assert (await receive(client))["type"] == "begin"


async def test_a_client_that_reads_nothing_is_disconnected(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "write_timeout_s", 0.1)

    async def endless(scope: Scope, _receive: Receive, send: Send) -> None:
        await send(response_start(200, STREAM_HEADERS))
        with scope["state"][CONNECTION].watched(gone.set):
            while not gone.is_set():  # Ends: the server disconnects the client.
                await send(body_part(event_of("more", {"input": "a" * 65536})))

    gone = asyncio.Event()
    async with serving(endless) as (client, _):
        client.transport.pause_reading()
        await create(client, "x")
        async with asyncio.timeout(WAIT_S):
            await gone.wait()
        client.transport.abort()


async def test_a_client_that_reads_no_errors_cannot_send_more_events(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "write_timeout_s", 0.2)
    sent = 0
    async with serving(api) as (client, _):
        client.transport.pause_reading()
        with suppress(ConnectionClosed):
            async with asyncio.timeout(WAIT_S):
                while True:  # Ends: the server disconnects the client, or the time limit.
                    await client.send(b"binary" if sent % 2 else "{")
                    # Sleep: the server, in the same loop, takes a turn.
                    await asyncio.sleep(0)
                    sent += 1
        client.transport.abort()
    assert sent > WAITING_MAX


async def test_a_client_that_does_not_read_delays_no_shutdown(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SHUTDOWN_CLOSE_S", 0.05)
    async with serving(api) as (client, server):
        client.transport.pause_reading()
        server.should_exit = True
        await until(lambda: not server.server_state.connections, "the connection has ended")
        client.transport.abort()


class ReadySocket:
    """A socket whose messages have all arrived."""

    is_open = True

    def __init__(self, messages: list[bytes]) -> None:
        self.messages = messages
        self.sent = 0
        self.close_code = 0

    async def receive(self) -> bytes | None:
        return self.messages.pop() if self.messages else None

    async def writable(self) -> None:
        pass

    def send(self, text: bytes) -> None:
        self.sent += 1


async def test_other_work_goes_on_between_messages_that_are_refused(api: Api) -> None:
    opened = ReadySocket([b"{"] * 200)
    kept = KeptResponses(ResponseStore(1 << 20, 60), asyncio.get_running_loop().time)
    # Any: the connection uses no other part of a socket here.
    socket_of_it: Any = opened
    served = ResponsesConnection(socket_of_it, api, {}, "c", kept, LIMITS)
    running, turns = asyncio.create_task(served.run()), 0
    async with asyncio.timeout(WAIT_S):
        while not running.done():
            await asyncio.sleep(0)
            turns += 1
    await running
    assert opened.sent == 200
    assert turns > 200

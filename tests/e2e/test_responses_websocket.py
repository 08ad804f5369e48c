"""The Responses API over a WebSocket, with the OpenAI SDK and with a plain client."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket as socketlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.kit.oracle import Oracle
from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.waiting import WAIT_S, until, wait_for

pytestmark = pytest.mark.slow

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LAST = ("response.completed", "response.incomplete", "response.failed", "error")
DELTA = "response.output_text.delta"
LANES = 16
ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}
# The sim responds with 391 tokens: 2.6 s.
LONG = {"input": "Count to 33."}

# Any, here and below: fields of a body, and JSON.
Json = dict[str, Any]

mesh = mesh_fixture(worker_flags=["--speedup=1"])


def address_of(mesh: Mesh, url: str = "") -> str:
    return (url or mesh.url).replace("http", "ws", 1) + "/v1/responses"


@asynccontextmanager
async def plain(mesh: Mesh, url: str = "", **more: Any) -> AsyncIterator[ClientConnection]:
    """A connection of a client that is no SDK."""
    async with connect(address_of(mesh, url), proxy=None, max_size=None, **more) as socket:
        yield socket


async def create(socket: ClientConnection, **fields: Any) -> None:
    event = {"type": "response.create", "model": MODEL, "input": "Hello", **fields}
    await socket.send(json.dumps(event))


async def receive(socket: ClientConnection) -> Json:
    async with asyncio.timeout(WAIT_S):
        event: Json = json.loads(await socket.recv())
    return event


async def events_of(socket: ClientConnection) -> list[Json]:
    """The events up to the last one of a response."""
    events = [await receive(socket)]
    # Ends: the last event, or the time limit of `receive`.
    while events[-1]["type"] not in LAST:
        events.append(await receive(socket))
    return events


async def respond(socket: ClientConnection, **fields: Any) -> Json:
    """The response to an event."""
    await create(socket, **fields)
    last = (await events_of(socket))[-1]
    assert last["type"] in ("response.completed", "response.incomplete"), last
    response: Json = last["response"]
    return response


async def refuse(socket: ClientConnection, **fields: Any) -> Json:
    """The error of an event."""
    await create(socket, **fields)
    return await error_of(socket)


async def error_of(socket: ClientConnection) -> Json:
    event = await receive(socket)
    assert event["type"] == "error", event
    error: Json = event["error"]
    return error | {"status": event["status"]}


def text_of(response: Json) -> str:
    parts = [part for item in response["output"] for part in item.get("content", ())]
    return "".join(part["text"] for part in parts)


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def test_turns_of_the_sdk_continue_without_being_stored(
    mesh: Mesh, client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    options: Any = {"proxy": None}
    messages: list[Any] = []
    previous: str | None = None
    async with client.responses.connect(websocket_connection_options=options) as connection:
        for number in range(4):
            messages.append(user(f"Turn {number}."))
            await connection.response.create(
                model=MODEL,
                input=f"Turn {number}.",
                previous_response_id=previous,
                store=False,
                max_output_tokens=16,
            )
            # Any: the SDK has a type for each event.
            event: Any
            async for event in connection:
                if event.type in ("response.completed", "response.incomplete"):
                    break
            expected = oracle.conversation(messages, 16).text
            assert event.response.output_text == expected
            messages.append({"role": "assistant", "content": expected})
            previous = event.response.id
    assert previous is not None
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(previous)


async def test_the_events_are_those_of_a_stream(mesh: Mesh) -> None:
    body = {"model": MODEL, "input": "Hello", "stream": True, "tools": [ADD]}
    async with plain(mesh) as socket:
        await create(socket, tools=[ADD])
        events = await events_of(socket)
    sent = mesh.http.post(f"{mesh.url}/v1/responses", json=body).text
    expected = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: ")]
    assert list(map(bare, events)) == list(map(bare, expected))
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def bare(value: Any) -> Any:
    """A JSON value without ids and times, which differ between responses."""
    match value:
        case dict():
            left_out = ("id", "item_id", "created_at", "call_id", "input_tokens_details")
            return {key: bare(inner) for key, inner in value.items() if key not in left_out}
        case list():
            return [bare(inner) for inner in value]
    return value


async def test_a_tool_is_called_and_its_result_continues_the_response(mesh: Mesh) -> None:
    choice = {"type": "function", "name": "add"}
    async with plain(mesh) as socket:
        response = await respond(socket, tools=[ADD], tool_choice=choice, store=False)
        (call,) = [item for item in response["output"] if item["type"] == "function_call"]
        assert json.loads(call["arguments"]).keys() == {"a", "b"}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        last = await respond(
            socket,
            input=[result],
            tools=[ADD],
            tool_choice="none",
            previous_response_id=response["id"],
            store=False,
            max_output_tokens=8,
        )
    assert last["previous_response_id"] == response["id"]
    assert text_of(last)


async def test_a_stored_response_is_continued_over_another_connection_and_http(
    mesh: Mesh, client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    async with plain(mesh) as socket:
        first = await respond(socket, input="One.", max_output_tokens=8)
    async with plain(mesh) as socket:
        second = await respond(
            socket, input="Two.", previous_response_id=first["id"], max_output_tokens=8
        )
    messages = [user("One."), {"role": "assistant", "content": text_of(first)}, user("Two.")]
    assert text_of(second) == oracle.conversation(messages, 8).text
    assert (await client.responses.retrieve(second["id"])).output_text == text_of(second)


async def test_a_connection_keeps_only_its_own_newest_response(mesh: Mesh) -> None:
    async with plain(mesh) as socket, plain(mesh) as other:
        first = await respond(socket, store=False, max_output_tokens=2)
        fields = {"previous_response_id": first["id"], "store": False, "max_output_tokens": 2}
        error = await refuse(other, **fields)
        assert (error["status"], error["code"]) == (400, "previous_response_not_found")
        assert error["param"] == "previous_response_id"
        await respond(socket, **fields)
        error = await refuse(socket, **fields)
        assert error["code"] == "previous_response_not_found"


async def test_a_warm_up_has_no_output_and_is_continued(mesh: Mesh, oracle: Oracle) -> None:
    async with plain(mesh) as socket:
        await create(socket, input="One.", generate=False, store=False)
        events = await events_of(socket)
        names = [event["type"] for event in events]
        assert names == ["response.created", "response.in_progress", "response.completed"]
        warm = events[-1]["response"]
        assert (warm["output"], warm["status"]) == ([], "completed")
        assert warm["usage"]["input_tokens"] > 0
        response = await respond(
            socket,
            input="Two.",
            previous_response_id=warm["id"],
            store=False,
            max_output_tokens=8,
        )
    assert text_of(response) == oracle.conversation([user("One."), user("Two.")], 8).text


async def test_each_lane_has_its_responses(mesh: Mesh, oracle: Oracle) -> None:
    async with plain(mesh) as socket:
        for number in range(8):
            lane = f"lane-{number % 4}"
            await create(socket, stream_id=lane, input=f"Turn {number}.", max_output_tokens=8)
        texts: dict[str, list[str]] = {f"lane-{number}": [] for number in range(4)}
        # Ends: all responses have, or the time limit of `receive`.
        while sum(map(len, texts.values())) < 8:
            event = await receive(socket)
            if event["type"] in LAST:
                texts[event["stream_id"]].append(text_of(event["response"]))
    for number in range(4):
        turns = [f"Turn {number}.", f"Turn {number + 4}."]
        assert texts[f"lane-{number}"] == [oracle.chat(turn, 8).text for turn in turns]


async def test_events_of_one_lane_are_answered_in_their_order(mesh: Mesh, oracle: Oracle) -> None:
    async with plain(mesh) as socket:
        for number in range(3):
            await create(socket, input=f"Turn {number}.", max_output_tokens=8)
        for number in range(3):
            events = await events_of(socket)
            assert events[0]["type"] == "response.created"
            expected = oracle.chat(f"Turn {number}.", 8).text
            assert text_of(events[-1]["response"]) == expected


@pytest.mark.parametrize(
    ("message", "status", "code", "param"),
    [
        ("{", 400, "invalid_json", None),
        ("[]", 400, "invalid_type", None),
        (b"{}", 400, "invalid_type", None),
        ({}, 400, "missing_required_parameter", "type"),
        ({"type": "session.update"}, 400, "invalid_value", "type"),
        ({"type": "response.create"}, 400, "missing_required_parameter", "model"),
        (
            {"type": "response.create", "model": MODEL, "input": "", "top_p": 2},
            400,
            "invalid_value",
            "top_p",
        ),
        (
            {"type": "response.create", "model": MODEL, "input": "", "stream": False},
            400,
            "unsupported_parameter",
            "stream",
        ),
        (
            {"type": "response.create", "model": MODEL, "input": "", "background": True},
            400,
            "unsupported_parameter",
            "background",
        ),
        (
            {"type": "response.create", "model": "other", "input": ""},
            404,
            "model_not_found",
            "model",
        ),
    ],
)
async def test_an_invalid_event_is_an_error_and_the_connection_continues(
    mesh: Mesh, message: Any, status: int, code: str, param: str | None
) -> None:
    async with plain(mesh) as socket:
        await socket.send(json.dumps(message) if isinstance(message, dict) else message)
        error = await error_of(socket)
        assert (error["status"], error["code"], error["param"]) == (status, code, param)
        assert (await respond(socket, max_output_tokens=2))["status"] in ("completed", "incomplete")


async def test_a_request_without_an_upgrade_is_a_426(mesh: Mesh) -> None:
    response = mesh.http.get(f"{mesh.url}/v1/responses")
    assert (response.status_code, response.headers["upgrade"]) == (426, "websocket")
    assert response.json()["error"]["code"] == "upgrade_required"
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "12"}
    response = mesh.http.get(f"{mesh.url}/v1/responses", headers=headers)
    assert (response.status_code, response.json()["error"]["type"]) == (
        400,
        "invalid_request_error",
    )


async def test_pages_of_other_sites_open_no_connection(mesh: Mesh) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with plain(mesh, origin="https://evil.example.org"):
            pass
    assert refused.value.response.status_code == 403


def open_slots(mesh: Mesh) -> int:
    return sum(worker.open_slots() for worker in mesh.workers)


@pytest.mark.parametrize("leaves", ["close", "abort"])
async def test_the_responses_of_a_client_that_disconnects_end(mesh: Mesh, leaves: str) -> None:
    # A client whose queue is full does not read the close frame of the server.
    async with plain(mesh, close_timeout=0.1) as socket:
        for lane in ("a", "b"):
            await create(socket, stream_id=lane, **LONG)
        await until(lambda: open_slots(mesh) == 2, "workers have the requests")
        if leaves == "abort":
            socket.transport.abort()
    await until(lambda: open_slots(mesh) == 0, "their slots are freed")
    await until(lambda: mesh.router.bookings() == 0, "the router has no booking")


async def test_each_response_has_a_log_line_and_the_connection_one(mesh: Mesh) -> None:
    async with plain(mesh, additional_headers={"x-request-id": "agent-7"}) as socket:
        await respond(socket, max_output_tokens=2)
        # Connections of earlier tests may still end.
        await until(lambda: open_sockets(mesh) == 1, "the connection is counted")
        await refuse(socket, model="other")
    lines = [mesh.request_line(f"agent-7-{number}") for number in (1, 2)]
    assert [line["status"] for line in lines] == [200, 404]
    assert {line["endpoint"] for line in lines} == {"responses"}
    (closed,) = wait_for(
        lambda: [
            event
            for event in mesh.frontend.events("websocket_closed")
            if event["connection"] == "agent-7"
        ],
        "the line of the connection is in the log",
    )
    assert (closed["responses"], closed["code"]) == (2, 1000)
    await until(lambda: open_sockets(mesh) == 0, "no connection is counted")


def open_sockets(mesh: Mesh) -> float:
    text = mesh.http.get(f"{mesh.url}/metrics").text
    (line,) = re.findall(r"(?m)^kvmesh_frontend_websockets (\S+)", text)
    return float(line)


async def test_a_client_that_reads_late_receives_the_same_events(mesh: Mesh) -> None:
    """Together, the events are larger than the buffers of both ends."""
    host, _, port = mesh.url.removeprefix("http://").partition(":")
    small = socketlib.socket()
    small.setsockopt(socketlib.SOL_SOCKET, socketlib.SO_RCVBUF, 4096)
    small.connect((host, int(port)))
    async with plain(mesh, max_queue=1, sock=small) as slow, plain(mesh) as fast:
        for number in range(LANES):
            await create(slow, stream_id=str(number), **LONG)
            await create(fast, stream_id=str(number), **LONG)
        expected = await lanes_of(fast)
        # Sleep: the client does not read for this time.
        await asyncio.sleep(0.5)
        assert await lanes_of(slow) == expected
    assert len({json.dumps(events) for events in expected.values()}) == 1


async def lanes_of(socket: ClientConnection) -> dict[str, list[Json]]:
    """The events of each lane up to the ends of all responses."""
    events: dict[str, list[Json]] = {str(number): [] for number in range(LANES)}
    ended = 0
    # Ends: all responses have, or the time limit of `receive`.
    while ended < LANES:
        event = await receive(socket)
        events[event.pop("stream_id")].append(bare(event))
        ended += event["type"] in LAST
    return events


async def test_a_response_continues_exactly_when_its_worker_dies(
    mesh: Mesh, oracle: Oracle
) -> None:
    async with plain(mesh) as socket:
        await create(socket, **LONG)
        events = [await receive(socket)]
        # Ends: the fifth delta, or the time limit of `receive`.
        while sum(event["type"] == DELTA for event in events) < 5:
            events.append(await receive(socket))
        (worker,) = [worker for worker in mesh.workers if worker.open_slots()]
        worker.kill()
        events += await events_of(socket)
    deltas = [event["delta"] for event in events if event["type"] == DELTA]
    assert "".join(deltas) == oracle.chat(LONG["input"], 4096).text
    assert events[-1]["type"] == "response.completed"


async def test_a_drain_lets_responses_end_and_refuses_more(mesh: Mesh) -> None:
    frontend = mesh.spawn("frontend", "--notice-s=0").wait_ready()
    url = frontend.addresses["http"]
    await until(lambda: mesh.http.get(f"{url}/ready").status_code == 200, "it is ready")
    async with plain(mesh, url) as socket, plain(mesh, url) as idle:
        await create(socket, **LONG)
        await receive(socket)
        frontend.send(signal.SIGTERM)
        assert await close_code(idle) == 1012
        await create(socket, stream_id="late")
        ended: dict[str | None, Json] = {}
        # Ends: both have, or the time limit of `receive`.
        while len(ended) < 2:
            event = await receive(socket)
            if event["type"] in LAST:
                ended[event.get("stream_id")] = event
        assert ended[None]["type"] == "response.completed"
        assert (ended["late"]["status"], ended["late"]["error"]["code"]) == (503, "unavailable")
        assert await close_code(socket) == 1012
    assert frontend.wait() == 0


async def close_code(socket: ClientConnection) -> int | None:
    """The code with which the server closes."""
    with pytest.raises(ConnectionClosed) as closed:
        await receive(socket)
    return None if closed.value.rcvd is None else closed.value.rcvd.code

"""Streams of responses in the background: their events, and how they end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import orjson
import pytest

from common.errors import InvalidRequest, MeshError, Overloaded, Unavailable
from common.request.preprocessed import usage
from frontend_svc.responses import follow
from frontend_svc.responses.deltas import read_deltas, write_deltas
from frontend_svc.responses.durable import StreamedOutput
from frontend_svc.responses.events import DeltaFormat
from frontend_svc.responses.follow import ResponseStreams
from frontend_svc.responses.output import Json
from frontend_svc.responses.response_object import new_response
from frontend_svc.responses.stream_events import RUN_NUMBERS, StreamEvents
from frontend_svc.responses.translation import parse_responses
from frontend_svc.text.api_format import ChoiceEnd
from frontend_svc.tools.deltas import CallArguments, CallStart, Content, Delta, Reasoning

ID = f"resp_{'0' * 48}"
SPACE = {
    "type": "namespace",
    "name": "files",
    "description": "",
    "tools": [{"type": "function", "name": "read", "parameters": {}}],
}
BODY = {"model": "m", "input": "Hi", "background": True, "stream": True, "tools": [SPACE]}
DELTAS: Sequence[Delta] = (
    Reasoning("Hm"),
    Content("He"),
    Content("llo"),
    CallStart(0, "files__read", "call_1"),
    CallArguments(0, '{"a"'),
    CallArguments(0, ": 1}"),
)


def test_deltas_are_written_and_read() -> None:
    assert read_deltas(write_deltas(DELTAS)) == list(DELTAS)
    assert write_deltas([CallStart(1, "f")]) == b'["call",1,"f",null]\n'
    with pytest.raises(ValueError, match="'other'"):
        read_deltas(b'["other", 1]\n')


async def run(*deltas: Delta, reason: Any = "stop") -> tuple[bytes, bytes]:
    """The stored output of a response, and its object at its end."""
    response = new_response(parse_responses(orjson.dumps(BODY)), ID, 7, is_stored=True)

    async def store(ended: Json) -> Json:
        return ended

    written = DeltaFormat(response, store)
    parts = written.begin() + written.output(0, deltas, ())
    assert written.finish(0, ChoiceEnd(reason)) == b""
    counts = usage(3, len(deltas))
    await written.settle((), counts)
    assert written.end(counts) == b""
    return parts, written.ended


def parsed(events: bytes) -> list[Json]:
    found = [orjson.loads(block.partition(b"data: ")[2]) for block in events.split(b"\n\n")[:-1]]
    return [event for event in found if event]


async def test_the_events_follow_from_the_output_alone() -> None:
    output, ended = await run(*DELTAS)
    whole = StreamEvents(ended, 1, None)
    events = parsed(whole.begin() + whole.output(output) + whole.end(ended))
    types = [event["type"].removeprefix("response.") for event in events]
    assert types[:3] == ["created", "queued", "in_progress"]
    assert types[-1] == "completed"
    first = RUN_NUMBERS
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    assert events[0]["response"]["status"] == "queued"
    assert events[0]["response"]["output"] == []
    assert events[-1]["response"] == orjson.loads(ended)
    calls = [e["item"] for e in events if e.get("item", {}).get("type") == "function_call"]
    assert {(call["namespace"], call["name"]) for call in calls} == {("files", "read")}
    lines = output.splitlines(keepends=True)
    for cut in range(len(events)):
        after = StreamEvents(ended, 1, first + cut)
        data = after.begin() + b"".join(map(after.output, lines)) + after.end(ended)
        assert parsed(data) == events[cut + 1 :]


async def test_a_response_that_waits_has_begun_only_when_it_runs() -> None:
    _, ended = await run()
    events = StreamEvents(ended, 0, None)
    assert len(parsed(events.begin())) == 2
    queued, running = (
        ended.replace(b"completed", b"queued"),
        ended.replace(b"completed", b"in_progress"),
    )
    assert events.progress(queued) == b""
    assert [event["type"] for event in parsed(events.progress(running))] == ["response.in_progress"]
    assert events.progress(running) == b""
    types = [event["type"] for event in parsed(events.end(ended))]
    assert types[0] == "response.output_item.added"
    failed = StreamEvents(ended, 0, None)
    failed.begin()
    events_at_end = parsed(failed.end(ended.replace(b"completed", b"cancelled")))
    assert [event["type"] for event in events_at_end] == [
        "response.in_progress",
        "response.failed",
    ]


class FakeStored:
    """The batch service: returns these states, one after the other."""

    def __init__(self, *states: StreamedOutput | MeshError) -> None:
        self.states = list(states)
        self.reads: list[tuple[int, int]] = []

    async def read_stream(
        self, response_id: str, tenant: str, run: int = 0, parts: int = 0, *, waits: bool = False
    ) -> StreamedOutput:
        self.reads.append((run, parts))
        state = self.states.pop(0)
        if isinstance(state, MeshError):
            raise state
        return state


def streams(stored: FakeStored, *, is_draining: bool = False) -> ResponseStreams:
    return ResponseStreams(cast(Any, stored), lambda: is_draining)


async def types_of(events: AsyncIterator[bytes]) -> list[str]:
    found = []
    async for part in events:
        found += [event["type"].removeprefix("response.") for event in parsed(part)]
    return found


async def state(run_number: int = 0, *parts: bytes, has_ended: bool = False) -> StreamedOutput:
    _, ended = await run()
    return StreamedOutput(ended, has_ended, run_number, parts)


async def test_a_stream_follows_the_output_through_a_lost_batch_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follow, "_RETRY_S", 0.0)
    hello = write_deltas([Content("Hello")])
    lost = Unavailable("the batch service does not respond", 1.0)
    stored = FakeStored(
        await state(),
        await state(0, hello),
        lost,
        lost,
        await state(0, hello, hello, has_ended=True),
    )
    types = await types_of(await streams(stored).open(ID, "acme"))
    assert types.count("output_text.delta") == 3
    assert types[-1] == "completed"
    assert stored.reads == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 1)]


async def test_a_stream_whose_run_is_lost_ends_with_an_error() -> None:
    stored = FakeStored(await state(0, write_deltas([Content("Hello")])), await state(1))
    events = await streams(stored).open(ID, "acme")
    with pytest.raises(InvalidRequest, match="read the stream again"):
        await types_of(events)
    for after, is_valid in (
        (RUN_NUMBERS - 1, False),
        (RUN_NUMBERS, True),
        (2 * RUN_NUMBERS, False),
    ):
        opened = streams(FakeStored(await state(1, has_ended=True))).open(ID, "acme", after)
        if is_valid:
            assert "completed" in await types_of(await opened)
            continue
        with pytest.raises(InvalidRequest, match="within 10000000") as refused:
            await opened
        assert refused.value.field == "starting_after"


async def test_a_draining_frontend_ends_its_streams() -> None:
    events = await streams(FakeStored(await state()), is_draining=True).open(ID, "acme")
    with pytest.raises(Unavailable, match="shutting down"):
        await types_of(events)


async def test_a_tenant_has_a_part_of_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "TENANT_STREAMS_MAX", 1)
    monkeypatch.setattr(follow, "STREAMS_MAX", 2)
    waiting = await state()
    opened = streams(FakeStored(*[waiting] * 9))
    first = await opened.open(ID, "acme")
    await anext(first)
    with pytest.raises(Overloaded, match="of this tenant: 1/1"):
        await opened.open(ID, "acme")
    other = await opened.open(ID, "other")
    await anext(other)
    with pytest.raises(Overloaded, match="too many streams: 2/2"):
        await opened.open(ID, "third")
    await cast(Any, first).aclose()
    await opened.open(ID, "acme")

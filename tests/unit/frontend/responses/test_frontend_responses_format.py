"""Responses written as events and whole: equal at every chunking, valid for the SDK's types."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from common.errors import InternalError, WorkerLost
from common.request.preprocessed import CompletionUsage, PromptTokensDetails
from frontend_svc.responses.events import ResponsesFormat
from frontend_svc.responses.ids import response_id
from frontend_svc.responses.response_object import new_response
from frontend_svc.responses.schema import ResponsesRequest
from frontend_svc.text.api_format import ChoiceEnd, ChoiceResult, OpenAIFinishReason
from frontend_svc.tools.deltas import CallArguments, CallStart, Content, Delta, Reasoning

ID = response_id("0" * 32, 7)
REQUEST = ResponsesRequest.model_validate(
    {
        "model": "m",
        "input": "Hello",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "metadata": {"a": "b"},
    }
)
USAGE = CompletionUsage(5, 7, 12, PromptTokensDetails(cached_tokens=3))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
KINDS: list[OpenAIFinishReason] = ["stop", "length", "content_filter", "tool_calls"]


# Any, here and below: JSON.
Json = dict[str, Any]


def make_format(completed: list[Json] | None = None) -> ResponsesFormat:
    async def store(response: Json) -> Json:
        if completed is not None:
            completed.append(response)
        return response

    return ResponsesFormat(new_response(REQUEST, ID, 1, is_stored=True), store)


def end(stream: ResponsesFormat) -> bytes:
    """The end of a stream, after it is stored."""
    asyncio.run(stream.settle((), USAGE))
    return stream.end(USAGE)


def whole_body(result: ChoiceResult, completed: list[Json] | None = None) -> Json:
    """A response that is not streamed."""
    written = make_format(completed)
    asyncio.run(written.settle([result], USAGE))
    return cast(Json, json.loads(written.body([result], USAGE)))


def read(stream: bytes) -> list[dict[str, Any]]:
    """The events, checked: their names, and the types of the SDK."""
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert type(EVENT.validate_python(event)).__name__ != "dict"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def split(delta: Delta, cuts: list[int]) -> list[Delta]:
    """The delta in pieces."""
    if isinstance(delta, CallStart):
        return [delta]
    ends = sorted({min(cut, len(delta.text)) for cut in cuts} | {len(delta.text)})
    pieces = [delta.text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    if isinstance(delta, CallArguments):
        return [CallArguments(delta.index, piece) for piece in pieces]
    return [type(delta)(piece) for piece in pieces]


@st.composite
def outputs(draw: st.DrawFn) -> list[Delta]:
    """Content, reasoning and calls in any order."""
    deltas: list[Delta] = []
    texts = st.text(max_size=8)
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["content", "reasoning", "call"]), max_size=5)):
        if kind == "call":
            deltas += [CallStart(calls, "f", f"call_{calls}"), CallArguments(calls, draw(texts))]
            calls += 1
        else:
            deltas.append((Content if kind == "content" else Reasoning)(draw(texts)))
    return deltas


def fold(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a client assembles from the pieces alone."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "content_part.added":
                items[-1]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                assert event["item_id"] == items[-1]["id"]
                items[-1]["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "output_item.done":
                items[-1]["status"] = event["item"]["status"]
                assert items[-1] == event["item"]
    return items


@given(outputs(), st.lists(st.integers(0, 8), max_size=4), st.sampled_from(KINDS))
def test_a_streamed_response_equals_a_whole_one_at_every_chunking(
    deltas: list[Delta], cuts: list[int], reason: OpenAIFinishReason
) -> None:
    stored: list[Json] = []
    whole = whole_body(ChoiceResult(ChoiceEnd(reason), deltas), stored)
    stream = make_format(stored)
    raw = stream.begin()
    for delta in deltas:
        for piece in split(delta, cuts):
            raw += stream.output(0, [piece], ())
    raw += stream.finish(0, ChoiceEnd(reason)) + end(stream)
    events = read(raw)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["response"] == whole
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
    assert fold(events) == events[-1]["response"]["output"]
    assert stored == [whole] * 2
    Response.model_validate(whole)


def test_an_empty_response_has_an_empty_message() -> None:
    body = whole_body(ChoiceResult(ChoiceEnd("stop")))
    (message,) = body["output"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "")


def test_a_response_at_its_token_limit_is_incomplete() -> None:
    result = ChoiceResult(ChoiceEnd("length"), [Reasoning("Hm."), Content("The")])
    body = whole_body(result)
    assert (body["status"], body["incomplete_details"]) == (
        *("incomplete", {"reason": "max_output_tokens"}),
    )
    assert [item["status"] for item in body["output"]] == ["completed", "incomplete"]


def test_usage_has_the_names_of_the_responses_api() -> None:
    body = whole_body(ChoiceResult(ChoiceEnd("stop")))
    assert body["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WorkerLost("the worker was lost", retryable=True), "the worker was lost"),
        (InternalError("a secret"), "The server had an error while processing your request."),
    ],
)
def test_a_failed_stream_ends_with_its_error_and_its_output(error: Any, message: str) -> None:
    completed: list[Json] = []
    stream = make_format(completed)
    raw = stream.begin() + stream.output(0, [Content("Half")], ()) + stream.error(error)
    last = read(raw)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": message}
    assert last["response"]["output"][0]["content"][0]["text"] == "Half"
    assert completed == []


def test_the_response_has_the_settings_of_the_request() -> None:
    body = {
        "model": "m",
        "input": "Hello",
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "name": "f"},
        "tools": [{"type": "function", "name": "f", "parameters": None, "strict": True}],
        "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
        "metadata": {"a": "b"},
        "previous_response_id": ID,
        "prompt_cache_key": "k",
        "safety_identifier": "i",
        "max_tool_calls": 3,
        "user": "u",
    }
    response = new_response(ResponsesRequest.model_validate(body), ID, 1, is_stored=False)
    for name, value in body.items():
        if name not in ("input", "text", "tools"):
            assert response[name] == value, name
    assert response["text"]["format"] == cast("dict[str, Any]", body["text"])["format"]
    assert response["tools"][0]["strict"] is True
    assert response["store"] is False
    Response.model_validate(response)

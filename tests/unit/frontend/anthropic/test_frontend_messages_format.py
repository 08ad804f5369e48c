"""A streamed message equals the whole one, as the Anthropic SDK reads both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import Overloaded
from common.request.preprocessed import CompletionUsage, PromptTokensDetails
from frontend_svc.anthropic.message_format import MessageFormat
from frontend_svc.text.api_format import ChoiceEnd, ChoiceResult
from frontend_svc.tools.choice_parser import ChoiceParser
from frontend_svc.tools.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from frontend_svc.tools.formats import FORMATS
from frontend_svc.tools.parser import ToolCallParser
from frontend_svc.tools.reasoning import REASONING_FORMATS, ReasoningParser
from tests.unit.frontend.tools.outputs import CASES, TYPES

USAGE = CompletionUsage(7, 3, 10, PromptTokensDetails(cached_tokens=4))
COUNTS = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
    "output_tokens": 3,
}


def message_format(**options: Any) -> MessageFormat:
    return MessageFormat("msg_1", "m", 7, "req_1", **options)


# Any, here and below: JSON.
def events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream; their names are their types."""
    found = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def streamed(batches: Sequence[Sequence[Delta]], **options: Any) -> bytes:
    form = message_format(**options)
    outputs = [form.output(0, batch, ()) for batch in batches]
    return b"".join([form.begin(), *outputs, form.finish(0, ChoiceEnd("stop")), form.end(USAGE)])


def accumulated(stream: bytes) -> dict[str, Any]:
    """The message that the SDK builds from a stream. Checks the order of the events of blocks."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    opened = None
    for one in events(stream):
        match one["type"]:
            case "content_block_start":
                assert opened is None
                opened = one["index"]
                assert opened == len(message.content)
            case "content_block_delta":
                assert one["index"] == opened
            case "content_block_stop":
                assert one["index"] == opened
                opened = None
        message = accumulate_event(event=one, current_snapshot=message, json_bufs=buffers)  # type: ignore[arg-type]
    assert opened is None
    whole: dict[str, Any] = message.to_dict()
    return whole


def unary(deltas: Sequence[Delta], **options: Any) -> dict[str, Any]:
    choice = ChoiceResult(ChoiceEnd("stop"), list(deltas))
    body = json.loads(message_format(**options).body([choice], USAGE))
    assert Message.model_validate(body, strict=True).to_dict() == body
    return dict(body)


def deltas_of(name: str, pieces: Sequence[str]) -> list[list[Delta]]:
    tools = ToolCallParser(FORMATS[name], TYPES)
    reasoning = ReasoningParser(REASONING_FORMATS["qwen3"], starts_inside=False)
    parser = ChoiceParser(tools, reasoning, "r")
    batches = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return [[with_id(delta) for delta in batch] for batch in batches]


def with_id(delta: Delta) -> Delta:
    if isinstance(delta, CallStart) and delta.id is None:
        return replace(delta, id=f"id{delta.index}")
    return delta


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_streamed_message_equals_the_whole_one_at_every_split(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    text = f"<think>Why?</think>{text}"
    (whole_deltas, rest) = deltas_of(name, [text])
    whole = unary([*whole_deltas, *rest])
    assert whole["content"][0] == {"type": "thinking", "thinking": "Why?", "signature": "kvmesh"}
    texts = "".join(block["text"] for block in whole["content"] if block["type"] == "text")
    assert texts.strip() == content.strip()
    found = [(one["name"], one["input"]) for one in whole["content"] if one["type"] == "tool_use"]
    assert found == calls
    assert whole["usage"] == COUNTS
    for split in range(len(text)):
        assert accumulated(streamed(deltas_of(name, [text[:split], text[split:]]))) == whole


ARGUMENTS = st.dictionaries(
    st.text(max_size=3), st.text(max_size=5) | st.integers(0, 99) | st.none(), max_size=3
)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_streamed_message_equals_the_whole_one_for_all_deltas(data: st.DataObject) -> None:
    deltas: list[Delta] = []
    calls = 0
    for kind in data.draw(st.lists(st.sampled_from(["text", "thinking", "call"]), max_size=6)):
        if kind == "call":
            deltas.append(CallStart(calls, "f", f"id{calls}"))
            arguments = json.dumps(data.draw(ARGUMENTS))
            end = data.draw(st.integers(0, len(arguments)))  # the token limit may cut a call
            deltas += [CallArguments(calls, one) for one in arguments[:end]]
            calls += 1
        else:
            delta = Content if kind == "text" else Reasoning
            deltas += map(delta, data.draw(st.lists(st.text(min_size=1), min_size=1, max_size=3)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(deltas)), max_size=5)))
    batches = [deltas[a:b] for a, b in zip([0, *cuts], [*cuts, len(deltas)], strict=True)]
    options = {"omits_thinking": data.draw(st.booleans())}
    whole = unary(deltas, **options)
    assert accumulated(streamed(batches, **options)) == whole
    if options["omits_thinking"]:
        assert not any(block.get("thinking") for block in whole["content"])


def test_arguments_that_are_no_json_object_are_kept() -> None:
    for arguments in ("{a: 1}", "[1]"):
        deltas: list[Delta] = [CallStart(0, "f", "i"), CallArguments(0, arguments)]
        (block,) = unary(deltas)["content"]
        assert block["input"] == {"INVALID_JSON": arguments}


def test_the_first_event_has_the_counts_that_are_known() -> None:
    (first,) = events(message_format().begin())
    assert first["message"]["usage"] == COUNTS | {
        "input_tokens": 7,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    assert Message.model_validate(first["message"]).stop_reason is None


@pytest.mark.parametrize(
    ("reason", "stop_sequence", "expected"),
    [
        ("stop", None, "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("tool_calls", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("content_filter", None, "refusal"),
        ("tool_calls", None, "tool_use"),
    ],
)
def test_the_stop_reason_is_anthropics(
    reason: Any, stop_sequence: str | None, expected: str
) -> None:
    end = ChoiceEnd(reason, stop_sequence)
    form = message_format()
    stream = form.begin() + form.text(0, ["a"]) + form.finish(0, end) + form.end(USAGE)
    (delta,) = (one for one in events(stream) if one["type"] == "message_delta")
    assert delta["delta"] == {
        "stop_reason": expected,
        "stop_sequence": stop_sequence,
        "stop_details": None,
    }
    assert delta["usage"] == COUNTS
    whole = json.loads(message_format().body([ChoiceResult(end, [Content("a")])], USAGE))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (expected, stop_sequence)


def test_a_stream_ends_with_an_error_event() -> None:
    (event,) = events(message_format().error(Overloaded(1.0, "full")))
    assert (event["type"], event["error"]["type"]) == ("error", "overloaded_error")
    assert event["request_id"] == "req_1"

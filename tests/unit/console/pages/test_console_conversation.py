"""Chats of the playground: pieces of tool calls, timing, and messages of the next request."""

from __future__ import annotations

import pytest

from console_svc.pages.conversation import (
    EXAMPLE_TOOLS,
    Response,
    ToolsError,
    parse_tools,
    tool_messages,
)
from console_svc.state.actions import ChatDelta


def _piece(index: int, **function: str) -> dict[str, object]:
    return {"index": index, "function": function}


def test_pieces_of_two_tool_calls_become_two_calls() -> None:
    response = Response()
    for delta in (
        ChatDelta(10, tool_calls=({"id": "c0", **_piece(0, name="get_weather", arguments="")},)),
        ChatDelta(
            20, tool_calls=(_piece(0, arguments='{"city":'), {"id": "c1", **_piece(1, name="now")})
        ),
        ChatDelta(30, tool_calls=(_piece(0, arguments=' "Bern"}'),)),
        ChatDelta(31, finish_reason="tool_calls", usage={"completion_tokens": 9}),
    ):
        response.add(delta)
    calls = [(c.id, c.name, c.arguments) for c in response.calls.values()]
    assert calls == [("c0", "get_weather", '{"city": "Bern"}'), ("c1", "now", "")]
    assert response.finish_reason == "tool_calls"
    sent = response.message()["tool_calls"]
    assert sent[0]["function"]["arguments"] == '{"city": "Bern"}'
    assert tool_messages({"c0": "sunny"}) == [
        {"role": "tool", "tool_call_id": "c0", "content": "sunny"}
    ]


def test_tokens_a_second_exclude_the_time_to_the_first_token() -> None:
    response = Response()
    for at_ms in (500.0, 600.0, 700.0):
        response.add(ChatDelta(at_ms, text="a"))
    response.add(ChatDelta(701, usage={"completion_tokens": 3}))
    assert response.first_token_ms == 500.0
    assert response.tokens_per_s == pytest.approx(10.0)
    assert response.ended_ms == 701


@pytest.mark.parametrize("text", ["{", '{"type": "function"}', "[1]"])
def test_tools_that_are_no_list_of_objects_are_refused_with_the_reason(text: str) -> None:
    with pytest.raises(ToolsError, match="tools: "):
        parse_tools(text)


def test_the_example_tools_are_valid_and_no_tools_are_none() -> None:
    assert parse_tools(EXAMPLE_TOOLS)[0]["function"]["name"] == "get_weather"
    assert parse_tools("  ") == ()

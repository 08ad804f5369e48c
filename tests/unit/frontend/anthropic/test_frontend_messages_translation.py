"""Bodies of the Messages API become the chat with the same meaning, or are refused by name."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from common.errors import InvalidRequest, MeshError, Overloaded, PromptTooLong, Unavailable
from frontend_svc.anthropic.errors import client_message, http_error
from frontend_svc.anthropic.translation import parse_count, parse_messages
from frontend_svc.openai.body.preprocessing import check_prompt_length, to_preprocessed

HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "f", "description": "F.", "input_schema": SCHEMA}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
}
URL_IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a/b"}}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CHAT_URL_IMAGE = {"type": "image_url", "image_url": {"url": "https://a/b"}}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "F.", "parameters": SCHEMA},
}
CHAT_CALL = {
    "id": "t1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a":1}'},
}


# Any, here and below: JSON.
def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def turn(role: str, *blocks: object) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def result(content: object, **fields: object) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **fields}


def body(**fields: object) -> bytes:
    return orjson.dumps({"model": "m", "max_tokens": 10, "messages": [HI], **fields})


def chat(**fields: object) -> dict[str, Any]:
    """The fields of the chat that differ from those of the simplest body."""
    request = parse_messages(body(**fields))
    own = {"thinking", "omits_thinking", "effort"}
    translated = request.model_dump(exclude_none=True, by_alias=True, exclude=own)
    simplest = {"model": "m", "max_tokens": 10, "messages": [HI]}
    return {name: value for name, value in translated.items() if simplest.get(name) != value}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"max_tokens": 11}, {"max_tokens": 11}),
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"temperature": 0.5, "top_p": 0.6}, {"temperature": 0.5, "top_p": 0.6}),
        ({"top_k": 7}, {"top_k": 7}),
        ({"top_k": 0}, {}),
        ({"guided_regex": "a"}, {"guided_regex": "a"}),
        ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
        (
            {"tools": [TOOL | {"strict": True}], "tool_choice": {"type": "auto"}},
            {
                "tools": [
                    CHAT_TOOL | {"function": {**CHAT_TOOL["function"], "strict": True}}  # type: ignore[dict-item]
                ],
                "tool_choice": "auto",
            },
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            },
            {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
            {
                "tools": [CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "none"}},
            {"tools": [CHAT_TOOL], "tool_choice": "none"},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "output", "schema": SCHEMA},
                }
            },
        ),
        (
            {
                "metadata": {"user_id": "u"},
                "service_tier": "auto",
                "cache_control": {"type": "ephemeral"},
                "speed": "standard",
                "output_config": {"effort": "high"},
                "context_management": {"edits": []},
                "container": None,
            },
            {},
        ),
    ],
)
def test_a_field_becomes_the_field_of_a_chat(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert chat(**fields) == expected


def test_a_tool_name_may_have_128_characters() -> None:
    name = "f" * 128
    fields = chat(tools=[TOOL | {"name": name}], tool_choice={"type": "tool", "name": name})
    assert fields["tools"][0]["function"]["name"] == name
    assert fields["tool_choice"]["function"]["name"] == name


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"system": "S"}, [{"role": "system", "content": "S"}, HI]),
        (
            {"system": [text("S") | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
            [{"role": "system", "content": "S"}, HI],
        ),
        (
            {"system": [text("S"), text("T")]},
            [{"role": "system", "content": [text("S"), text("T")]}, HI],
        ),
        (
            {"system": [text("x-anthropic-billing-header: cch=1;"), text("S")]},
            [{"role": "system", "content": "S"}, HI],
        ),
        (
            {"messages": [HI, {"role": "system", "content": "S"}]},
            [HI, {"role": "system", "content": "S"}],
        ),
        ({"messages": [turn("user", text("hi"))]}, [HI]),
        (
            {"messages": [HI, turn("user", text("b"))]},
            [{"role": "user", "content": [text("hi"), text("b")]}],
        ),
        (
            {
                "messages": [
                    HI,
                    turn(
                        "assistant",
                        {"type": "thinking", "thinking": "T", "signature": "s"},
                        text("A") | {"citations": None},
                        CALL | {"caller": {"type": "direct"}},
                    ),
                    turn("user", result("R"), text("go")),
                ]
            },
            [
                HI,
                {
                    "role": "assistant",
                    "content": "A",
                    "reasoning_content": "T",
                    "tool_calls": [CHAT_CALL],
                },
                {"role": "tool", "content": "R", "tool_call_id": "t1"},
                {"role": "user", "content": "go"},
            ],
        ),
        (
            {
                "messages": [
                    HI,
                    turn("assistant", CALL),
                    turn("user", result([text("R"), text("S")], is_error=True)),
                    turn("user", result(None, is_error=False)),
                ]
            },
            [
                HI,
                {"role": "assistant", "content": "", "tool_calls": [CHAT_CALL]},
                {
                    "role": "tool",
                    "content": [text("Error: R"), text("S")],
                    "tool_call_id": "t1",
                },
                {"role": "tool", "content": "", "tool_call_id": "t1"},
            ],
        ),
        (
            {
                "messages": [
                    turn("user", IMAGE, text("What?"), URL_IMAGE),
                    turn("assistant", CALL),
                    turn("user", result([IMAGE], is_error=True), IMAGE),
                ]
            },
            [
                {"role": "user", "content": [CHAT_IMAGE, text("What?"), CHAT_URL_IMAGE]},
                {"role": "assistant", "content": "", "tool_calls": [CHAT_CALL]},
                {"role": "tool", "content": [text("Error: "), CHAT_IMAGE], "tool_call_id": "t1"},
                {"role": "user", "content": [CHAT_IMAGE]},
            ],
        ),
    ],
)
def test_turns_become_the_messages_of_a_chat(
    fields: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    request = parse_messages(body(**fields))
    assert request.template_messages() == expected
    prompt = {name: value for name, value in fields.items() if name in ("system", "messages")}
    count = orjson.dumps({"model": "m", "messages": [HI], **prompt})
    assert parse_count(count).template_messages() == expected


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "integer"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"temperature": 1.1}, "temperature", "<= 1"),
        ({"seed": 1}, "seed", "Unknown"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "1 or more"),
        ({"system": [{"type": "image"}]}, "system[0].type", "only blocks of type text"),
        ({"messages": []}, "messages", "1 or more"),
        ({"messages": [turn("user")]}, "messages[0].content", "1 or more"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing"),
        ({"messages": [turn("user", 1)]}, "messages[0].content[0]", "an object"),
        ({"messages": [turn("user", {})]}, "messages[0].content[0].type", "Missing"),
        (
            {"messages": [turn("user", {"type": "document", "source": {}})]},
            "messages[0].content[0].type",
            "only blocks of type",
        ),
        (
            {"messages": [turn("user", {"type": "image", "source": {"type": "file"}})]},
            "messages[0].content[0].source.type",
            "base64",
        ),
        (
            {"messages": [turn("user", result([{"type": "image"}]))]},
            "messages[0].content[0].content[0].source",
            "Missing",
        ),
        ({"messages": [turn("system", IMAGE)]}, "messages[0].content[0].type", "role 'user'"),
        ({"messages": [turn("user", CALL)]}, "messages[0].content[0].type", "role 'assistant'"),
        (
            {"messages": [turn("system", result("R"))]},
            "messages[0].content[0].type",
            "role 'user'",
        ),
        ({"messages": [HI, turn("assistant", text("A"))]}, "messages[1].role", "continue"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}]},
            "tools[0].type",
            "only custom tools",
        ),
        ({"tools": [TOOL, TOOL]}, "tools[1].name", "two functions"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading", "search"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "Missing"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name", "only the type"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice.name",
            "no function 'g'",
        ),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "Missing"),
        ({"output_config": {"effort": "max"}}, "output_config.effort", "one of"),
        ({"container": "c"}, "container", "no such feature"),
        ({"context_management": {"edits": [{}]}}, "context_management", "whole conversation"),
    ],
)
def test_an_unusable_field_is_refused_by_its_name(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_messages(body(**fields))
    response = http_error(raised.value, "r1")
    error = orjson.loads(response.body)
    assert (response.status, error["request_id"], error["type"]) == (400, "r1", "error")
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["details"]["param"] == param
    assert f"'{param}'" in error["error"]["message"]
    assert words in error["error"]["message"]


def test_an_input_that_is_nested_too_deeply_is_refused() -> None:
    call = turn("assistant", CALL | {"input": {"a": "deep"}})
    deep = body(messages=[HI, call, HI]).replace(b'"deep"', b"[" * 300 + b"]" * 300)
    with pytest.raises(InvalidRequest, match="220 levels"):
        parse_messages(deep)


@pytest.mark.parametrize(
    ("error", "status", "kind", "param"),
    [
        (Overloaded(2.0, "full"), 529, "overloaded_error", None),
        (Unavailable("no worker"), 503, "api_error", None),
        (PromptTooLong("long", "messages"), 400, "invalid_request_error", "messages"),
        (
            InvalidRequest("bad", "tools[3].function.parameters"),
            400,
            "invalid_request_error",
            "tools[3].input_schema",
        ),
        (
            InvalidRequest("bad", "response_format.json_schema.schema"),
            400,
            "invalid_request_error",
            "output_config.format.schema",
        ),
        (ValueError("secret"), 500, "api_error", None),
    ],
)
def test_an_error_has_the_status_and_type_of_anthropic(
    error: MeshError, status: int, kind: str, param: str | None
) -> None:
    response = http_error(error, "r1")
    details = orjson.loads(response.body)["error"]
    assert (response.status, details["type"], details["details"]["param"]) == (status, kind, param)
    assert b"secret" not in response.body
    assert ("retry-after", "2") in response.headers or not isinstance(error, Overloaded)


@pytest.mark.parametrize(
    ("thinking", "variables", "expected"),
    [
        (None, {"thinking"}, {}),
        ({"type": "disabled"}, {"enable_thinking", "tools"}, {"enable_thinking": False}),
        ({"type": "disabled"}, {"thinking"}, {"thinking": False}),
        ({"type": "adaptive"}, {"thinking"}, {"thinking": True}),
        ({"type": "adaptive"}, {"tools"}, {}),
    ],
)
def test_thinking_sets_the_variables_of_the_chat_template(
    thinking: object, variables: set[str], expected: dict[str, bool]
) -> None:
    request = parse_messages(body(thinking=thinking))
    assert request.template_kwargs(variables, is_reasoning=True) == expected


def test_thinking_that_cannot_be_disabled_is_refused() -> None:
    request = parse_messages(body(thinking={"type": "disabled"}))
    assert request.template_kwargs({"tools"}, is_reasoning=False) == {}
    with pytest.raises(InvalidRequest, match="cannot turn"):
        request.template_kwargs({"tools"}, is_reasoning=True)


def test_an_effort_sets_the_variable_of_the_chat_template() -> None:
    low, high = (parse_messages(body(output_config={"effort": one})) for one in ("low", "high"))
    for request, value in ((low, "low"), (high, "high")):
        settings = request.template_kwargs({"reasoning_effort"}, is_reasoning=True)
        assert settings == {"reasoning_effort": value}
    assert high.template_kwargs(set(), is_reasoning=True) == {}
    with pytest.raises(InvalidRequest, match="no such setting") as raised:
        low.template_kwargs(set(), is_reasoning=True)
    assert raised.value.field == "output_config.effort"


def test_thinking_blocks_are_omitted_on_request() -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    assert parse_messages(body(thinking=thinking)).omits_thinking
    assert not parse_messages(body(thinking={"type": "adaptive"})).omits_thinking


WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


def test_a_hosted_tool_beside_others_is_left_out_and_named() -> None:
    request = parse_messages(body(tools=[WEB_SEARCH, TOOL]))
    assert request.template_tools() == [CHAT_TOOL]
    assert request.omitted_tools == ("web_search_20250305",)
    with pytest.raises(InvalidRequest) as raised:
        parse_messages(body(tools=[WEB_SEARCH, TOOL, TOOL]))
    error = orjson.loads(http_error(raised.value, "r1").body)["error"]
    assert error["details"]["param"] == "tools[2].name"
    chosen = {"type": "tool", "name": "web_search"}
    with pytest.raises(InvalidRequest, match="no function 'web_search'"):
        parse_messages(body(tools=[WEB_SEARCH, TOOL], tool_choice=chosen))


def test_a_deferred_tool_is_in_the_prompt_after_a_result_has_referred_to_it() -> None:
    search, deferred = TOOL | {"name": "search"}, TOOL | {"defer_loading": True}
    before = parse_messages(body(tools=[search, deferred]))
    assert [tool.function.name for tool in before.tools or ()] == ["search"]
    found = [{"type": "tool_reference", "tool_name": "f"}, text("Found.")]
    turns = [HI, turn("assistant", CALL | {"name": "search"}), turn("user", result(found))]
    after = parse_messages(body(tools=[search, deferred], messages=turns))
    assert [tool.function.name for tool in after.tools or ()] == ["search", "f"]
    assert after.template_messages()[-1]["content"] == [
        text("The tool f is available."),
        text("Found."),
    ]
    assert after.tool_path(1) == "tools[1].function"


def too_long(prompt: int, **fields: object) -> dict[str, Any]:
    """The error of a prompt of so many tokens in a context of 1,000."""
    with pytest.raises(PromptTooLong) as raised:
        to_preprocessed(
            parse_messages(body(**fields)),
            range(prompt),
            eos_token_ids=(),
            card_checksum=None,
            context_length=1000,
        )
    response = http_error(raised.value, "r1")
    assert response.status == 400
    error = orjson.loads(response.body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"]["error_code"] == "context_length_exceeded"
    assert dict(raised.value.metadata)["context_tokens"] == "1000"
    assert client_message(raised.value, ())[0] == error["message"]
    return dict(error)


def test_a_context_that_is_exceeded_has_the_text_from_which_clients_read_numbers() -> None:
    both = too_long(800, max_tokens=300)
    text = "input length and `max_tokens` exceed context limit: 800 + 300 > 1000, "
    assert both["message"].startswith(text)
    assert too_long(1000)["message"] == "prompt is too long: 1000 tokens > 999 maximum"


def test_a_prompt_that_was_not_tokenized_is_too_long_by_its_lower_bound() -> None:
    with pytest.raises(PromptTooLong) as raised:
        check_prompt_length(parse_messages(body()), 1500, 1000)
    error = orjson.loads(http_error(raised.value, "r1").body)["error"]
    assert error["message"] == "prompt is too long: 1500 tokens > 999 maximum"

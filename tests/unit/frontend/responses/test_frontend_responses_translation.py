"""Bodies of the Responses API as chats: items, fields, refusals by name, stored items."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from common.errors import InvalidRequest, PromptTooLong, Unsupported
from frontend_svc.openai.body.schema import NamedToolChoice
from frontend_svc.responses.ids import response_id
from frontend_svc.responses.translation import (
    ResponsesChat,
    client_error,
    input_items,
    parse_responses,
    read_items,
    references,
    stored_items,
    to_chat,
)

ID = response_id("0" * 32, 7)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
WEB_SEARCH = {"type": "web_search", "external_web_access": False, "filters": {"allowed": []}}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "4"}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
ANSWER = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hi.", "annotations": [], "logprobs": []}],
}


# Any, here and below: JSON.
def chat(**fields: Any) -> ResponsesChat:
    request = parse_responses(orjson.dumps({"model": "m", "input": "Hello", **fields}))
    return to_chat(request, input_items(request, {}))


def messages(items: Any, **fields: Any) -> list[dict[str, Any]]:
    return chat(input=items, **fields).template_messages()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_text_is_a_message_of_the_user_after_the_instructions() -> None:
    assert messages("Hello", instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        user("Hello"),
    ]


def test_messages_keep_their_roles_and_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": parts[:1]},
            ANSWER,
            {"role": "user", "content": parts},
        ]
    ) == [
        {"role": "developer", "content": "Be brief."},
        user("a"),
        {"role": "assistant", "content": "Hi."},
        user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    ]


def call_of_chat(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_the_items_of_an_answer_are_one_message() -> None:
    second = {**CALL, "call_id": "c2", "id": "fc_2", "status": "completed"}
    result = {**OUTPUT, "output": [{"type": "input_text", "text": "4"}]}
    assert messages([user("?"), REASONING, ANSWER, CALL, second, result]) == [
        user("?"),
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Hi.",
            "tool_calls": [call_of_chat("c1"), call_of_chat("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]


def test_text_after_a_call_belongs_to_the_message_of_the_call() -> None:
    assert messages([ANSWER, CALL, ANSWER, OUTPUT])[0] == {
        "role": "assistant",
        "content": "Hi.Hi.",
        "tool_calls": [call_of_chat("c1")],
    }


def test_two_answers_in_a_row_are_two_messages() -> None:
    answer = {"role": "assistant", "content": "Hi."}
    assert messages([answer, answer, REASONING, answer]) == [
        answer,
        answer,
        {**answer, "reasoning_content": "Hm."},
    ]


def test_fields_reach_the_chat() -> None:
    request = chat(
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.25,
        stream=True,
        parallel_tool_calls=False,
        tools=[{**TOOL, "strict": True, "description": "d"}],
        tool_choice={"type": "function", "name": "f"},
        nvext={"top_k": 5},
        chat_template_kwargs={"enable_thinking": False},
        metadata={"a": "b"},
    )
    assert request.max_output_tokens[0] == 9
    assert (request.temperature, request.top_p, request.is_stream) == (0.5, 0.25, True)
    assert request.parallel_tool_calls is False
    assert isinstance(request.tool_choice, NamedToolChoice)
    assert request.template_tools() == [
        {
            "type": "function",
            "function": {
                **{"name": "f", "description": "d", "strict": True},
                "parameters": TOOL["parameters"],
            },
        }
    ]
    assert request.nvext is not None
    assert request.nvext.top_k == 5
    assert request.chat_template_kwargs == {"enable_thinking": False}


NAMESPACE = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Reads files.",
    "tools": [
        {"type": "function", "name": "read", "description": "Reads one.", "parameters": {}},
        {"type": "function", "name": "list", "strict": False, "defer_loading": True},
    ],
}


def test_functions_of_a_namespace_have_its_name() -> None:
    request = chat(tools=[TOOL, NAMESPACE], tool_choice="required")
    tools = request.template_tools()
    assert tools is not None
    assert [tool["function"]["name"] for tool in tools] == [
        *("f", "mcp__files__read", "mcp__files__list"),
    ]
    assert tools[1]["function"]["description"] == "Reads files.\nReads one."
    names = request.chat_tools.names
    assert names.call_fields("mcp__files__list") == {"name": "list", "namespace": "mcp__files"}
    assert names.call_fields("f") == {"name": "f"}
    call = {**CALL, "name": "read", "namespace": "mcp__files"}
    (past,) = messages([call])
    assert past["tool_calls"][0]["function"]["name"] == "mcp__files__read"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([WEB_SEARCH, TOOL, TOOL], "tools[2].name"),
        ([NAMESPACE, NAMESPACE], "tools[1].tools[0].name"),
        ([{**NAMESPACE, "tools": [{"type": "custom", "name": "g"}]}], "tools[0].tools[0].type"),
        ([{**NAMESPACE, "tools": []}], "tools[0].tools"),
        ([WEB_SEARCH, {"type": "image_generation"}], "tools[0].type"),
        ([TOOL, {"type": "mcp", "server_url": "http://a"}], "tools[1].type"),
        ([TOOL, {"type": "file_search", "vector_store_ids": ["v"]}], "tools[1].type"),
        ([TOOL, {"type": "local_shell"}], "tools[1].type"),
    ],
)
def test_tools_are_refused_by_their_place_in_the_body(tools: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chat(tools=tools)
    assert raised.value.field == param
    assert f"'{param}'" in raised.value.message


def test_hosted_tools_beside_functions_are_left_out_and_named() -> None:
    request = chat(tools=[WEB_SEARCH, TOOL, {"type": "tool_search"}, WEB_SEARCH])
    assert request.template_tools() == chat(tools=[TOOL]).template_tools()
    assert request.chat_tools.omitted == ("web_search", "tool_search")
    assert request.tool_path(0) == "tools[1]"


def test_a_result_without_an_id_is_that_of_the_first_call_without_a_result() -> None:
    second, third = {**CALL, "call_id": "c2"}, {**CALL, "call_id": "c3"}
    unnamed = {"type": "function_call_output", "output": "no"}
    items = [CALL, second, third, {**OUTPUT, "call_id": "c2"}, unnamed, {**unnamed, "call_id": ""}]
    results = [message["tool_call_id"] for message in messages(items) if message["role"] == "tool"]
    assert results == ["c2", "c1", "c3"]
    with pytest.raises(InvalidRequest, match=r"Missing required parameter: 'input\.call_id'"):
        chat(input=[CALL, OUTPUT, unnamed])


def test_the_text_format_is_the_response_format_of_the_chat() -> None:
    schema = {"type": "object"}
    text = {"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}}
    response_format = chat(text=text).response_format
    assert response_format is not None
    assert response_format.json_schema is not None
    assert response_format.json_schema.json_schema == schema
    json_object = chat(text={"format": {"type": "json_object"}}).response_format
    assert json_object is not None
    assert json_object.type == "json_object"


IMAGE = {"type": "input_image", "image_url": "data:,"}
FILE = {"type": "input_file", "file_id": "f"}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, {"type": "custom", "name": "g"}]}, "tools[1].type"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"effort": {}}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [FILE]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "input"),
    ({"input": [{"role": "user", "content": [{**IMAGE, "file_id": "f"}]}]},
     "input[0].content[0].file_id"),
    ({"input": [{**REASONING, "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"background": 1}, "background"),
        ({"conversation": 1}, "conversation"),
        ({"conversation": {"id": ""}}, "conversation.id"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
    ],
)
def test_an_invalid_field_of_a_stored_response_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chat(**fields)
    assert raised.value.field == param


@pytest.mark.parametrize(("fields", "param"), REFUSALS)
def test_an_unsupported_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chat(**fields)
    assert raised.value.field == param
    assert f"'{param}'" in raised.value.message
    assert isinstance(raised.value, Unsupported) or param == "reasoning.effort"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "strict": True}}}, "text.format.strict"),
        ({"max_tokens": 3}, "max_tokens"),
    ],
)
def test_an_invalid_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chat(**fields)
    assert raised.value.field == param
    assert f"'{param}'" in raised.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "max_tool_calls": 1},
        {"background": False, "truncation": "disabled", "service_tier": "auto"},
        {"include": ["reasoning.encrypted_content"], "top_logprobs": 0},
        {"text": {"verbosity": "medium"}, "reasoning": {"summary": "auto", "effort": None}},
        {"client_metadata": {"session": "s", "turn": {"number": 1}}, "trace": None},
    ],
)
def test_accepted_fields_without_effect_change_nothing(fields: dict[str, Any]) -> None:
    ignored = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"))
    assert chat(**fields).model_copy(update=ignored) == chat()


def test_errors_of_the_chat_have_the_names_of_the_client() -> None:
    for field, name in [
        ("messages", "input"),
        ("messages[3].content", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("tools[1].function.parameters", "tools[1].parameters"),
        ("nvext.top_k", "nvext.top_k"),
    ]:
        error = client_error(PromptTooLong(f"Invalid '{field}'.", field))
        assert (type(error), error.field) == (PromptTooLong, name)
        assert error.message == f"Invalid '{name}'."


def test_stored_items_are_items_of_the_sdk_and_mean_the_same() -> None:
    items = [user("a"), ANSWER, {"role": "assistant", "content": "b"}, REASONING, CALL, OUTPUT]
    request = parse_responses(orjson.dumps({"model": "m", "input": items}))
    parsed = input_items(request, {})
    stored = stored_items(parsed, ID)
    ids = [json.loads(one)["id"] for one in stored]
    assert len(set(ids)) == len(items)
    assert ids[1] == "msg_1"
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseItem)
    for one in stored:
        assert type(adapter.validate_json(one)).__name__.startswith("Response")
    assert to_chat(request, read_items(stored)) == to_chat(request, parsed)


def test_references_stand_for_stored_items() -> None:
    body = {"model": "m", "input": [user("a"), {"type": "item_reference", "id": "msg_1"}]}
    request = parse_responses(orjson.dumps(body))
    assert references(request) == {1: "msg_1"}
    (answer,) = read_items([orjson.dumps(ANSWER)])
    assert to_chat(request, input_items(request, {1: answer})).template_messages() == [
        user("a"),
        {"role": "assistant", "content": "Hi."},
    ]

"""Tool calls at the door, with the OpenAI SDK: choices, streams, conversations, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.kit.processes import MODEL, Mesh, Service, mesh_fixture
from tests.kit.sdk import open_sdk_client
from worker_svc.engines.sim.config import SIM_MODEL_DIR

pytestmark = pytest.mark.slow

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
# References stay valid where the schema becomes a part of a grammar.
SUM = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/Number"}, "b": {"$ref": "#/$defs/Number"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"Number": {"type": "integer", "minimum": 0, "maximum": 99}},
}
SCHEMAS = {"get_weather": WEATHER, "add": SUM, "now": None}
LONG = {
    "type": "object",
    "properties": {"lines": {"type": "array", "items": {"type": "string"}, "minItems": 150}},
    "required": ["lines"],
    "additionalProperties": False,
}


# Any, here and below: JSON.
def tool(name: str, parameters: dict[str, Any] | None, **fields: Any) -> Any:
    function = {"name": name, "description": f"Calls {name}.", **fields}
    return {
        "type": "function",
        "function": function | ({"parameters": parameters} if parameters else {}),
    }


TOOLS = [tool(name, schema) for name, schema in SCHEMAS.items()]


@dataclass
class Reply:
    """A response, whole or put together from chunks."""

    content: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def calls_without_ids(self) -> list[tuple[str, str]]:
        return [(call["name"], call["arguments"]) for call in self.calls]


mesh = mesh_fixture(worker_flags=["--speedup=20"])


@pytest.fixture
def sim_model_copy(tmp_path: Path) -> Path:
    """A folder with the sim's model; the name of its parser belongs to the built-in one."""
    return shutil.copytree(SIM_MODEL_DIR, tmp_path / "model")


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


async def whole(client: openai.AsyncOpenAI, messages: list[Any], **fields: Any) -> Reply:
    """A response that is not streamed."""
    response = await client.chat.completions.create(
        model=MODEL, messages=messages, **({"tools": TOOLS} | fields)
    )
    (choice,) = response.choices
    calls = [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in choice.message.tool_calls or ()
        if call.type == "function"
    ]
    assert (choice.message.content is None) == (bool(calls) and not choice.message.content)
    return Reply(choice.message.content or "", calls, [choice.finish_reason])


async def streamed(
    client: openai.AsyncOpenAI,
    messages: list[Any],
    on_chunk: Callable[[Reply], None] = lambda _: None,
    **fields: Any,
) -> Reply:
    """A streamed response; checks the form of its chunks."""
    reply = Reply()
    async with await client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, **({"tools": TOOLS} | fields)
    ) as chunks:
        async for chunk in chunks:
            (choice,) = chunk.choices
            assert not reply.reasons, "nothing follows the finish reason"
            reply.content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                if call.index == len(reply.calls):
                    assert call.id
                    assert call.function.name
                    assert call.type == "function"
                    reply.calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                else:
                    assert call.index == len(reply.calls) - 1
                    assert (call.id, call.type, call.function.name) == (None, None, None)
                reply.calls[call.index]["arguments"] += call.function.arguments or ""
            reply.reasons += [choice.finish_reason] if choice.finish_reason else []
            on_chunk(reply)
    return reply


def assert_valid(reply: Reply) -> None:
    """Each call names a function and has arguments of its schema; ids are unique."""
    for name, arguments in reply.calls_without_ids:
        schema = SCHEMAS[name]
        jsonschema.validate(json.loads(arguments), schema or {"maxProperties": 0})
    assert len({call["id"] for call in reply.calls}) == len(reply.calls)
    assert reply.reasons == ["tool_calls" if reply.calls else "stop"]


async def test_calls_of_every_choice_are_valid_and_equal_streamed_and_whole(
    client: openai.AsyncOpenAI,
) -> None:
    counts: set[int] = set()
    names: set[str] = set()
    for number in range(6):
        for choice in ("auto", "required"):
            messages = user(f"Prompt {number}")
            one = await whole(client, messages, tool_choice=choice)
            other = await streamed(client, messages, tool_choice=choice)
            assert_valid(one)
            assert_valid(other)
            assert (one.content, one.calls_without_ids) == (other.content, other.calls_without_ids)
            assert one.calls or choice == "auto"
            assert not one.content or choice == "auto"
            counts.add(len(one.calls))
            names |= {name for name, _ in one.calls_without_ids}
    assert counts >= {0, 1, 2}, "auto has answers without calls, and there are parallel calls"
    assert names == set(SCHEMAS)


@pytest.mark.parametrize("name", SCHEMAS)
async def test_a_named_choice_is_exactly_one_call_of_that_function(
    client: openai.AsyncOpenAI, name: str
) -> None:
    choice: Any = {"type": "function", "function": {"name": name}}
    for number in range(3):
        reply = await streamed(client, user(f"{number}"), tool_choice=choice)
        assert_valid(reply)
        assert [call["name"] for call in reply.calls] == [name]
        assert reply.content == ""


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_without_parallel_calls_there_is_at_most_one(
    client: openai.AsyncOpenAI, choice: str
) -> None:
    for number in range(6):
        messages = user(f"Prompt {number}")
        fields: Any = {"tool_choice": choice, "parallel_tool_calls": False}
        reply = await streamed(client, messages, **fields)
        assert_valid(reply)
        assert len(reply.calls) == 1 or (choice == "auto" and not reply.calls)
        assert (await whole(client, messages, **fields)).calls_without_ids == (
            reply.calls_without_ids
        )


async def test_tool_choice_none_returns_the_text_of_a_chat_without_tools(
    client: openai.AsyncOpenAI,
) -> None:
    reply = await whole(client, user("Hello"), tool_choice="none")
    plain = await whole(client, user("Hello"), tools=openai.omit)
    assert (reply, reply.calls) == (plain, [])


async def test_tools_and_their_results_are_part_of_the_prompt(client: openai.AsyncOpenAI) -> None:
    """An agent's loop: call the functions, return their results, until there is an answer."""
    messages = user("What is the weather?")
    for _ in range(30):
        reply = await streamed(client, messages)
        assert_valid(reply)
        if not reply.calls:
            break
        calls = [
            {
                "id": c["id"],
                "type": "function",
                "function": {"name": c["name"], "arguments": c["arguments"]},
            }
            for c in reply.calls
        ]
        messages.append(
            {"role": "assistant", "content": reply.content or None, "tool_calls": calls}
        )
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."}
            for call in reply.calls
        ]
    assert reply.content
    assert len(messages) > 1
    other = await whole(client, [*messages[:-1], messages[-1] | {"content": "Rain."}])
    assert other.content != reply.content


async def test_strict_tools_and_a_response_format_give_calls_or_an_answer_of_that_form(
    client: openai.AsyncOpenAI,
) -> None:
    answer = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": answer}}
    tools = [tool("add", SUM, strict=True)]
    kinds = set()
    for number in range(12):
        reply = await streamed(client, user(f"{number}"), tools=tools, response_format=form)
        assert_valid(reply)
        if not reply.calls:
            jsonschema.validate(json.loads(reply.content), answer)
        kinds.add(bool(reply.calls))
    assert kinds == {True, False}


async def test_a_schema_that_cannot_be_enforced_allows_any_object_unless_it_is_strict(
    client: openai.AsyncOpenAI,
) -> None:
    schema: dict[str, Any] = {"type": "object", "not": {}}
    reply = await whole(client, user("Go"), tools=[tool("f", schema)], tool_choice="required")
    assert isinstance(json.loads(reply.calls[0]["arguments"]), dict)
    with pytest.raises(openai.BadRequestError, match="not") as raised:
        await whole(client, user("Go"), tools=[tool("f", schema, strict=True)])
    assert raised.value.param == "tools[0].function.parameters"


async def test_a_response_cut_by_the_token_limit_has_finish_reason_length(
    client: openai.AsyncOpenAI,
) -> None:
    reply = await streamed(
        client, user("Go"), tools=[tool("f", LONG)], tool_choice="required", max_tokens=40
    )
    assert (len(reply.calls), reply.reasons) == (1, ["length"])
    assert reply.calls[0]["arguments"].startswith('{"lines":[')


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"tools": [{"type": "custom", "custom": {"name": "a"}}]},
            "tools[0].type",
            "only tools of type",
        ),
        ({"tools": [tool("a b", None)]}, "tools[0].function.name", "pattern"),
        ({"tools": [tool("a", None), tool("a", None)]}, "tools[1].function.name", "two functions"),
        ({"tools": [tool("a", {"type": "string"})]}, "tools[0].function.parameters", "type object"),
        ({"tools": [tool(f"f{n}", None) for n in range(129)]}, "tools", "at most 128"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "one of"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice", "a string or an object"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice.function.name",
            "no function 'b'",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "nvext": {"ignore_eos": True}},
            "ignore_eos",
            "cannot be combined",
        ),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "cannot be combined"),
        ({"functions": [{"name": "a"}]}, "functions", "use tools"),
    ],
)
async def test_an_unusable_tool_field_is_refused_by_name(
    mesh: Mesh, fields: dict[str, Any], param: str, words: str
) -> None:
    body = {"model": MODEL, "messages": user("Go."), **fields}
    response = mesh.http.post(f"{mesh.url}/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


async def test_a_model_without_a_tool_call_parser_refuses_tools(
    start: Callable[..., AbstractContextManager[Mesh]], sim_model_copy: Path
) -> None:
    with start(workers=1, worker_flags=[f"--model-path={sim_model_copy}"]) as mesh:
        async with open_sdk_client(mesh) as client:
            with pytest.raises(openai.BadRequestError, match="tool-call-parser") as raised:
                await whole(client, user("Go"))
    assert raised.value.param == "tools"


@pytest.mark.parametrize("shape", [{"workers": 3}, {"workers": 0, "prefill": 1, "decode": 3}])
async def test_calls_are_the_same_after_their_worker_died(
    start: Callable[..., AbstractContextManager[Mesh]], shape: dict[str, int]
) -> None:
    kind = "worker" if shape["workers"] else "decode"
    fields: Any = {"tools": [tool("f", LONG)], "tool_choice": "required"}
    killed: list[Service] = []
    with start(**shape, worker_flags=["--speedup=1"]) as mesh:

        def kill_in_the_middle(reply: Reply) -> None:
            if not killed and reply.calls and reply.calls[0]["arguments"].count('","') >= 20:
                (busy,) = [worker for worker in mesh.of_kind(kind) if worker.open_slots()]
                busy.kill()
                killed.append(busy)

        async with open_sdk_client(mesh) as client:
            expected = await whole(client, user("Go"), **fields)
            reply = await streamed(client, user("Go"), kill_in_the_middle, **fields)
    assert killed
    assert reply.reasons == ["tool_calls"]
    assert reply.calls_without_ids == expected.calls_without_ids
    jsonschema.validate(json.loads(reply.calls[0]["arguments"]), LONG)

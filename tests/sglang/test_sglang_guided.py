"""Guided decoding and tool calls by SGLang's grammar backend, over HTTP: JSON schemas, expressions,
choices, grammars and tools, on one worker and on a prefill/decode pair."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import jsonschema
import pytest

from tests.kit.logs import logs_on_failure
from tests.sglang.conftest import Trio
from tests.sglang.sglang_mesh import MODEL, HttpMesh

# Bounded, since a model of random weights would not end them.
_VALUES: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 6},
    {"type": "string", "enum": ["red", "green", "ünï"]},
    {"type": "string", "pattern": "^[a-z]{2}-[0-9]{3}$"},
    {"type": "integer", "minimum": 0, "maximum": 99},
    {"type": "boolean"},
    {"type": "null"},
    {"const": 7},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
]


# Any, here and below: JSON.
def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": 2}


def _schemas() -> Iterator[dict[str, Any]]:
    for value in _VALUES:
        yield _object(a=value)
        yield _object(list=_array(value))
    for one, other in product(_VALUES, _VALUES):
        yield _object(a=one, b=_object(c=other))


SCHEMAS = list(islice(_schemas(), 50))
WEATHER = _object(city={"type": "string", "maxLength": 8}, days=_VALUES[3])
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add", "parameters": _object(a=_VALUES[3])}},
]


@pytest.fixture(autouse=True)
def _logs(mesh: HttpMesh, request: pytest.FixtureRequest) -> Iterator[None]:
    with logs_on_failure(mesh, request):
        yield


@pytest.fixture(params=["one worker", "a pair"])
def placement(request: pytest.FixtureRequest, trio: Trio) -> dict[str, Any]:
    """Fields that place a request."""
    if request.param == "a pair":
        return {}
    return {"nvext": {"backend_instance_id": trio.app.instance_id}}


async def respond(mesh: HttpMesh, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "temperature": 0, "max_tokens": 300, **fields}
    body["messages"] = [{"role": "user", "content": prompt}]
    response = await mesh.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def test_fifty_schemas_give_valid_json(mesh: HttpMesh, placement: dict[str, Any]) -> None:
    assert len(SCHEMAS) == 50
    for number, schema in enumerate(SCHEMAS):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        choice = await respond(mesh, f"Prompt {number}", response_format=form, **placement)
        assert choice["finish_reason"] == "stop", (schema, choice)
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


async def test_expressions_choices_and_grammars(mesh: HttpMesh, placement: dict[str, Any]) -> None:
    async def text(**fields: Any) -> str:
        choice = await respond(mesh, "Go", **fields, **placement)
        assert choice["finish_reason"] == "stop"
        content: str = choice["message"]["content"]
        return content

    assert re.fullmatch("[A-Z]{2}-[0-9]{4}", await text(guided_regex="[A-Z]{2}-[0-9]{4}"))
    assert await text(guided_choice=["yes (1)", "no. 2"]) in ("yes (1)", "no. 2")
    assert await text(guided_grammar='root ::= "a" ("b" | "c") "d"') in ("abd", "acd")


@pytest.mark.parametrize("choice", ["required", "named", "strict"])
async def test_forced_tool_calls_are_valid(
    mesh: HttpMesh, placement: dict[str, Any], choice: str
) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice}
    if choice == "named":
        fields["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    if choice == "strict":
        strict = TOOLS[0]["function"] | {"strict": True}
        fields = {"tools": [{"type": "function", "function": strict}], "tool_choice": "required"}
    for number in range(3):
        fields["parallel_tool_calls"] = False
        result = await respond(mesh, f"Prompt {number}", **fields, **placement)
        assert result["finish_reason"] == "tool_calls", result
        (call,) = result["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        schemas = {"weather": WEATHER, "add": TOOLS[1]["function"]["parameters"]}
        jsonschema.validate(arguments, schemas[call["function"]["name"]])


async def test_tools_without_a_strict_function_leave_the_output_free(
    mesh: HttpMesh, placement: dict[str, Any]
) -> None:
    result = await respond(mesh, "Go", tools=TOOLS, max_tokens=20, **placement)
    assert result["finish_reason"] in ("length", "stop", "tool_calls")
    assert result["message"]["content"]

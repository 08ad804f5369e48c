"""Runs the cells of one client: what its users do, against a running mesh.

A cell is a function that raises if the client does not work as with OpenAI. Its result is one line
of JSON on standard output, which `tests.clients` reads. The sim's texts depend on the prompt alone,
so a text is compared with the one of a plain HTTP request.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

BASE_URL = os.environ["KVMESH_URL"]
URL = f"{BASE_URL}/v1"
MODEL = "sim"
KEY = "none"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
MAX_TOKENS = 24
ATTEMPTS = 40

T = TypeVar("T")


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    unit: Literal["celsius", "fahrenheit"]


WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CALL = {"id": "call_1", "name": "get_weather", "arguments": '{"city":"Bern","unit":"celsius"}'}
RESULT = "Sunny, 21 degrees."


def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """Returns the weather of a city."""
    Weather(city=city, unit=unit)
    return RESULT


def openai_tool(**fields: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "description": "The weather.", "parameters": WEATHER_SCHEMA}
    return {"type": "function", "function": function | fields}


def conversation(result: str = RESULT) -> list[Any]:
    """A question, a call and its result, in OpenAI's form."""
    function = {"name": CALL["name"], "arguments": CALL["arguments"]}
    return [
        {"role": "user", "content": "What is the weather in Bern?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": CALL["id"], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": CALL["id"], "content": result},
    ]


def post(path: str, **body: Any) -> Any:
    """The response to a plain HTTP request."""
    request = urllib.request.Request(
        f"{URL}{path}",
        json.dumps({"model": MODEL, **body}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def chat_text(messages: list[Any], **fields: Any) -> str:
    """The text of a chat by plain HTTP."""
    body = post("/chat/completions", messages=messages, **fields)
    content: str = body["choices"][0]["message"]["content"]
    assert content
    return content


def expect_equal(actual: object, expected: object) -> None:
    assert actual == expected, f"{actual!r} is not {expected!r}"


def expect_weather(name: str, arguments: str | Mapping[str, Any]) -> None:
    """Checks one call of get_weather."""
    expect_equal(name, "get_weather")
    Weather.model_validate(json.loads(arguments) if isinstance(arguments, str) else arguments)


def expect_vectors(vectors: list[list[float]], texts: list[str]) -> None:
    """Compares vectors with those of a plain HTTP request."""
    expected = [one["embedding"] for one in post("/embeddings", input=texts)["data"]]
    expect_equal(len(vectors), len(expected))
    for vector, other in zip(vectors, expected, strict=True):
        expect_equal(len(vector), len(other))
        assert all(abs(a - b) < 1e-5 for a, b in zip(vector, other, strict=True)), "other vectors"


def first_with(attempt: Callable[[str], T], accepts: Callable[[T], bool]) -> T:
    """The first accepted result over several prompts: with tool choice `auto` the sim calls tools
    in some of its responses."""
    for number in range(ATTEMPTS):
        result = attempt(f"What is the weather in city {number}?")
        if accepts(result):
            return result
    raise AssertionError(f"no such response to {ATTEMPTS} prompts")


def run(client: str, **cells: Callable[[], Any]) -> None:
    """Runs the cells, by feature, and prints their results. Arguments of the program: features
    that the mesh does not serve."""
    for feature, cell in cells.items():
        result = {"client": client, "feature": feature, "state": "ok", "detail": ""}
        if feature in sys.argv[1:]:
            result["state"] = "-"
        else:
            try:
                outcome = cell()
                if inspect.isawaitable(outcome):
                    asyncio.run(_wait(outcome))
            except BaseException as error:
                traceback.print_exc()
                result |= {"state": "FAIL", "detail": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(result), flush=True)


async def _wait(outcome: Any) -> None:
    await asyncio.wait_for(outcome, 60)

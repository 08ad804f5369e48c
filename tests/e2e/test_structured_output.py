"""JSON schemas and guided decoding at the door: each response has the requested form."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e.schemas import SCHEMAS
from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.sdk import open_sdk_client

pytestmark = pytest.mark.slow

# A list long enough to lose its worker in the middle.
LONG_LIST = {"type": "array", "items": {"type": "string"}, "minItems": 150, "maxItems": 150}
# Penalties would lengthen free texts.
COLOURS = LONG_LIST | {"items": {"enum": ["red", "green", "blue", "white", "black", "grey"]}}


mesh = mesh_fixture(worker_flags=["--speedup=20"])


# Any, here and below: bodies and JSON.
async def respond(client: openai.AsyncOpenAI, content: str = "Go.", **fields: Any) -> str:
    """The text of a finished response."""
    response = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], **fields
    )
    assert response.choices[0].finish_reason == "stop"
    return response.choices[0].message.content or ""


async def stream(
    client: openai.AsyncOpenAI, content: str = "Go.", **fields: Any
) -> AsyncIterator[str]:
    """The pieces of a streamed response, which must finish."""
    reasons = []
    async with await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], stream=True, **fields
    ) as chunks:
        async for chunk in chunks:
            reasons += [chunk.choices[0].finish_reason]
            if chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content
    assert [reason for reason in reasons if reason] == ["stop"]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


@pytest.mark.parametrize("name", SCHEMAS)
async def test_a_response_is_valid_under_its_json_schema_streamed_and_whole(
    client: openai.AsyncOpenAI, name: str
) -> None:
    schema = SCHEMAS[name]
    for prompt in ("One.", "Two.", "Three."):
        text = await respond(client, prompt, response_format=schema_format(schema))
        jsonschema.validate(json.loads(text), schema)
        pieces = [p async for p in stream(client, prompt, response_format=schema_format(schema))]
        assert "".join(pieces) == text


async def test_responses_under_one_schema_differ_between_prompts(
    client: openai.AsyncOpenAI,
) -> None:
    form = schema_format(SCHEMAS["person"])
    assert len({await respond(client, f"Prompt {n}", response_format=form) for n in range(8)}) > 4


async def test_json_object_returns_an_object(client: openai.AsyncOpenAI) -> None:
    for number in range(8):
        text = await respond(client, f"{number}", response_format={"type": "json_object"})
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("place", ["top level", "nvext"])
async def test_guided_fields_constrain_the_text(client: openai.AsyncOpenAI, place: str) -> None:
    async def guided(**fields: Any) -> str:
        return await respond(
            client, extra_body=fields if place == "top level" else {"nvext": fields}
        )

    assert await guided(guided_choice=["yes", "no", "may be"]) in ("yes", "no", "may be")
    assert re.fullmatch(r"[A-Z]{2}-[0-9]{4}", await guided(guided_regex="[A-Z]{2}-[0-9]{4}"))
    assert re.fullmatch("a+b", await guided(guided_grammar='root ::= "a"+ "b"'))
    assert isinstance(json.loads(await guided(guided_json={"type": "array"})), list)
    spaced = await guided(guided_json=SCHEMAS["person"], guided_whitespace_pattern="[ ]")
    jsonschema.validate(json.loads(spaced), SCHEMAS["person"])
    assert " :" in spaced or ": " in spaced


async def test_completions_take_guided_fields(client: openai.AsyncOpenAI) -> None:
    response = await client.completions.create(
        model=MODEL, prompt="Go", max_tokens=50, extra_body={"guided_regex": "x{3}"}
    )
    assert (response.choices[0].text, response.choices[0].finish_reason) == ("xxx", "stop")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": schema_format({"type": "strin"})},
            "response_format.json_schema.schema",
            "Invalid type",
        ),
        (
            {"response_format": schema_format({"not": {}})},
            "response_format.json_schema.schema",
            '"not"',
        ),
        (
            {
                "response_format": schema_format(
                    {"type": "object", "x-guidance": {"lenient": True}, "not": {}}
                )
            },
            "response_format.json_schema.schema",
            '"not"',
        ),
        (
            {"response_format": schema_format({"enum": ["x" * 300_000]})},
            "response_format.json_schema.schema",
            "/262144 bytes",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "one of"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
            "response_format.json_schema",
            "json_schema",
        ),
        ({"guided_regex": "("}, "guided_regex", "regex parse error"),
        ({"guided_grammar": "x"}, "guided_grammar", "::="),
        ({"guided_choice": []}, "guided_choice", "1 or more"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "cannot be combined"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
            "cannot be combined",
        ),
        (
            {"guided_regex": "a", "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
            "JSON",
        ),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "cannot be combined"),
        ({"guided_regex": "a", "nvext": {"ignore_eos": True}}, "ignore_eos", "cannot be combined"),
    ],
)
async def test_an_unusable_constraint_is_refused_by_name_before_a_worker_is_chosen(
    mesh: Mesh, fields: dict[str, Any], param: str, words: str
) -> None:
    accepted = [worker.counters().get("accepted", 0) for worker in mesh.workers]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Go."}], **fields}
    response = mesh.http.post(f"{mesh.url}/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]
    assert [worker.counters().get("accepted", 0) for worker in mesh.workers] == accepted


async def test_a_constraint_that_becomes_too_complex_is_an_error_that_names_it(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError, match="too complex") as raised:
        await respond(client, extra_body={"guided_regex": "(a{1000}){1000}"})
    assert raised.value.param == "guided_decoding"


PENALTIES = {
    "presence_penalty": 1.0,
    "frequency_penalty": 2.0,
    "extra_body": {"repetition_penalty": 1.2},
}


async def _text_with_a_killed_worker(mesh: Mesh, kind: str, **fields: Any) -> str:
    """The text of a stream whose worker is killed in the middle."""
    killed, text = False, ""
    async with open_sdk_client(mesh) as client:
        async for piece in stream(client, "A list.", **fields):
            text += piece
            if not killed and text.count('",') >= 20:
                killed = True
                (busy,) = [worker for worker in mesh.of_kind(kind) if worker.open_slots()]
                busy.kill()
    assert killed
    return text


@pytest.mark.parametrize("shape", [{"workers": 3}, {"workers": 0, "prefill": 1, "decode": 3}])
async def test_a_constrained_response_is_the_same_after_its_worker_died(
    start: Callable[..., AbstractContextManager[Mesh]], shape: dict[str, int]
) -> None:
    kind = "worker" if shape["workers"] else "decode"
    form = {"response_format": schema_format(LONG_LIST)}
    with start(**shape, worker_flags=["--speedup=1"]) as mesh:
        async with open_sdk_client(mesh) as client:
            whole = await respond(client, "A list.", **form)
        assert await _text_with_a_killed_worker(mesh, kind, **form) == whole
        jsonschema.validate(json.loads(whole), LONG_LIST)


async def test_a_penalised_response_is_the_same_after_its_worker_died(
    start: Callable[..., AbstractContextManager[Mesh]],
) -> None:
    form = {"response_format": schema_format(COLOURS)}
    with start(workers=2, worker_flags=["--speedup=4"]) as mesh:
        async with open_sdk_client(mesh) as client:
            whole = await respond(client, "A list.", **form, **PENALTIES)
            assert await respond(client, "A list.", **form) != whole, "penalties have an effect"
        assert await _text_with_a_killed_worker(mesh, "worker", **form, **PENALTIES) == whole
        jsonschema.validate(json.loads(whole), COLOURS)

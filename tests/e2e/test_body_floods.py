"""Large bodies of many small values: they are refused, and other streams go on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frontend_svc.openai.body.body_size import CONTAINERS_MAX
from tests.e2e.paced_streams import GAP_MAX_S, MESSAGE, paced_streams, post_beside
from tests.kit.processes import MODEL, Mesh, mesh_fixture

pytestmark = pytest.mark.slow

MEGABYTE = 1 << 20
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# Any, here and below: JSON.
Json = Any


def repeated(value: Json, size: int) -> list[Json]:
    """A list of copies that takes `size` bytes as JSON."""
    return [value] * (size // (len(json.dumps(value, separators=(",", ":"))) + 1))


def chat(messages: list[Json], **fields: Json) -> Json:
    return {"model": MODEL, "messages": messages, "max_tokens": 4, **fields}


# Name -> path, body, `param` of the error; a body is as large as many clients may send.
FLOODS: dict[str, tuple[str, Json, str | None]] = {
    "messages": ("/v1/chat/completions", chat(repeated(MESSAGE, 8 * MEGABYTE)), None),
    "messages within the total": (
        "/v1/chat/completions",
        chat([MESSAGE] * (CONTAINERS_MAX - 100)),
        "messages",
    ),
    "parts": (
        "/v1/chat/completions",
        chat([{"role": "user", "content": [{"type": "text", "text": "x"}] * 16_000}]),
        "messages[0].content",
    ),
    "calls": (
        "/v1/chat/completions",
        chat([{"role": "assistant", "tool_calls": [CALL] * 10_000}]),
        "messages[0].tool_calls",
    ),
    "enum of a tool": (
        "/v1/chat/completions",
        chat(
            [MESSAGE],
            tools=[
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"enum": repeated("", 8 * MEGABYTE)}},
                }
            ],
        ),
        None,
    ),
    "long messages": (
        "/v1/chat/completions",
        chat([{"role": "user", "content": "able about " * 100}] * 4000),
        "messages",
    ),
    "prompts": (
        "/v1/completions",
        {"model": MODEL, "prompt": repeated("x", 8 * MEGABYTE)},
        None,
    ),
    "token ids": (
        "/v1/completions",
        {"model": MODEL, "prompt": repeated(1, 8 * MEGABYTE)},
        None,
    ),
    "messages of /v1/messages": (
        "/v1/messages",
        chat(repeated(MESSAGE, 8 * MEGABYTE)),
        None,
    ),
    "blocks": (
        "/v1/messages",
        chat([{"role": "user", "content": [{"type": "text", "text": "x"}] * 16_000}]),
        "messages[0].content",
    ),
    "items": ("/v1/responses", {"model": MODEL, "input": repeated(MESSAGE, 8 * MEGABYTE)}, None),
    "items within the total": (
        "/v1/responses",
        {"model": MODEL, "input": [MESSAGE] * (CONTAINERS_MAX - 100)},
        "input",
    ),
    "include": (
        "/v1/responses",
        {"model": MODEL, "input": "x", "include": [1] * 100_000},
        "include[0]",
    ),
    "inputs": ("/v1/embeddings", {"model": MODEL, "input": repeated("x", 8 * MEGABYTE)}, None),
    "tokenize": ("/tokenize", {"model": MODEL, "messages": repeated(MESSAGE, 8 * MEGABYTE)}, None),
    "count_tokens": (
        "/v1/messages/count_tokens",
        {"model": MODEL, "messages": repeated(MESSAGE, 8 * MEGABYTE)},
        None,
    ),
    "lists": ("/detokenize", {"model": MODEL, "tokens": repeated([], 8 * MEGABYTE)}, None),
}


# Without an explicit speed, the sim paces its tokens as a GPU does.
mesh = mesh_fixture(workers=1)


def test_streams_go_on_while_bodies_of_many_small_values_are_refused(mesh: Mesh) -> None:
    bodies = {
        name: (path, json.dumps(body, separators=(",", ":")).encode(), param)
        for name, (path, body, param) in FLOODS.items()
    }
    failures = []
    with paced_streams(mesh) as streams:
        for name, (path, body, param) in bodies.items():
            status, value, seconds, gap_s = post_beside(streams, mesh.url, path, body)
            error = value.get("error", {})
            named = error.get("details", error).get("param")
            size = f"{len(body) / 1e6:5.1f} MB"
            print(f"{name:26} {size}  {status}  {seconds:5.2f} s  gap {gap_s:5.3f}")
            if (status, named) != (400, param) or gap_s > GAP_MAX_S:
                failures.append((name, status, value, gap_s))
    assert not failures

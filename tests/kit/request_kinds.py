"""One request of each kind that the frontend serves, and the content of its response.

The content is what two correct responses to the same body have in common: texts, calls, finish
reasons and counts, without ids and times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.kit.processes import MODEL

# Any, here and below: JSON.
Json = Any

_PLACE: Final[dict[str, Json]] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
_FUNCTION: Final = {"name": "look", "description": "Looks.", "parameters": _PLACE}
_TOKENS: Final = 12


@dataclass(frozen=True, slots=True)
class KindRequest:
    """One request. path: below /v1."""

    kind: str
    path: str
    body: dict[str, Json]


def requests_of(number: int) -> list[KindRequest]:
    """Returns a request of each kind. number: makes their prompts different."""
    text = f"Request {number} of the mixed load"
    chat = {"messages": [{"role": "user", "content": text}]}
    tools = {"tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required"}
    schema = {"name": "place", "schema": _PLACE, "strict": True}
    usage = {"stream_options": {"include_usage": True}}
    kinds: dict[str, tuple[str, dict[str, Json]]] = {
        "text": ("completions", {"prompt": text, "max_tokens": _TOKENS}),
        "token-ids": ("completions", {"prompt": [300 + number, 301, 302], "max_tokens": _TOKENS}),
        "chat": ("chat/completions", {**chat, "max_tokens": _TOKENS}),
        "choices": ("completions", {"prompt": text, "max_tokens": 8, "n": 4, "seed": 7}),
        "logprobs": ("completions", {"prompt": text, "max_tokens": 4, "logprobs": 2}),
        "stop": ("completions", {"prompt": text, "max_tokens": 40, "stop": ["a", "e"]}),
        "tools": ("chat/completions", {**chat, **tools, "max_tokens": 200}),
        "schema": (
            "chat/completions",
            {**chat, "response_format": {"type": "json_schema", "json_schema": schema}},
        ),
        "embedding": ("embeddings", {"input": [text, "second"], "encoding_format": "base64"}),
        "response": ("responses", {"input": text, "max_output_tokens": _TOKENS}),
        "message": ("messages", {**chat, "max_tokens": _TOKENS}),
    }
    requests = []
    for kind, (path, body) in kinds.items():
        body = {"model": MODEL, **body}
        requests.append(KindRequest(kind, path, body))
        if path != "embeddings":
            options = usage if path.endswith("completions") else {}
            requests.append(
                KindRequest(f"{kind}-stream", path, {**body, "stream": True, **options})
            )
    return requests


def content_of(path: str, text: str) -> Json:
    """Returns the content of a response body, whole or streamed. Raises AssertionError if it is an
    error, or incomplete."""
    objects = (
        list(_events(text)) if text.startswith(("data:", "event:", ":")) else [json.loads(text)]
    )
    for value in objects:
        assert value.get("error") is None, text
    match path:
        case "embeddings":
            return [row["embedding"] for row in objects[0]["data"]]
        case "responses":
            return _response_content(objects[-1].get("response", objects[-1]))
        case "messages":
            return _message_content(objects)
        case _:
            return _completion_content(objects)


def _events(text: str) -> Iterator[Json]:
    lines = [
        line.removeprefix("data:").strip() for line in text.splitlines() if line[:5] == "data:"
    ]
    if lines[-1] == "[DONE]":
        lines.pop()
    yield from map(json.loads, lines)


def _completion_content(objects: list[Json]) -> Json:
    choices: dict[int, dict[str, Json]] = {}
    for value in objects:
        for row in value["choices"]:
            choice = choices.setdefault(
                row["index"], {"text": "", "calls": {}, "end": None, "logprobs": []}
            )
            part = row.get("message") or row.get("delta") or row
            choice["text"] += part.get("content") or part.get("text") or ""
            for position, call in enumerate(part.get("tool_calls") or ()):
                function = choice["calls"].setdefault(call.get("index", position), ["", ""])
                function[0] += call["function"].get("name") or ""
                function[1] += call["function"].get("arguments") or ""
            choice["logprobs"] += (row.get("logprobs") or {}).get("token_logprobs") or []
            choice["end"] = row["finish_reason"] or choice["end"]
    assert all(choice["end"] for choice in choices.values()), "a choice has no finish reason"
    counts = objects[-1]["usage"]
    return [choices, counts["prompt_tokens"], counts["completion_tokens"]]


def _response_content(response: Json) -> Json:
    items = [
        [part.get("text") for part in item.get("content") or ()] or item.get("arguments")
        for item in response["output"]
    ]
    counts = response["usage"]
    assert response["status"] in ("completed", "incomplete"), response
    return [response["status"], items, counts["input_tokens"], counts["output_tokens"]]


def _message_content(objects: list[Json]) -> Json:
    blocks: list[Json] = []
    end, tokens = None, 0
    for value in objects:
        match value["type"]:
            case "message":
                blocks = [[block["type"], block.get("text", "")] for block in value["content"]]
                end, tokens = value["stop_reason"], value["usage"]["output_tokens"]
            case "content_block_start":
                blocks.append([value["content_block"]["type"], ""])
            case "content_block_delta":
                blocks[value["index"]][1] += value["delta"].get("text", "")
            case "message_delta":
                end, tokens = value["delta"]["stop_reason"], value["usage"]["output_tokens"]
    assert end is not None, "the message has no stop reason"
    return [blocks, end, tokens]

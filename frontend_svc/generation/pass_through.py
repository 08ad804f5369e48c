"""Pass-through bodies, which go to a worker unchanged, and the chunks of the response (pure).

The gateway reads only `model`, `stream` and `prompt_cache_key` of such a body; the worker validates
the rest. A worker
always sends OpenAI chunks. For a client that did not request a stream, `merge_chunks` merges them
into one object.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from common.errors import InvalidRequest, WorkerLost
from common.request.preprocessed import CompletionUsage
from frontend_svc.openai.body.nvext import Nvext
from frontend_svc.openai.body.parsing import parse_json_object
from frontend_svc.openai.output.completion_objects import usage_object
from frontend_svc.openai.output.sse import ChunkKind

# Texts that are streamed in pieces; any other string arrives complete.
_STREAMED_TEXT_FIELDS = frozenset({"content", "reasoning_content", "refusal", "arguments", "text"})

# Any: JSON from a worker.
Json = Any


@dataclass(frozen=True, slots=True)
class PassThroughRequest:
    """A pass-through body: the fields that the gateway reads, and its bytes. nvext: hints of the
    request's headers; the worker reads those of the body. cache_key: `prompt_cache_key`."""

    model: str
    is_stream: bool
    json: bytes
    cache_key: str | None = None
    nvext: Nvext | None = None


def read_body(raw: bytes) -> PassThroughRequest:
    """Parses a body. Raises InvalidRequest if it is not a JSON object or names no model."""
    body = parse_json_object(raw)
    model, stream = body.get("model"), body.get("stream")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("'model' must be a non-empty string.", "model")
    if not isinstance(stream, bool | None):
        raise InvalidRequest("'stream' must be true or false.", "stream")
    cache_key = body.get("prompt_cache_key")
    return PassThroughRequest(
        model, stream is True, raw, cache_key if isinstance(cache_key, str) else None
    )


def with_model(body: PassThroughRequest, model: str) -> PassThroughRequest:
    """Returns the body for another model."""
    value = parse_json_object(body.json)
    return replace(body, model=model, json=orjson.dumps({**value, "model": model}))


def merge_chunks(kind: ChunkKind, chunks: Iterable[bytes], usage: CompletionUsage | None) -> bytes:
    """Merges chunks into a whole response as JSON. usage: counts of the engine, used if no chunk
    has any. Raises WorkerLost for an invalid chunk."""
    response: dict[str, Json] = {}
    choices: dict[int, dict[str, Json]] = {}
    for raw in chunks:
        try:
            chunk = orjson.loads(raw)
            for choice in chunk.pop("choices", ()):
                _merge_delta(choices.setdefault(choice["index"], {}), choice)
            response |= {name: value for name, value in chunk.items() if value is not None}
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            text = f"the worker sent an invalid chunk: {error!r}"
            raise WorkerLost(text, retryable=False, reason="BAD_CHUNK") from error
    if kind is ChunkKind.CHAT:
        response["object"] = "chat.completion"
        for choice in choices.values():
            choice["message"] = choice.pop("delta", {})
    response["choices"] = [choices[index] for index in sorted(choices)]
    if usage is not None:
        response.setdefault("usage", usage_object(usage))
    return orjson.dumps(response)


def without_hits(chunk: bytes) -> bytes:
    """Returns the chunk without `usage.prompt_tokens_details`, where engines report cache hits."""
    if b"prompt_tokens_details" not in chunk:
        return chunk
    try:
        value = orjson.loads(chunk)
        del value["usage"]["prompt_tokens_details"]
    except (orjson.JSONDecodeError, KeyError, TypeError):  # it has no such field
        return chunk
    return orjson.dumps(value)


def _merge_delta(target: dict[str, Json], piece: dict[str, Json]) -> None:
    for name, value in piece.items():
        previous = target.get(name)
        if value is None:
            target.setdefault(name, None)
        elif isinstance(value, list):  # merged by `index` from the first piece
            target[name] = previous or []
            _merge_list(target[name], value)
        elif previous is None:
            target[name] = value
        elif isinstance(value, dict):
            _merge_delta(previous, value)
        elif name in _STREAMED_TEXT_FIELDS:
            target[name] = previous + value
        else:
            target[name] = value


def _merge_list(target: list[Json], pieces: list[Json]) -> None:
    """Merges entries with the same `index` (tool calls) and appends others (logprobs)."""
    for piece in pieces:
        if not isinstance(piece, dict) or "index" not in piece:
            target.append(piece)
            continue
        existing = next((entry for entry in target if entry.get("index") == piece["index"]), None)
        if existing is None:
            target.append(dict(piece))
        else:
            _merge_delta(existing, piece)

"""Bodies that go to a worker as they are, and the chunks that come back (pure).

Of such a body the gateway reads which model it names and whether to stream; all else is the
worker's to honour or refuse. A worker always answers in OpenAI chunks; for a client that did not
ask for a stream they are folded into one object.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from common.errors import InvalidRequest, WorkerLost
from common.request.preprocessed import CompletionUsage
from frontend_svc.core.openai.bodies import Nvext, usage_object
from frontend_svc.core.openai.sse import ChunkKind

# Texts that come in pieces; any other string is whole when it comes.
_STREAMED_TEXT_FIELDS = frozenset({"content", "reasoning_content", "refusal", "arguments", "text"})

# Any: what a worker says is JSON of its own making.
Json = Any


@dataclass(frozen=True, slots=True)
class PassThroughRequest:
    """A body of a pass-through model: what the gateway needs of it, and its bytes.

    nvext: what the request's headers ask for; what the body says of the same is for the worker.
    """

    model: str
    is_stream: bool
    json: bytes
    nvext: Nvext | None = None


def read_body(raw: bytes) -> PassThroughRequest:
    """Raises InvalidRequest for what is no JSON object, or names no model."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.")
    model, stream = body.get("model"), body.get("stream")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("'model' must be a string that names a model.", "model")
    if not isinstance(stream, bool | None):
        raise InvalidRequest("'stream' must be true or false.", "stream")
    return PassThroughRequest(model, stream is True, raw)


def merge_chunks(kind: ChunkKind, chunks: Iterable[bytes], usage: CompletionUsage | None) -> bytes:
    """The whole answer that chunks make up, as JSON.

    usage: as the engine counted, for an answer whose chunks do not say. Raises WorkerLost when a
    chunk is no chunk.
    """
    response: dict[str, Json] = {}
    choices: dict[int, dict[str, Json]] = {}
    for raw in chunks:
        try:
            chunk = orjson.loads(raw)
            for choice in chunk.pop("choices", ()):
                _merge_delta(choices.setdefault(choice["index"], {}), choice)
            response |= {name: value for name, value in chunk.items() if value is not None}
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise WorkerLost(
                f"the worker's answer has a chunk that is none: {error!r}",
                retryable=False,
                reason="BAD_CHUNK",
            ) from error
    if kind is ChunkKind.CHAT:
        response["object"] = "chat.completion"
        for choice in choices.values():
            choice["message"] = choice.pop("delta", {})
    response["choices"] = [choices[index] for index in sorted(choices)]
    if usage is not None:
        response.setdefault("usage", usage_object(usage))
    return orjson.dumps(response)


def _merge_delta(target: dict[str, Json], piece: dict[str, Json]) -> None:
    """Adds a piece of an object to what is there of it."""
    for name, value in piece.items():
        previous = target.get(name)
        if value is None:
            target.setdefault(name, None)
        elif previous is None:
            target[name] = _first_piece(value)
        elif isinstance(value, dict):
            _merge_delta(previous, value)
        elif isinstance(value, list):
            _merge_list(previous, value)
        elif name in _STREAMED_TEXT_FIELDS:
            target[name] = previous + value
        else:
            target[name] = value


def _first_piece(value: Json) -> Json:
    """A first piece; its lists are folded by `index` from the first on."""
    if not isinstance(value, list):
        return value
    merged: list[Json] = []
    _merge_list(merged, value)
    return merged


def _merge_list(target: list[Json], pieces: list[Json]) -> None:
    """Entries with an index (tool calls) are pieces of one; others (logprobs) follow each other."""
    for piece in pieces:
        if not isinstance(piece, dict) or "index" not in piece:
            target.append(piece)
            continue
        existing = next((entry for entry in target if entry.get("index") == piece["index"]), None)
        if existing is None:
            target.append(dict(piece))
        else:
            _merge_delta(existing, piece)

"""JSON of whole responses (pure): completions, models, usage. Ids and times are arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import orjson

from common.request.preprocessed import CompletionUsage, to_json_value

OpenAIFinishReason = Literal["stop", "length", "content_filter", "tool_calls"]


def chat_completion(
    response_id: str,
    model: str,
    created: int,
    content: str,
    finish_reason: OpenAIFinishReason,
    usage: CompletionUsage,
) -> bytes:
    """A `chat.completion` as JSON; response_id: `chatcmpl-<uuid>`; created: Unix seconds."""
    message = {"role": "assistant", "content": content, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return _completion_json("chat.completion", response_id, model, created, choice, usage)


def text_completion(
    response_id: str,
    model: str,
    created: int,
    text: str,
    finish_reason: OpenAIFinishReason,
    usage: CompletionUsage,
) -> bytes:
    """A `text_completion` as JSON; response_id: `cmpl-<uuid>`; created: Unix seconds."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return _completion_json("text_completion", response_id, model, created, choice, usage)


def _completion_json(
    kind: str,
    response_id: str,
    model: str,
    created: int,
    choice: dict[str, object],
    usage: CompletionUsage,
) -> bytes:
    return orjson.dumps(
        {
            "id": response_id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": None,
            "choices": [choice],
            "usage": usage_object(usage),
        }
    )


def usage_object(usage: CompletionUsage) -> dict[str, object]:
    """OpenAI's `usage` object, without details that were not reported."""
    value: dict[str, object] = to_json_value(usage)
    return value


def model_object(
    model: str, created: int, owned_by: str, *, base: str | None = None
) -> dict[str, object]:
    """One entry of `/v1/models`, and the response of `/v1/models/{model}`. base: base model of an
    adapter, sent as `root` and `parent`."""
    value: dict[str, object] = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": owned_by,
    }
    return value if base is None else value | {"root": base, "parent": base}


def model_list(models: Iterable[dict[str, object]]) -> bytes:
    return orjson.dumps({"object": "list", "data": list(models)})

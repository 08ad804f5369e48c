"""JSON of whole responses (pure): completions, models, usage. Ids and times are arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import orjson

from common.request.preprocessed import CompletionUsage, to_json_value

OpenAIFinishReason = Literal["stop", "length", "content_filter", "tool_calls"]


def completion_json(
    response_id: str,
    model: str,
    created: int,
    text: str | dict[str, Any],
    finish_reason: OpenAIFinishReason,
    usage: CompletionUsage,
    *,
    is_chat: bool,
) -> bytes:
    """A `chat.completion` or a `text_completion`. response_id: `chatcmpl-<uuid>` or `cmpl-<uuid>`;
    text: of the response, or
    the message of a chat. created: Unix seconds."""
    message = text
    if isinstance(text, str):
        message = {"role": "assistant", "content": text, "refusal": None}
    content: dict[str, object] = {"message": message} if is_chat else {"text": text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
    return orjson.dumps(
        {
            "id": response_id,
            "object": "chat.completion" if is_chat else "text_completion",
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

"""JSON of whole responses (pure): completions, models, usage. Ids and times are arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import orjson

from common.request.preprocessed import CompletionUsage, to_json_value
from frontend_svc.openai.output.chat_message import message
from frontend_svc.openai.output.logprobs import logprobs_object
from frontend_svc.text.api_format import ChoiceResult
from frontend_svc.tools.deltas import Content


def completion_json(
    response_id: str,
    model: str,
    created: int,
    choices: Sequence[ChoiceResult],
    usage: CompletionUsage,
    *,
    is_chat: bool,
) -> bytes:
    """Returns a `chat.completion` or a `text_completion`. response_id: `chatcmpl-<id>` or
    `cmpl-<id>`.
    created: Unix seconds."""
    return orjson.dumps(
        {
            "id": response_id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": None,
            "choices": [
                {
                    "index": index,
                    **({"message": message(choice.deltas)} if is_chat else {"text": _text(choice)}),
                    "logprobs": logprobs_object(choice.tokens, is_chat=is_chat),
                    "finish_reason": choice.end.reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage_object(usage),
            **({"nvext": choices[0].end.nvext} if choices[0].end.nvext else {}),
        }
    )


def _text(choice: ChoiceResult) -> str:
    return "".join([delta.text for delta in choice.deltas if isinstance(delta, Content)])


def usage_object(usage: CompletionUsage) -> dict[str, object]:
    """Returns OpenAI's `usage` object, without details that were not reported."""
    value: dict[str, object] = to_json_value(usage)
    return value


def model_object(
    model: str,
    created: int,
    owned_by: str,
    *,
    base: str | None = None,
    root: str | None = None,
    max_model_len: int | None = None,
) -> dict[str, object]:
    """Returns one entry of `/v1/models`, and the response of `/v1/models/{model}`. base: base
    model of an adapter, sent as `root` and `parent`. root: the model of an alias. max_model_len:
    limit of prompt and output tokens together; None: unknown."""
    value: dict[str, object] = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": owned_by,
    }
    if base is not None or root is not None:
        value |= {"root": root or base, "parent": base}
    return value if max_model_len is None else value | {"max_model_len": max_model_len}


def model_list(models: Iterable[dict[str, object]]) -> bytes:
    return orjson.dumps({"object": "list", "data": list(models)})

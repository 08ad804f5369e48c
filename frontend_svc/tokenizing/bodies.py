"""Bodies of `/tokenize` and `/detokenize`, as in vLLM, and their responses (pure).

A body of `/tokenize` has a `prompt` (a text), or it is the body of a chat request: with the same
messages, tools and `chat_template_kwargs` it has the token ids of that request. Both take `model`
and `return_token_strs`; `add_special_tokens` (default: true) belongs to a prompt,
`add_generation_prompt` (default: true) to messages. Other fields of a chat request are checked, and
have no effect on its token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import Field, ValidationError

from common.errors import InvalidRequest
from frontend_svc.openai.body.fields import MODEL_CHARS_MAX, U32, StrictModel, refuse
from frontend_svc.openai.body.parsing import parse_chat, parse_json_object
from frontend_svc.openai.body.schema import ChatRequest
from frontend_svc.openai.body.validation_errors import (
    INVALID_VALUE,
    invalid_value,
    missing_parameter,
)

# Token ids of one body of `/detokenize`.
TOKENS_MAX = 1 << 20

_Model = Annotated[str, Field(min_length=1, max_length=MODEL_CHARS_MAX)]

R = TypeVar("R", bound=StrictModel)


class TokenizePromptRequest(StrictModel):
    """A body with a text."""

    model: _Model
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class _ChatOptions(StrictModel):
    """Fields of a body with messages that a chat request does not have."""

    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    add_special_tokens: Annotated[
        object, refuse("the chat template writes the special tokens", False)
    ] = None
    continue_final_message: Annotated[object, refuse("this server has no such feature", False)] = (
        None
    )


class DetokenizeRequest(StrictModel):
    """A body of `/detokenize`."""

    model: _Model
    tokens: Annotated[list[U32], Field(max_length=TOKENS_MAX, fail_fast=True)]

    @property
    def is_stream(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """What to tokenize: a text, or a conversation (its `text` is "")."""

    model: str
    text: str = ""
    special_tokens: bool = True
    chat: ChatRequest | None = None
    add_generation_prompt: bool = True
    with_strings: bool = False
    is_stream: bool = False


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Returns a validated request. Raises InvalidRequest with the path of the first invalid field,
    and Unsupported for a known field or value that the server does not support."""
    value = parse_json_object(body)
    if "messages" not in value:
        if "prompt" not in value:
            raise missing_parameter("prompt")
        prompt = _validate(TokenizePromptRequest, value)
        return TokenizeRequest(
            prompt.model,
            prompt.prompt,
            special_tokens=prompt.add_special_tokens is not False,
            with_strings=prompt.return_token_strs is True,
        )
    if "prompt" in value:
        text = "Invalid 'prompt': it cannot be combined with 'messages'."
        raise InvalidRequest(text, "prompt", reason=INVALID_VALUE)
    names = _ChatOptions.model_fields
    options = _validate(_ChatOptions, {k: v for k, v in value.items() if k in names})
    chat = parse_chat(orjson.dumps({k: v for k, v in value.items() if k not in names}))
    return TokenizeRequest(
        chat.model,
        chat=chat,
        add_generation_prompt=options.add_generation_prompt is not False,
        with_strings=options.return_token_strs is True,
    )


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """As `parse_tokenize`."""
    return _validate(DetokenizeRequest, parse_json_object(body))


# Any: JSON.
def _validate(model: type[R], value: dict[str, Any]) -> R:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_value(error) from None


def tokenize_json(
    token_ids: Sequence[int],
    context_length: int | None,
    token_text: Callable[[int], str | None] | None,
) -> bytes:
    """Returns the response of `/tokenize`. context_length: None if unknown. token_text: the
    token of an id as the vocabulary writes it, None for unknown ones; None: without strings."""
    return orjson.dumps(
        {
            "count": len(token_ids),
            "max_model_len": context_length,
            "tokens": list(token_ids),
            "token_strs": None if token_text is None else list(map(token_text, token_ids)),
        }
    )


def detokenize_json(text: str) -> bytes:
    return orjson.dumps({"prompt": text})


def check_tokens(request: DetokenizeRequest, vocab_size: int) -> None:
    """Raises InvalidRequest for a token id that is not below `vocab_size`."""
    for index, token in enumerate(request.tokens):
        if token >= vocab_size:
            name = f"tokens[{index}]"
            text = f"Invalid '{name}': {token} is not in the vocabulary of {vocab_size}."
            raise InvalidRequest(text, name, reason=INVALID_VALUE)

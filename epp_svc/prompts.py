"""The prompt of a request, as the server that gets the body renders and tokenizes it.

Chat completions and completions are rendered and tokenized by the code of the frontend, from the
card of the model. Bodies of the Responses and the Messages API become chats by its translation.
Only the fields that make the prompt are read, so that a field which our API does not have costs no
cache hit. A body that cannot be read so is placed by load alone, and the server responds to it: a
picker refuses no body for its content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from common.errors import InvalidRequest, MeshError, Unavailable, UnknownModel, Unsupported
from common.request.preprocessed import TokenIds
from frontend_svc.anthropic.translation import parse_count
from frontend_svc.generation.api import off_loop
from frontend_svc.generation.tokenization import tokenize
from frontend_svc.models.catalog import ModelCatalog
from frontend_svc.models.model_watch import Table
from frontend_svc.models.served_model import ServedModel
from frontend_svc.openai.body.parsing import parse_chat, parse_completion, parse_json_object
from frontend_svc.openai.body.schema import ChatRequest, CompletionRequest
from frontend_svc.responses.translation import input_items, parse_responses, references, to_chat

# The reasons of a body without a prompt of these APIs, and of one whose server has stored a part of
# the conversation.
NO_PROMPT: Final = "NO_PROMPT"
STORED_CONVERSATION: Final = "STORED_CONVERSATION"


def _parse_responses(body: bytes) -> ChatRequest:
    """Returns the chat of a body of `/v1/responses`. Raises InvalidRequest."""
    request = parse_responses(body)
    earlier = (request.previous_response_id, request.named_conversation)
    if earlier != (None, None) or references(request):
        text = "the server has a part of the conversation"
        raise InvalidRequest(text, "input", reason=STORED_CONVERSATION)
    return to_chat(request, input_items(request, {}))


@dataclass(frozen=True, slots=True)
class _Prompt:
    """How the prompt of one API is read. fields: those that make it."""

    fields: Sequence[str]
    parse: Callable[[bytes], ChatRequest | CompletionRequest]
    """Raises InvalidRequest."""


# By the end of the path; a longer end comes first.
_PROMPTS: Final[Mapping[str, _Prompt]] = {
    "/chat/completions": _Prompt(
        (
            *("model", "messages", "tools", "tool_choice", "reasoning_effort"),
            *("chat_template_kwargs", "cache_salt"),
        ),
        parse_chat,
    ),
    "/completions": _Prompt(("model", "prompt", "cache_salt"), parse_completion),
    "/responses": _Prompt(
        (
            *("model", "input", "instructions", "previous_response_id", "conversation"),
            *("tools", "tool_choice", "reasoning", "chat_template_kwargs"),
        ),
        _parse_responses,
    ),
    "/messages": _Prompt(
        ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"),
        parse_count,
    ),
}


@dataclass(frozen=True, slots=True)
class ReadBody:
    """What a picker reads of a body."""

    model: str
    """As the client names it; "": the body names none."""

    # Any: JSON.
    value: Mapping[str, Any] | None
    """None: it is no JSON object."""

    request: ChatRequest | CompletionRequest | None = None
    """None: it has no prompt that can be read."""

    unread: str = ""
    """Why it has none."""

    def with_model(self, model: str) -> bytes:
        """Returns the body with another model."""
        return orjson.dumps({**(self.value or {}), "model": model})


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompts of a body. first: token ids of the first one; None: unknown. total: of all."""

    first: TokenIds | None
    total: int
    unread: str = ""
    """Why they are unknown."""


async def read_body(raw: bytes, path: str) -> ReadBody:
    """Returns what a body states; it never raises a MeshError. path: with or without a query."""
    return await off_loop(len(raw), _read_body, raw, path)


def _read_body(raw: bytes, path: str) -> ReadBody:
    route = path.partition("?")[0]
    prompt = next((one for end, one in _PROMPTS.items() if route.endswith(end)), None)
    try:
        value = parse_json_object(raw)
    except InvalidRequest as error:
        return ReadBody("", None, unread=error.reason if raw else NO_PROMPT)
    model = value.get("model")
    model = model if isinstance(model, str) else ""
    if prompt is None:
        return ReadBody(model, value, unread=NO_PROMPT)
    part = orjson.dumps({name: value[name] for name in prompt.fields if name in value})
    try:
        request = prompt.parse(part)
    except InvalidRequest as error:
        return ReadBody(model, value, unread=error.reason)
    return ReadBody(model, value, request)


def find_model(models: ModelCatalog, name: str) -> str:
    """Returns the name of the model or adapter that serves a request; "": the only one there is.

    Raises InvalidRequest without a name among several models, UnknownModel, Unavailable.
    """
    served = models.names()
    if not name:
        if not served:
            raise Unavailable("no model is served at the moment", 1.0)
        if len(served) > 1:
            text = "The request names no model, and several are served."
            raise InvalidRequest(text, "model")
        return next(iter(served))
    name = models.resolve(name)
    if name in served:
        return name
    try:
        return models.get(name).name
    except Unsupported as error:
        raise UnknownModel(name) from error


def tokenized_model(models: ModelCatalog, name: str, body: ReadBody) -> ServedModel | None:
    """Returns the model that tokenizes a body; None if its server does that alone."""
    if body.request is None:
        return None
    table: Table = "chat" if isinstance(body.request, ChatRequest) else "completions"
    try:
        return models.get_for(name, table)
    except MeshError:
        return None


async def tokenize_body(body: ReadBody, model: ServedModel | None) -> PromptTokens:
    """Returns the prompts of a body; those that cannot be tokenized are unknown."""
    if body.request is None or model is None:
        return PromptTokens(None, 0, body.unread or NO_PROMPT)
    try:
        token_lists, _ = await tokenize(body.request, model)
        prompts = [TokenIds.of(tokens) for tokens in token_lists]
    except MeshError as error:
        return PromptTokens(None, 0, error.reason)
    return PromptTokens(prompts[0], sum(map(len, prompts)))

"""Parses and validates request bodies (pure)."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from common.errors import InvalidRequest, Unsupported
from frontend_svc.openai.body.body_size import check_size
from frontend_svc.openai.body.fields import CHOICES_MAX
from frontend_svc.openai.body.nvext import Nvext
from frontend_svc.openai.body.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    NamedToolChoice,
)
from frontend_svc.openai.body.validation_errors import (
    INVALID_JSON,
    INVALID_TYPE,
    INVALID_VALUE,
    invalid_value,
    missing_parameter,
    type_name,
)

# Objects and lists in each other. Below the limit of orjson.dumps, so that parts of a body can be
# written as JSON inside of other values.
LEVELS_MAX = 220
_ORJSON_LEVELS = 254
# Larger bodies are parsed in a thread: many short messages take 60 ns per byte, and a thread 60 µs.
INLINE_BODY_BYTES = 64 << 10
_NVEXT_FIELDS = frozenset(Nvext.model_fields)

R = TypeVar("R", bound=GenerationRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """Returns a validated chat request. Raises InvalidRequest with the path of the first invalid
    field, and Unsupported for a known field or value that the server does not support."""
    request = _parse(ChatRequest, body)
    for index, message in enumerate(request.messages):
        _check_message(message, f"messages[{index}]")
    check_tools(request)
    if request.top_logprobs and not request.logprobs:
        raise _invalid_field("top_logprobs", "it needs 'logprobs' to be true")
    limit, other = request.max_completion_tokens, request.max_tokens
    if limit is not None and other is not None and limit != other:
        text = "'max_tokens' and 'max_completion_tokens' differ; set only one."
        raise InvalidRequest(text, "max_tokens", reason=INVALID_VALUE)
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Returns a validated completion request. Raises as `parse_chat` does."""
    request = _parse(CompletionRequest, body)
    n, prompts = request.choices_per_prompt, len(request.prompts)
    if request.best_of not in (None, n):
        text = f"only the value of n ({n}) is accepted: every generated choice is returned"
        raise Unsupported("best_of", text)
    if n * prompts > CHOICES_MAX:
        text = f"{prompts} prompts with {n} choices each are more than {CHOICES_MAX} choices"
        raise _invalid_field("prompt", text)
    return request


def _parse(model: type[R], body: bytes) -> R:
    value = parse_json_object(body)
    try:
        request = model.model_validate(value)
    except ValidationError as error:
        raise invalid_value(error) from None
    request = use_alias(request)
    _check_combinations(request)
    return request


def use_alias(request: R) -> R:
    """Returns the request with its extensions in `nvext`, also if the body names them `kvmesh`."""
    if request.kvmesh is None:
        return request
    if request.nvext is not None:
        text = "'nvext' and 'kvmesh' are names of one object; set only one."
        raise InvalidRequest(text, "kvmesh", reason=INVALID_VALUE)
    return request.model_copy(update={"nvext": request.kvmesh})


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a body. Raises InvalidRequest with the position of the error,
    for a value nested deeper than LEVELS_MAX, and for too many values."""
    check_size(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(_json_error_message(body, error), reason=INVALID_JSON) from None
    if not isinstance(value, dict):
        text = f"The body must be a JSON object, not {type_name(value)}."
        raise InvalidRequest(text, reason=INVALID_TYPE)
    if body.count(b"[") + body.count(b"{") > LEVELS_MAX and _is_too_deep(value):
        text = f"The body is nested too deeply: more than {LEVELS_MAX} levels."
        raise InvalidRequest(text, reason=INVALID_JSON)
    return value


def _is_too_deep(value: object) -> bool:
    for _ in range(_ORJSON_LEVELS - LEVELS_MAX):
        value = [value]
    try:
        orjson.dumps(value)
    except TypeError:  # only for its limit: the value comes from JSON
        return True
    return False


def named_model(body: bytes) -> str:
    """Returns the model that an invalid body names; "" if it names none, or is too large to be
    parsed for the name alone."""
    if len(body) > INLINE_BODY_BYTES:
        return ""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    model = value.get("model") if isinstance(value, dict) else None
    return model if isinstance(model, str) else ""


def _json_error_message(body: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as decode_error:
        return f"The body is not valid UTF-8: {decode_error.reason} at byte {decode_error.start}."
    return f"The body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})."


def _check_combinations(request: GenerationRequest) -> None:
    if request.return_tokens_as_token_ids and request.alternatives is None:
        raise _invalid_field("return_tokens_as_token_ids", "it needs 'logprobs'")
    if request.stream_options is not None and not request.is_stream:
        text = "'stream_options' is only allowed when 'stream' is true."
        raise InvalidRequest(text, "stream_options", reason=INVALID_VALUE)
    if top_level_or_nvext(request, "ignore_eos"):
        for name in ("stop", "stop_token_ids"):
            if getattr(request, name):
                text = f"'{name}' cannot be combined with 'ignore_eos': only the token limit ends "
                raise InvalidRequest(text + "such a response.", name, reason=INVALID_VALUE)
    limit, field = request.max_output_tokens
    if limit is not None:
        check_min_tokens(request, limit, f"'{field}' ({limit})")


def check_min_tokens(request: GenerationRequest, limit: int, limit_text: str) -> None:
    """Raises InvalidRequest if `min_tokens` exceeds the limit. limit_text: names the limit."""
    if request.min_tokens is not None and request.min_tokens > limit:
        text = f"{request.min_tokens} is more than {limit_text}"
        raise _invalid_field("min_tokens", text)


def check_tools(request: ChatRequest) -> None:
    """Raises InvalidRequest for two functions of one name, and a choice without its function."""
    names: set[str] = set()
    for index, tool in enumerate(request.tools or ()):
        if tool.function.name in names:
            text = f"there are two functions {tool.function.name!r}"
            raise _invalid_field(f"{request.tool_path(index)}.name", text)
        names.add(tool.function.name)
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        text = f"there is no function {choice.function.name!r} in 'tools'"
        raise _invalid_field("tool_choice.function.name", text)
    if choice == "required" and not names:
        raise _invalid_field("tool_choice", "it needs tools")


def _check_message(message: ChatMessage, path: str) -> None:
    if message.tool_calls and message.role != "assistant":
        text = "only messages of role 'assistant' have tool calls"
        raise _invalid_field(f"{path}.tool_calls", text)
    if message.tool_call_id is not None and message.role != "tool":
        text = "only messages of role 'tool' have a tool_call_id"
        raise _invalid_field(f"{path}.tool_call_id", text)
    if message.tool_call_id is None and message.role == "tool":
        raise missing_parameter(f"{path}.tool_call_id")
    if message.content is None and not message.tool_calls:
        raise missing_parameter(f"{path}.content")


def _invalid_field(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{path}': {message}.", path, reason=INVALID_VALUE)


# Any: the type of the named field.
def top_level_or_nvext(request: GenerationRequest, name: str) -> Any:
    """Returns a field of the top level or, if absent there, of `nvext`, where it may exist too."""
    top_level = getattr(request, name)
    if top_level is not None or request.nvext is None or name not in _NVEXT_FIELDS:
        return top_level
    return getattr(request.nvext, name)

"""The OpenAI shapes: bodies in, what an engine needs out, and the JSON of whole answers.

Every field is in exactly one of these classes; a name in none of them is refused as unknown.

Honoured
  both         model, stream, stream_options.include_usage, max_tokens, stop (1 to 32 texts),
               temperature, top_p, seed, presence_penalty, frequency_penalty, n (only 1)
  chat         messages (roles system, developer, user, assistant, tool; text, or a list of text
               parts; tool calls of the past), max_completion_tokens, chat_template_kwargs
  completions  prompt (a text, a list of one text, or a list of token ids)
  extensions   top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids
  nvext        backend_instance_id, prefill_worker_id, decode_worker_id, dp_rank, prefill_dp_rank,
               agent_hints.priority, .strict_priority and .osl, routing_constraints.required_taints
               and .preferred_taints, session_control.session_id and .action, token_data, and
               ignore_eos, top_k, min_p, repetition_penalty, which count only where the top level
               has none; headers say some of it too, and win (`core/headers.py`)
Accepted, because they cannot change the answer
               user, metadata, safety_identifier, prompt_cache_key, parallel_tool_calls
Accepted with a value that asks for nothing, else refused by name
               store (false), service_tier (auto, default), response_format (text), logprobs
               (chat: false, 0; completions: none), top_logprobs (0), logit_bias ({}), tools
               and functions ([]), tool_choice and function_call (none, auto), modalities
               (["text"]), verbosity (medium), prompt_cache_retention (in_memory),
               stream_options.include_obfuscation and
               .continuous_usage_stats (false), echo (false), best_of (1), suffix (""),
               nvext.greed_sampling and .use_raw_prompt (false), nvext.annotations and
               .extra_fields ([]), messages[].annotations ([])
Refused by name unless null
               audio, prediction, web_search_options, moderation, prompt_cache_options,
               reasoning_effort, messages[].refusal, .audio, .function_call, parts that are not
               text, nvext.max_thinking_tokens, .cache_control, .cache_salt, .router,
               .agent_context, .metadata_upload, .request_timestamp_ms

`null` means absent, as the SDK sends it. Types are strict: true is no 1, and 1.0 is no integer; but
a worker's id may be a number or its decimal digits as text, since many programs would round it.
Some combinations are refused, since honouring both is impossible: stream_options without stream,
max_tokens against another max_completion_tokens, and ignore_eos with stop or stop_token_ids (only
max_tokens ends such an answer).

Pure: ids and times are arguments.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, LiteralString, NoReturn, TypeAlias, TypeVar, cast

import numpy as np
import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from common.errors import InvalidRequest, PromptTooLong, Unsupported
from common.request.preprocessed import (
    CompletionUsage,
    PreprocessedRequest,
    RoutingConstraints,
    RoutingHints,
    SamplingOptions,
    SessionAction,
    SessionControl,
    StopConditions,
    TokenIds,
    to_json_value,
)

OpenAIFinishReason = Literal["stop", "length", "content_filter", "tool_calls"]

STOP_STRINGS_MAX = 32
# Text up to the longest stop string is held back from the client, so it has a bound.
STOP_CHARS_MAX = 1024
STOP_TOKEN_IDS_MAX = 256
MODEL_CHARS_MAX = 512
TAINTS_MAX = 64
TAINT_CHARS_MAX = 256
SESSION_ID_CHARS_MAX = 256
METADATA_PAIRS_MAX = 16
# No shape has half as many; more would only make millions of errors to report.
KEYS_MAX = 64
_KEY_LIMIT_TEXT = f"at most {KEYS_MAX} keys"
_REQUIREMENT_TEMPLATE: LiteralString = "{wanted}"
_DECIMAL = re.compile(r"[0-9]{1,20}")

R = TypeVar("R", bound="GenerationRequest")

# Reasons, which become OpenAI's `code` in lower case.
_BAD_JSON = "INVALID_JSON"
_BAD_TYPE = "INVALID_TYPE"
_BAD_VALUE = "INVALID_VALUE"
_MISSING = "MISSING_REQUIRED_PARAMETER"
_UNKNOWN = "UNKNOWN_PARAMETER"


def _unsupported_unless(message: str, *no_op_values: object) -> AfterValidator:
    """Lets null and `no_op_values` through, as None; anything else is refused by name."""

    def check(value: object) -> None:
        if value is None or any(type(value) is type(one) and value == one for one in no_op_values):
            return
        raise PydanticCustomError("unsupported", "{why}", {"why": message})

    return AfterValidator(check)


_NO_TOOLS = "tool calls are not available yet"
_NO_LOGPROBS = "log probabilities are not available yet"
_NO_GUIDED = 'only {"type": "text"} is available yet'
_NO_AUDIO = "only text is available"

U32: TypeAlias = Annotated[int, Field(ge=0, le=2**32 - 1)]
U64: TypeAlias = Annotated[int, Field(ge=0, le=2**64 - 1)]
I32: TypeAlias = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
I64: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
AtLeastOne: TypeAlias = Annotated[int, Field(ge=1, le=2**32 - 1)]
StopText: TypeAlias = Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]
Taint: TypeAlias = Annotated[str, Field(min_length=1, max_length=TAINT_CHARS_MAX)]
Weight: TypeAlias = Annotated[float, Field(ge=-1000, le=1000)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
MinP: TypeAlias = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty: TypeAlias = Annotated[float, Field(gt=0, le=2)]
UnsupportedField: TypeAlias = Annotated[
    object, _unsupported_unless("there is no such feature here")
]

# Tags of the branches of a union. pydantic puts them into the path of an error, where
# `_field_path` takes them out again; the NUL keeps them apart from keys a client sends.
_TEXT, _LIST, _TOKEN_IDS, _MANY_PROMPTS, _WRONG_TYPE = (
    "\0text",
    "\0list",
    "\0ids",
    "\0many",
    "\0neither",
)
_TAGS = frozenset((_TEXT, _LIST, _TOKEN_IDS, _MANY_PROMPTS, _WRONG_TYPE))


def _text_or_list(value: object) -> str:
    match value:
        case str():
            return _TEXT
        case list():
            return _LIST
    return _WRONG_TYPE


def _prompt_kind(value: object) -> str:
    match value:
        case str():
            return _TEXT
        case [int(), *_]:
            return _TOKEN_IDS
        case [list(), *_] | [str(), _, *_]:
            return _MANY_PROMPTS
        case list():
            return _LIST
    return _WRONG_TYPE


def _wrong_type(requirement: str) -> AfterValidator:
    def raise_wrong_type(value: object) -> NoReturn:
        raise PydanticCustomError("wanted_type", _REQUIREMENT_TEMPLATE, {"wanted": requirement})

    return AfterValidator(raise_wrong_type)


def _check_pair_count(value: object) -> object:
    if isinstance(value, dict) and len(value) > METADATA_PAIRS_MAX:
        requirement = f"at most {METADATA_PAIRS_MAX} pairs"
        raise PydanticCustomError("wanted_value", _REQUIREMENT_TEMPLATE, {"wanted": requirement})
    return value


def _check_top_k(value: int) -> int:
    if value == 0:
        raise PydanticCustomError(
            "wanted_value", _REQUIREMENT_TEMPLATE, {"wanted": "-1 (off) or at least 1"}
        )
    return value


def _parse_worker_id(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not _DECIMAL.fullmatch(value):
        raise PydanticCustomError(
            "wanted_value", _REQUIREMENT_TEMPLATE, {"wanted": "a decimal number"}
        )
    return int(value)


# Logs and `/health` tell ids as text; programs that can hold the number may send that.
WorkerId: TypeAlias = Annotated[U64, BeforeValidator(_parse_worker_id)]
TopK: TypeAlias = Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(_check_top_k)]


class _StrictModel(BaseModel):
    """A JSON object with known keys only."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _check_key_count(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > KEYS_MAX:
            raise PydanticCustomError(
                "wanted_value", _REQUIREMENT_TEMPLATE, {"wanted": _KEY_LIMIT_TEXT}
            )
        return value


def _check_part_type(value: object) -> object:
    if value != "text":
        message = "only parts of type 'text' are available"
        raise PydanticCustomError("unsupported", "{why}", {"why": message})
    return value


class TextPart(_StrictModel):
    """One part of a message's content."""

    type: Annotated[Literal["text"], BeforeValidator(_check_part_type)]
    text: str


class FunctionCall(_StrictModel):
    """arguments: JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(_StrictModel):
    id: str
    type: Literal["function"]
    function: FunctionCall

    # Streams number their calls, and clients send back what they gathered.
    index: U32 | None = None


class ChatMessage(_StrictModel):
    """One turn of the conversation, handed to the chat template as it is."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag(_TEXT)]
            | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag(_LIST)]
            | Annotated[Any, _wrong_type("a string or a list of text parts"), Tag(_WRONG_TYPE)],
            Discriminator(_text_or_list),
        ]
        | None
    ) = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    # An assistant's message is often sent back as the SDK dumped it.
    refusal: UnsupportedField = None
    audio: Annotated[object, _unsupported_unless(_NO_AUDIO)] = None
    function_call: Annotated[object, _unsupported_unless("use tool_calls")] = None
    annotations: Annotated[object, _unsupported_unless("there are none here", [])] = None


class StreamOptions(_StrictModel):
    include_usage: bool | None = None
    include_obfuscation: Annotated[object, _unsupported_unless("chunks are not padded", False)] = (
        None
    )
    continuous_usage_stats: Annotated[
        object, _unsupported_unless("usage comes once, in the last chunk", False)
    ] = None


class AgentHints(_StrictModel):
    """priority: moves the request forward in the queue where positive, and is the engine's.

    strict_priority: level in the router's queue, a higher one goes first whatever else there is.
    osl: tokens that the answer is expected to have.
    """

    priority: I32 | None = None
    strict_priority: U32 | None = None
    osl: U32 | None = None


class NvextRoutingConstraints(_StrictModel):
    """Marks that a worker must have, and what others are worth: see `RoutingConstraints`."""

    required_taints: Annotated[list[Taint], Field(max_length=TAINTS_MAX, fail_fast=True)] | None = (
        None
    )
    preferred_taints: Annotated[dict[Taint, Weight], Field(max_length=TAINTS_MAX)] | None = None


class NvextSessionControl(_StrictModel):
    """Keeps requests on one worker: see `SessionControl`."""

    session_id: Annotated[str, Field(min_length=1, max_length=SESSION_ID_CHARS_MAX)]
    action: Literal["open", "close"] | None = None


_NO_NVEXT = "not available yet"


class Nvext(_StrictModel):
    """Extensions of the Dynamo family: where to run, and sampling under its older names."""

    backend_instance_id: WorkerId | None = None
    prefill_worker_id: WorkerId | None = None
    decode_worker_id: WorkerId | None = None
    dp_rank: U32 | None = None
    prefill_dp_rank: U32 | None = None
    agent_hints: AgentHints | None = None
    routing_constraints: NvextRoutingConstraints | None = None
    session_control: NvextSessionControl | None = None
    token_data: Annotated[list[U32], Field(min_length=1, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None

    greed_sampling: Annotated[object, _unsupported_unless("set temperature to 0", False)] = None
    use_raw_prompt: Annotated[object, _unsupported_unless(_NO_NVEXT, False)] = None
    annotations: Annotated[object, _unsupported_unless(_NO_NVEXT, [])] = None
    extra_fields: Annotated[object, _unsupported_unless(_NO_NVEXT, [])] = None
    max_thinking_tokens: Annotated[object, _unsupported_unless(_NO_NVEXT)] = None
    cache_control: Annotated[object, _unsupported_unless(_NO_NVEXT)] = None
    cache_salt: Annotated[object, _unsupported_unless(_NO_NVEXT)] = None
    router: Annotated[object, _unsupported_unless(_NO_NVEXT)] = None
    agent_context: Annotated[object, _unsupported_unless(_NO_NVEXT)] = None
    metadata_upload: Annotated[object, _unsupported_unless(_NO_NVEXT)] = None
    request_timestamp_ms: Annotated[object, _unsupported_unless(_NO_NVEXT)] = None


class GenerationRequest(_StrictModel):
    """What the two generation endpoints share."""

    model: Annotated[str, Field(min_length=1, max_length=MODEL_CHARS_MAX)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: AtLeastOne | None = None
    stop: (
        Annotated[
            Annotated[StopText, Tag(_TEXT)]
            | Annotated[
                list[StopText], Field(max_length=STOP_STRINGS_MAX, fail_fast=True), Tag(_LIST)
            ]
            | Annotated[Any, _wrong_type("a string or a list of strings"), Tag(_WRONG_TYPE)],
            Discriminator(_text_or_list),
        ]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: I64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None

    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: (
        Annotated[list[U32], Field(max_length=STOP_TOKEN_IDS_MAX, fail_fast=True)] | None
    ) = None
    nvext: Nvext | None = None

    user: str | None = None
    logit_bias: Annotated[object, _unsupported_unless("tokens cannot be biased yet", {})] = None

    @property
    def is_stream(self) -> bool:
        return self.stream is True

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        options = self.stream_options
        return options is not None and options.include_usage is True

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings; empty where there are none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def max_output_tokens(self) -> tuple[int | None, str]:
        """The client's limit on the answer, and the name of the field that set it."""
        return self.max_tokens, "max_tokens"

    @property
    def token_data(self) -> list[int] | None:
        """The prompt as the client tokenised it; None where we have to."""
        return None if self.nvext is None else self.nvext.token_data


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: AtLeastOne | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    metadata: Annotated[dict[str, str], BeforeValidator(_check_pair_count)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None

    tools: Annotated[object, _unsupported_unless(_NO_TOOLS, [])] = None
    tool_choice: Annotated[object, _unsupported_unless(_NO_TOOLS, "none", "auto")] = None
    functions: Annotated[object, _unsupported_unless(_NO_TOOLS, [])] = None
    function_call: Annotated[object, _unsupported_unless(_NO_TOOLS, "none", "auto")] = None
    logprobs: Annotated[object, _unsupported_unless(_NO_LOGPROBS, False, 0)] = None
    top_logprobs: Annotated[object, _unsupported_unless(_NO_LOGPROBS, 0)] = None
    response_format: Annotated[object, _unsupported_unless(_NO_GUIDED, {"type": "text"})] = None
    modalities: Annotated[object, _unsupported_unless(_NO_AUDIO, ["text"])] = None
    audio: Annotated[object, _unsupported_unless(_NO_AUDIO)] = None
    store: Annotated[object, _unsupported_unless("answers are not stored", False)] = None
    service_tier: Annotated[object, _unsupported_unless("there is one tier", "auto", "default")] = (
        None
    )
    prompt_cache_retention: Annotated[
        object, _unsupported_unless("caches live in memory", "in_memory", "in-memory")
    ] = None
    verbosity: Annotated[object, _unsupported_unless("models here take no verbosity", "medium")] = (
        None
    )
    reasoning_effort: Annotated[
        object, _unsupported_unless("set what the model's template takes in chat_template_kwargs")
    ] = None
    prediction: UnsupportedField = None
    web_search_options: UnsupportedField = None
    moderation: UnsupportedField = None
    prompt_cache_options: UnsupportedField = None

    @property
    def max_output_tokens(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is None:
            return self.max_tokens, "max_tokens"
        return self.max_completion_tokens, "max_completion_tokens"

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages for the chat template, without absent fields."""
        return [message.model_dump(exclude_none=True) for message in self.messages]


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: Annotated[
        Annotated[str, Tag(_TEXT)]
        | Annotated[list[str], Field(min_length=1, max_length=1), Tag(_LIST)]
        | Annotated[list[U32], Field(fail_fast=True), Tag(_TOKEN_IDS)]
        | Annotated[
            Any,
            _unsupported_unless("one prompt a request; send one request for each"),
            Tag(_MANY_PROMPTS),
        ]
        | Annotated[Any, _wrong_type("a string or a list of token ids"), Tag(_WRONG_TYPE)],
        Discriminator(_prompt_kind),
    ]

    echo: Annotated[object, _unsupported_unless("the prompt is not repeated", False)] = None
    best_of: Annotated[object, _unsupported_unless("there is one answer a request", 1)] = None
    suffix: Annotated[object, _unsupported_unless("nothing is inserted before a suffix", "")] = None
    # 0 asks for the log probabilities of the chosen tokens, so it is not neutral.
    logprobs: Annotated[object, _unsupported_unless(_NO_LOGPROBS)] = None

    @property
    def prompt_text(self) -> str | None:
        """The prompt to tokenise; None where the client sent token ids."""
        if self.token_data is not None:
            return None
        text = self.prompt if isinstance(self.prompt, str) else self.prompt[0]
        assert isinstance(text, str), "a prompt is text where it is not token ids"
        return text

    @property
    def token_data(self) -> list[int] | None:
        """The prompt as token ids, from `nvext` or else from `prompt` itself."""
        nvext_token_ids = None if self.nvext is None else self.nvext.token_data
        if nvext_token_ids is not None:
            return nvext_token_ids
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], str):
            return None
        # A list's first item tells its branch of the union, which no type checker follows.
        return cast("list[int]", self.prompt)


def parse_chat(body: bytes) -> ChatRequest:
    """A chat request.

    Raises InvalidRequest that names the first field at fault by its path, and Unsupported for a
    field or value that is understood but cannot be honoured.
    """
    request = _parse(ChatRequest, body)
    for index, message in enumerate(request.messages):
        _check_message(message, f"messages[{index}]")
    limit, other = request.max_completion_tokens, request.max_tokens
    if limit is not None and other is not None and limit != other:
        raise InvalidRequest(
            "'max_tokens' and 'max_completion_tokens' differ; set only one.",
            "max_tokens",
            reason=_BAD_VALUE,
        )
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """A completion request; raises as `parse_chat` does."""
    return _parse(CompletionRequest, body)


def _parse(shape: type[R], body: bytes) -> R:
    value = _json_object(body)
    try:
        request = shape.model_validate(value)
    except ValidationError as error:
        raise invalid_value(error) from None
    _check_combinations(request)
    return request


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(_json_error_message(body, error), reason=_BAD_JSON) from None
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"The body must be a JSON object, not {_type_name(value)}.", reason=_BAD_TYPE
        )
    return value


def _json_error_message(body: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as decode_error:
        return f"The body is not valid UTF-8: {decode_error.reason} at byte {decode_error.start}."
    return f"The body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})."


def _check_combinations(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.is_stream:
        raise InvalidRequest(
            "'stream_options' is only allowed when 'stream' is true.",
            "stream_options",
            reason=_BAD_VALUE,
        )
    if request.n is not None and request.n > 1:
        raise Unsupported("n", "there is one choice a request; send more requests")
    if _top_level_or_nvext(request, "ignore_eos"):
        for name in ("stop", "stop_token_ids"):
            if getattr(request, name):
                raise InvalidRequest(
                    f"'{name}' cannot be combined with 'ignore_eos': only the limit on tokens"
                    " ends such an answer.",
                    name,
                    reason=_BAD_VALUE,
                )
    limit, field = request.max_output_tokens
    if limit is not None:
        _check_min_tokens(request, limit, f"'{field}' ({limit})")


def _check_min_tokens(request: GenerationRequest, limit: int, limit_text: str) -> None:
    if request.min_tokens is not None and request.min_tokens > limit:
        raise InvalidRequest(
            f"Invalid 'min_tokens': {request.min_tokens} is more than {limit_text}.",
            "min_tokens",
            reason=_BAD_VALUE,
        )


def _check_message(message: ChatMessage, path: str) -> None:
    if message.tool_calls and message.role != "assistant":
        _raise_invalid_message(
            f"{path}.tool_calls", "only messages of role 'assistant' have tool calls"
        )
    if message.tool_call_id is not None and message.role != "tool":
        _raise_invalid_message(f"{path}.tool_call_id", "only messages of role 'tool' answer a call")
    if message.tool_call_id is None and message.role == "tool":
        _raise_missing(f"{path}.tool_call_id")
    if message.content is None and not message.tool_calls:
        _raise_missing(f"{path}.content")


def _raise_invalid_message(path: str, message: str) -> NoReturn:
    raise InvalidRequest(f"Invalid '{path}': {message}.", path, reason=_BAD_VALUE)


def _raise_missing(path: str) -> NoReturn:
    raise InvalidRequest(f"Missing required parameter: '{path}'.", path, reason=_MISSING)


_REQUIRED_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
# Where pydantic keeps the bound, by type of error.
_BOUNDS = {
    "greater_than_equal": ("ge", "a value >= {}"),
    "greater_than": ("gt", "a value > {}"),
    "less_than_equal": ("le", "a value <= {}"),
    "less_than": ("lt", "a value < {}"),
    "string_too_short": ("min_length", "{} or more characters"),
    "string_too_long": ("max_length", "at most {} characters"),
    "too_short": ("min_length", "{} or more items"),
    "too_long": ("max_length", "at most {} items"),
    "literal_error": ("expected", "one of {}"),
    "wanted_value": ("wanted", "{}"),
}


def invalid_value(validation_error: ValidationError, name: str = "") -> InvalidRequest:
    """What to tell of the first fault. name: of what is wrong; else its path in the body."""
    # Shapes have few keys and lists fail fast, so there are few errors to list.
    error = validation_error.errors(include_url=False)[0]
    path = name or _field_path(error["loc"], error["type"] == "extra_forbidden") or "body"
    return _to_invalid_request(error, path)


def _to_invalid_request(error: ErrorDetails, path: str) -> InvalidRequest:
    kind, context, actual = error["type"], error.get("ctx", {}), error["input"]
    if kind == "unsupported":
        return Unsupported(path, context["why"])
    if kind == "missing":
        return InvalidRequest(f"Missing required parameter: '{path}'.", path, reason=_MISSING)
    if kind == "extra_forbidden":
        return InvalidRequest(f"Unknown parameter: '{path}'.", path, reason=_UNKNOWN)
    requirement = context.get("wanted") if kind == "wanted_type" else _REQUIRED_TYPES.get(kind)
    if requirement is not None:
        text = (
            f"Invalid type for '{path}': expected {requirement}, but got "
            f"{_type_name(actual)} instead."
        )
        return InvalidRequest(text, path, reason=_BAD_TYPE)
    if kind in _BOUNDS:
        name, phrase = _BOUNDS[kind]
        text = (
            f"Invalid '{path}': expected {phrase.format(context[name])}, but got "
            f"{_describe_value(actual)}."
        )
        return InvalidRequest(text, path, reason=_BAD_VALUE)
    return InvalidRequest(f"Invalid '{path}': {error['msg']}.", path, reason=_BAD_VALUE)


def _field_path(location: tuple[int | str, ...], ends_in_key: bool) -> str:
    """`messages[1].content` from pydantic's location; `ends_in_key`: a client's own comes last."""
    path = ""
    last = len(location) - 1
    for index, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in _TAGS or (ends_in_key and index == last):
            name = step if len(step) <= 80 else f"{step[:80]}…"
            path += f".{name}" if path else name
    return path


def _type_name(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"


def _describe_value(value: object) -> str:
    match value:
        case list():
            return f"a list of {len(value)}"
        case str() if len(value) > 80:
            return f"a string of {len(value)} characters"
        case dict():
            return f"an object of {len(value)} keys"
    return reprlib.repr(value)


def to_preprocessed(
    request: GenerationRequest,
    token_ids: Iterable[int],
    *,
    eos_token_ids: Sequence[int],
    mdc_sum: str | None,
    context_length: int,
    default_max_tokens: int | None = None,
    vocab_size: int | None = None,
    adapter: str = "",
) -> PreprocessedRequest:
    """The request as an engine takes it; `token_ids` is the whole prompt.

    context_length: tokens of prompt and answer together; 0 is unknown and nothing is checked.
    default_max_tokens: the answer's limit for requests that set none; None leaves all the room
    there is. vocab_size: ids at or above it are refused; None does not check. adapter: to be
    applied; "" is the base model.

    Raises PromptTooLong where the prompt leaves no room for a single token, and where prompt and
    max_tokens together exceed the context: refused as OpenAI does, not clamped, since an answer
    cut short looks like one that was asked for. Raises InvalidRequest for an empty prompt, ids out
    of range and a min_tokens there is no room for.
    """
    prompt = _checked_prompt(request, token_ids, vocab_size)
    max_tokens = _max_tokens(request, len(prompt), context_length, default_max_tokens)
    ignore_eos = _top_level_or_nvext(request, "ignore_eos") is True
    eos = () if ignore_eos else tuple(eos_token_ids)
    return PreprocessedRequest(
        model=request.model,
        token_ids=prompt,
        stop_conditions=StopConditions(
            max_tokens=max_tokens,
            stop=request.stop_strings,
            # A stop token asked for by id ends the answer and is no part of it, like EOS.
            stop_token_ids_hidden=tuple(dict.fromkeys((*eos, *(request.stop_token_ids or ())))),
            min_tokens=request.min_tokens,
            ignore_eos=_top_level_or_nvext(request, "ignore_eos"),
        ),
        sampling_options=SamplingOptions(
            n=request.n,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=_top_level_or_nvext(request, "repetition_penalty"),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=_top_level_or_nvext(request, "top_k"),
            min_p=_top_level_or_nvext(request, "min_p"),
            seed=request.seed,
        ),
        eos_token_ids=eos,
        mdc_sum=mdc_sum,
        routing=routing_hints(request.nvext, adapter),
    )


# Any: the type of the named field.
def _top_level_or_nvext(
    request: GenerationRequest,
    name: Literal["ignore_eos", "top_k", "min_p", "repetition_penalty"],
) -> Any:
    """A field that `nvext` may carry too; the top level wins."""
    top_level = getattr(request, name)
    if top_level is not None or request.nvext is None:
        return top_level
    return getattr(request.nvext, name)


def _checked_prompt(
    request: GenerationRequest, token_ids: Iterable[int], vocab_size: int | None
) -> TokenIds:
    field = _prompt_field(request)
    prompt = TokenIds.of(token_ids)
    if not len(prompt):
        raise InvalidRequest(f"Invalid '{field}': the prompt has no tokens.", field)
    if vocab_size is not None and int(prompt.array.max()) >= vocab_size:
        index = int(np.argmax(prompt.array >= vocab_size))
        raise InvalidRequest(
            f"Invalid '{field}': token {prompt[index]} at position {index} is not in the"
            f" vocabulary of {vocab_size}.",
            field,
        )
    return prompt


def check_prompt_length(request: GenerationRequest, tokens_min: int, context_length: int) -> None:
    """PromptTooLong where a prompt of so many tokens, or more, leaves no room for a single one.

    context_length: as in `to_preprocessed`, which still is to see the prompt itself.
    """
    if context_length and tokens_min >= context_length:
        raise _prompt_too_long(request, f"at least {tokens_min}", context_length)


def _prompt_too_long(request: GenerationRequest, tokens: str, context: int) -> PromptTooLong:
    prompt_field = _prompt_field(request)
    return PromptTooLong(
        f"This model's maximum context length is {context} tokens. However, your {prompt_field}"
        f" resulted in {tokens} tokens. Please reduce the length of the {prompt_field}.",
        prompt_field,
    )


def _prompt_field(request: GenerationRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _max_tokens(
    request: GenerationRequest, prompt: int, context: int, default: int | None
) -> int | None:
    requested, field = request.max_output_tokens
    if not context:
        return default if requested is None else requested
    tokens_available = context - prompt
    if tokens_available < 1:
        raise _prompt_too_long(request, str(prompt), context)
    prompt_field = _prompt_field(request)
    if requested is not None and requested > tokens_available:
        raise PromptTooLong(
            f"This model's maximum context length is {context} tokens. However, you requested"
            f" {prompt + requested} tokens ({prompt} in the {prompt_field}, {requested} "
            "in the completion)."
            f" Please reduce the length of the {prompt_field} or completion.",
            field,
        )
    limit = requested or (tokens_available if default is None else min(default, tokens_available))
    _check_min_tokens(request, limit, f"the {limit} tokens the answer may have")
    return limit


def strict_priority(nvext: Nvext | None) -> int:
    """Level in the router's queue; 0, the lowest, where none was asked for."""
    if nvext is None or nvext.agent_hints is None:
        return 0
    return nvext.agent_hints.strict_priority or 0


def routing_hints(nvext: Nvext | None, adapter: str = "") -> RoutingHints | None:
    """What the router is to know; None where nothing was asked for."""
    nvext = nvext or Nvext()
    agent = nvext.agent_hints or AgentHints()
    requirement, session = nvext.routing_constraints, nvext.session_control
    hints = RoutingHints(
        backend_instance_id=nvext.backend_instance_id,
        prefill_worker_id=nvext.prefill_worker_id,
        decode_worker_id=nvext.decode_worker_id,
        dp_rank=nvext.dp_rank,
        prefill_dp_rank=nvext.prefill_dp_rank,
        expected_output_tokens=agent.osl,
        lora_name=adapter or None,
        priority=agent.priority,
        # Seconds: a positive priority counts as so much longer a wait.
        priority_jump=None if agent.priority is None else float(max(0, agent.priority)),
        routing_constraints=None
        if requirement is None
        else RoutingConstraints(
            required_taints=frozenset(requirement.required_taints or ()),
            preferred_taints=requirement.preferred_taints or {},
        ),
        session_control=None
        if session is None
        else SessionControl(
            session.session_id, None if session.action is None else SessionAction(session.action)
        ),
    )
    return None if hints == RoutingHints() else hints


def chat_completion(
    response_id: str,
    model: str,
    created: int,
    content: str,
    finish_reason: OpenAIFinishReason,
    usage: CompletionUsage,
) -> bytes:
    """A whole `chat.completion` as JSON; `response_id` is `chatcmpl-<uuid>`, `created` in
    seconds."""
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
    """A whole `text_completion` as JSON; `response_id` is `cmpl-<uuid>`, `created` in seconds."""
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
    """OpenAI's `usage` object; details that nobody reported are left out."""
    value: dict[str, object] = to_json_value(usage)
    return value


def model_object(
    model: str, created: int, owned_by: str, *, base: str | None = None
) -> dict[str, object]:
    """One entry of `/v1/models`, and the answer of `/v1/models/{model}`.

    base: of an adapter, the model that it is applied to, which goes out as `root` and `parent`.
    """
    value: dict[str, object] = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": owned_by,
    }
    return value if base is None else value | {"root": base, "parent": base}


def model_list(models: Iterable[dict[str, object]]) -> bytes:
    """The answer of `/v1/models`."""
    return orjson.dumps({"object": "list", "data": list(models)})

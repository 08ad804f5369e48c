"""Request bodies of the OpenAI API as pydantic models (pure).

Every field belongs to exactly one of the following classes; any other name is refused as unknown.

Honoured
  both         model, stream, stream_options.include_usage, max_tokens, stop (1 to 32 texts),
               temperature, top_p, seed, presence_penalty, frequency_penalty, n (only 1)
  chat         messages (roles system, developer, user, assistant, tool; text, or a list of text
               parts; past tool calls), max_completion_tokens, chat_template_kwargs
  completions  prompt (a text, a list of one text, or a list of token ids)
  extensions   top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids
  nvext        backend_instance_id, prefill_worker_id, decode_worker_id, dp_rank, prefill_dp_rank,
               agent_hints.priority, .strict_priority and .osl, routing_constraints.required_taints
               and .preferred_taints, session_control.session_id and .action, token_data, and
               ignore_eos, top_k, min_p, repetition_penalty, which apply only if the top level has
               none; headers carry some of these too, and win (`headers.py`)
Accepted, because they cannot change the response
               user, metadata, safety_identifier, prompt_cache_key, parallel_tool_calls
Accepted with a value that has no effect, else refused by name
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

`null` means absent, as the SDK sends it. Types are strict: true is not 1, and 1.0 is not an
integer. A worker id may be a number or its decimal digits as text, since many programs round large
numbers. `parsing.py` refuses combinations of fields that cannot both be honoured.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, LiteralString, NoReturn, TypeAlias, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

STOP_STRINGS_MAX = 32
# Text up to the length of the longest stop string is withheld from the client.
STOP_CHARS_MAX = 1024
STOP_TOKEN_IDS_MAX = 256
MODEL_CHARS_MAX = 512
TAINTS_MAX = 64
TAINT_CHARS_MAX = 256
SESSION_ID_CHARS_MAX = 256
METADATA_PAIRS_MAX = 16
# No model has half as many. Without a limit, one body could cause millions of error reports.
KEYS_MAX = 64
_EXPECTED_TEMPLATE: LiteralString = "{expected}"
_DECIMAL = re.compile(r"[0-9]{1,20}")


def _refuse(message: str, *no_op_values: object) -> AfterValidator:
    """Refuses all values by name but null and `no_op_values`, which become None."""

    def check(value: object) -> None:
        if value is None or any(type(value) is type(one) and value == one for one in no_op_values):
            return
        raise _unsupported(message)

    return AfterValidator(check)


def _unsupported(message: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{message}", {"message": message})


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
UnsupportedField: TypeAlias = Annotated[object, _refuse("this server has no such feature")]

# Tags of the branches of a union. pydantic puts them into the path of an error, from which
# `validation_errors` removes them; the NUL distinguishes them from keys that a client sends.
_TEXT, _LIST, _TOKEN_IDS, _MANY_PROMPTS, _WRONG_TYPE = (
    "\0text",
    "\0list",
    "\0ids",
    "\0many",
    "\0neither",
)
UNION_TAGS = frozenset((_TEXT, _LIST, _TOKEN_IDS, _MANY_PROMPTS, _WRONG_TYPE))


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


def _wrong_type(expected: str) -> AfterValidator:
    def raise_wrong_type(value: object) -> NoReturn:
        raise PydanticCustomError("expected_type", _EXPECTED_TEMPLATE, {"expected": expected})

    return AfterValidator(raise_wrong_type)


def _unexpected_value(expected: str) -> PydanticCustomError:
    return PydanticCustomError("expected_value", _EXPECTED_TEMPLATE, {"expected": expected})


def _check_pair_count(value: object) -> object:
    if isinstance(value, dict) and len(value) > METADATA_PAIRS_MAX:
        raise _unexpected_value(f"at most {METADATA_PAIRS_MAX} pairs")
    return value


def _check_top_k(value: int) -> int:
    if value == 0:
        raise _unexpected_value("-1 (off) or at least 1")
    return value


def _parse_worker_id(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not _DECIMAL.fullmatch(value):
        raise _unexpected_value("a decimal number")
    return int(value)


# Logs and `/health` show ids as text; programs that can represent the number may send that.
WorkerId: TypeAlias = Annotated[U64, BeforeValidator(_parse_worker_id)]
TopK: TypeAlias = Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(_check_top_k)]


class _StrictModel(BaseModel):
    """A JSON object without unknown keys."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _check_key_count(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > KEYS_MAX:
            raise _unexpected_value(f"at most {KEYS_MAX} keys")
        return value


def _check_part_type(value: object) -> object:
    if value != "text":
        raise _unsupported("only parts of type 'text' are available")
    return value


class TextPart(_StrictModel):
    """One part of a message's content."""

    type: Annotated[Literal["text"], BeforeValidator(_check_part_type)]
    text: str


class FunctionCall(_StrictModel):
    """arguments: JSON text as generated by the model."""

    name: str
    arguments: str


class ToolCall(_StrictModel):
    id: str
    type: Literal["function"]
    function: FunctionCall

    # Streamed calls have an index, and clients return it.
    index: U32 | None = None


class ChatMessage(_StrictModel):
    """One turn of the conversation, passed to the chat template unchanged."""

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

    # Clients often return an assistant's message as the SDK serialises it.
    refusal: UnsupportedField = None
    audio: Annotated[object, _refuse(_NO_AUDIO)] = None
    function_call: Annotated[object, _refuse("use tool_calls")] = None
    annotations: Annotated[object, _refuse("only an empty list is accepted", [])] = None


class StreamOptions(_StrictModel):
    include_usage: bool | None = None
    include_obfuscation: Annotated[object, _refuse("chunks are not padded", False)] = None
    continuous_usage_stats: Annotated[
        object, _refuse("usage is sent once, in the last chunk", False)
    ] = None


class AgentHints(_StrictModel):
    """priority: if positive, moves the request forward in the queue; the engine receives it too.
    strict_priority: level in the router's queue; a higher level goes first. osl: expected output
    tokens."""

    priority: I32 | None = None
    strict_priority: U32 | None = None
    osl: U32 | None = None


class NvextRoutingConstraints(_StrictModel):
    """Taints that a worker must have, and weights of others: see `RoutingConstraints`."""

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
    """Extensions of the Dynamo family: placement, and sampling fields under older names."""

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

    greed_sampling: Annotated[object, _refuse("set temperature to 0", False)] = None
    use_raw_prompt: Annotated[object, _refuse(_NO_NVEXT, False)] = None
    annotations: Annotated[object, _refuse(_NO_NVEXT, [])] = None
    extra_fields: Annotated[object, _refuse(_NO_NVEXT, [])] = None
    max_thinking_tokens: Annotated[object, _refuse(_NO_NVEXT)] = None
    cache_control: Annotated[object, _refuse(_NO_NVEXT)] = None
    cache_salt: Annotated[object, _refuse(_NO_NVEXT)] = None
    router: Annotated[object, _refuse(_NO_NVEXT)] = None
    agent_context: Annotated[object, _refuse(_NO_NVEXT)] = None
    metadata_upload: Annotated[object, _refuse(_NO_NVEXT)] = None
    request_timestamp_ms: Annotated[object, _refuse(_NO_NVEXT)] = None


class GenerationRequest(_StrictModel):
    """Fields of both generation endpoints."""

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
    logit_bias: Annotated[object, _refuse("tokens cannot be biased yet", {})] = None

    @property
    def is_stream(self) -> bool:
        return self.stream is True

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream has the token counts."""
        options = self.stream_options
        return options is not None and options.include_usage is True

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def max_output_tokens(self) -> tuple[int | None, str]:
        """The client's limit on output tokens, and the name of the field that sets it."""
        return self.max_tokens, "max_tokens"

    @property
    def token_data(self) -> list[int] | None:
        """The prompt as token ids from the client; None if the server tokenizes it."""
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

    tools: Annotated[object, _refuse(_NO_TOOLS, [])] = None
    tool_choice: Annotated[object, _refuse(_NO_TOOLS, "none", "auto")] = None
    functions: Annotated[object, _refuse(_NO_TOOLS, [])] = None
    function_call: Annotated[object, _refuse(_NO_TOOLS, "none", "auto")] = None
    logprobs: Annotated[object, _refuse(_NO_LOGPROBS, False, 0)] = None
    top_logprobs: Annotated[object, _refuse(_NO_LOGPROBS, 0)] = None
    response_format: Annotated[object, _refuse(_NO_GUIDED, {"type": "text"})] = None
    modalities: Annotated[object, _refuse(_NO_AUDIO, ["text"])] = None
    audio: Annotated[object, _refuse(_NO_AUDIO)] = None
    store: Annotated[object, _refuse("responses are not stored", False)] = None
    service_tier: Annotated[
        object, _refuse("there is only one service tier", "auto", "default")
    ] = None
    prompt_cache_retention: Annotated[
        object, _refuse("caches are kept in memory", "in_memory", "in-memory")
    ] = None
    verbosity: Annotated[object, _refuse("the models do not support it", "medium")] = None
    reasoning_effort: Annotated[
        object, _refuse("use the settings of the model's template in chat_template_kwargs")
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
        return [message.model_dump(exclude_none=True) for message in self.messages]


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: Annotated[
        Annotated[str, Tag(_TEXT)]
        | Annotated[list[str], Field(min_length=1, max_length=1), Tag(_LIST)]
        | Annotated[list[U32], Field(fail_fast=True), Tag(_TOKEN_IDS)]
        | Annotated[
            Any,
            _refuse("only one prompt per request; send one request per prompt"),
            Tag(_MANY_PROMPTS),
        ]
        | Annotated[Any, _wrong_type("a string or a list of token ids"), Tag(_WRONG_TYPE)],
        Discriminator(_prompt_kind),
    ]

    echo: Annotated[object, _refuse("the prompt is not part of the response", False)] = None
    best_of: Annotated[object, _refuse("there is only one choice per request", 1)] = None
    suffix: Annotated[object, _refuse("insertion is not available", "")] = None
    # 0 requests the log probabilities of the generated tokens, so it is not a no-op.
    logprobs: Annotated[object, _refuse(_NO_LOGPROBS)] = None

    @property
    def prompt_text(self) -> str | None:
        """The prompt to tokenize; None if the client sent token ids."""
        if self.token_data is not None:
            return None
        text = self.prompt if isinstance(self.prompt, str) else self.prompt[0]
        assert isinstance(text, str), "a prompt is text if it is not token ids"
        return text

    @property
    def token_data(self) -> list[int] | None:
        """The prompt as token ids, from `nvext` or `prompt`; None if it is text."""
        nvext_token_ids = None if self.nvext is None else self.nvext.token_data
        if nvext_token_ids is not None:
            return nvext_token_ids
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], str):
            return None
        # The first item determines the branch of the union, which type checkers cannot follow.
        return cast("list[int]", self.prompt)

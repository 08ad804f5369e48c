"""Request bodies of the OpenAI API as pydantic models (pure).

Every field belongs to exactly one of the following classes; any other name is refused as unknown.

Honoured
  both         model, prompt_cache_key (a hint for the router), stream,
               stream_options.include_usage and .continuous_usage_stats (with it),
               max_tokens, stop (1 to 32 texts), logprobs (chat: true; completions: 0 to 5)
  chat         messages (roles system, developer, user, assistant, tool; text, or a list of parts:
               text, and in messages of user and tool image_url, input_audio and audio_url, if the
               card has media; past tool calls), max_completion_tokens, chat_template_kwargs,
               response_format (text, json_object, json_schema), tools (functions), tool_choice
               (none, auto, required, a function), parallel_tool_calls, reasoning_effort,
               top_logprobs (0 to 20)
  completions  prompt (a text, a list of token ids, or a list of texts or of lists of token ids),
               echo, best_of (the value of n)
  extensions   min_tokens, ignore_eos, stop_token_ids, logit_bias, include_stop_str_in_output,
               skip_special_tokens, cache_salt, priority, return_tokens_as_token_ids (with logprobs)
               guided_json, guided_regex, guided_choice, guided_grammar (at most one of them and
               response_format), guided_whitespace_pattern; under other names of the same:
               structured_outputs (json, json_object, regex, choice, grammar, whitespace_pattern),
               regex, ebnf, json_schema
  nvext        (also named kvmesh) backend_instance_id, prefill_worker_id, decode_worker_id,
               dp_rank, prefill_dp_rank, allowed_worker_ids, router_config_override,
               agent_hints.priority, .strict_priority and .osl, routing_constraints.required_taints
               and .preferred_taints, session_control.session_id and .action,
               router.ttft_target and .itl_target, agent_context,
               request_timestamp_ms, annotations, extra_fields (worker_id, timing, kv_hit,
               token_ids, completion_token_ids), extra_args (if an engine declares it),
               token_data, and ignore_eos, cache_salt and the guided_ fields, which apply only if
               the top level has none; headers carry some of these too, and win (`headers.py`)
  sampling     the fields of `sampling.py`; those in `nvext` too apply in the same way
Accepted, because they cannot change the response
               user, metadata, safety_identifier, prediction, verbosity, and `CallerFields` of
               `ignored.py`
Accepted with a value that has no effect, else refused by name
               store (false), service_tier (auto, default), prompt_cache_retention (in_memory),
               functions ([]), function_call (none, auto), modalities (["text"]),
               stream_options.include_obfuscation (false),
               suffix (""), nvext.greed_sampling and .use_raw_prompt (false),
               messages[].annotations ([]), image_url.detail (auto), and `DefaultOptions` of
               `ignored.py`
Refused by name unless null
               audio, web_search_options, moderation, prompt_cache_options, max_thinking_tokens,
               prompt_logprobs,
               messages[].refusal, .audio, .function_call, other parts, prompt_embeds,
               nvext.max_thinking_tokens, .cache_control, .metadata_upload

`null` means absent, as the SDK sends it. Types are strict: true is not 1, and 1.0 is not an
integer. A worker id may be a number or its decimal digits as text, since many programs round large
numbers. `parsing.py` refuses combinations of fields that cannot both be honoured.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
)

from common.errors import Unsupported
from frontend_svc.openai.body.fields import (
    CALLS_MAX,
    CHOICES_MAX,
    LIST,
    MANY_PROMPTS,
    MESSAGES_MAX,
    MODEL_CHARS_MAX,
    N_MAX,
    NO_AUDIO,
    NO_FUNCTIONS,
    NO_RETENTION,
    NO_THINKING_LIMIT,
    OBJECT,
    PARTS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
    TEXT,
    TOKEN_IDS,
    TOOLS_MAX,
    U32,
    WRONG_TYPE,
    AtLeastOne,
    CacheKey,
    CacheSalt,
    ConstraintFields,
    FunctionName,
    GuidedFields,
    LogitBias,
    Priority,
    StopText,
    StrictModel,
    UnsupportedField,
    check_pair_count,
    prompt_kind,
    refuse,
    text_or_list,
    text_or_object,
    unsupported,
    wrong_type,
)
from frontend_svc.openai.body.ignored import CallerFields, DefaultChatOptions, DefaultOptions
from frontend_svc.openai.body.nvext import Nvext
from frontend_svc.openai.body.sampling import ExtensionSampling, OpenAiSampling

_MEDIA_TYPES = ("image_url", "audio_url", "input_audio")


def _check_part_type(value: object) -> object:
    if value != "text":
        raise unsupported(f"only parts of type text, {', '.join(_MEDIA_TYPES)} are available")
    return value


def _part_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"\0{kind}" if kind in _MEDIA_TYPES else TEXT


def _check_tool_type(value: object) -> object:
    if value != "function":
        raise unsupported("only tools of type 'function' are available")
    return value


class TextPart(StrictModel):
    """One part of a message's content."""

    type: Annotated[Literal["text"], BeforeValidator(_check_part_type)]
    text: str


class ImageUrl(StrictModel):
    """An image at a URL of http, https or data."""

    url: Annotated[str, Field(min_length=1)]
    detail: Annotated[object, refuse("all images have the same number of tokens", "auto")] = None


class ImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: ImageUrl


class AudioUrl(StrictModel):
    url: Annotated[str, Field(min_length=1)]


class AudioUrlPart(StrictModel):
    type: Literal["audio_url"]
    audio_url: AudioUrl


class InputAudio(StrictModel):
    """data: base64."""

    data: str
    format: Literal["wav", "mp3"]


class InputAudioPart(StrictModel):
    type: Literal["input_audio"]
    input_audio: InputAudio


ContentPart: TypeAlias = Annotated[
    Annotated[TextPart, Tag(TEXT)]
    | Annotated[ImagePart, Tag("\0image_url")]
    | Annotated[AudioUrlPart, Tag("\0audio_url")]
    | Annotated[InputAudioPart, Tag("\0input_audio")],
    Discriminator(_part_tag),
]


class FunctionCall(StrictModel):
    """arguments: JSON text as generated by the model."""

    name: str
    arguments: str


class ToolCall(StrictModel):
    id: str
    type: Literal["function"]
    function: FunctionCall

    # Streamed calls have an index, and clients return it.
    index: U32 | None = None


class ChatMessage(StrictModel):
    """One turn of the conversation, passed to the chat template unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag(TEXT)]
            | Annotated[
                list[ContentPart],
                Field(min_length=1, max_length=PARTS_MAX, fail_fast=True),
                Tag(LIST),
            ]
            | Annotated[Any, wrong_type("a string or a list of parts"), Tag(WRONG_TYPE)],
            Discriminator(text_or_list),
        ]
        | None
    ) = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=CALLS_MAX, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    # Clients often return an assistant's message as the SDK serialises it.
    refusal: UnsupportedField = None
    audio: Annotated[object, refuse(NO_AUDIO)] = None
    function_call: Annotated[object, refuse("use tool_calls")] = None
    annotations: Annotated[object, refuse("only an empty list is accepted", [])] = None


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: Annotated[object, refuse("chunks are not padded", False)] = None
    continuous_usage_stats: bool | None = None
    """With include_usage: every chunk has the counts up to it."""


class FunctionDefinition(StrictModel):
    """A function that the model may call. parameters: JSON schema of an object; None: none.
    strict: the arguments always have the form of `parameters`, also with tool_choice auto."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Annotated[Literal["function"], BeforeValidator(_check_tool_type)]
    function: FunctionDefinition


class FunctionReference(StrictModel):
    name: FunctionName


class NamedToolChoice(StrictModel):
    """The function that the response must call."""

    type: Annotated[Literal["function"], BeforeValidator(_check_tool_type)]
    function: FunctionReference


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)]
    | Annotated[NamedToolChoice, Tag(OBJECT)]
    | Annotated[Any, wrong_type("a string or an object"), Tag(WRONG_TYPE)],
    Discriminator(text_or_object),
]


# Variables by which chat templates switch the reasoning.
REASONING_SWITCHES = ("enable_thinking", "thinking")
ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class JsonSchemaFormat(StrictModel):
    """A named JSON schema. strict has no effect: every response has the form of the schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    # `schema` is a method of pydantic's models.
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class RequestedFormat(StrictModel):
    """The form of a response. json_schema: exactly for the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class OutputFields(GuidedFields):
    """The model, how its output is sent, and where the output ends."""

    model: Annotated[str, Field(min_length=1, max_length=MODEL_CHARS_MAX)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: AtLeastOne | None = None
    stop: (
        Annotated[
            Annotated[StopText, Tag(TEXT)]
            | Annotated[
                list[StopText], Field(max_length=STOP_STRINGS_MAX, fail_fast=True), Tag(LIST)
            ]
            | Annotated[Any, wrong_type("a string or a list of strings"), Tag(WRONG_TYPE)],
            Discriminator(text_or_list),
        ]
        | None
    ) = None


# The bases stand in reverse: fields are validated, and listed in /openapi.json, from the last one.
class GenerationRequest(
    DefaultOptions, CallerFields, ExtensionSampling, OpenAiSampling, ConstraintFields, OutputFields
):
    """Fields of both generation endpoints."""

    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: (
        Annotated[list[U32], Field(max_length=STOP_TOKEN_IDS_MAX, fail_fast=True)] | None
    ) = None
    logit_bias: LogitBias | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: CacheSalt | None = None
    """The request shares KV only with requests of the same salt."""
    priority: Priority | None = None
    """As in vLLM: a smaller number goes first."""
    nvext: Nvext | None = None
    """Extensions; fields of the top level win."""
    kvmesh: Nvext | None = None
    """Another name of `nvext`, which `parsing.use_alias` sets then."""

    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(check_pair_count)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: CacheKey | None = None
    service_tier: Annotated[object, refuse("there is only one service tier", "auto", "default")] = (
        None
    )
    store: Annotated[object, refuse("responses are not stored", False)] = None
    max_thinking_tokens: Annotated[object, refuse(NO_THINKING_LIMIT)] = None
    prompt_logprobs: Annotated[object, refuse("use echo and logprobs of a completion")] = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def is_stream(self) -> bool:
        return self.stream is True

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream has the token counts."""
        options = self.stream_options
        return options is not None and options.include_usage is True

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the token counts up to it."""
        return (
            self.include_usage
            and self.stream_options is not None
            and self.stream_options.continuous_usage_stats is True
        )

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
    def alternatives(self) -> int | None:
        """How many alternatives have log probabilities at each position; None: no token has."""
        raise NotImplementedError

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the prompt's tokens have log probabilities too."""
        return False

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1


class ChatRequest(DefaultChatOptions, GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)
    ]
    max_completion_tokens: AtLeastOne | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: RequestedFormat | None = None

    tools: Annotated[list[Tool], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    functions: Annotated[object, refuse(NO_FUNCTIONS, [])] = None
    function_call: Annotated[object, refuse(NO_FUNCTIONS, "none", "auto")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    modalities: Annotated[object, refuse(NO_AUDIO, ["text"])] = None
    audio: Annotated[object, refuse(NO_AUDIO)] = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prompt_cache_retention: Annotated[object, refuse(NO_RETENTION, "in_memory", "in-memory")] = None
    prediction: dict[str, Any] | None = None
    web_search_options: UnsupportedField = None
    moderation: UnsupportedField = None
    prompt_cache_options: UnsupportedField = None

    @property
    def max_output_tokens(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is None:
            return self.max_tokens, "max_tokens"
        return self.max_completion_tokens, "max_completion_tokens"

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def usable_tools(self) -> list[Tool]:
        """The functions that the response may call."""
        match self.tool_choice:
            case "none":
                return []
            case NamedToolChoice(function=function):
                return [tool for tool in self.tools or () if tool.function.name == function.name]
        return self.tools or []

    @property
    def token_data(self) -> list[int] | None:
        """The prompt as token ids from the client; None if the server tokenizes it."""
        return None if self.nvext is None else self.nvext.token_data

    def tool_path(self, index: int) -> str:
        """Returns the path of a function of `tools` in the body of the client."""
        return f"tools[{index}].function"

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Returns the tools in the prompt; None if the response may not call any."""
        if not self.usable_tools or not self.tools:
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def template_kwargs(self, variables: Container[str], *, is_reasoning: bool) -> dict[str, Any]:
        """Settings of the chat template. variables: that it reads. is_reasoning: whether the
        response may begin with reasoning. `chat_template_kwargs` win over `reasoning_effort`.
        Raises Unsupported if the template reads no setting for the effort."""
        settings: dict[str, Any] = {}
        if (effort := self.reasoning_effort) is not None:
            settings = {name: effort != "none" for name in REASONING_SWITCHES if name in variables}
            if "reasoning_effort" in variables:
                settings["reasoning_effort"] = effort
            if not settings:
                text = "the model's chat template has no such setting"
                raise Unsupported("reasoning_effort", text)
        return settings | (self.chat_template_kwargs or {})

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_none=True) for message in self.messages]


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: Annotated[
        Annotated[str, Tag(TEXT)]
        | Annotated[
            list[str], Field(min_length=1, max_length=CHOICES_MAX, fail_fast=True), Tag(LIST)
        ]
        | Annotated[list[U32], Field(fail_fast=True), Tag(TOKEN_IDS)]
        | Annotated[
            list[Annotated[list[U32], Field(fail_fast=True)]],
            Field(max_length=CHOICES_MAX, fail_fast=True),
            Tag(MANY_PROMPTS),
        ]
        | Annotated[
            Any, wrong_type("a string, a list of token ids, or a list of these"), Tag(WRONG_TYPE)
        ],
        Discriminator(prompt_kind),
    ]

    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=N_MAX)] | None = None
    suffix: Annotated[object, refuse("insertion is not available", "")] = None
    add_special_tokens: Annotated[
        object, refuse("send token ids for a prompt without them", True)
    ] = None
    prompt_embeds: Annotated[object, refuse("no engine takes embeddings as a prompt")] = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    """0 requests the log probabilities of the generated tokens without alternatives; with `echo`,
    those of the prompt too."""

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def echoes_logprobs(self) -> bool:
        return self.echo is True and self.logprobs is not None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each prompt as a text to tokenize, or as token ids from the client."""
        if self.nvext is not None and self.nvext.token_data is not None:
            return [self.nvext.token_data]
        first = self.prompt[0] if self.prompt else None
        if isinstance(self.prompt, str) or isinstance(first, int):
            # The first item determines the branch of the union, which type checkers cannot follow.
            return [cast("str | list[int]", self.prompt)]
        return cast("list[str] | list[list[int]]", self.prompt)

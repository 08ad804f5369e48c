"""Request bodies of the OpenAI Responses API as pydantic models (pure).

Every field belongs to exactly one of the following classes; any other name is refused as unknown.

Honoured
  model, input (a text, or items: messages of the roles user, assistant, system, developer with
  text parts, those of user and results of functions also with input_image; function_call;
  function_call_output; reasoning; item_reference), instructions,
  previous_response_id, store, stream, max_output_tokens, temperature, top_p, tools (functions, and
  namespaces of functions), tool_choice (none, auto, required, a function), parallel_tool_calls,
  text.format (text, json_object, json_schema), reasoning.effort (as reasoning_effort of a chat),
  background (with a batch service, which stores the response), conversation (with
  a batch service, which stores it; not with previous_response_id), metadata (returned),
  prompt_cache_key, nvext and chat_template_kwargs, as in a chat
Accepted, because they cannot change the response
  user, safety_identifier, max_tool_calls (it limits built-in tools),
  id, status and phase of items, logprobs of parts, tools[].defer_loading (all functions are in the
  prompt), and `CallerFields` of `openai/body/ignored.py`
Left out of the prompt, and named in the header `x-kvmesh-omitted-tools`, if other tools remain
  tools of `OPENAI_HOSTED_TOOLS`: the vendor's own server runs them, and no answer need use them
Accepted with a value that has no effect, else refused by name
  include (only reasoning.encrypted_content: reasoning items contain their text, so that clients may
  send them back), truncation (disabled), service_tier (auto, default),
  prompt_cache_retention (in_memory), top_logprobs (0), text.verbosity (medium), reasoning.summary
  (auto: there is none), reasoning.context (auto), reasoning.mode (standard),
  stream_options.include_obfuscation (false), annotations of parts ([]), detail of images (auto)
Refused by name unless null
  other items, parts and tools (files, MCP, shells, custom ones), prompt, moderation,
  access_programs, context_management, image, prompt_cache_options, encrypted_content of reasoning

`null` means absent. Types are strict, as in `openai/body/schema.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from frontend_svc.openai.body.fields import (
    HOSTED,
    LIST,
    MESSAGES_MAX,
    MODEL_CHARS_MAX,
    NO_RETENTION,
    OBJECT,
    OPENAI_HOSTED_TOOLS,
    PARTS_MAX,
    TEXT,
    TOOLS_MAX,
    WRONG_TYPE,
    AtLeastOne,
    CacheKey,
    FunctionName,
    HostedTool,
    StrictModel,
    UnsupportedField,
    check_pair_count,
    refuse,
    text_or_list,
    text_or_object,
    tool_tag,
    unsupported,
    wrong_type,
)
from frontend_svc.openai.body.ignored import CallerFields
from frontend_svc.openai.body.nvext import Nvext

RESPONSE_ID_CHARS_MAX = 128
# Of items in conversations.
ITEM_ID_PATTERN = "^[A-Za-z0-9_-]{1,128}$"
_PART_TYPES = ("input_text", "output_text")
_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_OTHER_ITEM = "\0item"
_NAMESPACE = "\0namespace"
_ENCRYPTED_REASONING = "reasoning.encrypted_content"

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"] | None


def _check_part_type(value: object) -> object:
    if value not in _PART_TYPES:
        raise unsupported("only parts of type input_text, output_text, input_image are available")
    return value


def _part_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "\0image" if kind == "input_image" else TEXT


def _check_function_type(value: object) -> object:
    if value != "function":
        raise unsupported("the server runs no tools; only tools of type 'function' are available")
    return value


def _tool_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _NAMESPACE if kind == "namespace" else tool_tag(kind, OPENAI_HOSTED_TOOLS)


def _check_include(value: object) -> object:
    if value != _ENCRYPTED_REASONING:
        raise unsupported(f"only {_ENCRYPTED_REASONING!r} is available")
    return value


def _refuse_item_type(value: object) -> NoReturn:
    raise unsupported(f"only items of type {', '.join(_ITEM_TYPES)} are available")


def _item_tag(value: object) -> str:
    """Messages may lack a type."""
    if isinstance(value, StrictModel):
        kind = getattr(value, "type", None)
    else:
        kind = value.get("type") if isinstance(value, dict) else ""
    if kind is None:
        kind = "message"
    return f"\0{kind}" if kind in _ITEM_TYPES else _OTHER_ITEM


Include: TypeAlias = Annotated[
    list[Annotated[Any, AfterValidator(_check_include)]], Field(max_length=16, fail_fast=True)
]


class ItemText(StrictModel):
    """One part of a message's content."""

    type: Annotated[Literal["input_text", "output_text"], BeforeValidator(_check_part_type)]
    text: str

    # Clients return parts as they received them.
    annotations: Annotated[object, refuse("only an empty list is accepted", [])] = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: UnsupportedField = None


class ItemImage(StrictModel):
    """An image at a URL of http, https or data."""

    type: Literal["input_image"]
    image_url: Annotated[str, Field(min_length=1)]
    detail: Annotated[object, refuse("all images have the same number of tokens", "auto")] = None
    file_id: UnsupportedField = None


ItemPart: TypeAlias = Annotated[
    Annotated[ItemText, Tag(TEXT)] | Annotated[ItemImage, Tag("\0image")],
    Discriminator(_part_tag),
]
Content: TypeAlias = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[list[ItemPart], Field(max_length=PARTS_MAX, fail_fast=True), Tag(LIST)]
    | Annotated[Any, wrong_type("a string or a list of parts"), Tag(WRONG_TYPE)],
    Discriminator(text_or_list),
]


class MessageItem(StrictModel):
    """One turn of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(StrictModel):
    """A call of an earlier response. arguments: JSON text as generated by the model."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: FunctionName
    arguments: str
    namespace: FunctionName | None = None
    """That of the function, if its tool has one."""
    id: str | None = None
    status: Status = None


class FunctionCallOutputItem(StrictModel):
    """The result of a call. call_id: absent or "" for the first call without a result."""

    type: Literal["function_call_output"]
    call_id: str | None = None
    output: Content
    id: str | None = None
    status: Status = None


class ReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(StrictModel):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """The reasoning of an earlier response. summary: not part of the prompt."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    id: str | None = None
    status: Status = None
    encrypted_content: Annotated[object, refuse("send the text in content")] = None


class ItemReference(StrictModel):
    """An item of a stored response. id: of the item."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(min_length=1, max_length=RESPONSE_ID_CHARS_MAX)]


Item: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("\0message")]
    | Annotated[FunctionCallItem, Tag("\0function_call")]
    | Annotated[FunctionCallOutputItem, Tag("\0function_call_output")]
    | Annotated[ReasoningItem, Tag("\0reasoning")]
    | Annotated[ItemReference, Tag("\0item_reference")]
    | Annotated[Any, AfterValidator(_refuse_item_type), Tag(_OTHER_ITEM)],
    Discriminator(_item_tag),
]


class FunctionTool(StrictModel):
    """A function that the model may call. strict: as in a chat; None: false."""

    type: Annotated[Literal["function"], BeforeValidator(_check_function_type)]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class NamespaceTool(StrictModel):
    """Functions under one name, which their calls have as `namespace`."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(min_length=1, max_length=TOOLS_MAX, fail_fast=True)]


RequestedTool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag(OBJECT)]
    | Annotated[NamespaceTool, Tag(_NAMESPACE)]
    | Annotated[HostedTool, Tag(HOSTED)],
    Discriminator(_tool_tag),
]


class NamedTool(StrictModel):
    """The function that the response must call."""

    type: Annotated[Literal["function"], BeforeValidator(_check_function_type)]
    name: FunctionName


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)]
    | Annotated[NamedTool, Tag(OBJECT)]
    | Annotated[Any, wrong_type("a string or an object"), Tag(WRONG_TYPE)],
    Discriminator(text_or_object),
]


class TextFormat(StrictModel):
    """The form of the response. name, description, schema, strict: of a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    # `schema` is a method of pydantic's models.
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: Annotated[object, refuse("the models do not support it", "medium")] = None


class ReasoningConfig(StrictModel):
    # The chat's field checks the value.
    effort: Any = None
    summary: Annotated[object, refuse("reasoning is not summarised", "auto")] = None
    generate_summary: Annotated[object, refuse("reasoning is not summarised", "auto")] = None
    context: Annotated[object, refuse("the chat template decides", "auto")] = None
    mode: Annotated[object, refuse("there is only one mode", "standard")] = None


ConversationId: TypeAlias = Annotated[str, Field(min_length=1, max_length=RESPONSE_ID_CHARS_MAX)]


class EventOptions(StrictModel):
    include_obfuscation: Annotated[object, refuse("events are not padded", False)] = None


class NamedConversation(StrictModel):
    """The conversation of a response."""

    id: ConversationId


ConversationChoice: TypeAlias = Annotated[
    Annotated[ConversationId, Tag(TEXT)]
    | Annotated[NamedConversation, Tag(OBJECT)]
    | Annotated[Any, wrong_type("a string or an object"), Tag(WRONG_TYPE)],
    Discriminator(text_or_object),
]


class ResponsesRequest(CallerFields):
    """The body of `POST /v1/responses`."""

    model: Annotated[str, Field(min_length=1, max_length=MODEL_CHARS_MAX)]
    input: Annotated[
        Annotated[str, Tag(TEXT)]
        | Annotated[list[InputItem], Field(max_length=MESSAGES_MAX, fail_fast=True), Tag(LIST)]
        | Annotated[Any, wrong_type("a string or a list of items"), Tag(WRONG_TYPE)],
        Discriminator(text_or_list),
    ]
    instructions: str | None = None
    previous_response_id: (
        Annotated[str, Field(min_length=1, max_length=RESPONSE_ID_CHARS_MAX)] | None
    ) = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    max_output_tokens: AtLeastOne | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[RequestedTool], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(check_pair_count)] | None = None
    nvext: Nvext | None = None
    kvmesh: Nvext | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: CacheKey | None = None
    max_tool_calls: AtLeastOne | None = None

    include: Include | None = None
    background: bool | None = None
    truncation: Annotated[object, refuse("the conversation is not cut", "disabled")] = None
    service_tier: Annotated[object, refuse("there is only one service tier", "auto", "default")] = (
        None
    )
    prompt_cache_retention: Annotated[object, refuse(NO_RETENTION, "in_memory", "in-memory")] = None
    top_logprobs: Annotated[object, refuse("log probabilities are not available here", 0)] = None
    conversation: ConversationChoice | None = None
    prompt: Annotated[object, refuse("there are no prompt templates")] = None
    moderation: UnsupportedField = None
    access_programs: UnsupportedField = None
    context_management: UnsupportedField = None
    image: UnsupportedField = None
    prompt_cache_options: UnsupportedField = None

    @property
    def named_conversation(self) -> str | None:
        """The id of its conversation."""
        named = self.conversation
        return named.id if isinstance(named, NamedConversation) else named

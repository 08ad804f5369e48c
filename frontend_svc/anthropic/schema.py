"""Request bodies of the Anthropic Messages API as pydantic models (pure).

Every field belongs to exactly one of the following classes; any other name is refused as unknown.

Honoured
  both         model, messages (roles user, assistant, system; text, or blocks of type text,
               image, thinking, tool_use, tool_result), system (text or text blocks), tools (name,
               description, input_schema, strict, defer_loading with tool_reference in results),
               tool_choice (auto, any, tool, none,
               disable_parallel_tool_use), thinking (adaptive, disabled), thinking.display,
               output_config.format (json_schema), output_config.effort (low, medium, high, if the
               chat template reads reasoning_effort; else only high, the default)
  messages     max_tokens, stream, stop_sequences, temperature, top_p, top_k (0: off)
  extensions   the guided_ fields, as in chat completions
Accepted, because they cannot change the response
               cache_control (prefixes are cached automatically), metadata, service_tier,
               tools[].eager_input_streaming, signature of thinking blocks
Left out of the prompt, and named in the header `x-kvmesh-omitted-tools`, if other tools remain
               tools of `ANTHROPIC_HOSTED_TOOLS`: the vendor's servers run them, and no answer need
               use them
Accepted with a value that has no effect, else refused by name
               speed (standard), citations ([]), caller and
               tools[].allowed_callers (direct),
               tools[].input_examples ([]), context_management (no edits, or thinking kept)
Refused by name unless null
               other blocks (documents, redacted thinking, server tools), other tools,
               thinking.budget_tokens, container, diagnostics, inference_geo, mcp_servers,
               user_profile_id, toolset_name

`null` means absent. Types are strict, as in `openai/body/schema.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from frontend_svc.openai.body.fields import (
    ANTHROPIC_HOSTED_TOOLS,
    HOSTED,
    LIST,
    MESSAGES_MAX,
    MODEL_CHARS_MAX,
    OBJECT,
    PARTS_MAX,
    STOP_STRINGS_MAX,
    TEXT,
    TOOLS_MAX,
    WRONG_TYPE,
    AtLeastOne,
    GuidedFields,
    HostedTool,
    StopText,
    StrictModel,
    UnsupportedField,
    refuse,
    text_or_list,
    tool_tag,
    unsupported,
    wrong_type,
)

THINKING_TOKENS_MIN = 1024
_BLOCK_TYPES = ("text", "image", "thinking", "tool_use", "tool_result")
_OTHER_BLOCK = "\0block"
_NO_TOOLSETS = "only tools of the request are available"

# Any: its content has no effect.
CacheControl: TypeAlias = dict[str, Any] | None
ToolName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


def _block_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"\0{kind}" if kind in _BLOCK_TYPES else _OTHER_BLOCK


def _source_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "\0url" if kind == "url" else "\0base64"


def _result_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"\0{kind}" if kind in ("image", "tool_reference") else TEXT


def _tool_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return tool_tag(kind, ANTHROPIC_HOSTED_TOOLS)


def _refuse_block_type(value: object) -> NoReturn:
    raise unsupported(f"only blocks of type {', '.join(_BLOCK_TYPES)} are available")


def _check_text_type(value: object) -> object:
    if value != "text":
        raise unsupported("only blocks of type text are available here")
    return value


def _check_tool_type(value: object) -> object:
    if value not in (None, "custom"):
        raise unsupported("the server runs no tools; only custom tools are available")
    return value


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Annotated[object, refuse("only an empty list is accepted", [])] = None


class Base64Image(StrictModel):
    type: Literal["base64"]
    media_type: str
    data: str


class UrlImage(StrictModel):
    type: Literal["url"]
    url: Annotated[str, Field(min_length=1)]


class ImageBlock(StrictModel):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Image, Tag("\0base64")] | Annotated[UrlImage, Tag("\0url")],
        Discriminator(_source_tag),
    ]
    cache_control: CacheControl = None


class TextOnlyBlock(TextBlock):
    """A block where no other kind is possible."""

    type: Annotated[Literal["text"], BeforeValidator(_check_text_type)]


class ThinkingBlock(StrictModel):
    """Reasoning of an earlier response."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(StrictModel):
    """A call of an earlier response."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: ToolName
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Annotated[object, refuse("only clients call tools", {"type": "direct"})] = None
    toolset_name: Annotated[object, refuse(_NO_TOOLSETS)] = None


class OtherBlock(StrictModel):
    """A block that is refused."""

    type: Annotated[str, BeforeValidator(_refuse_block_type)]


# Text, or blocks of text.
Text: TypeAlias = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[list[TextOnlyBlock], Field(max_length=PARTS_MAX, fail_fast=True), Tag(LIST)]
    | Annotated[Any, wrong_type("a string or a list of text blocks"), Tag(WRONG_TYPE)],
    Discriminator(text_or_list),
]


class ToolReferenceBlock(StrictModel):
    """A tool that a search has found: from here on the model may call it."""

    type: Literal["tool_reference"]
    tool_name: ToolName
    cache_control: CacheControl = None


# Text, or blocks of text and images, and references to tools.
ResultContent: TypeAlias = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[
        list[
            Annotated[
                Annotated[TextOnlyBlock, Tag(TEXT)]
                | Annotated[ImageBlock, Tag("\0image")]
                | Annotated[ToolReferenceBlock, Tag("\0tool_reference")],
                Discriminator(_result_tag),
            ]
        ],
        Field(max_length=PARTS_MAX, fail_fast=True),
        Tag(LIST),
    ]
    | Annotated[Any, wrong_type("a string or a list of blocks"), Tag(WRONG_TYPE)],
    Discriminator(text_or_list),
]


class ToolResultBlock(StrictModel):
    """The result of a call; is_error: the call failed."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: ResultContent | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None
    toolset_name: Annotated[object, refuse(_NO_TOOLSETS)] = None


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag(TEXT)]
    | Annotated[ImageBlock, Tag("\0image")]
    | Annotated[ThinkingBlock, Tag("\0thinking")]
    | Annotated[ToolUseBlock, Tag("\0tool_use")]
    | Annotated[ToolResultBlock, Tag("\0tool_result")]
    | Annotated[OtherBlock, Tag(_OTHER_BLOCK)],
    Discriminator(_block_tag),
]


class Message(StrictModel):
    """One turn, or a part of it: neighbours of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag(TEXT)]
        | Annotated[
            list[Block], Field(min_length=1, max_length=PARTS_MAX, fail_fast=True), Tag(LIST)
        ]
        | Annotated[Any, wrong_type("a string or a list of blocks"), Tag(WRONG_TYPE)],
        Discriminator(text_or_list),
    ]


class CustomTool(StrictModel):
    """A tool that the client runs. strict: its input always has the form of `input_schema`."""

    # First, so that the error for a server tool is about its type and not about other fields.
    type: Annotated[Literal["custom"] | None, BeforeValidator(_check_tool_type)] = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = None
    allowed_callers: Annotated[object, refuse("only the model calls tools", ["direct"])] = None
    defer_loading: bool | None = None
    """Not in the prompt until a result refers to it."""
    input_examples: Annotated[object, refuse("put examples into the description", [])] = None


class ServerTool(HostedTool):
    """A tool of ANTHROPIC_HOSTED_TOOLS."""

    name: ToolName


RequestedTool: TypeAlias = Annotated[
    Annotated[CustomTool, Tag(OBJECT)] | Annotated[ServerTool, Tag(HOSTED)],
    Discriminator(_tool_tag),
]


class ToolChoice(StrictModel):
    """name: exactly for the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(StrictModel):
    """budget_tokens: exactly for the type `enabled`. display: `omitted` sends empty blocks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=THINKING_TOKENS_MIN)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    # `schema` is a method of pydantic's models.
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high"] | None = None


class Metadata(StrictModel):
    user_id: str | None = None


class PromptRequest(StrictModel):
    """The body of `/v1/messages/count_tokens`: the fields that decide the prompt."""

    model: Annotated[str, Field(min_length=1, max_length=MODEL_CHARS_MAX)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    system: Text | None = None
    tools: Annotated[list[RequestedTool], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    cache_control: CacheControl = None
    speed: Annotated[object, refuse("there is only one speed", "standard")] = None
    context_management: Annotated[
        object,
        refuse(
            "the prompt is the whole conversation",
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
    ] = None
    mcp_servers: Annotated[object, refuse("the server runs no tools", [])] = None
    user_profile_id: UnsupportedField = None


class MessagesRequest(PromptRequest, GuidedFields):
    """The body of `/v1/messages`."""

    max_tokens: AtLeastOne
    stream: bool | None = None
    stop_sequences: (
        Annotated[list[StopText], Field(max_length=STOP_STRINGS_MAX, fail_fast=True)] | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None

    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: UnsupportedField = None
    diagnostics: UnsupportedField = None
    inference_geo: UnsupportedField = None

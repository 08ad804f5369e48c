"""Translates bodies of the Messages API into chats (pure)."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import orjson
from pydantic import Field, ValidationError

from common.errors import InvalidRequest, Unsupported
from frontend_svc.anthropic.schema import (
    Base64Image,
    Block,
    CustomTool,
    ImageBlock,
    Message,
    MessagesRequest,
    PromptRequest,
    ServerTool,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlImage,
)
from frontend_svc.openai.body import schema as openai
from frontend_svc.openai.body.parsing import check_tools, parse_json_object
from frontend_svc.openai.body.validation_errors import (
    INVALID_VALUE,
    invalid_value,
    missing_parameter,
)

# Claude Code's first system block. It changes with each request, so it would prevent cache hits.
_BILLING_PREFIX: Final = "x-anthropic-billing-header:"
# Anthropic's results have a flag, which chat templates lack.
_ERROR_PREFIX: Final = "Error: "
_GUIDED_FIELDS: Final = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
)
_BLOCK_ROLES: Final = {
    ThinkingBlock: "assistant",
    ToolUseBlock: "assistant",
    ToolResultBlock: "user",
    ImageBlock: "user",
}
# Fields of a chat -> fields of the Messages API.
_RENAMED_FIELDS: Final = (
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"^response_format\.json_schema"), "output_config.format"),
    (re.compile(r"^stop$"), "stop_sequences"),
    # Neighbouring messages become one, so their indices differ.
    (re.compile(r"^messages\[.*\.image_url\b.*"), "messages"),
)

# Variables of chat templates that turn reasoning on and off.
_THINKING_VARIABLES: Final = ("enable_thinking", "thinking")
_EFFORT_VARIABLE: Final = "reasoning_effort"
_DEFAULT_EFFORT: Final = "high"

R = TypeVar("R", bound=PromptRequest)
ResultPart: TypeAlias = TextBlock | ImageBlock | ToolReferenceBlock


class MessagesChat(openai.ChatRequest):
    """A chat from the Messages API."""

    thinking: bool | None = None
    """Whether the response has reasoning; None: the chat template decides."""

    omits_thinking: bool = False
    """Whether its blocks are empty."""

    effort: str | None = None
    """None: the default."""

    tool_indices: Annotated[Sequence[int], Field(exclude=True)] = ()
    """Of the functions among the tools of the body."""

    omitted_tools: Annotated[Sequence[str], Field(exclude=True)] = ()
    """Types of the tools that are left out."""

    def tool_path(self, index: int) -> str:
        return f"tools[{self.tool_indices[index]}].function"

    def template_kwargs(self, variables: Container[str], *, is_reasoning: bool) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if self.thinking is not None:
            switches = [name for name in _THINKING_VARIABLES if name in variables]
            if not self.thinking and is_reasoning and not switches:
                text = "the model's chat template cannot turn its reasoning off"
                raise Unsupported("thinking.type", text)
            settings = dict.fromkeys(switches, self.thinking)
        if self.effort is not None and _EFFORT_VARIABLE in variables:
            settings[_EFFORT_VARIABLE] = self.effort
        elif self.effort not in (None, _DEFAULT_EFFORT):
            text = "the model's chat template has no such setting"
            raise Unsupported("output_config.effort", text)
        return settings


def parse_messages(body: bytes) -> MessagesChat:
    """Returns the chat of a body of `/v1/messages`. Raises InvalidRequest with the path of the
    first invalid field, and Unsupported for a known field or value that is not supported."""
    return _to_chat(_parse(MessagesRequest, body))


def parse_count(body: bytes) -> MessagesChat:
    """Returns the chat whose prompt a body of `/v1/messages/count_tokens` describes. Raises as
    `parse_messages` does."""
    return _to_chat(_parse(PromptRequest, body))


def client_field(field: str) -> str:
    """Returns the field of the Messages API from which a field of the chat was translated."""
    for pattern, name in _RENAMED_FIELDS:
        field = pattern.sub(name, field)
    return field


def _parse(model: type[R], body: bytes) -> R:
    try:
        request = model.model_validate(parse_json_object(body))
    except ValidationError as error:
        raise invalid_value(error) from None
    for index, message in enumerate(request.messages):
        _check_message(message, f"messages[{index}]")
    if request.messages[-1].role == "assistant":
        text = "the response cannot continue a message of the assistant"
        raise Unsupported(f"messages[{len(request.messages) - 1}].role", text)
    _check_tool_choice(request.tool_choice)
    _check_thinking(request)
    return request


def _check_message(message: Message, path: str) -> None:
    for index, block in enumerate(_blocks(message)):
        role = _BLOCK_ROLES.get(type(block), message.role)
        if role != message.role:
            text = f"only messages of role '{role}' have blocks of type '{block.type}'"
            raise _invalid_field(f"{path}.content[{index}].type", text)


def _check_tool_choice(choice: ToolChoice | None) -> None:
    if choice is None:
        return
    if choice.type == "tool" and choice.name is None:
        raise missing_parameter("tool_choice.name")
    if choice.type != "tool" and choice.name is not None:
        raise _invalid_field("tool_choice.name", "only the type 'tool' has a name")


def _check_thinking(request: PromptRequest) -> None:
    thinking = request.thinking
    if thinking is None:
        return
    if thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise missing_parameter("thinking.budget_tokens")
        text = "reasoning has no limit of its own; set thinking.type to adaptive"
        raise Unsupported("thinking.budget_tokens", text)
    if thinking.budget_tokens is not None:
        raise _invalid_field("thinking.budget_tokens", "only the type 'enabled' has a budget")


def _invalid_field(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{path}': {message}.", path, reason=INVALID_VALUE)


def _to_chat(request: PromptRequest) -> MessagesChat:
    thinking = request.thinking
    chat = MessagesChat(
        model=request.model,
        messages=[*_system(request), *_turns(request.messages)],
        thinking=None if thinking is None else thinking.type != "disabled",
        omits_thinking=thinking is not None and thinking.display == "omitted",
        effort=None if request.output_config is None else request.output_config.effort,
        **_tool_fields(request),
        **(_generation_fields(request) if isinstance(request, MessagesRequest) else {}),
    )
    check_tools(chat)
    return chat


# Any, here and below: fields of a chat.
def _generation_fields(request: MessagesRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(request, name) for name in _GUIDED_FIELDS}
    fields |= {
        "max_tokens": request.max_tokens,
        "stream": request.stream,
        # The counts are part of every response.
        "stream_options": openai.StreamOptions(include_usage=True) if request.stream else None,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or None,
    }
    output = None if request.output_config is None else request.output_config.format
    if output is not None:
        schema = {"name": "output", "schema": output.json_schema}
        fields["response_format"] = openai.RequestedFormat(
            type="json_schema", json_schema=openai.JsonSchemaFormat.model_validate(schema)
        )
    return fields


def _tool_fields(request: PromptRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    tools = list(enumerate(request.tools or ()))
    custom = list(_usable_tools(request))
    hosted = [(index, tool) for index, tool in tools if isinstance(tool, ServerTool)]
    if hosted and not custom:
        text = "the server runs no tools; only custom tools are available"
        raise Unsupported(f"tools[{hosted[0][0]}].type", text)
    if custom:
        fields["tools"] = [_tool(tool) for _, tool in custom]
        fields["tool_indices"] = [index for index, _ in custom]
        fields["omitted_tools"] = tuple(dict.fromkeys(tool.type for _, tool in hosted))
    choice = request.tool_choice
    if choice is not None:
        fields["tool_choice"] = _tool_choice(choice)
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


def _usable_tools(request: PromptRequest) -> Iterator[tuple[int, CustomTool]]:
    """Yields the tools that the prompt has, with their indices: a deferred one only after a result
    has referred to it. Raises Unsupported if all are deferred and none is referred to."""
    found = {
        part.tool_name
        for message in request.messages
        for block in _blocks(message)
        if isinstance(block, ToolResultBlock) and not isinstance(block.content, str)
        for part in block.content or ()
        if isinstance(part, ToolReferenceBlock)
    }
    tools = [
        (i, tool) for i, tool in enumerate(request.tools or ()) if isinstance(tool, CustomTool)
    ]
    usable = [(i, tool) for i, tool in tools if not tool.defer_loading or tool.name in found]
    if tools and not usable:
        text = "there is no tool search on the server, and no other tool can load this one"
        raise Unsupported(f"tools[{tools[0][0]}].defer_loading", text)
    yield from usable


def _tool(tool: CustomTool) -> openai.Tool:
    # Without validation: names may be longer than in the OpenAI API.
    function = openai.FunctionDefinition.model_construct(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return openai.Tool(type="function", function=function)


def _tool_choice(choice: ToolChoice) -> str | openai.NamedToolChoice:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            function = openai.FunctionReference.model_construct(name=choice.name)
            return openai.NamedToolChoice(type="function", function=function)
    return choice.type


def _system(request: PromptRequest) -> list[openai.ChatMessage]:
    if request.system is None:
        return []
    blocks = [_text(request.system)] if isinstance(request.system, str) else request.system
    texts = [block for block in blocks if not block.text.startswith(_BILLING_PREFIX)]
    return [openai.ChatMessage(role="system", content=_content(texts))] if texts else []


def _turns(messages: Iterable[Message]) -> Iterator[openai.ChatMessage]:
    for role, group in groupby(messages, lambda message: message.role):
        blocks = [block for message in group for block in _blocks(message)]
        if role == "assistant":
            yield _assistant_message(blocks)
        else:
            yield from _user_messages(role, blocks)


# Any: a role of the chat.
def _user_messages(role: Any, blocks: Iterable[Block]) -> Iterator[openai.ChatMessage]:
    """Yields the messages of a turn: results of calls are messages of their own in a chat."""
    for is_result, group in groupby(blocks, lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            yield from (_result(block) for block in group if isinstance(block, ToolResultBlock))
        else:
            parts = [block for block in group if isinstance(block, TextBlock | ImageBlock)]
            yield openai.ChatMessage(role=role, content=_content(parts))


def _assistant_message(blocks: Sequence[Block]) -> openai.ChatMessage:
    thinking = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return openai.ChatMessage(
        role="assistant",
        content=_content([block for block in blocks if isinstance(block, TextBlock)]),
        tool_calls=[_call(block) for block in blocks if isinstance(block, ToolUseBlock)] or None,
        reasoning_content="\n".join(filter(None, thinking)) or None,
    )


def _call(block: ToolUseBlock) -> openai.ToolCall:
    function = openai.FunctionCall(name=block.name, arguments=orjson.dumps(block.input).decode())
    return openai.ToolCall(id=block.id, type="function", function=function)


def _result(block: ToolResultBlock) -> openai.ChatMessage:
    parts = [_without_reference(part) for part in _parts(block.content or "")]
    if block.is_error:
        match parts:
            case [TextBlock(text=text), *others]:
                parts = [_text(_ERROR_PREFIX + text), *others]
            case _:
                parts = [_text(_ERROR_PREFIX), *parts]
    return openai.ChatMessage(role="tool", content=_content(parts), tool_call_id=block.tool_use_id)


def _without_reference(part: ResultPart) -> TextBlock | ImageBlock:
    if isinstance(part, ToolReferenceBlock):
        return _text(f"The tool {part.tool_name} is available.")
    return part


def _content(parts: Sequence[TextBlock | ImageBlock]) -> str | list[openai.ContentPart]:
    match parts:
        case []:
            return ""
        case [TextBlock(text=text)]:
            return text
    return [_part(part) for part in parts]


def _part(part: TextBlock | ImageBlock) -> openai.ContentPart:
    if isinstance(part, TextBlock):
        return openai.TextPart(type="text", text=part.text)
    match part.source:
        case UrlImage(url=url):
            pass
        case Base64Image(media_type=media_type, data=data):
            url = f"data:{media_type};base64,{data}"
    return openai.ImagePart(type="image_url", image_url=openai.ImageUrl(url=url))


def _text(text: str) -> TextBlock:
    return TextBlock(type="text", text=text)


def _blocks(message: Message) -> Sequence[Block]:
    return [_text(message.content)] if isinstance(message.content, str) else message.content


def _parts(content: str | Sequence[ResultPart]) -> Sequence[ResultPart]:
    return [_text(content)] if isinstance(content, str) else content

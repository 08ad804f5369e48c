"""Translates bodies of the Responses API into chats (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field, SkipValidation, TypeAdapter, ValidationError

from common.errors import InvalidRequest, MeshError, Unsupported
from frontend_svc.openai.body.parsing import check_tools, parse_json_object, use_alias
from frontend_svc.openai.body.schema import ChatRequest
from frontend_svc.openai.body.validation_errors import (
    INVALID_VALUE,
    invalid_value,
    missing_parameter,
)
from frontend_svc.openai.output.json_bytes import compact_json
from frontend_svc.responses.ids import item_id
from frontend_svc.responses.schema import (
    ITEM_ID_PATTERN,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    ItemImage,
    ItemReference,
    ItemText,
    MessageItem,
    NamedTool,
    ReasoningItem,
    ResponsesRequest,
    TextConfig,
)
from frontend_svc.responses.tools import ChatTools, FunctionNames, chat_tools, name_in_chat

# Fields of a chat -> fields of the Responses API.
_RENAMED_FIELDS: Final = (
    (re.compile(r"^messages\b.*"), "input"),
    (re.compile(r"^max_completion_tokens$"), "max_output_tokens"),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
)
_SAME_FIELDS: Final = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "metadata", "nvext"),
    *("kvmesh", "chat_template_kwargs", "user", "safety_identifier", "prompt_cache_key"),
)
_NO_TOOLS: Final = ChatTools((), (), FunctionNames(), ())
_ID_PREFIXES: Final[Mapping[type[Item], str]] = {
    MessageItem: "msg",
    FunctionCallItem: "fc",
    FunctionCallOutputItem: "fco",
    ReasoningItem: "rs",
}
_ITEM_ID: Final = re.compile(ITEM_ID_PATTERN)
_ITEMS: Final = TypeAdapter[list[Item]](list[Item])

# Any: JSON.
Json = dict[str, Any]


class ResponsesChat(ChatRequest):
    """A chat from the Responses API."""

    chat_tools: Annotated[ChatTools, Field(exclude=True), SkipValidation] = _NO_TOOLS

    def tool_path(self, index: int) -> str:
        return self.chat_tools.paths[index]


def parse_responses(body: bytes) -> ResponsesRequest:
    """Returns a validated request. Raises InvalidRequest with the path of the first invalid field,
    and Unsupported for a known field or value that the server does not support."""
    try:
        request = ResponsesRequest.model_validate(parse_json_object(body))
    except ValidationError as error:
        raise invalid_value(error) from None
    if request.stream_options is not None and not request.stream:
        text = "'stream_options' is only allowed when 'stream' is true."
        raise InvalidRequest(text, "stream_options", reason=INVALID_VALUE)
    if request.background and request.store is False:
        text = "'background' needs 'store': the response is read when it has ended."
        raise InvalidRequest(text, "background", reason=INVALID_VALUE)
    if request.named_conversation is not None and request.previous_response_id is not None:
        text = "'conversation' and 'previous_response_id' exclude each other."
        raise InvalidRequest(text, "conversation", reason=INVALID_VALUE)
    return request


def references(request: ResponsesRequest) -> Mapping[int, str]:
    """Returns the ids of stored items in the input, by their index."""
    items = () if isinstance(request.input, str) else request.input
    return {index: item.id for index, item in enumerate(items) if isinstance(item, ItemReference)}


def input_items(request: ResponsesRequest, referenced: Mapping[int, Item]) -> list[Item]:
    """Returns the input of a request as items. referenced: the items of `references`, by their
    index."""
    if isinstance(request.input, str):
        return [MessageItem(role="user", content=request.input)]
    return [
        referenced[index] if isinstance(item, ItemReference) else item
        for index, item in enumerate(request.input)
    ]


def read_items(raw: Iterable[bytes]) -> list[Item]:
    """Returns stored items."""
    return _ITEMS.validate_json(b"[%b]" % b",".join(raw))


def stored_items(items: Sequence[Item], response_id: str) -> tuple[bytes, ...]:
    """Returns the input of a response as JSON objects of the Responses API, each with an id."""
    return items_as_json(
        items, lambda prefix, index: item_id(prefix, response_id, index, is_input=True)
    )


def items_as_json(items: Sequence[Item], new_id: Callable[[str, int], str]) -> tuple[bytes, ...]:
    """Returns items as JSON objects of the Responses API. new_id: returns the id of one that has
    none, from its prefix and its index."""
    return tuple(
        compact_json(_stored_item(item, item.id or new_id(_ID_PREFIXES[type(item)], index)))
        for index, item in enumerate(items)
    )


def check_item_ids(items: Iterable[Item], field: str) -> None:
    """Raises InvalidRequest for the id of an item that a conversation cannot have. field: of the
    items."""
    for index, item in enumerate(items):
        if item.id is not None and not _ITEM_ID.fullmatch(item.id):
            name = f"{field}[{index}].id"
            text = f"Invalid '{name}': 1 to 128 letters, digits, '_' and '-'."
            raise InvalidRequest(text, name, reason=INVALID_VALUE)


def _stored_item(item: Item, own_id: str) -> Json:
    value = item.model_dump(exclude_none=True)
    value |= {"id": own_id, "status": item.status or "completed"}
    match item:
        case MessageItem(role=role, content=content):
            text: Json = {"type": "input_text"}
            if role == "assistant":
                text = {"type": "output_text", "annotations": []}
            parts = [
                part.model_dump(exclude_none=True)
                if isinstance(part, ItemImage)
                else text | {"text": part.text}
                for part in _parts(content)
            ]
            value |= {"type": "message", "content": parts}
        case ReasoningItem():
            value.setdefault("summary", [])
    return value


def to_chat(request: ResponsesRequest, items: Iterable[Item]) -> ResponsesChat:
    """Returns the chat of a request. items: the whole conversation. Raises InvalidRequest and
    Unsupported with the field of the Responses API."""
    tools = chat_tools(request)
    messages = list(_messages(with_call_ids(items)))
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
    if not messages:
        raise missing_parameter("input")
    fields: Json = {name: getattr(request, name) for name in _SAME_FIELDS}
    fields |= {
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "tools": tools.functions or None,
        "chat_tools": tools,
        "tool_choice": _tool_choice(request),
        "response_format": _response_format(request.text),
        "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
    }
    try:
        try:
            chat = use_alias(ResponsesChat.model_validate(fields))
        except ValidationError as error:
            raise invalid_value(error) from None
        check_tools(chat)
    except MeshError as error:
        raise client_error(error) from None
    return chat


def warmup_of(chat: ResponsesChat) -> ResponsesChat:
    """Returns the chat for a response without output: a worker computes the prompt, and one token
    that is not sent."""
    return chat.model_copy(update={"max_completion_tokens": 1})


def client_error(error: MeshError) -> MeshError:
    """Returns the error of a chat, with the name of the field in the Responses API."""
    field = error.field
    if field is None:
        return error
    for pattern, name in _RENAMED_FIELDS:
        field = pattern.sub(name, field)
    if field == error.field:
        return error
    return error.copy(error.message.replace(f"'{error.field}'", f"'{field}'"), field)


def with_call_ids(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items of a conversation. A result without the id of its call is that of the first
    call without a result: agents send such results for calls that they could not run.

    Raises InvalidRequest if there is no such call."""
    unanswered: dict[str, None] = {}
    for item in items:
        match item:
            case FunctionCallItem(call_id=call_id):
                unanswered[call_id] = None
            case FunctionCallOutputItem(call_id=str(call_id)) if call_id:
                unanswered.pop(call_id, None)
            case FunctionCallOutputItem():
                if not unanswered:
                    raise missing_parameter("input.call_id")
                call_id = next(iter(unanswered))
                del unanswered[call_id]
                item = item.model_copy(update={"call_id": call_id})
        yield item


def _tool_choice(request: ResponsesRequest) -> str | Json | None:
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _response_format(text: TextConfig | None) -> Json | None:
    if text is None or text.format is None:
        return None
    value = text.format.model_dump(exclude_none=True, by_alias=True)
    kind = value.pop("type")
    if kind == "json_schema":
        for name in ("name", "schema"):
            if name not in value:
                raise missing_parameter(f"text.format.{name}")
        return {"type": kind, "json_schema": value}
    if value:
        name = f"text.format.{next(iter(value))}"
        text_ = f"Invalid '{name}': only the type 'json_schema' has it."
        raise InvalidRequest(text_, name, reason=INVALID_VALUE)
    return {"type": kind}


def _messages(items: Iterable[Item]) -> Iterator[Json]:
    """Yields the messages of a chat. Adjacent items of one answer of the assistant are one
    message."""
    answer: Json | None = None
    for item in items:
        if not _is_of_answer(item):
            if answer is not None:
                yield answer
                answer = None
            yield _message(item)
            continue
        if answer is not None and not _continues(answer, item):
            yield answer
            answer = None
        answer = _extend({"role": "assistant"} if answer is None else answer, item)
    if answer is not None:
        yield answer


def _is_of_answer(item: Item) -> bool:
    match item:
        case MessageItem(role=role):
            return role == "assistant"
        case FunctionCallOutputItem():
            return False
    return True


def _message(item: Item) -> Json:
    match item:
        case FunctionCallOutputItem(call_id=call_id, output=output):
            return {"role": "tool", "tool_call_id": call_id, "content": _content(output)}
        case MessageItem(role=role, content=content):
            return {"role": role, "content": _content(content)}
    raise AssertionError("other items are parts of an answer")


def _continues(answer: Json, item: Item) -> bool:
    """Returns whether an item belongs to the message before it. Text after calls is part of the
    answer."""
    match item:
        case ReasoningItem():
            return answer.keys() == {"role", "reasoning_content"}
        case MessageItem():
            return "content" not in answer or "tool_calls" in answer
    return True


def _extend(answer: Json, item: Item) -> Json:
    match item:
        case ReasoningItem(content=parts):
            return _append(answer, "reasoning_content", "".join(part.text for part in parts or ()))
        case MessageItem(content=content):
            return _append(answer, "content", "".join(_texts(content)))
        case FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
            function = {"name": name_in_chat(item.namespace, name), "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            return answer | {"tool_calls": [*answer.get("tool_calls", ()), call]}
    raise AssertionError("outputs of calls are messages of their own")


def _append(answer: Json, name: str, text: str) -> Json:
    return answer | {name: answer.get(name, "") + text}


def _content(content: str | Sequence[ItemText | ItemImage]) -> str | list[Json]:
    match _parts(content):
        case []:
            return ""
        case [ItemText(text=text)]:
            return text
        case parts:
            return [_part(part) for part in parts]


def _part(part: ItemText | ItemImage) -> Json:
    if isinstance(part, ItemText):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": part.image_url}}


def _texts(content: str | Sequence[ItemText | ItemImage]) -> Iterator[str]:
    """Yields the texts of an answer. Raises Unsupported for an image."""
    for part in _parts(content):
        if isinstance(part, ItemImage):
            raise Unsupported("input", "messages of role 'assistant' have only text")
        yield part.text


def _parts(content: str | Sequence[ItemText | ItemImage]) -> Sequence[ItemText | ItemImage]:
    return [ItemText(type="input_text", text=content)] if isinstance(content, str) else content

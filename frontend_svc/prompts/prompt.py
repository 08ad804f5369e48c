"""Renders messages to prompt text through the model's chat template (pure).

Templates are Jinja with the semantics of Hugging Face's `apply_chat_template`: sandboxed,
`trim_blocks`, `lstrip_blocks`, `break`/`continue`, a `tojson` that keeps non-ASCII characters, and
the functions `raise_exception` and `strftime_now`. Every failure is a `TemplateError` with its
cause.

Templates differ in the message format they support and do not declare it. `ChatTemplate` detects it
once by rendering probes, and `normalise_messages` converts messages to it:

- content as a list of parts is passed if the template prints such parts, else the texts are joined
  with newlines; a string becomes one text part if the template supports only parts;
- an image or audio clip becomes a part with only its type, `image` or `audio`, for which the
  template prints the placeholder;
- tool call arguments (JSON text in the OpenAI API) are passed as an object, which most templates
  expect, or as text if the template fails on an object but not on text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frontend_svc.prompts.control_tokens import ControlTokens, unused_mark

# Any: messages, tools and template arguments are JSON from clients.
TemplateMessage = Mapping[str, Any]

# Joins text parts for templates that support only strings.
PART_SEPARATOR = "\n"

_PROBE_TEXT = "kvmesh-probe"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE_TEXT,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
_PROBE_NOW = datetime(2000, 1, 1, tzinfo=UTC)
_RESERVED_KWARGS = ("messages", "tools", "add_generation_prompt")


class TemplateError(ValueError):
    """The template is invalid, or cannot render these messages."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt. pieces: text and control token by turns, if the text contains control
    tokens that are to be encoded as text; None: all of it is encoded as it is."""

    text: str
    pieces: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class MessageShape:
    """Message format of a template; see the module."""

    text_content: bool = True
    part_content: bool = False
    text_arguments: bool = False


class ChatTemplate:
    """The compiled chat template of a model. Raises TemplateError if the source is invalid Jinja.
    bos_token, eos_token: None if the tokenizer has none; they are then undefined in the
    template."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        self._source = source
        environment = _environment()
        try:
            syntax = environment.parse(source)
            self._template = environment.from_string(syntax)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        # That it reads and `template_kwargs` may set.
        self.variables = frozenset(meta.find_undeclared_variables(syntax))
        self.shape = _probe_shape(self._render)
        self.prints_tools = _PROBE_TEXT in _render_probe(
            self._render, [{"role": "user", "content": "?"}], tools=[_PROBE_TOOL]
        )

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        now: datetime,
    ) -> str:
        """Returns the prompt text; see `prompt`."""
        variables = _variables(tools, template_kwargs)
        return self._render(normalise_messages(messages, self.shape), variables, now)

    def prompt(
        self,
        messages: Sequence[TemplateMessage],
        control_tokens: ControlTokens,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        now: datetime,
    ) -> Prompt:
        """Returns the prompt, in which control tokens in strings of the client are text.

        tools: as in the OpenAI API; None: the response calls none.
        template_kwargs: more variables of the template (for example `enable_thinking`).
        add_generation_prompt: whether it ends with the beginning of the response.
        now: the time that `strftime_now` formats.

        Raises TemplateError if the template refuses the messages (`raise_exception`) or fails, for
        content that is not text, and for `template_kwargs` that would replace an argument.
        """
        variables = _variables(tools, template_kwargs)
        variables["add_generation_prompt"] = add_generation_prompt
        normalised = normalise_messages(messages, self.shape)
        if not control_tokens.are_in(normalised, tools, template_kwargs):
            return Prompt(self._render(normalised, variables, now))
        try:
            mark = unused_mark(normalised, variables, self._source)
            if mark is None:
                raise TemplateError("text with control tokens also has all characters U+4DC0-4DFF")
            marked = control_tokens.mark_messages(normalised, mark)
            values = {
                name: control_tokens.mark_value(value, mark) for name, value in variables.items()
            }
        except RecursionError as error:
            raise TemplateError("a value is nested too deeply") from error
        pieces = control_tokens.split(self._render(marked, values, now), mark)
        return Prompt("".join(pieces), pieces)

    def _render(
        self, messages: Sequence[TemplateMessage], variables: Mapping[str, Any], now: datetime
    ) -> str:
        variables_in_scope = self._tokens | {"strftime_now": now.strftime} | dict(variables)
        try:
            prompt = self._template.render(variables_in_scope, messages=messages)
            prompt.encode()  # JSON can contain lone surrogates, which tokenizers refuse
            return prompt
        except jinja2.UndefinedError as error:
            raise TemplateError(f"chat template: missing value: {error.message}") from error
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template: {error.message}") from error
        except _TEMPLATE_EXCEPTIONS as error:
            raise TemplateError(f"chat template: {type(error).__name__}: {error}") from error


def _variables(
    tools: Sequence[Mapping[str, Any]] | None, template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    extra = template_kwargs or {}
    for name in _RESERVED_KWARGS:
        if name in extra:
            raise TemplateError(f"chat_template_kwargs: {name!r} cannot be set there")
    return {"documents": None, **extra, "tools": tools, "add_generation_prompt": True}


def normalise_messages(
    messages: Sequence[TemplateMessage], shape: MessageShape | None = None
) -> list[dict[str, Any]]:
    """Copies of validated `messages` in the format of a template (default: plain strings). Null
    values are omitted, since templates test for the presence of keys; null content becomes "".
    Raises TemplateError with the field for tool call arguments that are not a JSON object."""
    shape = shape or MessageShape()
    normalised = []
    for index, message in enumerate(messages):
        copy = {key: value for key, value in message.items() if value is not None}
        copy["content"] = _normalise_content(message.get("content"), shape)
        if "tool_calls" in copy:
            copy["tool_calls"] = [
                _normalise_call(call, f"messages[{index}].tool_calls[{number}]", shape)
                for number, call in enumerate(copy["tool_calls"])
            ]
        normalised.append(copy)
    return normalised


def _normalise_content(content: Any, shape: MessageShape) -> str | list[dict[str, str]]:
    is_list = isinstance(content, list)
    parts = content if is_list else [{"type": "text", "text": content or ""}]
    if shape.part_content and (is_list or not shape.text_content):
        return [_normalise_part(part) for part in parts]
    if any(part["type"] != "text" for part in parts):
        raise TemplateError("the chat template prints only text")
    return PART_SEPARATOR.join(part["text"] for part in parts)


def _normalise_part(part: Mapping[str, Any]) -> dict[str, str]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    return {"type": "image" if part["type"] == "image_url" else "audio"}


def _normalise_call(call: Any, field: str, shape: MessageShape) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{field}.function.arguments: not JSON: {error}") from error
    if arguments is None:  # Some clients send "null" for a call without arguments.
        arguments = {}
    if not isinstance(arguments, dict):
        raise TemplateError(f"{field}.function.arguments: not a JSON object")
    formatted_arguments = _to_json(arguments) if shape.text_arguments else arguments
    return {**call, "function": {**function, "arguments": formatted_arguments}}


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja2 reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's `tojson`, which escapes for HTML, unlike the text of a model's training."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# Exceptions of Python code inside a template on unexpected data.
_TEMPLATE_EXCEPTIONS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

_Render = Callable[[Sequence[TemplateMessage], Mapping[str, Any], datetime], str]


def _probe_shape(render: _Render) -> MessageShape:
    text = _render_probe(render, [{"role": "user", "content": _PROBE_TEXT}])
    part = [{"type": "text", "text": _PROBE_TEXT}]
    turns = [{"role": "user", "content": part}, {"role": "assistant", "content": part}]
    parts = _render_probe(render, turns)
    # A template for strings may print a list as Python or JSON text: that is no support for parts.
    printed_raw = "{'type': 'text'" in parts or '{"type": "text"' in parts
    part_content = parts.count(_PROBE_TEXT) == len(turns) and not printed_raw
    return MessageShape(
        # If neither probe renders (a template with more requirements), strings are the safe choice.
        text_content=_PROBE_TEXT in text or not part_content,
        part_content=part_content,
        text_arguments=_requires_text_arguments(render),
    )


def _requires_text_arguments(render: _Render) -> bool:
    as_object = _render_probe(render, _probe_call({_PROBE_TEXT: _PROBE_TEXT}))
    as_text = _render_probe(render, _probe_call(_to_json({_PROBE_TEXT: _PROBE_TEXT})))
    return _PROBE_TEXT not in as_object and _PROBE_TEXT in as_text


def _probe_call(arguments: Any) -> list[TemplateMessage]:
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def _render_probe(
    render: _Render, messages: Sequence[TemplateMessage], tools: Sequence[Any] | None = None
) -> str:
    try:
        return render(messages, {"tools": tools, "add_generation_prompt": False}, _PROBE_NOW)
    except TemplateError:
        return ""  # the template does not support this format

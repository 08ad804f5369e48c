"""The forms in which models write tool calls (pure).

Names and forms follow the parsers of SGLang and vLLM of the same names. A form has a block of calls
between two markers. Where the arguments are JSON, `header` matches the text from the start of the
block, or from the end of the last call, up to the arguments, which are then sent as they arrive.
Where they are not, and where a model writes a call in an unusual order, `read_block` reads the
whole block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from frontend_svc.tools.blocks import (
    Call,
    ParameterTypes,
    read_glm_block,
    read_json_block,
    read_pythonic_block,
    read_xml_block,
)
from frontend_svc.tools.harmony import HARMONY, HARMONY_MARKERS

_JSON_NAME: Final = (
    r'\{\s*"name"\s*:\s*(?P<json_name>"(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME: Final = r"(?P<name>[\w.\-]+?)"
_TOOL_CALL: Final = ("<tool_call>", "</tool_call>")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes tool calls."""

    begin: str
    """Marker at the start of a block."""

    end: str | None
    """Marker at the end of a block; None: the block is the rest of the response."""

    read_block: Callable[[str, ParameterTypes], list[Call] | None]
    """Returns the calls of a block; None if it is not complete."""

    header: re.Pattern[str] | None = None
    """See the module."""

    at_start: bool = False
    """Whether a block begins the response; `begin` is then part of the block."""

    tag: Callable[[str], tuple[str, str]] | None = None
    """Returns the text before and after the JSON arguments of a call of this name, with which
    guided decoding forces a call; None if the arguments are not JSON."""

    id_chars: int = 0
    """Length of the ids that the model's template requires; 0: any."""

    markers: tuple[str, ...] = ()
    """Texts that may be special tokens of the model, which would have no text otherwise."""


def _json_tag(before: str, key: str, after: str) -> Callable[[str], tuple[str, str]]:
    def tag(name: str) -> tuple[str, str]:
        quoted_name = json.dumps(name, ensure_ascii=False)
        return f'{before}{{"name": {quoted_name}, "{key}": ', f"}}{after}"

    return tag


HERMES: Final = CallFormat(
    begin=_TOOL_CALL[0],
    end=_TOOL_CALL[1],
    header=re.compile(r"\s*" + _JSON_NAME),
    read_block=read_json_block,
    tag=_json_tag("<tool_call>\n", "arguments", "\n</tool_call>"),
    markers=_TOOL_CALL,
)
_DEEPSEEK: Final = CallFormat(
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    header=re.compile(
        r"(?:[\s`]|<｜tool▁call▁end｜>)*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
        + _NAME
        + r"(?:<｜tool▁sep｜>|\s*\n```json\n)\s*(?=\{)"
    ),
    read_block=read_json_block,
    tag=lambda name: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    markers=(
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    ),
)

FORMATS: Final[Mapping[str, CallFormat]] = MappingProxyType(
    {
        "hermes": HERMES,
        "qwen25": HERMES,
        "qwen3": HERMES,
        "qwen3_coder": CallFormat(*_TOOL_CALL, read_xml_block, markers=_TOOL_CALL),
        "glm45": CallFormat(
            *_TOOL_CALL,
            read_glm_block,
            markers=(*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        "llama3_json": CallFormat(
            begin="{",
            end=None,
            at_start=True,
            header=re.compile(r"[\s;,}]*" + _JSON_NAME),
            read_block=read_json_block,
            tag=_json_tag("", "parameters", ""),
            markers=("<|python_tag|>",),
        ),
        "mistral": CallFormat(
            begin="[TOOL_CALLS]",
            end=None,
            header=re.compile(
                r"(?:[\s\[,}]|\]|\[TOOL_CALLS\])*?(?:"
                + _JSON_NAME
                + "|"
                + _NAME
                + r"(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{))"
            ),
            read_block=read_json_block,
            tag=_json_tag("[TOOL_CALLS] [", "arguments", "]"),
            id_chars=9,
            markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        ),
        # `HarmonyParser` reads it.
        HARMONY: CallFormat("<|channel|>", None, read_json_block, markers=HARMONY_MARKERS),
        "pythonic": CallFormat("[", None, read_pythonic_block, at_start=True),
        "deepseek_v3": replace(
            _DEEPSEEK,
            tag=lambda name: (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
                f"{name}\n```json\n",
                "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ),
        ),
        "deepseek_v3_1": _DEEPSEEK,
        "kimi_k2": CallFormat(
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
            header=re.compile(
                r"(?:\s|<\|tool_call_end\|>)*<\|tool_call_begin\|>\s*"
                r"(?P<id>(?:functions\.)?" + _NAME + r":\d+)\s*"
                r"<\|tool_call_argument_begin\|>\s*(?=\{)"
            ),
            read_block=read_json_block,
            tag=lambda name: (
                f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|><|tool_calls_section_end|>",
            ),
            markers=(
                *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
                *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            ),
        ),
    }
)

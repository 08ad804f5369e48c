"""Separates the reasoning at the start of a response from its answer while it arrives (pure).

The result does not depend on how the text is split. White space around the markers is dropped,
except before the end marker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, NamedTuple

from frontend_svc.tools.text import overlap


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning. is_implied: it begins without `begin`."""

    begin: str
    end: str
    is_implied: bool = False

    def starts_inside(self, prompt_end: str) -> bool:
        """Returns whether a response begins with reasoning. prompt_end: the last characters of
        its prompt, in which the chat template may have opened or closed the reasoning."""
        text = prompt_end.rstrip()
        return text.endswith(self.begin) or (self.is_implied and not text.endswith(self.end))


_THINK: Final = ReasoningFormat("<think>", "</think>")

REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = MappingProxyType(
    {
        "basic": _THINK,
        "qwen3": _THINK,
        "glm45": _THINK,
        "deepseek_v3_1": _THINK,
        "deepseek_r1": ReasoningFormat("<think>", "</think>", is_implied=True),
        "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
        "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    }
)


class SplitText(NamedTuple):
    """The parts of a piece of text."""

    reasoning: str
    answer: str


class _State(Enum):
    START = auto()
    REASONING = auto()
    AFTER = auto()  # white space between the reasoning and the answer
    ANSWER = auto()


class ReasoningParser:
    """Parses one response."""

    def __init__(self, reasoning_format: ReasoningFormat, *, starts_inside: bool) -> None:
        self._format = reasoning_format
        self._is_inside = starts_inside
        self._state = _State.START
        self._buffer = ""

    @property
    def is_over(self) -> bool:
        """Whether the rest of the response is answer."""
        return self._state is _State.ANSWER

    def feed(self, text: str) -> SplitText:
        """Returns the parts that the next piece completes."""
        if self._state is _State.ANSWER:
            return SplitText("", text)
        self._buffer += text
        if self._state is _State.START:
            self._read_start()
        reasoning = self._read_reasoning() if self._state is _State.REASONING else ""
        if self._state is _State.AFTER and (answer := self._buffer.lstrip()):
            self._state, self._buffer = _State.ANSWER, answer
        answer = ""
        if self._state is _State.ANSWER:
            answer, self._buffer = self._buffer, ""
        return SplitText(reasoning, answer)

    def finish(self) -> SplitText:
        """Returns the rest after the last piece."""
        text, self._buffer = self._buffer, ""
        match self._state:
            case _State.REASONING:
                return SplitText(text, "")
            case _State.START if self._is_inside:
                return SplitText(text, "")
            case _State.START:
                return SplitText("", text)
        return SplitText("", "")

    def _read_start(self) -> None:
        begin, text = self._format.begin, self._buffer.lstrip()
        if text.startswith(begin):
            rest = text.removeprefix(begin).lstrip()
            if rest:
                self._state, self._buffer = _State.REASONING, rest
        elif not begin.startswith(text):
            if self._is_inside:
                self._state, self._buffer = _State.REASONING, text
            else:
                self._state = _State.ANSWER

    def _read_reasoning(self) -> str:
        end = self._format.end
        found = self._buffer.find(end)
        if found >= 0:
            reasoning = self._buffer[:found]
            self._state, self._buffer = _State.AFTER, self._buffer[found + len(end) :]
            return reasoning
        stop = len(self._buffer) - overlap(self._buffer, end)
        reasoning, self._buffer = self._buffer[:stop], self._buffer[stop:]
        return reasoning

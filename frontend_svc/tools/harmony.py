"""Separates the messages of gpt-oss models, which write OpenAI's harmony format (pure).

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

The channel `analysis` is reasoning; a message `to=functions.NAME` is a call; other messages are
content. A text that does not begin with a header is content, since a constraint wrote it. The
deltas, concatenated, do not depend on how the text is split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto
from typing import Final

from frontend_svc.tools.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from frontend_svc.tools.text import overlap

_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADERS: Final = ("<|channel|>", "<|start|>", _MESSAGE)
HARMONY_MARKERS: Final = (_MESSAGE, *_ENDS, "<|channel|>", "<|constrain|>")
HARMONY: Final = "gpt_oss"

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


class _State(Enum):
    START = auto()
    HEADER = auto()
    BODY = auto()
    CONTENT = auto()  # a response without headers
    DONE = auto()


class HarmonyParser:
    """Parses one response. is_single: only the first call counts, and ends the response."""

    def __init__(self, *, is_single: bool = False) -> None:
        self.calls = 0
        self._is_single = is_single
        self._state = _State.START
        self._buffer = ""
        self._channel = ""
        self._is_call = False

    @property
    def is_done(self) -> bool:
        return self._state is _State.DONE

    def feed(self, text: str) -> list[Delta]:
        """Returns the deltas that the next piece of text completes."""
        self._buffer += text
        return list(self._advance())

    def finish(self) -> list[Delta]:
        """Returns the rest after the last piece."""
        text, self._buffer = self._buffer, ""
        if self._state is _State.BODY:
            # The end marker of a last call is an EOS token, without text.
            deltas = list(self._body(text))
            self.calls, self._is_call = self.calls + self._is_call, False
            return deltas
        is_text = self._state in (_State.START, _State.CONTENT)
        return [Content(text)] if text and is_text else []

    def _advance(self) -> Iterator[Delta]:
        state = None
        while state is not self._state:
            state = self._state
            match state:
                case _State.START:
                    self._read_start()
                case _State.HEADER:
                    yield from self._read_header()
                case _State.BODY:
                    yield from self._read_body()
                case _State.CONTENT:
                    text, self._buffer = self._buffer, ""
                    if text:
                        yield Content(text)

    def _read_start(self) -> None:
        if any(self._buffer.startswith(header) for header in _HEADERS):
            self._state = _State.HEADER
        elif not any(header.startswith(self._buffer) for header in _HEADERS):
            self._state = _State.CONTENT

    def _read_header(self) -> Iterator[Delta]:
        header, found, rest = self._buffer.partition(_MESSAGE)
        if not found:
            return
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel is not None else "final"
        self._is_call = recipient is not None
        self._state, self._buffer = _State.BODY, rest
        if recipient is not None:
            yield CallStart(self.calls, recipient[1])

    def _read_body(self) -> Iterator[Delta]:
        found = [(at, end) for end in _ENDS if (at := self._buffer.find(end)) >= 0]
        if not found:
            held = max(overlap(self._buffer, end) for end in _ENDS)
            stop = len(self._buffer) - held
            text, self._buffer = self._buffer[:stop], self._buffer[stop:]
            yield from self._body(text)
            return
        at, end = min(found)
        yield from self._body(self._buffer[:at])
        self._buffer = self._buffer[at + len(end) :]
        self._state = _State.HEADER
        self.calls += self._is_call
        if self._is_call and self._is_single:
            self._state = _State.DONE
        self._is_call = False

    def _body(self, text: str) -> Iterator[Delta]:
        if not text:
            return
        if self._is_call:
            yield CallArguments(self.calls, text)
        else:
            yield Reasoning(text) if self._channel == "analysis" else Content(text)

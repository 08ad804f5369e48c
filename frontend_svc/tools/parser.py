"""Separates a response into content and tool calls while it arrives (pure).

The deltas, concatenated, do not depend on how the text is split. Text outside of blocks is content;
only a suffix that may begin a block is withheld. White space next to a call is dropped. The name of
a call is sent when its arguments begin, and then the arguments as they arrive. A block that is no
call after all becomes content at the end of the response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from enum import Enum, auto

from frontend_svc.tools.blocks import Call, ParameterTypes
from frontend_svc.tools.deltas import CallArguments, CallStart, Content, Delta
from frontend_svc.tools.formats import CallFormat
from frontend_svc.tools.json_text import JsonScanner
from frontend_svc.tools.text import overlap

# Left over between calls and after the last: brackets and separators of JSON, white space.
_SEPARATORS = " \t\r\n;,[]}`"
# A header has a name and few separators. Without a limit, each piece of a long block without one
# would cause another search of the whole block.
_HEADER_CHARS_MAX = 4096
# Llama models may begin a call with it.
_PYTHON_TAG = "<|python_tag|>"


class _State(Enum):
    CONTENT = auto()
    BLOCK = auto()  # before the arguments of a call
    ARGUMENTS = auto()
    DONE = auto()


class ToolCallParser:
    """Parses one response. types: schemas of the parameters. is_single: only the first call counts;
    after it `is_done` is set, and further text is ignored."""

    def __init__(
        self, call_format: CallFormat, types: ParameterTypes, *, is_single: bool = False
    ) -> None:
        self.calls = 0
        self._format = call_format
        self._types = types
        self._is_single = is_single
        self._state = _State.CONTENT
        self._buffer = ""
        self._has_content = False  # of the present stretch of content
        self._calls_before_block = 0
        self._ends_tried = 0
        self._may_have_header = True
        self._scanner = JsonScanner()
        self._ids: set[str | None] = set()

    @property
    def is_done(self) -> bool:
        return self._state is _State.DONE

    def feed(self, text: str) -> list[Delta]:
        """Returns the deltas that the next piece of text completes."""
        self._buffer += text
        return list(self._advance())

    def finish(self) -> list[Delta]:
        """Returns the rest after the last piece. After a call, a marker that is cut is none."""
        text, self._buffer = self._buffer, ""
        match self._state:
            case _State.BLOCK:
                return list(self._finish_block(text))
            case _State.CONTENT if not self.calls or self._has_content:
                return [Content(text)] if text else []
        return []

    def _advance(self) -> Iterator[Delta]:
        state = None
        while state is not self._state:
            state = self._state
            match state:
                case _State.CONTENT:
                    yield from self._read_start() if self._format.at_start else self._read_content()
                case _State.BLOCK:
                    yield from self._read_block()
                case _State.ARGUMENTS:
                    yield from self._read_arguments()

    def _read_content(self) -> Iterator[Delta]:
        begin = self._format.begin
        found = self._buffer.find(begin)
        stop = found if found >= 0 else len(self._buffer) - overlap(self._buffer, begin)
        text = self._buffer[:stop]
        if self._has_content or text.strip():
            self._has_content, self._buffer = True, self._buffer[stop:]
            if text:
                yield Content(text)
        if found >= 0:
            self._open_block(self._buffer.lstrip().removeprefix(begin))

    def _read_start(self) -> Iterator[Delta]:
        """Yields a response that is a block as a whole, or none."""
        text = self._buffer.lstrip().removeprefix(_PYTHON_TAG).lstrip()
        if not self._has_content and text.startswith(self._format.begin):
            self._open_block(text)
        elif self._has_content or not _PYTHON_TAG.startswith(text):
            self._has_content = True
            text, self._buffer = self._buffer, ""
            if text:
                yield Content(text)

    def _open_block(self, buffer: str) -> None:
        self._state, self._buffer = _State.BLOCK, buffer
        self._calls_before_block, self._ends_tried = self.calls, 0
        self._may_have_header = True

    def _read_block(self) -> Iterator[Delta]:
        header, end = self._format.header, self._format.end
        match = name = None
        if header is not None and self._may_have_header:
            match = header.match(self._buffer, 0, _HEADER_CHARS_MAX)
            self._may_have_header = len(self._buffer) < _HEADER_CHARS_MAX
            name = None if match is None else _name_of(match)
        if match is not None and name is not None:
            call_id = match.groupdict().get("id")
            # Models repeat ids; a client assigns results by them.
            yield CallStart(self.calls, name, None if call_id in self._ids else call_id)
            self._ids.add(call_id)
            self._buffer = self._buffer[match.end() :]
            self._scanner, self._state = JsonScanner(), _State.ARGUMENTS
        elif end is not None:
            yield from self._read_end(end)

    def _read_end(self, end: str) -> Iterator[Delta]:
        """Closes the block at its end marker, which may also occur inside of a call."""
        while (found := self._buffer.find(end, self._ends_tried)) >= 0:
            calls: Sequence[Call] | None = ()
            if self.calls == self._calls_before_block:
                calls = self._format.read_block(self._buffer[:found], self._types)
            if calls is not None:
                self._state, self._has_content = _State.CONTENT, False
                self._buffer = self._buffer[found + len(end) :]
                yield from self._whole_calls(calls)
                return
            self._ends_tried = found + 1

    def _read_arguments(self) -> Iterator[Delta]:
        end = self._scanner.find_end(self._buffer)
        text = self._buffer[:end]
        self._buffer = "" if end is None else self._buffer[end:]
        if text:
            yield CallArguments(self.calls, text)
        if end is not None:
            self.calls, self._ends_tried, self._may_have_header = self.calls + 1, 0, True
            self._state = _State.DONE if self._is_single else _State.BLOCK

    def _whole_calls(self, calls: Sequence[Call]) -> Iterator[Delta]:
        for name, arguments in calls[:1] if self._is_single else calls:
            yield CallStart(self.calls, name)
            yield CallArguments(self.calls, arguments)
            self.calls += 1
            if self._is_single:
                self._state = _State.DONE

    def _finish_block(self, buffer: str) -> Iterator[Delta]:
        """Yields the end of a response inside a block."""
        if self.calls > self._calls_before_block:
            text = buffer if self._without_markers(buffer).strip(_SEPARATORS) else ""
        else:
            calls = self._format.read_block(buffer, self._types)
            if calls is not None:
                yield from self._whole_calls(calls)
                return
            text = buffer if self._format.at_start else self._format.begin + buffer
        if text:
            yield Content(text)

    def _without_markers(self, text: str) -> str:
        """Returns the end of a block without markers, also without one that is cut."""
        markers = {*self._format.markers, self._format.begin, self._format.end or ""} - {""}
        for marker in markers:
            text = text.replace(marker, "")
        return text[: len(text) - max(overlap(text, marker) for marker in markers)]


def _name_of(header: re.Match[str]) -> str | None:
    """Returns the name of a call; None if it is no valid JSON text."""
    groups = header.groupdict()
    if groups.get("name"):
        return groups["name"]
    try:
        return str(json.loads(groups["json_name"]))
    except ValueError:
        return None

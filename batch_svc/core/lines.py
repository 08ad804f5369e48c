"""The lines of an input file: checks, and the order in which they are sent (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import orjson
import xxhash

from batch_svc.core.limits import CUSTOM_ID_CHARS_MAX, ERRORS_MAX

# Characters of a prompt that count as one unit of its prefix, and the units that count.
_UNIT_CHARS: Final = 256
_UNITS_MAX: Final = 64
# Fields of a body that make its prompt, in the order of the prompt.
_PROMPT_FIELDS: Final = ("model", "tools", "instructions", "messages", "prompt", "input")
# Of a value that orjson writes.
_DEPTH_MAX: Final = 250
_KEYS: Final = frozenset({"custom_id", "method", "url", "body"})
_NO_PRIORITY: Final = "lines run behind all other requests; leave it out"


@dataclass(frozen=True, slots=True)
class Line:
    """A line that can be sent."""

    number: int
    """From 1, in the input file."""

    custom_id: str
    body: bytes
    """The body of the request, as JSON."""

    prefix: bytes
    """Equal up to a length for prompts that begin alike: sorted by it, they are neighbours."""


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a file cannot be a batch."""

    code: str
    message: str
    param: str = ""
    line: int = 0
    """0: the file as a whole."""


class _Invalid(Exception):
    def __init__(self, code: str, message: str, param: str = "") -> None:
        super().__init__(message)
        self.code, self.param = code, param


class LineReader:
    """Reads the lines of a file part by part, in the order of the file.

    endpoint: of the batch, which each line must name.
    """

    def __init__(self, endpoint: str, lines_max: int) -> None:
        self._endpoint = endpoint
        self._lines_max = lines_max
        self._number = 0
        self._custom_ids: set[str] = set()
        # Of a line that has not ended; joined once.
        self._rest: list[bytes] = []
        self.errors: list[LineError] = []
        """At most ERRORS_MAX."""

        self.is_done = False
        """What follows in the file makes no difference."""

    def feed(self, part: bytes) -> list[Line]:
        """Returns the valid lines that end in the next part of the file."""
        end, *others = part.split(b"\n")
        self._rest.append(end)
        if not others:
            return []
        ended = [b"".join(self._rest), *others[:-1]]
        self._rest = others[-1:]
        return self._read_all(ended)

    def end(self) -> list[Line]:
        """Returns the last line of the file, if it is valid and not empty."""
        lines = self._read_all([b"".join(self._rest)])
        if not self._custom_ids and not self.errors:
            self.errors.append(LineError("empty_file", "the file has no lines"))
        return lines

    def _read_all(self, ended: Iterable[bytes]) -> list[Line]:
        lines: list[Line] = []
        for raw in ended:
            self._number += 1
            if self.is_done or not raw.strip():
                continue
            if len(self._custom_ids) >= self._lines_max:
                text = f"the file has more than {self._lines_max} lines"
                text += "; split it into several batches"
                self.errors = [LineError("too_many_lines", text, line=self._number)]
                self.is_done = True
                continue
            try:
                line = _read(raw, self._number, self._endpoint, self._custom_ids)
            except _Invalid as error:
                self.errors.append(LineError(error.code, str(error), error.param, self._number))
                self.is_done = len(self.errors) >= ERRORS_MAX
                continue
            self._custom_ids.add(line.custom_id)
            lines.append(line)
        return lines


def prefix_of(body: dict[str, Any]) -> bytes:
    """Returns 8 bytes a unit of a prompt: prompts that begin alike have equal first bytes."""
    fields = [body[name] for name in _PROMPT_FIELDS if name in body]
    text = orjson.dumps(fields)
    units = [
        text[start : start + _UNIT_CHARS]
        for start in range(0, min(len(text), _UNIT_CHARS * _UNITS_MAX), _UNIT_CHARS)
    ]
    return b"".join(xxhash.xxh3_64_digest(unit) for unit in units)


def _read(raw: bytes, number: int, endpoint: str, custom_ids: set[str]) -> Line:
    """Raises _Invalid."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _Invalid("invalid_json_line", f"the line is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _Invalid("invalid_json_line", "the line is not a JSON object")
    if unknown := value.keys() - _KEYS:
        name = min(unknown)
        raise _Invalid("unknown_parameter", f"a line has no field {name[:64]!r}", name[:64])
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_CHARS_MAX:
        text = f"'custom_id' must be a text of 1 to {CUSTOM_ID_CHARS_MAX} characters"
        raise _Invalid("invalid_custom_id", text, "custom_id")
    if "\0" in custom_id:  # PostgreSQL cannot store it.
        text = "'custom_id' must not contain the character NUL"
        raise _Invalid("invalid_custom_id", text, "custom_id")
    if custom_id in custom_ids:
        text = f"'custom_id' {custom_id[:64]!r} is that of an earlier line"
        raise _Invalid("duplicate_custom_id", text, "custom_id")
    if value.get("method") != "POST":
        raise _Invalid("invalid_method", "'method' must be 'POST'", "method")
    if value.get("url") != endpoint:
        text = f"'url' must be {endpoint!r}, the endpoint of the batch"
        raise _Invalid("mismatched_endpoint", text, "url")
    body = value.get("body")
    if not isinstance(body, dict):
        raise _Invalid("invalid_body", "'body' must be an object", "body")
    _check_body(body)
    try:
        return Line(number, custom_id, orjson.dumps(body), prefix_of(body))
    except orjson.JSONEncodeError:
        # orjson reads deeper values than it writes.
        text = f"'body' is nested deeper than {_DEPTH_MAX} levels"
        raise _Invalid("invalid_body", text, "body") from None


def _check_body(body: dict[str, Any]) -> None:
    """Raises _Invalid for what a line cannot have; the rest is checked when the line runs."""
    if not isinstance(body.get("model"), str):
        raise _Invalid("missing_model", "'body.model' must name a model", "body.model")
    if body.get("stream"):
        raise _Invalid("unsupported_parameter", "a line cannot be a stream", "body.stream")
    if body.get("background"):
        raise _Invalid("unsupported_parameter", "a line has no background", "body.background")
    if body.get("conversation") is not None:
        # A line that ran when its service was killed runs again, and would be appended twice.
        text = "a line has no conversation"
        raise _Invalid("unsupported_parameter", text, "body.conversation")
    if body.get("priority") is not None:
        raise _Invalid("unsupported_parameter", _NO_PRIORITY, "body.priority")
    for name in ("nvext", "kvmesh"):
        extension = body.get(name)
        if isinstance(extension, dict) and extension.get("agent_hints") is not None:
            raise _Invalid("unsupported_parameter", _NO_PRIORITY, f"body.{name}.agent_hints")

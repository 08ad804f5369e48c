"""Deltas as lines of JSON, in which the batch service stores the output of a response (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import orjson

from frontend_svc.tools.deltas import CallArguments, CallStart, Content, Delta, Reasoning


def write_deltas(deltas: Iterable[Delta]) -> bytes:
    """Returns deltas as lines, each with its break."""
    return b"".join(
        orjson.dumps(_fields(delta), option=orjson.OPT_APPEND_NEWLINE) for delta in deltas
    )


def read_deltas(lines: bytes) -> Sequence[Delta]:
    """Returns the deltas of `write_deltas`."""
    return [_delta(*orjson.loads(line)) for line in lines.splitlines()]


def _fields(delta: Delta) -> tuple[object, ...]:
    match delta:
        case Content(text):
            return "content", text
        case Reasoning(text):
            return "reasoning", text
        case CallStart(index, name, call_id):
            return "call", index, name, call_id
        case CallArguments(index, text):
            return "arguments", index, text


# object: JSON.
def _delta(tag: str, *fields: object) -> Delta:
    match tag, fields:
        case "content", (str(text),):
            return Content(text)
        case "reasoning", (str(text),):
            return Reasoning(text)
        case "call", (int(index), str(name), str() | None as call_id):
            return CallStart(index, name, call_id)
        case "arguments", (int(index), str(text)):
            return CallArguments(index, text)
    raise ValueError(f"the delta {tag!r} is not known")

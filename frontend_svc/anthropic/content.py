"""The content blocks of a message, whole and as events of a stream (pure).

Adjacent deltas of one kind form one block, and each tool call is a block. The events of a block
are its start, its pieces and its stop; then the next block follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from pydantic_core import from_json

from frontend_svc.tools.deltas import CallArguments, CallStart, Content, Delta, Reasoning

# Clients return thinking blocks only if they have a signature. The server does not verify it.
SIGNATURE: Final = "kvmesh"
# Arguments that are no JSON object are in this key of `input`, as Anthropic advises clients.
INVALID_JSON: Final = "INVALID_JSON"
_BLOCK_TYPES: Final = {
    Content: "text",
    Reasoning: "thinking",
    CallStart: "tool_use",
    CallArguments: "tool_use",
}

# Any: JSON.
Json = dict[str, Any]


class BlockEvents:
    """Writes the events of one message's blocks."""

    def __init__(self) -> None:
        self._index = -1
        self._type: str | None = None

    def feed(self, delta: Delta) -> Iterator[Json]:
        """Yields the events of a delta."""
        if not _continues(self._type, delta):
            yield from self.close()
            self._index += 1
            self._type = _BLOCK_TYPES[type(delta)]
            block = _empty_block(delta)
            yield {"type": "content_block_start", "index": self._index, "content_block": block}
        if piece := _piece(delta):
            yield self._delta(piece)

    def close(self) -> Iterator[Json]:
        """Yields the events of the end of the last block."""
        if self._type == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._type is not None:
            self._type = None
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def content_blocks(deltas: Iterable[Delta]) -> list[Json]:
    """Returns the blocks of a whole message."""
    blocks: list[tuple[Json, list[str]]] = []
    for delta in deltas:
        if not _continues(blocks[-1][0]["type"] if blocks else None, delta):
            blocks.append((_empty_block(delta), []))
        blocks[-1][1].append("" if isinstance(delta, CallStart) else delta.text)
    return [_whole_block(block, "".join(pieces)) for block, pieces in blocks]


def _continues(block_type: str | None, delta: Delta) -> bool:
    return _BLOCK_TYPES[type(delta)] == block_type and not isinstance(delta, CallStart)


def _empty_block(delta: Delta) -> Json:
    match delta:
        case Content():
            return {"type": "text", "text": ""}
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case CallStart(_, name, call_id):
            return {"type": "tool_use", "id": call_id, "name": name, "input": {}}
    raise AssertionError("arguments follow the start of their call")


def _piece(delta: Delta) -> Json | None:
    match delta:
        case CallStart() | Content("") | Reasoning("") | CallArguments(_, ""):
            return None
        case Content(text):
            return {"type": "text_delta", "text": text}
        case Reasoning(text):
            return {"type": "thinking_delta", "thinking": text}
        case CallArguments(_, text):
            return {"type": "input_json_delta", "partial_json": text}


def _whole_block(block: Json, text: str) -> Json:
    match block["type"]:
        case "text":
            return block | {"text": text}
        case "thinking":
            return block | {"thinking": text, "signature": SIGNATURE}
    return block | {"input": _input(text)}


def _input(arguments: str) -> Json:
    """Returns the arguments of a call. Incomplete ones lose their unfinished end, as in the SDK."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}

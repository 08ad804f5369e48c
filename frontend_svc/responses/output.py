"""The output of a response: its items, and the events of their growth (pure).

Adjacent deltas of one kind form one item: a message, reasoning or a function call. The events of an
item are its start, its pieces, its whole content and its end; then the next item follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, TypeAlias

from frontend_svc.responses.ids import item_id
from frontend_svc.responses.tools import FunctionNames
from frontend_svc.tools.deltas import CallArguments, CallStart, Content, Delta, Reasoning

ItemStatus: TypeAlias = Literal["completed", "incomplete"]

_ITEM_TYPES: Final = {
    Content: "message",
    Reasoning: "reasoning",
    CallStart: "function_call",
    CallArguments: "function_call",
}
_ID_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
# Type of an item -> prefix of the events of its text.
_TEXT_EVENTS: Final = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}

# Any: JSON.
Json = dict[str, Any]


class OutputItems:
    """The output of one response. Its events lack `sequence_number`."""

    def __init__(self, response_id: str, names: FunctionNames) -> None:
        self._response_id = response_id
        self._names = names
        self._open: Json | None = None
        self._pieces: list[str] = []
        self.items: list[Json] = []

    def feed(self, delta: Delta) -> Iterator[Json]:
        """Yields the events of a delta."""
        item = self._open
        kind = _ITEM_TYPES[type(delta)]
        if item is None or item["type"] != kind or isinstance(delta, CallStart):
            yield from self.close("completed")
            item = self._open = self._start(delta)
            yield {"type": "response.output_item.added", "output_index": self._index, "item": item}
            if kind != "function_call":
                yield self._part_event("added", _part(kind, ""))
        if not isinstance(delta, CallStart) and delta.text:
            self._pieces.append(delta.text)
            yield self._text_event("delta", {"delta": delta.text})

    def close(self, status: ItemStatus) -> Iterator[Json]:
        """Yields the events of the end of the last item."""
        if self._open is None:
            return
        kind, text = self._open["type"], "".join(self._pieces)
        item = self._open | {"status": status}
        if kind == "function_call":
            item["arguments"] = text
            whole: Json = {"name": item["name"], "arguments": text}
        else:
            item["content"] = [_part(kind, text)]
            whole = {"text": text}
        yield self._text_event("done", whole)
        if kind != "function_call":
            yield self._part_event("done", _part(kind, text))
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}
        self.items.append(item)
        self._open, self._pieces = None, []

    @property
    def has_items(self) -> bool:
        return bool(self.items) or self._open is not None

    @property
    def _index(self) -> int:
        return len(self.items)

    def _start(self, delta: Delta) -> Json:
        kind = _ITEM_TYPES[type(delta)]
        new_id = item_id(_ID_PREFIXES[kind], self._response_id, self._index)
        item: Json = {"type": kind, "id": new_id, "status": "in_progress"}
        match delta:
            case Content():
                return item | {"role": "assistant", "content": []}
            case Reasoning():
                return item | {"summary": [], "content": []}
            case CallStart(_, name, call_id):
                return item | {
                    "call_id": call_id,
                    **self._names.call_fields(name),
                    "arguments": "",
                }
        raise AssertionError("arguments follow the start of their call")

    def _part_event(self, name: str, part: Json) -> Json:
        return {"type": f"response.content_part.{name}", **self._position(), "part": part}

    def _text_event(self, name: str, fields: Json) -> Json:
        assert self._open is not None, "text belongs to an item"
        kind = self._open["type"]
        if kind == "message":
            fields = fields | {"logprobs": []}
        return {"type": f"{_TEXT_EVENTS[kind]}.{name}", **self._position(), **fields}

    def _position(self) -> Json:
        assert self._open is not None, "only an open item grows"
        position = {"item_id": self._open["id"], "output_index": self._index}
        has_parts = self._open["type"] != "function_call"
        return position | {"content_index": 0} if has_parts else position


def _part(kind: str, text: str) -> Json:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}

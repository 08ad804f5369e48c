"""The deltas of one response (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from frontend_svc.core.tools.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from frontend_svc.core.tools.harmony import HarmonyParser
from frontend_svc.core.tools.parser import ToolCallParser
from frontend_svc.core.tools.reasoning import ReasoningParser, SplitText

_ID_CHARS = 24


def call_id(response_id: str, index: int, chars: int) -> str:
    """An id for a call without one. chars: the length that the model requires; 0: any."""
    digest = hashlib.sha256(f"{response_id} {index}".encode()).hexdigest()
    return digest[:chars] if chars else f"call_{digest[:_ID_CHARS]}"


class ResponseParser:
    """Parses the text of one response. tools, reasoning: None if it has no calls, no reasoning.
    id_chars: see `CallFormat`."""

    def __init__(
        self,
        tools: ToolCallParser | HarmonyParser | None,
        reasoning: ReasoningParser | None,
        response_id: str,
        *,
        id_chars: int = 0,
    ) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._response_id = response_id
        self._id_chars = id_chars

    @property
    def is_done(self) -> bool:
        """Whether the response is complete although the model may continue."""
        return self._tools is not None and self._tools.is_done

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.calls > 0

    def feed(self, text: str) -> list[Delta]:
        """The deltas that the next piece of text completes."""
        if self._reasoning is None:
            return self._answer(text)
        parts = self._reasoning.feed(text)
        return [*_reasoning(parts.reasoning), *self._answer(parts.answer)]

    def finish(self) -> list[Delta]:
        """The rest after the last piece."""
        parts = SplitText("", "") if self._reasoning is None else self._reasoning.finish()
        deltas = [*_reasoning(parts.reasoning), *self._answer(parts.answer)]
        return deltas if self._tools is None else [*deltas, *self._tools.finish()]

    def _answer(self, text: str) -> list[Delta]:
        if self._tools is None or not text:
            return [Content(text)] if text else []
        return self._tools.feed(text)

    # Any, here and below: JSON.
    def chunk_delta(self, delta: Delta) -> dict[str, Any]:
        """A delta as the `delta` of a chunk."""
        match delta:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallStart(index, name):
                call_id = self._id_of(delta)
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                return {"tool_calls": [call]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def message(self, deltas: Iterable[Delta]) -> dict[str, Any]:
        """All deltas of a response as the `message` of a choice."""
        content = reasoning = ""
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            match delta:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallStart(name=name):
                    function = {"name": name, "arguments": ""}
                    calls.append(
                        {"id": self._id_of(delta), "type": "function", "function": function}
                    )
                case CallArguments(index, text):
                    calls[index]["function"]["arguments"] += text
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        message["content"] = content if content or not (calls or reasoning) else None
        if reasoning:
            message["reasoning_content"] = reasoning
        return message | ({"tool_calls": calls} if calls else {})

    def _id_of(self, start: CallStart) -> str:
        return start.id or call_id(self._response_id, start.index, self._id_chars)


def _reasoning(text: str) -> list[Delta]:
    return [Reasoning(text)] if text else []

"""A chat of the playground: its messages, and the response that arrives (pure)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Any: JSON.
from typing import Any, Final

from console_svc.state.actions import ChatDelta

EXAMPLE_TOOLS: Final = """[
  {
    "type": "function",
    "function": {
      "name": "get_weather",
      "description": "Returns the weather of a city.",
      "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"]
      }
    }
  }
]"""


class ToolsError(ValueError):
    """The tools are not a list of JSON objects; the message says what is wrong."""


def parse_tools(text: str) -> tuple[Mapping[str, Any], ...]:
    """Returns the tools of a JSON list; none for an empty text. Raises ToolsError."""
    if not text.strip():
        return ()
    try:
        tools = json.loads(text)
    except ValueError as error:
        raise ToolsError(f"tools: not JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ToolsError("tools: must be a list of objects, as OpenAI's API takes them")
    return tuple(tools)


@dataclass(slots=True)
class ToolCall:
    """A call that the model makes. arguments: JSON as far as it has arrived."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Response:
    """A response as far as it has arrived."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)
    """By their index."""

    finish_reason: str = ""
    request_id: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    arrivals_ms: list[float] = field(default_factory=list)
    """When pieces of the output arrived, since the request was sent."""

    ended_ms: float | None = None

    def add(self, delta: ChatDelta) -> None:
        """Adds one event of the stream."""
        if delta.text or delta.reasoning or delta.tool_calls:
            self.arrivals_ms.append(delta.at_ms)
        self.text += delta.text
        self.reasoning += delta.reasoning
        for piece in delta.tool_calls:
            self._add_call(piece)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.request_id = delta.request_id or self.request_id
        self.usage = delta.usage or self.usage
        self.placement = delta.placement or self.placement
        self.ended_ms = delta.at_ms

    def _add_call(self, piece: Mapping[str, Any]) -> None:
        call = self.calls.setdefault(int(piece.get("index") or 0), ToolCall())
        function = piece.get("function") or {}
        call.id = piece.get("id") or call.id
        call.name = function.get("name") or call.name
        call.arguments += function.get("arguments") or ""

    @property
    def first_token_ms(self) -> float | None:
        return self.arrivals_ms[0] if self.arrivals_ms else None

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens a second after the first one; None: unknown."""
        tokens = self.usage.get("completion_tokens")
        if not tokens or len(self.arrivals_ms) < 2:
            return None
        seconds = (self.arrivals_ms[-1] - self.arrivals_ms[0]) / 1000
        return (tokens - 1) / seconds if seconds > 0 else None

    def message(self) -> Mapping[str, Any]:
        """Returns the response as a message of the next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls.values()
            ]
        return message


def user_message(text: str) -> Mapping[str, Any]:
    return {"role": "user", "content": text}


def tool_messages(results: Mapping[str, str]) -> Sequence[Mapping[str, Any]]:
    """Returns the results of calls as messages. results: texts by the id of the call."""
    return [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in results.items()]

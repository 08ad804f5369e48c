"""Deltas as the JSON of chat completions (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from frontend_svc.tools.deltas import CallArguments, CallStart, Content, Delta, Reasoning


# Any, here and below: JSON.
def chunk_delta(delta: Delta) -> dict[str, Any]:
    """Returns a delta as the `delta` of a chunk."""
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, name, call_id):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Returns all deltas of a choice as its `message`."""
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        match delta:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(name=name, id=call_id):
                function = {"name": name, "arguments": ""}
                calls.append({"id": call_id, "type": "function", "function": function})
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    value: dict[str, Any] = {"role": "assistant"}
    value["content"] = content if content or not (calls or reasoning) else None
    value["refusal"] = None
    if reasoning:
        value["reasoning_content"] = reasoning
    return value | ({"tool_calls": calls} if calls else {})

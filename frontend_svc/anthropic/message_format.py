"""Writes the response to a Messages request: as events or as one JSON body (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import orjson

from common.errors import MeshError
from common.request.preprocessed import CompletionUsage
from frontend_svc.anthropic.content import BlockEvents, Json, content_blocks
from frontend_svc.anthropic.errors import http_error
from frontend_svc.text.api_format import ChoiceEnd, ChoiceResult, TokenText
from frontend_svc.tools.deltas import Content, Delta, Reasoning

_STOP_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "content_filter": "refusal",
    "tool_calls": "tool_use",
}


def event(value: Json) -> bytes:
    """Returns a server-sent event; its name is the value's type."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), orjson.dumps(value))


class MessageFormat:
    """Writes one response."""

    keep_alive: Final = event({"type": "ping"})

    def __init__(
        self,
        message_id: str,
        model: str,
        prompt_tokens: int,
        header_id: str,
        *,
        omits_thinking: bool = False,
    ) -> None:
        """
        - message_id: `msg_<id>`.
        - prompt_tokens: reported at the start of a stream, when cached tokens are not known yet.
        - header_id: the id in the header of the response.
        - omits_thinking: whether blocks of reasoning are empty.
        """
        self._message_id = message_id
        self._header_id = header_id
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._omits_thinking = omits_thinking
        self._blocks = BlockEvents()
        self._stop: Json = {"stop_reason": None, "stop_sequence": None, "stop_details": None}

    def begin(self) -> bytes:
        usage = _usage(self._prompt_tokens, 0, 0)
        return event({"type": "message_start", "message": self._message([], usage)})

    def text(self, choice: int, pieces: Iterable[str]) -> bytes:
        return self.output(choice, [Content("".join(pieces))], ())

    def output(self, choice: int, deltas: Sequence[Delta], tokens: Sequence[TokenText]) -> bytes:
        return b"".join(
            event(message) for delta in self._shown(deltas) for message in self._blocks.feed(delta)
        )

    def finish(self, choice: int, end: ChoiceEnd) -> bytes:
        self._stop = _stop(end)
        return b"".join(map(event, self._blocks.close()))

    async def settle(self, choices: Sequence[ChoiceResult], usage: CompletionUsage) -> None:
        """Does nothing: messages are not stored."""

    def end(self, usage: CompletionUsage) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop, "usage": usage_object(usage)}
        return event(delta) + event({"type": "message_stop"})

    def error(self, error: MeshError) -> bytes:
        return b"event: error\ndata: %b\n\n" % http_error(error, self._header_id).body

    def body(self, choices: Sequence[ChoiceResult], usage: CompletionUsage) -> bytes:
        (choice,) = choices
        self._stop = _stop(choice.end)
        content = content_blocks(self._shown(choice.deltas))
        return orjson.dumps(self._message(content, usage_object(usage)))

    def _message(self, content: list[Json], usage: Json) -> Json:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self._stop,
            "usage": usage,
        }

    def _shown(self, deltas: Iterable[Delta]) -> Iterable[Delta]:
        if not self._omits_thinking:
            return deltas
        return (Reasoning("") if isinstance(delta, Reasoning) else delta for delta in deltas)


def _stop(end: ChoiceEnd) -> Json:
    is_matched = end.stop_string is not None
    return {
        "stop_reason": "stop_sequence" if is_matched else _STOP_REASONS[end.reason],
        "stop_sequence": end.stop_string,
        "stop_details": None,
    }


def usage_object(usage: CompletionUsage) -> Json:
    """Returns Anthropic's counts: `input_tokens` is the part of the prompt that was not cached."""
    details = usage.prompt_tokens_details
    cached = (None if details is None else details.cached_tokens) or 0
    return _usage(usage.prompt_tokens - cached, cached, usage.completion_tokens)


def _usage(uncached: int, cached: int, output: int) -> Json:
    return {
        "input_tokens": uncached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }

"""Writes a response of the Responses API: as events or as one JSON body (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import orjson

from common.errors import MeshError
from common.request.preprocessed import CompletionUsage
from frontend_svc.errors import http_error
from frontend_svc.openai.output.json_bytes import compact_json
from frontend_svc.openai.output.sse import KEEP_ALIVE
from frontend_svc.responses.output import Json, OutputItems
from frontend_svc.responses.response_object import usage_object
from frontend_svc.responses.tools import FunctionNames
from frontend_svc.text.api_format import ChoiceEnd, ChoiceResult, TokenText
from frontend_svc.tools.deltas import Content, Delta

# Why a response is incomplete; other finish reasons are complete.
_INCOMPLETE_REASONS: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}

_PLAIN_NAMES: Final = FunctionNames()


class ResponsesFormat:
    """Writes one response. response: from `new_response`. on_complete: receives its JSON before the
    client does. names: of its functions."""

    keep_alive: Final = KEEP_ALIVE

    def __init__(
        self,
        response: Json,
        on_complete: Callable[[bytes], None],
        names: FunctionNames = _PLAIN_NAMES,
    ) -> None:
        self._response = response
        self._on_complete = on_complete
        self._output = OutputItems(response["id"], names)
        self._next_number = 0
        self._incomplete_reason: str | None = None

    def begin(self) -> bytes:
        return b"".join(
            self._event({"type": f"response.{name}", "response": self._response})
            for name in ("created", "in_progress")
        )

    def text(self, choice: int, pieces: Iterable[str]) -> bytes:
        return self.output(choice, [Content(piece) for piece in pieces], ())

    def output(self, choice: int, deltas: Sequence[Delta], tokens: Sequence[TokenText]) -> bytes:
        return b"".join(
            [self._event(event) for delta in deltas for event in self._output.feed(delta)]
        )

    def finish(self, choice: int, end: ChoiceEnd) -> bytes:
        self._incomplete_reason = _INCOMPLETE_REASONS.get(end.reason)
        if end.nvext:
            self._response |= {"nvext": end.nvext}
        events = b"" if self._output.has_items else self.output(choice, [Content("")], ())
        is_complete = self._incomplete_reason is None
        last_events = self._output.close("completed" if is_complete else "incomplete")
        return events + b"".join(map(self._event, last_events))

    def end(self, usage: CompletionUsage) -> bytes:
        response = self._complete(usage)
        return self._event({"type": f"response.{response['status']}", "response": response})

    def error(self, error: MeshError) -> bytes:
        for _ in self._output.close("incomplete"):
            pass
        http = http_error(error)
        details = {
            "code": "server_error" if http.status >= 500 else "invalid_prompt",
            "message": orjson.loads(http.body)["error"]["message"],
        }
        output = self._output.items
        response = self._response | {"status": "failed", "error": details, "output": output}
        return self._event({"type": "response.failed", "response": response})

    def body(self, choices: Sequence[ChoiceResult], usage: CompletionUsage) -> bytes:
        (choice,) = choices
        self.output(0, choice.deltas, choice.tokens)
        self.finish(0, choice.end)
        return orjson.dumps(self._complete(usage))

    def _complete(self, usage: CompletionUsage) -> Json:
        reason = self._incomplete_reason
        response = self._response | {
            "status": "completed" if reason is None else "incomplete",
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": self._output.items,
            "usage": usage_object(usage),
        }
        self._on_complete(compact_json(response))
        return response

    def _event(self, event: Json) -> bytes:
        """Returns a server-sent event, numbered from 0; its name is its type."""
        number, self._next_number = self._next_number, self._next_number + 1
        data = orjson.dumps(event | {"sequence_number": number})
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)


class WarmupFormat(ResponsesFormat):
    """Writes a response without output, which others continue: it prepares their prompt."""

    def output(self, choice: int, deltas: Sequence[Delta], tokens: Sequence[TokenText]) -> bytes:
        return b""

    def finish(self, choice: int, end: ChoiceEnd) -> bytes:
        if end.nvext:
            self._response |= {"nvext": end.nvext}
        return b""

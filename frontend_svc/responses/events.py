"""Writes a response of the Responses API: as events or as one JSON body (pure)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeAlias

import orjson

from common.errors import MeshError
from common.request.preprocessed import CompletionUsage
from frontend_svc.errors import http_error
from frontend_svc.openai.output.sse import KEEP_ALIVE
from frontend_svc.responses.output import Json, OutputItems
from frontend_svc.responses.response_object import usage_object
from frontend_svc.responses.tools import FunctionNames
from frontend_svc.text.api_format import ChoiceEnd, ChoiceResult, TokenText
from frontend_svc.tools.deltas import Content, Delta

# Why a response is incomplete; other finish reasons are complete.
_INCOMPLETE_REASONS: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}

_PLAIN_NAMES: Final = FunctionNames()

# Stores a complete response; returns it as the client receives it.
StoreResponse: TypeAlias = Callable[[Json], Awaitable[Json]]


class ResponsesFormat:
    """Writes one response."""

    keep_alive: Final = KEEP_ALIVE

    def __init__(
        self,
        response: Json,
        store: StoreResponse,
        names: FunctionNames = _PLAIN_NAMES,
    ) -> None:
        """
        - response: from `new_response`.
        - store: called before the client has all of the response.
        - names: of its functions.
        """
        self._response = response
        self._store = store
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

    async def settle(self, choices: Sequence[ChoiceResult], usage: CompletionUsage) -> None:
        for choice in choices:
            self.output(0, choice.deltas, choice.tokens)
            self.finish(0, choice.end)
        reason = self._incomplete_reason
        self._response = await self._store(
            self._response
            | {
                "status": "completed" if reason is None else "incomplete",
                "incomplete_details": None if reason is None else {"reason": reason},
                "output": self._output.items,
                "usage": usage_object(usage),
            }
        )

    def end(self, usage: CompletionUsage) -> bytes:
        response = self._response
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
        return orjson.dumps(self._response)

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

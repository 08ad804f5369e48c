"""Writes a response of the Responses API: as events or as one JSON body (pure)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeAlias

import orjson

from common.errors import MeshError
from common.request.preprocessed import CompletionUsage
from frontend_svc.errors import http_error
from frontend_svc.openai.output.sse import KEEP_ALIVE
from frontend_svc.responses.deltas import write_deltas
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


class EventWriter:
    """Writes the events of one response, numbered."""

    def __init__(
        self, response_id: str, names: FunctionNames, *, first: int = 0, after: int | None = None
    ) -> None:
        """
        - names: of its functions.
        - first: number of the first event.
        - after: events up to this number are left out; None: none are.
        """
        self._output = OutputItems(response_id, names)
        self._next_number = first
        self._after = first - 1 if after is None else after

    @property
    def items(self) -> list[Json]:
        """The items that have ended."""
        return self._output.items

    def state(self, name: str, response: Json) -> bytes:
        """Returns the event of a state of the response."""
        return self._event({"type": f"response.{name}", "response": response})

    def output(self, deltas: Iterable[Delta]) -> bytes:
        """Returns the events of a part of the output."""
        return b"".join(
            [self._event(event) for delta in deltas for event in self._output.feed(delta)]
        )

    def close(self, *, is_complete: bool) -> bytes:
        """Returns the events of the end of the output, which has at least one item."""
        events = b"" if self._output.has_items else self.output([Content("")])
        last = self._output.close("completed" if is_complete else "incomplete")
        return events + b"".join(map(self._event, last))

    def collect(self, deltas: Iterable[Delta]) -> None:
        """Takes a part of the output without events."""
        for delta in deltas:
            for _ in self._output.feed(delta):
                pass

    def abandon(self) -> None:
        """Ends the last item without events."""
        for _ in self._output.close("incomplete"):
            pass

    def _event(self, event: Json) -> bytes:
        """Returns a server-sent event, numbered from 0; its name is its type."""
        number, self._next_number = self._next_number, self._next_number + 1
        if number <= self._after:
            return b""
        data = orjson.dumps(event | {"sequence_number": number})
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)


class ResponsesFormat:
    """Writes one response."""

    keep_alive: bytes = KEEP_ALIVE

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
        self._events = EventWriter(response["id"], names)
        self._incomplete_reason: str | None = None

    def begin(self) -> bytes:
        return b"".join(
            self._events.state(name, self._response) for name in ("created", "in_progress")
        )

    def text(self, choice: int, pieces: Iterable[str]) -> bytes:
        return self.output(choice, [Content(piece) for piece in pieces], ())

    def output(self, choice: int, deltas: Sequence[Delta], tokens: Sequence[TokenText]) -> bytes:
        return self._events.output(deltas)

    def finish(self, choice: int, end: ChoiceEnd) -> bytes:
        self._incomplete_reason = _INCOMPLETE_REASONS.get(end.reason)
        if end.nvext:
            self._response |= {"nvext": end.nvext}
        return self._events.close(is_complete=self._incomplete_reason is None)

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
                "output": self._events.items,
                "usage": usage_object(usage),
            }
        )

    def end(self, usage: CompletionUsage) -> bytes:
        response = self._response
        return self._events.state(response["status"], response)

    def error(self, error: MeshError) -> bytes:
        self._events.abandon()
        http = http_error(error)
        details = {
            "code": "server_error" if http.status >= 500 else "invalid_prompt",
            "message": orjson.loads(http.body)["error"]["message"],
        }
        output = self._events.items
        response = self._response | {"status": "failed", "error": details, "output": output}
        return self._events.state("failed", response)

    def body(self, choices: Sequence[ChoiceResult], usage: CompletionUsage) -> bytes:
        return orjson.dumps(self._response)


class WarmupFormat(ResponsesFormat):
    """Writes a response without output, which others continue: it prepares their prompt."""

    def output(self, choice: int, deltas: Sequence[Delta], tokens: Sequence[TokenText]) -> bytes:
        return b""

    def finish(self, choice: int, end: ChoiceEnd) -> bytes:
        if end.nvext:
            self._response |= {"nvext": end.nvext}
        return b""


class DeltaFormat(ResponsesFormat):
    """Writes the output of a response as `write_deltas`, of which others make its events."""

    ended: bytes = b""
    """Its object after its end."""

    failure: MeshError | None = None
    """Why it failed."""

    keep_alive = b""

    def begin(self) -> bytes:
        return b""

    def output(self, choice: int, deltas: Sequence[Delta], tokens: Sequence[TokenText]) -> bytes:
        self._events.collect(deltas)
        return write_deltas(deltas)

    def finish(self, choice: int, end: ChoiceEnd) -> bytes:
        super().finish(choice, end)
        return b""

    def end(self, usage: CompletionUsage) -> bytes:
        self.ended = orjson.dumps(self._response)
        return b""

    def error(self, error: MeshError) -> bytes:
        self.failure = error
        return b""

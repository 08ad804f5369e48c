"""Writes one response to its client: as server-sent events, or as one JSON body."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from common.errors import MeshError
from common.request.preprocessed import CompletionUsage
from frontend_svc.core.openai.errors import error_event, http_error
from frontend_svc.core.openai.pass_through import merge_chunks
from frontend_svc.core.openai.responses import OpenAIFinishReason, completion_json
from frontend_svc.core.openai.sse import DONE, KEEP_ALIVE, ChunkKind, ChunkWriter, event
from frontend_svc.core.request.types import RequestOutcome
from frontend_svc.core.text.output_text import TextStream
from frontend_svc.core.tools.deltas import Delta
from frontend_svc.core.tools.response import ResponseParser
from frontend_svc.http.asgi import (
    BODY_END,
    JSON_HEADER,
    STREAM_HEADERS,
    body_part,
    response_start,
    send_response,
)
from frontend_svc.http.request_context import HttpRequest
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.response import ResponseBuffer


class ResponseWriter:
    """Writes what a ResponseBuffer receives. keep_alive_s: pause before a comment is sent. Every
    method raises the request's error if it ends before the first byte: it becomes an ordinary HTTP
    error then."""

    def __init__(self, context: HttpRequest, response: ResponseBuffer, keep_alive_s: float) -> None:
        self._context = context
        self._response = response
        self._send = context.send
        self._keep_alive_s = keep_alive_s
        self._chunk_kind = ChunkKind.CHAT if context.is_chat else ChunkKind.COMPLETION

    async def stream_text(
        self,
        handle: RequestHandle,
        flow: TextStream,
        model: str,
        include_usage: bool,
        parser: ResponseParser | None,
    ) -> None:
        """Sends text as it comes, one event a batch of tokens. parser: None if it is content."""
        response = self._response
        response.wake_when_idle(self._keep_alive_s)
        token_ids = await response.next()
        self._raise_early_error(bool(token_ids))
        writer = ChunkWriter(
            self._chunk_kind,
            self._context.response_id,
            model,
            _now_s(),
            include_usage=include_usage,
        )
        await self._start_stream()
        events = [writer.role()] if self._context.is_chat else []
        while True:
            events += _text_events(writer, flow.feed(token_ids), parser)
            if _is_complete(flow, parser):
                handle.stop()
                break
            if not token_ids:
                if response.outcome is not None:
                    break
                events.append(KEEP_ALIVE)
            if events:
                await self._send(body_part(b"".join(events)))
                events = []
            token_ids = await response.next()
        if events and response.outcome is None:  # the outcome may take time: send the text now
            await self._send(body_part(b"".join(events)))
            events = []
        events += _final_events(writer, flow, await response.end(), parser)
        await self._end_stream(b"".join(events))

    async def send_text(
        self, handle: RequestHandle, flow: TextStream, model: str, parser: ResponseParser | None
    ) -> None:
        pieces: list[str] = []
        deltas: list[Delta] = []
        while True:
            token_ids = await self._response.next()
            new = flow.feed(token_ids)
            pieces += new
            if parser is not None:
                deltas += parser.feed("".join(new))
            if _is_complete(flow, parser):
                handle.stop()
                break
            if not token_ids:
                break
        outcome = await self._response.end()
        if outcome.error is not None and not _is_complete(flow, parser):
            raise outcome.error
        pieces.append(flow.finish())
        text: str | dict[str, Any] = "".join(pieces)
        if parser is not None:
            text = parser.message((*deltas, *parser.feed(pieces[-1]), *parser.finish()))
        await self._send_json(
            completion_json(
                self._context.response_id,
                model,
                _now_s(),
                text,
                _openai_finish_reason(flow, outcome, parser),
                _usage(flow, outcome),
                is_chat=self._context.is_chat,
            )
        )

    async def relay_chunks(self) -> None:
        response = self._response
        response.wake_when_idle(self._keep_alive_s)
        chunks = await response.next_chunks()
        self._raise_early_error(bool(chunks))
        await self._start_stream()
        while chunks or response.outcome is None:
            await self._send(body_part(b"".join(map(event, chunks)) or KEEP_ALIVE))
            chunks = await response.next_chunks()
        error = response.outcome.error
        await self._end_stream(DONE if error is None else error_event(error))

    async def send_merged_chunks(self) -> None:
        chunks: list[bytes] = []
        while batch := await self._response.next_chunks():
            chunks += batch
        outcome = await self._response.end()
        if outcome.error is not None:
            raise outcome.error
        counted_usage = outcome.usage if outcome.usage.total_tokens else None
        await self._send_json(merge_chunks(self._chunk_kind, chunks, counted_usage))

    def _raise_early_error(self, has_output: bool) -> None:
        outcome = self._response.outcome
        if not has_output and outcome is not None and outcome.error is not None:
            raise outcome.error

    async def _start_stream(self) -> None:
        self._context.status = 200
        await self._send(response_start(200, (*STREAM_HEADERS, self._context.id_header)))

    async def _end_stream(self, events: bytes) -> None:
        await self._send(body_part(events))
        self._context.is_response_complete = True
        await self._send(BODY_END)

    async def _send_json(self, payload: bytes) -> None:
        self._context.status, self._context.is_response_complete = 200, True
        await send_response(self._send, 200, (JSON_HEADER, self._context.id_header), payload)


async def send_error(context: HttpRequest, error: MeshError) -> None:
    """Sends an error as an HTTP response, or as the last event if the stream has begun."""
    if context.is_response_complete:
        return
    if context.status:
        await context.send(body_part(error_event(error)))
        await context.send(BODY_END)
        return
    response = http_error(error, context.headers)
    context.status = response.status
    headers = tuple((k.encode(), v.encode()) for k, v in response.headers)
    await send_response(context.send, response.status, (*headers, context.id_header), response.body)


def _now_s() -> int:
    return int(datetime.now(UTC).timestamp())


def _is_complete(flow: TextStream, parser: ResponseParser | None) -> bool:
    """Whether the response is complete although the model may continue."""
    return flow.matched_stop is not None or (parser is not None and parser.is_done)


def _text_events(
    writer: ChunkWriter, pieces: Iterable[str], parser: ResponseParser | None
) -> Iterable[bytes]:
    if parser is None:
        return map(writer.content, pieces)
    deltas = (delta for piece in pieces for delta in parser.feed(piece))
    return [writer.delta(parser.chunk_delta(delta)) for delta in deltas]


def _final_events(
    writer: ChunkWriter, flow: TextStream, outcome: RequestOutcome, parser: ResponseParser | None
) -> list[bytes]:
    """Returns the events after the last token: held-back text, finish or error, usage, DONE."""
    if outcome.error is not None and not _is_complete(flow, parser):
        return [writer.error(outcome.error)]
    remaining_text = flow.finish()
    events = list(_text_events(writer, [remaining_text] if remaining_text else [], parser))
    if parser is not None:
        events += [writer.delta(parser.chunk_delta(delta)) for delta in parser.finish()]
    events.append(writer.finish(_openai_finish_reason(flow, outcome, parser)))
    events.append(writer.usage(_usage(flow, outcome)))
    events.append(DONE)
    return events


def _openai_finish_reason(
    flow: TextStream, outcome: RequestOutcome, parser: ResponseParser | None
) -> OpenAIFinishReason:
    reason: OpenAIFinishReason | None = "stop"
    if not _is_complete(flow, parser):
        reason = outcome.finish_reason.openai if outcome.finish_reason is not None else None
    assert reason is not None, "an outcome without an OpenAI finish reason has an error"
    return "tool_calls" if reason == "stop" and parser is not None and parser.has_calls else reason


def _usage(flow: TextStream, outcome: RequestOutcome) -> CompletionUsage:
    """Returns the counts without the tokens after a stop string."""
    usage = outcome.usage
    if flow.matched_stop is None:
        return usage
    return replace(
        usage, completion_tokens=flow.consumed, total_tokens=usage.prompt_tokens + flow.consumed
    )

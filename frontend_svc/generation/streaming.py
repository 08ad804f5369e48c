"""Writes one response to its client: as a stream of events, or as one JSON body."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from common.api_keys import Permission
from common.errors import INVALID_OUTPUT, InternalError, MeshError
from common.request.preprocessed import CompletionUsage
from frontend_svc.edge.asgi import (
    JSON_HEADER,
    STREAM_HEADERS,
    body_part,
    last_part,
    response_start,
    send_response,
)
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.errors import error_event
from frontend_svc.generation.form import ResponseForm
from frontend_svc.generation.form_check import FormCheck
from frontend_svc.generation.pass_through import merge_chunks, without_hits
from frontend_svc.openai.output.extension import ResponseExtension
from frontend_svc.openai.output.sse import DONE, KEEP_ALIVE, ChunkKind, event
from frontend_svc.request.buffer import Backlog, ResponseBuffer
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.types import RequestOutcome
from frontend_svc.text.api_format import (
    ApiFormat,
    ChoiceRecorder,
    ChoiceSink,
    RecordedFormat,
)
from frontend_svc.text.choice import Choice

# Of a response that is behind, written before others are served: 1 to 2 ms of work.
PART_TOKENS = 256


@dataclass(slots=True)
class OpenChoice:
    """A choice, and the request that generates it. extension: of the response, if this is its only
    choice. is_finished: its end has been written. is_checked: its form has been checked."""

    choice: Choice
    handle: RequestHandle
    buffer: ResponseBuffer
    extension: ResponseExtension | None = None
    is_finished: bool = False
    is_checked: bool = False


class ResponseWriter:
    """Writes the choices of a response. Every method raises the request's error if it ends before
    the first byte: it becomes an ordinary HTTP error then.

    keep_alive_s: pause before a comment is sent.
    backlog: of this process.
    form: of the response; None: any.
    """

    def __init__(
        self,
        context: HttpRequest,
        choices: Sequence[OpenChoice],
        keep_alive_s: float,
        backlog: Backlog,
        form: ResponseForm | None = None,
    ) -> None:
        self._form = form
        self._form_check = FormCheck(form)
        self._context = context
        self._choices = choices
        self._reader = choices[0].buffer.reader
        self._send = context.send
        self._connection = context.connection
        self._keep_alive_s = keep_alive_s
        self._backlog = backlog
        self._unfinished = len(choices)
        self._is_ending = False
        # Of the first choice that failed.
        self._error: MeshError | None = None
        self._has_invalid_output = False

    async def stream(self, api_format: ApiFormat) -> None:
        """Sends the events of the tokens that have arrived, in one write. While the client reads
        as fast as tokens arrive, callbacks write them, without a step of this task."""
        self._reader.wake_when_idle(self._keep_alive_s)
        has_output = await self._reader.wait()
        for open_choice in self._choices:
            if open_choice.buffer.outcome is not None and open_choice.buffer.first_token_at is None:
                _raise_error(open_choice.buffer)
        await _start_stream(self._context)
        self._context.progress.stream_format = api_format
        recorder: ChoiceRecorder | None = None
        if self._form is not None:
            recorder = ChoiceRecorder(len(self._choices))
            api_format = RecordedFormat(api_format, recorder)
        extension = self._choices[0].extension
        events = b"" if extension is None else extension.comments()
        events += api_format.begin() + self._begin(api_format)
        while True:
            new_events = await self._catch_up(api_format)
            if recorder is not None and self._error is None:
                await self._check_forms(recorder)
            if self._has_invalid_output:  # the end of the choice is not written
                await self._send(body_part(events))
                assert self._error is not None, "it is invalid because of it"
                raise self._error
            events += new_events
            if self._error is not None:
                events += api_format.error(self._error)
                break
            if not self._unfinished:
                usage = self._usage()
                if extension is not None:
                    events += extension.last_comments(usage)
                await api_format.settle((), usage)
                events += api_format.end(usage)
                break
            if not has_output:
                events += api_format.keep_alive
            if events:
                await self._send(body_part(events))
            events = b""
            if not (has_output := self._is_behind):
                self._reader.call_on_output(partial(self._write_tokens, api_format))
                has_output = await self._reader.wait()
        await _end_stream(self._context, events)

    @property
    def _is_behind(self) -> bool:
        return any(
            open_choice.buffer.has_unread and not open_choice.choice.is_complete
            for open_choice in self._choices
        )

    async def _catch_up(self, sink: ChoiceSink) -> bytes:
        """Writes what has arrived. If that is much, because the client has not read, it writes a
        part, and other responses go on before the next part of any response."""
        if sum(open_choice.buffer.unread for open_choice in self._choices) <= PART_TOKENS:
            return self._advance(sink)
        async with self._backlog.write_lock:
            events = self._advance(sink, max(1, PART_TOKENS // len(self._choices)))
            await asyncio.sleep(0)
        return events

    def _write_tokens(self, api_format: ApiFormat) -> bool:
        """Writes the tokens that have arrived; False if there is more to do than that."""
        if not self._connection.can_write:
            return False
        if events := self._take_tokens(api_format):
            self._connection.write(events)
        return not self._is_ending

    async def send(self, api_format: ApiFormat) -> None:
        """Sends the whole response as one body."""
        recorder = ChoiceRecorder(len(self._choices))
        self._begin(recorder)
        while self._unfinished:
            await self._reader.wait()
            self._advance(recorder)
            if self._error is None and not self._unfinished:
                await self._check_forms(recorder)
            if self._error is not None:
                raise self._error
        usage = self._usage()
        await api_format.settle(recorder.results, usage)
        await send_json(self._context, api_format.body(recorder.results, usage))

    async def _check_forms(self, recorder: ChoiceRecorder) -> None:
        """Sets `_error` if a choice that has finished lacks the form of the response."""
        if self._form is None:
            return
        for open_choice, result in zip(self._choices, recorder.results, strict=True):
            if not open_choice.is_finished or open_choice.is_checked or self._error is not None:
                continue
            open_choice.is_checked = True
            choice = open_choice.choice
            raw = "" if choice.recorded is None else choice.recorded.text()
            if problem := await self._form_check.problem(result, raw):
                text = f"invalid output of the engine: {problem}"
                self._error = InternalError(text, reason=INVALID_OUTPUT)
                self._has_invalid_output = True

    def _begin(self, sink: ChoiceSink) -> bytes:
        return b"".join([open_choice.choice.begin(sink) for open_choice in self._choices])

    def _advance(self, sink: ChoiceSink, most: int | None = None) -> bytes:
        """Writes what has arrived, or about `most` tokens of each choice; sets `_error` if a choice
        failed."""
        events = self._take_tokens(sink, most)
        for open_choice in self._choices:
            if open_choice.choice.is_complete:
                open_choice.handle.stop()
            is_read = open_choice.choice.is_complete or not open_choice.buffer.has_unread
            if open_choice.buffer.outcome is not None and is_read and not open_choice.is_finished:
                events += self._finish(open_choice, open_choice.buffer.outcome, sink)
        return events

    def _take_tokens(self, sink: ChoiceSink, most: int | None = None) -> bytes:
        """Writes the tokens that have arrived, as `_advance`; sets `_is_ending` if a choice
        ends."""
        events = b""
        self._is_ending = self._error is not None
        for open_choice in self._choices:
            choice, buffer = open_choice.choice, open_choice.buffer
            token_ids, logprobs = buffer.take() if most is None else buffer.take_part(most)
            if token_ids and not choice.is_complete and not open_choice.is_finished:
                try:
                    events += choice.write_tokens(token_ids, logprobs, sink)
                except MeshError as error:  # the text of a token is not known
                    self._fail(open_choice, error)
            if choice.is_complete or buffer.outcome is not None:
                self._is_ending = self._is_ending or not open_choice.is_finished
        return events

    def _fail(self, open_choice: OpenChoice, error: MeshError) -> None:
        """Ends the response, and the request of a choice, with an error."""
        self._error = self._error or error
        open_choice.is_finished = self._is_ending = self._has_invalid_output = True
        self._unfinished -= 1
        open_choice.handle.fail(error, "invalid_output")

    def _finish(self, open_choice: OpenChoice, outcome: RequestOutcome, sink: ChoiceSink) -> bytes:
        open_choice.is_finished = True
        self._unfinished -= 1
        if outcome.error is not None and not open_choice.choice.is_complete:
            self._error = self._error or outcome.error
            return b""
        nvext = (
            None
            if open_choice.extension is None
            else self._nvext(open_choice, open_choice.extension, outcome)
        )
        events = open_choice.choice.finish(outcome.finish_reason, sink, nvext)
        usage = open_choice.choice.usage(outcome.usage)
        open_choice.buffer.outcome = replace(outcome, usage=usage)
        return events

    def _nvext(
        self, open_choice: OpenChoice, extension: ResponseExtension, outcome: RequestOutcome
    ) -> dict[str, object]:
        context, tracker = self._context, self._context.tracker
        if context.ttft_s is not None:
            tracker.mark("first_token", tracker.received_s + max(0.0, context.ttft_s))
        tracker.mark("finished", time.monotonic())
        usage = open_choice.choice.usage(outcome.usage)
        values = extension.extra_fields(outcome, usage, open_choice.handle.machine.generated)
        is_stream = context.progress.stream_format is not None
        if not is_stream and (annotations := extension.annotations(usage)):
            values["annotations"] = annotations
        return values

    def _usage(self) -> CompletionUsage:
        outcome = self._context.progress.outcome
        assert outcome is not None, "every choice has finished"
        return _permitted(self._context, outcome.usage)


def _permitted(context: HttpRequest, usage: CompletionUsage) -> CompletionUsage:
    """Returns the counts; cache hits only if the client's key permits them."""
    if Permission.EXPLAIN in context.caller.scopes:
        return usage
    return replace(usage, prompt_tokens_details=None)


async def _next_chunks(context: HttpRequest, buffer: ResponseBuffer) -> Sequence[bytes]:
    chunks = await buffer.next_chunks()
    return chunks if Permission.EXPLAIN in context.caller.scopes else [*map(without_hits, chunks)]


async def relay_chunks(context: HttpRequest, buffer: ResponseBuffer, keep_alive_s: float) -> None:
    """Streams the chunks of a passed-through body. Raises as ResponseWriter."""
    buffer.reader.wake_when_idle(keep_alive_s)
    chunks = await _next_chunks(context, buffer)
    if not chunks:
        _raise_error(buffer)
    await _start_stream(context)
    while chunks or buffer.outcome is None:
        await context.send(body_part(b"".join(map(event, chunks)) or KEEP_ALIVE))
        chunks = await _next_chunks(context, buffer)
    error = buffer.outcome.error
    await _end_stream(context, DONE if error is None else error_event(error))


async def send_merged_chunks(context: HttpRequest, buffer: ResponseBuffer, kind: ChunkKind) -> None:
    """Sends the chunks of a passed-through body as one object. Raises as ResponseWriter."""
    chunks: list[bytes] = []
    while batch := await _next_chunks(context, buffer):
        chunks += batch
    outcome = await buffer.end()
    _raise_error(buffer)
    counted_usage = _permitted(context, outcome.usage) if outcome.usage.total_tokens else None
    await send_json(context, merge_chunks(kind, chunks, counted_usage))


def _raise_error(buffer: ResponseBuffer) -> None:
    if buffer.outcome is not None and buffer.outcome.error is not None:
        raise buffer.outcome.error


async def _start_stream(context: HttpRequest) -> None:
    context.progress.status = 200
    await context.send(response_start(200, (*STREAM_HEADERS, *context.own_headers)))


async def _end_stream(context: HttpRequest, events: bytes) -> None:
    context.progress.is_response_complete = True
    await context.send(last_part(events))


async def send_json(context: HttpRequest, payload: bytes) -> None:
    progress = context.progress
    progress.status, progress.is_response_complete = 200, True
    progress.response_json = payload
    await send_response(context.send, 200, (JSON_HEADER, *context.own_headers), payload)

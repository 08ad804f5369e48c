"""The OpenAI API over ASGI: bodies in, answers out. What to do is decided elsewhere."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import orjson
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MeshError,
    Overloaded,
    RequestCancelled,
)
from common.kv.hashing import HASH_SCHEME_ID
from common.request.preprocessed import CompletionUsage, PreprocessedRequest, TokenIds
from frontend_svc.config import FrontendConfig
from frontend_svc.core.models.model_watch import Table
from frontend_svc.core.openai.errors import (
    BODY_TOO_LARGE,
    client_message,
    error_event,
    error_type,
    http_error,
)
from frontend_svc.core.openai.headers import HEADER_FIELDS, read_headers, with_headers
from frontend_svc.core.openai.parsing import parse_chat, parse_completion
from frontend_svc.core.openai.pass_through import PassThroughRequest, merge_chunks, read_body
from frontend_svc.core.openai.preprocessing import (
    check_prompt_length,
    routing_hints,
    strict_priority,
    to_preprocessed,
)
from frontend_svc.core.openai.responses import (
    OpenAIFinishReason,
    chat_completion,
    model_list,
    model_object,
    text_completion,
)
from frontend_svc.core.openai.schema import ChatRequest, CompletionRequest
from frontend_svc.core.openai.sse import DONE, KEEP_ALIVE, ChunkKind, ChunkWriter, event
from frontend_svc.core.request.types import PassThroughPayload, RequestOutcome, RequestPlan
from frontend_svc.core.text.output_text import TextStream
from frontend_svc.core.text.prompt import TemplateError
from frontend_svc.http.metrics_route import metrics_router
from frontend_svc.metrics import DeploymentState, Endpoint, RequestMeter
from frontend_svc.models.catalog import ModelCatalog, ServedModel
from frontend_svc.peers.router_client import Query
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.response import ResponseBuffer
from frontend_svc.tracing import RequestSpan, request_span_factory

# ASGI's own types: the protocol leaves values open.
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

MODEL_OWNER = "kvmesh"
# How long a client may take to send its body.
BODY_TIMEOUT_S = 60.0
_JSON_HEADER = (b"content-type", b"application/json")
# The last two keep caches and proxies from gathering events.
_STREAM_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
# Headers that mean nothing for a body that is passed through.
_RANK_HEADERS = ("x-kvmesh-dp-rank", "x-kvmesh-prefill-dp-rank")
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")

log = structlog.get_logger()


@dataclass(slots=True)
class RequestContext:
    """One request to a generation endpoint, from its body to its log line.

    request_id: ours and unique; client_id: the client's x-request-id, or ours. began_s: of the
    meter's clock. base_model: what an adapter is applied to, or the model itself; "" when passed
    through or not known yet. status: what the client was answered with, 0 when nothing was.
    headers: the client's.
    """

    endpoint: Endpoint
    request_id: str
    client_id: bytes
    span: RequestSpan
    started_at_s: float
    headers: Mapping[bytes, bytes]
    body: ChatRequest | CompletionRequest | PassThroughRequest | None = None
    base_model: str = ""
    response: ResponseBuffer | None = None
    status: int = 0
    error: MeshError | None = None
    is_response_complete: bool = False

    @property
    def response_id(self) -> str:
        """The id in the answer."""
        is_chat = self.endpoint is Endpoint.CHAT_COMPLETIONS
        return f"{'chatcmpl' if is_chat else 'cmpl'}-{self.request_id}"

    @property
    def id_header(self) -> tuple[bytes, bytes]:
        """Goes out with every answer."""
        return b"x-request-id", self.client_id


class GenerationEndpoint:
    """The ASGI application behind one generation endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        gateway: Gateway,
        models: ModelCatalog,
        state: DeploymentState,
        config: FrontendConfig,
        on_request_end: Callable[[RequestOutcome], None],
    ) -> None:
        self._on_request_end = on_request_end
        self._endpoint = endpoint
        is_chat = endpoint is Endpoint.CHAT_COMPLETIONS
        self._parse = parse_chat if is_chat else parse_completion
        self._table: Table = "chat" if is_chat else "completions"
        self._gateway = gateway
        self._models = models
        self._state = state
        self._config = config
        self._start_span = request_span_factory()
        self._active_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; it counts in the metrics, and gets a log line, however it ends."""
        headers = dict(scope["headers"])
        request_id = uuid.uuid4().hex
        client_supplied_id = headers.get(b"x-request-id", b"")
        context = RequestContext(
            endpoint=self._endpoint,
            request_id=request_id,
            client_id=client_supplied_id
            if _REQUEST_ID.fullmatch(client_supplied_id)
            else request_id.encode(),
            span=self._start_span(
                scope["path"], headers.get(b"traceparent", b"").decode("latin-1")
            ),
            started_at_s=self._state.clock(),
            headers=headers,
        )
        meter: RequestMeter | None = None
        self._active_requests += 1
        try:
            try:
                if self._active_requests > self._config.requests_max:
                    raise Overloaded(1.0, "this frontend has all the requests it can hold")
                raw = await self._receive_body_with_timeout(headers, receive)
                context.body = self._parse_body(raw, scope["headers"])
            finally:
                name = context.body.model if context.body is not None else ""
                is_stream = context.body is not None and context.body.is_stream
                meter = self._state.begin(name, self._endpoint, is_stream)
            await self._serve(context, meter, receive, send)
        except MeshError as error:
            await self._send_error(context, meter, error, send)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the tokenizer library is no Exception
            log.exception("request_failed", request_id=request_id)
            await self._send_error(context, meter, InternalError("see the frontend's log"), send)
        finally:
            self._active_requests -= 1
            if meter is not None:
                meter.close()
            self._record_span(context)
            self._log_request(context)

    def _parse_body(
        self, raw: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> ChatRequest | CompletionRequest | PassThroughRequest:
        if self._models.pass_through():
            body = read_body(raw)
            if self._is_pass_through(body.model):
                return replace(body, nvext=read_headers(headers))
        return with_headers(self._parse(raw), read_headers(headers))

    def _is_pass_through(self, model: str) -> bool:
        try:
            return self._models.engine(model, self._table).pipeline.is_pass_through
        except MeshError:  # whoever serves it otherwise says what is wrong
            return False

    async def _receive_body_with_timeout(
        self, headers: Mapping[bytes, bytes], receive: Receive
    ) -> bytes:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._receive_body(headers, receive)
        except TimeoutError:
            raise DeadlineExceeded(
                f"The body was not complete within {BODY_TIMEOUT_S:g} s."
            ) from None

    async def _receive_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        limit = self._config.body_limit_mb << 20
        content_length = headers.get(b"content-length", b"0")
        parts, size = [], int(content_length) if content_length.isdigit() else 0
        too_large = InvalidRequest(
            f"The body is larger than {self._config.body_limit_mb} MB.", reason=BODY_TOO_LARGE
        )
        if size > limit:
            raise too_large
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestCancelled("The client went away before its body was complete.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise too_large
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _serve(
        self, context: RequestContext, meter: RequestMeter, receive: Receive, send: Send
    ) -> None:
        body = context.body
        assert body is not None
        if isinstance(body, PassThroughRequest):
            await self._pass_through(context, body, meter, receive, send)
        else:
            await self._generate(context, body, meter, receive, send)
        assert context.response is not None
        outcome = context.response.outcome
        assert outcome is not None, "both ways of answering wait for it"
        self._on_request_end(outcome)
        details = outcome.usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            meter.cached(details.cached_tokens)
        if outcome.error is None:
            meter.mark_ok()
        else:
            meter.mark_failed(error_type(outcome.error))

    async def _generate(
        self,
        context: RequestContext,
        body: ChatRequest | CompletionRequest,
        meter: RequestMeter,
        receive: Receive,
        send: Send,
    ) -> None:
        model = self._models.get_for(body.model, self._table)
        request = await self._preprocess(body, model)
        meter.prompt(len(request.token_ids))
        flow = TextStream(model.detokenizer(), body.stop_strings)
        plan = self._make_plan(context, request)
        context.base_model = model.base
        query = self._make_query(model, request, context.span.traceparent)
        query = replace(query, strict_priority=strict_priority(body.nvext))
        async with self._open_request(context, plan, query, meter, receive) as handle:
            if body.is_stream:
                await self._respond_streaming(context, body, model, handle, flow, send)
            else:
                await self._respond_unary(context, model, handle, flow, send)

    async def _pass_through(
        self,
        context: RequestContext,
        body: PassThroughRequest,
        meter: RequestMeter,
        receive: Receive,
        send: Send,
    ) -> None:
        _reject_rank_headers(body)
        is_chat = self._endpoint is Endpoint.CHAT_COMPLETIONS
        passed_body = PassThroughPayload(body.json, is_chat)
        routing = routing_hints(body.nvext)
        empty_request = PreprocessedRequest(model=body.model, token_ids=TokenIds(), routing=routing)
        plan = replace(self._make_plan(context, empty_request), body=passed_body)
        # Nobody has counted its tokens: the router balances such requests by their number.
        query = Query(
            model=body.model,
            total_tokens=0,
            arrived_at=asyncio.get_running_loop().time(),
            routing=routing,
            traceparent=context.span.traceparent,
            strict_priority=strict_priority(body.nvext),
        )
        async with self._open_request(context, plan, query, meter, receive):
            if body.is_stream:
                await self._relay_chunks(context, send)
            else:
                await self._merge_chunks(context, send)

    async def _relay_chunks(self, context: RequestContext, send: Send) -> None:
        response = context.response
        assert response is not None
        response.wake_when_idle(self._config.keep_alive_s)
        chunks = await response.next_chunks()
        if not chunks and response.outcome is not None and response.outcome.error is not None:
            raise response.outcome.error
        context.status = 200
        await send(_response_start(200, (*_STREAM_HEADERS, context.id_header)))
        while chunks or response.outcome is None:
            await send(_response_body(b"".join(map(event, chunks)) or KEEP_ALIVE))
            chunks = await response.next_chunks()
        error = response.outcome.error
        context.is_response_complete = True
        await send(_response_body(DONE if error is None else error_event(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _merge_chunks(self, context: RequestContext, send: Send) -> None:
        response = context.response
        assert response is not None
        chunks: list[bytes] = []
        while batch := await response.next_chunks():
            chunks += batch
        outcome = response.outcome
        assert outcome is not None
        if outcome.error is not None:
            raise outcome.error
        kind = (
            ChunkKind.CHAT if self._endpoint is Endpoint.CHAT_COMPLETIONS else ChunkKind.COMPLETION
        )
        counted_usage = outcome.usage if outcome.usage.total_tokens else None
        payload = merge_chunks(kind, chunks, counted_usage)
        context.status, context.is_response_complete = 200, True
        await _send_response(send, 200, (_JSON_HEADER, context.id_header), payload)

    async def _preprocess(
        self, body: ChatRequest | CompletionRequest, model: ServedModel
    ) -> PreprocessedRequest:
        token_ids = body.token_data
        if token_ids is None:
            token_ids = await self._tokenize(body, model)
        return to_preprocessed(
            body,
            token_ids,
            eos_token_ids=model.card.eos_token_ids,
            mdc_sum=model.checksum,
            context_length=model.card.context_length or 0,
            default_max_tokens=model.card.default_max_tokens,
            vocab_size=model.vocab_size,
            adapter=model.adapter,
        )

    async def _tokenize(
        self, body: ChatRequest | CompletionRequest, model: ServedModel
    ) -> list[int]:
        text = self._prompt_text(body, model)
        check_prompt_length(body, model.token_count_min(text), model.card.context_length or 0)
        # A template writes the special tokens itself.
        return await model.encode(text, special_tokens=isinstance(body, CompletionRequest))

    def _prompt_text(self, body: ChatRequest | CompletionRequest, model: ServedModel) -> str:
        if isinstance(body, CompletionRequest):
            return body.prompt_text or ""
        if model.template is None:
            raise InvalidRequest(
                f"The model {model.name!r} has no chat template; use /v1/completions.", "model"
            )
        try:
            return model.template.render(
                body.template_messages(),
                template_kwargs=body.chat_template_kwargs,
                now=datetime.now(UTC),
            )
        except TemplateError as error:
            raise InvalidRequest(str(error), "messages") from error

    def _make_plan(self, context: RequestContext, request: PreprocessedRequest) -> RequestPlan:
        now = asyncio.get_running_loop().time()
        return RequestPlan(
            request_id=context.request_id,
            request=request,
            deadline=now + self._config.request_timeout_s,
            attempts_max=self._config.attempts_max,
            accept_timeout_s=self._config.accept_timeout_s,
            traceparent=context.span.traceparent,
            trace_id=context.span.trace_id,
            priority=request.routing.priority if request.routing is not None else None,
        )

    @asynccontextmanager
    async def _open_request(
        self,
        context: RequestContext,
        plan: RequestPlan,
        query: Query,
        meter: RequestMeter,
        receive: Receive,
    ) -> AsyncIterator[RequestHandle]:
        """Runs the request while its client is there; leaving ends what still runs."""
        loop = asyncio.get_running_loop()
        response = context.response = ResponseBuffer(meter, self._state.clock)
        handle = self._gateway.open(plan, query, response)
        response.handle = handle
        # Not a TaskGroup: it would wrap what the body raises.
        disconnect_watch = loop.create_task(_await_disconnect(receive, handle, meter))
        try:
            yield handle
        finally:
            handle.client_gone()
            disconnect_watch.cancel()
            await asyncio.wait([disconnect_watch])
            if not disconnect_watch.cancelled() and disconnect_watch.exception() is not None:
                log.error("disconnect_watch_failed", exc_info=disconnect_watch.exception())

    def _make_query(
        self, model: ServedModel, request: PreprocessedRequest, traceparent: str
    ) -> Query:
        query = Query(
            model=model.base,
            total_tokens=0,
            arrived_at=asyncio.get_running_loop().time(),
            hash_scheme=HASH_SCHEME_ID,
            block_size=model.hasher.block_size,
            routing=request.routing,
            traceparent=traceparent,
            hasher=model.hasher,
        )
        return query.extended(request.token_ids, len(request.token_ids))

    async def _respond_streaming(
        self,
        context: RequestContext,
        body: ChatRequest | CompletionRequest,
        model: ServedModel,
        handle: RequestHandle,
        flow: TextStream,
        send: Send,
    ) -> None:
        response = context.response
        assert response is not None
        response.wake_when_idle(self._config.keep_alive_s)
        token_ids = await response.next()
        if not token_ids and response.outcome is not None and response.outcome.error is not None:
            raise response.outcome.error  # before the first byte it is an ordinary HTTP error
        is_chat = self._endpoint is Endpoint.CHAT_COMPLETIONS
        writer = ChunkWriter(
            ChunkKind.CHAT if is_chat else ChunkKind.COMPLETION,
            context.response_id,
            model.name,
            int(datetime.now(UTC).timestamp()),
            include_usage=body.include_usage,
        )
        context.status = 200
        await send(_response_start(200, (*_STREAM_HEADERS, context.id_header)))
        events = [writer.role()] if is_chat else []
        content = writer.content
        while True:
            events += map(content, flow.feed(token_ids))
            if flow.matched_stop is not None:
                handle.stop()
                break
            if not token_ids:
                if response.outcome is not None:
                    break
                events.append(KEEP_ALIVE)
            if events:
                await send(_response_body(b"".join(events)))
                events = []
            token_ids = await response.next()
        if events and response.outcome is None:  # a last word is waited for, text is not held up
            await send(_response_body(b"".join(events)))
            events = []
        events += _final_events(writer, flow, await response.end())
        await send(_response_body(b"".join(events)))
        context.is_response_complete = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _respond_unary(
        self,
        context: RequestContext,
        model: ServedModel,
        handle: RequestHandle,
        flow: TextStream,
        send: Send,
    ) -> None:
        response = context.response
        assert response is not None
        pieces: list[str] = []
        while True:
            token_ids = await response.next()
            pieces += flow.feed(token_ids)
            if flow.matched_stop is not None:
                handle.stop()
                break
            if not token_ids:
                break
        outcome = await response.end()
        if outcome.error is not None and flow.matched_stop is None:
            raise outcome.error
        pieces.append(flow.finish())
        is_chat = self._endpoint is Endpoint.CHAT_COMPLETIONS
        build = chat_completion if is_chat else text_completion
        payload = build(
            context.response_id,
            model.name,
            int(datetime.now(UTC).timestamp()),
            "".join(pieces),
            _openai_finish_reason(flow, outcome),
            _usage(flow, outcome),
        )
        context.status, context.is_response_complete = 200, True
        await _send_response(send, 200, (_JSON_HEADER, context.id_header), payload)

    async def _send_error(
        self, context: RequestContext, meter: RequestMeter | None, error: MeshError, send: Send
    ) -> None:
        context.error = error
        if meter is not None:
            meter.mark_failed(error_type(error))
        if context.is_response_complete:
            return
        if context.status:  # the answer has begun: its last event says how it ended
            await send(_response_body(error_event(error)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        response = http_error(error, context.headers)
        context.status = response.status
        headers = tuple((k.encode(), v.encode()) for k, v in response.headers)
        await _send_response(send, response.status, (*headers, context.id_header), response.body)

    def _record_span(self, context: RequestContext) -> None:
        span, response, error = context.span, context.response, context.error
        fields: dict[str, str | int | bool] = {
            "request_id": context.request_id,
            "x_request_id": context.client_id.decode("latin-1"),
        }
        if context.body is not None:
            fields |= {
                "model": context.body.model,
                "gen_ai.operation.name": (
                    "chat" if self._endpoint is Endpoint.CHAT_COMPLETIONS else "text_completion"
                ),
                "gen_ai.provider.name": MODEL_OWNER,
                "gen_ai.request.model": context.body.model,
                "gen_ai.request.stream": context.body.is_stream,
            }
        span.set_attributes(fields)
        if response is not None and response.first_token_at is not None:
            span.record_first_token(response.first_token_at - context.started_at_s)
        if response is not None and response.outcome is not None:
            span.placed(response.outcome)
            error = error or response.outcome.error
        span.end(context.status, error)

    def _log_request(self, context: RequestContext) -> None:
        """The one line of a request."""
        now = self._state.clock()
        fields: dict[str, object] = {
            "request_id": context.request_id,
            "endpoint": self._endpoint.value,
            "status": context.status,
            "total_ms": round((now - context.started_at_s) * 1000, 1),
        }
        if context.client_id != context.request_id.encode():
            fields["client_request_id"] = context.client_id.decode("latin-1")
        if context.span.trace_id:
            fields["trace_id"] = context.span.trace_id
        if context.body is not None:
            fields |= {"model": context.body.model, "stream": context.body.is_stream}
            if context.base_model not in ("", context.body.model):
                fields["base_model"] = context.base_model
        response = context.response
        if response is not None and response.first_token_at is not None:
            fields["ttft_ms"] = round((response.first_token_at - context.started_at_s) * 1000, 1)
        error = context.error
        if response is not None and response.outcome is not None:
            fields |= _outcome_fields(response.outcome)
            error = error or response.outcome.error
        if error is not None:
            message, param = client_message(error, context.headers)
            fields |= {"failure": error.reason, "why": message}
            if param is not None:
                fields["param"] = param
        log.info("request", **fields)


def _reject_rank_headers(body: PassThroughRequest) -> None:
    """A rank is told to a worker beside token ids only: nobody would hear of it."""
    for header in _RANK_HEADERS:
        (field,) = HEADER_FIELDS[header]
        if body.nvext is not None and getattr(body.nvext, field) is not None:
            message = f"requests for {body.model!r} are passed through, which takes no rank"
            raise InvalidRequest(f"Invalid header '{header}': {message}.", header)


def _outcome_fields(outcome: RequestOutcome) -> dict[str, object]:
    details = outcome.usage.prompt_tokens_details
    fields: dict[str, object] = {
        "prompt_tokens": outcome.usage.prompt_tokens,
        "completion_tokens": outcome.usage.completion_tokens,
        "attempts": outcome.attempts,
        "workers": list(map(str, outcome.worker_ids)),
    }
    if outcome.finish_reason is not None:
        fields["finish_reason"] = outcome.finish_reason.value
    if details is not None and details.cached_tokens is not None:
        fields["cached_tokens"] = details.cached_tokens
    if outcome.placed is not None:
        fields["predicted_cached_tokens"] = outcome.placed.predicted_cached_tokens
        fields["routing"] = list(outcome.placed.reasons)
    return fields


async def _await_disconnect(receive: Receive, handle: RequestHandle, meter: RequestMeter) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not handle.machine.is_finished:
        meter.mark_disconnected()
        handle.client_gone()


def _final_events(writer: ChunkWriter, flow: TextStream, outcome: RequestOutcome) -> list[bytes]:
    """What follows the last token: held back text, the end or the error, usage, DONE."""
    if outcome.error is not None and flow.matched_stop is None:
        return [writer.error(outcome.error)]
    remaining_text = flow.finish()
    events = [writer.content(remaining_text)] if remaining_text else []
    events.append(writer.finish(_openai_finish_reason(flow, outcome)))
    events.append(writer.usage(_usage(flow, outcome)))
    events.append(DONE)
    return events


def _openai_finish_reason(flow: TextStream, outcome: RequestOutcome) -> OpenAIFinishReason:
    if flow.matched_stop is not None:
        return "stop"
    finish_reason = outcome.finish_reason.openai if outcome.finish_reason is not None else None
    assert finish_reason is not None, "an end without OpenAI's word for it carries an error"
    return finish_reason


def _usage(flow: TextStream, outcome: RequestOutcome) -> CompletionUsage:
    """The counts; tokens that came after a stop string are not the client's."""
    usage = outcome.usage
    if flow.matched_stop is None:
        return usage
    return replace(
        usage,
        completion_tokens=flow.consumed,
        total_tokens=usage.prompt_tokens + flow.consumed,
    )


def _response_start(status: int, headers: Headers) -> MutableMapping[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _response_body(data: bytes) -> MutableMapping[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _send_response(send: Send, status: int, headers: Headers, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send(_response_start(status, (*headers, length)))
    await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be served now, and why not.

    degraded: what is served less well than it should be. models_not_ready: those that are not, with
    why.
    """

    is_ready: bool
    is_draining: bool
    reasons: tuple[str, ...]
    degraded: tuple[str, ...]
    models_not_ready: Mapping[str, str]
    instances: tuple[Mapping[str, object], ...]


def build_api(
    gateway: Gateway,
    models: ModelCatalog,
    state: DeploymentState,
    registry: Any,
    config: FrontendConfig,
    readiness: Callable[[], Readiness],
    on_request_end: Callable[[RequestOutcome], None],
) -> Starlette:
    """The whole HTTP surface. registry: the prometheus registry that /metrics shows.

    ended: hears of the end of each request that was sent to workers.
    """

    async def health(_: Request) -> Response:
        now = readiness()
        return _json_response(
            {
                "status": "healthy" if now.is_ready else "unhealthy",
                "reasons": now.reasons,
                "degraded": now.degraded,
                "models": sorted(models.names() - now.models_not_ready.keys()),
                "models_not_ready": dict(now.models_not_ready),
                "instances": now.instances,
            },
            200 if now.is_ready else 503,
        )

    async def ready(_: Request) -> Response:
        now = readiness()
        return _json_response(
            {"ready": now.is_ready, "reasons": now.reasons, "degraded": now.degraded},
            200 if now.is_ready else 503,
        )

    async def live(_: Request) -> Response:
        return _json_response({"status": "live"}, 200)

    async def list_models(_: Request) -> Response:
        missing = readiness().models_not_ready
        entries = [_model_entry(model) for model in models.all() if model.name not in missing]
        entries += [
            model_object(engine.name, engine.created, MODEL_OWNER)
            for engine in models.pass_through()
            if engine.name not in missing
        ]
        return Response(model_list(entries), media_type="application/json")

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        for engine in models.pass_through():
            if engine.name == name:
                return _json_response(model_object(name, engine.created, MODEL_OWNER), 200)
        try:
            model = models.get(name)
        except MeshError as error:
            response = http_error(error)
            return Response(response.body, response.status, dict(response.headers))
        return _json_response(_model_entry(model), 200)

    def generation(endpoint: Endpoint) -> GenerationEndpoint:
        return GenerationEndpoint(endpoint, gateway, models, state, config, on_request_end)

    _docs, metrics = metrics_router(registry)
    api = Starlette(
        routes=[
            Route("/v1/chat/completions", generation(Endpoint.CHAT_COMPLETIONS), methods=["POST"]),
            Route("/v1/completions", generation(Endpoint.COMPLETIONS), methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", get_model),
            Route("/health", health),
            Route("/ready", ready),
            Route("/live", live),
            # Not mounted: a mount at "" would take in what other routes refuse by method.
            *metrics.routes,
        ],
        exception_handlers={404: _not_found, 405: _not_found},
    )
    # A slash too many is no route: a redirect would have a client send its body again.
    api.router.redirect_slashes = False
    return api


def _model_entry(model: ServedModel) -> dict[str, object]:
    base = model.base if model.adapter else None
    return model_object(model.name, model.created, MODEL_OWNER, base=base)


def _json_response(value: object, status: int) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    problem = "No such route" if status == 404 else "Method not allowed"
    details = {
        "message": f"{problem}: {request.method} {request.url.path}",
        "type": "invalid_request_error",
        "param": None,
        "code": "not_found" if status == 404 else "method_not_allowed",
    }
    response = _json_response({"error": details}, status)
    response.headers.update(getattr(error, "headers", None) or {})  # Allow, with 405
    return response

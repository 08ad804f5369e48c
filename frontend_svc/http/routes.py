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
    Bug,
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    Overloaded,
    RequestCancelled,
)
from common.kv.hashing import SCHEME_ID
from common.request.preprocessed import CompletionUsage, PreprocessedRequest, TokenIds
from frontend_svc.config import FrontendConfig
from frontend_svc.core.models.model_watch import Table
from frontend_svc.core.openai.bodies import (
    ChatRequest,
    CompletionRequest,
    FinishWord,
    chat_completion,
    check_length,
    model_list,
    model_value,
    parse_chat,
    parse_completion,
    routing_hints,
    strict_priority,
    text_completion,
    to_preprocessed,
)
from frontend_svc.core.openai.errors import (
    BODY_TOO_LARGE,
    error_event,
    error_type,
    http_error,
    told,
)
from frontend_svc.core.openai.headers import FIELDS, read_headers, with_headers
from frontend_svc.core.openai.pass_through import PassThroughBody, folded, read_body
from frontend_svc.core.openai.sse import DONE, KEEP_ALIVE, ChunkWriter, Kind, event
from frontend_svc.core.request.machine import Outcome, PassedBody, Plan
from frontend_svc.core.text.output_text import TextFlow
from frontend_svc.core.text.prompt import TemplateError
from frontend_svc.http.metrics_route import metrics_router
from frontend_svc.metrics import DeploymentState, Endpoint, RequestMeter
from frontend_svc.models.catalog import Models, ServedModel
from frontend_svc.peers.router_client import Query
from frontend_svc.request.gateway import Gateway, Ticket
from frontend_svc.request.response import Answer
from frontend_svc.tracing import RequestSpan, request_spans

# ASGI's own types: the protocol leaves values open.
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

OWNER = "kvmesh"
# How long a client may take to send its body.
BODY_S = 60.0
_JSON = (b"content-type", b"application/json")
# The last two keep caches and proxies from gathering events.
_STREAM: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
# Headers that mean nothing for a body that is passed through.
_RANKS = ("x-kvmesh-dp-rank", "x-kvmesh-prefill-dp-rank")
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")

log = structlog.get_logger()


@dataclass(slots=True)
class Call:
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
    began_s: float
    headers: Mapping[bytes, bytes]
    body: ChatRequest | CompletionRequest | PassThroughBody | None = None
    base_model: str = ""
    answer: Answer | None = None
    status: int = 0
    error: MeshError | None = None
    is_ended: bool = False

    @property
    def answer_id(self) -> str:
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
        models: Models,
        state: DeploymentState,
        config: FrontendConfig,
        ended: Callable[[Outcome], None],
    ) -> None:
        self._ended = ended
        self._endpoint = endpoint
        is_chat = endpoint is Endpoint.CHAT_COMPLETIONS
        self._parse = parse_chat if is_chat else parse_completion
        self._table: Table = "chat" if is_chat else "completions"
        self._gateway = gateway
        self._models = models
        self._state = state
        self._config = config
        self._start_span = request_spans()
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; it counts in the metrics, and gets a log line, however it ends."""
        headers = dict(scope["headers"])
        request_id = uuid.uuid4().hex
        given = headers.get(b"x-request-id", b"")
        call = Call(
            endpoint=self._endpoint,
            request_id=request_id,
            client_id=given if _REQUEST_ID.fullmatch(given) else request_id.encode(),
            span=self._start_span(
                scope["path"], headers.get(b"traceparent", b"").decode("latin-1")
            ),
            began_s=self._state.clock(),
            headers=headers,
        )
        meter: RequestMeter | None = None
        self._inside += 1
        try:
            try:
                if self._inside > self._config.requests_max:
                    raise Overloaded(1.0, "this frontend has all the requests it can hold")
                raw = await self._body_in_time(headers, receive)
                call.body = self._read(raw, scope["headers"])
            finally:
                name = call.body.model if call.body is not None else ""
                is_stream = call.body is not None and call.body.is_stream
                meter = self._state.begin(name, self._endpoint, is_stream)
            await self._serve(call, meter, receive, send)
        except MeshError as error:
            await self._refuse(call, meter, error, send)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the tokenizer library is no Exception
            log.exception("request_failed", request_id=request_id)
            await self._refuse(call, meter, Bug("see the frontend's log"), send)
        finally:
            self._inside -= 1
            if meter is not None:
                meter.close()
            self._tell_span(call)
            self._log(call)

    def _read(
        self, raw: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> ChatRequest | CompletionRequest | PassThroughBody:
        if self._models.pass_through():
            body = read_body(raw)
            if self._passes_through(body.model):
                return replace(body, nvext=read_headers(headers))
        return with_headers(self._parse(raw), read_headers(headers))

    def _passes_through(self, model: str) -> bool:
        try:
            return self._models.engine(model, self._table).pipeline.is_pass_through
        except MeshError:  # whoever serves it otherwise says what is wrong
            return False

    async def _body_in_time(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(BODY_S):
                return await self._read_body(headers, receive)
        except TimeoutError:
            raise DeadlineExceeded(f"The body was not complete within {BODY_S:g} s.") from None

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        limit = self._config.body_limit_mb << 20
        declared = headers.get(b"content-length", b"0")
        parts, size = [], int(declared) if declared.isdigit() else 0
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

    async def _serve(self, call: Call, meter: RequestMeter, receive: Receive, send: Send) -> None:
        body = call.body
        assert body is not None
        if isinstance(body, PassThroughBody):
            await self._pass_through(call, body, meter, receive, send)
        else:
            await self._generate(call, body, meter, receive, send)
        assert call.answer is not None
        outcome = call.answer.outcome
        assert outcome is not None, "both ways of answering wait for it"
        self._ended(outcome)
        details = outcome.usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            meter.cached(details.cached_tokens)
        if outcome.error is None:
            meter.mark_ok()
        else:
            meter.mark_failed(error_type(outcome.error))

    async def _generate(
        self,
        call: Call,
        body: ChatRequest | CompletionRequest,
        meter: RequestMeter,
        receive: Receive,
        send: Send,
    ) -> None:
        model = self._models.get_for(body.model, self._table)
        request = await self._prepare(body, model)
        meter.prompt(len(request.token_ids))
        flow = TextFlow(model.detokenizer(), body.stops)
        plan = self._plan(call, request)
        call.base_model = model.base
        query = self._query(model, request, call.span.traceparent)
        query = replace(query, strict_priority=strict_priority(body.nvext))
        async with self._opened(call, plan, query, meter, receive) as ticket:
            if body.is_stream:
                await self._stream(call, body, model, ticket, flow, send)
            else:
                await self._answer_whole(call, model, ticket, flow, send)

    async def _pass_through(
        self, call: Call, body: PassThroughBody, meter: RequestMeter, receive: Receive, send: Send
    ) -> None:
        _refuse_ranks(body)
        is_chat = self._endpoint is Endpoint.CHAT_COMPLETIONS
        passed = PassedBody("chat_json" if is_chat else "completion_json", body.json)
        routing = routing_hints(body.nvext)
        nothing = PreprocessedRequest(model=body.model, token_ids=TokenIds(), routing=routing)
        plan = replace(self._plan(call, nothing), body=passed)
        # Nobody has counted its tokens: the router balances such requests by their number.
        query = Query(
            model=body.model,
            total_tokens=0,
            arrived_at=asyncio.get_running_loop().time(),
            routing=routing,
            traceparent=call.span.traceparent,
            strict_priority=strict_priority(body.nvext),
        )
        async with self._opened(call, plan, query, meter, receive):
            if body.is_stream:
                await self._stream_chunks(call, send)
            else:
                await self._fold_chunks(call, send)

    async def _stream_chunks(self, call: Call, send: Send) -> None:
        answer = call.answer
        assert answer is not None
        answer.wake_in_silence(self._config.keep_alive_s)
        chunks = await answer.next_chunks()
        if not chunks and answer.outcome is not None and answer.outcome.error is not None:
            raise answer.outcome.error
        call.status = 200
        await send(_start(200, (*_STREAM, call.id_header)))
        while chunks or answer.outcome is None:
            await send(_body(b"".join(map(event, chunks)) or KEEP_ALIVE))
            chunks = await answer.next_chunks()
        error = answer.outcome.error
        call.is_ended = True
        await send(_body(DONE if error is None else error_event(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fold_chunks(self, call: Call, send: Send) -> None:
        answer = call.answer
        assert answer is not None
        chunks: list[bytes] = []
        while more := await answer.next_chunks():
            chunks += more
        outcome = answer.outcome
        assert outcome is not None
        if outcome.error is not None:
            raise outcome.error
        kind = Kind.CHAT if self._endpoint is Endpoint.CHAT_COMPLETIONS else Kind.COMPLETION
        counted = outcome.usage if outcome.usage.total_tokens else None
        whole = folded(kind, chunks, counted)
        call.status, call.is_ended = 200, True
        await _send_whole(send, 200, (_JSON, call.id_header), whole)

    async def _prepare(
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
        check_length(body, model.tokens_min(text), model.card.context_length or 0)
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

    def _plan(self, call: Call, request: PreprocessedRequest) -> Plan:
        now = asyncio.get_running_loop().time()
        return Plan(
            request_id=call.request_id,
            request=request,
            deadline=now + self._config.request_timeout_s,
            attempts_max=self._config.attempts_max,
            accept_s=self._config.accept_s,
            traceparent=call.span.traceparent,
            trace_id=call.span.trace_id,
            priority=request.routing.priority if request.routing is not None else None,
        )

    @asynccontextmanager
    async def _opened(
        self, call: Call, plan: Plan, query: Query, meter: RequestMeter, receive: Receive
    ) -> AsyncIterator[Ticket]:
        """Runs the request while its client is there; leaving ends what still runs."""
        loop = asyncio.get_running_loop()
        answer = call.answer = Answer(meter, self._state.clock)
        ticket = self._gateway.open(plan, query, answer)
        answer.ticket = ticket
        # Not a TaskGroup: it would wrap what the body raises.
        watch = loop.create_task(_await_disconnect(receive, ticket, meter))
        try:
            yield ticket
        finally:
            ticket.client_gone()
            watch.cancel()
            await asyncio.wait([watch])
            if not watch.cancelled() and watch.exception() is not None:
                log.error("disconnect_watch_failed", exc_info=watch.exception())

    def _query(self, model: ServedModel, request: PreprocessedRequest, traceparent: str) -> Query:
        query = Query(
            model=model.base,
            total_tokens=0,
            arrived_at=asyncio.get_running_loop().time(),
            hash_scheme=SCHEME_ID,
            block_size=model.hasher.block_size,
            routing=request.routing,
            traceparent=traceparent,
            hasher=model.hasher,
        )
        return query.grown(request.token_ids, len(request.token_ids))

    async def _stream(
        self,
        call: Call,
        body: ChatRequest | CompletionRequest,
        model: ServedModel,
        ticket: Ticket,
        flow: TextFlow,
        send: Send,
    ) -> None:
        answer = call.answer
        assert answer is not None
        answer.wake_in_silence(self._config.keep_alive_s)
        token_ids = await answer.next()
        if not token_ids and answer.outcome is not None and answer.outcome.error is not None:
            raise answer.outcome.error  # before the first byte it is an ordinary HTTP error
        is_chat = self._endpoint is Endpoint.CHAT_COMPLETIONS
        writer = ChunkWriter(
            Kind.CHAT if is_chat else Kind.COMPLETION,
            call.answer_id,
            model.name,
            int(datetime.now(UTC).timestamp()),
            include_usage=body.include_usage,
        )
        call.status = 200
        await send(_start(200, (*_STREAM, call.id_header)))
        events = [writer.role()] if is_chat else []
        content = writer.content
        while True:
            events += map(content, flow.feed(token_ids))
            if flow.stopped is not None:
                ticket.stop()
                break
            if not token_ids:
                if answer.outcome is not None:
                    break
                events.append(KEEP_ALIVE)
            if events:
                await send(_body(b"".join(events)))
                events = []
            token_ids = await answer.next()
        if events and answer.outcome is None:  # a last word is waited for, text is not held up
            await send(_body(b"".join(events)))
            events = []
        events += _last_events(writer, flow, await answer.end())
        await send(_body(b"".join(events)))
        call.is_ended = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _answer_whole(
        self, call: Call, model: ServedModel, ticket: Ticket, flow: TextFlow, send: Send
    ) -> None:
        answer = call.answer
        assert answer is not None
        pieces: list[str] = []
        while True:
            token_ids = await answer.next()
            pieces += flow.feed(token_ids)
            if flow.stopped is not None:
                ticket.stop()
                break
            if not token_ids:
                break
        outcome = await answer.end()
        if outcome.error is not None and flow.stopped is None:
            raise outcome.error
        pieces.append(flow.finish())
        is_chat = self._endpoint is Endpoint.CHAT_COMPLETIONS
        build = chat_completion if is_chat else text_completion
        whole = build(
            call.answer_id,
            model.name,
            int(datetime.now(UTC).timestamp()),
            "".join(pieces),
            _finish_word(flow, outcome),
            _usage(flow, outcome),
        )
        call.status, call.is_ended = 200, True
        await _send_whole(send, 200, (_JSON, call.id_header), whole)

    async def _refuse(
        self, call: Call, meter: RequestMeter | None, error: MeshError, send: Send
    ) -> None:
        call.error = error
        if meter is not None:
            meter.mark_failed(error_type(error))
        if call.is_ended:
            return
        if call.status:  # the answer has begun: its last event says how it ended
            await send(_body(error_event(error)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        answer = http_error(error, call.headers)
        call.status = answer.status
        headers = tuple((k.encode(), v.encode()) for k, v in answer.headers)
        await _send_whole(send, answer.status, (*headers, call.id_header), answer.body)

    def _tell_span(self, call: Call) -> None:
        span, answer, error = call.span, call.answer, call.error
        facts: dict[str, str | int | bool] = {
            "request_id": call.request_id,
            "x_request_id": call.client_id.decode("latin-1"),
        }
        if call.body is not None:
            facts |= {
                "model": call.body.model,
                "gen_ai.operation.name": (
                    "chat" if self._endpoint is Endpoint.CHAT_COMPLETIONS else "text_completion"
                ),
                "gen_ai.provider.name": OWNER,
                "gen_ai.request.model": call.body.model,
                "gen_ai.request.stream": call.body.is_stream,
            }
        span.is_about(facts)
        if answer is not None and answer.first_at is not None:
            span.first_token(answer.first_at - call.began_s)
        if answer is not None and answer.outcome is not None:
            span.placed(answer.outcome)
            error = error or answer.outcome.error
        span.end(call.status, error)

    def _log(self, call: Call) -> None:
        """The one line of a request."""
        now = self._state.clock()
        facts: dict[str, object] = {
            "request_id": call.request_id,
            "endpoint": self._endpoint.value,
            "status": call.status,
            "total_ms": round((now - call.began_s) * 1000, 1),
        }
        if call.client_id != call.request_id.encode():
            facts["client_request_id"] = call.client_id.decode("latin-1")
        if call.span.trace_id:
            facts["trace_id"] = call.span.trace_id
        if call.body is not None:
            facts |= {"model": call.body.model, "stream": call.body.is_stream}
            if call.base_model not in ("", call.body.model):
                facts["base_model"] = call.base_model
        answer = call.answer
        if answer is not None and answer.first_at is not None:
            facts["ttft_ms"] = round((answer.first_at - call.began_s) * 1000, 1)
        error = call.error
        if answer is not None and answer.outcome is not None:
            facts |= _outcome_facts(answer.outcome)
            error = error or answer.outcome.error
        if error is not None:
            why, param = told(error, call.headers)
            facts |= {"failure": error.reason, "why": why}
            if param is not None:
                facts["param"] = param
        log.info("request", **facts)


def _refuse_ranks(body: PassThroughBody) -> None:
    """A rank is told to a worker beside token ids only: nobody would hear of it."""
    for header in _RANKS:
        (field,) = FIELDS[header]
        if body.nvext is not None and getattr(body.nvext, field) is not None:
            why = f"requests for {body.model!r} are passed through, which takes no rank"
            raise InvalidRequest(f"Invalid header '{header}': {why}.", header)


def _outcome_facts(outcome: Outcome) -> dict[str, object]:
    details = outcome.usage.prompt_tokens_details
    facts: dict[str, object] = {
        "prompt_tokens": outcome.usage.prompt_tokens,
        "completion_tokens": outcome.usage.completion_tokens,
        "attempts": outcome.attempts,
        "workers": list(map(str, outcome.worker_ids)),
    }
    if outcome.finish_reason is not None:
        facts["finish_reason"] = outcome.finish_reason.value
    if details is not None and details.cached_tokens is not None:
        facts["cached_tokens"] = details.cached_tokens
    if outcome.placed is not None:
        facts["predicted_cached_tokens"] = outcome.placed.predicted_cached_tokens
        facts["routing"] = list(outcome.placed.reasons)
    return facts


async def _await_disconnect(receive: Receive, ticket: Ticket, meter: RequestMeter) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not ticket.machine.is_finished:
        meter.mark_disconnected()
        ticket.client_gone()


def _last_events(writer: ChunkWriter, flow: TextFlow, outcome: Outcome) -> list[bytes]:
    """What follows the last token: held back text, the end or the error, usage, DONE."""
    if outcome.error is not None and flow.stopped is None:
        return [writer.error(outcome.error)]
    rest = flow.finish()
    events = [writer.content(rest)] if rest else []
    events.append(writer.finish(_finish_word(flow, outcome)))
    events.append(writer.usage(_usage(flow, outcome)))
    events.append(DONE)
    return events


def _finish_word(flow: TextFlow, outcome: Outcome) -> FinishWord:
    if flow.stopped is not None:
        return "stop"
    word = outcome.finish_reason.openai if outcome.finish_reason is not None else None
    assert word is not None, "an end without OpenAI's word for it carries an error"
    return word


def _usage(flow: TextFlow, outcome: Outcome) -> CompletionUsage:
    """The counts; tokens that came after a stop string are not the client's."""
    counts = outcome.usage
    if flow.stopped is None:
        return counts
    return replace(
        counts,
        completion_tokens=flow.consumed,
        total_tokens=counts.prompt_tokens + flow.consumed,
    )


def _start(status: int, headers: Headers) -> MutableMapping[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _body(data: bytes) -> MutableMapping[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send(_start(status, (*headers, length)))
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
    models: Models,
    state: DeploymentState,
    registry: Any,
    config: FrontendConfig,
    readiness: Callable[[], Readiness],
    ended: Callable[[Outcome], None],
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
            model_value(engine.name, engine.created, OWNER)
            for engine in models.pass_through()
            if engine.name not in missing
        ]
        return Response(model_list(entries), media_type="application/json")

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        for engine in models.pass_through():
            if engine.name == name:
                return _json_response(model_value(name, engine.created, OWNER), 200)
        try:
            model = models.get(name)
        except MeshError as error:
            answer = http_error(error)
            return Response(answer.body, answer.status, dict(answer.headers))
        return _json_response(_model_entry(model), 200)

    def generation(endpoint: Endpoint) -> GenerationEndpoint:
        return GenerationEndpoint(endpoint, gateway, models, state, config, ended)

    _docs, metrics = metrics_router(registry)
    api = Starlette(
        routes=[
            Route("/v1/chat/completions", generation(Endpoint.CHAT_COMPLETIONS), methods=["POST"]),
            Route("/v1/completions", generation(Endpoint.COMPLETIONS), methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", one_model),
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
    return model_value(model.name, model.created, OWNER, base=base)


def _json_response(value: object, status: int) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "No such route" if status == 404 else "Method not allowed"
    details = {
        "message": f"{what}: {request.method} {request.url.path}",
        "type": "invalid_request_error",
        "param": None,
        "code": "not_found" if status == 404 else "method_not_allowed",
    }
    answer = _json_response({"error": details}, status)
    answer.headers.update(getattr(error, "headers", None) or {})  # Allow, with 405
    return answer

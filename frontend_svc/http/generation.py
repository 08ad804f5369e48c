"""The generation endpoints: reads and checks the body, runs the request, counts it."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import structlog

from common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MeshError,
    Overloaded,
    RequestCancelled,
    Unsupported,
)
from common.kv.hashing import HASH_SCHEME_ID
from common.request.preprocessed import PreprocessedRequest, TokenIds
from frontend_svc.config import FrontendConfig
from frontend_svc.core.choice import Choice
from frontend_svc.core.openai.errors import BODY_TOO_LARGE, error_event, error_type
from frontend_svc.core.openai.headers import HEADER_FIELDS, read_headers, with_headers
from frontend_svc.core.openai.pass_through import PassThroughRequest, read_body
from frontend_svc.core.openai.preprocessing import (
    check_prompt_length,
    routing_hints,
    strict_priority,
    to_preprocessed,
)
from frontend_svc.core.openai.schema import ChatRequest, CompletionRequest
from frontend_svc.core.openai.sse import ChunkKind
from frontend_svc.core.openai.tool_calls import ToolPlan, plan_tools
from frontend_svc.core.peers.placement_query import Query
from frontend_svc.core.request.types import PassThroughPayload, RequestOutcome, RequestPlan
from frontend_svc.core.text.output_text import TextStream
from frontend_svc.core.text.prompt import Prompt, TemplateError
from frontend_svc.core.tools.formats import HERMES
from frontend_svc.core.tools.harmony import HarmonyParser
from frontend_svc.core.tools.parser import ToolCallParser
from frontend_svc.core.tools.response import ResponseParser
from frontend_svc.http.api import GenerationApi, HeaderPairs, ParsedBody, ResponseInfo
from frontend_svc.http.asgi import BODY_END, Receive, Scope, Send, body_part, send_response
from frontend_svc.http.request_context import HttpRequest, log_request, span_attributes
from frontend_svc.http.streaming import (
    OpenChoice,
    ResponseWriter,
    relay_chunks,
    send_merged_chunks,
)
from frontend_svc.metrics.families import DeploymentState, RequestMeter
from frontend_svc.models.catalog import ModelCatalog
from frontend_svc.models.constraints import ConstraintChecks
from frontend_svc.models.served_model import ServedModel
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.response import Reader, ResponseBuffer
from frontend_svc.tracing import start_request_span

# Time a client may take to send its body.
BODY_TIMEOUT_S = 60.0
# A passed-through body takes no rank: workers accept one only next to token ids.
_RANK_HEADERS = ("x-kvmesh-dp-rank", "x-kvmesh-prefill-dp-rank")
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")

log = structlog.get_logger()


class GenerationEndpoint:
    """The ASGI application of one generation endpoint."""

    def __init__(
        self,
        api: GenerationApi,
        gateway: Gateway,
        models: ModelCatalog,
        state: DeploymentState,
        config: FrontendConfig,
        on_request_end: Callable[[RequestOutcome], None],
    ) -> None:
        self._api = api
        self._gateway = gateway
        self._models = models
        self._state = state
        self._config = config
        self._on_request_end = on_request_end
        self._active_requests = 0
        self._constraints = ConstraintChecks(config.grammar_compile_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. It is counted, and gets a log line, however it ends."""
        context = self._make_context(scope, receive, send)
        meter: RequestMeter | None = None
        self._active_requests += 1
        try:
            try:
                if self._active_requests > (limit := self._config.requests_max):
                    raise Overloaded(1.0, f"too many concurrent requests: {limit}/{limit}")
                raw = await self._receive_body(context)
                parsed = await self._parse(raw, scope["headers"])
                context.body = parsed.request if isinstance(parsed, ParsedBody) else parsed
            except TimeoutError:
                message = f"The body was not complete within {BODY_TIMEOUT_S:g} s."
                raise DeadlineExceeded(message) from None
            finally:
                name = context.body.model if context.body is not None else ""
                is_stream = context.body is not None and context.body.is_stream
                meter = self._state.begin(name, self._api.endpoint, is_stream)
            await self._serve(context, parsed, meter)
        except MeshError as error:
            await self._fail(context, meter, error)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the tokenizer library is no Exception
            log.exception("request_failed", request_id=context.request_id)
            await self._fail(context, meter, InternalError("see the frontend's log"))
        finally:
            self._active_requests -= 1
            if meter is not None:
                meter.close()
            context.span.end(partial(span_attributes, context), context.final_error)
            log_request(context, self._state.clock())

    def _make_context(self, scope: Scope, receive: Receive, send: Send) -> HttpRequest:
        headers = dict(scope["headers"])
        request_id = uuid.uuid4().hex
        client_id = headers.get(b"x-request-id", b"")
        traceparent = headers.get(b"traceparent", b"").decode("latin-1")
        return HttpRequest(
            endpoint=self._api.endpoint,
            table=self._api.table,
            request_id=request_id,
            client_id=client_id if _REQUEST_ID.fullmatch(client_id) else request_id.encode(),
            span=start_request_span(scope["path"], traceparent),
            started_at_s=self._state.clock(),
            headers=headers,
            receive=receive,
            send=send,
        )

    async def _parse(self, raw: bytes, headers: HeaderPairs) -> ParsedBody | PassThroughRequest:
        if self._api.passes_through and self._models.pass_through():
            body = read_body(raw)
            if self._is_pass_through(body.model):
                return replace(body, nvext=read_headers(headers))
        parsed = await self._api.parse(raw, headers)
        return replace(parsed, request=with_headers(parsed.request, read_headers(headers)))

    def _is_pass_through(self, model: str) -> bool:
        try:
            return self._models.engine(model, self._api.table).pipeline.is_pass_through
        except MeshError:  # the ordinary path reports the error
            return False

    async def _receive_body(self, context: HttpRequest) -> bytes:
        limit = self._config.body_limit_mb << 20
        content_length = context.headers.get(b"content-length", b"0")
        text = f"The body is larger than {self._config.body_limit_mb} MB."
        too_large = InvalidRequest(text, reason=BODY_TOO_LARGE)
        if content_length.isdigit() and int(content_length) > limit:
            raise too_large
        parts, size = [], 0
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await context.receive()
                if message["type"] == "http.disconnect":
                    raise RequestCancelled("The client disconnected before its body was complete.")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise too_large
                if not message.get("more_body"):
                    return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _serve(
        self, context: HttpRequest, parsed: ParsedBody | PassThroughRequest, meter: RequestMeter
    ) -> None:
        if isinstance(parsed, PassThroughRequest):
            await self._pass_through(context, parsed, meter)
        else:
            await self._generate(context, parsed, meter)
        for response in context.responses:
            if response.outcome is not None:
                self._on_request_end(response.outcome)
        outcome = context.outcome
        assert outcome is not None, "both paths wait for the outcome"
        details = outcome.usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            meter.cached(details.cached_tokens)
        if outcome.error is None:
            meter.mark_ok()
        else:
            meter.mark_failed(error_type(outcome.error))

    async def _generate(
        self, context: HttpRequest, parsed: ParsedBody, meter: RequestMeter
    ) -> None:
        body = parsed.request
        model = self._models.get_for(body.model, self._api.table)
        plan = plan_tools(body, model.call_format) if isinstance(body, ChatRequest) else None
        guided = await self._constraints.resolve(body, plan)
        request = to_preprocessed(
            body,
            await _tokenize(body, model) if body.token_data is None else body.token_data,
            eos_token_ids=model.card.eos_token_ids,
            mdc_sum=model.checksum,
            context_length=model.card.context_length or 0,
            default_max_tokens=model.card.default_max_tokens,
            vocab_size=model.vocab_size,
            adapter=model.adapter,
            guided=guided,
        )
        meter.prompt(len(request.token_ids))
        parser = None
        if isinstance(body, ChatRequest):
            parser = _response_parser(context.request_id, model, plan, request)
        flow = TextStream(model.detokenizer(for_parser=parser is not None), body.stop_strings)
        context.base_model = model.base
        query = Query(
            model=model.base,
            total_tokens=0,
            arrived_at=asyncio.get_running_loop().time(),
            hash_scheme=HASH_SCHEME_ID,
            block_size=model.hasher.block_size,
            routing=request.routing,
            traceparent=context.span.traceparent,
            strict_priority=strict_priority(body.nvext),
            hasher=model.hasher,
        ).extended(request.token_ids, len(request.token_ids))
        response_format = parsed.make_format(
            ResponseInfo(
                context.request_id,
                model.name,
                _now_s(),
                choices=1,
                prompt_tokens=len(request.token_ids),
            )
        )
        plans = [(self._make_plan(context, request), query)]
        async with self._open_requests(context, plans, meter) as handles:
            choices = [OpenChoice(Choice(0, flow, parser), handles[0], context.responses[0])]
            writer = ResponseWriter(context, choices, self._config.keep_alive_s)
            if body.is_stream:
                await writer.stream(response_format)
            else:
                await writer.send(response_format)

    async def _pass_through(
        self, context: HttpRequest, body: PassThroughRequest, meter: RequestMeter
    ) -> None:
        _reject_rank_headers(body)
        is_chat = self._api.table == "chat"
        payload = PassThroughPayload(body.json, is_chat)
        routing = routing_hints(body.nvext)
        empty_request = PreprocessedRequest(model=body.model, token_ids=TokenIds(), routing=routing)
        plan = replace(self._make_plan(context, empty_request), body=payload)
        # The frontend has no token count, so the router balances these requests by number.
        query = Query(
            model=body.model,
            total_tokens=0,
            arrived_at=asyncio.get_running_loop().time(),
            routing=routing,
            traceparent=context.span.traceparent,
            strict_priority=strict_priority(body.nvext),
        )
        async with self._open_requests(context, [(plan, query)], meter):
            (buffer,) = context.responses
            if body.is_stream:
                await relay_chunks(context, buffer, self._config.keep_alive_s)
            else:
                kind = ChunkKind.CHAT if is_chat else ChunkKind.COMPLETION
                await send_merged_chunks(context, buffer, kind)

    def _make_plan(self, context: HttpRequest, request: PreprocessedRequest) -> RequestPlan:
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
    async def _open_requests(
        self,
        context: HttpRequest,
        plans: Sequence[tuple[RequestPlan, Query]],
        meter: RequestMeter,
    ) -> AsyncIterator[list[RequestHandle]]:
        """Runs requests, which `context.responses` receive, while their client is connected;
        leaving ends what still runs."""
        reader = Reader()
        handles: list[RequestHandle] = []

        def fail(index: int, error: MeshError, reason: str) -> None:
            handles[index].fail(error, reason)

        context.responses = [
            ResponseBuffer(meter, self._state.clock, partial(fail, index), reader=reader)
            for index in range(len(plans))
        ]
        for (plan, query), response in zip(plans, context.responses, strict=True):
            handles.append(self._gateway.open(plan, query, response))
        # Not a TaskGroup: it would wrap what the body raises.
        disconnect_watch = asyncio.get_running_loop().create_task(
            _await_disconnect(context.receive, handles, meter)
        )
        try:
            yield handles
        finally:
            for handle in handles:
                handle.client_gone()
            disconnect_watch.cancel()
            await asyncio.wait([disconnect_watch])
            if not disconnect_watch.cancelled() and disconnect_watch.exception() is not None:
                log.error("disconnect_watch_failed", exc_info=disconnect_watch.exception())

    async def _fail(
        self, context: HttpRequest, meter: RequestMeter | None, error: MeshError
    ) -> None:
        context.error = error
        if meter is not None:
            meter.mark_failed(error_type(error))
        await self._send_error(context, error)

    async def _send_error(self, context: HttpRequest, error: MeshError) -> None:
        """Sends an error as an HTTP response, or as the last event if the stream has begun."""
        if context.is_response_complete:
            return
        if context.status:
            stream_format = context.stream_format
            events = error_event(error) if stream_format is None else stream_format.error(error)
            await context.send(body_part(events))
            await context.send(BODY_END)
            return
        response = self._api.http_error(error, context.headers)
        context.status = response.status
        headers = tuple((k.encode(), v.encode()) for k, v in response.headers)
        await send_response(
            context.send, response.status, (*headers, context.id_header), response.body
        )


def _response_parser(
    response_id: str, model: ServedModel, plan: ToolPlan | None, request: PreprocessedRequest
) -> ResponseParser | None:
    if model.is_harmony and (plan is None or plan.call_format is not HERMES):
        messages = HarmonyParser(is_single=plan is not None and plan.is_single)
        return ResponseParser(messages, None, response_id)
    guided = request.sampling_options.guided_decoding
    is_guided = guided is not None and not guided.best_effort
    reasoning = model.reasoning_parser(request.token_ids, is_guided=is_guided)
    if plan is None:
        return None if reasoning is None else ResponseParser(None, reasoning, response_id)
    tools = ToolCallParser(plan.call_format, plan.types, is_single=plan.is_single)
    id_chars = plan.call_format.id_chars
    return ResponseParser(tools, reasoning, response_id, id_chars=id_chars)


async def _tokenize(body: ChatRequest | CompletionRequest, model: ServedModel) -> list[int]:
    context_length = model.card.context_length or 0
    if isinstance(body, CompletionRequest):
        text = body.prompt_text or ""
        check_prompt_length(body, model.token_count_min(text), context_length)
        return await model.encode(text, special_tokens=True)
    prompt = _render_prompt(body, model)
    check_prompt_length(body, model.token_count_min(prompt.text), context_length)
    return await model.encode_prompt(prompt)


def _render_prompt(body: ChatRequest, model: ServedModel) -> Prompt:
    if model.template is None:
        text = f"The model {model.name!r} has no chat template; use /v1/completions."
        raise InvalidRequest(text, "model")
    tools = body.template_tools()
    if tools is not None and not model.template.prints_tools:
        raise Unsupported("tools", "the model's chat template does not print them")
    try:
        return model.template.prompt(
            body.template_messages(),
            model.control_tokens,
            tools=tools,
            template_kwargs=body.chat_template_kwargs,
            now=datetime.now(UTC),
        )
    except TemplateError as error:
        raise InvalidRequest(str(error), "messages") from error


def _reject_rank_headers(body: PassThroughRequest) -> None:
    for header in _RANK_HEADERS:
        (field,) = HEADER_FIELDS[header]
        if body.nvext is not None and getattr(body.nvext, field) is not None:
            message = f"requests for {body.model!r} are passed through and take no rank"
            raise InvalidRequest(f"Invalid header '{header}': {message}.", header)


async def _await_disconnect(
    receive: Receive, handles: Sequence[RequestHandle], meter: RequestMeter
) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not all(handle.machine.is_finished for handle in handles):
        meter.mark_disconnected()
        for handle in handles:
            handle.client_gone()


def _now_s() -> int:
    return int(datetime.now(UTC).timestamp())

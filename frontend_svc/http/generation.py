"""The generation endpoints: reads and checks the body, runs the request, counts it."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
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
from frontend_svc.core.models.model_watch import Table
from frontend_svc.core.openai.errors import BODY_TOO_LARGE, error_type
from frontend_svc.core.openai.headers import HEADER_FIELDS, read_headers, with_headers
from frontend_svc.core.openai.parsing import parse_chat, parse_completion
from frontend_svc.core.openai.pass_through import PassThroughRequest, read_body
from frontend_svc.core.openai.preprocessing import (
    check_prompt_length,
    routing_hints,
    strict_priority,
    to_preprocessed,
)
from frontend_svc.core.openai.schema import ChatRequest, CompletionRequest
from frontend_svc.core.openai.tool_calls import ToolPlan, plan_tools
from frontend_svc.core.peers.placement_query import Query
from frontend_svc.core.request.types import PassThroughPayload, RequestOutcome, RequestPlan
from frontend_svc.core.text.output_text import TextStream
from frontend_svc.core.text.prompt import Prompt, TemplateError
from frontend_svc.core.tools.formats import HERMES
from frontend_svc.core.tools.harmony import HarmonyParser
from frontend_svc.core.tools.parser import ToolCallParser
from frontend_svc.core.tools.response import ResponseParser
from frontend_svc.http.asgi import Receive, Scope, Send
from frontend_svc.http.request_context import HttpRequest, log_request, span_attributes
from frontend_svc.http.streaming import ResponseWriter, send_error
from frontend_svc.metrics.families import DeploymentState, Endpoint, RequestMeter
from frontend_svc.models.catalog import ModelCatalog
from frontend_svc.models.constraints import ConstraintChecks
from frontend_svc.models.served_model import ServedModel
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.response import ResponseBuffer
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
        endpoint: Endpoint,
        gateway: Gateway,
        models: ModelCatalog,
        state: DeploymentState,
        config: FrontendConfig,
        on_request_end: Callable[[RequestOutcome], None],
    ) -> None:
        self._endpoint = endpoint
        self._is_chat = endpoint is Endpoint.CHAT_COMPLETIONS
        self._parse = parse_chat if self._is_chat else parse_completion
        self._table: Table = "chat" if self._is_chat else "completions"
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
                context.body = self._parse_body(raw, scope["headers"])
            except TimeoutError:
                message = f"The body was not complete within {BODY_TIMEOUT_S:g} s."
                raise DeadlineExceeded(message) from None
            finally:
                name = context.body.model if context.body is not None else ""
                is_stream = context.body is not None and context.body.is_stream
                meter = self._state.begin(name, self._endpoint, is_stream)
            await self._serve(context, context.body, meter)
        except MeshError as error:
            await _fail(context, meter, error)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the tokenizer library is no Exception
            log.exception("request_failed", request_id=context.request_id)
            await _fail(context, meter, InternalError("see the frontend's log"))
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
            endpoint=self._endpoint,
            request_id=request_id,
            client_id=client_id if _REQUEST_ID.fullmatch(client_id) else request_id.encode(),
            span=start_request_span(scope["path"], traceparent),
            started_at_s=self._state.clock(),
            headers=headers,
            receive=receive,
            send=send,
        )

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
        self,
        context: HttpRequest,
        body: ChatRequest | CompletionRequest | PassThroughRequest,
        meter: RequestMeter,
    ) -> None:
        if isinstance(body, PassThroughRequest):
            await self._pass_through(context, body, meter)
        else:
            await self._generate(context, body, meter)
        outcome = context.outcome
        assert outcome is not None, "both paths wait for the outcome"
        self._on_request_end(outcome)
        details = outcome.usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            meter.cached(details.cached_tokens)
        if outcome.error is None:
            meter.mark_ok()
        else:
            meter.mark_failed(error_type(outcome.error))

    async def _generate(
        self, context: HttpRequest, body: ChatRequest | CompletionRequest, meter: RequestMeter
    ) -> None:
        model = self._models.get_for(body.model, self._table)
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
        parser = _response_parser(context, model, plan, request) if self._is_chat else None
        flow = TextStream(model.detokenizer(for_parser=parser is not None), body.stop_strings)
        request_plan = self._make_plan(context, request)
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
        async with self._open_request(context, request_plan, query, meter) as (handle, response):
            writer = ResponseWriter(context, response, self._config.keep_alive_s)
            if body.is_stream:
                await writer.stream_text(handle, flow, model.name, body.include_usage, parser)
            else:
                await writer.send_text(handle, flow, model.name, parser)

    async def _pass_through(
        self, context: HttpRequest, body: PassThroughRequest, meter: RequestMeter
    ) -> None:
        _reject_rank_headers(body)
        payload = PassThroughPayload(body.json, self._is_chat)
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
        async with self._open_request(context, plan, query, meter) as (_, response):
            writer = ResponseWriter(context, response, self._config.keep_alive_s)
            if body.is_stream:
                await writer.relay_chunks()
            else:
                await writer.send_merged_chunks()

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
    async def _open_request(
        self, context: HttpRequest, plan: RequestPlan, query: Query, meter: RequestMeter
    ) -> AsyncIterator[tuple[RequestHandle, ResponseBuffer]]:
        """Runs the request while its client is connected; leaving ends what still runs."""

        def fail(error: MeshError, reason: str) -> None:
            handle.fail(error, reason)

        response = context.response = ResponseBuffer(meter, self._state.clock, fail)
        handle = self._gateway.open(plan, query, response)
        # Not a TaskGroup: it would wrap what the body raises.
        disconnect_watch = asyncio.get_running_loop().create_task(
            _await_disconnect(context.receive, handle, meter)
        )
        try:
            yield handle, response
        finally:
            handle.client_gone()
            disconnect_watch.cancel()
            await asyncio.wait([disconnect_watch])
            if not disconnect_watch.cancelled() and disconnect_watch.exception() is not None:
                log.error("disconnect_watch_failed", exc_info=disconnect_watch.exception())


def _response_parser(
    context: HttpRequest, model: ServedModel, plan: ToolPlan | None, request: PreprocessedRequest
) -> ResponseParser | None:
    if model.is_harmony and (plan is None or plan.call_format is not HERMES):
        messages = HarmonyParser(is_single=plan is not None and plan.is_single)
        return ResponseParser(messages, None, context.request_id)
    guided = request.sampling_options.guided_decoding
    is_guided = guided is not None and not guided.best_effort
    reasoning = model.reasoning_parser(request.token_ids, is_guided=is_guided)
    if plan is None:
        return None if reasoning is None else ResponseParser(None, reasoning, context.request_id)
    tools = ToolCallParser(plan.call_format, plan.types, is_single=plan.is_single)
    id_chars = plan.call_format.id_chars
    return ResponseParser(tools, reasoning, context.request_id, id_chars=id_chars)


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


async def _await_disconnect(receive: Receive, handle: RequestHandle, meter: RequestMeter) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not handle.machine.is_finished:
        meter.mark_disconnected()
        handle.client_gone()


async def _fail(context: HttpRequest, meter: RequestMeter | None, error: MeshError) -> None:
    context.error = error
    if meter is not None:
        meter.mark_failed(error_type(error))
    await send_error(context, error)

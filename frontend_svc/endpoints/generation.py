"""The generation endpoints: reads and checks the body, runs the request, counts it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import structlog

from common.errors import (
    InvalidRequest,
    MeshError,
    Unsupported,
)
from common.request.preprocessed import PreprocessedRequest, TokenIds
from frontend_svc.access.permissions import check_permissions
from frontend_svc.endpoints.constraints import ConstraintChecks
from frontend_svc.endpoints.endpoint import EndpointParts, PostEndpoint
from frontend_svc.endpoints.generation_api import GenerationApi, ParsedBody, ResponseInfo, off_loop
from frontend_svc.endpoints.pass_through import PassThroughRequest, read_body
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.endpoints.route import Route
from frontend_svc.endpoints.streaming import (
    OpenChoice,
    ResponseWriter,
    relay_chunks,
    send_merged_chunks,
)
from frontend_svc.errors import HEADER_FIELDS, error_type
from frontend_svc.media.loader import MediaLoader
from frontend_svc.media.prompt import add_media, check_media, expand_media, media_parts
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.models.engine_options import check_options
from frontend_svc.models.model_watch import Table
from frontend_svc.models.served_model import ServedModel
from frontend_svc.openai.body.headers import read_headers, with_headers
from frontend_svc.openai.body.preprocessing import (
    check_prompt_length,
    check_total_tokens,
    choice_request,
    input_texts,
    routing_hints,
    to_preprocessed,
)
from frontend_svc.openai.body.request_template import with_defaults
from frontend_svc.openai.body.schema import ChatRequest, CompletionRequest
from frontend_svc.openai.body.tool_calls import ToolPlan, plan_tools
from frontend_svc.openai.output.completion_objects import completion_json
from frontend_svc.openai.output.extension import ResponseExtension, make_extension
from frontend_svc.openai.output.logprobs import token_id_text
from frontend_svc.openai.output.sse import ChunkKind
from frontend_svc.prompts.prompt import Prompt, TemplateError
from frontend_svc.request.buffer import Reader, ResponseBuffer
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.types import PassThroughPayload, RequestPlan
from frontend_svc.text.choice import Choice
from frontend_svc.text.output_text import TextStream
from frontend_svc.text.response_format import ChoiceRecorder, RecordedFormat, ResponseFormat
from frontend_svc.tools.formats import HERMES
from frontend_svc.tools.harmony import HarmonyParser
from frontend_svc.tools.parser import ToolCallParser
from frontend_svc.tools.response import ResponseParser

# A passed-through body takes no rank: workers accept one only next to token ids.
_RANK_HEADERS = ("x-kvmesh-dp-rank", "x-kvmesh-prefill-dp-rank")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PreparedBody:
    """A body after all checks and tokenization. body: with the defaults of its model. requests:
    one for each prompt. prompt_text: of the first prompt; None: it was given as token ids."""

    body: ChatRequest | CompletionRequest
    model: ServedModel
    plan: ToolPlan | None
    requests: Sequence[PreprocessedRequest]
    prompt_text: str | None
    prompt_tokens: int


class GenerationEndpoint(PostEndpoint[ParsedBody | PassThroughRequest]):
    """The ASGI application of one generation endpoint."""

    def __init__(
        self,
        route: Route,
        api: GenerationApi,
        parts: EndpointParts,
        constraints: ConstraintChecks,
        media: MediaLoader,
    ) -> None:
        super().__init__(route, parts)
        self._api = api
        self._constraints = constraints
        self._media = media

    async def parse(self, context: HttpRequest, raw: bytes) -> ParsedBody | PassThroughRequest:
        if self._api.passes_through and self._models.pass_through:
            body = await off_loop(len(raw), read_body, raw)
            if self._is_pass_through(body.model):
                body = replace(body, nvext=read_headers(context.header_pairs))
                context.progress.body = body
                check_permissions(context.caller, body.nvext)
                return body
        parsed = await self._api.parse(raw, context.caller)
        request = with_headers(parsed.request, read_headers(context.header_pairs))
        context.progress.body, context.progress.uses_alias = request, request.kvmesh is not None
        check_permissions(context.caller, request.nvext, request.priority)
        return parsed if request is parsed.request else replace(parsed, request=request)

    def _is_pass_through(self, model: str) -> bool:
        try:
            return self._models.engine(model, self._api.table).model is None
        except MeshError:  # the ordinary path reports the error
            return False

    async def serve(
        self, context: HttpRequest, body: ParsedBody | PassThroughRequest, meter: RequestMeter
    ) -> None:
        if isinstance(body, PassThroughRequest):
            await self._pass_through(context, body, meter)
        else:
            await self._generate(context, body, meter)
        for response in context.progress.responses:
            if response.outcome is not None:
                self._parts.on_request_end(response.outcome)
        outcome = context.progress.outcome
        assert outcome is not None, "both paths wait for the outcome"
        details = outcome.usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            meter.cached(details.cached_tokens)
        if outcome.error is None:
            meter.mark_ok()
        else:
            meter.mark_failed(error_type(outcome.error))

    async def prepare(
        self, context: HttpRequest, parsed: ChatRequest | CompletionRequest, meter: RequestMeter
    ) -> PreparedBody:
        """Raises MeshError with the field of the body."""
        table: Table = "chat" if isinstance(parsed, ChatRequest) else "completions"
        model = self._models.get_for(parsed.model, table)
        templates = self._config.request_templates
        template = templates.get(model.name) or templates.get(model.base)
        body = with_defaults(parsed, template)
        default_max_tokens = template and template.max_completion_tokens
        plan = plan_tools(body, model.call_format) if isinstance(body, ChatRequest) else None
        guided = await self._constraints.resolve(body, plan)
        token_lists, prompt_text = await _tokenize(body, model)
        prompts = [
            to_preprocessed(
                body,
                token_ids,
                eos_token_ids=model.card.eos_token_ids,
                mdc_sum=model.checksum,
                context_length=model.card.context_length or 0,
                default_max_tokens=default_max_tokens or model.card.default_max_tokens,
                vocab_size=model.vocab_size,
                adapter=model.adapter,
                guided=guided,
            )
            for token_ids in token_lists
        ]
        refused_options = self._models.refused_options(model.name)
        for request in prompts:
            request.model = model.name  # not an alias, which workers do not have
            request.tracker = context.tracker
            context.caller.confine(request)
            check_options(request, refused_options)
        if isinstance(body, ChatRequest) and (parts := media_parts(body)):
            media = await self._media.load(parts, model.card.media)
            block_size = model.hasher.block_size
            prompts = [add_media(one, media, model.card.media, block_size) for one in prompts]
        context.progress.request = prompts[0]
        prompt_tokens = check_total_tokens(prompts)
        meter.prompt(prompt_tokens)
        context.progress.base_model = model.base
        if context.quota is not None:
            outputs = [one.stop_conditions.max_tokens or 0 for one in prompts]
            context.quota.reserve(prompt_tokens + sum(outputs) * body.choices_per_prompt)
        return PreparedBody(body, model, plan, prompts, prompt_text, prompt_tokens)

    async def _generate(
        self, context: HttpRequest, parsed: ParsedBody, meter: RequestMeter
    ) -> None:
        prepared = await self.prepare(context, parsed.request, meter)
        body, model, prompts = prepared.body, prepared.model, prepared.requests
        context.progress.choices_per_prompt = body.choices_per_prompt
        info = ResponseInfo(
            context.request_id,
            model.name,
            int(time.time()),
            choices=len(prompts) * body.choices_per_prompt,
            prompt_tokens=prepared.prompt_tokens,
        )
        extension = _extension(body, model, info, prompts[0], prepared.prompt_text)
        is_query_only = extension is not None and extension.is_query_only
        response_format = parsed.make_format(info)
        requests: list[tuple[RequestPlan, PlacementRequest]] = []
        choices: list[Choice] = []
        for prompt, request in enumerate(prompts):
            hasher = model.hasher_for(request.routing)
            placement = self.make_placement(context, model.base, request, body.nvext, hasher)
            echo = _echoed_text(body, model, prompt)
            for number in range(body.choices_per_prompt):
                request_plan = self.make_plan(
                    context, choice_request(request, number), choice=len(choices)
                )
                if is_query_only:
                    request_plan = replace(request_plan, is_query_only=True)
                    placement = replace(placement, is_query_only=True)
                requests.append((request_plan, placement))
                parser = None
                if isinstance(body, ChatRequest):
                    parser = _response_parser(
                        request_plan.request_id, model, prepared.plan, request
                    )
                text = _text_stream(body, model, for_parser=parser is not None)
                token_bytes = _token_bytes(body, model)
                choices.append(
                    Choice(len(choices), text, parser, echo=echo, token_bytes=token_bytes)
                )
        with self._open_requests(context, requests, meter) as opened:
            open_choices = [
                OpenChoice(choice, *one, extension)
                for choice, one in zip(choices, opened, strict=True)
            ]
            writer = ResponseWriter(
                context, open_choices, self._config.keep_alive_s, self._gateway.backlog
            )
            if not body.is_stream:
                await writer.send(response_format)
                return
            if self._records.has_response:
                response_format = self._recorded(context, body, info, response_format)
            await writer.stream(response_format)

    def _recorded(
        self,
        context: HttpRequest,
        body: ChatRequest | CompletionRequest,
        info: ResponseInfo,
        response_format: ResponseFormat,
    ) -> ResponseFormat:
        """The same format; `context` receives the whole response."""
        recorder = ChoiceRecorder(info.choices)
        is_chat = isinstance(body, ChatRequest)
        whole = partial(completion_json, info.request_id, info.model, info.created, is_chat=is_chat)
        context.progress.render_stream = partial(whole, recorder.results)
        return RecordedFormat(response_format, recorder)

    async def _pass_through(
        self, context: HttpRequest, body: PassThroughRequest, meter: RequestMeter
    ) -> None:
        _reject_rank_headers(body)
        is_chat = self._api.table == "chat"
        payload = PassThroughPayload(body.json, is_chat)
        routing = routing_hints(body.nvext)
        empty_request = PreprocessedRequest(model=body.model, token_ids=TokenIds(), routing=routing)
        context.caller.confine(empty_request)
        plan = replace(self.make_plan(context, empty_request), body=payload)
        # The frontend has no token count, so the router balances these requests by number.
        placement = self.make_placement(context, body.model, empty_request, body.nvext)
        with self._open_requests(context, [(plan, placement)], meter) as ((_, buffer),):
            if body.is_stream:
                await relay_chunks(context, buffer, self._config.keep_alive_s)
            else:
                kind = ChunkKind.CHAT if is_chat else ChunkKind.COMPLETION
                await send_merged_chunks(context, buffer, kind)

    @contextmanager
    def _open_requests(
        self,
        context: HttpRequest,
        plans: Sequence[tuple[RequestPlan, PlacementRequest]],
        meter: RequestMeter,
    ) -> Iterator[list[tuple[RequestHandle, ResponseBuffer]]]:
        """Runs requests, whose responses the progress has, while their client is connected; leaving
        ends what still runs."""
        reader, backlog = Reader(), self._gateway.backlog
        handles: list[RequestHandle] = []

        def fail(index: int, error: MeshError, reason: str) -> None:
            handles[index].fail(error, reason)

        context.progress.placements = [placement for _, placement in plans]
        context.progress.responses = buffers = [
            ResponseBuffer(
                meter, self._state.clock, partial(fail, index), reader=reader, backlog=backlog
            )
            for index in range(len(plans))
        ]
        for (plan, placement), response in zip(plans, buffers, strict=True):
            handles.append(self._gateway.open(plan, placement, response))

        def client_gone() -> None:
            if not all(handle.machine.is_finished for handle in handles):
                meter.mark_disconnected()
                for handle in handles:
                    handle.abort()

        with context.connection.watched(client_gone):
            try:
                yield list(zip(handles, buffers, strict=True))
            finally:
                for handle, buffer in zip(handles, buffers, strict=True):
                    handle.abort()
                    buffer.discard()
                handles.clear()  # `fail` holds them, and they hold the buffers, which hold `fail`
                reader.close()


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


def _token_bytes(
    body: ChatRequest | CompletionRequest, model: ServedModel
) -> Callable[[int], bytes] | None:
    """How log probabilities write a token; None if the client requested none."""
    if body.alternatives is None:
        return None
    return token_id_text if body.return_tokens_as_token_ids else model.token_bytes


def _text_stream(
    body: ChatRequest | CompletionRequest, model: ServedModel, *, for_parser: bool
) -> TextStream:
    return TextStream(
        model.detokenizer(
            for_parser=for_parser, skips_special=body.skip_special_tokens is not False
        ),
        body.stop_strings,
        min_tokens=body.min_tokens or 0,
        includes_stop=body.include_stop_str_in_output is True,
    )


def _extension(
    body: ChatRequest | CompletionRequest,
    model: ServedModel,
    info: ResponseInfo,
    request: PreprocessedRequest,
    prompt_text: str | None,
) -> ResponseExtension | None:
    if (nvext := body.nvext) is None or not (nvext.annotations or nvext.extra_fields):
        return None
    return make_extension(
        request,
        nvext.extra_fields or (),
        request_id=info.request_id,
        prompt_text=prompt_text,
        has_token_data=nvext.token_data is not None,
        choices=info.choices,
        block_size=model.hasher.block_size,
    )


async def _tokenize(
    body: ChatRequest | CompletionRequest, model: ServedModel
) -> tuple[list[Sequence[int]], str | None]:
    """The prompts of a body, at least one, and the text of the first one; None: token ids."""
    context_length = model.card.context_length or 0
    if isinstance(body, CompletionRequest):
        token_lists: list[Sequence[int]] = [
            await _encode(body, one, model, context_length) if isinstance(one, str) else one
            for one in body.prompts
        ]
        first = body.prompts[0]
        return token_lists, first if isinstance(first, str) else None
    token_ids, text = await encode_chat(body, model, context_length=context_length)
    return [token_ids], text


async def encode_chat(
    body: ChatRequest,
    model: ServedModel,
    *,
    add_generation_prompt: bool = True,
    context_length: int = 0,
) -> tuple[Sequence[int], str | None]:
    """The prompt of a chat request, with all placeholders of its media, and its text; None: token
    ids. context_length: 0: a prompt of any length is encoded."""
    parts = media_parts(body)
    check_media(parts, model.card.media, model.name)
    token_ids: Sequence[int] | None = body.token_data
    text = None
    if token_ids is None:
        # Templates print these in full: their length can refuse a body before it is rendered.
        check_prompt_length(body, model.token_count_min(*input_texts(body)), context_length)
        prompt = await render_prompt(body, model, add_generation_prompt=add_generation_prompt)
        check_prompt_length(body, model.token_count_min(prompt.text), context_length)
        token_ids, text = await model.encode_prompt(prompt), prompt.text
    return expand_media(token_ids, parts, model.card.media), text


async def _encode(
    body: CompletionRequest, text: str, model: ServedModel, context_length: int
) -> list[int]:
    check_prompt_length(body, model.token_count_min(text), context_length)
    return await model.encode(text, special_tokens=True)


def _echoed_text(body: ChatRequest | CompletionRequest, model: ServedModel, prompt: int) -> str:
    if not isinstance(body, CompletionRequest) or not body.echo:
        return ""
    value = body.prompts[prompt]
    return value if isinstance(value, str) else model.tokenizer.decode(value)


async def render_prompt(
    body: ChatRequest, model: ServedModel, *, add_generation_prompt: bool = True
) -> Prompt:
    """The prompt of a chat request. Raises InvalidRequest or Unsupported, which name the field."""
    if model.template is None:
        text = f"The model {model.name!r} has no chat template; use /v1/completions."
        raise InvalidRequest(text, "model")
    tools = body.template_tools()
    if tools is not None and not model.template.prints_tools:
        raise Unsupported("tools", "the model's chat template does not print them")
    try:
        return await model.template.prompt(
            body.template_messages(),
            tools=tools,
            template_kwargs=body.template_kwargs(
                model.template.variables, is_reasoning=model.is_reasoning
            ),
            add_generation_prompt=add_generation_prompt,
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

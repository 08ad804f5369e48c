"""Generation: checks and tokenizes a body, runs it on workers, writes the response."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from common.errors import Unavailable
from common.request.preprocessed import GuidedDecoding, PreprocessedRequest
from frontend_svc.access.permissions import check_permissions
from frontend_svc.endpoints.endpoint import EndpointDependencies, PostEndpoint
from frontend_svc.endpoints.event_stream import send_events
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.endpoints.route import Route
from frontend_svc.generation.api import (
    Detached,
    GenerationApi,
    ParsedBody,
    PreparedBody,
    ResponseInfo,
)
from frontend_svc.generation.choices import echo_with_logprobs, make_choices
from frontend_svc.generation.constraints import ConstraintChecks
from frontend_svc.generation.form import ResponseForm, form_of
from frontend_svc.generation.streaming import OpenChoice, ResponseWriter, send_json
from frontend_svc.generation.tokenization import tokenize
from frontend_svc.generation.worker_requests import count_outcome, open_requests
from frontend_svc.media.loader import MediaLoader
from frontend_svc.media.prompt import add_media, media_parts
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.models.engine_options import check_options
from frontend_svc.models.model_watch import Table
from frontend_svc.models.served_model import ServedModel
from frontend_svc.openai.body.headers import read_headers, with_headers
from frontend_svc.openai.body.preprocessing import (
    check_echo,
    check_total_tokens,
    choice_request,
    to_preprocessed,
)
from frontend_svc.openai.body.request_template import with_defaults
from frontend_svc.openai.body.schema import ChatRequest, CompletionRequest
from frontend_svc.openai.body.tool_calls import plan_tools
from frontend_svc.openai.output.completion_objects import completion_json
from frontend_svc.openai.output.extension import ResponseExtension, make_extension
from frontend_svc.request.conversation import conversation_name
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.types import RequestPlan
from frontend_svc.text.api_format import ApiFormat, ChoiceRecorder, RecordedFormat


class GenerationEndpoint(PostEndpoint[ParsedBody]):
    """The ASGI application of one generation endpoint."""

    def __init__(
        self,
        route: Route,
        api: GenerationApi,
        dependencies: EndpointDependencies,
        constraints: ConstraintChecks,
        media: MediaLoader,
    ) -> None:
        super().__init__(route, dependencies)
        self._api = api
        self._constraints = constraints
        self._media = media

    async def parse(self, context: HttpRequest, raw: bytes) -> ParsedBody:
        return self.accept(context, await self._api.parse(raw, context.caller))

    def accept(self, context: HttpRequest, parsed: ParsedBody) -> ParsedBody:
        """Returns a body with the hints of its headers and the model of its alias. Raises MeshError
        if they are invalid or need another key."""
        request = with_headers(parsed.request, read_headers(context.header_pairs))
        progress = context.progress
        progress.body = request
        name = request.model
        if name in self._models.weighted_aliases and progress.choice is None:
            model = self.served_model(context, name, _conversation(context, request, parsed))
            request = request.model_copy(update={"model": model})
        progress.body, progress.uses_alias = request, request.kvmesh is not None
        progress.omitted_tools = parsed.omitted_tools
        check_permissions(context.caller, request.nvext, request.priority)
        return parsed if request is parsed.request else replace(parsed, request=request)

    async def serve(self, context: HttpRequest, body: ParsedBody, meter: RequestMeter) -> None:
        prepared = await self.prepare(context, body.request, meter if body.detach is None else None)
        info = _response_info(context, prepared)
        if body.detach is not None:
            await self._send_detached(context, await body.detach(info, context.header_pairs), meter)
            return
        extension = _extension(prepared, info)
        api_format = body.make_format(info)
        is_query_only = extension is not None and extension.is_query_only
        conversation = _conversation(context, prepared.body, body)
        plans = self._plans(context, prepared, conversation, is_query_only=is_query_only)
        request_ids = [plan.request_id for plan, _ in plans]
        form = None if is_query_only else _form(prepared)
        has_constraint = form is not None and form.guided is not None
        choices = make_choices(prepared, request_ids, info.token_counts, is_recorded=has_constraint)
        context.progress.choices_per_prompt = prepared.body.choices_per_prompt
        with open_requests(self._dependencies, context, plans, meter) as opened:
            open_choices = [
                OpenChoice(choice, handle, buffer, extension)
                for choice, (handle, buffer) in zip(choices, opened, strict=True)
            ]
            echo_with_logprobs(prepared, open_choices)
            writer = ResponseWriter(
                context,
                open_choices,
                self._config.keep_alive_s,
                self._gateway.backlog,
                form,
            )
            if prepared.body.is_stream:
                if self._records.has_response:
                    api_format = _recorded(context, prepared, info, api_format)
                await writer.stream(api_format)
            else:
                await writer.send(api_format)
        count_outcome(self._dependencies, context, meter)

    async def _send_detached(
        self, context: HttpRequest, detached: Detached, meter: RequestMeter
    ) -> None:
        """Sends what there is of a response that runs without this request."""
        meter.mark_ok()
        if detached.events is None:
            await send_json(context, detached.body)
            return
        context.progress.status, context.progress.is_response_complete = 200, True
        await send_events(context.send, context.connection, context.own_headers, detached.events)

    async def prepare(
        self,
        context: HttpRequest,
        parsed: ChatRequest | CompletionRequest,
        meter: RequestMeter | None,
    ) -> PreparedBody:
        """Returns a body after all checks and tokenization. Raises MeshError with the field of the
        body.

        - meter: counts its prompts; None: they run later.
        """
        table: Table = "chat" if isinstance(parsed, ChatRequest) else "completions"
        try:
            model = self._models.get_for(parsed.model, table)
        except Unavailable as error:
            model = await self.await_model(context, parsed.model, table, error)
        templates = self._config.request_templates
        template = templates.get(model.name) or templates.get(model.base)
        body = with_defaults(parsed, template)
        plan = plan_tools(body, model.call_format) if isinstance(body, ChatRequest) else None
        guided = await self._constraints.resolve(body, plan, context.caller.tenant)
        token_lists, prompt_text = await tokenize(body, model)
        max_tokens = None if template is None else template.max_completion_tokens
        requests = _preprocessed(body, model, token_lists, guided, max_tokens)
        self._address(context, model, requests)
        requests = await self._with_media(context, body, model, requests)
        progress = context.progress
        progress.request, progress.base_model = requests[0], model.base
        progress.adapter = model.adapter
        prompt_tokens = check_total_tokens(requests)
        check_echo(body, requests)
        _count_prompts(context, body, requests, prompt_tokens, meter)
        return PreparedBody(body, model, plan, requests, prompt_text, prompt_tokens)

    def _address(
        self, context: HttpRequest, model: ServedModel, requests: Sequence[PreprocessedRequest]
    ) -> None:
        """Sets the model, the tracker and the tenant of new requests. Raises Unsupported for an
        option that no engine of the model honours."""
        refused_options = self._models.refused_options(model.name)
        for request in requests:
            request.model = model.name  # not an alias, which workers do not have
            request.tracker = context.tracker
            context.caller.confine(request)
            check_options(request, refused_options)

    async def _with_media(
        self,
        context: HttpRequest,
        body: ChatRequest | CompletionRequest,
        model: ServedModel,
        requests: list[PreprocessedRequest],
    ) -> list[PreprocessedRequest]:
        """Returns the requests with the media of their prompt."""
        if not isinstance(body, ChatRequest) or not (parts := media_parts(body)):
            return requests
        media = await self._media.load(parts, model.card.media, context.caller.tenant)
        block_size = model.hasher.block_size
        return [add_media(request, media, model.card.media, block_size) for request in requests]

    def _plans(
        self,
        context: HttpRequest,
        prepared: PreparedBody,
        conversation: bytes,
        *,
        is_query_only: bool,
    ) -> list[tuple[RequestPlan, PlacementRequest]]:
        """Returns the request to workers of each choice."""
        body, model = prepared.body, prepared.model
        plans: list[tuple[RequestPlan, PlacementRequest]] = []
        for request in prepared.requests:
            hasher = model.hasher_for(request.routing)
            placement = self.make_placement(
                context, model.base, request, body.nvext, hasher, conversation
            )
            if is_query_only:
                placement = replace(placement, is_query_only=True)
            for number in range(body.choices_per_prompt):
                numbered = choice_request(request, number)
                plan = self.make_plan(context, numbered, choice=len(plans))
                if is_query_only:
                    plan = replace(plan, is_query_only=True)
                plans.append((plan, placement))
        return plans


def _conversation(
    context: HttpRequest, request: ChatRequest | CompletionRequest, body: ParsedBody
) -> bytes:
    named = context.request_id if body.continued == "" else body.continued
    return conversation_name(context.headers, request.prompt_cache_key, named)


def _preprocessed(
    body: ChatRequest | CompletionRequest,
    model: ServedModel,
    token_lists: Sequence[Sequence[int]],
    guided: GuidedDecoding | None,
    default_max_tokens: int | None,
) -> list[PreprocessedRequest]:
    """Returns the request of each prompt."""
    return [
        to_preprocessed(
            body,
            token_ids,
            eos_token_ids=model.card.eos_token_ids,
            card_checksum=model.checksum,
            context_length=model.card.context_length or 0,
            default_max_tokens=default_max_tokens or model.card.default_max_tokens,
            vocab_size=model.vocab_size,
            adapter=model.adapter,
            guided=guided,
        )
        for token_ids in token_lists
    ]


def _count_prompts(
    context: HttpRequest,
    body: ChatRequest | CompletionRequest,
    requests: Sequence[PreprocessedRequest],
    prompt_tokens: int,
    meter: RequestMeter | None,
) -> None:
    """Counts the prompts, and reserves their tokens and those of all choices of the tenant's
    quota. Raises Overloaded above it."""
    if meter is not None:
        meter.prompt(prompt_tokens)
    if context.quota is not None:
        outputs = [request.stop_conditions.max_tokens or 0 for request in requests]
        context.quota.reserve(prompt_tokens + sum(outputs) * body.choices_per_prompt)


def _form(prepared: PreparedBody) -> ResponseForm | None:
    reasoning = prepared.model.reasoning_format
    return form_of(
        prepared.requests[0],
        prepared.plan,
        has_stop_tokens=bool(prepared.body.stop_token_ids),
        reasoning_end="" if reasoning is None else reasoning.end,
    )


def _response_info(context: HttpRequest, prepared: PreparedBody) -> ResponseInfo:
    choices = len(prepared.requests) * prepared.body.choices_per_prompt
    return ResponseInfo(
        context.request_id,
        context.client_id.decode("latin-1"),
        prepared.model.name,
        int(time.time()),
        choices=choices,
        prompt_tokens=prepared.prompt_tokens,
        token_counts=[0] * choices if prepared.body.continuous_usage else None,
    )


def _recorded(
    context: HttpRequest,
    prepared: PreparedBody,
    info: ResponseInfo,
    api_format: ApiFormat,
) -> ApiFormat:
    """Returns the same format; the progress receives the whole response."""
    recorder = ChoiceRecorder(info.choices)
    is_chat = isinstance(prepared.body, ChatRequest)
    whole = partial(completion_json, info.request_id, info.model, info.created, is_chat=is_chat)
    context.progress.render_stream = partial(whole, recorder.results)
    return RecordedFormat(api_format, recorder)


def _extension(prepared: PreparedBody, info: ResponseInfo) -> ResponseExtension | None:
    if (nvext := prepared.body.nvext) is None or not (nvext.annotations or nvext.extra_fields):
        return None
    return make_extension(
        prepared.requests[0],
        nvext.extra_fields or (),
        request_id=info.request_id,
        prompt_text=prepared.prompt_text,
        has_token_data=nvext.token_data is not None,
        choices=info.choices,
        block_size=prepared.model.hasher.block_size,
    )

"""Chat completions and completions, whose bodies go to the worker of a pass-through model."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from common.errors import InvalidRequest, MeshError
from common.request.preprocessed import PreprocessedRequest, TokenIds
from frontend_svc.access.permissions import check_permissions
from frontend_svc.endpoints.endpoint import EndpointDependencies, PostEndpoint
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.endpoints.route import Route
from frontend_svc.errors import HEADER_FIELDS
from frontend_svc.generation.api import ParsedBody, off_loop
from frontend_svc.generation.endpoint import GenerationEndpoint
from frontend_svc.generation.pass_through import PassThroughRequest, read_body, with_model
from frontend_svc.generation.streaming import relay_chunks, send_merged_chunks
from frontend_svc.generation.worker_requests import count_outcome, open_requests
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.models.model_watch import Table
from frontend_svc.openai.body.headers import read_headers
from frontend_svc.openai.body.preprocessing import routing_hints
from frontend_svc.openai.output.sse import ChunkKind
from frontend_svc.request.conversation import conversation_name
from frontend_svc.request.types import PassThroughPayload

# A passed-through body takes no rank: workers accept one only next to token ids.
_RANK_HEADERS = ("x-kvmesh-dp-rank", "x-kvmesh-prefill-dp-rank")


class PassThroughEndpoint(PostEndpoint[PassThroughRequest]):
    """Sends bodies to workers unchanged, and their chunks to the client."""

    def __init__(self, route: Route, table: Table, dependencies: EndpointDependencies) -> None:
        """
        - table: the engines that serve the route.
        """
        super().__init__(route, dependencies)
        self._table = table

    def serves(self, model: str) -> bool:
        """Returns whether bodies for the model are passed through."""
        try:
            return self._models.engine(model, self._table).model is None
        except MeshError:  # generation reports the error
            return False

    async def parse(self, context: HttpRequest, raw: bytes) -> PassThroughRequest:
        return self.accept(context, await off_loop(len(raw), read_body, raw))

    def accept(self, context: HttpRequest, body: PassThroughRequest) -> PassThroughRequest:
        """Returns a body with the hints of its headers. Raises MeshError if they are invalid or
        need another key."""
        context.progress.body = body = replace(body, nvext=read_headers(context.header_pairs))
        check_permissions(context.caller, body.nvext)
        return body

    async def serve(
        self, context: HttpRequest, body: PassThroughRequest, meter: RequestMeter
    ) -> None:
        _reject_rank_headers(body)
        is_chat = self._table == "chat"
        payload = PassThroughPayload(body.json, is_chat)
        routing = routing_hints(body.nvext)
        empty_request = PreprocessedRequest(model=body.model, token_ids=TokenIds(), routing=routing)
        context.caller.confine(empty_request)
        plan = replace(self.make_plan(context, empty_request), body=payload)
        # The frontend has no token count, so the router balances these requests by number.
        placement = self.make_placement(
            context,
            body.model,
            empty_request,
            body.nvext,
            conversation=conversation_name(context.headers, body.cache_key),
        )
        plans = [(plan, placement)]
        with open_requests(self._dependencies, context, plans, meter) as ((_, buffer),):
            if body.is_stream:
                await relay_chunks(context, buffer, self._config.keep_alive_s)
            else:
                kind = ChunkKind.CHAT if is_chat else ChunkKind.COMPLETION
                await send_merged_chunks(context, buffer, kind)
        count_outcome(self._dependencies, context, meter)


class CompletionEndpoint(PostEndpoint[ParsedBody | PassThroughRequest]):
    """Chat completions or completions: generation, or pass-through for models without a card."""

    def __init__(
        self,
        generation: GenerationEndpoint,
        pass_through: PassThroughEndpoint,
        dependencies: EndpointDependencies,
    ) -> None:
        super().__init__(generation.route, dependencies)
        self._generation = generation
        self._pass_through = pass_through

    async def parse(self, context: HttpRequest, raw: bytes) -> ParsedBody | PassThroughRequest:
        if self._models.pass_through:
            body = await off_loop(len(raw), read_body, raw)
            if body.model in self._models.weighted_aliases:
                return await self._parse_alias(context, raw, body)
            if self._pass_through.serves(body.model):
                return self._pass_through.accept(context, body)
        return await self._generation.parse(context, raw)

    async def _parse_alias(
        self, context: HttpRequest, raw: bytes, body: PassThroughRequest
    ) -> ParsedBody | PassThroughRequest:
        """Reads a body that names a configured alias, while there are pass-through models."""
        name = conversation_name(context.headers, body.cache_key)
        chosen = self.served_model(context, body.model, name)
        if self._pass_through.serves(chosen):
            return self._pass_through.accept(context, with_model(body, chosen))
        return await self._generation.parse(context, with_model(body, chosen).json)

    # Any: a coroutine sends and yields nothing of ours. One frame less for each wake-up.
    def serve(
        self, context: HttpRequest, body: ParsedBody | PassThroughRequest, meter: RequestMeter
    ) -> Coroutine[Any, Any, None]:
        if isinstance(body, PassThroughRequest):
            return self._pass_through.serve(context, body, meter)
        return self._generation.serve(context, body, meter)


def _reject_rank_headers(body: PassThroughRequest) -> None:
    for header in _RANK_HEADERS:
        (field,) = HEADER_FIELDS[header]
        if body.nvext is not None and getattr(body.nvext, field) is not None:
            message = f"requests for {body.model!r} are passed through and take no rank"
            raise InvalidRequest(f"Invalid header '{header}': {message}.", header)

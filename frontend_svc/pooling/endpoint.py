"""The endpoint of a pooling API: tokenizes prompts, runs them on workers, writes the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from common.errors import RequestCancelled, Unavailable
from common.request.preprocessed import PreprocessedRequest, TokenIds
from frontend_svc.access.permissions import check_permissions
from frontend_svc.edge.asgi import JSON_HEADER, send_response_parts
from frontend_svc.endpoints.endpoint import EndpointDependencies, PostEndpoint
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.endpoints.route import Route
from frontend_svc.generation.api import off_loop
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.models.model_watch import Table
from frontend_svc.models.served_model import ServedModel
from frontend_svc.openai.body.headers import read_headers
from frontend_svc.openai.body.nvext import Nvext
from frontend_svc.openai.body.preprocessing import routing_hints
from frontend_svc.pooling.batch import PoolingBatch
from frontend_svc.pooling.request import PoolingRequest
from frontend_svc.request.conversation import conversation_name
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.types import Pooling, RequestPlan

R = TypeVar("R", bound=PoolingRequest)


class PoolingResponse(Protocol):
    """The results of one request."""

    def take(self, index: int, chunk: bytes) -> None:
        """Takes the result of a prompt. Raises WorkerLost if the chunk has none."""
        ...

    def parts(self, tokens: int) -> list[bytes]:
        """Returns the parts of the body of the response. tokens: of all prompts."""
        ...


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What responses name: an id of the request, the model, and Unix seconds."""

    request_id: str
    model: str
    created: int


class PoolingApi(Protocol[R]):
    """One API with results for prompts. pooling: what workers compute; table: the models that
    serve it."""

    @property
    def table(self) -> Table: ...
    @property
    def pooling(self) -> Pooling: ...

    def parse(self, raw: bytes) -> R:
        """Returns a validated body. Raises InvalidRequest and Unsupported."""
        ...

    async def tokenize(self, request: R, model: ServedModel) -> list[TokenIds]:
        """Returns the prompts. Raises InvalidRequest, Unsupported and PromptTooLong."""
        ...

    def response(self, request: R, count: int, head: ResponseHead) -> PoolingResponse:
        """Returns the response that takes the results. count: of the prompts."""
        ...


@dataclass(frozen=True, slots=True)
class PoolingBody(Generic[R]):
    """A body, and the hints in its headers."""

    request: R
    hints: Nvext | None


class PoolingEndpoint(PostEndpoint[PoolingBody[R]]):
    """The ASGI application of one API."""

    def __init__(
        self, route: Route, api: PoolingApi[R], dependencies: EndpointDependencies
    ) -> None:
        super().__init__(route, dependencies)
        self._api = api

    async def parse(self, context: HttpRequest, raw: bytes) -> PoolingBody[R]:
        context.progress.body = request = await off_loop(len(raw), self._api.parse, raw)
        if request.model in self._models.weighted_aliases:
            name = conversation_name(context.headers, None)
            model = self.served_model(context, request.model, name)
            context.progress.body = request = request.model_copy(update={"model": model})
        hints = read_headers(context.header_pairs)
        check_permissions(context.caller, hints)
        return PoolingBody(request, hints)

    async def serve(self, context: HttpRequest, body: PoolingBody[R], meter: RequestMeter) -> None:
        request, api = body.request, self._api
        try:
            model = self._models.get_for(request.model, api.table)
        except Unavailable as error:
            model = await self.await_model(context, request.model, api.table, error)
        prompts = await api.tokenize(request, model)
        total_tokens = sum(map(len, prompts))
        meter.prompt(total_tokens)
        if context.quota is not None:
            context.quota.reserve(total_tokens)
        context.progress.base_model, context.progress.adapter = model.base, model.adapter
        head = ResponseHead(context.request_id, model.name, int(context.started_at_s))
        response = api.response(request, len(prompts), head)
        batch = PoolingBatch(
            self._gateway, self._plans(context, body, model, prompts), response.take
        )
        context.progress.responses = batch.responses

        def client_gone() -> None:
            meter.mark_disconnected()
            batch.fail(RequestCancelled("the client disconnected"))

        with context.connection.watched(client_gone):
            await batch.run()
        progress = context.progress
        progress.status, progress.is_response_complete = 200, True
        headers = (JSON_HEADER, *context.own_headers)
        await send_response_parts(context.send, 200, headers, response.parts(total_tokens))
        meter.mark_ok()

    def _plans(
        self,
        context: HttpRequest,
        body: PoolingBody[R],
        model: ServedModel,
        prompts: list[TokenIds],
    ) -> Iterator[tuple[RequestPlan, PlacementRequest]]:
        """Yields the plan and the placement request of each prompt. Queries have no prefix
        hashes: engines bypass their caches for these prompts."""
        # Not the name in the body, which may be an alias.
        request = PreprocessedRequest(
            model=model.name,
            token_ids=TokenIds(),
            card_checksum=model.checksum,
            routing=routing_hints(body.hints, adapter=model.adapter),
        )
        context.caller.confine(request)
        placement = self.make_placement(context, model.base, request, body.hints)
        plan = replace(self.make_plan(context, request), pooling=self._api.pooling)
        for index, token_ids in enumerate(prompts):
            prompt_request = replace(request, token_ids=token_ids)
            yield (
                replace(plan, request_id=f"{context.request_id}-{index}", request=prompt_request),
                replace(placement, query=replace(placement.query, total_tokens=len(token_ids))),
            )

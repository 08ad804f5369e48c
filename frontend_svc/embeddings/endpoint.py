"""`/v1/embeddings`: tokenizes the inputs, runs them on workers, writes the vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.errors import RequestCancelled, Unavailable
from common.request.embedding import Vector, check_dimensions, shorten
from common.request.preprocessed import PreprocessedRequest, TokenIds
from frontend_svc.access.permissions import check_permissions
from frontend_svc.edge.asgi import JSON_HEADER, send_response_parts
from frontend_svc.embeddings.batch import EmbeddingBatch
from frontend_svc.embeddings.body import (
    EmbeddingRequest,
    check_lengths,
    check_vocabulary,
    embedding_entry,
    embedding_list,
    parse_embedding,
)
from frontend_svc.endpoints.endpoint import PostEndpoint
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.generation.api import off_loop
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.models.served_model import ServedModel
from frontend_svc.openai.body.headers import read_headers
from frontend_svc.openai.body.nvext import Nvext
from frontend_svc.openai.body.preprocessing import routing_hints
from frontend_svc.request.conversation import conversation_name
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.types import RequestPlan


@dataclass(frozen=True, slots=True)
class EmbeddingBody:
    """A body, and the hints in its headers."""

    request: EmbeddingRequest
    hints: Nvext | None


class EmbeddingEndpoint(PostEndpoint[EmbeddingBody]):
    """The ASGI application of `/v1/embeddings`."""

    async def parse(self, context: HttpRequest, raw: bytes) -> EmbeddingBody:
        context.progress.body = request = await off_loop(len(raw), parse_embedding, raw)
        if request.model in self._models.weighted_aliases:
            name = conversation_name(context.headers, None)
            model = self.served_model(context, request.model, name)
            context.progress.body = request = request.model_copy(update={"model": model})
        hints = read_headers(context.header_pairs)
        check_permissions(context.caller, hints)
        return EmbeddingBody(request, hints)

    async def serve(self, context: HttpRequest, body: EmbeddingBody, meter: RequestMeter) -> None:
        request = body.request
        try:
            model = self._models.get_for(request.model, "embeddings")
        except Unavailable as error:
            model = await self.await_model(context, request.model, "embeddings", error)
        card, dimensions = model.card, request.dimensions
        check_dimensions(dimensions, card.embedding_size, can_shorten=card.shorter_embeddings)
        inputs = await _tokenize(request, model)
        total_tokens = sum(map(len, inputs))
        meter.prompt(total_tokens)
        if context.quota is not None:
            context.quota.reserve(total_tokens)
        context.progress.base_model, context.progress.adapter = model.base, model.adapter
        entries = [b""] * len(inputs)

        def on_vector(index: int, vector: Vector) -> None:
            short = shorten(vector, dimensions)
            entries[index] = embedding_entry(index, short, request.encoding_format)

        plans = self._plans(context, body, model, inputs)
        batch = EmbeddingBatch(self._gateway, plans, on_vector)
        context.progress.responses = batch.responses

        def client_gone() -> None:
            meter.mark_disconnected()
            batch.fail(RequestCancelled("the client disconnected"))

        with context.connection.watched(client_gone):
            await batch.run()
        progress = context.progress
        progress.status, progress.is_response_complete = 200, True
        parts = embedding_list(entries, model.name, total_tokens)
        await send_response_parts(context.send, 200, (JSON_HEADER, *context.own_headers), parts)
        meter.mark_ok()

    def _plans(
        self,
        context: HttpRequest,
        body: EmbeddingBody,
        model: ServedModel,
        inputs: list[TokenIds],
    ) -> Iterator[tuple[RequestPlan, PlacementRequest]]:
        """Yields the plan and the placement request of each input. Queries have no prefix
        hashes: engines bypass their caches for embeddings."""
        # Not the name in the body, which may be an alias.
        request = PreprocessedRequest(
            model=model.name,
            token_ids=TokenIds(),
            card_checksum=model.checksum,
            routing=routing_hints(body.hints, adapter=model.adapter),
        )
        context.caller.confine(request)
        placement = self.make_placement(context, model.base, request, body.hints)
        plan = replace(self.make_plan(context, request), is_embedding=True)
        for index, token_ids in enumerate(inputs):
            input_request = replace(request, token_ids=token_ids)
            yield (
                replace(plan, request_id=f"{context.request_id}-{index}", request=input_request),
                replace(placement, query=replace(placement.query, total_tokens=len(token_ids))),
            )


async def _tokenize(request: EmbeddingRequest, model: ServedModel) -> list[TokenIds]:
    """Returns the token ids of the inputs. Raises InvalidRequest and PromptTooLong."""
    context_length = model.card.context_length or 0
    texts = request.texts
    if texts is not None:
        check_lengths(request, list(map(model.token_count_min, texts)), context_length)
        inputs = list(map(TokenIds.of, await model.encode_batch(texts)))
    else:
        inputs = list(map(TokenIds.of, request.token_lists))
        check_vocabulary(request, inputs, model.vocab_size)
    check_lengths(request, list(map(len, inputs)), context_length)
    return inputs

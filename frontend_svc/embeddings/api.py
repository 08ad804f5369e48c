"""`/v1/embeddings`: the prompts of a body, and the response with their vectors."""

from __future__ import annotations

from common.request.embedding import check_dimensions, load_vector, shorten
from common.request.preprocessed import TokenIds
from frontend_svc.embeddings.body import (
    EmbeddingRequest,
    check_vocabulary,
    embedding_entry,
    embedding_list,
    parse_embedding,
)
from frontend_svc.models.model_watch import Table
from frontend_svc.models.served_model import ServedModel
from frontend_svc.pooling.endpoint import ResponseHead
from frontend_svc.pooling.request import check_lengths
from frontend_svc.request.types import Pooling


class EmbeddingApi:
    """The embeddings API."""

    table: Table = "embeddings"
    pooling: Pooling = "embedding"

    def parse(self, raw: bytes) -> EmbeddingRequest:
        return parse_embedding(raw)

    async def tokenize(self, request: EmbeddingRequest, model: ServedModel) -> list[TokenIds]:
        card, texts = model.card, request.texts
        check_dimensions(
            request.dimensions, card.embedding_size, can_shorten=card.shorter_embeddings
        )
        context_length = card.context_length or 0
        if texts is not None:
            check_lengths(request, list(map(model.token_count_min, texts)), context_length)
            inputs = list(map(TokenIds.of, await model.encode_batch(texts)))
        else:
            inputs = list(map(TokenIds.of, request.token_lists))
            check_vocabulary(request, inputs, model.vocab_size)
        check_lengths(request, list(map(len, inputs)), context_length)
        return inputs

    def response(
        self, request: EmbeddingRequest, count: int, head: ResponseHead
    ) -> EmbeddingResponse:
        return EmbeddingResponse(request, count, head)


class EmbeddingResponse:
    """The vectors of one request."""

    def __init__(self, request: EmbeddingRequest, count: int, head: ResponseHead) -> None:
        self._request = request
        self._head = head
        self._entries = [b""] * count

    def take(self, index: int, chunk: bytes) -> None:
        vector = shorten(load_vector(chunk), self._request.dimensions)
        self._entries[index] = embedding_entry(index, vector, self._request.encoding_format)

    def parts(self, tokens: int) -> list[bytes]:
        return embedding_list(self._entries, self._head.model, tokens)

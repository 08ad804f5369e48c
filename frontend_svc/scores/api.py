"""`/v1/rerank` and `/v1/score`: the prompts of a body, and the responses with their scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from common.request.preprocessed import TokenIds
from common.request.score import load_score
from frontend_svc.models.model_watch import Table
from frontend_svc.models.served_model import ServedModel
from frontend_svc.pooling.endpoint import ResponseHead
from frontend_svc.pooling.request import check_lengths
from frontend_svc.request.types import Pooling
from frontend_svc.scores.body import (
    PairRequest,
    RerankRequest,
    ScoreRequest,
    parse_rerank,
    parse_score,
    rerank_object,
    score_object,
)

R = TypeVar("R", bound=PairRequest)
# Takes a request, the scores of its pairs, the head of the response and the tokens of all pairs;
# returns the body of the response.
WriteScores = Callable[[R, list[float], ResponseHead, int], bytes]


class ScoreApi(Generic[R]):
    """An API with scores of pairs of texts."""

    table: Table = "scores"
    pooling: Pooling = "score"

    def __init__(self, parse: Callable[[bytes], R], write: WriteScores[R]) -> None:
        self._parse = parse
        self._write = write

    def parse(self, raw: bytes) -> R:
        return self._parse(raw)

    async def tokenize(self, request: R, model: ServedModel) -> list[TokenIds]:
        pairs, limit = request.pairs, request.second_tokens_max
        context_length = model.card.context_length or 0
        if limit is None:
            counts = [model.token_count_min(*pair) for pair in pairs]
            check_lengths(request, counts, context_length)
        token_lists = await model.encode_pairs(pairs, limit)
        check_lengths(request, list(map(len, token_lists)), context_length)
        return list(map(TokenIds.of, token_lists))

    def response(self, request: R, count: int, head: ResponseHead) -> ScoreResponse:
        return ScoreResponse(
            count, lambda scores, tokens: self._write(request, scores, head, tokens)
        )


class ScoreResponse:
    """The scores of one request. write: takes them and the tokens of all pairs."""

    def __init__(self, count: int, write: Callable[[list[float], int], bytes]) -> None:
        self._scores = [0.0] * count
        self._write = write

    def take(self, index: int, chunk: bytes) -> None:
        self._scores[index] = load_score(chunk)

    def parts(self, tokens: int) -> list[bytes]:
        return [self._write(self._scores, tokens)]


def _write_rerank(
    request: RerankRequest, scores: list[float], head: ResponseHead, tokens: int
) -> bytes:
    return rerank_object(request, scores, f"rerank-{head.request_id}", head.model, tokens)


def _write_score(_: ScoreRequest, scores: list[float], head: ResponseHead, tokens: int) -> bytes:
    return score_object(scores, f"score-{head.request_id}", head.model, head.created, tokens)


RERANK = ScoreApi(parse_rerank, _write_rerank)
SCORE = ScoreApi(parse_score, _write_score)

"""Bodies of /v1/rerank and /v1/score: what is accepted and refused; their responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequest, Unsupported, WorkerLost
from common.request.score import dump_score, load_score
from frontend_svc.pooling.request import PROMPTS_MAX
from frontend_svc.scores.body import (
    CHARS_MAX,
    RerankRequest,
    ScoreRequest,
    parse_rerank,
    parse_score,
    rerank_object,
    score_object,
)


# Any, here and below: JSON.
def rerank(**fields: Any) -> RerankRequest:
    body = {"model": "m", "query": "q", "documents": ["a", {"text": "b"}], **fields}
    return parse_rerank(json.dumps(body).encode())


def score(first: Any, second: Any, **fields: Any) -> ScoreRequest:
    body = {"model": "m", "text_1": first, "text_2": second, **fields}
    return parse_score(json.dumps(body).encode())


def test_a_query_is_paired_with_each_document() -> None:
    request = rerank()
    assert list(request.pairs) == [("q", "a"), ("q", "b")]
    assert [request.prompt_name(index) for index in range(2)] == ["documents[0]", "documents[1]"]
    assert request.second_tokens_max is None
    assert rerank(max_tokens_per_doc=3).second_tokens_max == 3


def test_texts_are_paired_one_with_many_or_by_position() -> None:
    assert list(score("q", "a").pairs) == [("q", "a")]
    for one in ("q", ["q"]):
        assert list(score(one, ["a", "b"]).pairs) == [("q", "a"), ("q", "b")]
    assert list(score(["q", "r"], ["a", "b"]).pairs) == [("q", "a"), ("r", "b")]
    assert [score("q", "a").prompt_name(0), score("q", ["a"]).prompt_name(0)] == [
        "text_2",
        "text_2[0]",
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": ["q"]}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": ["a", 1]}, "documents[1]"),
        ({"documents": [{"text": ""}]}, "documents[0].text"),
        ({"documents": [{"image": "a"}]}, "documents[0].text"),
        ({"documents": [{"text": "a", "image": "a"}]}, "documents[0].image"),
        ({"documents": ["a"] * (PROMPTS_MAX + 1)}, "documents"),
        ({"documents": ["a" * (CHARS_MAX // 2)] * 3}, "documents"),
        ({"query": "a" * (CHARS_MAX // 2), "documents": ["a"] * 3}, "documents"),
        ({"top_n": -1}, "top_n"),
        ({"return_documents": 1}, "return_documents"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"max_chunks_per_doc": 2}, "max_chunks_per_doc"),
        ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
        ({"model": ""}, "model"),
        ({"stream": True}, "stream"),
    ],
)
def test_an_invalid_body_of_rerank_is_refused_by_its_path(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rerank(**fields)
    assert refused.value.field == param


@pytest.mark.parametrize(
    ("first", "second", "param"),
    [
        ("", "a", "text_1"),
        ("a", "", "text_2"),
        ([], "a", "text_1"),
        ("a", ["b", ""], "text_2[1]"),
        (1, "a", "text_1"),
        ({"text": "a"}, "a", "text_1"),
        (["a", "b"], "c", "text_2"),
        (["a", "b"], ["c", "d", "e"], "text_2"),
        ("a", ["b"] * (PROMPTS_MAX + 1), "text_2"),
        ("a" * (CHARS_MAX // 2), ["b"] * 3, "text_2"),
    ],
)
def test_invalid_texts_are_refused_by_their_path(first: Any, second: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        score(first, second)
    assert refused.value.field == param


def test_what_no_response_follows_is_refused_as_unsupported() -> None:
    with pytest.raises(Unsupported, match="max_tokens_per_doc"):
        score("a", "b", truncate_prompt_tokens=8)
    assert rerank(max_chunks_per_doc=1, user="me").query == "q"


def test_the_best_documents_come_first_and_equal_ones_in_order() -> None:
    request = rerank(documents=["a", "b", "c", "d"], top_n=3)
    body = json.loads(rerank_object(request, [0.1, 0.9, 0.5, 0.9], "rerank-1", "m", 7))
    assert body == {
        "id": "rerank-1",
        "model": "m",
        "results": [
            {"index": 1, "relevance_score": 0.9, "document": {"text": "b"}},
            {"index": 3, "relevance_score": 0.9, "document": {"text": "d"}},
            {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
        ],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    for top_n in (None, 0, 9):
        request = rerank(top_n=top_n, return_documents=False)
        body = json.loads(rerank_object(request, [-1.5, 2.0], "rerank-1", "m", 7))
        assert body["results"] == [
            {"index": 1, "relevance_score": 2.0},
            {"index": 0, "relevance_score": -1.5},
        ]


def test_scores_are_in_the_order_of_the_pairs() -> None:
    body = json.loads(score_object([0.25, -3.0], "score-1", "m", 5, 9))
    assert body == {
        "id": "score-1",
        "object": "list",
        "created": 5,
        "model": "m",
        "data": [
            {"index": 0, "object": "score", "score": 0.25},
            {"index": 1, "object": "score", "score": -3.0},
        ],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }


@pytest.mark.parametrize("value", [0.0, -1.5, 1 / 3, 2**-60])
def test_a_score_is_exact_on_the_wire(value: float) -> None:
    assert load_score(dump_score(value)) == value


@pytest.mark.parametrize(
    "chunk", [b"", b"{}", b"[]", b'{"score":null}', b'{"score":"1"}', b'{"score":true}']
)
def test_a_chunk_without_a_score_is_an_error_of_the_worker(chunk: bytes) -> None:
    with pytest.raises(WorkerLost) as error:
        load_score(chunk)
    assert not error.value.retryable

"""Bodies of /v1/embeddings: what is accepted, what is refused and by which name; their response."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest, PromptTooLong, Unsupported, WorkerLost
from common.request.embedding import Vector, check_dimensions, dump_vector, load_vector, shorten
from common.request.preprocessed import TokenIds
from frontend_svc.embeddings.body import (
    EmbeddingRequest,
    check_vocabulary,
    embedding_entry,
    embedding_list,
    parse_embedding,
)
from frontend_svc.pooling.request import PROMPTS_MAX, TOKENS_MAX, check_lengths


# Any: JSON.
def parse(value: Any, **fields: Any) -> EmbeddingRequest:
    return parse_embedding(json.dumps({"model": "m", "input": value, **fields}).encode())


def refused(value: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse(value, **fields)
    return error.value


def test_an_input_is_a_text_or_token_ids_or_a_list_of_either() -> None:
    assert parse("a").texts == ["a"]
    assert parse(["a", "b"]).texts == ["a", "b"]
    assert (parse([1, 2]).texts, parse([1, 2]).token_lists) == (None, [[1, 2]])
    assert (parse([[1], [2]]).texts, parse([[1], [2]]).token_lists) == (None, [[1], [2]])
    assert [parse("a").prompt_name(0), parse([1]).prompt_name(0)] == ["input", "input"]
    assert [parse(["a"]).prompt_name(0), parse([[1], [2]]).prompt_name(1)] == [
        "input[0]",
        "input[1]",
    ]


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("", "input"),
        ([], "input"),
        (["a", ""], "input[1]"),
        ([[]], "input[0]"),
        ([[1], []], "input[1]"),
        (None, "input"),
        ({}, "input"),
        (1, "input"),
        ([1, "a"], "input[1]"),
        (["a", 1], "input[1]"),
        ([[1], "a"], "input[1]"),
        ([[1, -1]], "input[0][1]"),
        ([2**32], "input[0]"),
        ([True], "input[0]"),
        ([1.5], "input[0]"),
        (["a"] * (PROMPTS_MAX + 1), "input"),
        ([[1]] * (PROMPTS_MAX + 1), "input"),
    ],
)
def test_an_invalid_input_is_refused_by_its_path(value: Any, param: str) -> None:
    assert refused(value).field == param


def test_as_many_inputs_as_documented_are_accepted() -> None:
    assert len(parse(["a"] * PROMPTS_MAX).texts or ()) == PROMPTS_MAX == 2048


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 1.5}, "dimensions"),
        ({"model": ""}, "model"),
        ({"truncate": True}, "truncate"),
    ],
)
def test_other_invalid_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused("a", **fields).field == param


def test_an_input_must_leave_one_position_of_the_context() -> None:
    check_lengths(parse([[1], [2]]), [7, 7], 8)
    check_lengths(parse("a"), [10**5], 0)
    with pytest.raises(PromptTooLong, match="at most 7 tokens, but got 8") as too_long:
        check_lengths(parse([[1], [2]]), [7, 8], 8)
    assert too_long.value.field == "input[1]"


def test_all_inputs_together_have_a_limit_of_their_own() -> None:
    check_lengths(parse(["a", "b"]), [TOKENS_MAX - 1, 1], 0)
    with pytest.raises(InvalidRequest, match=f"{TOKENS_MAX} tokens in all inputs") as too_many:
        check_lengths(parse(["a", "b"]), [TOKENS_MAX, 1], 0)
    assert (too_many.value.field, too_many.value.reason) == ("input", "TOO_MANY_TOKENS")


def test_unknown_token_ids_are_refused() -> None:
    body = parse([[1, 9], [10]])
    with pytest.raises(InvalidRequest, match="token 10 is not in the vocabulary of 10") as unknown:
        check_vocabulary(body, [TokenIds.of([1, 9]), TokenIds.of([10])], 10)
    assert unknown.value.field == "input[1]"


def array(values: list[float]) -> Vector:
    return np.array(values, dtype=np.float32)


vectors = st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40).map(array)


@given(vectors)
def test_a_vector_is_exact_in_both_encodings_and_on_the_wire(vector: Any) -> None:
    assert load_vector(dump_vector(vector)).tobytes() == vector.astype("<f4").tobytes()
    numbers = json.loads(embedding_entry(3, vector, None))
    assert (numbers["index"], numbers["object"]) == (3, "embedding")
    assert np.array_equal(array(numbers["embedding"]), vector)
    text = json.loads(embedding_entry(0, vector, "base64"))["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(text), "<f4"), vector)


@given(vectors, st.integers(1, 50))
def test_a_shorter_vector_has_length_one(vector: Any, dimensions: int) -> None:
    short = shorten(vector, dimensions)
    assert len(short) == min(len(vector), dimensions)
    if len(short) < len(vector) and np.linalg.norm(vector[:dimensions].astype(float)) > 1e-30:
        assert np.linalg.norm(short) == pytest.approx(1, abs=1e-5)
    assert shorten(vector, None) is vector


def test_only_vectors_that_stay_valid_are_shortened() -> None:
    check_dimensions(None, 8, can_shorten=False)
    check_dimensions(8, 8, can_shorten=False)
    check_dimensions(3, 8, can_shorten=True)
    with pytest.raises(Unsupported, match="cannot be shortened; they have 8 coordinates"):
        check_dimensions(3, 8, can_shorten=False)
    with pytest.raises(InvalidRequest, match="1 to 8, but got 9") as too_many:
        check_dimensions(9, 8, can_shorten=True)
    assert too_many.value.field == "dimensions"


@pytest.mark.parametrize(
    "chunk", [b"", b"{}", b"[]", b'{"embedding":"%"}', b'{"embedding":"AAA="}']
)
def test_an_invalid_chunk_is_an_error_of_the_worker(chunk: bytes) -> None:
    with pytest.raises(WorkerLost):
        load_vector(chunk)


def test_the_response_lists_all_entries_and_the_usage() -> None:
    entries = [embedding_entry(index, array([1, 0]), None) for index in range(2)]
    assert json.loads(b"".join(embedding_list(entries, "m", 7))) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": [1.0, 0.0]} for index in range(2)
        ],
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }

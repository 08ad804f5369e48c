"""Pass-through bodies: fields that are read, and chunks merged into one response."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest, WorkerLost
from common.request.preprocessed import usage
from frontend_svc.generation.pass_through import merge_chunks, read_body, without_hits
from frontend_svc.openai.output.sse import ChunkKind

# Any: JSON.
Json = Any


def chat(delta: Json, finish: str | None = None, index: int = 0, **more: Json) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    merged = {"id": "c-1", "object": "chat.completion.chunk", "created": 5, "model": "m"}
    return json.dumps({**merged, "choices": [choice], **more}).encode()


def test_only_model_and_stream_of_a_body_are_read() -> None:
    raw = b'{"model": "talk", "stream": true, "made_up": [1]}'
    body = read_body(raw)
    assert (body.model, body.is_stream, body.json) == ("talk", True, raw)
    assert not read_body(b'{"model": "talk"}').is_stream
    assert not read_body(b'{"model": "talk", "stream": null}').is_stream


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"{", None),
        (b"[]", None),
        (b"{}", "model"),
        (b'{"model": 3}', "model"),
        (b'{"model": ""}', "model"),
        (b'{"model": "m", "stream": 1}', "stream"),
    ],
)
def test_a_body_without_a_valid_model_or_stream_is_refused_by_field(
    raw: bytes, field: str | None
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_body(raw)
    assert refused.value.field == field


def test_chat_chunks_merge_into_a_chat_completion() -> None:
    chunks = [
        chat({"role": "assistant", "content": ""}),
        chat({"content": "Hel"}),
        chat({"content": "lo"}),
        chat({}, "stop"),
    ]
    assert json.loads(merge_chunks(ChunkKind.CHAT, chunks, usage(3, 2))) == {
        "id": "c-1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_counts_in_the_chunks_win_over_those_of_the_engine() -> None:
    counts = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    merged = json.loads(merge_chunks(ChunkKind.CHAT, [chat({}, "stop", usage=counts)], usage(9, 9)))
    assert merged["usage"] == counts


def test_choices_are_merged_separately_and_sorted() -> None:
    chunks = [
        chat({"content": "b"}, index=1),
        chat({"content": "a"}),
        chat({"content": "B"}, index=1),
    ]
    merged = json.loads(merge_chunks(ChunkKind.CHAT, chunks, None))
    assert [c["message"]["content"] for c in merged["choices"]] == ["a", "bB"]
    assert "usage" not in merged


def test_tool_calls_are_merged_by_index() -> None:
    def call(index: int, **more: Json) -> Json:
        return {"tool_calls": [{"index": index, **more}]}

    first = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": ""}}
    chunks = [
        chat(call(0, **first)),
        chat(call(0, function={"arguments": '{"a"'})),
        chat(call(1, id="t2", type="function", function={"name": "g", "arguments": "{}"})),
        chat(call(0, function={"arguments": ":1}"})),
        chat({}, "tool_calls"),
    ]
    (choice,) = json.loads(merge_chunks(ChunkKind.CHAT, chunks, None))["choices"]
    calls = choice["message"]["tool_calls"]
    assert [c["function"] for c in calls] == [
        {"name": "f", "arguments": '{"a":1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert [c["id"] for c in calls] == ["t1", "t2"]


def test_logprobs_are_appended() -> None:
    def logprobs(token: str) -> Json:
        choice = {"index": 0, "text": token, "logprobs": {"content": [{"token": token}]}}
        return json.dumps({"object": "text_completion", "choices": [choice]}).encode()

    merged = json.loads(merge_chunks(ChunkKind.COMPLETION, [logprobs("a"), logprobs("b")], None))
    (choice,) = merged["choices"]
    assert merged["object"] == "text_completion"
    assert choice["text"] == "ab"
    assert choice["logprobs"]["content"] == [{"token": "a"}, {"token": "b"}]


@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b'{"choices": [{}]}', b'{"choices": [3]}', b'{"choices": 3}', b"3"]
)
def test_an_invalid_chunk_is_an_error_of_the_worker(raw: bytes) -> None:
    with pytest.raises(WorkerLost) as failed:
        merge_chunks(ChunkKind.CHAT, [raw], None)
    assert failed.value.reason == "BAD_CHUNK"


@given(st.text(), st.lists(st.integers(0, 20), max_size=8))
def test_a_text_split_anywhere_is_merged_completely(text: str, cuts: list[int]) -> None:
    at, pieces = 0, []
    for cut in cuts:
        pieces.append(text[at : at + cut])
        at += cut
    pieces.append(text[at:])
    chunks = [chat({"role": "assistant"}), *(chat({"content": piece}) for piece in pieces)]
    merged = json.loads(merge_chunks(ChunkKind.CHAT, chunks, None))
    assert merged["choices"][0]["message"]["content"] == text


def test_cache_hits_are_removed_and_other_chunks_are_unchanged() -> None:
    counts = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
    with_hits = chat({}, usage={**counts, "prompt_tokens_details": {"cached_tokens": 8}})
    assert json.loads(without_hits(with_hits))["usage"] == counts
    for chunk in (
        chat({"content": "prompt_tokens_details"}),
        chat({"content": "prompt_tokens_details"}, usage=None),
        b"prompt_tokens_details",
        b'["prompt_tokens_details"]',
    ):
        assert without_hits(chunk) == chunk

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from common.errors import Overloaded
from common.request.preprocessed import CompletionUsage, PromptTokensDetails
from frontend_svc.openai.output.sse import DONE, KEEP_ALIVE, ChunkKind, ChunkWriter
from frontend_svc.text.api_format import OpenAIFinishReason

CREATED = 1_700_000_000
USAGE = CompletionUsage(7, 3, 10, PromptTokensDetails(cached_tokens=4))
TEXTS = st.text()
KINDS = st.sampled_from(ChunkKind)


def writer(
    kind: ChunkKind = ChunkKind.CHAT, *, include_usage: bool = False, model: str = "m"
) -> ChunkWriter:
    return ChunkWriter(kind, "id-1", model, CREATED, include_usage=include_usage)


def data(event: bytes) -> Any:
    """The JSON of one event, which must be a single line."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    line = event[len(b"data: ") : -2]
    assert not set(b"\r\n") & set(line)
    return json.loads(line)


def text_of(kind: ChunkKind, chunk: Any) -> str:
    choice = chunk["choices"][0]
    text = choice["delta"]["content"] if kind is ChunkKind.CHAT else choice["text"]
    assert isinstance(text, str)
    return text


@settings(max_examples=200, deadline=None)
@given(KINDS, TEXTS, st.booleans())
def test_every_text_is_one_line_of_valid_json(
    kind: ChunkKind, text: str, include_usage: bool
) -> None:
    chunk = data(writer(kind, include_usage=include_usage).content(text))
    assert text_of(kind, chunk) == text
    assert chunk["id"] == "id-1"
    assert chunk["object"] == kind.value
    assert (chunk["created"], chunk["model"]) == (CREATED, "m")
    assert chunk["choices"][0]["finish_reason"] is None


@settings(max_examples=100, deadline=None)
@given(KINDS, TEXTS, TEXTS, TEXTS)
def test_no_id_or_model_name_corrupts_a_chunk(
    kind: ChunkKind, response_id: str, model: str, text: str
) -> None:
    chunk = data(ChunkWriter(kind, response_id, model, CREATED).content(text))
    assert (chunk["id"], chunk["model"], text_of(kind, chunk)) == (response_id, model, text)


@settings(max_examples=100, deadline=None)
@given(KINDS, st.lists(TEXTS, max_size=8), st.sampled_from(["stop", "length"]), st.booleans())
def test_a_stream_has_one_finish_reason_and_its_chunks_join_to_the_text(
    kind: ChunkKind, texts: list[str], reason: OpenAIFinishReason, include_usage: bool
) -> None:
    made = writer(kind, include_usage=include_usage)
    events = [made.role()] if kind is ChunkKind.CHAT else []
    events += [made.content(text) for text in texts]
    events += [made.finish(reason), made.usage(USAGE)]
    chunks = [data(event) for event in events if event]
    with_choices = [chunk for chunk in chunks if chunk["choices"]]
    error_text = [chunk["choices"][0]["finish_reason"] for chunk in with_choices]
    assert [word for word in error_text if word is not None] == [reason]
    assert error_text[-1] == reason
    deltas = [chunk["choices"][0] for chunk in with_choices]
    parts = [one["delta"].get("content", "") if "delta" in one else one["text"] for one in deltas]
    assert "".join(parts) == "".join(texts)
    assert all(("usage" in chunk) is include_usage for chunk in chunks)
    assert len(chunks) == len(with_choices) + include_usage


def test_the_bytes_of_a_chat_chunk() -> None:
    assert writer().content('a "b"\n') == (
        b'data: {"id":"id-1","object":"chat.completion.chunk","created":1700000000,"model":"m",'
        b'"system_fingerprint":null,"choices":[{"index":0,"delta":{"content":"a \\"b\\"\\n"},'
        b'"logprobs":null,"finish_reason":null}]}\n\n'
    )


def test_the_bytes_of_a_completion_chunk() -> None:
    assert (
        writer(ChunkKind.COMPLETION, include_usage=True).content("é")
        == (
            'data: {"id":"id-1","object":"text_completion","created":1700000000,"model":"m",'
            '"system_fingerprint":null,"choices":[{"index":0,"text":"é","logprobs":null,'
            '"finish_reason":null}],"usage":null}\n\n'
        ).encode()
    )


def test_the_first_chat_chunk_names_the_role() -> None:
    delta = data(writer().role())["choices"][0]["delta"]
    assert delta == {"role": "assistant", "content": "", "refusal": None}
    with pytest.raises(AssertionError, match="only chat"):
        writer(ChunkKind.COMPLETION).role()


def test_the_usage_chunk_has_the_counts_and_no_choices() -> None:
    made = writer(include_usage=True)
    made.finish("stop")
    chunk = data(made.usage(USAGE))
    assert chunk["choices"] == []
    assert chunk["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_usage_is_written_only_on_request_and_only_after_the_finish() -> None:
    made = writer()
    with pytest.raises(AssertionError, match="after the finish"):
        made.usage(USAGE)
    made.finish("stop")
    assert made.usage(USAGE) == b""


def test_nothing_follows_the_finish() -> None:
    made = writer()
    made.finish("stop")
    assert made.is_finished
    writes: list[Callable[[], bytes]] = [
        lambda: made.finish("stop"),
        lambda: made.content("x"),
        lambda: made.role(),
        lambda: made.error(Overloaded()),
    ]
    for write in writes:
        with pytest.raises(AssertionError):
            write()


def test_an_error_is_the_last_event() -> None:
    made = writer()
    made.content("half an ans")
    assert data(made.error(Overloaded(message="full")))["error"]["message"] == "full"
    with pytest.raises(AssertionError):
        made.finish("stop")
    with pytest.raises(AssertionError, match="last event"):
        made.usage(USAGE)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(TypeError):
        writer().content("\ud800")


def sdk(stream: bytes) -> openai.OpenAI:
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(
        lambda _: httpx2.Response(200, headers=headers, content=stream)
    )
    return openai.OpenAI(
        api_key="none",
        base_url="http://frontend/v1",
        http_client=httpx2.Client(transport=transport),
    )


def test_the_sdk_reads_a_chat_stream() -> None:
    made = writer(include_usage=True)
    stream = [made.role(), KEEP_ALIVE, made.content("Hel"), made.content("lo \u2028 😀")]
    stream += [made.finish("length"), made.usage(USAGE), DONE]
    with sdk(b"".join(stream)) as client:
        chunks = list(
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=True
            )
        )
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "Hello \u2028 😀"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[3].choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.total_tokens, usage.prompt_tokens_details.cached_tokens) == (10, 4)


def test_the_sdk_reads_a_completion_stream() -> None:
    made = writer(ChunkKind.COMPLETION)
    stream = b"".join([made.content("a"), made.content("b"), made.finish("stop"), DONE])
    with sdk(stream) as client:
        chunks = list(client.completions.create(model="m", prompt="hi", stream=True))
    assert all(isinstance(chunk, Completion) for chunk in chunks)
    assert [chunk.choices[0].text for chunk in chunks] == ["a", "b", ""]
    assert chunks[-1].choices[0].finish_reason == "stop"


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.booleans())
def test_every_chunk_has_the_types_of_the_sdk(text: str, include_usage: bool) -> None:
    chat = writer(include_usage=include_usage)
    for event in (chat.role(), chat.content(text), chat.finish("stop"), chat.usage(USAGE)):
        if event:
            ChatCompletionChunk.model_validate(data(event), strict=True)
    made = writer(ChunkKind.COMPLETION, include_usage=include_usage)
    chunk = data(made.content(text))
    # The SDK's type is that of a whole response, which always has a finish reason.
    chunk["choices"][0]["finish_reason"] = "stop"
    Completion.model_validate(chunk, strict=True)

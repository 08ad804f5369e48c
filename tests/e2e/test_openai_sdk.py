"""The official OpenAI SDK against a real mesh; responses are compared with the token oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.kit.oracle import ExpectedResponse, Oracle
from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.waiting import WAIT_S

MULTI_BYTE = "naïve café, 日本語のテキスト 🎉👩‍👩‍👧 שלום \U0001f9ff and back"


mesh = mesh_fixture(worker_flags=["--speedup=20"])


@pytest.fixture
def sync_client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{mesh.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=WAIT_S,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


def user_message(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


def assert_usage(usage: Any, expected: ExpectedResponse) -> None:
    assert usage is not None
    assert usage.prompt_tokens == expected.prompt_tokens
    assert usage.completion_tokens == expected.completion_tokens
    assert usage.total_tokens == expected.prompt_tokens + expected.completion_tokens


async def test_a_chat_response_has_the_expected_text_and_exact_usage(
    client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    expected = oracle.chat("Say something.", 200)
    response = await client.chat.completions.create(
        model=MODEL, messages=user_message("Say something."), max_tokens=200
    )
    choice = response.choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert (choice.message.role, response.object, response.model) == (
        *("assistant", "chat.completion", MODEL),
    )
    assert_usage(response.usage, expected)


async def test_a_streamed_chat_has_the_same_text_one_finish_reason_and_usage_last(
    client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    expected = oracle.chat("Stream it.", 50)
    chunks: list[ChatCompletionChunk] = []
    async with await client.chat.completions.create(
        model=MODEL,
        messages=user_message("Stream it."),
        max_tokens=50,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == expected.text
    finishes = [c.choices[0].finish_reason for c in chunks[:-1]]
    assert finishes == [None] * (len(finishes) - 1) + [expected.finish_reason]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert_usage(chunks[-1].usage, expected)
    assert len({c.id for c in chunks}) == 1
    # One event per token: role, tokens, finish, usage.
    assert len(chunks) == expected.completion_tokens + 3


async def test_without_stream_options_no_chunk_has_usage(
    client: openai.AsyncOpenAI,
) -> None:
    async with await client.chat.completions.create(
        model=MODEL, messages=user_message("Quietly."), max_tokens=5, stream=True
    ) as stream:
        chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_sync_client_completes_a_text(sync_client: openai.OpenAI, oracle: Oracle) -> None:
    expected = oracle.completion("Once upon a time", 40)
    response = sync_client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=40)
    assert response.choices[0].text == expected.text
    assert response.choices[0].finish_reason == expected.finish_reason
    assert_usage(response.usage, expected)


def test_the_sync_client_streams_a_completion_of_token_ids(
    sync_client: openai.OpenAI, oracle: Oracle
) -> None:
    expected = oracle.completion([5, 6, 7], 40)
    with sync_client.completions.create(
        model=MODEL,
        prompt=[5, 6, 7],
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected.text
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert_usage(chunks[-1].usage, expected)


async def test_a_conversation_is_rendered_by_the_models_template(
    client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ]
    response = await client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_completion_tokens=20,
    )
    expected = oracle.conversation(messages, 20)
    assert response.choices[0].message.content == expected.text
    assert_usage(response.usage, expected)


@pytest.mark.parametrize("stream", [False, True])
async def test_text_ends_before_the_stop_string_and_usage_counts_its_tokens(
    client: openai.AsyncOpenAI, oracle: Oracle, stream: bool
) -> None:
    whole = oracle.chat("Stop me.", 60).text.split(" ")
    # Ends inside a word, so that the stop string spans tokens and ends inside one.
    stop = f"{whole[9]} {whole[10][:2]}"
    expected = oracle.chat("Stop me.", 60, stop=stop)
    assert 0 < expected.completion_tokens < 60, "the stop string must occur"
    request_args: dict[str, Any] = {
        "model": MODEL,
        "messages": user_message("Stop me."),
        "max_tokens": 60,
        "stop": [stop, "never there"],
    }
    if stream:
        text, usage, finish = "", None, None
        async for chunk in await client.chat.completions.create(
            **request_args, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    else:
        response = await client.chat.completions.create(**request_args)
        choice = response.choices[0]
        text, usage, finish = choice.message.content or "", response.usage, choice.finish_reason
    assert (text, finish) == (expected.text, "stop")
    assert_usage(usage, expected)


async def test_multi_byte_text_reaches_the_model_unchanged(
    client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    expected = oracle.chat(MULTI_BYTE, 30)
    response = await client.chat.completions.create(
        model=MODEL, messages=user_message(MULTI_BYTE), max_tokens=30
    )
    assert response.choices[0].message.content == expected.text
    assert_usage(response.usage, expected)


async def test_sixty_four_concurrent_streams_get_their_own_responses(
    client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    async def one(number: int) -> str:
        async with await client.chat.completions.create(
            model=MODEL, messages=user_message(f"Number {number}"), max_tokens=60, stream=True
        ) as stream:
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    responses = await asyncio.gather(*map(one, range(64)))
    assert responses == [oracle.chat(f"Number {number}", 60).text for number in range(64)]


@pytest.mark.slow
async def test_a_prompt_of_twenty_thousand_tokens_is_served(
    client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    text = "able about above accept " * 5000
    expected = oracle.completion(text, 10)
    assert expected.prompt_tokens >= 20_000
    response = await client.completions.create(model=MODEL, prompt=text, max_tokens=10)
    assert response.choices[0].text == expected.text
    assert_usage(response.usage, expected)


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="no-such", messages=user_message("hi"))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_an_invalid_value_is_a_bad_request_that_names_its_parameter(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL, messages=user_message("hi"), temperature=9, stream=True
        )
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


async def test_a_pin_to_an_unknown_worker_is_a_503_with_retry_after(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(
            model=MODEL,
            messages=user_message("hi"),
            extra_body={"nvext": {"backend_instance_id": 1}},
        )
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after-ms"]
    assert caught.value.response.headers["x-should-retry"] == "true"


async def test_models_are_listed_and_retrieved(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("no-such")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_request_id_is_in_the_response(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    response = await client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=user_message("hi"),
        max_tokens=2,
        stream=stream,
        extra_headers={"x-request-id": "my-id-7"},
    )
    assert response.headers["x-request-id"] == response.request_id == "my-id-7"
    await response.http_response.aread()


async def test_errors_carry_a_request_id_too(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="no-such", prompt="hi")
    assert caught.value.request_id

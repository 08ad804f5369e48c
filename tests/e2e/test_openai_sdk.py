"""The official OpenAI SDK against a real mesh; answers are compared with what they must be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.e2e.mesh import MODEL, WAIT_S, ExpectedResponse, Mesh, Oracle, logs_on_failure

MULTI_BYTE = "naïve café, 日本語のテキスト 🎉👩‍👩‍👧 שלום \U0001f9ff and back"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with Mesh(tmp_path_factory.mktemp("mesh"), worker_flags=["--speedup=20"]) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def _logs(mesh: Mesh, request: pytest.FixtureRequest) -> Iterator[None]:
    with logs_on_failure(mesh, request):
        yield


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=WAIT_S,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        yield client


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


async def test_a_chat_answer_is_the_models_truth_with_exact_usage(
    client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    expected = oracle.chat("Say something.", 200)
    answer = await client.chat.completions.create(
        model=MODEL, messages=user_message("Say something."), max_tokens=200
    )
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert (choice.message.role, answer.object, answer.model) == (
        *("assistant", "chat.completion", MODEL),
    )
    assert_usage(answer.usage, expected)


async def test_a_streamed_chat_is_the_same_text_one_finish_and_usage_last(
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
    # One event a token: role, tokens, finish, usage.
    assert len(chunks) == expected.completion_tokens + 3


async def test_without_stream_options_no_chunk_speaks_of_usage(
    client: openai.AsyncOpenAI,
) -> None:
    async with await client.chat.completions.create(
        model=MODEL, messages=user_message("Quietly."), max_tokens=5, stream=True
    ) as stream:
        chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_sync_client_completes_a_text(sync_client: openai.OpenAI, oracle: Oracle) -> None:
    expected = oracle.completion("Once upon a time", 40)
    answer = sync_client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=40)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert_usage(answer.usage, expected)


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


async def test_a_conversation_goes_through_the_models_template(
    client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ]
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_completion_tokens=20,
    )
    expected = oracle.conversation(messages, 20)
    assert answer.choices[0].message.content == expected.text
    assert_usage(answer.usage, expected)


@pytest.mark.parametrize("stream", [False, True])
async def test_text_ends_before_the_stop_string_and_usage_counts_what_made_it(
    client: openai.AsyncOpenAI, oracle: Oracle, stream: bool
) -> None:
    whole = oracle.chat("Stop me.", 60).text.split(" ")
    # Ends in the middle of a word, so that the stop string spans tokens and ends inside one.
    stop = f"{whole[9]} {whole[10][:2]}"
    expected = oracle.chat("Stop me.", 60, stop=stop)
    assert 0 < expected.completion_tokens < 60, "the stop string must be met"
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
        answer = await client.chat.completions.create(**request_args)
        choice = answer.choices[0]
        text, usage, finish = choice.message.content or "", answer.usage, choice.finish_reason
    assert (text, finish) == (expected.text, "stop")
    assert_usage(usage, expected)


async def test_multi_byte_text_arrives_at_the_model_whole(
    client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    expected = oracle.chat(MULTI_BYTE, 30)
    answer = await client.chat.completions.create(
        model=MODEL, messages=user_message(MULTI_BYTE), max_tokens=30
    )
    assert answer.choices[0].message.content == expected.text
    assert_usage(answer.usage, expected)


async def test_sixty_four_streams_at_once_get_each_its_own_answer(
    client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    async def one(number: int) -> str:
        async with await client.chat.completions.create(
            model=MODEL, messages=user_message(f"Number {number}"), max_tokens=60, stream=True
        ) as stream:
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    answers = await asyncio.gather(*map(one, range(64)))
    assert answers == [oracle.chat(f"Number {number}", 60).text for number in range(64)]


@pytest.mark.slow
async def test_a_prompt_of_twenty_thousand_tokens_is_answered(
    client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    text = "able about above accept " * 5000
    expected = oracle.completion(text, 10)
    assert expected.prompt_tokens >= 20_000
    answer = await client.completions.create(model=MODEL, prompt=text, max_tokens=10)
    assert answer.choices[0].text == expected.text
    assert_usage(answer.usage, expected)


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="no-such", messages=user_message("hi"))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_bad_value_is_a_bad_request_that_names_its_parameter(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL, messages=user_message("hi"), temperature=9, stream=True
        )
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


async def test_a_worker_that_is_not_there_is_a_503_with_a_hint(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(
            model=MODEL,
            messages=user_message("hi"),
            extra_body={"nvext": {"backend_instance_id": 1}},
        )
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after-ms"]
    assert caught.value.response.headers["x-should-retry"] == "true"


async def test_models_are_listed_and_found(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("no-such")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_request_id_comes_back_with_the_answer(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    answer = await client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=user_message("hi"),
        max_tokens=2,
        stream=stream,
        extra_headers={"x-request-id": "my-id-7"},
    )
    assert answer.headers["x-request-id"] == answer.request_id == "my-id-7"
    await answer.http_response.aread()


async def test_errors_carry_a_request_id_too(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="no-such", prompt="hi")
    assert caught.value.request_id

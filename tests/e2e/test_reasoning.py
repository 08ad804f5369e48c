"""Reasoning at the door: `reasoning_content`, streamed and whole, also before tool calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest

from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.sdk import open_sdk_client

pytestmark = pytest.mark.slow

FORM = "<think>( [a-z]{2,5}){3}</think>( [a-z]{2,5}){2}"


mesh = mesh_fixture(worker_flags=["--speedup=20", "--reasoning-parser=qwen3"])


# Any, here and below: fields of a body.
async def whole(client: openai.AsyncOpenAI, content: str, **fields: Any) -> tuple[str, str]:
    """Reasoning and answer of a response."""
    response = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], extra_body=fields
    )
    message = response.choices[0].message
    return (message.model_extra or {}).get("reasoning_content", ""), message.content or ""


async def streamed(client: openai.AsyncOpenAI, content: str, **fields: Any) -> tuple[str, str]:
    """Reasoning and answer of a streamed response."""
    reasoning = answer = ""
    async with await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], stream=True, extra_body=fields
    ) as chunks:
        async for chunk in chunks:
            delta = chunk.choices[0].delta
            piece = (delta.model_extra or {}).get("reasoning_content", "")
            assert not (piece and answer), "reasoning comes first"
            reasoning += piece
            answer += delta.content or ""
    return reasoning, answer


async def test_reasoning_is_separate_from_the_answer(client: openai.AsyncOpenAI) -> None:
    for number in range(4):
        reasoning, answer = await whole(client, f"{number}", guided_regex=FORM)
        assert len(reasoning.split()) == 3
        assert len(answer.split()) == 2
        assert await streamed(client, f"{number}", guided_regex=FORM) == (reasoning, answer)


@pytest.mark.parametrize("stop", [None, " zz"])
async def test_the_usage_counts_the_tokens_of_the_reasoning(
    client: openai.AsyncOpenAI, stop: str | None
) -> None:
    messages: Any = [{"role": "user", "content": "Count"}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "stop": stop}
    body["extra_body"] = {"guided_regex": FORM}
    response = await client.chat.completions.create(**body, logprobs=True)
    entries = response.choices[0].logprobs
    assert entries is not None
    tokens = [bytes(one.bytes or ()) for one in entries.content or ()]
    end = b"".join(tokens).index(b"</think>")
    expected = 1 + next(at for at, _ in enumerate(tokens) if len(b"".join(tokens[: at + 1])) >= end)
    plain = await client.chat.completions.create(**body)
    async with await client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    ) as chunks:
        streamed_usage = [chunk.usage async for chunk in chunks][-1]
    for usage in (response.usage, plain.usage, streamed_usage):
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == expected
        assert usage.completion_tokens > expected
    both = (await client.chat.completions.create(**body, n=2)).usage
    assert both is not None
    assert both.completion_tokens_details is not None
    assert both.completion_tokens_details.reasoning_tokens == 2 * expected


async def test_a_response_without_reasoning_is_content(client: openai.AsyncOpenAI) -> None:
    reasoning, answer = await whole(client, "Hello")
    assert (reasoning, bool(answer)) == ("", True)
    assert await streamed(client, "Hello") == ("", answer)


async def test_an_unfinished_response_may_be_reasoning_only(client: openai.AsyncOpenAI) -> None:
    form = "<think>( [a-z]{2,5}){40}</think> end"
    reasoning, answer = await whole(client, "Hello", guided_regex=form, max_tokens=12)
    assert (bool(reasoning), answer) == (True, "")
    assert await streamed(client, "Hello", guided_regex=form, max_tokens=12) == (reasoning, "")


async def test_text_completions_keep_the_markers(client: openai.AsyncOpenAI) -> None:
    response = await client.completions.create(
        model=MODEL, prompt="Go", max_tokens=200, extra_body={"guided_regex": FORM}
    )
    assert response.choices[0].text.startswith("<think>")


async def test_past_reasoning_is_accepted(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."},
        {"role": "user", "content": "Again"},
    ]
    response = await client.chat.completions.create(model=MODEL, messages=messages)
    assert response.choices[0].message.content


async def test_harmony_messages_become_reasoning_and_answer(
    start: Callable[..., AbstractContextManager[Mesh]],
) -> None:
    analysis = r"<\|channel\|>analysis<\|message\|>( [a-z]{2,5}){3}<\|end\|>"
    final = r"<\|start\|>assistant<\|channel\|>final<\|message\|>( [a-z]{2,5}){2}"
    flags = ["--speedup=20", "--tool-call-parser=gpt_oss", "--reasoning-parser=gpt_oss"]
    with start(workers=1, worker_flags=flags) as mesh:
        async with open_sdk_client(mesh) as client:
            reasoning, answer = await whole(client, "Hello", guided_regex=analysis + final)
            assert (len(reasoning.split()), len(answer.split())) == (3, 2)
            assert await streamed(client, "Hello", guided_regex=analysis + final) == (
                *(reasoning, answer),
            )

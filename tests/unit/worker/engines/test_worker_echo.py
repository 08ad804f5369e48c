"""The echo engine: token ids, OpenAI bodies, and the contract."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from common.errors import InvalidRequest, PromptTooLong, Unavailable, Unsupported
from common.request.preprocessed import (
    BootstrapInfo,
    FinishReason,
    OutputOptions,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    TokenIds,
)
from tests.kit.requests import context
from worker_svc.config import WorkerConfig
from worker_svc.engines.contract import (
    GenerateContext,
    LLMEngineOutput,
    validate_stream,
)
from worker_svc.engines.echo import EchoConfig, EchoEngine


@pytest.fixture
async def engine() -> EchoEngine:
    echo = EchoEngine(EchoConfig())
    await echo.start(1)
    return echo


def request(*tokens: int, stop: StopConditions | None = None, **more: Any) -> PreprocessedRequest:
    stop = stop or StopConditions()
    return PreprocessedRequest(token_ids=TokenIds.of(tokens), stop_conditions=stop, **more)


async def run(engine: EchoEngine, asked: PreprocessedRequest) -> list[LLMEngineOutput]:
    async with aclosing(
        validate_stream(engine.generate(asked, context()), request_id="r")
    ) as outputs:
        return [output async for output in outputs]


async def chunks_of(
    engine: EchoEngine, kind: str, body: object, ctx: GenerateContext | None = None
) -> tuple[list[dict[str, Any]], LLMEngineOutput]:
    """The chunk objects and the terminal chunk."""
    ctx = ctx or context()
    stream = engine.generate_pass_through(kind, json.dumps(body).encode(), ctx)
    async with aclosing(validate_stream(stream, request_id=ctx.id)) as outputs:
        *chunks, terminal = [output async for output in outputs]
    assert terminal.chunk_json is None
    return [json.loads(chunk.chunk_json or b"") for chunk in chunks], terminal


def chat(text: object, **more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def text_of(chunks: list[dict[str, Any]]) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)


# Token ids.


async def test_it_returns_the_prompt_one_token_per_chunk_with_its_counts(
    engine: EchoEngine,
) -> None:
    *tokens, terminal = await run(engine, request(5, 6, 7))

    assert [list(one.token_ids) for one in tokens] == [[5], [6], [7]]
    assert terminal.finish_reason is FinishReason.STOP
    assert terminal.completion_usage is not None
    assert terminal.completion_usage.total_tokens == 6


@pytest.mark.parametrize(
    ("stop", "length", "finish", "reason"),
    [
        (StopConditions(max_tokens=2), 2, FinishReason.LENGTH, None),
        (StopConditions(max_tokens=4), 4, FinishReason.STOP, None),
        (StopConditions(stop_token_ids_hidden=(7,)), 2, FinishReason.STOP, 7),
        (StopConditions(stop_token_ids_visible=(7,)), 3, FinishReason.STOP, 7),
        (StopConditions(stop_token_ids_hidden=(7,), min_tokens=3), 4, FinishReason.STOP, None),
        (StopConditions(stop_token_ids_hidden=(7,), ignore_eos=True), 4, FinishReason.STOP, None),
    ],
)
async def test_stop_conditions_apply_to_an_echo(
    engine: EchoEngine,
    stop: StopConditions,
    length: int,
    finish: FinishReason,
    reason: int | None,
) -> None:
    *tokens, terminal = await run(engine, request(5, 6, 7, 8, stop=stop))

    assert len(tokens) == length
    assert (terminal.finish_reason, terminal.stop_reason) == (finish, reason)


async def test_an_eos_in_the_prompt_ends_the_echo(engine: EchoEngine) -> None:
    *tokens, terminal = await run(engine, request(5, 6, 7, eos_token_ids=(6,)))

    assert len(tokens) == 1
    assert terminal.finish_reason is FinishReason.EOS


@pytest.mark.parametrize(
    ("asked", "error", "name"),
    [
        (request(), InvalidRequest, "token_ids"),
        (request(1, stop=StopConditions(max_tokens=0)), InvalidRequest, "max_tokens"),
        (request(*range(32_769)), PromptTooLong, "token_ids"),
        (request(1, sampling_options=SamplingOptions(n=2)), Unsupported, "sampling_options.n"),
        (request(1, output_options=OutputOptions(logprobs=0)), Unsupported, "logprobs"),
        (request(1, routing=RoutingHints(lora_name="french")), Unsupported, "routing.lora_name"),
    ],
)
async def test_fields_that_an_echo_does_not_support_are_rejected_by_name(
    engine: EchoEngine, asked: PreprocessedRequest, error: type[InvalidRequest], name: str
) -> None:
    with pytest.raises(error) as raised:
        await run(engine, asked)

    assert (raised.value.field or "").endswith(name)
    assert engine.counters == {"rejected": 1}


async def test_a_probe_needs_no_handoff(engine: EchoEngine) -> None:
    probe = request(1, is_probe=True, bootstrap_info=BootstrapInfo("h", 1, 2))

    assert len(await run(engine, probe)) == 2


@pytest.mark.row("S4-29", "S4-30")
async def test_a_stop_between_tokens_ends_the_echo_with_a_cancelled_chunk() -> None:
    engine = EchoEngine(EchoConfig(token_delay_s=3600.0))
    await engine.start(1)
    ctx = context()
    stream = validate_stream(engine.generate(request(1, 2), ctx), request_id="r")
    pending = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert engine.loads()[0].running == 1

    ctx.stop_generating()

    assert (await pending).finish_reason is FinishReason.CANCELLED
    await stream.aclose()
    assert engine.counters == {"accepted": 1, "cancelled": 1}


@pytest.mark.row("S4-39")
async def test_closing_the_echo_early_leaves_nothing_running(engine: EchoEngine) -> None:
    stream = engine.generate(request(1, 2), context())
    await anext(stream)
    await stream.aclose()

    assert engine.counters == {"accepted": 1, "closed": 1}
    assert engine.loads()[0].running == 0


@pytest.mark.row("S4-44", "S4-46")
async def test_requests_before_start_and_after_cleanup_are_rejected() -> None:
    engine = EchoEngine(EchoConfig())
    with pytest.raises(Unavailable):
        await run(engine, request(1))
    config = await engine.start(1)
    await engine.abort(context())
    await engine.drain()
    await engine.cleanup()
    await engine.cleanup()

    assert (config.advertised_name, config.kv_cache_block_size) == ("kvmesh-echo", None)
    with pytest.raises(Unavailable):
        await run(engine, request(1))


# OpenAI bodies.


@pytest.mark.row("S0-42")
async def test_a_chat_body_comes_back_word_by_word_in_chat_chunks(engine: EchoEngine) -> None:
    body = chat("Hello  wide\nworld ")
    chunks, terminal = await chunks_of(engine, "chat", body, context("abc"))

    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {(chunk["id"], chunk["model"]) for chunk in chunks} == {("chatcmpl-abc", "m")}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]] == [
        "Hello",
        "  wide",
        "\nworld",
        " ",
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert terminal.finish_reason is FinishReason.STOP


@pytest.mark.row("S0-43")
async def test_a_completion_body_comes_back_in_text_chunks(engine: EchoEngine) -> None:
    body = {"model": "m", "prompt": "one two three", "max_tokens": 2}
    chunks, terminal = await chunks_of(engine, "completion", body)

    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["one", " two", ""]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert terminal.finish_reason is FinishReason.LENGTH
    assert terminal.completion_usage is not None
    assert terminal.completion_usage.completion_tokens == 2


async def test_the_last_user_message_of_a_conversation_is_echoed(engine: EchoEngine) -> None:
    messages = [
        {"role": "user", "content": "first"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "sec"}, {"type": "text", "text": "d"}],
        },
        {"role": "assistant", "content": "no"},
    ]
    chunks, _ = await chunks_of(engine, "chat", {"messages": messages})

    assert text_of(chunks) == "secd"


async def test_equal_request_ids_give_equal_chunks_and_other_ids_another_created_time(
    engine: EchoEngine,
) -> None:
    first, again, other = [
        (await chunks_of(engine, "chat", chat("a"), context(name)))[0] for name in ("x", "x", "y")
    ]

    assert first == again
    assert first[0]["created"] != other[0]["created"]


async def test_requested_counts_come_last(engine: EchoEngine) -> None:
    body = chat("a b c", max_completion_tokens=2, stream_options={"include_usage": True})
    chunks, _ = await chunks_of(engine, "chat", body)

    assert chunks[-1]["choices"] == []
    counts = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert chunks[-1]["usage"] == counts
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("kind", "body", "name"),
    [
        ("chat", [], "body"),
        ("chat", {}, "messages"),
        ("chat", {"messages": [3]}, "messages[0]"),
        ("chat", {"messages": [{"role": "system", "content": "a"}]}, "messages"),
        ("chat", chat(5), "messages[0].content"),
        ("chat", chat([{"type": "image_url"}]), "messages[0].content[0]"),
        ("chat", chat([{"type": "text"}]), "messages[0].content[0].text"),
        ("chat", chat("a", tools=[]), "tools"),
        ("chat", chat("a", n=2), "n"),
        ("chat", chat("a", max_tokens=0), "max_tokens"),
        ("chat", chat("a", stream_options=1), "stream_options"),
        ("chat", {**chat("a"), "model": 1}, "model"),
        ("completion", {"prompt": [1, 2]}, "prompt"),
        ("embedding", {}, "kind"),
    ],
)
async def test_unsupported_body_fields_are_rejected_by_name(
    engine: EchoEngine, kind: str, body: object, name: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await chunks_of(engine, kind, body)

    assert raised.value.field == name
    assert engine.counters == {"rejected": 1}


async def test_a_body_that_is_not_json_is_rejected(engine: EchoEngine) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        await anext(engine.generate_pass_through("chat", b"{", context()))


async def test_a_stopped_pass_through_ends_without_an_openai_end(engine: EchoEngine) -> None:
    ctx = context()
    stream = engine.generate_pass_through("chat", json.dumps(chat("a b")).encode(), ctx)
    outputs = [await anext(stream), await anext(stream)]
    ctx.stop_generating()
    outputs += [output async for output in stream]

    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.CANCELLED]
    assert outputs[-1].completion_usage is not None
    assert outputs[-1].completion_usage.completion_tokens == 1


@pytest.mark.parametrize("engine", ["echo", "sglang"])
def test_adapters_are_rejected_by_name_for_engines_that_cannot_load_them(engine: str) -> None:
    config = WorkerConfig(engine=engine, loras=("french",))
    problems = [one for one in config.problems() if one.startswith("loras:")]
    assert len(problems) == 1
    assert engine in problems[0]


def test_an_invalid_configuration_is_rejected() -> None:
    with pytest.raises(ValueError, match="token_delay_s"):
        EchoConfig(token_delay_s=-1.0)

"""The engine contract: contexts, configuration, chunks, and the validator of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from common.errors import INVALID_OUTPUT, InternalError, InvalidRequest, MeshError
from common.request import preprocessed
from worker_svc.engines import contract as engine
from worker_svc.engines.contract import (
    EngineConfig,
    EngineContext,
    FinishReason,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    OutputRules,
    TokenLogprob,
    chunk,
    usage,
    validate_stream,
)
from worker_svc.engines.echo import EchoConfig, EchoEngine
from worker_svc.engines.sim.config import SimConfig
from worker_svc.engines.sim.engine import SimEngine

U32_MAX = 2**32 - 1
WAIT_S = 20.0


def is_plain(output: LLMEngineOutput, *but: str) -> bool:
    """Whether all fields but the named ones have their defaults."""
    default = LLMEngineOutput()
    return all(
        getattr(output, one.name) == getattr(default, one.name)
        for one in fields(LLMEngineOutput)
        if one.name not in but
    )


# Contexts.


@pytest.mark.row("S4-01", "S4-02", "S4-08")
async def test_a_generate_context_is_an_engine_context() -> None:
    ctx = GenerateContext("r1")
    assert isinstance(ctx, EngineContext)
    assert (ctx.id, ctx.is_stopped, ctx.is_killed, ctx.stop_reason) == ("r1", False, False, "")

    ctx.stop_generating("enough")
    await asyncio.wait_for(ctx.stopped(), WAIT_S)
    assert (ctx.is_stopped, ctx.is_killed, ctx.stop_reason) == (True, False, "enough")

    ctx.kill("later")
    await asyncio.wait_for(ctx.killed(), WAIT_S)
    assert (ctx.is_killed, ctx.stop_reason) == (True, "enough")


@pytest.mark.row("S4-03")
async def test_a_context_can_be_kept_by_a_task_that_outlives_the_request() -> None:
    ctx = GenerateContext("r1")
    handle: EngineContext = ctx
    watching = asyncio.ensure_future(handle.stopped())
    del ctx

    handle.stop_generating()

    await asyncio.wait_for(watching, WAIT_S)


def test_a_stop_calls_back_once_also_if_it_came_before() -> None:
    ctx, calls = GenerateContext("r1"), list[str]()
    ctx.call_on_stop(lambda: calls.append("before"))
    assert calls == []
    ctx.stop_generating()
    ctx.kill()
    ctx.call_on_stop(lambda: calls.append("after"))
    assert calls == ["before", "after"]


@pytest.mark.row("S4-04", "S4-05", "S4-06")
def test_the_first_token_signal_exists_on_decode_only_and_fires_once() -> None:
    signal = asyncio.Event()
    decode, other = (
        GenerateContext("d", signal),
        GenerateContext("a"),
    )

    for ctx in (decode, decode, other):
        ctx.notify_first_token()

    assert signal.is_set()
    assert decode.first_token is signal
    assert other.first_token is None


# Configuration.


@pytest.mark.row("S4-09", "S4-10")
def test_the_advertised_name_is_the_served_one_else_the_models() -> None:
    assert EngineConfig(model="m").advertised_name == "m"
    assert EngineConfig(model="m", served_model_name="s").advertised_name == "s"


@pytest.mark.row("S4-11", "S4-12", "S4-13", "S4-14", "S4-15")
@pytest.mark.parametrize(
    "name",
    [
        "context_length",
        "kv_cache_block_size",
        "total_kv_blocks",
        "max_num_seqs",
        "max_num_batched_tokens",
    ],
)
def test_capacities_are_set_or_none(name: str) -> None:
    assert getattr(EngineConfig(), name) is None
    given: dict[str, Any] = {name: 2**31}
    assert getattr(EngineConfig(**given), name) == 2**31


@pytest.mark.row("S4-16", "S4-17", "S4-19")
@pytest.mark.parametrize(
    ("host", "port", "endpoint"),
    [
        ("h", 8998, ("h", 8998)),
        ("h", None, None),
        (None, 8998, None),
        (None, None, None),
    ],
)
def test_the_handoff_is_published_with_host_and_port_or_not_at_all(
    host: str | None, port: int | None, endpoint: tuple[str, int] | None
) -> None:
    config = EngineConfig(bootstrap_host=host, bootstrap_port=port)

    assert config.disaggregated_endpoint == endpoint


@pytest.mark.row("S4-18", "S4-20")
def test_a_default_configuration_advertises_nothing_and_no_zeros() -> None:
    config = EngineConfig()

    assert config.model == ""
    numbers = ("context_length", "kv_cache_block_size", "total_kv_blocks", "max_num_seqs")
    assert {getattr(config, name) for name in (*numbers, "max_num_batched_tokens")} == {None}
    assert (config.served_model_name, config.bootstrap_host, config.bootstrap_port) == (None,) * 3


# Chunks.


@pytest.mark.row("S4-48", "S4-54")
def test_a_token_chunk_has_its_token_and_nothing_else() -> None:
    output = chunk.token(42)

    assert list(output.token_ids) == [42]
    assert is_plain(output, "token_ids")


@pytest.mark.row("S4-49", "S4-33")
def test_terminal_chunks_have_their_reason_and_no_tokens() -> None:
    for output, reason in (
        (chunk.cancelled(), FinishReason.CANCELLED),
        (chunk.stop(), FinishReason.STOP),
        (chunk.length(), FinishReason.LENGTH),
    ):
        assert output.finish_reason is reason
        assert is_plain(output, "finish_reason")
    failed = chunk.error("it broke")
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, "it broke")
    assert is_plain(failed, "finish_reason", "error")


@pytest.mark.row("S4-50", "S4-51", "S4-52", "S4-55")
def test_tokens_and_usage_are_added_fluently() -> None:
    output = chunk.length().with_tokens([1, 2, 3]).with_usage(usage(10, 3))

    assert list(output.token_ids) == [1, 2, 3]
    assert output.finish_reason is FinishReason.LENGTH
    assert output.completion_usage is not None
    assert output.completion_usage.total_tokens == 13
    assert is_plain(output, "token_ids", "finish_reason", "completion_usage")


@pytest.mark.row("S4-53", "S4-56", "S4-57")
def test_usage_adds_up_and_saturates() -> None:
    assert usage(7, 11).total_tokens == 18
    assert usage(U32_MAX, 10).total_tokens == U32_MAX
    assert usage(7, 11).prompt_tokens_details is None
    assert usage(7, 11).completion_tokens_details is None


@pytest.mark.row("S4-58", "S4-59", "S4-60", "S4-61", "S4-62")
def test_the_contract_module_exports_all_names_an_engine_author_needs() -> None:
    names = {"BootstrapInfo", "PrefillResult", "PreprocessedRequest", "CompletionUsage"}
    names |= {"FinishReason", "OutputOptions", "SamplingOptions", "StopConditions"}

    assert all(getattr(engine, name) is getattr(preprocessed, name) for name in names)
    assert engine.MeshError is MeshError
    assert names | {"LLMEngineOutput", "EngineContext", "MeshError"} <= set(dir(engine))


# The validator.


class Script:
    """An engine's stream: yields outputs, raises errors, and records whether it was closed."""

    def __init__(self, *items: LLMEngineOutput | MeshError) -> None:
        self.items = items
        self.is_closed = False

    async def run(self) -> AsyncGenerator[LLMEngineOutput, None]:
        try:
            for item in self.items:
                if isinstance(item, MeshError):
                    raise item
                yield item
        finally:
            self.is_closed = True


async def collect(script: Script) -> list[LLMEngineOutput]:
    return [output async for output in validate_stream(script.run(), request_id="r1")]


@pytest.mark.row("S4-30")
async def test_a_stream_with_one_terminal_chunk_at_its_end_passes_unchanged() -> None:
    outputs = [chunk.token(1), chunk.token(2), chunk.stop()]

    assert await collect(Script(*outputs)) == outputs


@pytest.mark.row("S4-35")
@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([chunk.stop(), chunk.token(1)], "after the terminal"),
        ([chunk.stop(), chunk.stop()], "after the terminal"),
        ([chunk.token(1)], "without a terminal"),
        ([], "without a terminal"),
    ],
)
async def test_a_stream_that_violates_the_contract_raises_and_is_closed(
    items: list[LLMEngineOutput], reason: str
) -> None:
    script = Script(*items)

    with pytest.raises(InternalError, match=f"r1.*{reason}"):
        await collect(script)
    assert script.is_closed


def logprob(token_id: int, value: float = -1.0) -> TokenLogprob:
    return TokenLogprob(token_id, value, ())


# Any: an engine of another package may send anything.
INVALID: dict[str, Any] = {
    "outside of the vocabulary of 1000 ids": [chunk.token(1000)],
    "no integer from 0": [chunk.token(-1)],
    "to 2\\*\\*32 - 1": [LLMEngineOutput(token_ids=(1, 2**32))],
    "a token id is no integer": [LLMEngineOutput(token_ids=(1, 2.5))],  # type: ignore[arg-type]
    "is no integer": [LLMEngineOutput(token_ids=(1, None))],  # type: ignore[arg-type]
    "1 tokens more than max_tokens": [
        LLMEngineOutput(token_ids=(1, 2)),
        LLMEngineOutput(token_ids=(3, 4), finish_reason=FinishReason.LENGTH),
    ],
    "chunk after the terminal chunk": [chunk.stop(), chunk.token(1)],
    "1 log probabilities for 2 tokens": [LLMEngineOutput(token_ids=(1, 2), logprobs=[logprob(1)])],
    "a token id is no integer from": [LLMEngineOutput(token_ids=(1,), logprobs=[logprob(-1)])],
    "log probability of token id 1000": [LLMEngineOutput(token_ids=(1,), logprobs=[logprob(1000)])],
    "a log probability is no number": [
        LLMEngineOutput(token_ids=(1,), logprobs=[logprob(1, None)])  # type: ignore[arg-type]
    ],
    "chunk_json is no bytes": [LLMEngineOutput(chunk_json="{}")],  # type: ignore[arg-type]
    "without a terminal chunk": [chunk.token(1)],
}


@pytest.mark.parametrize("rule", INVALID)
def test_invalid_output_is_a_typed_error_that_names_the_rule(rule: str) -> None:
    rules = OutputRules("r1", vocab_size=1000, max_tokens=3)

    def check_all() -> None:
        for output in INVALID[rule]:
            rules.check(output)
        rules.end()

    with pytest.raises(InternalError, match=f"r1.*{rule}") as raised:
        check_all()
    assert raised.value.reason == INVALID_OUTPUT


def test_valid_output_may_reach_each_limit() -> None:
    rules = OutputRules("r1", vocab_size=1000, max_tokens=3)
    rules.check(LLMEngineOutput(token_ids=[0, 999], logprobs=[logprob(0), logprob(999)]))
    rules.check(LLMEngineOutput(token_ids=list(np.array([7])), finish_reason=FinishReason.LENGTH))
    rules.end()


def test_an_alternative_may_have_an_id_that_only_the_model_has() -> None:
    """Models pad their vocabulary; the text of such an id is empty."""
    rules = OutputRules("r1", vocab_size=1000)
    padded = TokenLogprob(1, -1.0, (preprocessed.TopLogprob(1023, -0.5),))
    rules.check(LLMEngineOutput(token_ids=(1,), logprobs=[padded]))
    invalid = TokenLogprob(1, -1.0, (preprocessed.TopLogprob(-1, -0.5),))
    with pytest.raises(InternalError, match="a token id is no integer"):
        rules.check(LLMEngineOutput(token_ids=(1,), logprobs=[invalid]))


@pytest.mark.row("S4-31")
async def test_a_typed_error_is_terminal_and_keeps_its_type() -> None:
    error = InvalidRequest("temperature is too hot", "temperature")
    script = Script(chunk.token(1), error)
    stream = validate_stream(script.run(), request_id="r1")

    assert await anext(stream) == chunk.token(1)
    with pytest.raises(InvalidRequest) as raised:
        await anext(stream)
    assert raised.value is error
    assert script.is_closed


@pytest.mark.row("S4-39")
async def test_closing_the_validated_stream_closes_the_engines() -> None:
    script = Script(chunk.token(1), chunk.stop())
    stream = validate_stream(script.run(), request_id="r1")
    await anext(stream)

    await stream.aclose()

    assert script.is_closed


def test_both_engines_satisfy_the_engine_protocol() -> None:
    engines: list[LLMEngine] = [SimEngine(SimConfig()), EchoEngine(EchoConfig())]

    assert all(one.loads()[0].running == 0 for one in engines)

"""The simulated engine: the engine contract and every request field."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.errors import (
    Conflict,
    InternalError,
    InvalidRequest,
    MeshError,
    NotFound,
    Overloaded,
    PromptTooLong,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from common.request.preprocessed import (
    BootstrapInfo,
    FinishReason,
    GuidedDecoding,
    MediaUrl,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    TokenIds,
    TopLogprob,
)
from tests.kit.requests import context
from tests.kit.waiting import until
from worker_svc.engines.contract import (
    GenerateContext,
    LLMEngineOutput,
    PagedEngine,
    validate_stream,
)
from worker_svc.engines.sim.config import SIM_MODEL_DIR, SimConfig, SimModel, load_sim_model
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.token_oracle import TokenOracle
from worker_svc.kv_events.external_events import ExternalEvent, PagesRemoved, PagesStored

MODEL = SimModel(tuple(range(100, 900)), (2, 3), 32_768)
TOKEN_ORACLE = TokenOracle(MODEL.word_ids, 2)
PROMPT = [1, 2, 3]
AT_ONCE = Timing(speedup=0)


class ManualTime:
    """A clock that changes only by `advance`; counts the sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps = 0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, delay_s: float) -> None:
        self.sleeps += 1
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + delay_s, woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Time advances at once; then all ready tasks run."""
        self.now += seconds
        for end, woken in self._sleepers:
            if end <= self.now and not woken.done():
                woken.set_result(None)
        self._sleepers = [one for one in self._sleepers if not one[1].done()]
        await turns()


async def turns(count: int = 20) -> None:
    """Lets all ready tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(
    config: SimConfig | None = None, at: ManualTime | None = None
) -> AsyncIterator[SimEngine]:
    config = config or SimConfig(timing=AT_ONCE)
    engine = SimEngine(config, model=MODEL)
    if at is not None:
        engine = SimEngine(config, model=MODEL, clock=at.clock, sleep=at.sleep)
    await engine.start(7)
    try:
        yield engine
    finally:
        await engine.cleanup()


def request(
    tokens: Sequence[int] = PROMPT, *, stop: StopConditions | None = None, **more: Any
) -> PreprocessedRequest:
    stop = stop or StopConditions(max_tokens=8)
    return PreprocessedRequest(token_ids=TokenIds.of(tokens), stop_conditions=stop, **more)


async def outputs_of(
    engine: SimEngine, asked: PreprocessedRequest, ctx: GenerateContext | None = None
) -> list[LLMEngineOutput]:
    ctx = ctx or context()
    async with aclosing(validate_stream(engine.generate(asked, ctx), request_id=ctx.id)) as outputs:
        return [output async for output in outputs]


async def run(engine: SimEngine, asked: PreprocessedRequest) -> tuple[list[int], LLMEngineOutput]:
    """All tokens and the terminal chunk."""
    outputs = await outputs_of(engine, asked)
    return [token for output in outputs for token in output.token_ids], outputs[-1]


def is_idle(engine: SimEngine) -> bool:
    count = engine.counters
    ends = count["finished"] + count["cancelled"] + count["closed"] + count["failed"]
    load = engine.loads()[0]
    return count["accepted"] == ends and (load.running, load.waiting, load.kv_used_blocks) == (
        (0, 0, 0)
    )


# Start and end.


@pytest.mark.row("S4-21", "S4-22", "S4-23", "S4-24", "S4-25")
async def test_after_start_the_engine_generates_at_once_and_reports_its_properties() -> None:
    engine = SimEngine(SimConfig(served_model_name="m", timing=AT_ONCE), model=MODEL)
    config = await engine.start(2**63 - 1)

    assert (await run(engine, request()))[0] == TOKEN_ORACLE.continue_tokens(PROMPT, 8)
    assert (config.model, config.advertised_name) == ("kvmesh-sim", "m")
    assert (config.context_length, config.kv_cache_block_size) == (32_768, 16)
    assert (config.total_kv_blocks, config.max_num_seqs) == (16_384, 256)
    assert (config.max_num_batched_tokens, config.kv_index) == (8192, "events")
    assert config.disaggregated_endpoint is None
    await engine.cleanup()


@pytest.mark.row("S4-26")
async def test_a_slow_start_takes_the_configured_time_and_logs_it() -> None:
    at = ManualTime()
    engine = SimEngine(SimConfig(startup_s=90.0), model=MODEL, clock=at.clock, sleep=at.sleep)
    with structlog.testing.capture_logs() as logs:
        starting = asyncio.ensure_future(engine.start(1))
        await turns()
    assert [(one["event"], one["startup_s"]) for one in logs] == [("sim_engine_starting", 90.0)]

    await at.advance(89.0)
    assert not starting.done()
    await at.advance(2.0)
    assert starting.done()
    await engine.cleanup()


async def test_the_model_folder_is_read_at_start() -> None:
    engine = SimEngine(SimConfig(timing=AT_ONCE))
    config = await engine.start(1)
    model = load_sim_model(SIM_MODEL_DIR)
    oracle = TokenOracle(model.word_ids, model.eos_ids[0])

    assert config.context_length == 131_072
    assert (await run(engine, request()))[0] == oracle.continue_tokens(PROMPT, 8)
    await engine.cleanup()


@pytest.mark.parametrize(
    ("files", "error", "reason"),
    [
        ({}, NotFound, "sim.json"),
        ({"sim.json": "{"}, InvalidRequest, "not JSON"),
        ({"sim.json": "[]"}, InvalidRequest, "object"),
        (
            {"sim.json": '{"word_ids": ["a"], "context_length": 9}'},
            InvalidRequest,
            "word_ids",
        ),
        ({"sim.json": '{"word_ids": [5], "context_length": 1}'}, InvalidRequest, "context_length"),
        (
            {
                "sim.json": '{"word_ids": [5], "context_length": 9}',
                "generation_config.json": "{}",
            },
            InvalidRequest,
            "eos_token_id",
        ),
    ],
)
@pytest.mark.row("S4-44")
async def test_a_bad_model_folder_fails_the_start_by_name_and_cleanup_still_works(
    tmp_path: Path, files: dict[str, str], error: type[MeshError], reason: str
) -> None:
    for name, text in {"generation_config.json": '{"eos_token_id": 2}', **files}.items():
        (tmp_path / name).write_text(text)
    engine = SimEngine(SimConfig(model_dir=tmp_path))

    with pytest.raises(error, match=reason) as raised:
        await engine.start(1)

    assert raised.value.field == "model_path"
    await engine.cleanup()


async def test_a_folder_with_one_eos_id_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "sim.json").write_text(json.dumps({"word_ids": [5, 6], "context_length": 64}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))

    assert load_sim_model(tmp_path) == SimModel((5, 6), (2,), 64)


@pytest.mark.row("S4-46")
async def test_cleanup_twice_is_cleanup_once_also_without_a_start() -> None:
    never_started = SimEngine(SimConfig(), model=MODEL)
    await never_started.cleanup()
    async with running() as engine:
        await engine.cleanup()
        await engine.cleanup()

        with pytest.raises(Unavailable, match="shut down"):
            await outputs_of(engine, request())


async def test_requests_before_start_are_rejected_and_a_second_start_is_a_conflict() -> None:
    engine = SimEngine(SimConfig(), model=MODEL)
    with pytest.raises(Unavailable, match="not started"):
        await outputs_of(engine, request())
    with pytest.raises(Conflict):
        _ = engine.blocks

    async with running() as started:
        with pytest.raises(Conflict, match="already started"):
            await started.start(1)


async def test_cleanup_ends_open_streams_with_worker_lost() -> None:
    async with running(SimConfig(), ManualTime()) as engine:
        generator = engine.generate(request(), context())
        waiting = asyncio.ensure_future(anext(generator))
        await turns()

        await engine.cleanup()

        with pytest.raises(WorkerLost) as raised:
            await waiting
        assert raised.value.retryable
        assert is_idle(engine)


# Streams.


@pytest.mark.row("S4-27", "S4-28", "S4-30")
async def test_concurrent_requests_each_get_their_own_output_and_one_terminal_chunk() -> None:
    async with running() as engine:
        prompts = [[seed, seed + 1] for seed in range(50)]
        stop = StopConditions(max_tokens=150)
        outputs = await asyncio.gather(
            *(run(engine, request(prompt, stop=stop)) for prompt in prompts)
        )

        assert [tokens for tokens, _ in outputs] == [
            TOKEN_ORACLE.continue_tokens(prompt, 150) for prompt in prompts
        ]
        assert {end.finish_reason for _, end in outputs} == {FinishReason.EOS, FinishReason.LENGTH}
        assert engine.counters["finished"] == 50
        assert is_idle(engine)


@pytest.mark.row("S4-36")
async def test_a_stream_does_not_depend_on_later_changes_of_its_request() -> None:
    async with running(SimConfig(), at := ManualTime()) as engine:
        asked = request()
        collecting = asyncio.ensure_future(outputs_of(engine, asked))
        del engine
        await turns()
        asked.token_ids = TokenIds.of([9])
        asked.stop_conditions = StopConditions(max_tokens=1)
        del asked
        for _ in range(10):
            await at.advance(0.02)

    tokens = [token for output in collecting.result() for token in output.token_ids]
    assert tokens == TOKEN_ORACLE.continue_tokens(PROMPT, 8)


@pytest.mark.row("S4-34")
async def test_the_terminal_chunk_counts_tokens_and_actual_cache_hits() -> None:
    async with running() as engine:
        asked = request(range(40), stop=StopConditions(max_tokens=8, ignore_eos=True))
        first = (await run(engine, asked))[1].completion_usage
        again = (await run(engine, asked))[1].completion_usage

    assert first is not None
    assert again is not None
    assert (first.prompt_tokens, first.completion_tokens, first.total_tokens) == (40, 8, 48)
    assert first.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert again.prompt_tokens_details is not None
    assert again.prompt_tokens_details.cached_tokens == 32


async def test_the_first_token_comes_alone_and_all_others_of_a_tick_in_one_chunk() -> None:
    config = SimConfig(timing=Timing(speedup=1e6))
    async with running(config) as engine:
        stop = StopConditions(max_tokens=300, ignore_eos=True)
        outputs = await outputs_of(engine, request(stop=stop))

    assert [len(output.token_ids) for output in outputs] == [1, 299]


async def test_tokens_arrive_at_the_pace_of_the_clock_and_late_ones_together() -> None:
    at = ManualTime()
    timing = Timing(base_s=1.0, prefill_token_s=0, decode_seq_s=0, kv_token_s=0)
    async with running(SimConfig(timing=timing), at) as engine:
        generator = engine.generate(request(), context())
        lengths = []
        for seconds in (1.0, 1.0, 3.0):
            pending = asyncio.ensure_future(anext(generator))
            await turns()
            assert not pending.done()
            await at.advance(seconds)
            lengths.append(len((await pending).token_ids))
        await generator.aclose()

    assert lengths == [1, 1, 3]


async def test_an_idle_engine_wakes_no_task() -> None:
    at = ManualTime()
    async with running(SimConfig(timing=AT_ONCE), at) as engine:
        await outputs_of(engine, request())
        slept = at.sleeps

        for _ in range(50):
            await at.advance(1.0)

        assert at.sleeps == slept
        assert engine.counters["steps"] == 8


async def test_the_engine_yields_to_the_loop_while_it_is_behind() -> None:
    async with running() as engine:
        stop = StopConditions(max_tokens=30_000, ignore_eos=True)
        turns_taken = 0
        answering = asyncio.ensure_future(outputs_of(engine, request(stop=stop)))
        # Ends: the request has a token limit.
        while not answering.done():
            await asyncio.sleep(0)
            turns_taken += 1

    assert turns_taken > 30


# Stops.


@pytest.mark.row("S4-29")
async def test_a_stop_ends_a_silent_prefill_with_a_cancelled_chunk_and_no_step_passes() -> None:
    at = ManualTime()
    async with running(SimConfig(), at) as engine:
        ctx = context()
        collecting = asyncio.ensure_future(outputs_of(engine, request(range(5000)), ctx))
        await turns()
        assert engine.loads()[0].running == 1

        ctx.stop_generating("client gone")
        await until(collecting.done, "the cancelled chunk")

        outputs = collecting.result()
        assert [output.finish_reason for output in outputs] == [FinishReason.CANCELLED]
        assert (engine.counters["cancelled"], engine.counters["steps"]) == (1, 0)
        assert is_idle(engine)


async def test_a_stop_frees_slot_and_blocks_of_an_unread_stream() -> None:
    at = ManualTime()
    async with running(SimConfig(), at) as engine:
        ctx = context()
        generator = engine.generate(request(stop=StopConditions(max_tokens=500)), ctx)
        first = asyncio.ensure_future(anext(generator))
        await turns()
        await at.advance(0.01)
        await first

        ctx.stop_generating()
        await turns()

        load = engine.loads()[0]
        assert (load.running, load.kv_used_blocks) == (0, 0)
        last = await anext(generator)
        assert last.finish_reason is FinishReason.CANCELLED
        assert last.completion_usage is not None
        assert last.completion_usage.completion_tokens == 1
        await generator.aclose()


async def test_a_request_stopped_before_its_start_is_cancelled_at_once() -> None:
    async with running() as engine:
        ctx = context()
        ctx.kill()

        outputs = await outputs_of(engine, request(), ctx)

        assert [output.finish_reason for output in outputs] == [FinishReason.CANCELLED]
        assert is_idle(engine)


@pytest.mark.row("S4-39")
async def test_closing_the_generator_early_frees_slot_and_blocks_at_once() -> None:
    at = ManualTime()
    async with running(SimConfig(), at) as engine:
        generator = engine.generate(request(range(100), stop=StopConditions()), context())
        first = asyncio.ensure_future(anext(generator))
        await turns()
        await at.advance(0.05)
        await first
        assert engine.loads()[0].kv_used_blocks > 0

        await generator.aclose()

        assert engine.counters["closed"] == 1
        assert is_idle(engine)


async def test_cancelling_the_reading_task_frees_all_resources() -> None:
    async with running(SimConfig(), ManualTime()) as engine:
        collecting = asyncio.ensure_future(outputs_of(engine, request()))
        await turns()
        collecting.cancel()
        await asyncio.wait([collecting])

        assert collecting.cancelled()
        assert is_idle(engine)


@pytest.mark.row("S4-37")
async def test_abort_has_no_effect_beyond_the_stop() -> None:
    async with running() as engine:
        ctx = context()
        await engine.abort(ctx)
        assert len(await outputs_of(engine, request(), ctx)) >= 1
        await engine.drain()


# Stop conditions.


async def finish_of(engine: SimEngine, stop: StopConditions, **more: Any) -> tuple[int, object]:
    tokens, end = await run(engine, request(stop=stop, **more))
    assert tokens == TOKEN_ORACLE.continue_tokens(PROMPT, len(tokens), ignore_eos=True)
    return len(tokens), end.finish_reason


async def test_eos_ends_the_output_unless_it_is_ignored_or_before_min_tokens() -> None:
    natural = len(TOKEN_ORACLE.continue_tokens(PROMPT, 10_000))
    async with running() as engine:
        plain = StopConditions(max_tokens=500)
        ignored = StopConditions(max_tokens=500, ignore_eos=True)
        held = StopConditions(max_tokens=500, min_tokens=natural + 1)

        assert await finish_of(engine, plain) == (natural, FinishReason.EOS)
        assert await finish_of(engine, ignored) == (500, FinishReason.LENGTH)
        assert (await finish_of(engine, held))[0] > natural


async def test_stop_tokens_end_the_output_and_hidden_ones_are_excluded() -> None:
    oracle = TOKEN_ORACLE.continue_tokens(PROMPT, 20)
    async with running() as engine:
        for stop, length, reason in (
            (StopConditions(stop_token_ids_hidden=(oracle[4],)), 4, oracle[4]),
            (StopConditions(stop_token_ids_visible=(oracle[4],)), 5, oracle[4]),
        ):
            tokens, end = await run(engine, request(stop=stop))
            assert tokens == oracle[:length]
            assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, reason)
            assert end.completion_usage is not None
            assert end.completion_usage.completion_tokens == length


async def test_ids_of_the_request_count_as_eos_and_ignore_eos_ignores_all_stop_tokens() -> None:
    oracle = TOKEN_ORACLE.continue_tokens(PROMPT, 20)
    hidden = StopConditions(max_tokens=9, stop_token_ids_hidden=(oracle[4],))
    ignored = StopConditions(max_tokens=9, ignore_eos=True, stop_token_ids_visible=(oracle[4],))
    async with running() as engine:
        eos = (oracle[4],)
        assert await finish_of(engine, hidden, eos_token_ids=eos) == (4, FinishReason.EOS)
        assert await finish_of(engine, ignored, eos_token_ids=eos) == (9, FinishReason.LENGTH)


async def test_output_ends_at_the_context_length_and_a_prompt_that_fills_it_is_rejected() -> None:
    async with running(SimConfig(timing=AT_ONCE, context_length=50)) as engine:
        stop = StopConditions(ignore_eos=True)
        tokens, end = await run(engine, request(range(40), stop=stop))
        assert (len(tokens), end.finish_reason) == (10, FinishReason.LENGTH)

        with pytest.raises(PromptTooLong, match="50") as raised:
            await outputs_of(engine, request(range(50)))
        assert raised.value.field == "token_ids"


async def test_a_cache_smaller_than_the_context_bounds_sequences_as_well() -> None:
    config = SimConfig(timing=AT_ONCE, total_kv_blocks=3)
    async with running(config) as engine:
        stop = StopConditions(ignore_eos=True)
        assert len((await run(engine, request(range(40), stop=stop)))[0]) == 8


# Fields.

REFUSED: dict[str, dict[str, Any]] = {
    "sampling_options.n": {"sampling_options": SamplingOptions(n=2)},
    "sampling_options.best_of": {"sampling_options": SamplingOptions(best_of=2)},
    "sampling_options.use_beam_search": {"sampling_options": SamplingOptions(use_beam_search=True)},
    "sampling_options.guided_decoding.backend": {
        "sampling_options": SamplingOptions(guided_decoding=GuidedDecoding(regex="a", backend="x"))
    },
    "prompt_embeds": {"prompt_embeds": "AAAA"},
    "multi_modal_data": {"multi_modal_data": {"image_url": (MediaUrl("https://a/b"),)}},
    "extra_args": {"extra_args": {"a": 1}},
    "bootstrap_info": {"bootstrap_info": BootstrapInfo("h", 1, 2)},
    "prefill_result": {"prefill_result": PrefillResult({})},
    "routing.lora_name": {"routing": RoutingHints(lora_name="french")},
}


@pytest.mark.row("S4-31")
@pytest.mark.parametrize("name", REFUSED)
async def test_unsupported_fields_are_rejected_by_name(name: str) -> None:
    async with running() as engine:
        with pytest.raises(Unsupported) as raised:
            await outputs_of(engine, request(**REFUSED[name]))

        assert raised.value.field == name
        assert (engine.counters["rejected"], engine.counters["accepted"]) == (1, 0)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (request([]), "token_ids"),
        (request(stop=StopConditions(max_tokens=0)), "stop_conditions.max_tokens"),
        (request(routing=RoutingHints(dp_rank=1)), "routing.dp_rank"),
    ],
)
async def test_invalid_requests_are_rejected_by_name(asked: PreprocessedRequest, name: str) -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest) as raised:
            await outputs_of(engine, asked)

        assert raised.value.field == name


async def generated(max_tokens: int = 8, **options: Any) -> list[int]:
    async with running() as engine:
        asked = request(
            stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
            sampling_options=SamplingOptions(**options),
        )
        return (await run(engine, asked))[0]


async def test_the_sampler_chooses_the_token_of_the_highest_logit() -> None:
    plain = await generated()
    assert plain == TOKEN_ORACLE.continue_tokens(PROMPT, 8, ignore_eos=True)
    assert await generated(temperature=1.7, top_p=0.1, top_k=3, min_p=0.5) == plain


async def test_a_seed_selects_an_output_unless_the_temperature_is_0() -> None:
    first, second = await generated(seed=1), await generated(seed=2)
    assert first == await generated(seed=1, temperature=1.0)
    assert len({tuple(await generated()), tuple(first), tuple(second)}) == 3
    assert await generated(seed=1, temperature=0.0) == await generated()


async def test_a_logit_bias_excludes_and_forces_tokens() -> None:
    plain = await generated()
    changed = await generated(logit_bias={plain[0]: -100.0})
    assert changed[0] not in (plain[0], MODEL.eos_ids[0])
    assert await generated(logit_bias={plain[0]: 0.25}) == plain
    forced = MODEL.word_ids[-1]
    assert await generated(logit_bias={forced: 100.0}) == [forced] * 8
    with pytest.raises(InvalidRequest, match="not in the vocabulary of") as raised:
        await generated(logit_bias={MODEL.vocab_size: 1.0})
    assert raised.value.field == "sampling_options.logit_bias"


@pytest.mark.parametrize("name", ["presence", "frequency", "repetition"])
async def test_a_penalty_separates_repeated_tokens(name: str) -> None:
    penalty: dict[str, Any] = {f"{name}_penalty": 1.9}
    first, second = MODEL.word_ids[:2]
    forced = {first: 30.0, second: 29.75}
    assert set(await generated(logit_bias=forced)) == {first}
    assert {first, second} <= set(await generated(logit_bias=forced, **penalty))


async def test_the_least_repetition_penalty_leaves_log_probabilities_finite() -> None:
    async with running() as engine:
        outputs = await outputs_of(
            engine,
            request(
                sampling_options=SamplingOptions(repetition_penalty=5e-324),
                output_options=OutputOptions(logprobs=2),
            ),
        )
    logprobs = [one for output in outputs for one in output.logprobs]
    assert logprobs
    assert all(math.isfinite(one.logprob) for one in logprobs)


async def test_a_negative_penalty_repeats_the_first_token() -> None:
    tokens = await generated(presence_penalty=-2.0, frequency_penalty=-2.0, max_tokens=30)
    assert len(set(tokens[1:])) < len(set(TOKEN_ORACLE.continue_tokens(PROMPT, 29)))


@pytest.mark.parametrize("alternatives", [None, 0, 5])
async def test_log_probabilities_are_those_of_the_logits(alternatives: int | None) -> None:
    async with running() as engine:
        outputs = await outputs_of(
            engine, request(output_options=OutputOptions(logprobs=alternatives))
        )

    tokens = [token for output in outputs for token in output.token_ids]
    logprobs = [one for output in outputs for one in output.logprobs]
    if alternatives is None:
        assert logprobs == []
        return
    assert [one.token_id for one in logprobs] == tokens
    assert all(-4 < one.logprob < 0 for one in logprobs)
    assert [len(one.top) for one in logprobs] == [alternatives] * len(tokens)
    for one in logprobs:
        assert sum(math.exp(other.logprob) for other in one.top) < 1
        assert one.top[:1] in ((), (TopLogprob(one.token_id, one.logprob),))


async def test_a_configured_adapter_has_a_cache_of_its_own() -> None:
    config = SimConfig(timing=AT_ONCE, loras=frozenset({"french"}))
    async with running(config) as engine:
        french = RoutingHints(lora_name="french")
        prompt = list(range(40))
        await outputs_of(engine, request(prompt))
        await outputs_of(engine, request(prompt, routing=french))
        assert engine.counters["cached_tokens"] == 0
        await outputs_of(engine, request(prompt, routing=french))
        assert engine.counters["cached_tokens"] == 32


async def test_the_output_of_an_adapter_differs_from_its_models() -> None:
    config = SimConfig(timing=AT_ONCE, loras=frozenset({"french"}))
    async with running(config) as engine:
        french = RoutingHints(lora_name="french")
        tokens, _ = await run(engine, request(routing=french))

    assert tokens == TOKEN_ORACLE.continue_tokens(PROMPT, 8, lora_name="french")
    assert tokens != TOKEN_ORACLE.continue_tokens(PROMPT, 8)


async def test_the_larger_priority_goes_first_and_the_hint_outweighs_the_context() -> None:
    at = ManualTime()
    async with running(SimConfig(max_num_seqs=1), at) as engine:
        order: list[str] = []

        async def ask(name: str, priority: int | None, hint: int | None) -> None:
            asked = request(routing=RoutingHints(priority=hint))
            await outputs_of(engine, asked, context(name, priority=priority))
            order.append(name)

        async with asyncio.TaskGroup() as group:
            for name, priority, hint in (("a", None, None), ("b", 5, None), ("c", 9, 1)):
                group.create_task(ask(name, priority, hint))
            for _ in range(40):
                await at.advance(0.02)

    assert order == ["b", "c", "a"]


async def test_a_full_queue_rejects_with_a_retry_time() -> None:
    config = SimConfig(max_num_seqs=1, max_waiting=2)
    async with running(config, ManualTime()) as engine:
        generators = [engine.generate(request(), context()) for _ in range(3)]
        waiting = []
        for generator in generators:
            waiting.append(asyncio.ensure_future(anext(generator)))
            await turns()
        assert (engine.loads()[0].running, engine.loads()[0].waiting) == (1, 2)
        assert engine.loads()[0].waiting_tokens == 6

        with pytest.raises(Overloaded) as raised:
            await outputs_of(engine, request())

        assert raised.value.retry_after_s is not None
        assert raised.value.retry_after_s > 0
        assert (engine.counters["rejected"], engine.counters["overloaded"]) == (1, 1)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert is_idle(engine)


@pytest.mark.row("S2-78")
async def test_a_probe_gets_one_local_token_and_does_not_touch_the_cache() -> None:
    events: list[PagesStored | PagesRemoved] = []
    async with running() as engine:
        engine.kv_event_sink = events.extend
        probe = request(
            range(40),
            is_probe=True,
            bootstrap_info=BootstrapInfo("h", 1, 2),
            prefill_result=PrefillResult({}),
        )
        tokens, end = await run(engine, probe)
        await run(engine, probe)

        assert (len(tokens), end.finish_reason) == (1, FinishReason.LENGTH)
        assert engine.counters["cached_tokens"] == 0
        assert engine.blocks.cached_blocks == 0
        assert events == []


# The cache.


class Sink:
    """A recording sink."""

    def __init__(self) -> None:
        self.events: list[ExternalEvent] = []

    def take(self, events: Iterable[ExternalEvent]) -> None:
        self.events += events

    def record_loss(self, rank: int, why: str) -> None: ...

    def reset(self, rank: int) -> None: ...


async def test_a_sink_receives_the_blocks_of_the_cache_as_pages() -> None:
    sink = Sink()
    async with running() as engine:
        assert isinstance(engine, PagedEngine)
        engine.publish_to(sink)
        await outputs_of(engine, request(range(40)))
        (stored,) = [one for one in sink.events if isinstance(one, PagesStored) and not one.parent]
        assert list(stored.hashes) == engine.blocks.names()[: len(stored.hashes)]
        assert stored.page_size == engine.kv_event_format.page_size == engine.config.block_size
        await engine.flush_cache()
        assert isinstance(sink.events[-1], PagesRemoved)


async def test_a_sink_is_rejected_if_the_cache_is_not_empty() -> None:
    async with running() as engine:
        await outputs_of(engine, request(range(40)))
        with pytest.raises(Conflict):
            engine.publish_to(Sink())


async def test_cache_changes_are_reported_in_order_and_a_flush_removes_all() -> None:
    events: list[PagesStored | PagesRemoved] = []
    async with running() as engine:
        engine.kv_event_sink = events.extend
        await outputs_of(engine, request(range(40)))

        stored = [one for one in events if isinstance(one, PagesStored)]
        assert [name for one in stored for name in one.hashes] == engine.blocks.names()
        assert len(engine.blocks.names()) == 2
        assert await engine.flush_cache() == 2
        assert engine.blocks.names() == []
        assert len(events) == len(stored) + 1


async def test_without_prefix_caching_no_block_is_cached_or_published() -> None:
    engine = SimEngine(SimConfig(timing=AT_ONCE, prefix_caching=False), model=MODEL)
    config = await engine.start(1)
    await outputs_of(engine, request(range(40)))

    assert (config.kv_index, config.kv_index_reason) == ("none", "prefix caching is off")
    assert engine.blocks.cached_blocks == 0
    await engine.cleanup()


async def test_with_few_blocks_requests_are_preempted_without_changing_their_output() -> None:
    config = SimConfig(timing=AT_ONCE, total_kv_blocks=12, block_size=4)
    async with running(config) as engine:
        stop = StopConditions(max_tokens=30, ignore_eos=True)
        outputs = await asyncio.gather(
            *(run(engine, request([seed] * 9, stop=stop)) for seed in range(6))
        )

        assert [tokens for tokens, _ in outputs] == [
            TOKEN_ORACLE.continue_tokens([seed] * 9, 30, ignore_eos=True) for seed in range(6)
        ]
        assert engine.counters["preempted"] > 0
        assert is_idle(engine)


# Faults.


async def test_a_frozen_engine_takes_no_step_until_it_is_unfrozen() -> None:
    at = ManualTime()
    async with running(SimConfig(), at) as engine:
        collecting = asyncio.ensure_future(outputs_of(engine, request()))
        await turns()
        await at.advance(0.01)
        engine.freeze()
        await at.advance(60.0)
        frozen = engine.loads()[0]
        await at.advance(60.0)
        assert engine.loads()[0].engine_step == frozen.engine_step
        assert frozen.running == 1

        engine.unfreeze()
        await turns()
        assert not collecting.done()
        for _ in range(10):
            await at.advance(0.01)

        outputs = await collecting
        assert sum(len(output.token_ids) for output in outputs) == 8


async def test_a_request_on_a_frozen_engine_can_be_stopped() -> None:
    async with running() as engine:
        engine.freeze()
        ctx = context()
        collecting = asyncio.ensure_future(outputs_of(engine, request(), ctx))
        await turns()

        ctx.stop_generating()
        await until(collecting.done, "the cancelled chunk")

        assert collecting.result()[-1].finish_reason is FinishReason.CANCELLED
        assert is_idle(engine)


async def test_after_a_failure_each_request_raises_its_own_copy_of_the_error() -> None:
    async with running(SimConfig(), ManualTime()) as engine:
        tasks = [asyncio.ensure_future(outputs_of(engine, request())) for _ in range(2)]
        await turns()

        engine.inject_failure(WorkerLost("the accelerator fell off the bus", retryable=True))

        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [WorkerLost, WorkerLost]
        assert errors[0] is not errors[1]
        with pytest.raises(WorkerLost, match="bus"):
            await outputs_of(engine, request())
        assert (engine.counters["failed"], engine.counters["rejected"]) == (2, 1)
        assert is_idle(engine)


async def test_when_stepping_itself_fails_no_stream_hangs() -> None:
    def broken_sink(_: Sequence[PagesStored | PagesRemoved]) -> None:
        raise RuntimeError("sink")

    async with running() as engine:
        engine.kv_event_sink = broken_sink

        asked = request(range(40), stop=StopConditions(ignore_eos=True))

        with pytest.raises(InternalError, match="the engine failed"):
            await outputs_of(engine, asked)


# Configuration.


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"block_size": 0}, "block_size"),
        ({"total_kv_blocks": 0}, "total_kv_blocks"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"context_length": 1}, "context_length"),
        ({"startup_s": -1.0}, "startup_s"),
    ],
)
def test_an_invalid_configuration_is_rejected_by_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SimConfig(**change)

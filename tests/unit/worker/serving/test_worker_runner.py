"""The runner with scripted engines: contract, stops, deadlines, counters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MeshError,
    PromptTooLong,
    Unavailable,
    Unsupported,
)
from common.kv.load import Load
from common.request.preprocessed import BootstrapInfo, TokenIds, usage
from common.request.token_stream import LegRequest
from tests.kit.requests import leg_request, preprocessed_request
from tests.sim.loop import run_virtually
from worker_svc.engines.contract import (
    EngineConfig,
    FinishReason,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
)
from worker_svc.serving.runner import ABORT_GRACE_S, Runner

WAIT_S = 20.0

Script = Callable[[GenerateContext], AsyncGenerator[LLMEngineOutput, None]]


class ScriptedEngine:
    """Runs one script per request id; records its calls."""

    def __init__(self, **scripts: Script) -> None:
        self.scripts = scripts
        self.aborted: list[str] = []
        self.closed: list[str] = []
        self.contexts: dict[str, GenerateContext] = {}

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="scripted")

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self.contexts[ctx.id] = ctx
        try:
            async for output in self.scripts[ctx.id](ctx):
                yield output
        finally:
            self.closed.append(ctx.id)

    async def abort(self, ctx: GenerateContext) -> None:
        self.aborted.append(ctx.id)

    async def drain(self) -> None: ...

    async def cleanup(self) -> None: ...

    def loads(self) -> Sequence[Load]:
        return (Load(),)


async def two_tokens(ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
    yield chunk.token(7)
    yield chunk.token(8)
    yield chunk.stop()


async def until_stopped(ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
    yield chunk.token(1)
    await ctx.stopped()
    yield chunk.cancelled()


async def ignores_stops(ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
    yield chunk.token(1)
    await asyncio.Event().wait()


async def after_terminal(ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
    yield chunk.stop()
    yield chunk.token(1)


async def without_terminal(ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
    yield chunk.token(1)


def raising(error: BaseException) -> Script:
    async def script(ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
        yield chunk.token(1)
        raise error

    return script


class Emitted:
    """Chunks of one request; `first` is set at the first."""

    def __init__(self) -> None:
        self.chunks: list[LLMEngineOutput] = []
        self.first = asyncio.Event()

    def __call__(self, output: LLMEngineOutput) -> None:
        self.chunks.append(output)
        self.first.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for one in self.chunks for token in one.token_ids]


def assert_idle(runner: Runner) -> None:
    counts = runner.counters
    ends = sum(counts[name] for name in ("finished", "stopped", "failed", "closed"))
    assert counts["accepted"] == ends, dict(counts)
    assert runner.open_requests == 0


@asynccontextmanager
async def running(
    runner: Runner, request_id: str, **parts: Any
) -> AsyncIterator[tuple[int, asyncio.Task[LLMEngineOutput]]]:
    """A request after its first chunk: key and task; the task has ended on exit."""
    key, emitted = runner.admit(leg_request(request_id, **parts)), Emitted()
    task = asyncio.create_task(runner.run(key, emitted))
    try:
        async with asyncio.timeout(WAIT_S):
            await emitted.first.wait()
        yield key, task
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=WAIT_S)


@pytest.mark.row("S4-27", "S4-30")
async def test_chunks_are_emitted_and_the_terminal_one_is_returned() -> None:
    runner = Runner(ScriptedEngine(a=two_tokens))
    emitted = Emitted()
    terminal = await runner.run(runner.admit(leg_request("a")), emitted)
    assert emitted.token_ids == [7, 8]
    assert terminal.finish_reason is FinishReason.STOP
    assert dict(runner.counters) == {"accepted": 1, "finished": 1}


@pytest.mark.row("S4-34")
@pytest.mark.parametrize("counted", [None, usage(3, 0)])
async def test_usage_on_the_terminal_chunk_is_optional(counted: Any) -> None:
    async def script(ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
        yield LLMEngineOutput(finish_reason=FinishReason.LENGTH, completion_usage=counted)

    runner = Runner(ScriptedEngine(a=script))
    terminal = await runner.run(runner.admit(leg_request("a")), Emitted())
    assert terminal.completion_usage == counted


@pytest.mark.row("S4-28", "S4-35")
@pytest.mark.parametrize("broken", [after_terminal, without_terminal])
async def test_a_contract_violation_fails_that_request_only(broken: Script) -> None:
    engine = ScriptedEngine(a=broken, b=until_stopped)
    runner = Runner(engine)
    async with running(runner, "b") as (key, other):
        with pytest.raises(InternalError, match="request a"):
            await runner.run(runner.admit(leg_request("a")), Emitted())
        await runner.abort(key, "test")
        assert (await other).finish_reason is FinishReason.CANCELLED
    assert runner.counters["failed"] == runner.counters["stopped"] == 1
    assert engine.closed == ["a", "b"]
    assert_idle(runner)


@pytest.mark.row("S4-31", "S4-32")
@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("no", "sampling_options.n", reason="WHY", metadata={"k": "v"}),
        PromptTooLong("long", field="token_ids"),
        Unavailable("later", 2.5),
    ],
)
async def test_a_typed_error_keeps_its_type_and_fields(error: MeshError) -> None:
    engine = ScriptedEngine(a=raising(error))
    runner = Runner(engine)
    with pytest.raises(MeshError) as caught:
        await runner.run(runner.admit(leg_request("a")), Emitted())
    assert caught.value is error
    assert engine.closed == ["a"]  # and not polled again
    assert runner.counters["failed"] == 1


@pytest.mark.row("S4-27")
async def test_an_engine_may_reject_before_it_creates_a_stream() -> None:
    class Refusing(ScriptedEngine):
        def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:
            raise Unsupported("sampling_options.n", "exactly one")

    runner = Runner(Refusing())
    with pytest.raises(Unsupported) as caught:
        await runner.run(runner.admit(leg_request("a")), Emitted())
    assert caught.value.field == "sampling_options.n"
    assert_idle(runner)


@pytest.mark.row("S4-33")
async def test_an_error_chunk_fails_the_request_without_a_type() -> None:
    async def script(ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
        yield chunk.error("the CUDA device is lost")

    runner = Runner(ScriptedEngine(a=script))
    with pytest.raises(InternalError, match="the CUDA device is lost"):
        await runner.run(runner.admit(leg_request("a")), Emitted())
    assert runner.counters["failed"] == 1


# A cancellation by the engine itself: the request was neither stopped nor cancelled.
@pytest.mark.parametrize(
    "error", [KeyError("secret"), TimeoutError("secret"), asyncio.CancelledError("secret")]
)
async def test_an_untyped_exception_is_an_internal_error_without_its_text(
    error: BaseException,
) -> None:
    runner = Runner(ScriptedEngine(a=raising(error)))
    with pytest.raises(InternalError) as caught:
        await runner.run(runner.admit(leg_request("a")), Emitted())
    assert "secret" not in caught.value.message
    assert dict(runner.counters) == {"accepted": 1, "failed": 1}


@pytest.mark.row("S4-29", "S4-37")
async def test_a_stop_aborts_once_and_ends_the_stream_gracefully() -> None:
    engine = ScriptedEngine(a=until_stopped)
    runner = Runner(engine)
    async with running(runner, "a") as (key, task):
        await runner.abort(key, "client_gone")
        await runner.abort(key, "again")
        assert (await task).finish_reason is FinishReason.CANCELLED
        await runner.abort(key, "too late")
    assert engine.aborted == ["a"]
    assert engine.contexts["a"].stop_reason == "client_gone"
    assert dict(runner.counters) == {"accepted": 1, "stopped": 1}


class Gate:
    """A leg that sends tokens on command. ignores_stops: it ignores stops."""

    def __init__(self, *, ignores_stops: bool = False) -> None:
        self.opened = asyncio.Event()
        self._ignores_stops = ignores_stops

    async def __call__(self, ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
        await self.opened.wait()
        yield chunk.token(1)
        if self._ignores_stops:
            await asyncio.Event().wait()
        await ctx.stopped()
        yield chunk.cancelled()


@pytest.mark.row("S4-04", "S4-37")
@pytest.mark.parametrize(
    ("role", "phase"), [("aggregated", "decode"), ("decode", "")], ids=["by phase", "by role"]
)
@pytest.mark.parametrize("side_channel", [False, True], ids=["by a chunk", "by a side channel"])
async def test_a_decode_leg_is_aborted_after_its_first_token(
    role: str, phase: str, side_channel: bool
) -> None:
    gate = Gate(ignores_stops=True)
    engine = ScriptedEngine(a=gate)
    runner = Runner(engine, role=role)
    key = runner.admit(leg_request("a", phase=phase))
    task = asyncio.create_task(runner.run(key, Emitted()))
    await asyncio.sleep(0)
    await runner.abort(key, "client_gone")
    assert engine.contexts["a"].is_stopped, "the slot ends at once"
    assert engine.aborted == [], "its KV may be in flight"
    if side_channel:
        engine.contexts["a"].notify_first_token()
    else:
        gate.opened.set()
    async with asyncio.timeout(WAIT_S):
        assert (await task).finish_reason is FinishReason.CANCELLED
    assert engine.aborted == ["a"]
    assert runner.counters["aborts_deferred"] == 1
    assert_idle(runner)


@pytest.mark.row("S4-04", "S4-37")
async def test_a_decode_leg_that_ends_without_a_token_is_never_aborted() -> None:
    gate = Gate()
    engine = ScriptedEngine(a=gate)
    runner = Runner(engine)
    key = runner.admit(leg_request("a", phase="decode"))
    task = asyncio.create_task(runner.run(key, Emitted()))
    await asyncio.sleep(0)
    began = asyncio.get_running_loop().time()
    await runner.abort(key, "client_gone")
    async with asyncio.timeout(WAIT_S):
        assert (await task).finish_reason is FinishReason.CANCELLED
    assert asyncio.get_running_loop().time() - began >= ABORT_GRACE_S / 2, (
        "the grace period has passed"
    )
    gate.opened.set()
    engine.contexts["a"].notify_first_token()
    await asyncio.sleep(0.01)
    assert engine.aborted == []
    assert engine.closed == ["a"]
    assert_idle(runner)


@pytest.mark.row("S4-05", "S4-06")
async def test_other_legs_have_no_gate_and_are_aborted_at_once() -> None:
    for phase in ("", "prefill"):
        gate = Gate()
        engine = ScriptedEngine(a=gate)
        runner = Runner(engine, role="decode" if phase else "aggregated")
        key = runner.admit(leg_request("a", phase=phase))
        task = asyncio.create_task(runner.run(key, Emitted()))
        await asyncio.sleep(0)
        assert engine.contexts["a"].first_token is None
        await runner.abort(key, "client_gone")
        assert engine.aborted == ["a"]
        await task


@pytest.mark.row("S4-37")
async def test_a_request_that_ends_regularly_is_never_aborted() -> None:
    engine = ScriptedEngine(a=two_tokens)
    runner = Runner(engine)
    await runner.run(runner.admit(leg_request("a")), Emitted())
    assert engine.aborted == []


@pytest.mark.row("S4-38")
async def test_a_dropped_stream_is_not_aborted() -> None:
    engine = ScriptedEngine(a=ignores_stops)
    runner = Runner(engine)
    async with running(runner, "a") as (_, task):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert engine.aborted == []
    assert runner.counters["closed"] == 1


@pytest.mark.row("S4-39")
async def test_closing_the_stream_closes_the_generator_and_frees_the_slot() -> None:
    engine = ScriptedEngine(a=ignores_stops)
    runner = Runner(engine)
    async with running(runner, "a") as (_, task):
        assert runner.open_requests == 1
        task.cancel()
        await asyncio.wait([task], timeout=WAIT_S)
        assert engine.closed == ["a"]
        async with asyncio.timeout(WAIT_S):
            await runner.wait_idle()
    assert_idle(runner)


@pytest.mark.row("S4-39")
async def test_a_task_cancelled_before_its_first_step_frees_the_slot_too() -> None:
    runner = Runner(ScriptedEngine(a=two_tokens))
    key = runner.admit(leg_request("a"))
    task = asyncio.create_task(runner.run(key, Emitted()))
    task.add_done_callback(lambda _: runner.discard(key))
    task.cancel()
    async with asyncio.timeout(WAIT_S):
        await runner.wait_idle()
    assert dict(runner.counters) == {"accepted": 1, "closed": 1}
    runner.discard(key)
    assert_idle(runner)


def test_a_stop_that_the_engine_ignores_is_forced_after_the_grace() -> None:
    engine = ScriptedEngine(a=ignores_stops)
    runner = Runner(engine)

    async def work() -> float:
        loop = asyncio.get_running_loop()
        async with running(runner, "a") as (key, task):
            began = loop.time()
            await runner.abort(key, "client_gone")
            assert (await task).finish_reason is FinishReason.CANCELLED
            return loop.time() - began

    assert run_virtually(work(), until=WAIT_S) == pytest.approx(ABORT_GRACE_S)
    assert engine.closed == ["a"]
    assert dict(runner.counters) == {"accepted": 1, "stopped": 1, "stops_forced": 1}


async def test_a_stop_before_the_run_is_forced_as_well() -> None:
    runner = Runner(ScriptedEngine(a=ignores_stops))
    key = runner.admit(leg_request("a"))
    await runner.abort(key, "early")
    async with asyncio.timeout(WAIT_S):
        terminal = await runner.run(key, Emitted())
    assert terminal.finish_reason is FinishReason.CANCELLED
    assert runner.counters["stops_forced"] == 1


@pytest.mark.parametrize("script", [until_stopped, ignores_stops])
async def test_a_stop_by_the_deadline_is_deadline_exceeded(script: Script) -> None:
    runner = Runner(ScriptedEngine(a=script))
    async with running(runner, "a") as (key, task):
        await runner.abort(key, "deadline")
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(DeadlineExceeded):
                await task
    assert runner.counters["stopped"] == 1


async def test_an_engine_that_fails_to_abort_ends_its_request_nevertheless() -> None:
    class Failing(ScriptedEngine):
        async def abort(self, ctx: GenerateContext) -> None:
            raise RuntimeError("cannot")

    runner = Runner(Failing(a=until_stopped))
    async with running(runner, "a") as (key, task):
        await runner.abort(key, "client_gone")
        assert (await task).finish_reason is FinishReason.CANCELLED


async def test_abort_by_request_id_stops_exactly_its_legs() -> None:
    runner = Runner(ScriptedEngine(a=until_stopped, b=until_stopped))
    async with (
        running(runner, "a") as (_, one),
        running(runner, "a") as (_, two),
        running(runner, "b") as (_, other),
    ):
        assert await runner.abort_request("a", "abort_rpc") == 2
        await asyncio.wait([one, two], timeout=WAIT_S)
        assert not other.done()
        assert await runner.abort_request("unknown", "abort_rpc") == 0


async def test_a_prompt_tokenized_for_another_card_is_rejected() -> None:
    runner = Runner(ScriptedEngine(a=two_tokens), card_checksum="ours")
    with pytest.raises(InvalidRequest) as caught:
        runner.admit(leg_request("a", request=preprocessed_request(card_checksum="theirs")))
    assert (caught.value.field, caught.value.reason) == ("mdc_sum", "CARD_MISMATCH")
    assert "theirs" in caught.value.message
    assert "ours" in caught.value.message
    assert not caught.value.retryable
    for same in ("ours", None):
        await runner.run(
            runner.admit(leg_request("a", request=preprocessed_request(card_checksum=same))),
            Emitted(),
        )
    assert dict(runner.counters) == {"rejected": 1, "accepted": 2, "finished": 2}


async def test_a_draining_worker_rejects_retryably_and_finishes_running_requests() -> None:
    runner = Runner(ScriptedEngine(a=until_stopped, b=two_tokens))
    async with running(runner, "a") as (key, task):
        runner.is_draining = True
        with pytest.raises(Unavailable) as caught:
            runner.admit(leg_request("b"))
        assert (caught.value.retryable, caught.value.reason) == (True, "DRAINING")
        assert not task.done()
        await runner.abort(key, "test")
        await task
    assert_idle(runner)


async def test_a_full_worker_rejects_with_a_retry_time() -> None:
    runner = Runner(ScriptedEngine(a=until_stopped, b=two_tokens), max_requests=1)
    async with running(runner, "a"):
        with pytest.raises(Unavailable) as caught:
            runner.admit(leg_request("b"))
    assert (caught.value.reason, caught.value.retry_after_s) == ("FULL", 1.0)
    assert runner.counters["rejected"] == 1


async def test_openai_bodies_are_rejected_by_a_token_engine() -> None:
    runner = Runner(ScriptedEngine())
    with pytest.raises(Unsupported) as caught:
        runner.admit(LegRequest("a", chat_json=b"{}"))
    assert caught.value.field == "payload"


@pytest.mark.row("S4-07")
async def test_the_first_chunk_with_tokens_fires_the_first_token_signal() -> None:
    fired: list[bool] = []

    async def script(ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
        signal = ctx.first_token
        assert signal is not None
        for output in (LLMEngineOutput(), chunk.token(1), chunk.token(2)):
            fired.append(signal.is_set())
            yield output
        fired.append(signal.is_set())
        yield chunk.length()

    runner = Runner(ScriptedEngine(a=script))
    await runner.run(runner.admit(leg_request("a", phase="decode")), Emitted())
    assert fired == [False, False, True, True]


@pytest.mark.row("S4-07")
@pytest.mark.parametrize("phase", ["", "prefill"])
async def test_other_legs_have_no_first_token_signal(phase: str) -> None:
    engine = ScriptedEngine(a=two_tokens)
    runner = Runner(engine)
    await runner.run(runner.admit(leg_request("a", phase=phase)), Emitted())
    assert engine.contexts["a"].first_token is None


@pytest.mark.row("S4-08")
async def test_an_engine_can_access_all_fields_of_the_context() -> None:
    seen: list[object] = []

    async def script(ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
        yield chunk.token(1)
        await ctx.stopped()
        seen.extend([ctx.id, ctx.is_stopped, ctx.is_killed, ctx.traceparent, ctx.tenant])
        ctx.stop_generating("a second reason does not count")
        ctx.kill()
        await ctx.killed()
        seen.append(ctx.stop_reason)
        yield chunk.cancelled()

    runner = Runner(ScriptedEngine(a=script))
    async with running(runner, "a", traceparent="00-1-2-01", tenant="t") as (key, task):
        await runner.abort(key, "why")
        async with asyncio.timeout(WAIT_S):
            await task
    assert seen == ["a", True, False, "00-1-2-01", "t", "why"]


async def crash(ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
    if not ctx.is_killed:
        raise ValueError("no")
    yield chunk.stop()


async def refuse(ctx: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
    if not ctx.is_killed:
        raise InvalidRequest("no")
    yield chunk.stop()


SCRIPTS: dict[str, tuple[Script, str]] = {
    "finishes": (two_tokens, "finished"),
    "stopped": (until_stopped, "stopped"),
    "dropped": (until_stopped, "closed"),
    "typed": (refuse, "failed"),
    "crash": (crash, "failed"),
    "after": (after_terminal, "failed"),
    "without": (without_terminal, "failed"),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(SCRIPTS)), max_size=12))
def test_the_counters_add_up_for_every_outcome(names: list[str]) -> None:
    async def scenario() -> Runner:
        engine = ScriptedEngine(**{f"r{i}": SCRIPTS[name][0] for i, name in enumerate(names)})
        runner = Runner(engine)
        tasks = []
        for i, name in enumerate(names):
            key, emitted = runner.admit(leg_request(f"r{i}")), Emitted()
            task = asyncio.create_task(runner.run(key, emitted))
            tasks.append(task)
            await emitted.first.wait() if name in ("stopped", "dropped") else None
            if name == "stopped":
                await runner.abort(key, "test")
            elif name == "dropped":
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=WAIT_S)
            for task in tasks:
                task.cancelled() or task.exception()
        assert sorted(engine.closed) == sorted(engine.scripts)
        return runner

    with capture_logs():  # rendering the tracebacks would take most of the time
        runner = asyncio.run(scenario())
    assert_idle(runner)
    for outcome in ("finished", "stopped", "closed", "failed"):
        assert runner.counters[outcome] == sum(SCRIPTS[name][1] == outcome for name in names)


@pytest.mark.parametrize(("role", "before"), [("aggregated", 1), ("prefill", 0), ("decode", 0)])
async def test_a_request_that_the_engine_does_not_report_runs_until_its_first_token(
    role: str, before: int
) -> None:
    runner = Runner(ScriptedEngine(a=until_stopped), role=role)
    key, emitted = runner.admit(leg_request("a")), Emitted()
    assert [load.running for load in runner.loads()] == [before]
    task = asyncio.create_task(runner.run(key, emitted))
    async with asyncio.timeout(WAIT_S):
        await emitted.first.wait()
    assert [load.running for load in runner.loads()] == [0]
    await runner.abort(key, "cancel")
    await task


async def test_the_step_limit_grows_with_prompts_that_the_worker_computes() -> None:
    """KV of a decode leg comes from a prefill worker."""
    remote = PreprocessedRequest(
        token_ids=TokenIds.of([1] * 4000), bootstrap_info=BootstrapInfo("host", 1, 1)
    )
    limits = {}
    for phase in ("decode", "prefill"):
        runner = Runner(ScriptedEngine(a=two_tokens), role=phase)
        runner.observe_steps(0.0)
        await runner.run(runner.admit(leg_request("a")), Emitted())
        for second in (0.1, 0.2, 0.3):
            runner.observe_steps(second)
        runner.admit(LegRequest("long", request=remote, phase=phase))
        runner.observe_steps(0.4)
        limits[phase] = runner.loads()[0].step_limit_ms
    assert limits["decode"] < limits["prefill"]

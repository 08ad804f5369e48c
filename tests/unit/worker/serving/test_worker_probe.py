"""Probes of engines that respond, fail, recover, hang, or are overloaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from common.errors import InternalError, InvalidRequest, MeshError, Overloaded, WorkerLost
from common.kv.load import Load
from common.registry.instances import Role
from common.request.preprocessed import TokenIds
from common.request.token_stream import LegRequest
from common.service.health import HealthReporter
from common.service.lifecycle import Lifecycle
from tests.kit.waiting import until
from worker_svc.engines.contract import (
    EngineConfig,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
)
from worker_svc.engines.sim.config import SimConfig, SimHandoffConfig
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.timing import Timing
from worker_svc.serving.probe import HUNG_PROBES_MAX, EngineProbe
from worker_svc.serving.runner import Runner

WAIT_S = 20.0
IDLE_S = 0.01
NEVER_S = 3600.0


class FakeEngine:
    """Responds by its mode: ok, error, lost, silent, busy. probes: the probes received."""

    def __init__(self, mode: str = "ok") -> None:
        self.mode = mode
        self.probes: list[PreprocessedRequest] = []
        self.steps = 0

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="moody")

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if request.is_probe:
            self.probes.append(request)
        match self.mode:
            case "lost":
                raise WorkerLost("the engine is gone", retryable=True)
            case "busy":
                raise Overloaded(1.0, "too many wait")
            case "broken":
                raise RuntimeError("an internal error")
            case "silent":
                await asyncio.Event().wait()
        if self.mode == "error":
            yield chunk.error("CUDA error")
            return
        yield chunk.token(7)
        yield chunk.stop()

    async def abort(self, ctx: GenerateContext) -> None: ...

    async def drain(self) -> None: ...

    async def cleanup(self) -> None: ...

    def loads(self) -> Sequence[Load]:
        return (Load(engine_step=self.steps),)


@asynccontextmanager
async def watched(
    runner: Runner, *, idle_s: float = IDLE_S, timeout_s: float = 0.05
) -> AsyncIterator[tuple[EngineProbe, list[bool]]]:
    reports: list[bool] = []

    async def report(is_alive: bool) -> None:
        reports.append(is_alive)

    lifecycle = Lifecycle(HealthReporter())
    probe = EngineProbe(runner, report, lifecycle.spawn, idle_s=idle_s, timeout_s=timeout_s)
    task = lifecycle.spawn(probe.run(), name="probe", essential=False)
    try:
        yield probe, reports
        assert not task.done(), task
    finally:
        assert await lifecycle.cancel_tasks(WAIT_S) == []


async def test_a_responsive_idle_engine_is_probed_repeatedly_without_a_report() -> None:
    engine = FakeEngine()
    runner = Runner(engine)
    async with watched(runner, timeout_s=WAIT_S) as (_, reports):
        await until(lambda: len(engine.probes) >= 3, "three probes")
    assert reports == []
    probe = engine.probes[0]
    assert probe.is_probe
    assert (probe.stop_conditions.max_tokens, probe.stop_conditions.ignore_eos) == (1, True)
    assert probe.sampling_options.temperature == 0
    assert runner.counters["canaries"] >= 3
    assert runner.counters["canaries_failed"] == 0
    assert runner.counters["accepted"] == 0, "probes are no requests"


@pytest.mark.parametrize("mode", ["error", "lost", "silent", "broken"])
async def test_a_failed_probe_is_reported_once_and_the_recovery_once(mode: str) -> None:
    engine = FakeEngine(mode)
    runner = Runner(engine)
    async with watched(runner) as (probe, reports):
        await until(lambda: runner.counters["canaries_failed"] >= 2, "two failed probes")
        assert reports == [False]
        assert not probe.is_alive
        engine.mode = "ok"
        await until(lambda: probe.is_alive, "the engine is alive again")
        assert reports[:2] == [False, True]


async def test_an_overloaded_engine_is_alive() -> None:
    engine = FakeEngine("busy")
    async with watched(Runner(engine), timeout_s=WAIT_S) as (_, reports):
        await until(lambda: len(engine.probes) >= 2, "two probes")
    assert reports == []


async def test_output_of_requests_restores_a_failed_engine_without_a_probe() -> None:
    engine = FakeEngine("error")
    runner = Runner(engine)
    async with watched(runner) as (_, reports):
        await until(lambda: reports == [False], "it fails")
        engine.mode = "ok"
        leg_request = LegRequest("r", request=PreprocessedRequest(token_ids=TokenIds.of([1])))
        await runner.run(runner.admit(leg_request), lambda _: None)
        engine.mode = "error"
        await until(lambda: True in reports, "the engine is reported alive again")


async def test_an_engine_that_serves_requests_while_its_probe_hangs_is_alive() -> None:
    class Losing(FakeEngine):
        async def generate(
            self, request: PreprocessedRequest, ctx: GenerateContext
        ) -> AsyncGenerator[LLMEngineOutput, None]:
            if request.is_probe:
                self.probes.append(request)
                runner.last_output_at = asyncio.get_running_loop().time() + 1e-6
                await asyncio.Event().wait()
            yield chunk.stop()

    engine = Losing()
    runner = Runner(engine)
    async with watched(runner, timeout_s=0.01) as (probe, reports):
        await until(lambda: len(engine.probes) >= 3, "the engine is probed again")
        assert runner.counters["canaries_failed"] == 0
        assert probe.is_alive
        assert reports == []


async def test_steps_without_output_postpone_the_probe() -> None:
    class Stepping(FakeEngine):
        def loads(self) -> Sequence[Load]:
            self.steps += 1
            return super().loads()

    engine = Stepping("silent")
    async with watched(Runner(engine)) as (_, reports):
        steps = engine.steps
        await until(lambda: engine.steps > steps + 5, "the loads were read")
    assert engine.probes == []
    assert reports == []


async def test_steps_do_not_undo_a_failed_probe_but_output_does() -> None:
    """An engine may report its last step after the probe has failed, and may take steps forever."""

    class Stepping(FakeEngine):
        def loads(self) -> Sequence[Load]:
            self.steps += bool(self.probes)
            return super().loads()

    engine = Stepping("silent")
    runner = Runner(engine)
    async with watched(runner, timeout_s=0.01) as (probe, reports):
        await until(
            lambda: runner.counters["canaries_failed"] >= 3, "the engine is probed nevertheless"
        )
        assert reports == [False]
        engine.mode = "ok"
        await until(lambda: probe.is_alive, "a probe has a response")
        assert reports == [False, True]


@pytest.mark.parametrize(
    "end", [chunk.cancelled(), chunk.error("gone")], ids=["cancelled", "error"]
)
async def test_a_cancelled_or_failed_request_does_not_count_as_output(end: LLMEngineOutput) -> None:
    class Ending(FakeEngine):
        async def generate(
            self, request: PreprocessedRequest, ctx: GenerateContext
        ) -> AsyncGenerator[LLMEngineOutput, None]:
            if request.is_probe:
                self.probes.append(request)
                await asyncio.Event().wait()
            yield end

    engine = Ending()
    runner = Runner(engine)
    async with watched(runner, timeout_s=0.01) as (_, reports):
        await until(lambda: reports == [False], "it fails")
        leg_request = LegRequest("r", request=PreprocessedRequest(token_ids=TokenIds.of([1])))
        with suppress(InternalError):  # the effect of an error chunk
            await runner.run(runner.admit(leg_request), lambda _: None)
        failed = runner.counters["canaries_failed"]
        await until(
            lambda: runner.counters["canaries_failed"] > failed + 1, "the engine is probed again"
        )
        assert reports == [False]


class Clinging(FakeEngine):
    """Closing its first streams blocks until `may_close` is set, even after a cancellation."""

    def __init__(self, mode: str, streams: int) -> None:
        super().__init__(mode)
        self.may_close = asyncio.Event()
        self.clinging = 0
        self._streams = streams

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        try:
            async for output in super().generate(request, ctx):
                yield output
        finally:
            if self._streams:
                self._streams -= 1
                self.clinging += 1
                await self._cling()
                self.clinging -= 1

    async def _cling(self) -> None:
        # Ends: the test sets it.
        while not self.may_close.is_set():
            try:
                await self.may_close.wait()
            except asyncio.CancelledError:
                continue  # ignores the cancellation


@pytest.mark.parametrize("mode", ["ok", "silent", "error"])
async def test_a_probe_that_ignores_cancellation_is_a_failure_and_does_not_block_the_loop(
    mode: str,
) -> None:
    engine = Clinging(mode, streams=1)
    async with watched(Runner(engine), timeout_s=0.01) as (probe, reports):
        try:
            await until(lambda: reports, "the failure is detected although the probe hangs")
            engine.mode = "ok"
            await until(lambda: probe.is_alive, "the next probe is another task")
            assert engine.clinging == 1, "the first probe still hangs"
            assert reports == [False, True]
        finally:
            engine.may_close.set()


async def test_the_number_of_hung_probes_is_bounded() -> None:
    engine = Clinging("silent", streams=2 * HUNG_PROBES_MAX)
    runner = Runner(engine)
    async with watched(runner, timeout_s=0.002) as (probe, reports):
        try:
            await until(
                lambda: runner.counters["canaries_failed"] >= HUNG_PROBES_MAX + 3,
                "the probes still fail",
            )
            assert engine.clinging == len(engine.probes) == HUNG_PROBES_MAX
            assert reports == [False]
            engine.mode = "ok"
        finally:
            engine.may_close.set()
        await until(lambda: probe.is_alive, "after they ended the engine is probed again")


async def test_an_engine_that_cancels_its_own_stream_fails_the_probe_but_not_the_loop() -> None:
    """The CancelledError of an engine's inner task looks like one of the caller."""

    class SelfCancelling(FakeEngine):
        async def generate(
            self, request: PreprocessedRequest, ctx: GenerateContext
        ) -> AsyncGenerator[LLMEngineOutput, None]:
            if self.mode == "ok":
                yield chunk.token(7)
                yield chunk.stop()
                return
            inner = asyncio.ensure_future(asyncio.Event().wait())
            asyncio.get_running_loop().call_soon(inner.cancel)
            await inner

    engine = SelfCancelling("broken")
    runner = Runner(engine)
    async with watched(runner, timeout_s=WAIT_S) as (probe, reports):
        await until(lambda: runner.counters["canaries_failed"] >= 2, "two failed probes")
        assert reports == [False]
        engine.mode = "ok"
        await until(lambda: probe.is_alive, "the engine is alive again")


async def test_an_engine_without_a_stream_fails_the_probe() -> None:
    class Streamless(FakeEngine):
        def generate(
            self, request: PreprocessedRequest, ctx: GenerateContext
        ) -> AsyncGenerator[LLMEngineOutput, None]:
            raise RuntimeError("no stream")

    async with watched(Runner(Streamless()), timeout_s=WAIT_S) as (_, reports):
        await until(lambda: reports == [False], "the failure is detected")


async def test_the_end_of_the_probe_loop_ends_the_running_probe() -> None:
    engine = FakeEngine("silent")
    async with watched(Runner(engine), timeout_s=WAIT_S) as (_, reports):
        await until(lambda: engine.probes, "a probe")
    assert reports == []


async def test_an_engine_with_unreadable_load_is_probed_like_any_other() -> None:
    class Unreadable(FakeEngine):
        def loads(self) -> Sequence[Load]:
            raise RuntimeError("no figures")

    engine = Unreadable()
    async with watched(Runner(engine), timeout_s=WAIT_S) as (_, reports):
        await until(lambda: len(engine.probes) >= 2, "two probes")
    assert reports == []


async def test_an_engine_with_recent_output_gets_no_probe() -> None:
    engine = FakeEngine()
    async with watched(Runner(engine), idle_s=NEVER_S):
        await asyncio.sleep(0)
        assert engine.probes == []


@asynccontextmanager
async def sim(role: Role) -> AsyncIterator[SimEngine]:
    handoff = SimHandoffConfig(role=role)
    engine = SimEngine(SimConfig(timing=Timing(speedup=0.0), handoff=handoff))
    await engine.start(1)
    try:
        yield engine
    finally:
        await engine.cleanup()


@pytest.mark.parametrize("role", ["aggregated", "prefill", "decode"])
async def test_the_sim_responds_to_probes_in_every_role_without_caching(role: Role) -> None:
    async with sim(role) as engine:
        runner = Runner(engine)
        async with watched(runner, timeout_s=WAIT_S) as (_, reports):
            await until(lambda: runner.counters["canaries"] >= 2, "two probes")
            assert reports == []
        load = engine.loads()[0]
        assert (load.running, load.waiting, load.rooms_open) == (0, 0, 0)


@pytest.mark.slow
async def test_a_frozen_sim_and_its_recovery_are_detected() -> None:
    async with sim("aggregated") as engine, watched(Runner(engine), timeout_s=0.5) as (probe, _):
        engine.freeze()
        await until(lambda: not probe.is_alive, "the frozen engine is detected")
        engine.unfreeze()
        await until(lambda: probe.is_alive, "the engine is alive again")


async def run_failing(runner: Runner) -> None:
    """A request that fails."""
    leg_request = LegRequest("r", request=PreprocessedRequest(token_ids=TokenIds.of([1])))
    with suppress(MeshError):
        await runner.run(runner.admit(leg_request), lambda _: None)


async def test_a_failed_request_is_followed_by_a_probe_although_the_engine_is_not_idle() -> None:
    engine = FakeEngine("broken")
    runner = Runner(engine)
    async with watched(runner, idle_s=NEVER_S) as (_, reports):
        await run_failing(runner)
        await until(lambda: reports == [False], "it fails")
        assert runner.engine_failure == "RuntimeError('an internal error')"
        engine.mode = "ok"
        await until(lambda: reports == [False, True], "the next probe succeeds")
        assert runner.engine_failure == ""


async def test_output_does_not_restore_an_engine_that_then_fails_the_request() -> None:
    class Breaking(FakeEngine):
        async def generate(
            self, request: PreprocessedRequest, ctx: GenerateContext
        ) -> AsyncGenerator[LLMEngineOutput, None]:
            if request.is_probe:
                self.probes.append(request)
            else:
                yield chunk.token(7)
            raise RuntimeError("an internal error")

    engine = Breaking()
    runner = Runner(engine)
    async with watched(runner) as (_, reports):
        await until(lambda: reports == [False], "it fails")
        await run_failing(runner)
        failed = runner.counters["canaries_failed"]
        await until(lambda: runner.counters["canaries_failed"] > failed + 1, "two more probes")
        assert reports == [False]


async def test_an_engine_that_rejects_the_probe_as_invalid_responds() -> None:
    class Rejecting(FakeEngine):
        async def generate(
            self, request: PreprocessedRequest, ctx: GenerateContext
        ) -> AsyncGenerator[LLMEngineOutput, None]:
            self.probes.append(request)
            if self.probes:
                raise InvalidRequest("token 1 is not in the vocabulary", "token_ids")
            yield chunk.token(7)

    engine = Rejecting()
    async with watched(Runner(engine), timeout_s=WAIT_S) as (_, reports):
        await until(lambda: len(engine.probes) >= 2, "two probes")
    assert reports == []


async def test_an_engine_supplies_its_own_probe() -> None:
    class Own(FakeEngine):
        def probe_request(self) -> PreprocessedRequest:
            if self.mode == "unready":
                raise RuntimeError("no probe")
            return PreprocessedRequest(token_ids=TokenIds.of([42, 43]))

    engine = Own()
    runner = Runner(engine)
    async with watched(runner, timeout_s=WAIT_S) as (_, reports):
        await until(lambda: engine.probes, "a probe")
        assert (engine.probes[0].token_ids.tolist(), engine.probes[0].is_probe) == ([42, 43], True)
        engine.mode = "unready"
        await until(lambda: reports == [False], "an engine without a probe fails")
        assert "no probe" in runner.engine_failure

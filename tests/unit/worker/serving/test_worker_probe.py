"""The canary on engines that live, die, come back, hang, or are only busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from common.errors import InternalError, Overloaded, WorkerLost
from common.kv.load import Load
from common.registry.instances import Role
from common.request.preprocessed import TokenIds
from common.request.token_stream import LegRequest
from common.service.health import HealthReporter
from common.service.lifecycle import Lifecycle
from worker_svc.engines.contract import (
    EngineConfig,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
)
from worker_svc.engines.sim.engine import SimConfig, SimEngine
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.transfer_server import SimHandoffConfig
from worker_svc.serving.probe import HUNG_PROBES_MAX, EngineProbe
from worker_svc.serving.runner import Runner

WAIT_S = 20.0
IDLE_S = 0.01
NEVER_S = 3600.0


class MoodyEngine:
    """Answers by its mood: well, error, lost, silent, busy. probes: what was asked as such."""

    def __init__(self, mood: str = "well") -> None:
        self.mood = mood
        self.probes: list[PreprocessedRequest] = []
        self.steps = 0

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="moody")

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if request.is_probe:
            self.probes.append(request)
        match self.mood:
            case "lost":
                raise WorkerLost("the engine is gone", retryable=True)
            case "busy":
                raise Overloaded(1.0, "too many wait")
            case "broken":
                raise RuntimeError("what a mess")
            case "silent":
                await asyncio.Event().wait()
        if self.mood == "error":
            yield chunk.error("CUDA says no")
            return
        yield chunk.token(7)
        yield chunk.stop()

    async def abort(self, ctx: GenerateContext) -> None: ...

    async def drain(self) -> None: ...

    async def cleanup(self) -> None: ...

    def loads(self) -> Sequence[Load]:
        return (Load(engine_step=self.steps),)


async def until(condition: Callable[[], object], what: str) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not condition():
        assert loop.time() - began < WAIT_S, f"never: {what}"
        await asyncio.sleep(0.001)


@asynccontextmanager
async def watched(
    runner: Runner, *, idle_s: float = IDLE_S, timeout_s: float = 0.05
) -> AsyncIterator[tuple[EngineProbe, list[bool]]]:
    told: list[bool] = []

    async def tell(is_alive: bool) -> None:
        told.append(is_alive)

    lifecycle = Lifecycle(HealthReporter())
    canary = EngineProbe(runner, tell, lifecycle.spawn, idle_s=idle_s, timeout_s=timeout_s)
    task = lifecycle.spawn(canary.run(), name="canary", essential=False)
    try:
        yield canary, told
        assert not task.done(), task
    finally:
        assert await lifecycle.cancel_tasks(WAIT_S) == []


async def test_a_responsive_idle_engine_is_probed_repeatedly_without_a_report() -> None:
    engine = MoodyEngine()
    runner = Runner(engine)
    async with watched(runner, timeout_s=WAIT_S) as (_, told):
        await until(lambda: len(engine.probes) >= 3, "three probes")
    assert told == []
    probe = engine.probes[0]
    assert probe.is_probe
    assert (probe.stop_conditions.max_tokens, probe.stop_conditions.ignore_eos) == (1, True)
    assert probe.sampling_options.temperature == 0
    assert runner.counters["canaries"] >= 3
    assert runner.counters["canaries_failed"] == 0
    assert runner.counters["accepted"] == 0, "probes are no requests"


@pytest.mark.parametrize("mood", ["error", "lost", "silent", "broken"])
async def test_a_failed_probe_is_reported_once_and_the_recovery_once(
    mood: str,
) -> None:
    engine = MoodyEngine(mood)
    runner = Runner(engine)
    async with watched(runner) as (canary, told):
        await until(lambda: runner.counters["canaries_failed"] >= 2, "two failed probes")
        assert told == [False]
        assert not canary.is_alive
        engine.mood = "well"
        await until(lambda: canary.is_alive, "it is back")
        assert told[:2] == [False, True]


async def test_an_overloaded_engine_is_alive() -> None:
    engine = MoodyEngine("busy")
    async with watched(Runner(engine), timeout_s=WAIT_S) as (_, told):
        await until(lambda: len(engine.probes) >= 2, "two probes")
    assert told == []


async def test_output_of_requests_restores_a_failed_engine_without_a_probe() -> None:
    engine = MoodyEngine("error")
    runner = Runner(engine)
    async with watched(runner) as (_, told):
        await until(lambda: told == [False], "it fails")
        engine.mood = "well"
        leg_request = LegRequest("r", request=PreprocessedRequest(token_ids=TokenIds.of([1])))
        await runner.run(runner.admit(leg_request), lambda _: None)
        engine.mood = "error"
        await until(lambda: True in told, "it is said to be back")


async def test_an_engine_that_serves_requests_while_its_probe_hangs_is_alive() -> None:
    class Losing(MoodyEngine):
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
    async with watched(runner, timeout_s=0.01) as (canary, told):
        await until(lambda: len(engine.probes) >= 3, "it is probed again")
        assert runner.counters["canaries_failed"] == 0
        assert canary.is_alive
        assert told == []


async def test_steps_without_output_postpone_the_probe() -> None:
    class Stepping(MoodyEngine):
        def loads(self) -> Sequence[Load]:
            self.steps += 1
            return super().loads()

    engine = Stepping("silent")
    async with watched(Runner(engine)) as (_, told):
        looks = engine.steps
        await until(lambda: engine.steps > looks + 5, "it is looked at")
    assert engine.probes == []
    assert told == []


async def test_steps_do_not_undo_a_failed_probe_but_output_does() -> None:
    """An engine may report its last step only after the probe has failed; and step to no end."""

    class Stepping(MoodyEngine):
        def loads(self) -> Sequence[Load]:
            self.steps += bool(self.probes)
            return super().loads()

    engine = Stepping("silent")
    runner = Runner(engine)
    async with watched(runner, timeout_s=0.01) as (canary, told):
        await until(lambda: runner.counters["canaries_failed"] >= 3, "it is probed all the same")
        assert told == [False]
        engine.mood = "well"
        await until(lambda: canary.is_alive, "a probe is answered")
        assert told == [False, True]


@pytest.mark.parametrize(
    "end", [chunk.cancelled(), chunk.error("gone")], ids=["cancelled", "error"]
)
async def test_a_cancelled_or_failed_request_does_not_count_as_output(
    end: LLMEngineOutput,
) -> None:
    class Ending(MoodyEngine):
        async def generate(
            self, request: PreprocessedRequest, ctx: GenerateContext
        ) -> AsyncGenerator[LLMEngineOutput, None]:
            if request.is_probe:
                self.probes.append(request)
                await asyncio.Event().wait()
            yield end

    engine = Ending()
    runner = Runner(engine)
    async with watched(runner, timeout_s=0.01) as (_, told):
        await until(lambda: told == [False], "it fails")
        leg_request = LegRequest("r", request=PreprocessedRequest(token_ids=TokenIds.of([1])))
        with suppress(InternalError):  # what a chunk that says error becomes
            await runner.run(runner.admit(leg_request), lambda _: None)
        failed = runner.counters["canaries_failed"]
        await until(lambda: runner.counters["canaries_failed"] > failed + 1, "it is probed again")
        assert told == [False]


class Clinging(MoodyEngine):
    """Closing its first streams takes until `lets_go` is set, whoever is cancelled meanwhile."""

    def __init__(self, mood: str, streams: int) -> None:
        super().__init__(mood)
        self.lets_go = asyncio.Event()
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
        while not self.lets_go.is_set():
            try:
                await self.lets_go.wait()
            except asyncio.CancelledError:
                continue  # it will not hear of it


@pytest.mark.parametrize("mood", ["well", "silent", "error"])
async def test_a_probe_that_ignores_cancellation_is_a_failure_and_does_not_block_the_loop(
    mood: str,
) -> None:
    engine = Clinging(mood, streams=1)
    async with watched(Runner(engine), timeout_s=0.01) as (canary, told):
        try:
            await until(lambda: told, "it is found dead, though the probe hangs")
            engine.mood = "well"
            await until(lambda: canary.is_alive, "the next probe is another task")
            assert engine.clinging == 1, "the first one hangs still"
            assert told == [False, True]
        finally:
            engine.lets_go.set()


async def test_the_number_of_hung_probes_is_bounded() -> None:
    engine = Clinging("silent", streams=2 * HUNG_PROBES_MAX)
    runner = Runner(engine)
    async with watched(runner, timeout_s=0.002) as (canary, told):
        try:
            await until(
                lambda: runner.counters["canaries_failed"] >= HUNG_PROBES_MAX + 3,
                "it goes on failing",
            )
            assert engine.clinging == len(engine.probes) == HUNG_PROBES_MAX
            assert told == [False]
            engine.mood = "well"
        finally:
            engine.lets_go.set()
        await until(lambda: canary.is_alive, "once they have ended it is probed again")


async def test_an_engine_that_cancels_its_own_stream_fails_the_probe_but_not_the_loop() -> None:
    """The CancelledError of an engine's inner task looks like one that was meant for its caller."""

    class SelfCancelling(MoodyEngine):
        async def generate(
            self, request: PreprocessedRequest, ctx: GenerateContext
        ) -> AsyncGenerator[LLMEngineOutput, None]:
            if self.mood == "well":
                yield chunk.token(7)
                yield chunk.stop()
                return
            inner = asyncio.ensure_future(asyncio.Event().wait())
            asyncio.get_running_loop().call_soon(inner.cancel)
            await inner

    engine = SelfCancelling("broken")
    runner = Runner(engine)
    async with watched(runner, timeout_s=WAIT_S) as (canary, told):
        await until(lambda: runner.counters["canaries_failed"] >= 2, "two failed probes")
        assert told == [False]
        engine.mood = "well"
        await until(lambda: canary.is_alive, "it is back")


async def test_an_engine_without_a_stream_fails_the_probe() -> None:
    class Streamless(MoodyEngine):
        def generate(
            self, request: PreprocessedRequest, ctx: GenerateContext
        ) -> AsyncGenerator[LLMEngineOutput, None]:
            raise RuntimeError("no stream")

    async with watched(Runner(Streamless()), timeout_s=WAIT_S) as (_, told):
        await until(lambda: told == [False], "it is found dead")


async def test_the_end_of_the_probe_loop_ends_the_running_probe() -> None:
    engine = MoodyEngine("silent")
    async with watched(Runner(engine), timeout_s=WAIT_S) as (_, told):
        await until(lambda: engine.probes, "a probe")
    assert told == []


async def test_an_engine_with_unreadable_load_is_probed_like_any_other() -> None:
    class Unreadable(MoodyEngine):
        def loads(self) -> Sequence[Load]:
            raise RuntimeError("no figures")

    engine = Unreadable()
    async with watched(Runner(engine), timeout_s=WAIT_S) as (_, told):
        await until(lambda: len(engine.probes) >= 2, "two probes")
    assert told == []


async def test_an_engine_with_recent_output_gets_no_probe() -> None:
    engine = MoodyEngine()
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
        async with watched(runner, timeout_s=WAIT_S) as (_, told):
            await until(lambda: runner.counters["canaries"] >= 2, "two probes")
            assert told == []
        load = engine.loads()[0]
        assert (load.running, load.waiting, load.rooms_open) == (0, 0, 0)


@pytest.mark.slow
async def test_a_frozen_sim_and_its_recovery_are_detected() -> None:
    async with (
        sim("aggregated") as engine,
        watched(Runner(engine), timeout_s=0.5) as (canary, _),
    ):
        engine.freeze()
        await until(lambda: not canary.is_alive, "it is found to be frozen")
        engine.unfreeze()
        await until(lambda: canary.is_alive, "it is back")

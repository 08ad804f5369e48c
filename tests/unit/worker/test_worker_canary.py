"""The canary on engines that live, die, come back, or are only busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from common.attach import Order
from common.errors import Overloaded, WorkerLost
from common.instances import Role
from common.load import Load
from common.preprocessed import TokenIds
from worker_svc.canary import Canary
from worker_svc.core.timing import Timing
from worker_svc.engine import (
    EngineConfig,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
)
from worker_svc.runner import Runner
from worker_svc.sim_engine import SimConfig, SimEngine
from worker_svc.sim_handoff import SimHandoffConfig

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
) -> AsyncIterator[tuple[Canary, list[bool]]]:
    told: list[bool] = []

    async def tell(is_alive: bool) -> None:
        told.append(is_alive)

    canary = Canary(runner, tell, idle_s=idle_s, timeout_s=timeout_s)
    task = asyncio.create_task(canary.run())
    try:
        yield canary, told
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_an_idle_engine_that_lives_is_probed_again_and_again_and_nobody_is_told() -> None:
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
async def test_an_engine_that_fails_its_probe_is_told_of_once_and_again_when_it_is_back(
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


async def test_a_busy_engine_is_not_a_dead_one() -> None:
    engine = MoodyEngine("busy")
    async with watched(Runner(engine), timeout_s=WAIT_S) as (_, told):
        await until(lambda: len(engine.probes) >= 2, "two probes")
    assert told == []


async def test_answers_to_requests_bring_a_dead_engine_back_without_a_probe() -> None:
    engine = MoodyEngine("error")
    runner = Runner(engine)
    async with watched(runner) as (_, told):
        await until(lambda: told == [False], "it fails")
        engine.mood = "well"
        order = Order("r", request=PreprocessedRequest(token_ids=TokenIds.of([1])))
        await runner.run(runner.admit(order), lambda _: None)
        engine.mood = "error"
        await until(lambda: True in told, "it is said to be back")


async def test_steps_are_a_sign_of_life_though_nothing_is_said() -> None:
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


async def test_an_engine_whose_load_cannot_be_read_is_probed_like_any_other() -> None:
    class Unreadable(MoodyEngine):
        def loads(self) -> Sequence[Load]:
            raise RuntimeError("no figures")

    engine = Unreadable()
    async with watched(Runner(engine), timeout_s=WAIT_S) as (_, told):
        await until(lambda: len(engine.probes) >= 2, "two probes")
    assert told == []


async def test_an_engine_that_has_just_spoken_is_left_alone() -> None:
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
async def test_the_sim_answers_probes_in_every_role_and_keeps_nothing(role: Role) -> None:
    async with sim(role) as engine:
        runner = Runner(engine)
        async with watched(runner, timeout_s=WAIT_S) as (_, told):
            await until(lambda: runner.counters["canaries"] >= 2, "two probes")
            assert told == []
        load = engine.loads()[0]
        assert (load.running, load.waiting, load.rooms_open) == (0, 0, 0)


@pytest.mark.slow
async def test_a_frozen_sim_is_found_out_and_so_is_its_thaw() -> None:
    async with (
        sim("aggregated") as engine,
        watched(Runner(engine), timeout_s=0.5) as (canary, _),
    ):
        engine.freeze()
        await until(lambda: not canary.is_alive, "it is found to be frozen")
        engine.thaw()
        await until(lambda: canary.is_alive, "it is back")

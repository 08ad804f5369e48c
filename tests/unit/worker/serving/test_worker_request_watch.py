"""The watch on every request: it ends requests that an engine has lost, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from common.errors import REQUEST_STALLED, MeshError, WorkerLost
from common.kv.load import Load
from common.request.preprocessed import (
    MediaUrl,
    PreprocessedRequest,
    RoutingHints,
    StopConditions,
    TokenIds,
)
from common.request.token_stream import LegRequest
from tests.kit.gray_engine import GrayEngine
from tests.sim.loop import run_virtually
from worker_svc.engines.contract import GenerateContext, LLMEngineOutput, TokenLogprob
from worker_svc.engines.sim.config import SimConfig, SimModel
from worker_svc.engines.sim.timing import Timing
from worker_svc.serving.request_watch import QUIET_S, RequestWatch, WatchedRequest
from worker_svc.serving.runner import Runner
from worker_svc.serving.stalled_requests import PROBE_WAIT_S, StalledRequests
from worker_svc.serving.step_limit import TICK_S

MODEL = SimModel(tuple(range(100, 900)), (2, 3), 131_072)
# A loss is noticed within this time if steps take less than 0.6 s.
NOTICED_S = 10.0


@dataclass
class Sent:
    """The requests of a run and how each ended: the error, or None."""

    runner: Runner
    ended: dict[str, MeshError | None] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)

    async def send(
        self,
        name: str,
        prompt: int = 20,
        tokens: int = 8,
        priority: int | None = None,
        images: int = 0,
    ) -> None:
        loop = asyncio.get_running_loop()
        request = PreprocessedRequest(
            token_ids=TokenIds.of([100 + len(self.ended) % 700] * prompt),
            stop_conditions=StopConditions(max_tokens=tokens, ignore_eos=True),
            routing=None if priority is None else RoutingHints(priority=priority),
            multi_modal_data={"image_url": (MediaUrl("data:,"),) * images} if images else {},
        )
        began = loop.time()
        try:
            key = self.runner.admit(LegRequest(name, request=request))
            await self.runner.run(key, lambda _: None)
            self.ended[name] = None
        except MeshError as error:
            self.ended[name] = error
        self.took_s[name] = loop.time() - began

    def stalled(self) -> set[str]:
        return {
            name
            for name, error in self.ended.items()
            if error is not None and error.reason == REQUEST_STALLED
        }


@asynccontextmanager
async def watched(engine: GrayEngine) -> AsyncIterator[Sent]:
    """A runner of the engine, with what a worker runs beside its requests."""
    config = await engine.start(1)
    load = Sent(Runner(engine))
    load.runner.engine_started(config)

    async def tick() -> None:
        # Ends: the task is cancelled.
        while True:
            await asyncio.sleep(TICK_S)
            load.runner.observe_steps(asyncio.get_running_loop().time())

    async def watch() -> None:
        await asyncio.gather(tick(), StalledRequests(load.runner, None).run())

    task = asyncio.create_task(watch())
    yield load
    task.cancel()
    await engine.cleanup()


# Any: fields of SimConfig.
def engine_of(step_s: float = 0.006, **config: Any) -> GrayEngine:
    return GrayEngine(SimConfig(timing=Timing(base_s=step_s), **config), model=MODEL)


async def steady(load: Sent, tasks: asyncio.TaskGroup, seconds: float, rate: float) -> None:
    """Short and longer requests at a rate, some of them with long prompts."""
    for number in range(int(seconds * rate)):
        prompt = 2000 if number % 50 == 7 else 20
        tasks.create_task(load.send(f"steady {number}", prompt, (4, 8, 48)[number % 3]))
        await asyncio.sleep(1 / rate)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lose", "swallow", "stall", "endless"])
@pytest.mark.parametrize("rate", [0.5, 8.0, 40.0])
def test_a_lost_request_ends_within_ten_seconds_while_others_go_on(fault: str, rate: float) -> None:
    async def main() -> Sent:
        engine = engine_of()
        async with watched(engine) as load, asyncio.TaskGroup() as tasks:
            tasks.create_task(steady(load, tasks, 30.0, rate))
            await asyncio.sleep(5.11)
            engine.fault = fault
            lost = tasks.create_task(load.send("lost", tokens=48))
            await asyncio.sleep(0.005)
            engine.fault = ""
            await lost
        return load

    load = run_virtually(main())
    assert load.stalled() == {"lost"}
    assert QUIET_S <= load.took_s["lost"] <= NOTICED_S - PROBE_WAIT_S
    error = load.ended["lost"]
    assert isinstance(error, WorkerLost)
    assert error.retryable
    assert sum(1 for error in load.ended.values() if error is not None) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lose", "swallow", "stall", "endless"])
def test_all_requests_of_an_engine_that_loses_each_end_within_ten_seconds(fault: str) -> None:
    async def main() -> Sent:
        engine = engine_of()
        async with watched(engine) as load, asyncio.TaskGroup() as tasks:
            tasks.create_task(steady(load, tasks, 20.0, 8.0))
            await asyncio.sleep(5.1)
            engine.fault = fault
        return load

    load = run_virtually(main())
    assert len(load.stalled()) > 100
    assert max(load.took_s.values()) <= NOTICED_S - PROBE_WAIT_S


@pytest.mark.slow
@pytest.mark.parametrize("step_s", [0.5, 1.5, 4.0])
def test_with_slow_steps_a_loss_is_noticed_within_twice_the_step_limit(step_s: float) -> None:
    limit_s = max(3 * step_s, 2.0)

    async def main() -> Sent:
        engine = engine_of(step_s)
        async with watched(engine) as load, asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(load.send(f"long {number}", tokens=int(20 + 60 / step_s)))
            await asyncio.sleep(6 * step_s)
            engine.fault = "lose"
            lost = tasks.create_task(load.send("lost"))
            await asyncio.sleep(0.01)
            engine.fault = ""
            await lost
        return load

    load = run_virtually(main())
    assert load.stalled() == {"lost"}
    # The rest of the limit is the time for a probe.
    assert load.took_s["lost"] <= max(NOTICED_S - PROBE_WAIT_S, 1.6 * limit_s)


OVERLOADS: dict[str, dict[str, Any]] = {
    "few slots": {"max_num_seqs": 4},
    "little memory": {"total_kv_blocks": 160},
    "slow prompts": {"max_num_batched_tokens": 512},
    "all": {"max_num_seqs": 16, "total_kv_blocks": 640, "max_num_batched_tokens": 1024},
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OVERLOADS)
def test_no_request_of_a_healthy_engine_ends_under_overload(name: str, seed: int) -> None:
    """Ten times what the engine can compute, in bursts; some prompts fill half of the memory."""

    async def main() -> tuple[Sent, int]:
        engine = engine_of(**OVERLOADS[name])
        rng = Random(seed)
        async with watched(engine) as load, asyncio.TaskGroup() as tasks:
            for number in range(500):
                long = 1200 if name == "little memory" else 6000
                prompt = rng.choice((8, 40, 300, long) if rng.random() < 0.2 else (8, 40))
                priority = rng.choice((None, None, 0, 5, -3))
                tokens = rng.choice((1, 16, 200, 600))
                tasks.create_task(load.send(f"r{number}", prompt, tokens, priority))
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.02, 0.2)))
        return load, engine.counters["preempted"]

    load, preemptions = run_virtually(main())
    assert max(load.took_s.values()) > 2 * QUIET_S, "the load is no overload"
    assert load.stalled() == set()
    assert name != "little memory" or preemptions


@pytest.mark.slow
def test_a_lost_request_ends_although_the_queue_never_empties() -> None:
    """More requests are quiet than wait, and later ones had output before the lost one."""

    async def main() -> Sent:
        engine = engine_of(max_num_seqs=4)
        async with watched(engine) as load, asyncio.TaskGroup() as tasks:
            for number in range(40):
                tasks.create_task(load.send(f"r{number}", tokens=400))
            await asyncio.sleep(0.5)
            engine.fault = "lose"
            lost = tasks.create_task(load.send("lost"))
            await asyncio.sleep(0.01)
            engine.fault = ""
            for number in range(350):
                tasks.create_task(load.send(f"late {number}", tokens=100))
                await asyncio.sleep(0.1)
            assert lost.done(), "it waits for the others"
        return load

    load = run_virtually(main())
    assert load.stalled() == {"lost"}


@pytest.mark.slow
def test_a_long_prompt_in_many_steps_is_not_lost() -> None:
    async def main() -> Sent:
        engine = engine_of(max_num_batched_tokens=512)
        async with watched(engine) as load, asyncio.TaskGroup() as tasks:
            tasks.create_task(load.send("long", prompt=120_000))
            tasks.create_task(steady(load, tasks, 15.0, 8.0))
        return load

    load = run_virtually(main())
    assert load.took_s["long"] > 2 * QUIET_S
    assert load.stalled() == set()


@pytest.mark.slow
def test_the_step_limit_includes_a_prompt_that_arrives_just_after_another_was_computed() -> None:
    """The first one's tokens, which the next sample contains, are none of the second one's."""

    async def main(begin_s: float, pause_s: float) -> float:
        timing = Timing(base_s=0.05, prefill_token_s=1e-3)
        engine = GrayEngine(SimConfig(timing=timing, max_num_batched_tokens=8000), model=MODEL)
        async with watched(engine) as load, asyncio.TaskGroup() as tasks:
            stream = tasks.create_task(load.send("stream", tokens=200))
            await asyncio.sleep(begin_s)
            await load.send("first", prompt=5000, tokens=1)
            await asyncio.sleep(pause_s)
            second = tasks.create_task(load.send("second", prompt=4000, tokens=1))
            await asyncio.sleep(0.3)
            limit_s = load.runner.step_limits.limit_s(0)
            await second
            assert not stream.done(), "the steps had another request"
        return limit_s

    for begin_s in (0.5, 0.6, 0.7, 0.8, 0.9):
        for pause_s in (0.0, 0.02, 0.04, 0.06, 0.08):
            limit_s = run_virtually(main(begin_s, pause_s))
            assert limit_s > 2 * 4.0, (begin_s, pause_s)


@pytest.mark.slow
def test_a_frozen_engine_and_a_stalled_process_lose_no_request() -> None:
    """Frontends notice them: the rank makes no step, or the worker sends no heartbeat."""

    async def main() -> Sent:
        engine = engine_of()
        async with watched(engine) as load, asyncio.TaskGroup() as tasks:
            tasks.create_task(steady(load, tasks, 10.0, 8.0))
            await asyncio.sleep(5.0)
            engine.freeze()
            await asyncio.sleep(30.0)
            engine.unfreeze()
        return load

    load = run_virtually(main())
    assert max(load.took_s.values()) > 20.0
    assert load.stalled() == set()


@pytest.mark.parametrize(("responds", "within_s"), [(True, 6.0), (False, 92.0)])
def test_a_response_to_a_probe_proves_that_an_idle_engine_is_in_no_step(
    within_s: float, *, responds: bool
) -> None:
    """Without a step so far, the step limit is a minute."""

    async def probe() -> bool:
        await asyncio.sleep(0.01 if responds else 1000.0)
        return responds

    async def main() -> Sent:
        engine = engine_of()
        await engine.start(1)
        load = Sent(Runner(engine))
        watch = asyncio.create_task(StalledRequests(load.runner, probe).run())
        engine.fault = "lose"
        await load.send("lost")
        watch.cancel()
        await engine.cleanup()
        return load

    load = run_virtually(main())
    assert load.stalled() == {"lost"}
    assert within_s - 2.0 <= load.took_s["lost"] <= within_s


class SlowImages(GrayEngine):
    """Prepares images for a minute, one request after another."""

    # Any: arguments of GrayEngine.
    def __init__(self, config: SimConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._preparation = asyncio.Lock()

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext, *, is_embedding: bool = False
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if request.multi_modal_data:
            with ctx.preparing():
                async with self._preparation:
                    await asyncio.sleep(60.0)
            request = replace(request, multi_modal_data={})
        async for output in super().generate(request, ctx, is_embedding=is_embedding):
            yield output


@pytest.mark.slow
def test_the_last_of_a_burst_of_images_is_not_lost() -> None:
    """Those before it are prepared for minutes, in which others are served, or none."""

    async def main() -> Sent:
        engine = SlowImages(SimConfig(max_num_seqs=4), model=MODEL)
        async with watched(engine) as load, asyncio.TaskGroup() as tasks:
            for number in range(5):
                tasks.create_task(load.send(f"image {number}", images=1))
            tasks.create_task(steady(load, tasks, 100.0, 8.0))
        return load

    load = run_virtually(main())
    assert load.stalled() == set()
    assert load.took_s["image 4"] > 300.0


class LateLoads(GrayEngine):
    """Reports its load only when it has responded to a probe."""

    has_responded = False

    def loads(self) -> Sequence[Load]:
        return [Load(rooms_open=1)] if self.has_responded else [Load()]


def test_a_request_that_the_engine_reports_after_a_probe_is_not_lost() -> None:
    async def main() -> Sent:
        engine = LateLoads(SimConfig(), model=MODEL)
        await engine.start(1)

        async def probe() -> bool:
            engine.has_responded = True
            return True

        load = Sent(Runner(engine))
        watch = asyncio.create_task(StalledRequests(load.runner, probe).run())
        engine.fault = "lose"
        request = asyncio.create_task(load.send("waits for KV"))
        await asyncio.sleep(60.0)
        assert engine.has_responded
        for task in (request, watch):
            task.cancel()
        await engine.cleanup()
        return load

    assert run_virtually(main()).ended == {}


def test_log_probabilities_of_a_prompt_are_output() -> None:
    """A long prompt takes seconds, in which the scheduler of the engine is idle."""

    async def main() -> Sent:
        engine = SlowEcho(SimConfig(), model=MODEL)
        async with watched(engine) as load:
            await load.send("echo")
        return load

    load = run_virtually(main())
    assert (load.ended["echo"], load.took_s["echo"] > 200.0) == (None, True)


class SlowEcho(GrayEngine):
    """Sends log probabilities of the prompt for minutes, then the output."""

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext, *, is_embedding: bool = False
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        for token_id in range(100, 200):
            await asyncio.sleep(2.0)
            yield LLMEngineOutput(prompt_logprobs=(TokenLogprob(token_id, -1.0),))
        async for output in super().generate(request, ctx, is_embedding=is_embedding):
            yield output


# The rules, sample by sample.


class Samples:
    """A watch that reads loads every 0.1 s."""

    # Any: settings of RequestWatch.
    def __init__(self, *, limit_s: float = 2.0, **settings: Any) -> None:
        self.watch = RequestWatch(lambda _: limit_s, **settings)
        self.requests: list[WatchedRequest] = []
        self.now = 0.0

    def admit(self, *, prompt: int = 20, is_opaque: bool = False) -> WatchedRequest:
        request = WatchedRequest(self.watch.rank(None), 0, prompt, prompt + 10, is_opaque=is_opaque)
        self.watch.admit(request, prompt, self.now)
        self.requests.append(request)
        return request

    def lost_after_s(self, loads: Sequence[Sequence[Load]]) -> float | None:
        """Reads the loads, repeating the last step of each for ever, up to 60 s."""
        began = self.now
        for number in range(600):
            self.now += 0.1
            is_due = self.watch.sample(loads[min(number, len(loads) - 1)], self.now)
            lost = self.watch.check(self.requests, 0, self.now) if is_due else []
            if any(not request.needs_proof for request in lost):
                return self.now - began
        return None


def steps(count: int, **fields: int) -> list[list[Load]]:
    return [[Load(engine_step=number, prefill_tokens=1, **fields)] for number in range(count)]


def test_a_request_waits_for_kv_as_long_as_its_room_is_open() -> None:
    samples = Samples()
    samples.admit(prompt=0)
    assert samples.lost_after_s(steps(600, rooms_open=1)) is None
    assert samples.lost_after_s(steps(600)) is not None


def test_a_started_request_waits_for_memory() -> None:
    samples = Samples()
    request = samples.admit()
    samples.watch.start(request, 0.0)
    request.rank.continued_at = 1e9
    full = steps(600, kv_used_blocks=95, kv_total_blocks=100, running=1)
    assert samples.lost_after_s(full) is None
    some = steps(600, kv_used_blocks=50, kv_total_blocks=100, running=1)
    assert samples.lost_after_s(some) is not None


def test_handoffs_of_others_do_not_hide_that_a_started_request_is_lost() -> None:
    samples = Samples()
    request = samples.admit()
    samples.watch.start(request, 0.0)
    request.rank.continued_at = 1e9
    loads = [[Load(engine_step=n, waiting=n % 3 == 0, rooms_open=1)] for n in range(600)]
    assert samples.lost_after_s(loads) is not None


def test_only_an_idle_rank_shows_that_a_pass_through_body_is_lost() -> None:
    samples = Samples()
    samples.admit(prompt=0, is_opaque=True)
    assert samples.lost_after_s(steps(600, running=1)) is None
    assert samples.lost_after_s([[Load(engine_step=1)]]) is not None


def test_an_idle_rank_may_be_in_its_first_step_up_to_the_step_limit() -> None:
    samples = Samples(limit_s=20.0)
    samples.admit()
    found = samples.lost_after_s([[Load()]])
    assert found is not None
    assert found >= 30.0


def test_a_request_of_an_unknown_rank_is_lost_only_if_all_ranks_are_idle() -> None:
    samples = Samples()
    busy = [[Load(engine_step=n, dp_rank=0), Load(dp_rank=1, running=1)] for n in range(600)]
    samples.watch.sample(busy[0], 0.0)
    samples.admit()
    assert samples.lost_after_s(busy) is None
    assert samples.lost_after_s([[Load(dp_rank=0), Load(dp_rank=1)]]) is not None


def test_a_request_of_an_unknown_rank_is_none_of_rank_0_before_the_first_sample() -> None:
    samples = Samples(has_ranks=True)
    samples.admit()
    busy = [[Load(dp_rank=0), Load(engine_step=n, dp_rank=1, running=1)] for n in range(600)]
    assert samples.lost_after_s(busy) is None


@pytest.mark.parametrize("serves_in_order", [True, False])
def test_a_passed_request_is_lost_only_if_the_engine_serves_in_order(
    *, serves_in_order: bool
) -> None:
    """With another order, such as the longest cached prefix first, it may be the one that waits."""
    samples = Samples(serves_in_order=serves_in_order)
    samples.admit()
    later = samples.admit()
    samples.watch.start(later, 0.0)
    samples.watch.end(later)
    samples.requests.remove(later)
    samples.admit()  # not reported by the engine
    waiting = steps(600, waiting=1, running=1)
    assert (samples.lost_after_s(waiting) is not None) == serves_in_order


def test_tokens_that_were_computed_before_a_request_do_not_count_for_its_prompt() -> None:
    """They may be part of the first sample after its admission."""
    samples = Samples()
    samples.watch.sample([Load(engine_step=1, prefill_tokens=100)], 0.1)
    request = samples.admit(prompt=4000)
    step = Load(engine_step=2, prefill_tokens=20_100, running=1)
    for now in (0.2, 0.3, 0.4):
        samples.watch.sample([step], now)
        assert not samples.watch.has_no_prompt_left(request), "it lengthens the step in progress"
    samples.watch.sample([replace(step, engine_step=3, prefill_tokens=24_100)], 0.5)
    assert samples.watch.has_no_prompt_left(request)

"""Placement without a router, and detection of hung engines and silent workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from random import Random

import pytest

from common.errors import MeshError, Overloaded, Unavailable
from common.kv.load import Load
from common.registry.instances import Instance, Snapshot
from common.request.placement import Decision, Query
from common.request.preprocessed import FinishReason, PreprocessedRequest, TokenIds, TokenLogprob
from common.request.token_stream import (
    HelloAck,
    LegRequest,
    RequestFrame,
    ResponseFrame,
    StartSlot,
    Terminal,
    WorkerLink,
)
from common.streams.stall_clock import TICK_S, StallClock
from frontend_svc.request.local_placement import place_locally
from frontend_svc.workers.breaker import PROBE_INTERVAL_MAX_S
from frontend_svc.workers.client import EngineClient
from tests.sim.loop import VirtualLoop, run_virtually
from tests.sim.pulled_transport import PulledTransport

MODEL = "model"
WORKER = 7


def worker(number: int, role: str, *, local_prefill: bool = True) -> Instance:
    return Instance(
        id=number,
        namespace="default",
        service="worker",
        stable_name="",
        address=f"127.0.0.1:{number}",
        model=MODEL,
        role=role,  # type: ignore[arg-type]  # a literal in every call
        local_prefill=local_prefill,
    )


def placed_locally(
    workers: Iterable[Instance], excluded: Iterable[int] = ()
) -> Decision | MeshError:
    snapshot = Snapshot(instances={one.id: one for one in workers})
    query = Query(MODEL, 10, excluded_worker_ids=frozenset(excluded))
    return place_locally(snapshot, {}, query, Random(1))


def test_without_a_router_decode_workers_that_can_prefill_run_whole_requests() -> None:
    pairs = [worker(1, "prefill"), worker(2, "decode", local_prefill=False), worker(3, "decode")]
    found = placed_locally(pairs)
    assert isinstance(found, Decision)
    assert (found.worker.worker_id, found.prefill, found.bootstrap) == (3, None, None)


def test_without_a_router_aggregated_workers_are_preferred_to_decode_workers() -> None:
    for _ in range(10):
        found = placed_locally([worker(1, "aggregated"), worker(2, "decode"), worker(3, "decode")])
        assert isinstance(found, Decision)
        assert found.worker.worker_id == 1


@pytest.mark.parametrize(
    "excluded", [(), (3,)], ids=["pairs only", "the last worker failed the request"]
)
def test_without_a_router_prefill_and_decode_pairs_are_not_chosen(
    excluded: tuple[int, ...],
) -> None:
    pairs = [worker(1, "prefill"), worker(2, "decode", local_prefill=False)]
    found = placed_locally(pairs + [worker(3, "decode")] * len(excluded), excluded)
    assert isinstance(found, Unavailable)
    assert found.reason == "NO_ROUTER"
    assert found.message == (
        f"no router is available, and no other worker of {MODEL!r} serves whole requests; "
        "retry after 1 s"
    )


class Frozen(PulledTransport):
    """A transport to a worker with a hung engine: it only sends heartbeats.

    late_s: delay of the first heartbeat.
    """

    def __init__(self, late_s: float) -> None:
        beat = ResponseFrame(heartbeat=[Load(engine_step=1, running=1)])
        self._script = [
            (0.0, ResponseFrame(hello_ack=HelloAck(WORKER), accepted=[1])),
            (1.0 + late_s, beat),
            *((float(second), beat) for second in range(2, 9)),
        ]

    async def read(self) -> ResponseFrame | None:
        at, frame = self._script.pop(0) if self._script else (math.inf, None)
        await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
        return frame

    async def write(self, frame: RequestFrame) -> None:
        pass

    async def close(self) -> None:
        pass

    async def dial(self, address: str, worker_id: int) -> Frozen:
        return self


class Engine(PulledTransport):
    """A worker with its transport. frozen: it accepts requests and does not run them.

    waits: its requests wait for KV; only a probe is served. full: it refuses every request.
    """

    def __init__(self, *, frozen: bool = False, waits: bool = False, full: bool = False) -> None:
        self.frozen = frozen
        self.waits = waits
        self.full = full
        self.ran = 0
        self.stopped: list[int] = []
        self._open: dict[int, bool] = {}
        self._started: set[int] = set()
        self._steps = 0
        self._link = WorkerLink(WORKER, 0.0)

    def loads(self) -> list[Load]:
        running, waiting = len(self._started), len(self._open) - len(self._started)
        return [Load(engine_step=self._steps, running=running, waiting=waiting)]

    def _step(self) -> None:
        due = [] if self.frozen else [slot for slot in self._open if self._may_run(slot)]
        for slot in due:
            self._steps += 1
            self._started.add(slot)
            self.ran += 1
            self._link.tokens(slot, [1])
            if self._open[slot]:
                self._end(slot, FinishReason.LENGTH)

    def _may_run(self, slot: int) -> bool:
        return self._open[slot] or not self.waits

    def _end(self, slot: int, reason: FinishReason) -> None:
        del self._open[slot]
        self._started.discard(slot)
        self._link.end(slot, reason)

    async def read(self) -> ResponseFrame | None:
        while True:
            await asyncio.sleep(0.05)
            self._step()
            frame = self._link.next_frame(asyncio.get_running_loop().time(), self.loads)
            if frame is not None:
                return frame

    async def write(self, frame: RequestFrame) -> None:
        for command in self._link.receive(frame, asyncio.get_running_loop().time()):
            if isinstance(command, StartSlot) and self.full:
                self._link.reject(command.slot, Overloaded(1.0))
            elif isinstance(command, StartSlot):
                assert command.leg_request.request is not None
                self._open[command.slot] = command.leg_request.request.is_probe
                self._link.accept(command.slot)
            elif command.slot in self._open:
                self.stopped.append(command.slot)
                self._end(command.slot, FinishReason.CANCELLED)

    async def close(self) -> None:
        pass

    async def dial(self, address: str, worker_id: int) -> Engine:
        return self


class Sink:
    """Records when its leg was lost."""

    def __init__(self) -> None:
        self.lost_at = 0.0
        self.reason = ""
        self.begun = asyncio.Event()
        self.over = asyncio.Event()

    def accepted(self) -> None: ...

    def rejected(self, error: MeshError) -> None: ...

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        self.begun.set()

    def chunk(self, json: bytes) -> None: ...

    def terminal(self, terminal: Terminal) -> None: ...

    def lost(self, error: MeshError) -> None:
        self.reason = error.reason
        self.lost_at = asyncio.get_running_loop().time()
        self.over.set()


def submit(engines: EngineClient) -> Sink:
    sink = Sink()
    request = PreprocessedRequest(model=MODEL, token_ids=TokenIds.of([1, 2, 3]))
    engines.submit(WORKER, "127.0.0.1:1", LegRequest("r", request=request), sink)
    return sink


@pytest.mark.parametrize("late_s", [0.0, 0.1])
def test_a_hang_is_detected_after_two_seconds_also_if_the_first_heartbeat_is_late(
    late_s: float,
) -> None:
    async def main() -> float:
        async with EngineClient(1, Frozen(late_s), Random(1)) as engines:
            sink = submit(engines)
            await asyncio.wait_for(sink.over.wait(), 8.0)
            assert sink.reason == "HUNG"
        return sink.lost_at

    assert run_virtually(main()) == pytest.approx(3.0, abs=0.05)


def test_a_hung_engine_stays_excluded_while_it_has_no_work() -> None:
    async def main() -> None:
        engine = Engine()
        async with EngineClient(1, engine, Random(1)) as engines:
            sink = submit(engines)
            await asyncio.wait_for(sink.begun.wait(), 1.0)
            engine.frozen = True
            await asyncio.wait_for(sink.over.wait(), 4.0)
            assert sink.reason == "HUNG"
            await asyncio.sleep(30.0)
            assert engine.loads()[0].running == 0, "its requests were aborted"
            assert engines.excluded_workers([WORKER]) == {WORKER}
            engine.frozen = False
            await asyncio.sleep(PROBE_INTERVAL_MAX_S * 1.25 + 0.5)
            assert engines.excluded_workers([WORKER]) == frozenset(), (
                "the worker serves probes again"
            )

    run_virtually(main())


def test_a_hung_engine_aborts_its_orphans_before_it_gets_requests_again() -> None:
    async def main() -> None:
        engine = Engine()
        async with EngineClient(1, engine, Random(1)) as engines:
            sinks = [submit(engines) for _ in range(3)]
            await asyncio.wait_for(sinks[0].begun.wait(), 1.0)
            engine.frozen = True
            for sink in sinks:
                await asyncio.wait_for(sink.over.wait(), 4.0)
            engine.frozen = False
            assert engines.excluded_workers([WORKER]) == {WORKER}
            for _ in range(1000):
                await asyncio.sleep(0.01)
                if not engines.excluded_workers([WORKER]):
                    break
            assert engines.excluded_workers([WORKER]) == frozenset()
            assert engine.stopped == [1, 2, 3]

    run_virtually(main(), until=60.0)


def test_a_probe_detects_an_engine_that_hangs_before_its_first_step() -> None:
    async def main() -> float:
        engine = Engine(frozen=True)
        async with EngineClient(1, engine, Random(1)) as engines:
            sink = submit(engines)
            await asyncio.wait_for(sink.over.wait(), 6.0)
            assert sink.reason == "HUNG"
            assert engines.excluded_workers([WORKER]) == {WORKER}
        return sink.lost_at

    # A heartbeat, two seconds without a step, and one second of the probe.
    assert run_virtually(main()) < 4.5


def test_an_engine_whose_requests_wait_for_kv_is_not_hung() -> None:
    async def main() -> None:
        engine = Engine(waits=True)
        async with EngineClient(1, engine, Random(1)) as engines:
            sink = submit(engines)
            await asyncio.sleep(30.0)
            assert not sink.over.is_set()
            assert engine.ran > 0, "the probe ran"
            assert engines.excluded_workers([WORKER]) == frozenset()

    run_virtually(main())


def test_a_hung_engine_whose_service_refuses_the_probe_stays_excluded() -> None:
    async def main() -> None:
        engine = Engine()
        async with EngineClient(1, engine, Random(1)) as engines:
            sink = submit(engines)
            await asyncio.wait_for(sink.begun.wait(), 1.0)
            engine.frozen = engine.full = True
            await asyncio.wait_for(sink.over.wait(), 4.0)
            assert sink.reason == "HUNG"
            await asyncio.sleep(30.0)
            assert engines.excluded_workers([WORKER]) == {WORKER}, (
                "the service refuses, not the engine"
            )

    run_virtually(main())


def test_an_engine_that_refuses_a_probe_is_busy_and_not_hung() -> None:
    async def main() -> None:
        engine = Engine(waits=True)
        async with EngineClient(1, engine, Random(1)) as engines:
            sink = submit(engines)
            await asyncio.sleep(0.5)
            engine.full = True
            await asyncio.sleep(30.0)
            assert not sink.over.is_set()
            assert engines.excluded_workers([WORKER]) == frozenset()

    run_virtually(main())


def stall(seconds: float) -> None:
    """Stalls the loop: timers that become due during the stall fire afterwards."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop._now += seconds


async def ticking(stall_clock: StallClock) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(TICK_S)
        stall_clock.tick(loop.time())


@pytest.mark.parametrize("measured", [True, False])
def test_a_frontend_that_stalled_does_not_treat_its_workers_as_silent(
    measured: bool,
) -> None:
    async def main() -> bool:
        loop = asyncio.get_running_loop()
        stall_clock = StallClock(loop.time())
        ticker = asyncio.create_task(ticking(stall_clock))
        engine = Engine()

        def stalled_s() -> float:
            return stall_clock.stalled_s(loop.time()) if measured else 0.0

        async with EngineClient(1, engine, Random(1), stalled_s=stalled_s) as engines:
            sink = submit(engines)
            for _ in range(5):
                await asyncio.sleep(0.5)
                stall(4.0)
            await asyncio.sleep(0.2)
            was_lost = sink.over.is_set()
        ticker.cancel()
        return was_lost

    assert run_virtually(main()) is not measured, "without stall compensation it would"


def test_a_frontend_that_is_always_late_still_detects_a_silent_worker() -> None:
    class Mute(Frozen):
        def __init__(self) -> None:
            super().__init__(0.0)
            self._script = [self._script[0], (1e6, self._script[1][1])]

    async def main() -> float:
        loop = asyncio.get_running_loop()
        stall_clock = StallClock(loop.time())
        ticker = asyncio.create_task(ticking(stall_clock))
        engines = EngineClient(
            1, Mute(), Random(1), stalled_s=lambda: stall_clock.stalled_s(loop.time())
        )
        async with engines:
            sink = submit(engines)
            while not sink.over.is_set():
                await asyncio.sleep(0.2)
                stall(0.3)
            assert engines.excluded_workers([WORKER]) == {WORKER}
        ticker.cancel()
        return sink.lost_at

    assert 3.0 < run_virtually(main()) < 8.0

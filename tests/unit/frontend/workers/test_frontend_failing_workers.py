"""Workers with a failing engine: when they are excluded, and when they serve again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from random import Random

from common.errors import InternalError, MeshError
from common.kv.load import Load
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.request.preprocessed import FinishReason, PreprocessedRequest, TokenIds, TokenLogprob
from common.request.token_stream import (
    HEARTBEAT_S,
    HelloAck,
    LegRequest,
    RequestFrame,
    ResponseFrame,
    Terminal,
)
from frontend_svc.workers.client import EngineClient
from frontend_svc.workers.transport import Transport
from tests.sim.loop import run_virtually
from tests.sim.pulled_transport import PulledTransport

WORKER, PEER = 5, 6
REQUEST = PreprocessedRequest(model="m", token_ids=TokenIds.of((1, 2, 3)))


class Worker(PulledTransport):
    """A Dialer, and the stream of a worker: heartbeats with a verdict, and an end for each request.

    failure: its verdict. fails_probes, fails_requests: whether the engine fails at them. probed_at:
    times of the probes that it received.
    """

    def __init__(self) -> None:
        self.failure = ""
        self.fails_probes = False
        self.fails_requests = False
        self.probed_at: list[float] = []
        self.frames = asyncio.Queue[ResponseFrame]()

    async def dial(self, address: str, worker_id: int) -> Transport:
        self.frames = asyncio.Queue()
        self.frames.put_nowait(ResponseFrame(hello_ack=HelloAck(WORKER), heartbeat=[Load()]))
        return self

    async def read(self) -> ResponseFrame | None:
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                return await self.frames.get()
        except TimeoutError:
            return ResponseFrame(heartbeat=[Load()], engine_failure=self.failure)

    async def write(self, frame: RequestFrame) -> None:
        for slot, leg_request in frame.submits:
            assert leg_request.request is not None
            is_probe = leg_request.request.is_probe
            if is_probe:
                self.probed_at.append(asyncio.get_running_loop().time())
            is_failure = self.fails_probes if is_probe else self.fails_requests
            error = InternalError("the engine failed") if is_failure else None
            end = Terminal(slot, None if is_failure else FinishReason.STOP, error=error)
            self.frames.put_nowait(ResponseFrame(accepted=[slot], terminals=[end]))

    async def close(self) -> None:
        pass


class Sink:
    """Waits for the end of a request."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def accepted(self) -> None: ...

    def rejected(self, error: MeshError) -> None:
        self.ended.set()

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None: ...

    def chunk(self, json: bytes) -> None: ...

    def terminal(self, terminal: Terminal) -> None:
        self.ended.set()

    def lost(self, error: MeshError) -> None:
        self.ended.set()


async def request(engines: EngineClient) -> None:
    sink = Sink()
    engines.submit(WORKER, "worker:1", LegRequest("r1", request=REQUEST), sink)
    await sink.ended.wait()


def run(case: Callable[[EngineClient, Worker], Awaitable[None]]) -> None:
    async def in_mesh() -> None:
        worker = Worker()
        async with EngineClient(1, worker, Random(1)) as engines:
            members = {id_: Instance(id_, "n", "worker", "", "worker:1") for id_ in (WORKER, PEER)}
            engines.on_snapshot(Snapshot(1, members), SnapshotDiff())
            await request(engines)
            await case(engines, worker)

    run_virtually(in_mesh())


def excluded(engines: EngineClient) -> frozenset[int]:
    return engines.excluded_workers([WORKER, PEER])


def test_the_verdict_of_a_worker_excludes_it_within_a_heartbeat() -> None:
    async def case(engines: EngineClient, worker: Worker) -> None:
        worker.failure, worker.fails_probes = "RuntimeError('CUDA error')", True
        await asyncio.sleep(HEARTBEAT_S + 0.1)
        assert excluded(engines) == {WORKER}
        assert engines.exclusion_reasons() == {WORKER: "its engine fails"}
        assert engines.open_circuits() == {"lost": 0, "hung": 0, "failing": 1}
        await asyncio.sleep(60.0)
        assert excluded(engines) == {WORKER}
        gaps = [b - a for a, b in pairwise(worker.probed_at)]
        assert max(gaps[3:]) < 2.8, "it is probed all the time"

    run(case)


def test_a_worker_is_back_when_verdict_and_probe_are_well() -> None:
    async def case(engines: EngineClient, worker: Worker) -> None:
        worker.failure, worker.fails_probes = "broken", True
        await asyncio.sleep(20.0)
        worker.fails_probes = False
        await asyncio.sleep(5.0)
        assert excluded(engines) == {WORKER}, "the worker still reports the failure"
        worker.failure = ""
        await asyncio.sleep(HEARTBEAT_S + 0.3)
        assert excluded(engines) == frozenset(), "it is probed as soon as it reports well"

    run(case)


def test_a_good_verdict_alone_does_not_bring_a_worker_back() -> None:
    async def case(engines: EngineClient, worker: Worker) -> None:
        worker.failure, worker.fails_probes = "broken", True
        await asyncio.sleep(20.0)
        worker.failure = ""
        await asyncio.sleep(10.0)
        assert excluded(engines) == {WORKER}

    run(case)


def test_a_worker_without_a_verdict_is_excluded_by_its_failed_requests() -> None:
    async def case(engines: EngineClient, worker: Worker) -> None:
        worker.fails_requests = True
        out_at: list[float] = []
        now = asyncio.get_running_loop().time
        began_at = now()
        while now() < began_at + 120.0:
            await asyncio.sleep(0.1)
            engines._outliers.count_request(PEER, now())
            if excluded(engines):
                continue
            await request(engines)
            engines.request_failed(WORKER, [WORKER, PEER])
            if excluded(engines):
                out_at.append(now())
        assert out_at[0] - began_at < 1.0
        gaps = [b - a for a, b in pairwise(out_at)]
        assert gaps[:4] == sorted(gaps[:4]), "its probes succeed: it is excluded longer each time"
        assert min(gaps[4:]) > 15.0
        assert 4 < len(out_at) < 9

    run(case)


def test_a_worker_that_breaks_the_protocol_must_pass_a_probe() -> None:
    """Its heartbeats on a new stream prove nothing."""

    async def case(engines: EngineClient, worker: Worker) -> None:
        worker.fails_probes = True
        worker.frames.put_nowait(ResponseFrame(accepted=[99]))
        await asyncio.sleep(0.1)
        assert engines.open_circuits() == {"lost": 0, "hung": 0, "failing": 1}
        await asyncio.sleep(10.0)
        assert excluded(engines) == {WORKER}
        worker.fails_probes = False
        await asyncio.sleep(3.0)
        assert excluded(engines) == frozenset()

    run(case)

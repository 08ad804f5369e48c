"""Which workers a frontend excludes, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from common.errors import MeshError, Unavailable, WorkerLost
from common.kv.load import Load
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.request.preprocessed import PreprocessedRequest, TokenIds, TokenLogprob
from common.request.token_stream import (
    HEARTBEAT_S,
    HelloAck,
    LegRequest,
    RequestFrame,
    ResponseFrame,
    Terminal,
)
from common.streams.silence import ATTACH
from frontend_svc.workers.client import EngineClient
from frontend_svc.workers.transport import Transport
from tests.sim.loop import run_virtually
from tests.sim.pulled_transport import PulledTransport

WORKER = 5
REQUEST = PreprocessedRequest(model="m", token_ids=TokenIds.of((1, 2, 3)))


class Unreachable:
    """A Dialer without a reachable worker."""

    async def dial(self, address: str, worker_id: int) -> Transport:
        raise Unavailable(f"connection to {address} refused")


class LossSink:
    """A sink that expects the loss of its worker."""

    def __init__(self) -> None:
        self.received = asyncio.Event()

    def accepted(self) -> None:
        raise AssertionError("the worker is unreachable")

    def rejected(self, error: MeshError) -> None:
        raise AssertionError("the worker is unreachable")

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        raise AssertionError("the worker is unreachable")

    def chunk(self, json: bytes) -> None:
        raise AssertionError("the worker is unreachable")

    def terminal(self, terminal: Terminal) -> None:
        raise AssertionError("the worker is unreachable")

    def lost(self, error: MeshError) -> None:
        self.error = error
        self.received.set()


class SilentWorker(PulledTransport):
    """A Dialer, and the stream of a worker that sends heartbeats and accepts nothing."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_greeted = False

    async def dial(self, address: str, worker_id: int) -> Transport:
        return self

    async def read(self) -> ResponseFrame | None:
        if not self._is_greeted:
            self._is_greeted = True
            return ResponseFrame(hello_ack=HelloAck(WORKER), heartbeat=[Load()])
        await asyncio.wait([self.ended], timeout=0.1)
        if self.ended.done():
            raise Unavailable("the connection was reset")
        return ResponseFrame(heartbeat=[Load()])

    async def write(self, frame: RequestFrame) -> None:
        pass

    async def close(self) -> None:
        pass


def show(engines: EngineClient, *workers: int) -> None:
    """Discovery shows these workers."""
    members = {worker: Instance(worker, "n", "worker", "", "worker:1") for worker in workers}
    engines.on_snapshot(Snapshot(1, members), SnapshotDiff())


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_worker_that_discovery_never_shows_is_not_excluded_for_ever(is_shown: bool) -> None:
    """A router placed on the worker, which left before discovery showed it. No snapshot reported
    its departure, so it was probed and listed as excluded until the next snapshot.
    """

    async def excluded_workers() -> tuple[set[int], set[int]]:
        async with EngineClient(1, Unreachable()) as engines:
            show(engines, *([WORKER] if is_shown else []))
            sink = LossSink()
            engines.submit(WORKER, "worker:1", LegRequest("r1", request=REQUEST), sink)
            await sink.received.wait()
            at_first = set(engines.exclusion_reasons())
            await asyncio.sleep(30.0)
            return at_first, set(engines.exclusion_reasons())

    at_first, later = run_virtually(excluded_workers())
    assert at_first == {WORKER}
    assert later == ({WORKER} if is_shown else set())


def test_a_worker_that_is_late_at_every_request_does_not_flap() -> None:
    async def late_for_a_minute() -> None:
        async with EngineClient(1, SilentWorker()) as engines:
            show(engines, WORKER)
            for _ in range(600):
                leg_request = LegRequest("r1", request=REQUEST)
                submission = engines.submit(WORKER, "worker:1", leg_request, LossSink())
                await asyncio.sleep(0.1)
                submission.abort("not_accepted")

    with capture_logs() as logs:
        run_virtually(late_for_a_minute())
    opened = [line for line in logs if line["event"] == "worker_circuit_opened"]
    assert 2 < len(opened) < 45


def lose_stream(own_stall_s: float) -> tuple[MeshError, list[str], dict[int, str]]:
    """The stream is reset after a stall of this process: the error, the log, open circuits."""

    async def run() -> tuple[MeshError, dict[int, str]]:
        worker, stalled = SilentWorker(), [0.0]
        async with EngineClient(1, worker, stalled_s=lambda: stalled[0]) as engines:
            show(engines, WORKER)
            sink = LossSink()
            engines.submit(WORKER, "worker:1", LegRequest("r1", request=REQUEST), sink)
            await asyncio.sleep(5.0)
            stalled[0] = own_stall_s
            await asyncio.sleep(0.3)  # frames from before the reset
            worker.ended.set_result(None)
            await sink.received.wait()
            return sink.error, engines.exclusion_reasons()

    with capture_logs() as logs:
        error, reasons = run_virtually(run())
    return error, [line["event"] for line in logs], reasons


def test_a_stream_that_ends_after_a_stop_of_this_process_is_not_a_lost_worker() -> None:
    error, events, reasons = lose_stream(own_stall_s=4.0)
    assert error.reason == "STALLED"
    assert error.retryable
    assert "the frontend did not run for 4.0 s" in error.message
    assert events == ["worker_stream_closed"]
    assert reasons == {}


def test_a_stream_that_ends_otherwise_is_a_lost_worker() -> None:
    error, events, reasons = lose_stream(own_stall_s=0.5)
    assert error.reason == "UNAVAILABLE"
    assert events == ["worker_lost", "worker_circuit_opened"]
    assert set(reasons) == {WORKER}


def test_a_frontend_that_stops_does_not_report_lost_workers() -> None:
    async def run() -> None:
        async with EngineClient(1, SilentWorker()) as engines:
            engines.submit(WORKER, "worker:1", LegRequest("r1", request=REQUEST), LossSink())
            await asyncio.sleep(1.0)

    with capture_logs() as logs:
        run_virtually(run())
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("worker_stream_closed", "info")
    ]


class WorkerThatFallsSilent(PulledTransport):
    """A Dialer, and the stream of a worker that sends frames at these times and nothing later."""

    def __init__(self, *frames_at_s: float, heartbeat_s: float, dial_s: float) -> None:
        self._at_s = list(frames_at_s)
        self._ack: HelloAck | None = HelloAck(WORKER, heartbeat_s)
        self._dial_s = dial_s

    async def dial(self, address: str, worker_id: int) -> Transport:
        await asyncio.sleep(self._dial_s)
        return self

    async def read(self) -> ResponseFrame | None:
        at_s = self._at_s.pop(0) if self._at_s else 1000.0
        await asyncio.sleep(at_s - asyncio.get_running_loop().time())
        ack, self._ack = self._ack, None
        return ResponseFrame(hello_ack=ack)

    async def write(self, frame: RequestFrame) -> None:
        pass

    async def close(self) -> None:
        pass


def lost_after_s(
    *frames_at_s: float, heartbeat_s: float = HEARTBEAT_S, dial_s: float = 0.0
) -> tuple[float, MeshError]:
    """When the frontend counts such a worker as lost."""

    async def run() -> tuple[float, MeshError]:
        worker = WorkerThatFallsSilent(*frames_at_s, heartbeat_s=heartbeat_s, dial_s=dial_s)
        async with EngineClient(1, worker) as engines:
            sink = LossSink()
            engines.submit(WORKER, "worker:1", LegRequest("r1", request=REQUEST), sink)
            await sink.received.wait()
            assert set(engines.exclusion_reasons()) == {WORKER}
            return asyncio.get_running_loop().time(), sink.error

    return run_virtually(run())


def test_rule_e_a_worker_that_misses_three_heartbeats_is_lost() -> None:
    at_s, error = lost_after_s(0.0)
    assert ATTACH.limit_s < at_s < ATTACH.limit_s + 0.2
    assert (type(error), error.retryable, error.reason) == (WorkerLost, True, "WORKER_LOST")
    assert error.message == f"worker {WORKER} was lost: no message from worker {WORKER} for 3 s"


def test_rule_e_any_frame_of_the_worker_is_a_sign_of_life() -> None:
    at_s, _ = lost_after_s(0.0, 2.9, 5.8)
    assert 5.8 + ATTACH.limit_s < at_s < 5.8 + ATTACH.limit_s + 0.2


def test_rule_e_a_long_connect_is_not_silence() -> None:
    at_s, _ = lost_after_s(dial_s=60.0)
    assert 60.0 + ATTACH.limit_s < at_s < 60.0 + ATTACH.limit_s + 0.2


def test_rule_e_the_worker_states_the_heartbeat_of_the_stream() -> None:
    at_s, error = lost_after_s(0.0, heartbeat_s=0.2)
    assert 0.6 < at_s < 0.8
    assert error.message.endswith("for 0.6 s")

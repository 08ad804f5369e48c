"""When the worker's end of an Attach stream writes its frames, and when it ends."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import WorkerLost
from common.request.preprocessed import PreprocessedRequest, StopConditions, TokenIds
from common.request.token_stream import Hello, LegRequest, RequestFrame, ResponseFrame
from common.streams.silence import ATTACH
from tests.sim.loop import run_virtually
from worker_svc.engines.sim.config import SimConfig, SimModel
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.timing import Timing
from worker_svc.serving.attach_server import ACCEPTANCE_DELAY_S, AttachServer
from worker_svc.serving.runner import Runner

WORKER = 7
MODEL = SimModel(tuple(range(100, 900)), (2, 3), 32_768)
PROMPT = TokenIds.of([1, 2, 3])


def frames_of_one_request(
    step_s: float, *, requests_max: int = 1
) -> list[tuple[float, ResponseFrame]]:
    """The frames after the handshake, each with the seconds since the request arrived."""

    async def main() -> list[tuple[float, ResponseFrame]]:
        loop = asyncio.get_running_loop()
        timing = Timing(base_s=step_s, prefill_token_s=0, decode_seq_s=0, kv_token_s=0)
        engine = SimEngine(SimConfig(timing=timing), model=MODEL)
        await engine.start(WORKER)
        request = PreprocessedRequest(
            token_ids=PROMPT, stop_conditions=StopConditions(max_tokens=2, ignore_eos=True)
        )
        submit = 1, LegRequest("r", request=request)
        reads = iter([RequestFrame(hello=Hello(1, WORKER, 1)), RequestFrame(submits=[submit])])
        frames: list[tuple[float, ResponseFrame]] = []
        arrived_at = 0.0

        async def read() -> RequestFrame | None:
            nonlocal arrived_at
            frame = next(reads, None)
            if frame is not None and frame.submits:
                await asyncio.sleep(0.01)  # after the handshake
                arrived_at = loop.time()
            if frame is None:
                await asyncio.sleep(10 * step_s + 0.01)
            return frame

        async def write(frame: ResponseFrame) -> None:
            if frame.hello_ack is None:
                frames.append((loop.time() - arrived_at, frame))

        runner = Runner(engine, max_requests=requests_max)
        await AttachServer(WORKER, runner).serve(read, write)
        await engine.cleanup()
        return frames

    return run_virtually(main())


def test_the_acceptance_of_a_request_shares_the_frame_of_its_first_token() -> None:
    step_s = ACCEPTANCE_DELAY_S / 2
    at_s, first = frames_of_one_request(step_s)[0]
    assert at_s == pytest.approx(step_s)
    assert (list(first.accepted), list(first.count)) == ([1], [1])


def test_the_acceptance_of_a_request_does_not_wait_for_a_slow_first_token() -> None:
    (accepted_at_s, first), (token_at_s, second), *_ = frames_of_one_request(0.05)
    assert accepted_at_s == pytest.approx(ACCEPTANCE_DELAY_S)
    assert (list(first.accepted), list(first.count)) == ([1], [])
    assert token_at_s == pytest.approx(0.05)
    assert (list(second.accepted), list(second.count)) == ([], [1])


def test_a_refusal_is_sent_at_once() -> None:
    ((at_s, frame),) = frames_of_one_request(0.01, requests_max=0)
    assert at_s == 0.0
    assert [one.slot for one in frame.rejected] == [1]


def lost_after_s(*frames_at_s: float) -> tuple[float, WorkerLost]:
    """When the worker counts a frontend as lost that sends frames at these times and is silent."""

    async def main() -> tuple[float, WorkerLost]:
        loop = asyncio.get_running_loop()
        at_s = iter(frames_at_s)

        async def read() -> RequestFrame | None:
            await asyncio.sleep(next(at_s, 1000.0) - loop.time())
            return RequestFrame(
                hello=Hello(1, WORKER, 1) if loop.time() == frames_at_s[0] else None
            )

        async def write(frame: ResponseFrame) -> None:
            pass

        engine = SimEngine(SimConfig(), model=MODEL)
        await engine.start(WORKER)
        with pytest.raises(WorkerLost) as raised:
            await AttachServer(WORKER, Runner(engine)).serve(read, write)
        ended_at = loop.time()
        await engine.cleanup()
        return ended_at, raised.value

    return run_virtually(main())


def test_rule_e_a_frontend_that_misses_three_heartbeats_is_lost() -> None:
    at_s, error = lost_after_s(0.0)
    assert ATTACH.limit_s < at_s < ATTACH.limit_s + 0.4
    assert error.retryable
    assert error.message == "no message from the frontend for 3 s"


def test_rule_e_any_frame_of_the_frontend_is_a_sign_of_life() -> None:
    at_s, _ = lost_after_s(0.0, 2.9, 5.8)
    assert 5.8 + ATTACH.limit_s < at_s < 5.8 + ATTACH.limit_s + 0.4

"""An answer between the loop and its client's task: what waits, and when silence wakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from common.errors import MeshError
from common.request.preprocessed import FinishReason, usage
from frontend_svc.core.request.types import RequestOutcome
from frontend_svc.metrics.families import DeploymentState, Endpoint
from frontend_svc.request.response import TOKENS_PER_CHUNK, UNREAD_TOKENS_MAX, ResponseBuffer
from tests.sim.loop import run_virtually

DONE = RequestOutcome(FinishReason.STOP, None, usage(1, 1), 1, (7,), None)


def an_answer() -> ResponseBuffer:
    clock = asyncio.get_running_loop().time
    state = DeploymentState(lambda: ("m",), clock=clock)
    return ResponseBuffer(state.begin("m", Endpoint.COMPLETIONS, True), clock)


def later(after_s: float, what: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(after_s, what)


def test_silence_wakes_the_reader_each_time_and_tokens_put_it_off() -> None:
    async def main() -> list[tuple[float, list[int]]]:
        loop, answer = asyncio.get_running_loop(), an_answer()
        answer.wake_when_idle(15.0)
        later(10.0, lambda: answer.tokens([1], ()))
        later(60.0, lambda: answer.tokens([2], ()))
        later(61.0, lambda: answer.finished(DONE))
        woken = []
        while answer.outcome is None:
            taken = await answer.next()
            woken.append((loop.time(), taken))
        return woken

    assert run_virtually(main()) == [
        (10.0, [1]),
        (25.0, []),
        (40.0, []),
        (55.0, []),
        (60.0, [2]),
        (61.0, []),
    ]


def test_without_a_wish_for_it_silence_lasts() -> None:
    async def main() -> float:
        loop, answer = asyncio.get_running_loop(), an_answer()
        later(500.0, lambda: answer.finished(DONE))
        assert await answer.next() == []
        return loop.time()

    assert run_virtually(main()) == 500.0


def test_a_reader_who_is_busy_elsewhere_is_not_woken_for_silence() -> None:
    async def main() -> None:
        loop, answer = asyncio.get_running_loop(), an_answer()
        answer.wake_when_idle(1.0)
        await asyncio.sleep(10.3)  # say, its client takes nothing
        later(0.5, lambda: answer.tokens([1], ()))
        assert await answer.next() == [1], "it has waited for half a second only"
        assert loop.time() == pytest.approx(10.8)
        answer.finished(DONE)

    run_virtually(main())


def test_an_ended_answer_leaves_no_timer_behind() -> None:
    async def main() -> None:
        answer = an_answer()
        answer.wake_when_idle(5.0)
        answer.finished(DONE)
        late = an_answer()
        late.finished(DONE)
        late.wake_when_idle(5.0)
        assert await late.next() == []

    run_virtually(main())


class RequestHandle:
    def __init__(self) -> None:
        self.why = ""

    def fail(self, error: MeshError, reason: str) -> None:
        self.why = reason


@pytest.mark.parametrize("kind", ["tokens", "chunks"])
def test_what_a_client_does_not_take_is_bounded(kind: str) -> None:
    async def main() -> None:
        answer, handle = an_answer(), RequestHandle()
        answer.handle = handle  # type: ignore[assignment]  # all of it that is used
        most = UNREAD_TOKENS_MAX if kind == "tokens" else UNREAD_TOKENS_MAX // TOKENS_PER_CHUNK
        for _ in range(most):
            answer.tokens([1], ()) if kind == "tokens" else answer.chunk(b"{}")
        assert handle.why == ""
        answer.tokens([1], ()) if kind == "tokens" else answer.chunk(b"{}")
        assert handle.why == "slow_reader"

    run_virtually(main())


def test_its_end_is_waited_for_past_silence_and_tokens_that_nobody_wants() -> None:
    async def main() -> float:
        loop, answer = asyncio.get_running_loop(), an_answer()
        answer.wake_when_idle(15.0)
        later(10.0, lambda: answer.tokens([1], ()))
        later(40.0, lambda: answer.finished(DONE))
        assert await answer.end() is DONE
        assert await answer.end() is DONE
        return loop.time()

    assert run_virtually(main()) == 40.0

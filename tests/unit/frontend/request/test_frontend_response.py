"""The response buffer: unread tokens, and wake-ups after idle time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from common.errors import MeshError
from common.request.preprocessed import FinishReason, TokenLogprob, TopLogprob, usage
from frontend_svc.metrics.families import DeploymentState
from frontend_svc.request.buffer import (
    SLOW_TOKENS,
    TOKENS_PER_CHUNK,
    UNREAD_TOKENS_MAX,
    Backlog,
    ResponseBuffer,
)
from frontend_svc.request.types import RequestOutcome
from tests.sim.loop import run_virtually

DONE = RequestOutcome(FinishReason.STOP, None, usage(1, 1), 1, (7,), None)


def new_response(
    fail: Callable[[MeshError, str], None] = lambda error, reason: None,
    backlog: Backlog | None = None,
) -> ResponseBuffer:
    clock = asyncio.get_running_loop().time
    state = DeploymentState(lambda: ("m",), clock=clock)
    meter = state.begin("m", "completions", True)
    return ResponseBuffer(meter, clock, fail, backlog=backlog)


def later(after_s: float, what: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(after_s, what)


def test_idle_time_wakes_the_reader_repeatedly_and_tokens_restart_it() -> None:
    async def main() -> list[tuple[float, list[int]]]:
        loop, response = asyncio.get_running_loop(), new_response()
        response.reader.wake_when_idle(15.0)
        later(10.0, lambda: response.tokens([1], ()))
        later(60.0, lambda: response.tokens([2], ()))
        later(61.0, lambda: response.finished(DONE))
        woken = []
        while response.outcome is None:
            taken = await response.next()
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


def test_output_during_a_wait_is_handled_without_ending_it() -> None:
    async def main() -> tuple[list[list[int]], list[int], float]:
        loop, response = asyncio.get_running_loop(), new_response()
        handled: list[list[int]] = []

        def on_output() -> bool:
            handled.append(response.take()[0])
            return len(handled) < 2

        def two_tokens() -> None:
            response.tokens([1], ())
            response.tokens([2], ())

        response.reader.call_on_output(on_output)
        later(1.0, two_tokens)
        later(2.0, lambda: response.tokens([3], ()))
        later(3.0, lambda: response.finished(DONE))
        assert await response.reader.wait()
        return handled, response.take()[0], loop.time()

    assert run_virtually(main()) == ([[1, 2], [3]], [], 2.0)


def test_idle_time_begins_with_the_last_handled_output() -> None:
    async def main() -> float:
        loop, response = asyncio.get_running_loop(), new_response()
        response.reader.wake_when_idle(15.0)
        response.reader.call_on_output(lambda: bool(response.take()))
        later(10.0, lambda: response.tokens([1], ()))
        assert not await response.reader.wait()
        woken_at = loop.time()
        response.finished(DONE)
        return woken_at

    assert run_virtually(main()) == 25.0


def test_the_end_of_a_response_wakes_the_reader_once_with_its_last_tokens() -> None:
    async def main() -> list[int]:
        response = new_response()
        response.reader.call_on_output(lambda: False)

        def end() -> None:
            response.tokens([1], ())
            response.finished(DONE)

        later(1.0, end)
        assert await response.reader.wait()
        assert response.outcome is DONE
        await asyncio.sleep(0)  # the scheduled call finds no wait
        return response.take()[0]

    assert run_virtually(main()) == [1]


def test_the_reader_raises_an_error_in_the_handling_of_output() -> None:
    class PanicError(BaseException):
        pass

    def panic() -> bool:
        raise PanicError

    async def main() -> None:
        response = new_response()
        response.reader.call_on_output(panic)
        later(1.0, lambda: response.tokens([1], ()))
        with pytest.raises(PanicError):
            await response.reader.wait()

    run_virtually(main())


def test_without_an_idle_time_the_reader_is_not_woken() -> None:
    async def main() -> float:
        loop, response = asyncio.get_running_loop(), new_response()
        later(500.0, lambda: response.finished(DONE))
        assert await response.next() == []
        return loop.time()

    assert run_virtually(main()) == 500.0


def test_a_reader_that_does_not_wait_is_not_woken_for_idle_time() -> None:
    async def main() -> None:
        loop, response = asyncio.get_running_loop(), new_response()
        response.reader.wake_when_idle(1.0)
        await asyncio.sleep(10.3)  # for example, the client does not read
        later(0.5, lambda: response.tokens([1], ()))
        assert await response.next() == [1], "only half a second has passed"
        assert loop.time() == pytest.approx(10.8)
        response.finished(DONE)

    run_virtually(main())


def test_an_ended_response_leaves_no_timer() -> None:
    async def main() -> None:
        response = new_response()
        response.reader.wake_when_idle(5.0)
        response.finished(DONE)
        late = new_response()
        late.finished(DONE)
        late.reader.wake_when_idle(5.0)
        assert await late.next() == []

    run_virtually(main())


@pytest.mark.parametrize("kind", ["tokens", "chunks"])
def test_the_unread_tokens_of_a_client_are_bounded(kind: str) -> None:
    async def main() -> None:
        reasons: list[str] = []
        response = new_response(lambda error, reason: reasons.append(reason))
        most = UNREAD_TOKENS_MAX if kind == "tokens" else UNREAD_TOKENS_MAX // TOKENS_PER_CHUNK
        for _ in range(most):
            response.tokens([1], ()) if kind == "tokens" else response.chunk(b"{}")
        assert reasons == []
        response.tokens([1], ()) if kind == "tokens" else response.chunk(b"{}")
        assert reasons == ["slow_reader"]

    run_virtually(main())


def test_log_probabilities_count_as_unread_tokens() -> None:
    async def main() -> None:
        reasons: list[str] = []
        response = new_response(lambda error, reason: reasons.append(reason))
        logprob = TokenLogprob(1, -0.5, tuple(TopLogprob(n, -1.0) for n in range(20)))
        for _ in range(UNREAD_TOKENS_MAX // 22):
            response.tokens([1], [logprob])
        assert reasons == []
        response.tokens([1], [logprob])
        assert reasons == ["slow_reader"]
        assert response.take() == ([], []), "an ended response holds no memory"

    run_virtually(main())


def test_a_part_has_the_next_tokens_with_their_log_probabilities() -> None:
    async def main() -> None:
        response = new_response()
        logprobs = [TokenLogprob(token, -0.5) for token in range(5)]
        response.tokens(list(range(5)), logprobs)
        assert response.take_part(4) == ([0, 1], logprobs[:2])
        assert response.take_part(1) == ([2], logprobs[2:3])
        assert response.has_unread
        assert response.take_part(100) == ([3, 4], logprobs[3:])
        assert not response.has_unread

    run_virtually(main())


def test_a_full_backlog_ends_the_clients_with_more_than_their_share() -> None:
    async def main() -> None:
        ended: list[str] = []

        def reader(name: str) -> ResponseBuffer:
            return new_response(lambda error, reason: ended.append(name), backlog)

        backlog = Backlog(4 * SLOW_TOKENS)
        large, small, fast = reader("large"), reader("small"), reader("fast")
        large.tokens([1] * 3 * SLOW_TOKENS, ())
        small.tokens([1] * (SLOW_TOKENS + 10), ())
        assert (backlog.clients, ended) == (2, [])
        fast.tokens([1] * SLOW_TOKENS, ())
        small.tokens([1], ())
        assert ended == [], "they have less than their share"
        large.tokens([1], ())
        assert ended == ["large"]
        assert (backlog.clients, backlog.tokens) == (1, SLOW_TOKENS + 11)
        small.take_part(11)
        assert (backlog.clients, backlog.tokens) == (0, 0), "it is no longer slow"

    run_virtually(main())


@pytest.mark.parametrize("kind", ["tokens", "chunks"])
def test_what_is_read_or_discarded_leaves_the_backlog(kind: str) -> None:
    async def main() -> None:
        backlog = Backlog()
        response = new_response(backlog=backlog)

        def fill() -> None:
            if kind == "tokens":
                response.tokens([1] * (SLOW_TOKENS + 1), ())
            for _ in range(SLOW_TOKENS // TOKENS_PER_CHUNK + 1 if kind == "chunks" else 0):
                response.chunk(b"{}")
            assert backlog.clients == 1

        fill()
        await response.next() if kind == "tokens" else await response.next_chunks()
        assert (backlog.clients, backlog.tokens) == (0, 0)
        fill()
        response.discard()
        assert (backlog.clients, backlog.tokens) == (0, 0)

    run_virtually(main())


def test_the_end_is_awaited_past_idle_times_and_discarded_tokens() -> None:
    async def main() -> float:
        loop, response = asyncio.get_running_loop(), new_response()
        response.reader.wake_when_idle(15.0)
        later(10.0, lambda: response.tokens([1], ()))
        later(40.0, lambda: response.finished(DONE))
        assert await response.end() is DONE
        assert await response.end() is DONE
        return loop.time()

    assert run_virtually(main()) == 40.0

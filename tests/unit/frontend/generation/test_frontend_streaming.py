"""Responses whose clients have not read for some time, beside others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.access.caller import ANONYMOUS
from common.request.preprocessed import CompletionUsage, FinishReason, TokenLogprob, usage
from frontend_svc.endpoints.request_context import Progress
from frontend_svc.generation.streaming import PART_TOKENS, OpenChoice, ResponseWriter
from frontend_svc.metrics.families import DeploymentState
from frontend_svc.request.buffer import Backlog, ResponseBuffer
from frontend_svc.request.types import RequestOutcome
from tests.sim.loop import run_virtually

TOKENS = 1000
DONE = RequestOutcome(FinishReason.LENGTH, None, usage(1, TOKENS), 1, (7,), None)


class RecordedChoice:
    """A choice that records the loop turn and the tokens of each call."""

    is_complete = False

    def __init__(self, turns: list[int], calls: list[tuple[int, list[int]]]) -> None:
        self._turns = turns
        self._calls = calls

    def begin(self, _sink: object) -> bytes:
        return b""

    def write_tokens(self, token_ids: list[int], _: Sequence[TokenLogprob], _sink: object) -> bytes:
        self._calls.append((self._turns[0], token_ids))
        return b"x" * len(token_ids)

    def finish(self, *_: object) -> bytes:
        return b"finish"

    def usage(self, counts: object) -> object:
        return counts


# Any: parts of an HTTP request, a choice and a format.
async def write(choice: Any, backlog: Backlog, sent: list[bytes]) -> Progress:
    """Streams a response, all of whose tokens wait for the client; returns how far it has come."""

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    clock = asyncio.get_running_loop().time
    meter = DeploymentState(lambda: ("m",), clock=clock).begin("m", "completions", True)
    buffer = ResponseBuffer(meter, clock, lambda *_: None, backlog=backlog)
    buffer.tokens(list(range(TOKENS)), ())
    buffer.finished(DONE)
    progress = Progress(responses=[buffer])
    context = cast(
        Any,
        SimpleNamespace(
            send=send, connection=None, own_headers=(), caller=ANONYMOUS, progress=progress
        ),
    )

    async def settle(*_: object) -> None:
        pass

    text_format = cast(
        Any,
        SimpleNamespace(
            begin=lambda: b"begin", settle=settle, end=lambda _: b"end", keep_alive=b""
        ),
    )
    opened = OpenChoice(choice, cast(Any, SimpleNamespace(stop=lambda: None)), buffer)
    await ResponseWriter(context, [opened], 15.0, backlog).stream(text_format)
    return progress


class StoppedChoice(RecordedChoice):
    """A choice that a stop string ended after 5 tokens."""

    def usage(self, counts: object) -> object:
        return replace(cast(CompletionUsage, counts), completion_tokens=5)


@pytest.mark.interpreted
def test_the_outcome_of_a_response_has_the_usage_that_its_client_received() -> None:
    async def main() -> None:
        progress = await write(StoppedChoice([0], []), Backlog(), [])
        assert progress.outcome is not None
        assert progress.outcome.usage.completion_tokens == 5

    run_virtually(main())


# A compiled writer takes no stand-in for a Choice.
@pytest.mark.interpreted
def test_responses_that_are_behind_are_written_in_parts_one_each_loop_turn() -> None:
    async def main() -> None:
        turns, calls = [0], list[tuple[int, list[int]]]()
        sent: list[list[bytes]] = [[], [], []]

        def count_turn() -> None:
            turns[0] += 1
            asyncio.get_running_loop().call_soon(count_turn)

        count_turn()
        backlog = Backlog()
        await asyncio.gather(
            *(write(RecordedChoice(turns, calls), backlog, parts) for parts in sent)
        )
        assert max(len(tokens) for _, tokens in calls) == PART_TOKENS
        assert len({turn for turn, _ in calls}) >= len(calls) - len(sent), "other callbacks run"
        assert sorted(token for _, tokens in calls for token in tokens) == sorted(
            list(range(TOKENS)) * len(sent)
        )
        for parts in sent:
            assert b"".join(parts) == b"begin" + b"x" * TOKENS + b"finish" + b"end"

    run_virtually(main())

"""Measured latencies of a worker, of a gateway in the test."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from common.inspection.gateway import GatewayError
from meshctl.view.latencies import (
    AT_ONCE,
    CACHED_AT_ONCE,
    CACHED_TOKENS,
    DECODE_TOKENS,
    PROMPT_TOKENS,
    Course,
    LatencyProbe,
    itl_at_once,
    prompt_lengths,
)


# Any, here and below: JSON.
def gateway(model: Any, bodies: list[Any] | None = None) -> httpx.AsyncClient:
    """Responds with two tokens to each prompt. bodies: takes those of the requests."""
    token = {"choices": [{"text": "a"}]}
    events = [token, token, {"choices": [], "usage": {"completion_tokens": 2}}]
    lines = [json.dumps(event) for event in events] + ["[DONE]"]
    text = "".join(f"data: {line}\n\n" for line in lines)

    def respond(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=model)
        if bodies is not None:
            bodies.append(json.loads(request.content))
        return httpx.Response(200, text=text)

    return httpx.AsyncClient(transport=httpx.MockTransport(respond))


async def test_a_model_without_a_context_length_is_measured_with_all_prompts() -> None:
    async with gateway({"id": "m"}) as http:
        found = await LatencyProbe(http, "http://gateway", "m").measure()
    assert [tokens for tokens, _ in found.prompts] == list(PROMPT_TOKENS)
    assert [count for count, _, _ in found.decodes] == [*AT_ONCE, *CACHED_AT_ONCE]
    # The stream beside has ended before.
    assert found.pauses == []


async def test_no_more_requests_are_measured_than_a_worker_computes_at_once() -> None:
    async with gateway({"id": "m", "max_model_len": 4096}) as http:
        probe = LatencyProbe(http, "http://gateway", "m", requests_max=10, cache_tokens=8000)
        found = await probe.measure()
    assert [(n, tokens - DECODE_TOKENS // 2) for n, tokens, _ in found.decodes] == [
        *((1, 64), (4, 64), (10, 64)),
        (2, CACHED_TOKENS),
    ]


async def test_no_prompt_is_measured_beside_a_stream_that_leaves_no_room_for_it() -> None:
    """The stream has 64 tokens and 2,048 more."""
    for cache_tokens, long in (
        (None, {12_288, 6144}),
        (2112 + 6144 + 2, {6144}),
        (2112 + 6144 + 1, set[int]()),
    ):
        bodies: list[Any] = []
        async with gateway({"id": "m"}, bodies) as http:
            await LatencyProbe(http, "http://gateway", "m", cache_tokens=cache_tokens).measure()
        lengths = {len(body["prompt"]) for body in bodies}
        assert lengths & {12_288, 6144} == long, cache_tokens


async def test_requests_at_once_have_cached_prompts_with_nothing_in_common() -> None:
    bodies: list[Any] = []
    async with gateway({"id": "m"}, bodies) as http:
        await LatencyProbe(http, "http://gateway", "m").measure()
    cached = [tuple(body["prompt"]) for body in bodies if body["max_tokens"] == 1]
    measured = [tuple(body["prompt"]) for body in bodies if body["max_tokens"] == DECODE_TOKENS]
    assert sorted(cached) == sorted(measured)
    assert len(set(measured)) == sum(AT_ONCE) + sum(CACHED_AT_ONCE)


def test_the_time_between_tokens_is_that_while_all_responses_run() -> None:
    """Two streams of a token each 10 ms; the first began alone, with 1 ms."""
    early = tuple(n / 1000 for n in range(11)) + tuple(0.01 + n / 100 for n in range(1, 11))
    late = tuple(0.0205 + n / 100 for n in range(20))
    courses = [Course(at[0], at[-1], len(at), "w", at) for at in (early, late)]
    assert itl_at_once(courses) == pytest.approx(0.01)
    pieces = [replace(one, tokens=2 * len(one.arrivals) - 1) for one in courses]
    assert itl_at_once(pieces) == pytest.approx(0.005)
    apart = [Course(0.0, 0.3, 4, "w", (0.0, 0.3)), Course(1.0, 1.3, 4, "w", (1.0, 1.3))]
    assert itl_at_once(apart) == pytest.approx(0.1)


async def test_what_is_no_model_is_an_error_with_its_url() -> None:
    async with gateway(["m"]) as http:
        with pytest.raises(GatewayError, match="http://gateway/v1/models/m"):
            await LatencyProbe(http, "http://gateway", "m").measure()


def test_prompts_fit_into_the_context_and_have_a_token() -> None:
    assert prompt_lengths(None) == list(PROMPT_TOKENS)
    assert prompt_lengths(600) == [64, 512, 536]
    assert prompt_lengths(20) == [1]

"""Requests of meshctl to a frontend."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import httpx
import pytest

from common.inspection.gateway import GatewayError, chat, chat_body, find_serving_problem

URL = "http://gateway"
Handler = Callable[[httpx.Request], httpx.Response]


def answering(answers: Mapping[str, httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(lambda r: answers[r.url.path]))


def models(*names: str) -> httpx.Response:
    return httpx.Response(200, json={"data": [{"id": name} for name in names]})


async def missing(health: int, listing: httpx.Response) -> str:
    answers = {"/ready": httpx.Response(health), "/v1/models": listing}
    async with answering(answers) as http:
        return await find_serving_problem(http, URL, "sim")


async def answer(response: httpx.Response) -> list[str]:
    async with answering({"/v1/chat/completions": response}) as http:
        return [piece async for piece in chat(http, URL, chat_body("sim", "hi", 4))]


def stream(*events: object) -> httpx.Response:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return httpx.Response(200, text="".join(f"data: {line}\n\n" for line in lines))


def content(text: str | None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}}]}


async def test_a_healthy_gateway_that_lists_the_model_serves() -> None:
    assert await missing(200, models("other", "sim")) == ""


async def test_the_missing_condition_is_reported() -> None:
    assert "503" in await missing(503, models("sim"))
    assert "['other']" in await missing(200, models("other"))
    assert "500" in await missing(200, httpx.Response(500))
    assert "not a list" in await missing(200, httpx.Response(200, text="hello"))
    assert "not a list" in await missing(200, httpx.Response(200, json=[1]))


async def test_an_unreachable_gateway_is_reported() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as http:
        assert "does not answer: refused" in await find_serving_problem(http, URL, "sim")


async def test_the_pieces_of_a_response_arrive_in_order() -> None:
    role = {"choices": [{"delta": {"role": "assistant"}}]}
    usage: dict[str, object] = {"choices": [], "usage": {}}
    response = stream(role, content("a"), content(None), content("b"), usage, "[DONE]")
    assert "".join(await answer(response)) == "ab"


async def test_a_stream_without_done_is_an_error() -> None:
    with pytest.raises(GatewayError, match="without"):
        await answer(stream(content("a")))


async def test_an_error_within_the_stream_is_an_error() -> None:
    with pytest.raises(GatewayError, match="worker lost"):
        await answer(stream(content("a"), {"error": {"message": "worker lost"}}, "[DONE]"))


async def test_a_refusal_is_shown_with_its_status() -> None:
    with pytest.raises(GatewayError, match="status 404: no such model"):
        await answer(httpx.Response(404, text="no such model"))


@pytest.mark.parametrize("junk", ["{", '{"choices": 1}', "[]", '{"choices": [{"delta": 1}]}'])
async def test_what_is_not_a_chat_chunk_is_an_error(junk: str) -> None:
    with pytest.raises(GatewayError, match="not a chat chunk"):
        await answer(stream(junk))

"""Requests of meshctl to a frontend."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import pytest

from common.errors import InvalidRequest
from common.inspection.gateway import (
    GatewayError,
    chat,
    chat_body,
    find_serving_problem,
    new_http_client,
)
from tests.kit.certificates import Authority

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


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    writer.close()


async def is_trusted(trusted: Path, cert: Path, key: Path) -> bool:
    """Returns whether a client that trusts one file requests a server with a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, new_http_client(None, own_certificates=[trusted]) as http:
        try:
            return (await http.get(url)).status_code == 200
        except httpx.ConnectError:
            return False


async def test_of_a_chain_only_the_certificate_of_the_service_is_trusted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("own", ["DNS:mesh.example"])
    other, other_key = authority.issue("other", ["DNS:mesh.example"])
    chain = tmp_path / "chain.pem"
    chain.write_bytes(cert.read_bytes() + authority.ca.read_bytes())
    assert await is_trusted(chain, chain, key)
    assert not await is_trusted(chain, other, other_key)


@pytest.mark.parametrize("content", [None, b"no certificate", b"\xff"])
def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "cert.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequest) as refused:
        new_http_client(None, own_certificates=[path])
    assert str(path) in refused.value.message


async def test_more_requests_than_a_usual_pool_has_are_sent_at_once() -> None:
    count, arrived, all_arrived = 120, 0, asyncio.Event()

    async def wait_for_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            all_arrived.set()
        async with asyncio.timeout(60):
            await all_arrived.wait()
        await accept(reader, writer)

    server = await asyncio.start_server(wait_for_all, "127.0.0.1", 0, backlog=count)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, new_http_client(None) as http:
        responses = await asyncio.gather(*(http.get(url, timeout=60) for _ in range(count)))
    assert {response.status_code for response in responses} == {200}

"""What works with servers that get the bodies of clients: two llama-servers, two frontends of ours.

`cell("*", ...)` marks a cell of each kind's column. The last tests hang and kill servers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters.servers_mesh import PATIENT_S, ServersMesh, Stream
from tests.adapters.test_sglang_features import TOOL
from tests.adapters.text_servers import SLOTS, TextServer, ask
from tests.kit.waiting import wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Any, here and below: JSON.
Json = Any


def chat_of(server: TextServer, **fields: Json) -> Json:
    """Returns the body of a greedy chat."""
    messages = [{"role": "user", "content": "Hello there"}]
    body = {"model": server.model, "messages": messages, "max_tokens": 12, "temperature": 0}
    return body | fields


def long_chat(server: TextServer) -> Json:
    """Returns the body of a chat that takes seconds."""
    return chat_of(server, max_tokens=server.long_tokens, ignore_eos=True)


@contextmanager
def occupied(url: str, server: TextServer, count: int) -> Iterator[None]:
    """Has begun responses of a server, or of a mesh before it."""
    with ExitStack() as responses:
        for _ in range(count):
            body = long_chat(server) | {"stream": True}
            response = httpx.stream(
                "POST", f"{url}{CHAT}", json=body, timeout=PATIENT_S, trust_env=False
            )
            assert responses.enter_context(response).status_code == 200
        yield


def answer(found: Json) -> tuple[Json, ...]:
    """Returns what two equal responses have in common."""
    (choice,) = found["choices"]
    content = choice["text"] if "text" in choice else choice["message"]["content"]
    counts = found["usage"]
    return content, choice["finish_reason"], counts["prompt_tokens"], counts["completion_tokens"]


@pytest.mark.cell("*", "chats, completions, streams", "chat templates, tokenizing", "usage")
@pytest.mark.cell("*", "stop strings", "log probabilities")
def test_responses_are_those_of_the_server(
    kind: str, text_mesh: ServersMesh, text_servers: list[TextServer]
) -> None:
    server = text_servers[0]
    body = chat_of(server)
    own = ask(server.url, CHAT, body)
    assert answer(text_mesh.post(CHAT, body)) == answer(own)
    text = own["choices"][0]["message"]["content"]
    prompt = {"model": server.model, "prompt": "ba be bi", "max_tokens": 9, "temperature": 0}
    assert answer(text_mesh.post(COMPLETIONS, prompt)) == answer(
        ask(server.url, COMPLETIONS, prompt)
    )
    plain, counted = (
        Stream(text_mesh, CHAT, body, x_request_id=f"{kind}-plain"),
        Stream(text_mesh, CHAT, body | {"stream_options": {"include_usage": True}}),
    )
    assert not any(one.get("usage") for one in plain.join())
    assert text_mesh.request_line(f"{kind}-plain")["completion_tokens"] == 12, "it is counted"
    assert [one["usage"]["completion_tokens"] for one in counted.join() if one.get("usage")] == [12]
    assert plain.text == counted.text == text
    stop = text[len(text) // 2 :][:4]
    cut = text_mesh.post(CHAT, body | {"stop": [stop]})["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (text[: text.index(stop)], "stop")
    found = text_mesh.post(CHAT, body | {"logprobs": True, "top_logprobs": 2})["choices"][0]
    entries = found["logprobs"]["content"]
    assert len(entries) == 12
    assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) == 2 for one in entries)


@pytest.mark.cell("*", "JSON schemas, regular expressions", "tools", "seeds")
def test_constraints_tools_and_seeds_reach_the_server(
    kind: str, text_mesh: ServersMesh, text_servers: list[TextServer]
) -> None:
    server = text_servers[0]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": TOOL}}
    body = chat_of(server, max_tokens=200)
    choice = text_mesh.post(CHAT, body | {"response_format": form})["choices"][0]
    assert json.loads(choice["message"]["content"])["city"] in ("Oslo", "Rome")
    # llama-server has grammars in place of expressions.
    patterns = {
        "llama": {"grammar": 'root ::= "b" [aeiou]'},
        "openai": {"guided_regex": "b[aeiou]"},
    }
    choice = text_mesh.post(CHAT, body | patterns[kind])["choices"][0]
    assert re.fullmatch("b[aeiou]", choice["message"]["content"])
    tool = {"type": "function", "function": {"name": "weather", "parameters": TOOL}}
    forced = body | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    found, plain = text_mesh.post(CHAT, forced), text_mesh.post(CHAT, body)
    assert found["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 20
    if kind == "openai":
        # llama-server permits text before a call, which random weights do not end.
        (call,) = found["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    drawn = [
        answer(text_mesh.post(CHAT, chat_of(server, temperature=1, seed=seed)))[0]
        for seed in (7, 7, 8)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.cell("*", "invalid fields")
def test_the_server_refuses_what_it_does_not_take(
    text_mesh: ServersMesh, text_servers: list[TextServer]
) -> None:
    body = chat_of(text_servers[0], messages="Hello")
    assert "messages" in text_mesh.post(CHAT, body, 400)["error"]["message"]
    assert all(text_mesh.serves(one) for one in text_servers), "their circuits are closed"


@pytest.mark.cell("*", "cancellation")
def test_a_client_that_disconnects_frees_its_server(
    text_mesh: ServersMesh, text_servers: list[TextServer]
) -> None:
    kept, *closed = [Stream(text_mesh, CHAT, long_chat(text_servers[0])) for _ in range(3)]

    def running() -> int:
        return sum(one.running() for one in text_servers)

    for stream in (kept, *closed):
        stream.wait_begun()
    assert running() == 3
    for stream in closed:
        stream.close()
    # The one that stays has the same length.
    wait_for(lambda: running() == 1, "the servers aborted what was closed", PATIENT_S)
    kept.close()
    wait_for(lambda: running() == 0, "the last one too", PATIENT_S)


@pytest.mark.cell("*", "several servers")
def test_a_name_stands_for_its_server(text_servers: list[TextServer], tmp_path: Path) -> None:
    server = text_servers[0]
    flag = f"--server-dns={server.url.replace('127.0.0.1', 'localhost')}"
    with ServersMesh(tmp_path, [server], flag) as mesh:
        assert mesh.serves(server)


@pytest.mark.cell("*", "load")
def test_the_load_has_the_requests_of_a_server(
    kind: str, text_servers: list[TextServer], tmp_path: Path
) -> None:
    server = text_servers[0]
    with ServersMesh(tmp_path, [server]) as mesh:
        (worker,) = mesh.workers
        # llama-server reports requests of others, a plain server none.
        url = server.url if kind == "llama" else mesh.url
        with occupied(url, server, 1):
            wait_for(lambda: worker.load().loads[0].running == 1, "the load has the request")
        wait_for(lambda: worker.load().loads[0].running == 0, "it has ended")


@pytest.mark.cell("*", "several servers")
def test_a_file_adds_and_removes_servers(text_servers: list[TextServer], tmp_path: Path) -> None:
    first, second = text_servers
    path, folder = tmp_path / "servers", tmp_path / "mesh"
    path.write_text(f"{first.url}\n")
    folder.mkdir()
    with ServersMesh(folder, [first], f"--server-file={path}") as mesh:

        def count(number: int) -> bool:
            return len(mesh.known_instance_ids("worker")) == number

        path.write_text(f"{first.url}\n{second.url}\n")
        wait_for(lambda: count(2), "a server is added", PATIENT_S)
        assert mesh.serves(second)
        path.write_text(f"{second.url}\n")
        wait_for(lambda: count(1), "a server is removed", PATIENT_S)
        assert mesh.chat()["choices"]


def begun_stream(
    mesh: ServersMesh, servers: Sequence[TextServer]
) -> tuple[Stream, TextServer, TextServer]:
    """Returns a long stream, its server and the other one; both have computed before."""
    assert all(mesh.serves(one) for one in servers)
    warm = [Stream(mesh, CHAT, chat_of(servers[0], max_tokens=40)) for _ in range(4)]
    for stream in warm:
        stream.join()
    stream = Stream(mesh, CHAT, long_chat(servers[0])).wait_begun()
    loser, other = sorted(servers, key=lambda one: -one.running())
    assert loser.running() == 1
    return stream, loser, other


def post_many(mesh: ServersMesh, server: TextServer, count: int) -> list[int]:
    """Returns the statuses of chats that are sent at the same time."""

    def post(_: int) -> int:
        url = f"{mesh.url}{CHAT}"
        return mesh.http.post(url, json=chat_of(server), timeout=PATIENT_S).status_code

    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(post, range(count))]


@pytest.mark.cell("*", "a server that hangs")
def test_requests_without_output_leave_a_server_that_hangs(
    text_mesh: ServersMesh, text_servers: list[TextServer]
) -> None:
    stream, loser, other = begun_stream(text_mesh, text_servers)
    loser.freeze()
    try:
        assert post_many(text_mesh, other, 6) == [200] * 6
        assert "error" in stream.join()[-1], "a begun response cannot continue"
    finally:
        loser.thaw()
    wait_for(lambda: text_mesh.serves(loser), "it is back", PATIENT_S)


@pytest.mark.cell("*", "migration of a started stream", "a server that ends, and comes back")
def test_a_begun_response_of_a_killed_server_ends_with_an_error_that_names_it(
    text_mesh: ServersMesh, text_servers: list[TextServer]
) -> None:
    stream, loser, other = begun_stream(text_mesh, text_servers)
    loser.kill()
    assert loser.url in stream.join()[-1]["error"]["message"]
    assert post_many(text_mesh, other, 6) == [200] * 6
    loser.start()
    loser.wait_ready()
    wait_for(lambda: text_mesh.serves(loser), "it is back", PATIENT_S)


@pytest.mark.cell("*", "retry before the first token")
def test_requests_that_wait_at_a_killed_server_are_retried(
    text_mesh: ServersMesh, text_servers: list[TextServer]
) -> None:
    loser, other = text_servers
    with ThreadPoolExecutor(1) as pool, ExitStack() as busy:
        for server in text_servers:
            busy.enter_context(occupied(server.url, server, SLOTS))
        statuses = pool.submit(post_many, text_mesh, other, 6)
        wait_for(lambda: loser.running() > SLOTS, "some wait there", PATIENT_S)
        loser.kill()
        busy.close()
        assert statuses.result() == [200] * 6

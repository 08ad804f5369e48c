"""One adapter process for two stock vLLM servers, which hang, end and come back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters.known_streams import KnownStreams, busiest
from tests.adapters.servers_mesh import PATIENT_S, ServersMesh
from tests.adapters.tcp_proxy import TcpProxy
from tests.kit.waiting import wait_for
from tests.vllm.vllm_server import BLOCK_SIZE, MODEL, SLOTS, VllmServer

LENGTH = 300


@pytest.fixture(scope="module")
def pair_mesh(
    servers: list[VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServersMesh]:
    folder, flag = tmp_path_factory.mktemp("pair"), f"--block-size={BLOCK_SIZE}"
    with ServersMesh(folder, servers, flag, indexers=1) as mesh, closing(mesh.http):
        yield mesh


def prompt_of(number: int, length: int = 160) -> list[int]:
    return [200 + (number * 131 + at * 7) % 3000 for at in range(length)]


def streams_of(mesh: ServersMesh, number: int) -> KnownStreams:
    streams = KnownStreams(mesh, [prompt_of(number + at, 64) for at in range(4)], LENGTH)
    streams.wait_begun()
    return streams


@pytest.mark.cell("vllm", "invalid fields")
def test_invalid_fields_are_refused_by_name_and_no_server_counts_as_failing(
    pair_mesh: ServersMesh, servers: list[VllmServer]
) -> None:
    invalid: dict[str, Any] = {"max_tokens": -1, "temperature": 9, "top_p": 2, "min_tokens": 99}
    invalid |= {"guided_grammar": "root ::= (", "prompt": [10**9], "n": 0}
    for name, value in invalid.items():
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2} | {name: value}
        assert pair_mesh.post("/v1/completions", body, 400)["error"]["param"] == name
    assert all(pair_mesh.serves(one) for one in servers), "their circuits are closed"


@pytest.mark.cell("vllm", "cache salt")
def test_a_cache_salt_separates_blocks_at_the_server_and_in_the_index(
    pair_mesh: ServersMesh, servers: list[VllmServer]
) -> None:
    server, prompt = servers[0], prompt_of(50)

    def is_stored(salt: str) -> bool:
        return pair_mesh.overlap(prompt, **({"cache_salt": salt} if salt else {}))[1] == 10

    for salt, others in (("one", ("two", "")), ("two", ("",))):
        found = pair_mesh.complete_at(server, prompt, cache_salt=salt)
        assert not found["usage"]["prompt_tokens_details"]["cached_tokens"]
        wait_for(partial(is_stored, salt), "its blocks are stored", PATIENT_S)
        assert not any(is_stored(one) for one in others)


@pytest.mark.cell("vllm", "approximate entries without events")
def test_decisions_stand_in_for_the_events_that_a_mesh_does_not_read(
    servers: list[VllmServer], tmp_path: Path
) -> None:
    flags = ("--no-kv-events", f"--block-size={BLOCK_SIZE}")
    with ServersMesh(tmp_path, servers, *flags) as mesh:
        for number in range(60, 64):
            prompt = prompt_of(number)
            worker = str(mesh.complete(prompt)["nvext"]["worker_id"])
            assert mesh.overlap(prompt) == (worker, 10)


@pytest.mark.cell("vllm", "several servers", "a server that hangs")
def test_streams_leave_a_server_that_hangs_and_it_is_used_again_when_it_goes_on(
    pair_mesh: ServersMesh, servers: list[VllmServer]
) -> None:
    assert all(pair_mesh.serves(one) for one in servers)
    streams = streams_of(pair_mesh, 100)
    loser = busiest(servers)
    loser.freeze()
    try:
        assert streams.found() == streams.expected, "they continued exactly"
        for at in range(6):
            pair_mesh.complete(prompt_of(120 + at, 40), 2)
    finally:
        loser.thaw()
        wait_for(lambda: pair_mesh.serves(loser), "it is back", PATIENT_S)


@pytest.mark.cell("vllm", "a server that ends, and comes back")
def test_streams_continue_exactly_when_their_server_is_killed_and_it_comes_back_empty(
    pair_mesh: ServersMesh, servers: list[VllmServer]
) -> None:
    cached = prompt_of(200)
    for server in servers:
        pair_mesh.complete_at(server, cached)
    streams = streams_of(pair_mesh, 210)
    loser = busiest(servers)
    worker = pair_mesh.worker_of(loser)
    with loser.killed():
        assert streams.found() == streams.expected, "they continued exactly"
        for at in range(6):
            pair_mesh.complete(prompt_of(230 + at, 40), 2)
    wait_for(lambda: pair_mesh.serves(loser), "it is back", PATIENT_S)
    assert pair_mesh.worker_of(loser) == worker, "it kept its worker"
    wait_for(lambda: pair_mesh.overlap(cached)[0] != worker, "the index has its empty cache")


@pytest.mark.cell("vllm", "retry before the first token")
def test_requests_that_wait_at_a_server_are_retried_when_it_is_killed(
    pair_mesh: ServersMesh, servers: list[VllmServer]
) -> None:
    with ThreadPoolExecutor(8) as pool, ExitStack() as busy:
        for server in servers:
            for at in range(SLOTS):
                busy.enter_context(occupied(server, prompt_of(400 + at, 32)))
        pending = [pool.submit(pair_mesh.complete, prompt_of(300 + at, 40)) for at in range(8)]
        wait_for(lambda: busiest(servers).running() > SLOTS, "some wait at a server", PATIENT_S)
        loser = busiest(servers)
        with loser.killed():
            busy.close()
            found = [one.result()["nvext"]["completion_token_ids"] for one in pending]
    assert [len(one) for one in found] == [8] * 8
    wait_for(lambda: pair_mesh.serves(loser), "it is back", PATIENT_S)


@contextmanager
def occupied(server: VllmServer, prompt: list[int]) -> Iterator[None]:
    """Has a begun response of a server, past the mesh."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3900, "ignore_eos": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream(
        "POST", url, json=body | {"stream": True}, timeout=PATIENT_S, trust_env=False
    ) as response:
        assert response.status_code == 200
        yield


@pytest.mark.cell("vllm", "replay of missed KV events")
def test_events_missed_while_the_connection_was_cut_are_replayed(
    servers: list[VllmServer], tmp_path: Path
) -> None:
    server, before, missed = servers[0], prompt_of(70), prompt_of(71)
    with TcpProxy(server.events_port) as proxy:
        flags = [f"--server-kv-events=tcp://127.0.0.1:{proxy.port}", f"--block-size={BLOCK_SIZE}"]
        flags.append(f"--server-kv-replay=tcp://127.0.0.1:{server.replay_port}")
        with ServersMesh(tmp_path, [server], *flags, indexers=1) as mesh:
            generate(server, before)
            wait_for(lambda: mesh.overlap(before)[1] == 10, "events reach the router", PATIENT_S)
            proxy.cut()
            generate(server, missed)
            # Sleep: events would have arrived by now.
            time.sleep(1.0)
            assert mesh.overlap(missed)[1] == 0, "nothing arrives"
            proxy.restore()
            wait_for(lambda: mesh.overlap(missed)[1] == 10, "they are replayed", PATIENT_S)
            assert mesh.overlap(before)[1] == 10, "nothing was withdrawn"
            (worker,) = mesh.workers
            assert not worker.events("kv_events_lost")


def generate(server: VllmServer, prompt: list[int]) -> None:
    """Sends a request past the mesh."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    url = f"{server.url}/v1/completions"
    response = httpx.post(url, json=body, timeout=PATIENT_S, trust_env=False)
    assert response.status_code == 200, response.text

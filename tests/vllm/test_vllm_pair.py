"""One adapter process for two stock vLLM servers, which hang, end and come back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.adapters.known_streams import busiest
from tests.adapters.servers_mesh import PATIENT_S, ServersMesh
from tests.adapters.token_servers import (
    check_decisions,
    check_hang,
    check_invalid_fields,
    check_loss,
    check_replay,
    check_salts,
    prompt_of,
    wait_for_return,
)
from tests.kit.waiting import wait_for
from tests.vllm.vllm_server import BLOCK_SIZE, MODEL, SLOTS, VllmServer

LENGTH = 300
BLOCK_SIZE_FLAG = f"--block-size={BLOCK_SIZE}"


@pytest.fixture(scope="module")
def pair_mesh(
    servers: list[VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServersMesh]:
    with (
        ServersMesh(tmp_path_factory.mktemp("pair"), servers, BLOCK_SIZE_FLAG, indexers=1) as mesh,
        closing(mesh.http),
    ):
        yield mesh


@pytest.mark.cell("vllm", "invalid fields")
def test_invalid_fields_are_refused_by_name_and_no_server_counts_as_failing(
    pair_mesh: ServersMesh, servers: list[VllmServer]
) -> None:
    check_invalid_fields(pair_mesh, servers)


@pytest.mark.cell("vllm", "cache salt")
def test_a_cache_salt_separates_blocks_at_the_server_and_in_the_index(
    pair_mesh: ServersMesh, servers: list[VllmServer]
) -> None:
    check_salts(pair_mesh, servers[0])


@pytest.mark.cell("vllm", "approximate entries without events")
def test_decisions_stand_in_for_the_events_that_a_mesh_does_not_read(
    servers: list[VllmServer], tmp_path: Path
) -> None:
    check_decisions(tmp_path, servers, BLOCK_SIZE_FLAG)


@pytest.mark.cell("vllm", "several servers", "a server that hangs")
def test_streams_leave_a_server_that_hangs_and_it_is_used_again_when_it_goes_on(
    pair_mesh: ServersMesh, servers: list[VllmServer]
) -> None:
    check_hang(pair_mesh, servers, [prompt_of(100 + at, 64) for at in range(4)], LENGTH)


@pytest.mark.cell("vllm", "a server that ends, and comes back")
def test_streams_continue_exactly_when_their_server_is_killed_and_it_comes_back_empty(
    pair_mesh: ServersMesh, servers: list[VllmServer]
) -> None:
    check_loss(pair_mesh, servers, [prompt_of(210 + at, 64) for at in range(4)], LENGTH)


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
    wait_for_return(pair_mesh, loser)


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
    check_replay(tmp_path, servers[0], BLOCK_SIZE_FLAG)

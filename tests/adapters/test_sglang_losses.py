"""What happens to requests when stock SGLang servers hang, end, come back and change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.adapters.conftest import FEW_SLOTS
from tests.adapters.known_streams import busiest
from tests.adapters.servers_mesh import PATIENT_S, Json, ServersMesh, Stream
from tests.adapters.stock_server import SglangServer
from tests.adapters.token_servers import check_hang, check_loss, prompt_of, wait_for_return
from tests.kit.waiting import wait_for


@pytest.mark.cell("sglang", "a server that hangs")
def test_streams_leave_a_server_that_hangs_and_it_is_used_again_when_it_goes_on(
    sglang_mesh: ServersMesh, sglang_servers: list[SglangServer]
) -> None:
    prompts = [prompt_of(240 + at, 64) for at in range(3)]
    check_hang(sglang_mesh, sglang_servers, prompts, 200)


@pytest.mark.cell("sglang", "migration of a started stream")
@pytest.mark.parametrize(
    "state", [{"guided_regex": "[a-z]{600}"}, {"presence_penalty": 0.5, "ignore_eos": True}]
)
def test_a_response_with_more_state_than_its_tokens_ends_with_an_error_to_be_retried(
    sglang_mesh: ServersMesh, sglang_servers: list[SglangServer], state: Json
) -> None:
    body = {"model": sglang_mesh.model, "prompt": prompt_of(260, 40), "max_tokens": 600}
    stream = Stream(sglang_mesh, "/v1/completions", body | state).wait_begun()
    loser = busiest(sglang_servers)
    loser.freeze()
    try:
        assert stream.join()[-1]["error"]["code"] == "not_migratable"
    finally:
        loser.thaw()
    wait_for_return(sglang_mesh, loser)


@pytest.mark.cell("sglang", "migration of a started stream", "a server that ends, and comes back")
def test_streams_continue_exactly_when_their_server_is_killed_and_it_comes_back_empty(
    sglang_mesh: ServersMesh, sglang_servers: list[SglangServer]
) -> None:
    prompts = [prompt_of(210 + at, 64) for at in range(3)]
    check_loss(sglang_mesh, sglang_servers, prompts, 200)


@pytest.mark.cell("sglang", "retry before the first token")
def test_requests_that_wait_at_a_server_are_retried_when_it_is_killed(
    sglang_mesh: ServersMesh, sglang_servers: list[SglangServer]
) -> None:
    _, loser = sglang_servers

    def line_of(at: int) -> Json:
        """Sends a request and returns its log line."""
        body = {"model": sglang_mesh.model, "prompt": prompt_of(300 + at, 40), "max_tokens": 120}
        sglang_mesh.post("/v1/completions", body | {"ignore_eos": True}, x_request_id=f"retry-{at}")
        return sglang_mesh.request_line(f"retry-{at}")

    count = 6 * FEW_SLOTS
    with ThreadPoolExecutor(count) as pool:
        pending = [pool.submit(line_of, at) for at in range(count)]
        wait_for(lambda: loser.running() > FEW_SLOTS, "some wait at the server", PATIENT_S)
        with loser.killed():
            lines = [one.result() for one in pending]
    assert [line["completion_tokens"] for line in lines] == [120] * count
    assert any(line["attempts"] > 1 and "migrations" not in line for line in lines)
    wait_for_return(sglang_mesh, loser)

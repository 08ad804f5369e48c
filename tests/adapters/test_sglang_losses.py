"""What happens to requests when stock SGLang servers hang, end, come back and change."""

from __future__ import annotations

import pytest

from tests.adapters.known_streams import KnownStreams, busiest
from tests.adapters.servers_mesh import PATIENT_S, ServersMesh
from tests.adapters.stock_server import SglangServer
from tests.adapters.test_sglang_features import prompt_of
from tests.kit.waiting import wait_for


@pytest.mark.cell("sglang", "migration of a started stream")
def test_streams_continue_exactly_when_their_server_is_killed_and_it_comes_back_empty(
    sglang_mesh: ServersMesh, sglang_servers: list[SglangServer]
) -> None:
    cached = prompt_of(200)
    for server in sglang_servers:
        sglang_mesh.complete_at(server, cached)
    streams = KnownStreams(sglang_mesh, [prompt_of(210 + at, 64) for at in range(3)], 200)
    streams.wait_begun()
    loser = busiest(sglang_servers)
    worker = sglang_mesh.worker_of(loser)
    loser.kill()
    assert streams.found() == streams.expected, "they continued exactly"
    for at in range(6):
        sglang_mesh.complete(prompt_of(230 + at, 40), 2)
    loser.start()
    loser.wait_ready()
    wait_for(lambda: sglang_mesh.serves(loser), "it is back", PATIENT_S)
    assert sglang_mesh.worker_of(loser) == worker, "it kept its worker"
    wait_for(lambda: sglang_mesh.overlap(cached)[0] != worker, "the index has its empty cache")

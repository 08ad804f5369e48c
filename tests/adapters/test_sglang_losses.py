"""What happens to requests when stock SGLang servers hang, end, come back and change."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.adapters.servers_mesh import PATIENT_S, ServersMesh, Stream
from tests.adapters.stock_server import SglangServer
from tests.adapters.test_sglang_features import prompt_of
from tests.kit.waiting import wait_for


class _Streams:
    """Long greedy responses to different prompts, whose tokens are known before."""

    def __init__(self, mesh: ServersMesh, count: int, length: int, seed: int) -> None:
        prompts = [prompt_of(seed + at, 64) for at in range(count)]
        with ThreadPoolExecutor(count) as pool:
            whole = [*pool.map(lambda one: mesh.complete(one, length), prompts)]
        self.expected = [one["nvext"]["completion_token_ids"] for one in whole]
        facts = {"extra_fields": ["completion_token_ids"]}
        body: dict[str, Any] = {"model": "tiny", "max_tokens": length, "temperature": 0}
        body |= {"ignore_eos": True, "nvext": facts}
        path = "/v1/completions"
        self._streams = [Stream(mesh, path, body | {"prompt": one}) for one in prompts]

    def wait_begun(self) -> None:
        for stream in self._streams:
            stream.wait_begun()

    def found(self) -> Sequence[Any]:
        """Returns the token ids of each response."""
        ends = [[one["nvext"] for one in it.join() if "nvext" in one] for it in self._streams]
        return [end[-1]["completion_token_ids"] if end else None for end in ends]


def busiest(servers: Sequence[SglangServer]) -> SglangServer:
    loser = max(servers, key=SglangServer.running)
    assert loser.running(), "it computes"
    return loser


@pytest.mark.cell("sglang", "migration of a started stream")
def test_streams_continue_exactly_when_their_server_is_killed_and_it_comes_back_empty(
    sglang_mesh: ServersMesh, sglang_servers: list[SglangServer]
) -> None:
    cached = prompt_of(200)
    for server in sglang_servers:
        sglang_mesh.complete_at(server, cached)
    streams = _Streams(sglang_mesh, count=3, length=200, seed=210)
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

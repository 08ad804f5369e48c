"""Two data-parallel ranks in one worker: caches, placement, load and loss of each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from tests.e2e.extensions import ORACLE, Json, complete, unique_prompt
from tests.kit.processes import MODEL, Mesh, Service, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for

BLOCKS = 8
# Of a stream that takes some seconds.
TOKENS = 600
RANKED = ["--dp-size=2"]
mesh = mesh_fixture(workers=1, indexers=1, worker_flags=RANKED)


def blocks_of_ranks(mesh: Mesh) -> dict[tuple[int, int], int]:
    """The blocks that the index has of each worker and rank, as the worker confirms."""
    stub = indexer_pb2_grpc.IndexerServiceStub(mesh.services[0].channel)
    found = stub.Verify(indexer_pb2.VerifyRequest(), timeout=WAIT_S)
    return {(row.source.worker_id, row.source.dp_rank): row.equal for row in found.sources}


def run_on(mesh: Mesh, worker: Service, rank: int, prompt: list[int]) -> Json:
    body, _ = complete(
        mesh,
        prompt,
        backend_instance_id=worker.instance_id,
        dp_rank=rank,
        extra_fields=["worker_id"],
    )
    return body


def rank_of(body: Json) -> int:
    """The rank that served a response."""
    rank: int = body["nvext"]["worker_id"]["decode_dp_rank"]
    return rank


def test_a_prompt_goes_to_the_rank_that_has_it(mesh: Mesh) -> None:
    (worker,) = mesh.workers
    prompts = [unique_prompt(BLOCKS), unique_prompt(BLOCKS)]
    before = blocks_of_ranks(mesh)
    for rank, prompt in enumerate(prompts):
        assert rank_of(run_on(mesh, worker, rank, prompt)) == rank
    expected = {key: before.get(key, 0) + BLOCKS for key in before}
    assert set(expected) == {(worker.instance_id, 0), (worker.instance_id, 1)}
    wait_for(lambda: blocks_of_ranks(mesh) == expected, "the index has the blocks of both ranks")
    for rank, prompt in enumerate(prompts):
        body, _ = complete(mesh, [*prompt, 5], extra_fields=["worker_id"])
        assert rank_of(body) == rank
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * BLOCKS


def test_an_unknown_rank_is_refused_by_name(mesh: Mesh) -> None:
    pins = {"backend_instance_id": mesh.workers[0].instance_id, "dp_rank": 2}
    response = mesh.post_completion("rank-2", unique_prompt(1), nvext=pins)
    assert response.status_code >= 400
    assert "dp_rank" in response.json()["error"]["param"]


def test_the_load_of_a_rank_counts_there_and_draws_others_to_the_other_rank(mesh: Mesh) -> None:
    (worker,) = mesh.workers
    body = {"model": MODEL, "prompt": unique_prompt(BLOCKS), "max_tokens": 4000, "stream": True}
    pins = {"backend_instance_id": worker.instance_id, "dp_rank": 1}
    body |= {"ignore_eos": True, "nvext": pins}

    def running() -> list[int]:
        return [load.running for load in worker.load().loads]

    with mesh.http.stream("POST", f"{mesh.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert [load.dp_rank for load in worker.load().loads] == [0, 1]
        wait_for(lambda: running() == [0, 1], "the request runs on rank 1")
        drawn, _ = complete(mesh, unique_prompt(BLOCKS), extra_fields=["worker_id"])
        assert rank_of(drawn) == 0
    wait_for(lambda: running() == [0, 0], "the client has left")


# Any: JSON.
def events_of(lines: Any) -> list[Json]:
    data = (line.removeprefix("data: ") for line in lines if line.startswith("data: {"))
    return [json.loads(one) for one in data]


@pytest.mark.slow
def test_the_streams_of_both_ranks_continue_after_the_loss_of_their_worker(mesh: Mesh) -> None:
    (lost,) = mesh.workers
    heir = mesh.spawn("worker").wait_ready()
    wait_for(mesh.is_complete, "the frontend has the second worker")
    streams = []
    for _ in range(12):  # more than enough for all ranks, by their load
        prompt = unique_prompt(2)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
        request = mesh.http.build_request(
            "POST", f"{mesh.url}/v1/completions", json=body | {"ignore_eos": True}
        )
        lines = mesh.http.send(request, stream=True).iter_lines()
        first = events_of([next(line for line in lines if line)])
        streams.append((prompt, lines, first))
    for worker in (lost, heir):
        assert all(load.running for load in worker.load().loads), "all ranks have streams"
    lost.kill()
    for prompt, lines, first in streams:
        events = [*first, *events_of(lines)]
        text = "".join(one["choices"][0]["text"] for one in events)
        assert text == ORACLE.completion(prompt, TOKENS, ignore_eos=True).text

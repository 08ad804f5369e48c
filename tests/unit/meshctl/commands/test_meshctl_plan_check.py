"""What `meshctl plan --check-s` prints of requests that failed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.registry.instances import Instance, Role, Snapshot
from meshctl.commands import plan
from meshctl.options import MeshConfig
from meshctl.view.latencies import Course
from meshctl.view.trace_player import Played, PlayedRequest


async def read_members(_: MeshConfig) -> Snapshot:
    worker = Instance(1, "n", "worker", "w", "127.0.0.1:1", model="m")
    return Snapshot(1, {worker.id: worker})


def sample(*_: str) -> str:
    return json.dumps([[0.0, 8, 2, []], [0.1, 8, 2, []]])


async def fail_one(_: object, requests: Sequence[PlayedRequest], block_size: int) -> Played:
    return Played([None, Course(0.1, 0.2, 2, "1")], "status 503: no worker")


def worker(number: int, role: Role, blocks: int | None) -> Instance:
    return Instance(
        *(number, "n", "worker", "w", "127.0.0.1:1"),
        model="m",
        role=role,
        block_size=16,
        total_kv_blocks=blocks,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
    )


def test_the_size_of_a_worker_is_the_least_of_those_that_decode() -> None:
    workers = [worker(1, "prefill", 10), worker(2, "decode", 200), worker(3, "decode", 100)]
    expected = {"block_size": 16, "requests": 32, "chunk_tokens": 2048}
    found = plan.capacity_of(Snapshot(1, {one.id: one for one in workers}), "m")
    assert found == {**expected, "blocks": 100}
    assert plan.capacity_of(Snapshot(1, {1: workers[0]}), "m") == {**expected, "blocks": 10}
    assert plan.capacity_of(Snapshot(1, {1: worker(1, "aggregated", None)}), "m") == expected
    assert plan.capacity_of(Snapshot(1, {}), "m") == {}


async def test_the_first_error_is_printed_also_if_only_some_requests_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "read_members", read_members)
    monkeypatch.setattr(plan, "run_tool", sample)
    monkeypatch.setattr(plan._Mesh, "play", fail_one)
    mesh = plan._Mesh(MeshConfig(), "http://gateway", "m", None)
    measured = await plan.check(mesh, Path("trace"), Path("speeds"), 1.0, 8, 8)
    assert len(json.loads(measured)["ttfts"]) == 1
    text = "1 of 2 requests of the check failed, the first: status 503: no worker\n"
    assert capsys.readouterr().err == text

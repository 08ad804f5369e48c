"""What `meshctl plan --check-s` prints of requests that failed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.registry.instances import Instance, Snapshot
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


async def test_the_first_error_is_printed_also_if_only_some_requests_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "read_members", read_members)
    monkeypatch.setattr(plan, "run_tool", sample)
    monkeypatch.setattr(plan._Mesh, "play", fail_one)
    mesh = plan._Mesh(MeshConfig(), "http://gateway", "m", None)
    measured = await plan.check(mesh, Path("trace"), Path("speeds"), 1.0, (8, 8))
    assert len(json.loads(measured)["ttfts"]) == 1
    text = "1 of 2 requests of the check failed, the first: status 503: no worker\n"
    assert capsys.readouterr().err == text

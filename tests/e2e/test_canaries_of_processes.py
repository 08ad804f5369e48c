"""Canaries through a mesh of processes: they name the stage that fails, and recover."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import wait_for

pytestmark = pytest.mark.slow

FLAGS = ["--canary-interval-s=0.5"]


# Any: JSON.
def result_of(mesh: Mesh, status: str) -> dict[str, Any]:
    """Waits for a result with this status."""

    def reached() -> dict[str, Any] | None:
        result = mesh.http.get(f"{mesh.url}/ready").json()["canaries"].get(MODEL)
        return result if result is not None and result["status"] == status else None

    found = wait_for(reached, f"the canary is {status}")
    assert found is not None
    return found


def test_a_stopped_worker_fails_at_its_stage_until_it_continues(tmp_path: Path) -> None:
    flags = [*FLAGS, "--canary-timeout-s=2"]
    with Mesh(tmp_path, workers=1, frontend_flags=flags) as mesh:
        result_of(mesh, "ok")
        mesh.workers[0].send(signal.SIGSTOP)
        result = result_of(mesh, "failing")
        assert result["stage"] == "worker"
        assert "did not accept the request within 2 s" in result["reason"]
        sample = f'kvmesh_frontend_canary_failures_total{{model="{MODEL}",stage="worker"}}'
        assert f"{sample} " in mesh.http.get(f"{mesh.url}/metrics").text
        mesh.workers[0].send(signal.SIGCONT)
        result_of(mesh, "ok")


def test_canaries_of_a_pair_need_a_router_and_reach_both_workers(tmp_path: Path) -> None:
    frontend_flags = [*FLAGS, "--canary-timeout-s=6"]
    # Else the frontend would place requests on the decode worker alone.
    worker_flags = ["--no-local-prefill"]
    with Mesh(
        tmp_path,
        workers=0,
        prefill=1,
        decode=1,
        frontend_flags=frontend_flags,
        worker_flags=worker_flags,
    ) as mesh:
        result_of(mesh, "ok")
        for worker in mesh.workers:
            assert worker.counters()["finished"] >= 1, worker.kind
        mesh.router.kill()
        result = result_of(mesh, "failing")
        assert result["stage"] == "route"
        assert "no router is available" in result["reason"]
        mesh.spawn("router").wait_ready()
        result_of(mesh, "ok")


def test_a_short_canary_does_not_bypass_the_pair(tmp_path: Path) -> None:
    router_flags = ["--bypass-policy=isl_bounding", "--bypass-eff-isl-ratio-threshold=2"]
    with Mesh(
        tmp_path,
        workers=0,
        prefill=1,
        decode=1,
        frontend_flags=FLAGS,
        router_flags=router_flags,
    ) as mesh:
        result_of(mesh, "ok")
        (prefill,) = mesh.of_kind("prefill")
        accepted = prefill.counters()["accepted"]
        assert accepted >= 1
        mesh.post_completion("short")
        assert mesh.request_line("short")["workers"] == [str(mesh.of_kind("decode")[0].instance_id)]

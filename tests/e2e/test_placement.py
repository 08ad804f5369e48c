"""HTTP hints decide where a request runs: sessions, taints, conditional pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.kit.processes import Mesh
from tests.kit.waiting import wait_for

SPEEDUP_FLAG = "--speedup=20"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    flags = ["--metrics-port=0", "--session-affinity-ttl-s=300"]
    with Mesh(folder, workers=2, worker_flags=[SPEEDUP_FLAG], router_flags=flags) as mesh:
        mesh.spawn("worker", "--taints=fast,zone=b").wait_ready()
        wait_for(mesh.is_complete, "the frontend sees the third worker")
        wait_for(lambda: has_fast_worker(mesh), "the router sees the third worker")
        yield mesh


def has_fast_worker(mesh: Mesh) -> bool:
    fast = {"routing_constraints": {"required_taints": ["fast"]}}
    return mesh.post_completion("ready", nvext=fast).status_code == 200


def serving_workers(mesh: Mesh, client_id: str, prompt: str = "hi", **nvext: Any) -> list[str]:
    response = mesh.post_completion(client_id, prompt, nvext=nvext)
    assert response.status_code == 200, response.text
    workers: list[str] = mesh.request_line(client_id)["workers"]
    return workers


def known_instances(mesh: Mesh) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = mesh.http.get(f"{mesh.url}/health").json()["instances"]
    return listed


def test_a_session_stays_on_its_worker_and_moves_when_the_worker_dies(mesh: Mesh) -> None:
    session: dict[str, Any] = {"session_control": {"session_id": "alice"}}
    first = serving_workers(mesh, "alice-0", **session)
    for number in range(1, 6):
        assert serving_workers(mesh, f"alice-{number}", **session) == first
    assert "session kept" in mesh.request_line("alice-5")["routing"]
    (session_worker,) = [w for w in mesh.workers if str(w.instance_id) in first]
    session_worker.process.kill()
    session_worker.process.wait()
    second = serving_workers(mesh, "alice-6", **session)
    assert second[-1] not in first
    assert serving_workers(mesh, "alice-7", **session) == second[-1:]
    assert mesh.router.metric("kvmesh_router_affinity_bindings") >= 1
    assert mesh.router.metric('kvmesh_router_affinity_total{outcome="kept"}') >= 6
    if session_worker.name == "worker-3":
        mesh.spawn("worker", "--taints=fast,zone=b").wait_ready()
        wait_for(mesh.is_complete, "the worker with taints is back")
        wait_for(lambda: has_fast_worker(mesh), "the router sees the worker with taints")


def test_required_taints_choose_the_worker_or_return_503(
    mesh: Mesh,
) -> None:
    (fast_worker,) = [w for w in mesh.workers if int(w.name.split("-")[1]) >= 3]
    for number in range(4):
        constraints = {"required_taints": ["fast", "zone=b"]}
        placed = serving_workers(mesh, f"fast-{number}", routing_constraints=constraints)
        assert placed == [str(fast_worker.instance_id)]
    gold = {"routing_constraints": {"required_taints": ["gold"]}}
    refused = mesh.post_completion("none", nvext=gold)
    assert refused.status_code == 503
    assert "gold" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_a_prompt_cached_by_the_decode_worker_bypasses_prefill(tmp_path: Path) -> None:
    prompt = "the quick brown fox jumps over the lazy dog " * 40
    pair = Mesh(
        tmp_path,
        workers=0,
        prefill=1,
        decode=1,
        indexers=1,
        worker_flags=[SPEEDUP_FLAG],
        router_flags=["--metrics-port=0", "--bypass-policy=isl_bounding"],
    )
    with pair as mesh:
        (router,) = [i for i in known_instances(mesh) if i["service"] == "router"]
        assert router["prefill_bypass"] == "isl_bounding"
        assert len(serving_workers(mesh, "first", prompt)) == 2
        numbers = count()
        wait_for(
            lambda: len(serving_workers(mesh, f"again-{next(numbers)}", prompt)) == 1,
            "the index has the blocks of the decode worker",
        )
        bypasses = 'kvmesh_router_prefill_bypasses_total{reason="short_prompt"}'
        assert mesh.router.metric(bypasses) == 1
        assert len(serving_workers(mesh, "other", f"something else, {prompt}")) == 2

"""Where a client's request runs, by what it says over HTTP: sessions, taints, conditional pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.mesh import MODEL, Mesh, logs_on_failure, wait_for

SPEEDUP_FLAG = "--speedup=20"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    flags = ["--metrics-port=0", "--session-affinity-ttl-s=300"]
    with Mesh(folder, workers=2, worker_flags=[SPEEDUP_FLAG], router_flags=flags) as mesh:
        mesh.spawn("worker", "--taints=fast,zone=b").wait_ready()
        wait_for(mesh.is_complete, "the frontend knows the third worker")
        yield mesh


@pytest.fixture(autouse=True)
def _logs(mesh: Mesh, request: pytest.FixtureRequest) -> Iterator[None]:
    with logs_on_failure(mesh, request):
        yield


def post_completion(mesh: Mesh, client_id: str, prompt: str = "hi", **nvext: Any) -> httpx.Response:
    return mesh.http.post(
        f"{mesh.url}/v1/completions",
        json={"model": MODEL, "prompt": prompt, "max_tokens": 2, "nvext": nvext},
        headers={"x-request-id": client_id},
    )


def log_line(mesh: Mesh, client_id: str) -> dict[str, Any]:
    """The line of a request in the frontend's log."""

    def lines() -> list[dict[str, Any]]:
        events = mesh.frontend.events("request")
        return [e for e in events if e.get("client_request_id") == client_id]

    return wait_for(lines, f"the line of {client_id} is in the log")[0]


def serving_workers(mesh: Mesh, client_id: str, prompt: str = "hi", **nvext: Any) -> list[str]:
    answer = post_completion(mesh, client_id, prompt, **nvext)
    assert answer.status_code == 200, answer.text
    workers: list[str] = log_line(mesh, client_id)["workers"]
    return workers


def known_instances(mesh: Mesh) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = mesh.http.get(f"{mesh.url}/health").json()["instances"]
    return listed


def router_metric(mesh: Mesh, name: str) -> float:
    """The value of one sample, given as Prometheus writes it."""
    text = mesh.http.get(f"http://{mesh.router.addresses['metrics']}/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


def test_a_session_stays_on_its_worker_and_outlives_it(mesh: Mesh) -> None:
    session: dict[str, Any] = {"session_control": {"session_id": "alice"}}
    first = serving_workers(mesh, "alice-0", **session)
    for number in range(1, 6):
        assert serving_workers(mesh, f"alice-{number}", **session) == first
    assert "session kept" in log_line(mesh, "alice-5")["routing"]
    (session_worker,) = [w for w in mesh.workers if str(w.instance_id) in first]
    session_worker.process.kill()
    session_worker.process.wait()
    second = serving_workers(mesh, "alice-6", **session)
    assert second[-1] not in first
    assert serving_workers(mesh, "alice-7", **session) == second[-1:]
    assert router_metric(mesh, "kvmesh_router_affinity_bindings") >= 1
    assert router_metric(mesh, 'kvmesh_router_affinity_total{outcome="kept"}') >= 6
    if session_worker.name == "worker-3":
        mesh.spawn("worker", "--taints=fast,zone=b").wait_ready()
        wait_for(mesh.is_complete, "the tainted one is back")


def test_required_taints_choose_the_worker_and_nobody_is_a_503(mesh: Mesh) -> None:
    (fast_worker,) = [w for w in mesh.workers if int(w.name.split("-")[1]) >= 3]
    for number in range(4):
        constraints = {"required_taints": ["fast", "zone=b"]}
        placed = serving_workers(mesh, f"fast-{number}", routing_constraints=constraints)
        assert placed == [str(fast_worker.instance_id)]
    refused = post_completion(mesh, "none", routing_constraints={"required_taints": ["gold"]})
    assert refused.status_code == 503
    assert "gold" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_a_prompt_that_decode_holds_is_not_split(tmp_path: Path) -> None:
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
            "the index knows what decode holds",
        )
        bypasses = 'kvmesh_router_prefill_bypasses_total{reason="short_prompt"}'
        assert router_metric(mesh, bypasses) == 1
        assert len(serving_workers(mesh, "other", f"something else, {prompt}")) == 2

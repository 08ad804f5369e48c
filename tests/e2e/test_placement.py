"""Where a client's request runs, by what it says over HTTP: sessions, taints, conditional pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.mesh import MODEL, Mesh, logs_on_failure, wait_for

SPEED = "--speedup=20"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    flags = ["--metrics-port=0", "--session-affinity-ttl-s=300"]
    with Mesh(folder, workers=2, worker_flags=[SPEED], router_flags=flags) as mesh:
        mesh.spawn("worker", "--taints=fast,zone=b").wait_ready()
        wait_for(mesh.is_complete, "the frontend knows the third worker")
        yield mesh


@pytest.fixture(autouse=True)
def _logs(mesh: Mesh, request: pytest.FixtureRequest) -> Iterator[None]:
    with logs_on_failure(mesh, request):
        yield


def ask(mesh: Mesh, client_id: str, words: str = "hi", **nvext: Any) -> httpx.Response:
    return mesh.http.post(
        f"{mesh.url}/v1/completions",
        json={"model": MODEL, "prompt": words, "max_tokens": 2, "nvext": nvext},
        headers={"x-request-id": client_id},
    )


def told(mesh: Mesh, client_id: str) -> dict[str, Any]:
    """The line of a request in the frontend's log."""

    def lines() -> list[dict[str, Any]]:
        events = mesh.frontend.events("request")
        return [e for e in events if e.get("client_request_id") == client_id]

    return wait_for(lines, f"the line of {client_id} is in the log")[0]


def workers_of(mesh: Mesh, client_id: str, words: str = "hi", **nvext: Any) -> list[str]:
    answer = ask(mesh, client_id, words, **nvext)
    assert answer.status_code == 200, answer.text
    workers: list[str] = told(mesh, client_id)["workers"]
    return workers


def instances(mesh: Mesh) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = mesh.http.get(f"{mesh.url}/health").json()["instances"]
    return shown


def router_metric(mesh: Mesh, name: str) -> float:
    """The value of one sample, given as Prometheus writes it."""
    text = mesh.http.get(f"http://{mesh.router.addresses['metrics']}/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


def test_a_session_stays_on_its_worker_and_outlives_it(mesh: Mesh) -> None:
    session: dict[str, Any] = {"session_control": {"session_id": "alice"}}
    first = workers_of(mesh, "alice-0", **session)
    for number in range(1, 6):
        assert workers_of(mesh, f"alice-{number}", **session) == first
    assert "session kept" in told(mesh, "alice-5")["routing"]
    (bound,) = [w for w in mesh.workers if str(w.instance_id) in first]
    bound.process.kill()
    bound.process.wait()
    second = workers_of(mesh, "alice-6", **session)
    assert second[-1] not in first
    assert workers_of(mesh, "alice-7", **session) == second[-1:]
    assert router_metric(mesh, "kvmesh_router_affinity_bindings") >= 1
    assert router_metric(mesh, 'kvmesh_router_affinity_total{outcome="kept"}') >= 6
    if bound.name == "worker-3":
        mesh.spawn("worker", "--taints=fast,zone=b").wait_ready()
        wait_for(mesh.is_complete, "the tainted one is back")


def test_required_taints_choose_the_worker_and_nobody_is_a_503(mesh: Mesh) -> None:
    (fast,) = [w for w in mesh.workers if int(w.name.split("-")[1]) >= 3]
    for number in range(4):
        constraints = {"required_taints": ["fast", "zone=b"]}
        placed = workers_of(mesh, f"fast-{number}", routing_constraints=constraints)
        assert placed == [str(fast.instance_id)]
    refused = ask(mesh, "none", routing_constraints={"required_taints": ["gold"]})
    assert refused.status_code == 503
    assert "gold" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_a_prompt_that_decode_holds_is_not_split(tmp_path: Path) -> None:
    words = "the quick brown fox jumps over the lazy dog " * 40
    pair = Mesh(
        tmp_path,
        workers=0,
        prefill=1,
        decode=1,
        indexers=1,
        worker_flags=[SPEED],
        router_flags=["--metrics-port=0", "--bypass-policy=isl_bounding"],
    )
    with pair as mesh:
        (router,) = [i for i in instances(mesh) if i["service"] == "router"]
        assert router["prefill_bypass"] == "isl_bounding"
        assert len(workers_of(mesh, "first", words)) == 2
        numbers = count()
        wait_for(
            lambda: len(workers_of(mesh, f"again-{next(numbers)}", words)) == 1,
            "the index knows what decode holds",
        )
        bypasses = 'kvmesh_router_prefill_bypasses_total{reason="short_prompt"}'
        assert router_metric(mesh, bypasses) == 1
        assert len(workers_of(mesh, "other", f"something else, {words}")) == 2

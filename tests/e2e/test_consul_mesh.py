"""A mesh with a real Consul: what faults of Consul and of workers cost clients. Also a registry of
files that is lost."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.contract.consul_agent import ConsulAgent, running_agent
from tests.kit.logs import logs_on_failure
from tests.kit.oracle import Oracle
from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import wait_for

pytestmark = pytest.mark.slow

# One to two seconds on an idle machine.
LEAVES_PLACEMENT_S = 10.0
PROMPT = "tell me of the sea"


@pytest.fixture(scope="module")
def agent() -> Iterator[ConsulAgent]:
    with running_agent() as running:
        yield running


@pytest.fixture
def mesh(tmp_path: Path, agent: ConsulAgent, request: pytest.FixtureRequest) -> Iterator[Mesh]:
    agent.start()
    agent.wipe()
    flags = ["--registry=consul", f"--consul-url={agent.url}", "--health-port=0"]
    frontend_flags = [*flags, "--worker-wait-s=0.5"]
    with Mesh(
        tmp_path,
        worker_flags=[*flags, "--speedup=20"],
        frontend_flags=frontend_flags,
        router_flags=flags,
    ) as running:
        wait_for(running.is_complete, "the frontend uses the router and all workers")
        with logs_on_failure(running, request):
            yield running


def post_chat(mesh: Mesh, tokens: int = 8) -> httpx.Response:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    return mesh.http.post(f"{mesh.url}/v1/chat/completions", json=body)


class LoadGenerator:
    """Sends requests one after the other until the block ends; keeps their statuses."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.statuses: list[int] = []

    def __enter__(self) -> LoadGenerator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(15)

    def _run(self) -> None:
        while not self._stop.is_set() and len(self.statuses) < 20_000:
            self.statuses.append(post_chat(self._mesh).status_code)


def test_no_request_fails_while_consul_dies_and_returns_without_state(
    mesh: Mesh, agent: ConsulAgent
) -> None:
    all_ids = {s.instance_id for s in mesh.services}
    with LoadGenerator(mesh) as load:
        wait_for(lambda: len(load.statuses) > 5, "requests are served")
        agent.kill()
        before = len(load.statuses)
        wait_for(lambda: len(load.statuses) > before + 20, "requests are served without Consul")
        agent.start()
        wait_for(lambda: registered_ids(agent) == all_ids, "all instances have registered again")
        before = len(load.statuses)
        wait_for(lambda: len(load.statuses) > before + 20, "requests are served again")
    assert set(load.statuses) == {200}
    wait_for(mesh.is_complete, "the frontend sees all instances again")
    check_new_frontend(mesh)


def check_new_frontend(mesh: Mesh) -> None:
    """Raises AssertionError unless a frontend that starts now serves the model by its card."""
    url = mesh.spawn("frontend").wait_ready().addresses["http"]
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    wait_for(
        lambda: mesh.http.post(f"{url}/v1/completions", json=body).status_code == 200,
        "a new frontend serves the model",
    )


def test_a_new_frontend_serves_after_the_folder_of_the_registry_was_deleted(tmp_path: Path) -> None:
    with Mesh(tmp_path, workers=1, worker_flags=["--speedup=0"]) as mesh:
        shutil.rmtree(tmp_path / "registry")
        check_new_frontend(mesh)


def registered_ids(agent: ConsulAgent) -> set[int]:
    """Returns the ids of the instances that pass the agent's checks."""
    response = httpx.get(
        f"{agent.url}/v1/health/service/kvmesh-default?passing", trust_env=False, timeout=2.0
    )
    return {int(entry["Service"]["ID"].rpartition("-")[2], 16) for entry in response.json()}


def test_a_killed_worker_leaves_placement_and_no_request_fails(
    mesh: Mesh,
) -> None:
    victim = mesh.workers[0]
    dead_id = victim.instance_id
    with LoadGenerator(mesh) as load:
        wait_for(lambda: len(load.statuses) > 5, "requests are served")
        victim.kill()
        died_at = time.monotonic()
        wait_for(
            lambda: dead_id not in mesh.known_instance_ids("worker"),
            "the frontend sees that the worker has left",
            LEAVES_PLACEMENT_S,
        )
        print(f"\nleft placement after {time.monotonic() - died_at:.2f} s")
    assert set(load.statuses) == {200}
    tried_twice = [
        line
        for line in mesh.frontend.events("request")
        if [int(worker) for worker in line.get("workers", [])].count(dead_id) > 1
    ]
    assert not tried_twice, "no request tries the dead worker twice"


def test_members_that_consul_checks_become_routable(mesh: Mesh) -> None:
    mesh.spawn("worker").wait_ready()
    assert [service.wait_routable()["given_up"] for service in mesh.services] == [[]] * 5


def test_a_model_is_listed_while_it_has_a_worker(mesh: Mesh) -> None:
    for worker in mesh.workers:
        worker.kill()

    def models() -> list[str]:
        listed = mesh.http.get(f"{mesh.url}/v1/models").json()["data"]
        return [model["id"] for model in listed]

    wait_for(lambda: models() == [], "the model is not listed")
    response = post_chat(mesh)
    assert response.status_code == 503
    assert response.json()["error"]["message"]
    mesh.spawn("worker").wait_ready()
    wait_for(lambda: models() == [MODEL], "the model is listed")
    wait_for(lambda: post_chat(mesh).status_code == 200, "the model is served")


def test_a_worker_with_a_conflicting_card_exits_with_the_reason(mesh: Mesh) -> None:
    conflicting_worker = mesh.spawn("worker", "--context-length=4096")
    status = wait_for(lambda: conflicting_worker.process.poll(), "the worker exits")
    assert status == 1
    assert "CARD_CONFLICT" in conflicting_worker.tail(
        200
    ) or "is served in" in conflicting_worker.tail(200)
    assert post_chat(mesh).status_code == 200


def test_responses_are_exact_with_consul(mesh: Mesh) -> None:
    response = post_chat(mesh, tokens=24)
    expected = Oracle().chat(PROMPT, 24)
    assert response.json()["choices"][0]["message"]["content"] == expected.text

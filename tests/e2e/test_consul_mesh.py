"""A mesh that finds itself through a real Consul: what its faults cost clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.contract.consul_agent import ConsulAgent, running_agent
from tests.e2e.mesh import MODEL, Mesh, Oracle, logs_on_failure, wait_for

pytestmark = pytest.mark.slow

# One to two seconds where the machine has nothing else to do.
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
    with Mesh(
        tmp_path,
        worker_flags=[*flags, "--speedup=20"],
        frontend_flags=flags,
        router_flags=flags,
    ) as running:
        wait_for(lambda: running.is_complete(), "the frontend knows router and workers")
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
    """Requests one after the other until it is stopped; what came of each."""

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


def test_consul_may_die_and_come_back_empty_and_no_request_fails(
    mesh: Mesh, agent: ConsulAgent
) -> None:
    all_ids = {s.instance_id for s in mesh.services}
    with LoadGenerator(mesh) as load:
        wait_for(lambda: len(load.statuses) > 5, "requests are served")
        agent.kill()
        before = len(load.statuses)
        wait_for(lambda: len(load.statuses) > before + 20, "requests are served without Consul")
        agent.start()
        wait_for(lambda: registered_ids(agent) == all_ids, "all have registered again")
        before = len(load.statuses)
        wait_for(lambda: len(load.statuses) > before + 20, "requests are served again")
    assert set(load.statuses) == {200}
    wait_for(mesh.is_complete, "the frontend has heard that all are there again")


def registered_ids(agent: ConsulAgent) -> set[int]:
    """Ids of the instances that the agent's checks have passed."""
    answer = httpx.get(
        f"{agent.url}/v1/health/service/kvmesh-default?passing", trust_env=False, timeout=2.0
    )
    return {int(entry["Service"]["ID"].rpartition("-")[2], 16) for entry in answer.json()}


def test_a_worker_that_dies_without_a_word_leaves_placement_and_fails_no_request(
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
            "the frontend knows that it is gone",
            LEAVES_PLACEMENT_S,
        )
        print(f"\nleft placement after {time.monotonic() - died_at:.2f} s")
    assert set(load.statuses) == {200}
    tried_twice = [
        line
        for line in mesh.frontend.events("request")
        if [int(worker) for worker in line.get("workers", [])].count(dead_id) > 1
    ]
    assert not tried_twice, "no request asks the dead worker twice"


def test_the_model_goes_with_its_last_worker_and_comes_back_with_the_next(mesh: Mesh) -> None:
    for worker in mesh.workers:
        worker.kill()

    def models() -> list[str]:
        listed = mesh.http.get(f"{mesh.url}/v1/models").json()["data"]
        return [model["id"] for model in listed]

    wait_for(lambda: models() == [], "the model is gone")
    answer = post_chat(mesh)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"]
    mesh.spawn("worker").wait_ready()
    wait_for(lambda: models() == [MODEL], "the model is back")
    wait_for(lambda: post_chat(mesh).status_code == 200, "and it is served")


def test_a_worker_with_another_card_is_refused_and_says_so(mesh: Mesh) -> None:
    conflicting_worker = mesh.spawn("worker", "--context-length=4096")
    status = wait_for(lambda: conflicting_worker.process.poll(), "the rival ends")
    assert status == 1
    assert "CARD_CONFLICT" in conflicting_worker.tail(
        200
    ) or "is served in" in conflicting_worker.tail(200)
    assert post_chat(mesh).status_code == 200


def test_answers_are_exact_on_consul_too(mesh: Mesh) -> None:
    answer = post_chat(mesh, tokens=24)
    expected = Oracle().chat(PROMPT, 24)
    assert answer.json()["choices"][0]["message"]["content"] == expected.text

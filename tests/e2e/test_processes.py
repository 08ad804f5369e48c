"""A frontend of two processes: shared port, summed metrics, restart of a process, drain."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections import defaultdict
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.processes import MODEL, Mesh, Service, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

PREFIX = "kvmesh_frontend"
OUTPUT_TOKENS = 4
# Enough that both processes receive one: 2**-31 that they do not.
REQUESTS = 32


mesh = mesh_fixture(
    workers=1, frontend_flags=["--processes=2", "--notice-s=0.2"], worker_flags=["--speedup=2"]
)


def complete(mesh: Mesh, max_tokens: int = OUTPUT_TOKENS) -> int:
    """The status of a request on a connection of its own."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": max_tokens, "ignore_eos": True}
    url = f"{mesh.url}/v1/completions"
    return httpx.post(url, json=body, timeout=WAIT_S, trust_env=False).status_code


def scrape(mesh: Mesh) -> dict[str, float]:
    """Sums of the samples by name, of a scrape on a connection of its own."""
    text = httpx.get(f"{mesh.url}/metrics", timeout=WAIT_S, trust_env=False).text
    sums: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("le", "+Inf") == "+Inf":
                sums[sample.name] += sample.value
    return sums


def children(frontend: Service) -> set[int]:
    """The pids of the two processes."""
    pid = frontend.pid
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def kill_and_wait(pid: int) -> None:
    """Kills a process that its stopped parent does not reap. Waits until its threads have ended:
    before, its listeners may accept a connection."""
    os.kill(pid, signal.SIGKILL)
    process = Path(f"/proc/{pid}")

    def has_ended() -> bool:
        state = (process / "stat").read_text().rpartition(") ")[2][0]
        return state == "Z" and len(list((process / "task").iterdir())) == 1

    wait_for(has_ended, "the killed process has ended")


def serving_instances(mesh: Mesh) -> set[str]:
    return {event["instance"] for event in mesh.frontend.events("request")}


def is_ready(mesh: Mesh, *, degraded: bool) -> bool:
    try:
        response = httpx.get(f"{mesh.url}/ready", timeout=WAIT_S, trust_env=False)
    except httpx.TransportError:  # it was accepted by a process that was killed
        return False
    has_news = any("started again" in reason for reason in response.json()["degraded"])
    return response.status_code == 200 and has_news == degraded


@pytest.mark.row("S3-46")
def test_requests_reach_both_processes_and_metrics_are_their_sums(mesh: Mesh) -> None:
    before = scrape(mesh)
    for _ in range(REQUESTS):
        assert complete(mesh) == 200
    wait_for(lambda: len(serving_instances(mesh)) == 2, "both processes log requests")
    assert len(mesh.known_instance_ids("frontend")) == 2
    for _ in range(8):  # from either process
        now = scrape(mesh)
        grown = {name: now[name] - before[name] for name in now}
        assert grown[f"{PREFIX}_requests_total"] == REQUESTS
        assert grown[f"{PREFIX}_output_tokens_total"] == REQUESTS * OUTPUT_TOKENS
        assert grown[f"{PREFIX}_time_to_first_token_seconds_count"] == REQUESTS
        assert grown[f"{PREFIX}_request_duration_seconds_bucket"] == REQUESTS
        assert now[f"{PREFIX}_inflight_requests"] == 0
        assert now[f"{PREFIX}_model_workers"] == 1


@pytest.mark.row("S3-46")
def test_a_killed_process_is_replaced_while_the_other_one_serves(mesh: Mesh) -> None:
    for _ in range(REQUESTS):
        complete(mesh)
    earlier, before = children(mesh.frontend), scrape(mesh)
    # A stopped parent does not restart it.
    mesh.frontend.send(signal.SIGSTOP)
    try:
        kill_and_wait(min(earlier))
        wait_for(lambda: is_ready(mesh, degraded=True), "the other process reports it")
        assert {complete(mesh) for _ in range(8)} == {200}
    finally:
        mesh.frontend.send(signal.SIGCONT)
    wait_for(lambda: is_ready(mesh, degraded=False), "a new process serves")
    pids = children(mesh.frontend)
    assert len(pids) == 2
    assert min(earlier) not in pids
    assert {complete(mesh) for _ in range(REQUESTS)} == {200}
    (event,) = mesh.frontend.events("process_ended")
    assert event["status"] == -signal.SIGKILL
    # The counts of the killed process count on, its gauges do not.
    for _ in range(8):
        now = scrape(mesh)
        requests = now[f"{PREFIX}_requests_total"] - before[f"{PREFIX}_requests_total"]
        assert requests == 8 + REQUESTS
        assert now[f"{PREFIX}_inflight_requests"] == 0
    wait_for(lambda: len(mesh.known_instance_ids("frontend")) == 2, "the killed one has left")


@pytest.mark.row("S3-46")
def test_the_gauges_of_a_killed_process_end_with_it(mesh: Mesh) -> None:
    """Both processes have streams: of 12, one has none in 1 of 2,048 runs."""
    url = f"{mesh.url}/v1/completions"
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 300, "ignore_eos": True, "stream": True}
    started = threading.Barrier(13)

    def read_stream() -> None:
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", url, json=body, timeout=WAIT_S, trust_env=False) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            started.wait(WAIT_S)
            for _ in lines:
                pass

    threads = [threading.Thread(target=read_stream) for _ in range(12)]
    for thread in threads:
        thread.start()
    started.wait(WAIT_S)
    assert scrape(mesh)[f"{PREFIX}_inflight_requests"] == 12
    os.kill(min(children(mesh.frontend)), signal.SIGKILL)
    for thread in threads:
        thread.join(WAIT_S)
    wait_for(lambda: len(children(mesh.frontend)) == 2, "the process is replaced")
    wait_for(lambda: is_ready(mesh, degraded=False), "a new process serves")
    for _ in range(8):  # from either process
        assert scrape(mesh)[f"{PREFIX}_inflight_requests"] == 0
    wait_for(lambda: len(mesh.known_instance_ids("frontend")) == 2, "the killed one has left")


def test_another_frontend_cannot_join_the_port(mesh: Mesh, tmp_path: Path) -> None:
    port = mesh.url.rsplit(":", 1)[1]
    flags = [f"--http-port={port}", f"--registry-path={tmp_path}", "--processes=2"]
    second = Service("frontend", flags, tmp_path, "second")
    try:
        with pytest.raises(AssertionError, match="cannot serve HTTP on"):
            second.wait_ready()
        assert second.wait() == 1
    finally:
        second.close()


def test_each_process_serves_the_sums_on_the_metrics_listener_with_its_key(mesh: Mesh) -> None:
    frontend = mesh.spawn("frontend", "--metrics-port=0", "--metrics-key=the-key").wait_ready()
    url, metrics = frontend.addresses["http"], f"http://{frontend.addresses['metrics']}"

    def get(base: str, path: str, key: str = "the-key") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{base}{path}", headers=headers, timeout=WAIT_S, trust_env=False)

    wait_for(lambda: get(url, "/ready").status_code == 200, "the frontend is ready")
    for _ in range(REQUESTS):
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S, trust_env=False)
        assert response.status_code == 200
    served = wait_for(lambda: {one["instance"] for one in frontend.events("request")}, "a log line")
    assert len(served) == 2
    for _ in range(8):  # from either process
        assert get(metrics, "/metrics", "wrong").status_code == 401
        response = get(metrics, "/metrics")
        assert response.status_code == 200
        samples = [
            sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
            if sample.name == f"{PREFIX}_requests_total"
        ]
        assert sum(samples) == REQUESTS
        assert get(metrics, "/health").json()["instances"]
        assert get(url, "/metrics").status_code == 404
    # A stopped parent does not restart it.
    frontend.send(signal.SIGSTOP)
    try:
        kill_and_wait(min(children(frontend)))
        for _ in range(8):
            assert get(metrics, "/metrics").status_code == 200
    finally:
        frontend.kill()
    wait_for(lambda: len(mesh.known_instance_ids("frontend")) == 2, "it has left")


def test_a_stop_lets_the_streams_of_both_processes_end(mesh: Mesh) -> None:
    url, finished = f"{mesh.url}/v1/completions", list[int]()
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 300, "ignore_eos": True, "stream": True}
    started = threading.Barrier(13)

    def read_stream() -> None:
        with httpx.stream("POST", url, json=body, timeout=WAIT_S, trust_env=False) as response:
            lines = response.iter_lines()
            next(lines)
            started.wait(WAIT_S)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            finished.append(sum(len(event["choices"]) for event in events))

    threads = [threading.Thread(target=read_stream) for _ in range(12)]
    for thread in threads:
        thread.start()
    started.wait(WAIT_S)
    assert scrape(mesh)[f"{PREFIX}_inflight_requests"] == 12
    mesh.frontend.send(signal.SIGTERM)
    assert mesh.frontend.wait() == 0
    for thread in threads:
        thread.join(WAIT_S)
    assert len(finished) == 12
    assert min(finished) >= 298

"""Runs the pods of an overlay as processes, under load, and compares them with their manifests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.compose.checks import check_batch
from tests.compose.load import Load, figures
from tests.contract.consul_agent import consul_binary
from tests.kit.images import ROOT
from tests.kit.waiting import WAIT_S, wait_for
from tests.kubernetes import network
from tests.kubernetes.cluster import Cluster, Process
from tests.kubernetes.manifests import NAMESPACE, Manifests
from tools.kubernetes.connections import HTTP, Connection, Pods, Port

OVERLAY: Final = "sim"
# Connections that the run does not bring about, or once and for less than the pause between two
# looks.
UNSEEN: Final = (
    "verification of the index",
    "chats of the playground",
    "large files of models",
    "stored responses",
    "acknowledgement of a router",
    "acknowledgement of an indexer",
    "acknowledgement of a worker",
    "probe of a member that the registry suspects",
    "gossip of the servers",
)
LOAD_S: Final = 5.0
# For connections that are short and come again: probes, scrapes, handoffs.
SEEN_S: Final = 120.0
# The handoff of such a prompt lasts for several looks.
LONG_PROMPT_WORDS: Final = 6000

# Takes the name of a check, and the check, which returns problems.
AddCheck = Callable[[str, Callable[[], list[str]]], None]


# Any: figures by name.
def check_run(check: AddCheck, manifests: Manifests, folder: Path) -> dict[str, Any]:
    """Runs all pods; returns figures: seconds until all probes succeed (`start_s`), until the
    longest stop ends (`stop_s`), and those of the load."""
    found: dict[str, Any] = {}
    if problems := consul_problems():
        check("run/consul", lambda: problems)
        return found
    with Cluster(manifests, folder) as cluster:

        def start() -> list[str]:
            begun = time.monotonic()
            cluster.start()
            cluster.await_probes()
            found["start_s"] = round(time.monotonic() - begun, 1)
            return status_problems(cluster)

        check("run/start", start)
        if "start_s" not in found:
            return found
        load = Load([f"http://{p.address}:{HTTP.number}" for p in cluster.of_component("frontend")])
        with load.running():
            time.sleep(LOAD_S)
            check("run/stored responses", lambda: stored_response_problems(cluster))
            check("run/batch", lambda: batch_problems(cluster))
            check("run/server lost", lambda: lose_server(cluster))
            check("run/worker lost", lambda: lose_worker(cluster))
            time.sleep(LOAD_S)
            check("run/every connection is seen", lambda: unseen_problems(cluster))
        found |= figures(load.replies)
        check("run/load", lambda: load_problems(found))
        check("run/connections", lambda: connection_problems(cluster))
        check("run/stop", lambda: stop_problems(cluster, found))
        check("run/files", lambda: [f"{path} is written" for path in cluster.written_files()])
    return found


def consul_problems() -> list[str]:
    """Returns why there is no binary of Consul."""
    try:
        consul_binary()
    except pytest.skip.Exception as reason:
        return [f"{reason}; install it: deploy/consul_get.sh .tools (root on Debian)"]
    return []


def status_problems(cluster: Cluster) -> list[str]:
    """Returns what `meshctl status` in the console's pod shows of members that are not routable."""
    (console,) = cluster.of_component("console")
    expected = sorted(p.name for p in cluster.services if p is not console)

    def shown() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "meshctl", "status", "--json"],
            env={**console.environment, "PYTHONPATH": f"{ROOT / 'protos'}:{ROOT}"},
            capture_output=True,
            text=True,
            check=False,
        )
        rows = json.loads(done.stdout) if done.returncode == 0 else []
        return sorted(row["name"] for row in rows if row["routable"])

    try:
        wait_for(lambda: shown() == expected, "meshctl status shows all members")
    except AssertionError:
        return [f"meshctl status shows {shown()}, not {expected}"]
    return []


def stored_response_problems(cluster: Cluster) -> list[str]:
    """Reads a stored response of one frontend at the other one."""
    first, second = cluster.of_component("frontend")
    body = {"model": "sim", "input": "store this", "max_output_tokens": 16}
    with httpx.Client(trust_env=False, timeout=WAIT_S) as http:
        made = http.post(f"http://{first.address}:{HTTP.number}/v1/responses", json=body)
        url = f"http://{second.address}:{HTTP.number}/v1/responses/{made.json()['id']}"
        response = http.get(url)
    return [] if response.status_code == 200 else [response.text]


def batch_problems(cluster: Cluster) -> list[str]:
    """Runs a batch beside the load. Raises AssertionError if it does not complete."""
    frontend, _ = cluster.of_component("frontend")
    found = check_batch(f"http://{frontend.address}:{HTTP.number}", 16)
    return [str(found)] if found["errors"] + found["inexact"] else []


def long_prompt_problems(cluster: Cluster) -> list[str]:
    """Sends a long prompt that no worker has cached."""
    frontend, _ = cluster.of_component("frontend")
    body = {
        "model": "sim",
        "prompt": f"{time.monotonic_ns()} " + "word " * LONG_PROMPT_WORDS,
        "max_tokens": 4,
    }
    with httpx.Client(trust_env=False, timeout=WAIT_S) as http:
        response = http.post(f"http://{frontend.address}:{HTTP.number}/v1/completions", json=body)
    return [] if response.status_code == 200 else [response.text]


def lose_server(cluster: Cluster) -> list[str]:
    """Kills the server of Consul that has all members, and starts it again with its volume."""
    server = cluster.consuls[0]
    server.stop(signal.SIGKILL)
    assert server.running is not None
    server.running.wait(WAIT_S)
    found = status_problems(cluster)
    cluster.start_consul(server)
    wait_for(lambda: server.is_serving("readinessProbe"), f"{server.name} is ready")
    return found + status_problems(cluster)


def lose_worker(cluster: Cluster) -> list[str]:
    """Kills a decode worker, and starts it again as a kubelet does."""
    worker = cluster.of_component("decode")[0]
    worker.stop(signal.SIGKILL)
    assert worker.running is not None
    worker.running.wait(WAIT_S)
    cluster.start_service(worker)
    wait_for(lambda: worker.is_serving("readinessProbe"), f"{worker.name} is routable")
    return status_problems(cluster)


def load_problems(found: dict[str, Any]) -> list[str]:
    is_good = found["requests"] and not found["errors"] + found["inexact"]
    return [] if is_good else [str(found)]


def connection_problems(cluster: Cluster) -> list[str]:
    """Returns connections of pods that the policies refuse."""
    policies = list(cluster.manifests.of_kind("NetworkPolicy"))
    return sorted(
        f"{source.name} to {target.name}:{port.number} is refused"
        for source, target, port in _seen(cluster)
        if not network.permits(policies, _endpoint(source), _endpoint(target), port)
        and source is not target
    )


def unseen_problems(cluster: Cluster) -> list[str]:
    """Returns connections of the table that no pod has made. A look misses most of the short ones,
    and on a busy machine nearly all, so what brings them about goes on until each has been seen."""
    deadline = time.monotonic() + SEEN_S
    problems: list[str] = []
    while (missing := unseen(cluster)) and not problems and time.monotonic() < deadline:
        problems = (
            long_prompt_problems(cluster) + batch_problems(cluster) + status_problems(cluster)
        )
    return problems or missing


def unseen(cluster: Cluster) -> list[str]:
    """Returns connections of the table that no pod has made."""
    seen = {
        (source.pod.component, target.pod.component, port)
        for source, target, port in _seen(cluster)
    }
    return [
        f"{connection.purpose}: {port.number}"
        for connection, port in _between_pods(network.needed(cluster.manifests))
        if connection.purpose not in UNSEEN
        and not any(_is_of(connection, *one) and one[2] == port for one in seen)
    ]


def stop_problems(cluster: Cluster, found: dict[str, Any]) -> list[str]:
    """Stops all services; returns those that take longer than their pods have, or fail."""
    begun = time.monotonic()
    for process in cluster.services:
        process.stop(signal.SIGTERM)
    problems = []
    for process in cluster.services:
        assert process.running is not None
        grace_s = process.pod.spec["terminationGracePeriodSeconds"]
        try:
            status = process.running.wait(begun + grace_s - time.monotonic())
        except subprocess.TimeoutExpired:
            problems.append(f"{process.name} still runs after {grace_s} s")
            continue
        if status != 0:
            problems.append(f"status {status} of {process.tail()}")
    found["stop_s"] = round(time.monotonic() - begun, 1)
    return problems


def _seen(cluster: Cluster) -> Iterator[tuple[Process, Process, Port]]:
    by_address = {process.address: process for process in cluster.processes.values()}
    for name, (address, number) in cluster.seen:
        # The service of Consul is a name for one of the servers.
        target = cluster.consuls[0] if address == cluster.service else by_address[address]
        ports = {port["containerPort"] for port in target.pod.ports.values()}
        # Others are the ends of connections that the target has opened.
        if number in ports:
            yield cluster.processes[name], target, Port(number)


def _endpoint(process: Process) -> network.Endpoint:
    pod = process.pod
    return network.Endpoint(process.name, pod.component, NAMESPACE, dict(pod.labels))


def _between_pods(
    wanted: tuple[Connection, ...],
) -> Iterator[tuple[Connection, Port]]:
    for connection in wanted:
        if isinstance(connection.source, Pods) and isinstance(connection.target, Pods):
            for port in connection.ports:
                if port.protocol == "TCP":
                    yield connection, port


def _is_of(connection: Connection, source: str, target: str, _port: Port) -> bool:
    sides = (connection.source, connection.target)
    return all(
        isinstance(side, Pods) and component in side.components
        for side, component in zip(sides, (source, target), strict=True)
    )

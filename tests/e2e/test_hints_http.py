"""Hints in body and headers decide when and where a request runs."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import pytest

from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for

# Slow enough for overtaking; the steps are too short to look like a hang.
WORKER_FLAGS = ["--prefill-tokens-per-s=500", "--max-num-batched-tokens=64", "--max-num-seqs=16"]
ROUTER_FLAGS = ["--queue-threshold=0.5", "--metrics-port=0", "--session-affinity-ttl-s=300"]
LONG_PROMPT_TOKENS = 20_000  # 40 s of prefill, unless the client disconnects
UNIQUE_NUMBERS = count(1)


mesh = mesh_fixture(workers=2, worker_flags=WORKER_FLAGS, router_flags=ROUTER_FLAGS)


def unique_prompt(tokens: int) -> list[int]:
    """Returns a prompt that shares no block with any other."""
    number = next(UNIQUE_NUMBERS)
    return [300 + (number * 7919 + place * place) % 2000 for place in range(tokens)]


def body(tokens: int, **nvext: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": unique_prompt(tokens),
        "max_tokens": 1,
        "nvext": nvext or None,
    }


def post_completion(
    mesh: Mesh, client_id: str, headers: Mapping[str, str] | None = None, **nvext: Any
) -> httpx.Response:
    prompt = unique_prompt(100)
    return mesh.post_completion(client_id, prompt, max_tokens=1, headers=headers, nvext=nvext)


def queued_requests(mesh: Mesh) -> float:
    return mesh.router.metric("kvmesh_router_queue_requests")


class BusyWorkers:
    """Keeps each worker busy with one long request until the block ends."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._open: list[http.client.HTTPConnection] = []

    def __enter__(self) -> BusyWorkers:
        for worker in self._mesh.workers:
            connection = http.client.HTTPConnection(self._mesh.url.removeprefix("http://"))
            payload = body(LONG_PROMPT_TOKENS, backend_instance_id=worker.instance_id)
            connection.request("POST", "/v1/completions", json.dumps(payload))
            self._open.append(connection)
        router = self._mesh.router
        wait_for(lambda: router.bookings() == len(self._open), "each worker has a long prompt")
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._open:
            connection.close()


@pytest.mark.row("S2-12")
def test_a_strict_priority_goes_first_and_the_header_overrides_the_body(mesh: Mesh) -> None:
    # One worker for all requests, so that they run one after the other.
    pin_to_worker = {"backend_instance_id": mesh.workers[0].instance_id}
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        ("plain", {}, {}),
        ("sooner", {}, {"priority": 5}),
        ("header-1", {"x-kvmesh-strict-priority": "1"}, {}),
        ("body-3", {}, {"strict_priority": 3}),
        ("header-2-for-9", {"x-kvmesh-strict-priority": "2"}, {"strict_priority": 9}),
        ("header-priority", {"x-kvmesh-priority": "1000"}, {"priority": -1}),
    ]
    with ThreadPoolExecutor(len(requests) + 1) as pool:
        with BusyWorkers(mesh):
            responses = []
            for name, headers, hints in requests:
                nvext = {**pin_to_worker, "agent_hints": hints}
                responses.append(pool.submit(post_completion, mesh, name, headers, **nvext))
                wait_for(lambda: queued_requests(mesh) == len(responses), f"{name} is queued")
            # In the body itself a smaller number goes first, as in vLLM.
            fields: dict[str, Any] = {"priority": -500, "max_tokens": 1, "nvext": pin_to_worker}
            prompt = unique_prompt(100)
            responses.append(pool.submit(mesh.post_completion, "vllm-500", prompt, **fields))
            wait_for(lambda: queued_requests(mesh) == len(responses), "vllm-500 is queued")
        assert {one.result(WAIT_S).status_code for one in responses} == {200}
    names = {"vllm-500", *(name for name, _, _ in requests)}
    for name in names:
        mesh.request_line(name)
    order = [e.get("client_request_id") for e in mesh.frontend.events("request")]
    assert [name for name in order if name in names] == [
        *("body-3", "header-2-for-9", "header-1", "header-priority", "vllm-500", "sooner", "plain")
    ]


@pytest.mark.row("S2-17")
def test_an_instance_id_from_health_or_the_log_pins_a_request(mesh: Mesh) -> None:
    shown = mesh.http.get(f"{mesh.url}/health").json()["instances"]
    ids = [one["id"] for one in shown if one["service"] == "worker"]
    assert {int(id) for id in ids} == {worker.instance_id for worker in mesh.workers}
    for id in ids:
        assert post_completion(mesh, f"text-{id}", backend_instance_id=id).status_code == 200
        (logged,) = mesh.request_line(f"text-{id}")["workers"]
        assert logged == id
        header = {"x-kvmesh-backend-instance-id": logged}
        assert post_completion(mesh, f"header-{id}", header).status_code == 200
        assert mesh.request_line(f"header-{id}")["workers"] == [id]


@pytest.mark.parametrize(
    ("headers", "nvext", "param", "value"),
    [
        ({}, {"backend_instance_id": 12}, "nvext.backend_instance_id", "12"),
        (
            {"x-kvmesh-backend-instance-id": "12"},
            {},
            "x-kvmesh-backend-instance-id",
            "12",
        ),
        (
            {},
            {"routing_constraints": {"required_taints": ["a100"]}},
            "nvext.routing_constraints.required_taints",
            "a100",
        ),
    ],
)
def test_a_hint_that_no_worker_meets_is_a_503_with_field_and_value(
    mesh: Mesh, headers: dict[str, str], nvext: dict[str, Any], param: str, value: str
) -> None:
    name = f"unmet-{param}"
    response = post_completion(mesh, name, headers, **nvext)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (503, param)
    assert value in error["message"]
    # A worker that satisfies it may join later.
    assert response.headers["x-should-retry"] == "true"
    line = mesh.request_line(name)
    assert (line["param"], line["error"]) == (param, error["message"])


@pytest.mark.row("S1-20", "S2-05", "S2-44")
def test_a_header_pins_a_request_and_overrides_the_body(mesh: Mesh) -> None:
    one, other = (worker.instance_id for worker in mesh.workers)
    for number in range(3):
        name = f"pinned-{number}"
        header = {"x-kvmesh-backend-instance-id": str(other)}
        assert post_completion(mesh, name, header, backend_instance_id=one).status_code == 200
        assert mesh.request_line(name)["workers"] == [str(other)]


@pytest.mark.row("S2-16", "S2-89")
def test_a_session_id_means_the_same_in_header_and_body(mesh: Mesh) -> None:
    header = {"x-kvmesh-session-id": "bob"}
    assert post_completion(mesh, "bob-0", header).status_code == 200
    (first,) = mesh.request_line("bob-0")["workers"]
    for number in range(1, 4):
        assert post_completion(mesh, f"bob-{number}", header).status_code == 200
        line = mesh.request_line(f"bob-{number}")
        assert line["workers"] == [first]
        assert "session kept" in line["routing"]
    session = {"session_id": "bob"}
    assert post_completion(mesh, "bob-body", session_control=session).status_code == 200
    assert mesh.request_line("bob-body")["workers"] == [first]
    both = post_completion(mesh, "carol", {"x-kvmesh-session-id": "carol"}, session_control=session)
    assert both.status_code == 200
    assert "session bound" in mesh.request_line("carol")["routing"]


def placement(mesh: Mesh, name: str, **fields: Any) -> tuple[str, str]:
    """Sends a completion; returns its worker, and the router's reason for a named conversation."""
    headers = fields.pop("headers", None)
    prompt = unique_prompt(100)
    response = mesh.post_completion(name, prompt, max_tokens=1, headers=headers, **fields)
    assert response.status_code == 200, response.text
    line = mesh.request_line(name)
    (worker,) = line["workers"]
    return worker, next((one for one in line["routing"] if one.startswith("affinity key")), "")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("cache-key", {"prompt_cache_key": "c-1"}),
        ("opencode", {"headers": {"x-session-affinity": "o-1"}}),
        ("codex", {"headers": {"session-id": "x-1"}}),
        ("claude", {"headers": {"x-claude-code-session-id": "l-1"}}),
    ],
)
def test_requests_of_a_named_conversation_stay_on_one_worker(
    mesh: Mesh, name: str, fields: dict[str, Any]
) -> None:
    """The mesh has no indexer: else the cached blocks decide."""
    first, reason = placement(mesh, f"{name}-0", **fields)
    assert reason == "affinity key bound"
    for number in range(1, 5):
        assert placement(mesh, f"{name}-{number}", **fields) == (first, "affinity key kept")
    assert placement(mesh, f"{name}-none")[1] == ""


def test_a_stored_conversation_stays_on_one_worker(mesh: Mesh) -> None:
    workers, previous = [], None
    for number in range(4):
        body = {"model": MODEL, "input": f"Turn {number}", "max_output_tokens": 1}
        body |= {} if previous is None else {"previous_response_id": previous}
        name = f"stored-{number}"
        headers = {"x-request-id": name}
        response = mesh.http.post(f"{mesh.url}/v1/responses", json=body, headers=headers)
        assert response.status_code == 200, response.text
        previous = response.json()["id"]
        line = mesh.request_line(name)
        assert f"affinity key {'kept' if number else 'bound'}" in line["routing"]
        workers += line["workers"]
    assert len(set(workers)) == 1


def test_a_named_conversation_leaves_a_loaded_worker(mesh: Mesh) -> None:
    fields: dict[str, Any] = {"prompt_cache_key": "moving"}
    home, _ = placement(mesh, "moving-0", **fields)
    connection = http.client.HTTPConnection(mesh.url.removeprefix("http://"))
    payload = body(LONG_PROMPT_TOKENS, backend_instance_id=home)
    connection.request("POST", "/v1/completions", json.dumps(payload))
    try:
        wait_for(lambda: mesh.router.bookings() == 1, "its worker has a long prompt")
        moved, reason = placement(mesh, "moving-1", **fields)
        assert (moved != home, reason) == (True, "affinity key moved")
    finally:
        connection.close()
    wait_for(lambda: mesh.router.bookings() == 0, "the long prompt has ended")


def targets(mesh: Mesh, target: str, outcome: str) -> float:
    sample = "kvmesh_frontend_latency_targets_total"
    labels = f'{{model="{MODEL}",outcome="{outcome}",target="{target}"}}'
    text = mesh.http.get(f"{mesh.url}/metrics").text
    found = [line for line in text.splitlines() if line.startswith(sample + labels)]
    return float(found[0].split()[1]) if found else 0.0


def test_a_target_that_cannot_be_met_is_a_429_with_the_estimate(mesh: Mesh) -> None:
    placement(mesh, "measured")  # Its speed is measured.
    met = post_completion(mesh, "met", router={"ttft_target": 80_000_000, "itl_target": 80_000_000})
    assert met.status_code == 200
    wait_for(lambda: targets(mesh, "ttft", "met") == 1, "the target is counted as met")
    assert targets(mesh, "itl", "met") == 1
    header = {"x-kvmesh-ttft-target-ms": "1000"}
    with BusyWorkers(mesh):
        refused = post_completion(
            mesh, "refused-target", header, router={"ttft_target": 80_000_000}
        )
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (429, "target_unmet")
    assert error["param"] == "x-kvmesh-ttft-target-ms"
    assert "and the target is 1000 ms" in error["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-should-retry"] == "true"
    wait_for(lambda: targets(mesh, "ttft", "refused") == 1, "the refusal is counted")


def test_the_earliest_deadline_leaves_the_queue_first(mesh: Mesh) -> None:
    pin = {"backend_instance_id": mesh.workers[0].instance_id}
    deadlines_ms = {"due-last": 80_000_000, "due-first": 40_000_000, "due-second": 60_000_000}
    with ThreadPoolExecutor(len(deadlines_ms)) as pool:
        with BusyWorkers(mesh):
            responses = []
            for name, target_ms in deadlines_ms.items():
                nvext: dict[str, Any] = {**pin, "router": {"ttft_target": target_ms}}
                responses.append(pool.submit(post_completion, mesh, name, **nvext))
                wait_for(lambda: queued_requests(mesh) == len(responses), f"{name} is queued")
        assert {one.result(WAIT_S).status_code for one in responses} == {200}
    for name in deadlines_ms:
        mesh.request_line(name)
    order = [e.get("client_request_id") for e in mesh.frontend.events("request")]
    assert [name for name in order if name in deadlines_ms] == [
        "due-first",
        "due-second",
        "due-last",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-kvmesh-ttft-target-ms", "0"),
        ("x-kvmesh-itl-target-ms", "soon"),
        ("x-kvmesh-strict-priority", "-1"),
        ("x-kvmesh-strict-priority", "4294967296"),
        ("x-kvmesh-strict-priority", "urgent"),
        ("x-kvmesh-priority", "1e3"),
        ("x-kvmesh-osl", "-1"),
        ("x-kvmesh-session-id", "x" * 257),
        ("x-kvmesh-dp-rank", ""),
        ("x-kvmesh-nonsense", "1"),
    ],
)
def test_an_invalid_header_is_a_400_that_names_it(mesh: Mesh, name: str, value: str) -> None:
    response = post_completion(mesh, "refused", {name: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (name, "invalid_request_error")
    assert name in error["message"]
    assert response.headers["x-should-retry"] == "false"


def test_an_invalid_strict_priority_in_the_body_is_a_400_that_names_it(mesh: Mesh) -> None:
    response = post_completion(mesh, "refused", agent_hints={"strict_priority": "1"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "nvext.agent_hints.strict_priority"

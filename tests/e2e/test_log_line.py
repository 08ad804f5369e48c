"""A request writes one log line; a probe leaves no trace."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.types.v1 import request_pb2
from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for
from worker_svc.engines.sim.timing import Timing

SPEEDUP = 0.5
TOKENS = 40


mesh = mesh_fixture(worker_flags=[f"--speedup={SPEEDUP}"])


def post(mesh: Mesh, client_id: str, **body: Any) -> Any:
    return mesh.http.post(
        f"{mesh.url}/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **body},
        headers={"x-request-id": client_id},
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_successful_request_has_one_complete_log_line(mesh: Mesh, stream: bool) -> None:
    response = post(mesh, f"complete-{stream}", max_tokens=TOKENS, ignore_eos=True, stream=stream)
    assert response.status_code == 200
    line = mesh.request_line(f"complete-{stream}")
    assert len(mesh.request_lines(f"complete-{stream}")) == 1
    assert len(line["request_id"]) == 32
    assert (line["model"], line["endpoint"]) == (MODEL, "chat_completions")
    assert (line["status"], line["stream"], line["level"]) == (200, stream, "info")
    assert line["completion_tokens"] == TOKENS
    assert line["prompt_tokens"] > 0
    assert line["cached_tokens"] >= 0
    assert line["finish_reason"] == "length"
    assert line["attempts"] == 1
    ids = {str(worker.instance_id) for worker in mesh.workers}
    assert len(line["workers"]) == 1
    assert set(line["workers"]) <= ids
    assert line["routing"], "the router's reasons"
    assert "failure" not in line
    # Every token takes a step. On a busy machine the frontend may see the first tokens late.
    step_ms = Timing(speedup=SPEEDUP).step_s(0, 1, 0) * 1000
    assert step_ms <= line["ttft_ms"] <= line["total_ms"] - TOKENS / 4 * step_ms


def test_a_refused_request_has_a_log_line_with_the_reason(mesh: Mesh) -> None:
    response = post(mesh, "refused", max_tokens=-1)
    line = mesh.request_line("refused")
    assert (response.status_code, line["status"], line["failure"]) == (400, 400, "INVALID_VALUE")
    error = response.json()["error"]
    assert (line["param"], line["error"]) == ("max_tokens", error["message"])
    assert "workers" not in line


def test_a_request_of_a_disconnected_client_has_a_log_line_with_the_reason(mesh: Mesh) -> None:
    host, _, port = mesh.url.removeprefix("http://").partition(":")
    body = b'{"model":"%b","prompt":"hi","max_tokens":2000,"ignore_eos":true}' % MODEL.encode()
    with socket.create_connection((host, int(port)), WAIT_S) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: left\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_for(lambda: sum(w.open_slots() for w in mesh.workers), "a worker has the request")
    line = mesh.request_line("left")
    assert line["failure"] == "REQUEST_CANCELLED"
    assert line["workers"]


@pytest.mark.row("S2-77")
def test_the_body_cannot_make_a_request_a_probe(mesh: Mesh) -> None:
    for name in ("_HEALTH_CHECK", "is_probe"):
        response = post(mesh, "probe", **{name: True})
        assert response.json()["error"]["param"] == name


def metrics(mesh: Mesh) -> list[str]:
    """Returns the frontend's lines of request metrics."""
    lines = mesh.http.get(f"{mesh.url}/metrics").text.splitlines()
    return [one for one in lines if one.startswith("kvmesh_frontend_")]


@pytest.mark.row("S2-77", "S2-78", "S2-79")
def test_a_probe_of_a_worker_changes_neither_bookings_nor_request_metrics(mesh: Mesh) -> None:
    def probe(worker_index: int) -> list[engine_pb2.GenerateResponse]:
        stub = engine_pb2_grpc.EngineServiceStub(mesh.workers[worker_index].channel)
        message = engine_pb2.GenerateRequest(
            request=request_pb2.PreprocessedRequest(
                token_ids=[1],
                is_probe=True,
                stop_conditions=request_pb2.StopConditions(max_tokens=50, ignore_eos=True),
                # A probe of a decode worker carries no prefill; one of a prefill worker no peer.
                bootstrap_info=request_pb2.BootstrapInfo(
                    bootstrap_host="nowhere", bootstrap_port=1, bootstrap_room=1
                ),
            )
        )
        return list(stub.Generate(message, timeout=WAIT_S))

    def observed_state() -> tuple[list[str], list[dict[str, Any]], int]:
        return metrics(mesh), mesh.frontend.events("request"), mesh.router.bookings()

    wait_for(lambda: mesh.router.bookings() == 0, "the mesh is idle")
    before = observed_state()
    for worker_index in range(2):
        responses = probe(worker_index)
        assert sum(len(response.token_ids) for response in responses) == 1, (
            "a probe returns one token"
        )
        assert responses[-1].finish_reason != request_pb2.FINISH_REASON_UNSPECIFIED
    assert observed_state() == before

"""grpcurl without local descriptors against every service of a real mesh."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.oracle import Oracle
from tests.kit.processes import MODEL, Mesh, Service, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for

# Scripts of an environment are in the folder of its python.
GRPCURL = Path(sys.executable).with_name("grpcurl")
ENGINE, ROUTER = "kvmesh.engine.v1.EngineService", "kvmesh.router.v1.RouterService"
INDEXER = "kvmesh.indexer.v1.IndexerService"
HEALTH = "grpc.health.v1.Health"
PROMPT = [5, 6, 7]

pytestmark = pytest.mark.skipif(not GRPCURL.exists(), reason="grpcurl is not installed")


mesh = mesh_fixture(workers=1, indexers=1, worker_flags=["--speedup=0"])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(GRPCURL), "-plaintext", "-max-time", str(WAIT_S), *arguments],
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )


def grpcurl(*arguments: str) -> str:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def call_method(service: Service, method: str, message: Any = None) -> list[dict[str, Any]]:
    """Returns the response messages of a call."""
    output = grpcurl("-d", json.dumps(message or {}), service.address, method)
    decoder, found = json.JSONDecoder(object_hook=_snake), []
    while output := output.lstrip():
        value, end = decoder.raw_decode(output)
        found.append(value)
        output = output[end:]
    return found


def _snake(value: dict[str, Any]) -> dict[str, Any]:
    """Returns names as in the proto; versions of grpcurl differ in the case of names."""
    return {re.sub("[A-Z]", lambda m: f"_{m[0].lower()}", name): v for name, v in value.items()}


@pytest.mark.parametrize(
    ("service_name", "services"),
    [
        ("worker", {ENGINE, HEALTH}),
        ("router", {ROUTER, HEALTH}),
        ("indexer", {INDEXER, HEALTH}),
        ("frontend", {HEALTH}),
    ],
)
def test_every_service_lists_itself_and_is_healthy(
    mesh: Mesh, service_name: str, services: set[str]
) -> None:
    service = mesh.running(service_name)[0]
    listed = set(grpcurl(service.address, "list").split())
    assert services <= listed
    assert any(name.startswith("grpc.reflection.") for name in listed)
    for name in ("", *(services - {HEALTH})):
        assert call_method(service, f"{HEALTH}/Check", {"service": name}) == [{"status": "SERVING"}]


@pytest.mark.parametrize(
    ("service_name", "name", "methods"),
    [
        ("worker", ENGINE, ("Attach", "Generate", "Abort", "GetInfo", "GetLoad", "GetArtifact")),
        ("router", ROUTER, ("Session", "Route", "PotentialLoads", "Explain", "Dump")),
        ("indexer", INDEXER, ("Publish", "Subscribe", "Match", "Dump", "Verify", "Stats")),
    ],
)
def test_services_and_messages_can_be_described(
    mesh: Mesh, service_name: str, name: str, methods: tuple[str, ...]
) -> None:
    address = mesh.running(service_name)[0].address
    described = grpcurl(address, "describe", name)
    for method in methods:
        assert f"rpc {method} (" in described
    hints = grpcurl(address, "describe", "kvmesh.types.v1.RoutingHints")
    assert "priority" in hints, "messages of imported files can be described"


@pytest.mark.row("S1-19", "S1-29")
def test_the_indexer_reports_its_sources_and_verifies_them(mesh: Mesh) -> None:
    message = {"request": {"token_ids": PROMPT * 20, "stop_conditions": {"max_tokens": 1}}}
    call_method(mesh.workers[0], f"{ENGINE}/Generate", message)
    indexer = mesh.running("indexer")[0]

    def held_blocks() -> list[dict[str, Any]]:
        (stats,) = call_method(indexer, f"{INDEXER}/Stats", {})
        return stats["sources"] if int(stats.get("blocks", 0)) else []

    (source,) = wait_for(held_blocks, "the index has the worker's blocks")
    assert source["status"]["state"] == "exact"
    (verified,) = call_method(indexer, f"{INDEXER}/Verify", {})
    (row,) = verified["sources"]
    assert int(row["equal"]) > 0
    assert int(row.get("extra", 0)) == int(row.get("missing", 0)) == 0


def test_generate_streams_the_exact_tokens_of_the_model(mesh: Mesh) -> None:
    message = {
        "request": {
            "token_ids": PROMPT,
            "stop_conditions": {"max_tokens": 12, "ignore_eos": True},
        }
    }
    responses = call_method(mesh.workers[0], f"{ENGINE}/Generate", message)
    tokens = [token for response in responses for token in response.get("token_ids", ())]
    assert tokens == Oracle().tokens(PROMPT, 12)
    assert responses[-1]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert responses[-1]["usage"]["completion_tokens"] == 12
    assert not any("finish_reason" in response for response in responses[:-1])


def test_a_refused_call_shows_status_field_and_reason(mesh: Mesh) -> None:
    done = run("-d", json.dumps({"request": {}}), mesh.workers[0].address, f"{ENGINE}/Generate")
    assert done.returncode != 0
    assert "Code: InvalidArgument" in done.stderr
    for part in ("token_ids", "google.rpc.BadRequest", "INVALID_REQUEST"):
        assert part in done.stderr


def test_a_worker_reports_its_identity_and_load(mesh: Mesh) -> None:
    worker = mesh.workers[0]
    (info,) = call_method(worker, f"{ENGINE}/GetInfo")
    assert info["worker_id"] == str(worker.instance_id)
    assert (info["model"], info["engine"], info["role"]) == (MODEL, "sim", "aggregated")
    (load,) = call_method(worker, f"{ENGINE}/GetLoad")
    assert load.get("open_slots", 0) == 0
    assert len(load["loads"]) == 1


def test_route_returns_the_worker_and_the_reasons(mesh: Mesh) -> None:
    query = {"model": MODEL, "token_ids": PROMPT}
    (response,) = call_method(mesh.router, f"{ROUTER}/Route", {"query": query})
    decision = response["decision"]
    assert decision["worker"]["worker_id"] == str(mesh.workers[0].instance_id)
    assert decision["reasons"]
    (explained,) = call_method(mesh.router, f"{ROUTER}/Explain", {"query": query})
    assert [c["worker"]["worker_id"] for c in explained["candidates"]] == [
        str(mesh.workers[0].instance_id)
    ]
    (dump,) = call_method(mesh.router, f"{ROUTER}/Dump")
    assert "bookings" not in dump, "Route and Explain book nothing"


def test_a_request_is_explained_by_the_id_of_its_response(mesh: Mesh) -> None:
    body = {"model": MODEL, "prompt": "why here?", "max_tokens": 1}
    headers = {"x-request-id": "my-req-1"}
    response = mesh.http.post(f"{mesh.url}/v1/completions", json=body, headers=headers).json()
    (explained,) = call_method(mesh.router, f"{ROUTER}/Explain", {"request_id": response["id"]})
    assert explained["decision"]["worker"]["worker_id"] == str(mesh.workers[0].instance_id)
    assert explained["decision"]["reasons"]
    refused = json.dumps({"request_id": "my-req-1"})
    done = run("-d", refused, mesh.router.address, f"{ROUTER}/Explain")
    assert "Code: NotFound" in done.stderr
    assert "the id of its response" in done.stderr


def test_route_of_an_unknown_model_is_not_found(mesh: Mesh) -> None:
    query = {"model": "no-such", "token_ids": PROMPT}
    done = run("-d", json.dumps({"query": query}), mesh.router.address, f"{ROUTER}/Route")
    assert "Code: NotFound" in done.stderr


# A mesh with tokens, whose members accept calls of operators.
TOKENS = ["--mesh-token=of the mesh", "--operator-token=of operators"]
protected_mesh = mesh_fixture(
    workers=1,
    indexers=1,
    worker_flags=["--speedup=0", *TOKENS],
    router_flags=TOKENS,
    indexer_flags=TOKENS,
    frontend_flags=TOKENS,
)


@pytest.mark.parametrize(
    ("service_name", "method", "message"),
    [
        ("router", f"{ROUTER}/Explain", {"query": {"model": MODEL, "token_ids": PROMPT}}),
        ("indexer", f"{INDEXER}/Stats", {}),
        (
            "worker",
            f"{ENGINE}/Generate",
            {"request": {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 2}}},
        ),
    ],
)
def test_grpcurl_calls_a_mesh_with_a_token_by_the_token_of_operators(
    protected_mesh: Mesh, service_name: str, method: str, message: dict[str, Any]
) -> None:
    address = protected_mesh.running(service_name)[0].address
    call = ("-d", json.dumps(message), address, method)
    assert grpcurl("-H", "authorization: Bearer of operators", *call)
    for headers in ((), ("-H", "authorization: Bearer of the mesh")):
        refused = run(*headers, *call)
        assert "Code: Unauthenticated" in refused.stderr, refused.stdout


def test_the_token_of_operators_books_no_request_as_a_frontend(protected_mesh: Mesh) -> None:
    query = {"model": MODEL, "token_ids": PROMPT}
    booking = {"book": True, "frontend_id": "7", "key": {"request_id": "r", "attempt": 1}}
    call = (protected_mesh.router.address, f"{ROUTER}/Route")
    token = ("-H", "authorization: Bearer of operators")
    refused = run(*token, "-d", json.dumps({"query": query, **booking}), *call)
    assert "Code: PermissionDenied" in refused.stderr, refused.stdout
    assert grpcurl(*token, "-d", json.dumps({"query": query}), *call)

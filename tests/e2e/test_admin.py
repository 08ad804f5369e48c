"""AdminService of running workers: authorisation, and the effect of each operation on the mesh."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from common.errors import (
    Conflict,
    InvalidRequest,
    MeshError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from kvmesh.engine.v1 import admin_pb2 as pb
from kvmesh.engine.v1 import admin_pb2_grpc, engine_pb2, engine_pb2_grpc
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from tests.kit.oracle import Oracle
from tests.kit.processes import MODEL, Mesh, Service, mesh_error, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for
from worker_svc.engines.sim.config import SIM_MODEL_DIR, load_sim_model
from worker_svc.engines.sim.token_oracle import TokenOracle

TOKEN = "operators-only"
MESH_TOKEN = "every-service"
OPERATIONS = [method.name for method in pb.DESCRIPTOR.services_by_name["AdminService"].methods]
# Operations that an engine need not have.
ENGINE_OPERATIONS = [one for one in OPERATIONS if one not in ("Drain", "Resume")]


mesh = mesh_fixture(workers=2, indexers=1, worker_flags=["--speedup=20", f"--admin-token={TOKEN}"])


def call(worker: Service, operation: str, token: str | None = TOKEN, **fields: Any) -> Any:
    """Returns the response. Raises the worker's MeshError."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    stub = admin_pb2_grpc.AdminServiceStub(worker.channel)
    request = getattr(pb, f"{operation}Request")(**fields)
    try:
        return getattr(stub, operation)(request, timeout=WAIT_S, metadata=metadata)
    except grpc.RpcError as error:
        raise mesh_error(error) from error


def worker_process(folder: Path, *flags: str) -> Service:
    flags = (f"--registry-path={folder / 'registry'}", "--speedup=0", *flags)
    return Service("worker", flags, folder, "worker")


def is_draining(worker: Service) -> bool:
    stub = engine_pb2_grpc.EngineServiceStub(worker.channel)
    return stub.GetInfo(engine_pb2.GetInfoRequest(), timeout=WAIT_S).draining


def indexed_blocks(mesh: Mesh, worker: Service) -> int:
    """Returns the blocks of a worker in the index."""
    stub = indexer_pb2_grpc.IndexerServiceStub(mesh.running("indexer")[0].channel)
    stats = stub.Stats(indexer_pb2.StatsRequest(), timeout=WAIT_S)
    return sum(
        one.blocks for one in stats.sources if one.state.source.worker_id == worker.instance_id
    )


def ask(
    mesh: Mesh, prompt: list[int], *, model: str = MODEL, worker: Service | None = None
) -> dict[str, Any]:
    """Returns the response of a model. worker: the one to use; None for any."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    if worker is not None:
        body["nvext"] = {"backend_instance_id": worker.instance_id}

    def post() -> httpx.Response | None:
        response = mesh.http.post(f"{mesh.url}/v1/completions", json=body)
        # A router may see a worker later than the frontend.
        return None if response.status_code == 503 and worker is not None else response

    response = wait_for(post, "a router knows the worker")
    assert response is not None
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def cached_tokens(response: dict[str, Any]) -> int:
    count: int = response["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_without_an_admin_token_every_operation_is_refused(tmp_path: Path) -> None:
    worker = worker_process(tmp_path)
    try:
        worker.wait_ready()
        for operation in OPERATIONS:
            for token in (None, TOKEN):
                with pytest.raises(PermissionDenied, match="--admin-token"):
                    call(worker, operation, token)
        assert not is_draining(worker)
    finally:
        worker.close()


def test_only_the_admin_token_permits_an_operation(tmp_path: Path) -> None:
    flags = (f"--admin-token={TOKEN}", f"--mesh-token={MESH_TOKEN}", "--engine=echo")
    worker = worker_process(tmp_path, *flags)
    try:
        worker.wait_ready()
        for operation in OPERATIONS:
            with pytest.raises(Unauthenticated, match="an admin token is required"):
                call(worker, operation, None)
            with pytest.raises(Unauthenticated, match="the admin token is wrong"):
                call(worker, operation, "guess")
            with pytest.raises(PermissionDenied, match="mesh token does not permit"):
                call(worker, operation, MESH_TOKEN)
        call(worker, "Resume")
        stub = engine_pb2_grpc.EngineServiceStub(worker.channel)
        admin = (("authorization", f"Bearer {TOKEN}"),)
        with pytest.raises(grpc.RpcError) as refused:
            stub.GetInfo(engine_pb2.GetInfoRequest(), timeout=WAIT_S, metadata=admin)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, "one token, one service"
        for operation in ENGINE_OPERATIONS:
            with pytest.raises(Unimplemented, match=f"the echo engine .* {operation}"):
                call(worker, operation)
    finally:
        worker.close()


def test_a_flush_empties_the_cache_and_the_index(mesh: Mesh) -> None:
    worker, prompt = mesh.workers[0], list(range(400, 480))
    ask(mesh, prompt, worker=worker)
    assert cached_tokens(ask(mesh, prompt, worker=worker)) == 64
    wait_for(lambda: indexed_blocks(mesh, worker) >= 5, "the index has the prompt")
    held = indexed_blocks(mesh, worker)
    assert call(worker, "FlushCache").blocks == held
    wait_for(lambda: indexed_blocks(mesh, worker) == 0, "the index has no block")
    assert cached_tokens(ask(mesh, prompt, worker=worker)) == 0


def test_an_adapter_is_a_model_from_its_load_to_its_unload(mesh: Mesh) -> None:
    worker, prompt = mesh.workers[0], [305, 306, 307]
    assert list(call(worker, "ListLoras").names) == []
    assert call(worker, "LoadLora", name="basque").lora_id == 1
    assert list(call(worker, "ListLoras").names) == ["basque"]
    wait_for(lambda: "basque" in mesh.model_names(), "the adapter is a model")
    model = load_sim_model(SIM_MODEL_DIR)
    oracle = TokenOracle(model.word_ids, model.eos_ids[0])
    tokens = oracle.continue_tokens(prompt, 8, ignore_eos=True, lora_name="basque")
    text = Oracle().decode(tokens)
    assert ask(mesh, prompt, model="basque")["choices"][0]["text"] == text
    call(worker, "UnloadLora", name="basque")
    wait_for(lambda: "basque" not in mesh.model_names(), "the adapter left")
    assert list(call(worker, "ListLoras").names) == []
    assert ask(mesh, prompt)["choices"][0]["text"] != text


@pytest.mark.parametrize(
    ("operation", "fields", "error", "field"),
    [
        ("LoadLora", {"name": ""}, InvalidRequest, "name"),
        ("LoadLora", {"name": MODEL}, Conflict, "name"),
        ("LoadLora", {"name": "a", "uri": "file:///a"}, InvalidRequest, "uri"),
        ("UnloadLora", {"name": "a"}, NotFound, "name"),
    ],
)
def test_an_invalid_adapter_is_refused_by_its_field(
    mesh: Mesh, operation: str, fields: dict[str, str], error: type[MeshError], field: str
) -> None:
    with pytest.raises(error) as refused:
        call(mesh.workers[0], operation, **fields)
    assert refused.value.field == field


def test_a_drained_worker_ends_its_requests_and_returns_after_resume(mesh: Mesh) -> None:
    worker, other = mesh.workers
    prompt, length = [311, 312, 313], 1200
    whole: list[dict[str, Any]] = []

    def long_request() -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": length, "ignore_eos": True}
        body["nvext"] = {"backend_instance_id": worker.instance_id}
        whole.append(mesh.http.post(f"{mesh.url}/v1/completions", json=body).json())

    request = threading.Thread(target=long_request)
    request.start()
    wait_for(worker.open_slots, "the request runs")
    with pytest.raises(Conflict, match="1 requests"):
        call(worker, "FlushCache")
    with pytest.raises(Conflict, match="call Drain first"):
        call(worker, "Sleep")
    drained = call(worker, "Drain", timeout_ms=1)
    assert (drained.running, drained.transfers) == (1, 0)
    assert is_draining(worker)
    known = mesh.known_instance_ids
    wait_for(lambda: known("worker") == {other.instance_id}, "the frontend sees one worker")
    served = other.counters()["finished"]
    for _ in range(4):
        ask(mesh, [320, 321])
    wait_for(lambda: other.counters()["finished"] == served + 4, "the other worker served them")
    assert call(worker, "Drain").running == 0
    request.join(WAIT_S)
    assert whole[0]["usage"]["completion_tokens"] == length
    with pytest.raises(Unavailable) as refused:
        generate(worker)
    assert refused.value.reason == "DRAINING"
    call(worker, "Resume")
    wait_for(lambda: len(known("worker")) == 2, "the frontend sees both workers")
    ask(mesh, prompt, worker=worker)


def test_a_sleeping_worker_has_no_cache_and_serves_after_wake_and_resume(mesh: Mesh) -> None:
    worker = mesh.workers[0]
    ask(mesh, list(range(500, 580)), worker=worker)
    call(worker, "Drain")
    call(worker, "Sleep")
    call(worker, "Sleep")
    with pytest.raises(Conflict, match="call Wake first"):
        call(worker, "Resume")
    call(worker, "Wake")
    assert call(worker, "FlushCache").blocks == 0, "it fell asleep with an empty cache"
    call(worker, "Resume")
    wait_for(lambda: len(mesh.known_instance_ids("worker")) == 2, "both workers are back")
    ask(mesh, [1, 2, 3], worker=worker)


def generate(worker: Service) -> None:
    stub = engine_pb2_grpc.EngineServiceStub(worker.channel)
    request = engine_pb2.GenerateRequest()
    request.request.token_ids[:] = [1, 2]
    request.request.stop_conditions.max_tokens = 1
    try:
        list(stub.Generate(request, timeout=WAIT_S))
    except grpc.RpcError as error:
        raise mesh_error(error) from error

"""Embeddings at the door: vectors, order, limits, refusals, lost workers, disconnects."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from common.request.embedding import Vector
from tests.kit.oracle import Oracle
from tests.kit.processes import MODEL, Mesh, Service, mesh_fixture
from tests.kit.sdk import open_sdk_client
from tests.kit.waiting import WAIT_S, wait_for
from worker_svc.engines.sim.config import SIM_MODEL_DIR, load_sim_model
from worker_svc.engines.sim.token_oracle import TokenOracle

pytestmark = pytest.mark.slow

SIZE = 384
CONTEXT = 32_768
# 64 rounds of 32 inputs: 4 s on an idle machine.
BATCH_S = 4 * WAIT_S
ORACLE = Oracle()
_MODEL = load_sim_model(SIM_MODEL_DIR)
VECTORS = TokenOracle(_MODEL.word_ids, _MODEL.eos_ids[0])


mesh = mesh_fixture(worker_flags=["--speedup=20", f"--context-length={CONTEXT}"])


def expected(text: str | list[int]) -> Vector:
    ids = ORACLE.encode(text, special_tokens=True) if isinstance(text, str) else text
    return VECTORS.embed(ids, SIZE)


def accepted(worker: Service) -> int:
    """How many inputs a worker has accepted."""
    return worker.counters().get("accepted", 0)


# Any, here and below: JSON.
def post(mesh: Mesh, value: Any, *, timeout_s: float = WAIT_S, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", None)
    body = {"model": MODEL, "input": value, **fields}
    url = f"{mesh.url}/v1/embeddings"
    return mesh.http.post(url, json=body, headers=headers, timeout=timeout_s)


def vectors(response: httpx.Response) -> list[Vector]:
    """The vectors of a response, whose entries must be in order."""
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [
        np.frombuffer(base64.b64decode(value), dtype="<f4")
        if isinstance(value := entry["embedding"], str)
        else np.array(value, dtype=np.float32)
        for entry in data
    ]


def are_equal(found: list[Vector], texts: list[Any]) -> bool:
    wanted = [expected(text) for text in texts]
    return len(found) == len(wanted) and all(map(np.array_equal, found, wanted))


def refusal(response: httpx.Response) -> tuple[int, Any, Any]:
    error = response.json()["error"]
    assert error["message"]
    return response.status_code, error["param"], error["code"]


@pytest.mark.row("S2-65", "S2-67")
async def test_the_sdk_receives_one_exact_vector_per_input(mesh: Mesh) -> None:
    texts = ["The quick brown fox", "jumps", "The quick brown fox"]
    async with open_sdk_client(mesh) as client:
        default = await client.embeddings.create(model=MODEL, input=texts)
        floats = await client.embeddings.create(
            model=MODEL, input=texts, encoding_format="float", user="me"
        )
    for response in (default, floats):
        found = [np.array(one.embedding, dtype=np.float32) for one in response.data]
        assert are_equal(found, texts)
        assert [one.index for one in response.data] == [0, 1, 2]
        tokens = sum(len(ORACLE.encode(text, special_tokens=True)) for text in texts)
        assert response.usage.prompt_tokens == response.usage.total_tokens == tokens
        assert response.model == MODEL


def test_token_ids_are_inputs_too(mesh: Mesh) -> None:
    assert are_equal(vectors(post(mesh, [7, 8, 9])), [[7, 8, 9]])
    assert are_equal(vectors(post(mesh, [[7], [8, 9]], encoding_format="base64")), [[7], [8, 9]])
    assert are_equal(vectors(post(mesh, "Hello")), ["Hello"])


@pytest.mark.row("S2-68")
def test_dimensions_shorten_the_vectors(mesh: Mesh) -> None:
    (short,) = vectors(post(mesh, "Hello", dimensions=12))
    head = expected("Hello")[:12]
    assert short == pytest.approx(head / np.linalg.norm(head), abs=1e-6)
    status = refusal(post(mesh, "Hello", dimensions=SIZE + 1))
    assert status == (400, "dimensions", "invalid_value")


def test_the_largest_batch_is_in_order_and_runs_on_all_workers(mesh: Mesh) -> None:
    before = [accepted(worker) for worker in mesh.workers]
    texts: list[Any] = [[number + 1, number % 7] for number in range(2048)]
    options = {"encoding_format": "base64", "headers": {"x-request-id": "batch"}}
    response = post(mesh, texts, timeout_s=BATCH_S, **options)
    assert are_equal(vectors(response), texts)
    line = mesh.request_line("batch")
    assert (line["endpoint"], line["status"], line["prompt_tokens"]) == ("embeddings", 200, 4096)
    assert set(line["workers"]) == {str(worker.instance_id) for worker in mesh.workers}
    after = [accepted(worker) for worker in mesh.workers]
    assert sum(after) - sum(before) == 2048
    metrics = mesh.http.get(f"{mesh.url}/metrics").text
    sample = f'kvmesh_frontend_requests_total{{endpoint="embeddings",error_type="",model="{MODEL}"'
    assert any(line.startswith(sample) for line in metrics.splitlines()), metrics
    wait_for(lambda: not mesh.router.bookings(), "all bookings are free")


@pytest.mark.parametrize(
    ("value", "fields", "error"),
    [
        ("", {}, (400, "input", "invalid_value")),
        ([], {}, (400, "input", "invalid_value")),
        (["a", ""], {}, (400, "input[1]", "invalid_value")),
        (["a"] * 2049, {}, (400, "input", "invalid_value")),
        ([[1], [2**31]], {}, (400, "input[1]", "invalid_value")),
        ([[1], [1] * CONTEXT], {}, (400, "input[1]", "context_length_exceeded")),
        (["a", "b " * 40_000], {}, (400, "input[1]", "context_length_exceeded")),
        ([[1] * 4000] * 76, {}, (400, "input", "too_many_tokens")),
        ("a", {"encoding_format": "hex"}, (400, "encoding_format", "invalid_value")),
        ("a", {"stream": True}, (400, "stream", "unknown_parameter")),
        ("a", {"model": "none"}, (404, "model", "model_not_found")),
        ("a", {"headers": {"x-kvmesh-x": "1"}}, (400, "x-kvmesh-x", "unknown_parameter")),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    mesh: Mesh, value: Any, fields: dict[str, Any], error: tuple[int, Any, Any]
) -> None:
    before = [accepted(worker) for worker in mesh.workers]
    assert refusal(post(mesh, value, **fields)) == error
    assert [accepted(worker) for worker in mesh.workers] == before


def test_a_hint_places_all_inputs(mesh: Mesh) -> None:
    worker = mesh.workers[1]
    headers = {"x-kvmesh-backend-instance-id": str(worker.instance_id), "x-request-id": "pinned"}
    assert are_equal(vectors(post(mesh, [[1], [2], [3]], headers=headers)), [[1], [2], [3]])
    assert mesh.request_line("pinned")["workers"] == [str(worker.instance_id)]


@pytest.fixture(scope="module")
def other_models(mesh: Mesh) -> Iterator[None]:
    """A model that only chats, and one that only embeds."""
    workers = [
        mesh.spawn("worker", "--model-name=talk", "--serve=chat"),
        mesh.spawn(
            *("worker", "--model-name=vectors", "--serve=embedding"),
            *("--loras=fr", "--model-aliases=embedder"),
        ),
    ]
    for worker in workers:
        worker.wait_ready()
    wait_for(
        lambda: {"talk", "vectors", "fr", "embedder"} <= mesh.model_names(),
        "the new models are served",
    )
    yield
    for worker in workers:
        worker.kill()
    wait_for(mesh.is_complete, "the new workers have left")


def test_the_card_of_a_model_decides_what_it_serves(mesh: Mesh, other_models: None) -> None:
    assert refusal(post(mesh, "a", model="talk")) == (400, "model", "unsupported_parameter")
    assert "'talk' is not served for embeddings" in post(mesh, "a", model="talk").text
    for name in ("vectors", "embedder"):
        assert are_equal(vectors(post(mesh, "a", model=name)), ["a"])
    chat = {"model": "vectors", "messages": [{"role": "user", "content": "a"}]}
    response = mesh.http.post(f"{mesh.url}/v1/chat/completions", json=chat)
    assert refusal(response) == (400, "model", "unsupported_parameter")


def test_an_adapter_has_vectors_of_its_own(mesh: Mesh, other_models: None) -> None:
    (vector,) = vectors(post(mesh, [4, 5], model="fr"))
    assert np.array_equal(vector, VECTORS.embed([4, 5], SIZE, "fr"))


def disconnected_clients(mesh: Mesh) -> float:
    sample = f'kvmesh_frontend_disconnected_clients_total{{model="{MODEL}"}} '
    lines = mesh.http.get(f"{mesh.url}/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(sample)]
    return float(line.removeprefix(sample))


@pytest.mark.row("S3-42")
def test_a_disconnect_ends_the_work(mesh: Mesh) -> None:
    before = sum(accepted(worker) for worker in mesh.workers)
    disconnects = disconnected_clients(mesh)
    body = {"model": MODEL, "input": [[1] * 4000] * 75}
    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(
            f"{mesh.url}/v1/embeddings",
            json=body,
            headers={"x-request-id": "gone"},
            timeout=httpx.Timeout(WAIT_S, read=0.05),
            trust_env=False,
        )
    line = mesh.request_line("gone")
    assert (line["status"], line["failure"]) == (499, "REQUEST_CANCELLED")
    assert disconnected_clients(mesh) == disconnects + 1
    wait_for(lambda: not any(worker.open_slots() for worker in mesh.workers), "no slot is open")
    wait_for(lambda: not mesh.router.bookings(), "all bookings are free")
    assert sum(accepted(worker) for worker in mesh.workers) - before < 75


def test_a_pair_embeds_on_its_prefill_worker(tmp_path: Any) -> None:
    with Mesh(tmp_path, workers=0, prefill=1, decode=1, worker_flags=["--speedup=0"]) as mesh:
        texts: list[Any] = [[number] for number in range(1, 40)]
        assert are_equal(vectors(post(mesh, texts)), texts)
        (prefill,), (decode,) = mesh.of_kind("prefill"), mesh.of_kind("decode")
        assert [accepted(prefill), accepted(decode)] == [len(texts), 0]


def test_a_lost_worker_loses_no_vector(mesh: Mesh) -> None:
    """The last test of the module: it kills a worker."""
    worker: Service = mesh.workers[0]
    texts: list[Any] = [[number + 1] * 1000 for number in range(290)]
    with httpx.Client(timeout=WAIT_S, trust_env=False) as client:
        request = client.build_request(
            "POST",
            f"{mesh.url}/v1/embeddings",
            content=json.dumps({"model": MODEL, "input": texts, "encoding_format": "base64"}),
            headers={"content-type": "application/json", "x-request-id": "lost"},
        )
        before = accepted(worker)
        killer = _kill_when(worker, before)
        response = client.send(request)
        killer.join(WAIT_S)
    assert are_equal(vectors(response), texts)
    line = mesh.request_line("lost")
    assert line["attempts"] > len(texts), "some inputs needed another attempt"
    assert len(line["workers"]) == 2


def _kill_when(worker: Service, before: int) -> Any:
    """Kills a worker in a thread, once it has accepted more inputs."""
    from threading import Thread

    def kill() -> None:
        wait_for(lambda: accepted(worker) > before + 8, "it has inputs")
        worker.kill()

    thread = Thread(target=kill)
    thread.start()
    return thread

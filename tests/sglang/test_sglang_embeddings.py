"""Embeddings by a worker of an SGLang embedding model, compared with its weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from common.errors import MeshError, PromptTooLong, Unsupported
from common.request.embedding import Vector
from common.rpc import channel as rpc
from kvmesh.engine.v1 import engine_pb2 as pb
from kvmesh.types.v1 import request_pb2 as wire
from tests.sglang.reference_model import reference_state
from tests.sglang.sglang_mesh import MODEL, HttpMesh
from tests.sglang.sglang_workers import WAIT_S, WorkerProcess, greedy_request

TEXTS = [[5, 6, 7], [9], list(range(3, 300)), [5, 6, 7, 8]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from worker_svc.engines.sglang.make_model import write_tiny_model

    folder = tmp_path_factory.mktemp("embedding") / "tiny"
    write_tiny_model(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def worker(model: Path) -> AsyncIterator[WorkerProcess]:
    start = WorkerProcess.started
    arguments = {"is_embedding": True, "max_total_tokens": 8192}
    async with start(
        "aggregated", model=model, folder=model.parent, engine_args=arguments
    ) as worker:
        await worker.ready()
        yield worker


async def embed(worker: WorkerProcess, texts: Sequence[Sequence[int]], **fields: Any) -> Any:
    sequences = [wire.TokenSequence(token_ids=ids) for ids in texts]
    request = wire.PreprocessedEmbeddingRequest(token_ids=sequences, **fields)
    response = await rpc.unary(
        worker.stub.Embed, pb.EmbedRequest(request=request), timeout_s=WAIT_S
    )
    return [np.array(one.values, dtype=np.float32) for one in response.embeddings]


def reference(model: Path, ids: Sequence[int]) -> Vector:
    """The normalised last hidden state of the last token."""
    state = reference_state(model, ids)
    vector: Vector = (state / np.linalg.norm(state)).astype(np.float32)
    return vector


async def test_vectors_follow_from_the_weights(worker: WorkerProcess, model: Path) -> None:
    for ids, found in zip(TEXTS, await embed(worker, TEXTS), strict=True):
        assert found == pytest.approx(reference(model, ids), abs=2e-5)
        assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)


async def test_a_prompt_has_one_vector_alone_and_in_a_batch(worker: WorkerProcess) -> None:
    alone = [(await embed(worker, [ids]))[0] for ids in TEXTS]
    for one, batched in zip(alone, await embed(worker, TEXTS), strict=True):
        assert one == pytest.approx(batched, abs=2e-5)


async def test_what_the_model_cannot_do_is_refused_by_name(worker: WorkerProcess) -> None:
    refusals: list[tuple[type[MeshError], str, Any]] = [
        (Unsupported, "dimensions", embed(worker, [[1]], dimensions=8)),
        (PromptTooLong, "token_ids", embed(worker, [[1] * 100_000])),
        (Unsupported, "model", worker.generate(greedy_request([1, 2]), "r")),
    ]
    for error, field, call in refusals:
        with pytest.raises(error) as refused:
            await call
        assert refused.value.field == field


async def test_an_openai_client_receives_the_vectors(
    worker: WorkerProcess, model: Path, tmp_path: Path
) -> None:
    registry, known = model.parent / "registry", {worker.instance_id}
    async with HttpMesh.started(tmp_path, registry, known) as mesh:
        body = {"model": MODEL, "input": TEXTS}
        response = await mesh.http.post("/v1/embeddings", json=body)
        assert response.status_code == 200, response.text
        for ids, entry in zip(TEXTS, response.json()["data"], strict=True):
            assert entry["embedding"] == pytest.approx(reference(model, ids), abs=2e-5)
        for path, more, field in (
            ("/v1/embeddings", {"input": "a", "dimensions": 8}, "dimensions"),
            ("/v1/completions", {"prompt": "a"}, "model"),
        ):
            refused = await mesh.http.post(path, json={"model": MODEL} | more)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == field


async def test_the_probe_of_an_idle_worker_succeeds(worker: WorkerProcess) -> None:
    counters = (await worker.info()).counters
    assert counters.get("canaries_failed", 0) == 0

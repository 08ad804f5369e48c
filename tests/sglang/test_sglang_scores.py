"""Scores by a worker of an SGLang classifier, compared with its weights, through a frontend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.sglang.classifier_model import write_classifier
from tests.sglang.reference_model import reference_state
from tests.sglang.sglang_mesh import MODEL, HttpMesh
from tests.sglang.sglang_workers import WorkerProcess
from worker_svc.engines.sim.config import SIM_MODEL_DIR

QUERY = "Where is Paris?"
DOCUMENTS = ["Paris is in France", "Bears eat fish", "The capital of France is Paris" * 20]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier") / "tiny"
    write_classifier(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def worker(model: Path) -> AsyncIterator[WorkerProcess]:
    arguments = {"is_embedding": True, "max_total_tokens": 8192}
    async with WorkerProcess.started(
        "aggregated", model=model, folder=model.parent, engine_args=arguments
    ) as worker:
        await worker.ready()
        yield worker


def expected(model: Path, first: str, second: str) -> float:
    """The score as the weights of the head define it."""
    from safetensors.numpy import load_file  # type: ignore[import-not-found]

    tokenizer = Tokenizer.from_file(str(SIM_MODEL_DIR / "tokenizer.json"))
    weights = load_file(model / "model.safetensors")
    state = reference_state(model, tokenizer.encode(first, second).ids)
    return float(state @ weights["score.weight"][0] + weights["score.bias"][0])


# Any: JSON.
async def post(mesh: HttpMesh, path: str, **fields: Any) -> Any:
    response = await mesh.http.post(path, json={"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_scores_follow_from_the_weights(
    worker: WorkerProcess, model: Path, tmp_path: Path
) -> None:
    registry, known = model.parent / "registry", {worker.instance_id}
    wanted = [expected(model, QUERY, document) for document in DOCUMENTS]
    async with HttpMesh.started(tmp_path, registry, known) as mesh:
        scored = await post(mesh, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
        found = [one["score"] for one in scored["data"]]
        assert found == pytest.approx(wanted, abs=2e-4)
        ranked = await post(mesh, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=2)
        order = sorted(range(3), key=lambda index: -wanted[index])
        assert [one["index"] for one in ranked["results"]] == order[:2]
        for path, more in (
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/completions", {"prompt": "a"}),
        ):
            refused = await mesh.http.post(path, json={"model": MODEL} | more)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "model"


async def test_the_probe_of_an_idle_worker_succeeds(worker: WorkerProcess) -> None:
    counters = (await worker.info()).counters
    assert counters.get("canaries_failed", 0) == 0

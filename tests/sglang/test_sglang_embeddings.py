"""Embeddings by a worker of an SGLang embedding model, compared with its weights."""

from __future__ import annotations

import json
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
    """The normalised last hidden state of the last token, computed from the weights as the
    architecture of Qwen2 is published."""
    from safetensors.numpy import load_file  # type: ignore[import-not-found]

    config = json.loads((model / "config.json").read_text())
    weights = {
        k.removeprefix("model."): v for k, v in load_file(model / "model.safetensors").items()
    }
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, count = config["hidden_size"] // heads, len(ids)
    angles = np.outer(np.arange(count), 10000.0 ** (-np.arange(0, size, 2) / size))
    cos, sin = (np.tile(turn(angles), 2)[:, None] for turn in (np.cos, np.sin))
    mask = np.triu(np.full((count, count), -np.inf), 1)

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights[f"{name}.weight"]

    def project(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def rotate(x: Any) -> Any:
        first, second = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate((-second, first), axis=-1) * sin

    x = weights["embed_tokens.weight"][list(ids)].astype(np.float64)
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            project(y, f"{layer}.self_attn.{part}_proj").reshape(count, -1, size) for part in "qkv"
        )
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (rotate(k), v))
        scores = np.einsum("ihd,jhd->hij", rotate(q), k) / np.sqrt(size) + mask
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v)
        x = x + project(mixed.reshape(count, -1), f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate = project(y, f"{layer}.mlp.gate_proj")
        x = x + project(
            gate / (1 + np.exp(-gate)) * project(y, f"{layer}.mlp.up_proj"),
            f"{layer}.mlp.down_proj",
        )
    state = norm(x, "norm")[-1]
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

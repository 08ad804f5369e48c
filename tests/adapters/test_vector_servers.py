"""Vectors and scores by stock servers, each compared with the server's own, SGLang's with the
weights too."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import Unsupported
from common.request.embedding import Vector
from common.runtime.free_ports import free_ports
from tests.adapters.servers_mesh import ServersMesh
from tests.adapters.stock_server import SglangServer
from tests.adapters.text_servers import LlamaServer, MeshServer, TextServer, ask
from tests.adapters.tiny_gguf import write_tiny_gguf, write_tokenizer
from tests.sglang.classifier_model import write_classifier
from tests.sglang.reference_model import reference_state
from worker_svc.engines.openai.config import ServerConfig
from worker_svc.engines.openai.engine import ServerEngine
from worker_svc.engines.sim.config import SIM_MODEL_DIR

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["Where is Paris?", "Bears eat fish", "ba be bi"]


def vectors_of(found: dict[str, list[dict[str, list[float]]]]) -> list[Vector]:
    """Returns the vectors of a response, of length 1."""
    vectors = [np.array(entry["embedding"], dtype=np.float32) for entry in found["data"]]
    return [vector / np.linalg.norm(vector) for vector in vectors]


def check_vectors(mesh: ServersMesh, url: str, tolerance: float) -> None:
    """Compares vectors of texts and token ids with those of the server itself."""
    for inputs in (TEXTS, [[5, 6, 7], [9]]):
        own = vectors_of(ask(url, EMBEDDINGS, {"model": mesh.model, "input": inputs}))
        found = mesh.post(EMBEDDINGS, {"model": mesh.model, "input": inputs})
        assert len(found["data"]) == len(inputs)
        for one, other in zip(vectors_of(found), own, strict=True):
            assert one == pytest.approx(other, abs=tolerance)


@pytest.fixture(params=["llama", "openai"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def start_llama(folder: Path, *flags: str) -> LlamaServer:
    """Returns a llama-server that serves, with a tiny model and its tokenizer in the folder."""
    write_tiny_gguf(folder / "tiny.gguf")
    write_tokenizer(folder)
    program, port = os.environ["LLAMA_SERVER"], free_ports(1)
    server = LlamaServer(program, folder / "tiny.gguf", folder, port, *flags)
    try:
        return server.wait_ready()
    except BaseException:
        server.kill()
        raise


@pytest.fixture
def server(kind: str, tmp_path: Path) -> Iterator[tuple[TextServer, Path]]:
    """A server of vectors, and the folder with the tokenizer of its model."""
    folder = tmp_path / "server"
    folder.mkdir()
    with ExitStack() as ended:
        if kind == "openai":
            mesh = MeshServer(folder, free_ports(1))
            ended.callback(mesh.close)
            yield mesh, SIM_MODEL_DIR
            return
        llama = start_llama(folder, "--embeddings", "--pooling", "mean", "--kv-unified")
        ended.callback(llama.kill)
        yield llama, folder


@pytest.mark.cell("*", "embeddings")
def test_vectors_are_those_of_a_server_without_an_api_of_token_ids(
    kind: str, server: tuple[TextServer, Path], tmp_path: Path
) -> None:
    found, folder = server
    flags = [f"--model-path={folder}"] + ["--serve=embedding"] * (kind == "openai")
    (tmp_path / "mesh").mkdir()
    with ServersMesh(tmp_path / "mesh", [found], *flags) as mesh:
        check_vectors(mesh, found.url, 1e-5)
        if kind == "llama":
            # Above its --ubatch-size.
            body: dict[str, Any] = {"model": mesh.model, "input": [7] * 600}
            assert mesh.post(EMBEDDINGS, body, 400)["error"]["param"] == "input"
            body = {"model": mesh.model, "input": "a", "dimensions": 8}
            assert mesh.post(EMBEDDINGS, body, 400)["error"]["param"] == "dimensions"
            check_vectors(mesh, found.url, 1e-5)


@pytest.mark.parametrize("kind", ["llama"])
def test_llama_server_with_a_cache_for_each_slot_is_refused(kind: str, tmp_path: Path) -> None:
    flags = ("--embeddings", "--pooling", "mean")
    server = start_llama(tmp_path, *flags)
    try:
        engine = ServerEngine(ServerConfig(server.url, model_path=tmp_path))
        with pytest.raises(Unsupported, match="--kv-unified"):
            asyncio.run(start_and_end(engine))
    finally:
        server.kill()


async def start_and_end(engine: ServerEngine) -> None:
    """Starts an engine and ends it, also if the start fails."""
    try:
        await engine.start(1)
    finally:
        await engine.cleanup()


@pytest.mark.cell("sglang", "embeddings")
def test_vectors_of_sglang_follow_from_its_weights(tiny: Path, tmp_path: Path) -> None:
    server = SglangServer(tiny, tmp_path, free_ports(3), "--is-embedding")
    (tmp_path / "mesh").mkdir()
    try:
        with ServersMesh(tmp_path / "mesh", [server.wait_ready()]) as mesh:
            check_vectors(mesh, server.url, 2e-5)
            for ids in ([5, 6, 7], list(range(3, 300))):
                body: dict[str, Any] = {"model": mesh.model, "input": ids}
                state = reference_state(tiny, ids)
                wanted = state / np.linalg.norm(state)
                assert vectors_of(mesh.post(EMBEDDINGS, body))[0] == pytest.approx(wanted, abs=2e-5)
            body = {"model": mesh.model, "input": "a", "dimensions": 8}
            assert mesh.post(EMBEDDINGS, body, 400)["error"]["param"] == "dimensions"
    finally:
        server.kill()


@pytest.mark.cell("sglang", "scores of pairs")
def test_scores_of_sglang_follow_from_its_weights(tmp_path: Path) -> None:
    from safetensors.numpy import load_file  # type: ignore[import-not-found]
    from tokenizers import Tokenizer

    write_classifier(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    query, documents = TEXTS[0], ["Paris is in France", "Bears eat fish"]
    wanted = []
    for document in documents:
        state = reference_state(tmp_path / "model", tokenizer.encode(query, document).ids)
        wanted.append(float(state @ weights["score.weight"][0] + weights["score.bias"][0]))
    server = SglangServer(tmp_path / "model", tmp_path, free_ports(3), "--is-embedding")
    (tmp_path / "mesh").mkdir()
    try:
        with ServersMesh(tmp_path / "mesh", [server.wait_ready()]) as mesh:
            body = {"model": mesh.model, "text_1": query, "text_2": documents}
            found = [one["score"] for one in mesh.post("/v1/score", body)["data"]]
            assert found == pytest.approx(wanted, abs=2e-4)
            body = {"model": mesh.model, "query": query, "documents": documents}
            ranked = [one["index"] for one in mesh.post("/v1/rerank", body)["results"]]
            assert ranked == sorted(range(2), key=lambda index: -wanted[index])
    finally:
        server.kill()

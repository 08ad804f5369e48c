"""Vectors and scores by stock vLLM servers, compared with the server's own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from common.runtime.free_ports import free_ports
from tests.kit.processes import ROOT, Mesh
from tests.vllm.conftest import ServersMesh
from tests.vllm.vllm_server import MODEL, VENV, VllmServer

PATIENT_S = 200.0
TEXTS = ["Where is Paris?", "Bears eat fish", "The capital of France is Paris"]


# Any, here and below: JSON.
def post(url: str, path: str, status: int = 200, **fields: Any) -> Any:
    body = {"model": MODEL, **fields}
    response = httpx.post(f"{url}{path}", json=body, timeout=PATIENT_S, trust_env=False)
    assert response.status_code == status, response.text
    return response.json()


@contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[tuple[Mesh, VllmServer]]:
    """Runs a mesh with one server."""
    folder.mkdir()
    server = VllmServer(model, folder, free_ports(3), *flags)
    try:
        server.wait_ready()
        (folder / "mesh").mkdir()
        with ServersMesh(folder / "mesh", [server.worker_flags]) as mesh, closing(mesh.http):
            yield mesh, server
    finally:
        server.kill()


@pytest.mark.cell("vllm", "embeddings")
def test_vectors_are_those_of_the_server(folder: Path, tmp_path: Path) -> None:
    overrides = '{"is_matryoshka": true}'
    flags = ("--runner", "pooling", "--convert", "embed", "--hf-overrides", overrides)
    with serving(folder / "tiny", tmp_path / "vectors", *flags) as (mesh, server):
        for inputs in (TEXTS, [[5, 6, 7], [9]]):
            for more in ({}, {"dimensions": 16}):
                fields: dict[str, Any] = {"input": inputs, "encoding_format": "float", **more}
                own = post(server.url, "/v1/embeddings", **fields)["data"]
                found = post(mesh.url, "/v1/embeddings", **fields)["data"]
                assert len(found) == len(inputs)
                for one, other in zip(found, own, strict=True):
                    assert one["embedding"] == pytest.approx(other["embedding"], abs=2e-5)
        (entry,) = post(mesh.url, "/v1/embeddings", input=TEXTS[0])["data"]
        assert np.linalg.norm(entry["embedding"]) == pytest.approx(1, abs=1e-5)
        refused = post(mesh.url, "/v1/embeddings", 400, input="a", dimensions=65)
        assert refused["error"]["param"] == "dimensions"


@pytest.mark.cell("vllm", "scores of pairs")
def test_scores_are_those_of_the_server(folder: Path, tmp_path: Path) -> None:
    command = [str(VENV / "bin" / "python"), "-m", "tests.vllm.classifier_files", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=240)
    with serving(folder / "classifier", tmp_path / "scores") as (mesh, server):
        fields: dict[str, Any] = {"text_1": TEXTS[0], "text_2": TEXTS[1:]}
        own = [one["score"] for one in post(server.url, "/score", **fields)["data"]]
        found = [one["score"] for one in post(mesh.url, "/v1/score", **fields)["data"]]
        assert found == pytest.approx(own, abs=1e-5)
        assert found[0] != pytest.approx(found[1], abs=1e-3)
        ranked = post(mesh.url, "/v1/rerank", query=TEXTS[0], documents=TEXTS[1:])["results"]
        assert [one["index"] for one in ranked] == sorted(range(2), key=lambda at: -own[at])

"""LoRA adapters by name on an SGLang worker: loaded, used, exchanged and removed through the API of
a frontend, and compared with the adapter's weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.kit.waiting import until
from tests.sglang.adapter_model import RANK, TARGETS, write_adapter, write_merged
from tests.sglang.reference_model import reference_state
from tests.sglang.sglang_mesh import MODEL, HttpMesh
from tests.sglang.sglang_workers import WAIT_S, WorkerProcess
from worker_svc.engines.sglang.make_model import write_tiny_model

ENGINE_ARGS = {
    "enable_lora": True,
    "max_lora_rank": RANK,
    "lora_target_modules": sorted(TARGETS),
    "max_loras_per_batch": 3,
    "max_total_tokens": 8192,
}
PROMPT = list(range(700, 740))
TOKENS = 6


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_tiny_model(folder / "tiny")
    for seed, name in enumerate(("french", "german")):
        write_adapter(folder / name, seed)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def worker(folder: Path) -> AsyncIterator[WorkerProcess]:
    start = WorkerProcess.started
    async with start(
        "aggregated", model=folder / "tiny", folder=folder, engine_args=ENGINE_ARGS
    ) as worker:
        await worker.ready()
        yield worker


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(folder: Path, worker: WorkerProcess) -> AsyncIterator[HttpMesh]:
    async with HttpMesh.started(folder, folder / "registry", {worker.instance_id}) as mesh:
        yield mesh


def reference(model: Path, count: int = TOKENS) -> list[int]:
    """The tokens that the weights of a model give after the prompt."""
    from safetensors.numpy import load_file  # type: ignore[import-not-found]

    head, ids = load_file(model / "model.safetensors")["lm_head.weight"], list(PROMPT)
    for _ in range(count):
        ids.append(int(np.argmax(head @ reference_state(model, ids))))
    return ids[len(PROMPT) :]


async def add(mesh: HttpMesh, name: str, uri: str) -> None:
    body = {"name": name, "model": MODEL, "uri": uri}
    response = await mesh.http.post("/v1/adapters", json=body)
    assert response.status_code == 200, response.text


async def listed(mesh: HttpMesh, name: str) -> dict[str, Any]:
    """The entry of a desired adapter."""
    found = (await mesh.http.get("/v1/adapters")).json()["data"]
    return next(one for one in found if one["name"] == name)


async def until_held(mesh: HttpMesh, name: str) -> None:
    async def is_held() -> bool:
        models = (await mesh.http.get("/v1/models")).json()["data"]
        return name in [one["id"] for one in models]

    await until(is_held, f"{name} is a model", WAIT_S)


async def tokens(mesh: HttpMesh, model: str) -> tuple[Sequence[int], int]:
    """The tokens of a greedy response, and how many of its prompt were cached."""
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "nvext": {"extra_fields": ["completion_token_ids"]},
    }
    response = await mesh.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    result = response.json()
    cached = result["usage"]["prompt_tokens_details"]["cached_tokens"]
    return result["nvext"]["completion_token_ids"], cached


async def test_an_adapter_has_its_own_output_and_cache(mesh: HttpMesh, folder: Path) -> None:
    for name in ("french", "german"):
        await add(mesh, name, f"file://{folder / name}")
        write_merged(folder / "tiny", folder / name, folder / f"{name}-merged")
    for name in ("french", "german"):
        await until_held(mesh, name)
    expected = {name: reference(folder / f"{name}-merged") for name in ("french", "german")}
    expected[MODEL] = reference(folder / "tiny")
    assert len({tuple(one) for one in expected.values()}) == 3, "the adapters have an effect"
    for cached in (0, 32):
        for name, ids in expected.items():
            assert await tokens(mesh, name) == (ids, cached)


async def test_an_adapter_that_sglang_cannot_load_is_listed_with_the_reason(
    mesh: HttpMesh, folder: Path
) -> None:
    await add(mesh, "absent", f"file://{folder / 'absent'}")

    async def reasons() -> list[str]:
        return [one["reason"] for one in (await listed(mesh, "absent"))["failed"]]

    (reason,) = await until(reasons, "the failure is listed", WAIT_S)
    assert "has no folder" in reason
    assert (await mesh.http.delete("/v1/adapters/absent")).status_code == 200


async def test_a_removed_adapter_is_no_model(mesh: HttpMesh) -> None:
    await until_held(mesh, "german")
    assert (await mesh.http.delete("/v1/adapters/german")).status_code == 200

    async def is_gone() -> bool:
        body = {"model": "german", "prompt": PROMPT, "max_tokens": 1}
        return (await mesh.http.post("/v1/completions", json=body)).status_code == 404

    await until(is_gone, "german is gone", WAIT_S)
    assert (await tokens(mesh, MODEL))[1] == 32

"""Responses under constraints and penalties survive the loss of their SGLang worker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from tests.sglang.sglang_mesh import MODEL, HttpMesh
from tests.sglang.sglang_workers import WorkerProcess
from worker_svc.engines.sglang.make_model import write_tiny_model

LIST = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[a-z ]{1,12}$"},
    "minItems": 40,
    "maxItems": 40,
}
PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": LIST}}}
# Any: JSON.
FIELDS: dict[str, Any] = {**FORM, **PENALTIES, "max_tokens": 600}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[WorkerProcess]]:
    folder = tmp_path_factory.mktemp("migration")
    write_tiny_model(folder / "tiny")
    async with AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(
                WorkerProcess.started(
                    "aggregated",
                    model=folder / "tiny",
                    folder=folder,
                    engine_args={"max_total_tokens": 8192},
                    name=f"worker-{number}",
                )
            )
            for number in range(2)
        ]
        for worker in started:
            await worker.ready()
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(workers: list[WorkerProcess], tmp_path_factory: Any) -> AsyncIterator[HttpMesh]:
    folder: Path = tmp_path_factory.mktemp("mesh")
    known = {worker.instance_id for worker in workers}
    async with HttpMesh.started(folder, workers[0]._log.parent / "registry", known) as mesh:
        yield mesh


async def streamed(
    mesh: HttpMesh, workers: list[WorkerProcess] | None, **fields: Any
) -> tuple[str, str]:
    """The text and the finish reason of a stream. workers: the one of the stream is killed in the
    middle; None: it is not."""
    body = {"model": MODEL, "temperature": 0, "stream": True, **fields}
    body["messages"] = [{"role": "user", "content": "A list."}]
    body["nvext"] = {"extra_fields": ["worker_id"]}
    text, reason, chunks, serving = "", "", 0, 0
    async with mesh.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, (event, chunks, text)
            serving = serving or int(
                event.get("nvext", {}).get("worker_id", {}).get("decode_worker_id", 0)
            )
            text += event["choices"][0]["delta"].get("content") or ""
            reason = event["choices"][0]["finish_reason"] or reason
            chunks += 1
            if workers is not None and serving and chunks >= 30:
                (worker,) = [one for one in workers if one.instance_id == serving]
                worker.process.kill()
                workers = None
    assert workers is None, "no worker was killed"
    return text, reason


async def test_a_response_is_the_same_after_its_worker_died(
    mesh: HttpMesh, workers: list[WorkerProcess]
) -> None:
    whole = await streamed(mesh, None, **FIELDS)
    assert whole != await streamed(mesh, None, **FORM, max_tokens=600), "penalties have an effect"
    assert await streamed(mesh, workers, **FIELDS) == whole
    jsonschema.validate(json.loads(whole[0]), LIST)

"""Models that a frontend is configured to serve, while no worker is registered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import httpx
import pytest

from tests.kit.engines import RecordingEngine
from tests.kit.local_mesh import COMPLETIONS, LocalMesh, local_mesh, pass_through, registration
from tests.kit.waiting import WAIT_S, until
from worker_svc.engines.contract import (
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
)

REASON = "no worker is registered"
GAUGE = "kvmesh_frontend_model_awaiting_worker_requests"


async def waiting(mesh: LocalMesh, model: str = "m") -> float:
    """How many requests wait for a model, by the metrics."""
    start = f'{GAUGE}{{model="{model}"}} '
    lines = [line for line in (await mesh.scrape()).splitlines() if line.startswith(start)]
    return float(lines[0].removeprefix(start))


async def are_waiting(mesh: LocalMesh, count: int) -> None:
    async def reached() -> bool:
        return await waiting(mesh) == count

    await until(reached, f"{count} requests wait")


async def test_a_configured_model_without_a_worker_is_a_503_with_the_reason() -> None:
    async with local_mesh(configured_models=("m",), worker_wait_s=0.0) as mesh:
        for response in (
            await mesh.complete(),
            await mesh.chat(),
            await mesh.http.post("/v1/embeddings", json={"model": "m", "input": "hi"}),
            await mesh.http.get("/v1/models/m"),
        ):
            assert response.status_code == 503, response.text
            assert REASON in response.json()["error"]["message"]
            assert response.headers["retry-after"] == "1"
        assert (await mesh.complete(model="other")).status_code == 404
        ready = await mesh.http.get("/ready")
        assert ready.status_code == 503
        assert f"model m: {REASON}" in ready.json()["reasons"]
        assert (await mesh.health())["models_not_ready"] == {"m": REASON}
        failures = 'kvmesh_frontend_failures_total{endpoint="completions",'
        assert f'{failures}error_type="unavailable",model="m"}} 1.0' in await mesh.scrape()


async def test_a_frontend_that_serves_another_model_is_ready_and_names_the_absent_one() -> None:
    async with local_mesh(configured_models=("m", "absent")) as mesh, mesh.router():
        async with mesh.worker(RecordingEngine()):
            ready = await mesh.http.get("/ready")
            assert ready.status_code == 200
            assert ready.json()["reasons"] == [f"model absent: {REASON}"]
        await mesh.no_longer_serves("m")
        assert f"model m: {REASON}" in (await mesh.http.get("/ready")).json()["reasons"]


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_wait_for_the_first_worker_of_a_configured_model(stream: bool) -> None:
    async with local_mesh(configured_models=("m",)) as mesh, mesh.router():
        assert await waiting(mesh) == 0
        call = asyncio.create_task(mesh.complete(stream=stream))
        gone = asyncio.create_task(mesh.complete())
        await are_waiting(mesh, 2)
        gone.cancel()
        await are_waiting(mesh, 1)
        assert not call.done()
        async with mesh.worker(RecordingEngine()):
            assert (await call).status_code == 200
        assert await waiting(mesh) == 0
        disconnected = 'kvmesh_frontend_disconnected_clients_total{model="m"} 1.0'
        assert disconnected in await mesh.scrape()


async def test_a_quarter_of_all_requests_may_wait_and_more_are_refused_at_once() -> None:
    async with local_mesh(configured_models=("m",), requests_max=8) as mesh, mesh.router():
        calls = [asyncio.create_task(mesh.complete()) for _ in range(2)]
        await are_waiting(mesh, 2)
        refused = await mesh.complete()
        assert refused.status_code == 503
        assert REASON in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert await waiting(mesh) == 2
        async with mesh.worker(RecordingEngine()):
            assert [(await call).status_code for call in calls] == [200, 200]


async def test_a_wait_for_a_configured_model_ends_at_its_limit() -> None:
    async with local_mesh(configured_models=("m",), worker_wait_s=0.3) as mesh:
        began = asyncio.get_running_loop().time()
        response = await mesh.complete(stream=True)
        assert asyncio.get_running_loop().time() - began >= 0.3
        assert response.status_code == 503, "no byte was sent before"
        assert REASON in response.json()["error"]["message"]


async def test_a_wait_for_a_configured_model_ends_at_the_time_limit_of_requests() -> None:
    async with local_mesh(configured_models=("m",), request_timeout_s=1.0) as mesh:
        async with asyncio.timeout(WAIT_S / 2):
            assert (await mesh.complete()).status_code == 503


async def test_the_time_limit_of_a_request_includes_its_wait() -> None:
    loop = asyncio.get_running_loop()

    async def silent(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        await asyncio.Event().wait()
        yield chunk.length()

    async with local_mesh(configured_models=("m",), request_timeout_s=60.0) as mesh:
        call = asyncio.create_task(mesh.complete())
        await are_waiting(mesh, 1)
        waited_at, gateway = loop.time(), mesh.frontend.gateway
        async with mesh.router(), mesh.worker(RecordingEngine(silent)):
            await until(lambda: gateway.open_requests == 1, "the request is sent")
            (handle,) = gateway._open
            assert handle.machine.plan.deadline <= waited_at + 60.0
            call.cancel()


async def test_a_request_for_a_configured_model_whose_card_is_refused_does_not_wait() -> None:
    reason = "'m' is not served: missing model deployment card: the worker has no card_checksum"
    async with local_mesh(configured_models=("m",)) as mesh:
        call = asyncio.create_task(mesh.complete())
        await are_waiting(mesh, 1)
        async with asyncio.timeout(WAIT_S / 2), mesh.joined(registration(9)):
            for response in (await call, await mesh.complete()):
                assert response.status_code == 503
                assert reason in response.json()["error"]["message"]
                assert response.headers["retry-after"] == "1"


async def test_a_wait_lasts_while_the_card_of_the_model_cannot_be_loaded() -> None:
    async with (
        local_mesh(configured_models=("m",), worker_wait_s=0.5) as mesh,
        mesh.joined(registration(9, checksum="missing")),
    ):

        async def is_offered() -> bool:
            return "no card" in (await mesh.health())["models_not_ready"]["m"]

        await until(is_offered, "a worker offers the model")
        began = asyncio.get_running_loop().time()
        response = await mesh.complete()
        assert asyncio.get_running_loop().time() - began >= 0.5
        assert response.status_code == 503
        assert "is being loaded" in response.json()["error"]["message"]


async def test_a_request_that_waited_for_a_pass_through_model_is_sent_again() -> None:
    async with (
        local_mesh(configured_models=("talk",)) as mesh,
        mesh.router(),
        mesh.echo() as app,
    ):
        call = asyncio.create_task(mesh.chat(model="talk"))

        async def is_waiting() -> bool:
            return await waiting(mesh, "talk") == 1

        await until(is_waiting, "the request waits")
        async with mesh.joined(pass_through(app, "talk", "Chat")):
            response = await call
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert (await mesh.chat(model="talk")).status_code == 200


async def test_a_shutdown_ends_the_waits_with_an_error() -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as client:
        async with local_mesh(configured_models=("m",)) as mesh:
            url = mesh.http.base_url.join(COMPLETIONS)
            call = asyncio.create_task(client.post(url, json={"model": "m", "prompt": [5, 6]}))
            await are_waiting(mesh, 1)
        response = await call
    assert response.status_code == 503
    assert "shutting down" in response.json()["error"]["message"]

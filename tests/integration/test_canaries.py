"""Canaries of a frontend: they find what clients would not get, and count for no client."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncGenerator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.errors import InternalError
from meshctl.cli import run_command
from tests.kit.apps import living
from tests.kit.engines import RecordingEngine
from tests.kit.gray_engine import GrayEngine
from tests.kit.local_mesh import LocalMesh, local_mesh, pass_through, registration
from tests.kit.waiting import until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engines.contract import (
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
)
from worker_svc.engines.sim.config import SimConfig
from worker_svc.engines.sim.timing import Timing

INTERVAL_S = 0.2
PREFIX = "kvmesh_frontend"
# Any, here and below: JSON.
Json = Any


async def obeying(
    request: PreprocessedRequest, ctx: GenerateContext
) -> AsyncGenerator[LLMEngineOutput, None]:
    """Sends `max_tokens` tokens."""
    for number in range(request.stop_conditions.max_tokens or 0):
        yield chunk.token(300 + number)
    yield chunk.length()


async def samples(mesh: LocalMesh, part: str = "canary_") -> dict[str, float]:
    """The samples of the frontend with this text in their names, named without their prefix, with
    the values of their labels."""
    found = {}
    for family in text_string_to_metric_families(await mesh.scrape()):
        for sample in family.samples:
            if part in sample.name and not sample.name.endswith("_created"):
                name = sample.name.removeprefix(f"{PREFIX}_")
                found[" ".join([name, *sample.labels.values()])] = sample.value
    return found


async def canary(mesh: LocalMesh, model: str = "m") -> Json:
    """The newest result of a model in `/ready`; None before the first one."""
    return (await mesh.http.get("/ready")).json()["canaries"].get(model)


async def has_status(mesh: LocalMesh, status: str, model: str = "m", reason: str = "") -> Json:
    """Waits for a result and returns it. reason: a part of it; on a busy machine others come
    before."""

    async def reached() -> Json:
        result = await canary(mesh, model)
        is_it = result is not None and result["status"] == status and reason in result["reason"]
        return result if is_it else None

    return await until(reached, f"the canary of {model} is {status} {reason}")


async def sent(mesh: LocalMesh, count: int, model: str = "m") -> None:
    """Waits until as many canaries of a model were served."""

    async def reached() -> bool:
        return (await samples(mesh)).get(f"canary_duration_seconds_count {model}", 0) >= count

    await until(reached, f"{count} canaries were served")


def gray_engine() -> GrayEngine:
    return GrayEngine(SimConfig(timing=Timing(speedup=0.0)))


async def test_a_canary_of_a_served_model_is_a_success_and_leaves_no_booking() -> None:
    engine = RecordingEngine(obeying)
    async with (
        local_mesh(canary_interval_s=INTERVAL_S) as mesh,
        mesh.router() as router,
        mesh.worker(engine),
    ):
        await sent(mesh, 3)
        result = await has_status(mesh, "ok")
        assert (result["stage"], result["reason"]) == ("", "")
        assert result["age_s"] < 2
        assert (await mesh.health())["canaries"]["m"]["status"] == "ok"
        found = await samples(mesh)
        assert found["canary_success m"] == 1
        assert found["canary_age_seconds m"] < 2
        assert not any(name.startswith("canary_failures_total") for name in found)
        request = engine.requests[0]
        assert request.stop_conditions.max_tokens == 1
        assert 0 < len(request.token_ids) < 16, "it fills no block"
        await until(lambda: not len(router.router.load_tracker), "no booking is left")


async def test_canaries_count_in_no_metric_record_or_limit_of_clients(tmp_path: Path) -> None:
    keys, audit, trace = (tmp_path / name for name in ("keys.json", "audit.jsonl", "trace.jsonl"))

    def run(*arguments: str) -> str:
        with redirect_stdout(io.StringIO()) as output:
            assert run_command(["keys", f"--api-keys={keys}", *arguments], {}) == 0
        return output.getvalue().strip()

    key = run("create", "small", "--scopes=infer,admin")
    run("limits", "small", "--tokens-per-min=60")
    settings: Json = {"api_keys": keys, "audit_log": str(audit), "request_trace": str(trace)}
    async with (
        local_mesh(canary_interval_s=INTERVAL_S, **settings) as mesh,
        mesh.router(),
    ):
        mesh.http.headers["authorization"] = f"Bearer {key}"
        async with mesh.worker(RecordingEngine(obeying)):
            await sent(mesh, 5)
            counted = await samples(mesh, "")
            requests = {
                name: value
                for name, value in counted.items()
                if any(part in name for part in ("request", "token", "failures", "disconnect"))
                and not name.startswith(("canary_", "model_"))
            }
            assert requests, "there are metrics of requests"
            assert {name: value for name, value in requests.items() if value} == {}
            assert mesh.frontend.gateway.open_requests == 0
            response = await mesh.complete(max_tokens=2)
            assert response.status_code == 200
            assert response.headers["x-ratelimit-remaining-tokens"] == "55", "3 + 2 of 60"
    assert len(audit.read_text().splitlines()) == 1
    assert len(trace.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("fault", "part"),
    [("raise", "the engine failed"), ("swallow", "sent no complete response within 2 s")],
)
async def test_a_failing_engine_fails_its_canaries_until_it_is_well(fault: str, part: str) -> None:
    engine = gray_engine()
    async with (
        local_mesh(canary_interval_s=INTERVAL_S, canary_timeout_s=2.0) as mesh,
        mesh.router(),
        mesh.worker(engine) as worker,
    ):
        model = worker._instance().model
        await has_status(mesh, "ok", model)
        engine.fault = fault
        result = await has_status(mesh, "failing", model, part)
        assert result["stage"] == "token"
        found = await samples(mesh)
        assert found[f"canary_success {model}"] == 0
        assert found[f"canary_failures_total {model} token"] >= 1
        ready = await mesh.http.get("/ready")
        assert ready.status_code == 200, "a load balancer keeps the frontend"
        assert any(f"model {model}: its canary fails" in r for r in ready.json()["degraded"])
        engine.fault = ""
        await has_status(mesh, "ok", model)

        async def is_success() -> bool:
            return (await samples(mesh))[f"canary_success {model}"] == 1

        await until(is_success, "the metric has the success")


async def test_a_failure_that_another_worker_answers_is_no_failure_of_the_model() -> None:
    async def failing(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if request.token_ids:
            raise InternalError("a defect of one engine")
        yield chunk.length()

    bad = RecordingEngine(failing)
    async with (
        local_mesh(canary_interval_s=INTERVAL_S) as mesh,
        mesh.router(),
        mesh.worker(RecordingEngine(obeying)),
        mesh.worker(bad),
    ):
        await until(lambda: len(bad.requests) >= 2, "canaries reach the worker that fails")
        await sent(mesh, 5)
        assert not [n for n in await samples(mesh) if n.startswith("canary_failures_total")]


async def test_no_canary_is_sent_while_requests_of_clients_succeed() -> None:
    engine = RecordingEngine(obeying)
    async with (
        local_mesh(canary_interval_s=2.0) as mesh,
        mesh.router(),
        mesh.worker(engine),
    ):
        assert (await mesh.complete(max_tokens=2)).status_code == 200
        await has_status(mesh, "ok")
        before, began_at = len(engine.requests), time.monotonic()
        clients = 0
        # Longer than an interval, of at most 2.5 s. Ends: at a time.
        while time.monotonic() < began_at + 3.5:
            assert (await mesh.complete(max_tokens=2)).status_code == 200
            clients += 1
            # Sleep: the pace of the clients, well above that of canaries.
            await asyncio.sleep(0.02)
        assert len(engine.requests) - before == clients
        age_s = (await canary(mesh))["age_s"]
        assert age_s < time.monotonic() - began_at, "requests of clients count as canaries"


async def test_streams_of_a_full_model_are_successes_before_they_end() -> None:
    async def full(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if (request.stop_conditions.max_tokens or 0) > 1:
            yield chunk.token(300)
        await asyncio.Event().wait()

    async with (
        local_mesh(canary_interval_s=INTERVAL_S, canary_timeout_s=1.0) as mesh,
        mesh.router(),
        mesh.worker(RecordingEngine(full)),
    ):
        streams = []
        for _ in range(60):
            streams.append(asyncio.create_task(mesh.complete(stream=True, max_tokens=9)))
            # Sleep: the pace of the clients, for three times the limit of canaries.
            await asyncio.sleep(0.05)
        assert (await canary(mesh))["status"] == "ok"
        assert not [n for n in await samples(mesh) if n.startswith("canary_failures_total")]
        for stream in streams:
            stream.cancel()


async def test_a_model_that_lacks_a_role_fails_without_a_request() -> None:
    config = WorkerConfig(registry="memory", speedup=0.0, canary_idle_s=0.0, role="prefill")
    async with local_mesh(canary_interval_s=INTERVAL_S) as mesh, mesh.router():
        worker = WorkerApp(config, registry=mesh.connect())
        async with living(worker):
            result = await has_status(mesh, "failing", worker._instance().model)
            assert (result["stage"], result["reason"]) == ("route", "no decode worker")
            assert worker.runner.counters["accepted"] == 0


@pytest.mark.parametrize("kind", ["embedding", "score"])
async def test_a_model_that_generates_nothing_is_tested_by_its_kind(kind: str) -> None:
    engine = gray_engine()
    async with (
        local_mesh(canary_interval_s=INTERVAL_S) as mesh,
        mesh.router(),
        mesh.worker(engine, serve=(kind,)) as worker,
    ):
        model = worker._instance().model
        await has_status(mesh, "ok", model)
        engine.fault = "raise"
        assert (await has_status(mesh, "failing", model))["stage"] == "token"


async def test_a_pass_through_model_is_tested_by_a_body() -> None:
    async with (
        local_mesh(canary_interval_s=INTERVAL_S) as mesh,
        mesh.router(),
        mesh.echo() as app,
    ):
        for kind in ("Chat", "Completion"):
            async with mesh.joined(pass_through(app, kind.lower(), kind)):
                await has_status(mesh, "ok", kind.lower())


async def test_a_model_that_left_has_no_result() -> None:
    async with local_mesh(canary_interval_s=INTERVAL_S) as mesh, mesh.router():
        async with mesh.worker(RecordingEngine(obeying)):
            await has_status(mesh, "ok")
        await mesh.no_longer_serves("m")
        assert await canary(mesh) is None
        assert "canary_success m" not in await samples(mesh)


async def test_a_configured_model_that_is_not_served_has_no_success() -> None:
    async with (
        local_mesh(canary_interval_s=INTERVAL_S, configured_models=("m", "absent")) as mesh,
        mesh.router(),
    ):
        gone: Json = {"canary_success m": 0, "canary_success absent": 0}
        assert await samples(mesh) == gone
        async with mesh.worker(RecordingEngine(obeying)):
            await has_status(mesh, "ok")
            found = await samples(mesh)
            assert (found["canary_success m"], found["canary_success absent"]) == (1, 0)
        await mesh.no_longer_serves("m")
        found = await samples(mesh)
        assert {name: found[name] for name in gone} == gone
        assert "canary_age_seconds m" not in found
        async with mesh.joined(registration(9)):

            async def is_refused() -> bool:
                return "no card" in (await mesh.health())["models_not_ready"]["m"]

            await until(is_refused, "the card of a worker is refused")
            assert (await samples(mesh))["canary_success m"] == 0


async def test_an_interval_of_0_sends_no_canary() -> None:
    engine = RecordingEngine(obeying)
    async with local_mesh(canary_interval_s=0.0) as mesh, mesh.router(), mesh.worker(engine):
        # Sleep: proves that nothing happens.
        await asyncio.sleep(1.0)
        assert engine.requests == []
        assert (await mesh.health())["canaries"] == {}

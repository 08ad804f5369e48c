"""Hints in the bodies of HTTP requests, and what frontend, router and workers make of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.rpc import channel as rpc
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from router_svc.app import RouterApp
from tests.kit.engines import RecordingEngine
from tests.kit.local_mesh import LocalMesh, local_mesh
from tests.kit.waiting import WAIT_S, until
from worker_svc.engines.contract import (
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
)

# A prompt of this many tokens is much load until its first output.
LONG_PROMPT = [1] * 2000


class Paced:
    """A script: `tokens` tokens, then the end once `released` is set."""

    def __init__(self, tokens: int, *, is_released: bool = False) -> None:
        self.tokens = tokens
        self.released = asyncio.Event()
        if is_released:
            self.released.set()

    async def __call__(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if self.tokens:
            yield LLMEngineOutput(token_ids=[300] * self.tokens)
        await self.released.wait()
        yield chunk.length()


async def bookings(router: RouterApp) -> list[router_pb2.Booking]:
    async with rpc.channel(router.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        dump = await rpc.unary(stub.Dump, router_pb2.DumpRequest(), timeout_s=WAIT_S)
    assert isinstance(dump, router_pb2.DumpResponse)
    return list(dump.bookings)


# Any, here and below: fields of the body.
async def placed_on(mesh: LocalMesh, prompt: list[int] | None = None, **nvext: Any) -> int:
    """The worker that served a request."""
    extension = {"extra_fields": ["worker_id"], **nvext}
    response = await mesh.complete(prompt=prompt or [5, 6, 7], nvext=extension)
    assert response.status_code == 200, response.text
    return int(response.json()["nvext"]["worker_id"]["decode_worker_id"])


@pytest.mark.row("S2-10", "S1-83")
async def test_the_expected_output_of_a_body_decides_how_its_booking_decays() -> None:
    script = Paced(40)
    async with (
        local_mesh() as mesh,
        mesh.router(track_output_blocks=True) as router,
        mesh.worker(RecordingEngine(script)),
    ):
        for osl, decay in ((None, None), (80, 0.5)):
            script.released.clear()
            nvext = {"agent_hints": {} if osl is None else {"osl": osl}}
            call = asyncio.create_task(mesh.complete(nvext=nvext))

            async def has_output_blocks() -> bool:
                return any(booking.decode_blocks > 1 for booking in await bookings(router))

            await until(has_output_blocks, "the router has the blocks of the output")
            (booking,) = await bookings(router)
            # 3 tokens of prompt and 40 of output fill more than two blocks of 16.
            assert booking.decode_blocks == 3
            assert booking.HasField("decay_fraction") == (decay is not None)
            assert booking.decay_fraction == pytest.approx(decay or 0.0)
            script.released.set()
            assert (await call).status_code == 200


@pytest.mark.row("S1-81")
async def test_a_frontend_reports_the_end_of_prefill_at_the_first_token() -> None:
    script = Paced(0)
    async with (
        local_mesh() as mesh,
        mesh.router() as router,
        mesh.worker(RecordingEngine(script)),
    ):
        call = asyncio.create_task(mesh.complete(prompt=LONG_PROMPT))

        async def is_booked() -> bool:
            return bool(await bookings(router))

        await until(is_booked, "the request is booked")
        assert [one.prefill_tokens for one in await bookings(router)] == [len(LONG_PROMPT)]
        script.released.set()
        assert (await call).status_code == 200
        script.tokens = 1
        script.released.clear()
        call = asyncio.create_task(mesh.complete(prompt=LONG_PROMPT))

        async def is_prefill_done() -> bool:
            return [one.prefill_tokens for one in await bookings(router)] == [0]

        await until(is_prefill_done, "the booking has no tokens to compute")
        script.released.set()
        assert (await call).status_code == 200


@pytest.mark.row("S2-15", "S2-88")
async def test_taints_of_a_body_are_required_or_preferred() -> None:
    async with (
        local_mesh() as mesh,
        mesh.router(selector="least_loaded"),
        mesh.worker(RecordingEngine()) as plain,
        mesh.worker(RecordingEngine(), taints=("fast", "new")) as tainted,
    ):
        for constraints, app in (
            ({"required_taints": ["fast", "new"]}, tainted),
            ({"preferred_taints": {"fast": 10.0}}, tainted),
            ({"preferred_taints": {"fast": -10.0}}, plain),
        ):
            found = {await placed_on(mesh, routing_constraints=constraints) for _ in range(6)}
            assert found == {app.instance_id}, constraints


@pytest.mark.row("S2-16", "S2-89")
async def test_a_session_moves_when_it_is_opened_again_and_ends_when_it_is_closed() -> None:
    scripts = [Paced(2, is_released=True) for _ in range(2)]
    both = [RecordingEngine(script) for script in scripts]
    async with (
        local_mesh() as mesh,
        mesh.router(session_affinity_ttl_s=300.0),
        mesh.worker(both[0]) as one,
        mesh.worker(both[1]) as other,
    ):
        ids = one.instance_id, other.instance_id
        script_of = dict(zip(ids, scripts, strict=True))
        engines = dict(zip(ids, both, strict=True))

        async def in_session(**action: str) -> int:
            return await placed_on(mesh, session_control={"session_id": "s", **action})

        async def load(worker_id: int) -> asyncio.Task[Any]:
            """Gives a worker a prompt that it does not compute."""
            script, requests = script_of[worker_id], engines[worker_id].requests
            script.tokens = 0
            script.released.clear()
            nvext = {"backend_instance_id": worker_id}
            count = len(requests)
            call = asyncio.create_task(mesh.complete(prompt=LONG_PROMPT, nvext=nvext))
            await until(lambda: len(requests) > count, "the engine has the prompt")
            # Later requests have an output at once.
            script.tokens = 2
            return call

        home = await in_session()
        (away,) = script_of.keys() - {home}
        # Others leave a busy worker; the session does so when it is opened again.
        busy = await load(home)
        assert await placed_on(mesh) == away
        script_of[home].released.set()
        assert (await busy).status_code == 200
        assert await in_session() == home
        busy = await load(home)
        assert await in_session(action="open") == away
        script_of[home].released.set()
        assert (await busy).status_code == 200
        assert await in_session() == away
        # Once closed, it has no worker.
        assert await in_session(action="close") == away
        busy = await load(away)
        assert await in_session() == home
        script_of[away].released.set()
        assert (await busy).status_code == 200


@pytest.mark.row("S3-40")
async def test_tokens_that_arrive_together_share_the_time_between_them() -> None:
    async def script(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        yield chunk.token(300)
        # Sleep: the pace of the engine.
        await asyncio.sleep(0.2)
        yield LLMEngineOutput(token_ids=[300] * 10)
        yield chunk.length()

    async with local_mesh() as mesh, mesh.router(), mesh.worker(RecordingEngine(script)):
        assert (await mesh.complete(stream=True)).status_code == 200
        families = text_string_to_metric_families(await mesh.scrape())
    values = {one.name: one.value for family in families for one in family.samples
              if one.labels.get("model") == "m" and "le" not in one.labels}  # fmt: skip
    prefix = "kvmesh_frontend"
    assert values[f"{prefix}_inter_token_latency_seconds_count"] == 10
    gaps_s = values[f"{prefix}_inter_token_latency_seconds_sum"]
    assert 0.1 < gaps_s < values[f"{prefix}_request_duration_seconds_sum"]

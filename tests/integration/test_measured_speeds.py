"""The latencies of a worker, measured through the HTTP API of a running mesh."""

from __future__ import annotations

import json
import time

import pytest

from common.inspection.gateway import GatewayError
from meshctl.view import latencies
from meshctl.view.latencies import LatencyProbe
from meshctl.view.trace_player import PlayedRequest, play, prompt_of
from tests.kit.local_mesh import local_mesh
from worker_svc.engines.sim.config import SimConfig
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.timing import Timing


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latencies, "PROMPT_TOKENS", (16, 64))
    monkeypatch.setattr(latencies, "PROMPT_REPEATS", 2)
    monkeypatch.setattr(latencies, "AT_ONCE", (1, 3))
    monkeypatch.setattr(latencies, "DECODE_TOKENS", 8)
    monkeypatch.setattr(latencies, "CACHED_TOKENS", 128)
    monkeypatch.setattr(latencies, "CACHED_AT_ONCE", (2,))
    monkeypatch.setattr(latencies, "BESIDE_PROMPTS", (32,))
    monkeypatch.setattr(latencies, "CHUNKED_TOKENS", (10_000_000, 256))


async def test_all_latencies_are_those_of_one_worker() -> None:
    paced = SimConfig(timing=Timing(0.002, 1e-5, 0.0, 0.0))
    async with (
        local_mesh() as mesh,
        mesh.router(),
        mesh.worker(SimEngine(paced)) as one,
        mesh.worker(SimEngine(paced)) as other,
    ):
        model = one._instance().model
        probe = LatencyProbe(mesh.http, str(mesh.http.base_url).rstrip("/"), model)
        found = await probe.measure()
        pinned = probe._pins["backend_instance_id"]
        assert pinned in {str(one.instance_id), str(other.instance_id)}
    assert [size for size, _ in found.prompts] == [16, 64]
    assert [(size, tokens) for size, tokens, _ in found.decodes] == [(1, 20), (3, 20), (2, 132)]
    assert all(seconds > 0 for *_, seconds in (*found.prompts, *found.decodes))
    assert json.loads(json.dumps(found.to_json()))["prompts"][0][0] == 16
    # The model accepts no longer prompt.
    assert [size for size, _ in found.pauses] == [32, 256]


async def test_a_model_that_is_not_served_has_no_speed() -> None:
    async with local_mesh() as mesh:
        probe = LatencyProbe(mesh.http, str(mesh.http.base_url).rstrip("/"), "absent")
        with pytest.raises(GatewayError, match="status 404"):
            await probe.measure()


async def test_the_pause_of_a_stream_beside_a_prompt_is_that_of_a_step() -> None:
    """A step of 64 prompt tokens takes 0.13 s, the whole prompt 0.51 s."""
    timing = Timing(0.002, 0.002, 0.0, 0.0)
    slow = SimConfig(timing=timing, max_num_seqs=8, max_num_batched_tokens=64)
    async with local_mesh() as mesh, mesh.router(), mesh.worker(SimEngine(slow)) as worker:
        probe = LatencyProbe(
            mesh.http, str(mesh.http.base_url).rstrip("/"), worker._instance().model
        )
        (_, (tokens, pause_s)) = await probe._pauses(None)
    assert tokens == 256
    assert 0.1 < pause_s < 0.4


async def test_requests_of_a_trace_are_played_at_their_times_and_share_blocks() -> None:
    async with local_mesh() as mesh, mesh.router(), mesh.worker() as worker:
        model, url = worker._instance().model, str(mesh.http.base_url).rstrip("/")
        requests = [PlayedRequest(n * 0.1, 80, 4, (1, 2)) for n in range(3)]
        began = time.perf_counter()
        played = await play(mesh.http, url, model, requests, 32)
        assert time.perf_counter() - began >= 0.2
        absent = await play(mesh.http, url, "absent", requests[:1], 32)
    assert [course.tokens for course in played.courses if course is not None] == [4, 4, 4]
    assert played.error == ""
    assert absent.courses == [None]
    assert "status 404" in absent.error
    one, other = (prompt_of(requests[0], number, 32) for number in (0, 1))
    assert one[:64] == other[:64]
    assert one[64:] != other[64:]
    assert len(one) == 80

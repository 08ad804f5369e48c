"""The latencies of a worker, measured through the HTTP API of a running mesh."""

from __future__ import annotations

import json

import pytest

from common.inspection.gateway import GatewayError
from meshctl.view import latencies
from meshctl.view.latencies import LatencyProbe
from tests.kit.local_mesh import local_mesh


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latencies, "PROMPT_TOKENS", (16, 64))
    monkeypatch.setattr(latencies, "PROMPT_REPEATS", 2)
    monkeypatch.setattr(latencies, "AT_ONCE", (1, 3))
    monkeypatch.setattr(latencies, "DECODE_TOKENS", 8)


async def test_all_latencies_are_those_of_one_worker() -> None:
    async with local_mesh() as mesh, mesh.router(), mesh.worker() as one, mesh.worker() as other:
        model = one._instance().model
        probe = LatencyProbe(mesh.http, str(mesh.http.base_url).rstrip("/"), model)
        found = await probe.measure()
        pinned = probe._pins["backend_instance_id"]
        assert pinned in {str(one.instance_id), str(other.instance_id)}
    assert [size for size, _ in found.prompts] == [16, 64]
    assert [size for size, _ in found.decodes] == [1, 3]
    assert all(seconds > 0 for _, seconds in (*found.prompts, *found.decodes))
    assert json.loads(found.to_json())["prompts"][0][0] == 16


async def test_a_model_that_is_not_served_has_no_speed() -> None:
    async with local_mesh() as mesh:
        probe = LatencyProbe(mesh.http, str(mesh.http.base_url).rstrip("/"), "absent")
        with pytest.raises(GatewayError, match="status 404"):
            await probe.measure()

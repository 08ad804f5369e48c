"""An engine that supplies the request of a probe gets it from its worker and from frontends."""

from __future__ import annotations

import pytest

from common.request.preprocessed import TokenIds
from frontend_svc.workers.breaker import Cause
from tests.kit.engines import RecordingEngine
from tests.kit.local_mesh import local_mesh
from tests.kit.waiting import until
from worker_svc.engines.contract import PreprocessedRequest, StopConditions

PROBE = [41, 42, 43]


class Probed(RecordingEngine):
    def probe_request(self) -> PreprocessedRequest:
        stop = StopConditions(max_tokens=2, ignore_eos=True)
        return PreprocessedRequest(token_ids=TokenIds.of(PROBE), stop_conditions=stop)


@pytest.mark.slow
async def test_the_probe_of_a_frontend_is_the_engines_own() -> None:
    engine = Probed()
    async with local_mesh() as mesh, mesh.worker(engine) as worker:
        assert (await mesh.complete(max_tokens=2)).status_code == 200
        client = mesh.frontend._engines
        client.failed(worker.instance_id, "it failed requests", Cause.FAILING)
        await until(lambda: not client.exclusion_reasons(), "a probe closes the circuit")
    (probe,) = [request for request in engine.requests if request.is_probe]
    assert probe.token_ids.tolist() == PROBE
    assert probe.stop_conditions.max_tokens == 2

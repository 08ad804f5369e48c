"""A worker whose engine loses requests while it works: clients receive the exact response."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.client import Reply, fetch
from tests.kit.gray_engine import FACTORY
from tests.kit.oracle import Oracle
from tests.kit.processes import Mesh
from tests.kit.waiting import wait_for

pytestmark = pytest.mark.slow

REQUESTS = 12
TOKENS = 60
# A loss is noticed within 10 s; the rest is for a busy machine.
ANSWERED_S = 20.0


@pytest.mark.parametrize("fault", ["lose 2", "stall 2"])
def test_requests_that_an_engine_loses_go_to_another_worker(fault: str, tmp_path: Path) -> None:
    file = tmp_path / "fault"
    with Mesh(tmp_path, workers=1, worker_flags=[f"--engine={FACTORY}"]) as mesh:
        bad = mesh.spawn("worker", f"--engine-args={file}").wait_ready()
        wait_for(mesh.is_complete, "the frontend uses both workers")
        replies = [Reply(f"Request {number}", TOKENS) for number in range(REQUESTS)]

        async def send() -> None:
            await asyncio.gather(*(fetch(mesh.url, Reply("Warm up", 8)) for _ in range(4)))
            file.write_text(fault)
            await asyncio.gather(*(fetch(mesh.url, reply) for reply in replies))

        asyncio.run(send())
        counters = bad.counters()
        assert counters["stalled"] > 0, counters
        oracle = Oracle()
        for reply in replies:
            expected = oracle.completion(reply.prompt, TOKENS, ignore_eos=True)
            assert (reply.error, reply.text) == ("", expected.text)
            assert reply.ended_at - reply.begun_at < ANSWERED_S
        events = bad.events("request_stalled")
        assert len(events) == counters["stalled"]

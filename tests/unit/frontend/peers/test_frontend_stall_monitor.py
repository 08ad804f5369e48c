"""The stall monitor: its own address, and a server that never replies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc_health.v1 import health_pb2_grpc

from common.rpc import channel as rpc
from frontend_svc.config import FrontendConfig
from frontend_svc.core.peers.stall_clock import StallClock
from frontend_svc.peers import stall_monitor
from frontend_svc.peers.stall_monitor import (
    PROBE_TIMEOUT_S,
    own_address,
    own_security_of,
    run_stall_monitor,
)
from tests.sim.loop import run_virtually


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "127.0.0.1:7"),
        ("::", "[::1]:7"),
        ("[::]", "[::1]:7"),
        ("10.0.0.5", "10.0.0.5:7"),
        ("fd00::5", "[fd00::5]:7"),
        ("localhost", "localhost:7"),
    ],
)
def test_a_process_dials_its_bound_address_not_the_advertised_one(host: str, address: str) -> None:
    config = FrontendConfig(
        registry="memory", host=host, advertise_host="203.0.113.1", mesh_token="t", insecure=True
    )
    assert own_address(config, 7) == address


@pytest.mark.parametrize(
    ("configured", "expected"), [("mesh.example", "mesh.example"), (None, "frontend.example")]
)
def test_the_own_server_name_is_the_configured_or_the_advertised_one(
    configured: str | None, expected: str
) -> None:
    config = FrontendConfig(registry="memory", advertise_host="frontend.example")
    own = own_security_of(config, rpc.Security(token="t", server_name=configured))
    assert (own.server_name, own.token) == (expected, "t")


class _Channel:
    async def close(self) -> None:
        pass


@pytest.mark.parametrize("replies", [0, 5], ids=["from the start", "after replies"])
def test_an_own_address_that_never_replies_counts_as_one_stall_at_most(
    monkeypatch: pytest.MonkeyPatch, replies: int
) -> None:
    calls: list[float] = []

    async def never_reply(stub: Any) -> bool:
        calls.append(asyncio.get_running_loop().time())
        if len(calls) <= replies:
            return True
        await asyncio.sleep(PROBE_TIMEOUT_S)
        return False

    monkeypatch.setattr(stall_monitor, "_is_reachable", never_reply)
    monkeypatch.setattr(rpc, "channel", lambda *_, **__: _Channel())
    monkeypatch.setattr(health_pb2_grpc, "HealthStub", lambda channel: None)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stall_clock, before = StallClock(loop.time()), 0.0
        task = loop.create_task(run_stall_monitor(stall_clock, "203.0.113.1:1", rpc.PLAINTEXT))
        for _ in range(1000):
            await asyncio.sleep(0.1)
            stalled_s = stall_clock.stalled_s(loop.time())
            assert before <= stalled_s <= (PROBE_TIMEOUT_S if replies else 0.0) + 1e-6
            before = stalled_s
        assert len(calls) > 5
        task.cancel()
        await asyncio.wait([task])

    run_virtually(main(), until=200.0)

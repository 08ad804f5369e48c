"""The administration of a worker with a scripted membership."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from common.errors import Unavailable
from common.kv.load import Load
from kvmesh.engine.v1 import admin_pb2
from tests.sim.loop import run_virtually
from worker_svc.engines.contract import LLMEngine
from worker_svc.serving.admin import AdminServicer
from worker_svc.serving.runner import Runner


class ScriptedMembership:
    """A membership whose removal takes a second. raises: it fails instead."""

    def __init__(self, *, raises: Exception | None = None) -> None:
        self.is_registered = True
        self.raises = raises

    async def deregister(self) -> None:
        await asyncio.sleep(1.0)
        if self.raises is not None:
            raise self.raises
        self.is_registered = False

    async def left(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    async def rejoin(self) -> None:
        self.is_registered = True


class IdleEngine:
    """An engine without work."""

    def loads(self) -> tuple[Load, ...]:
        return ()


async def drain(membership: ScriptedMembership, runner: Runner) -> admin_pb2.DrainResponse:
    servicer = AdminServicer(
        runner, membership, "scripted", adapters=None, lock=asyncio.Lock(), notice_s=5.0
    )
    return await servicer.Drain(admin_pb2.DrainRequest(timeout_ms=1), cast(Any, None))


def test_a_drain_takes_place_even_if_its_time_to_wait_ends_before_the_registry_answers() -> None:
    runner, membership = Runner(cast(LLMEngine, IdleEngine())), ScriptedMembership()
    response = run_virtually(drain(membership, runner))
    assert (response.running, response.transfers) == (0, 0)
    assert runner.is_draining
    assert not membership.is_registered


def test_a_worker_that_stays_in_the_registry_does_not_drain() -> None:
    runner = Runner(cast(LLMEngine, IdleEngine()))
    membership = ScriptedMembership(raises=Unavailable("no registry"))
    with pytest.raises(Unavailable):
        run_virtually(drain(membership, runner))
    assert not runner.is_draining

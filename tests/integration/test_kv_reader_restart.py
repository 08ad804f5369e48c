"""An engine that restarts while its batches wait in the reader: what the indexer then claims.

The engine is a process of its own. The test blocks the loop of worker and indexer while it kills
the engine and starts the next one, so that batches wait in the reader's socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

pytest.importorskip("zmq", reason="needs pyzmq, which `make setup` installs")
pytest.importorskip("msgspec", reason="needs msgspec, which `make setup` installs")

from common.runtime.free_ports import free_ports
from tests.integration.engine_process import EngineProcess
from tests.integration.engine_wire import BLOCK, WiredMesh, names_of, partition_of, wired_mesh
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import WorkerApp
from worker_svc.kv_events.zmq_reader import KvEventEndpoints

# Time from the moment the loop runs again until the indexer's claims are right.
RECOVERY_S = 2.0
# First block of the second and of the third engine.
SECOND, THIRD = 10_000, 20_000


class ProcessWire:
    """The events of an engine process, for a worker."""

    rank = 0

    def __init__(self, *, has_replay: bool) -> None:
        port = free_ports(2)
        self.endpoints = KvEventEndpoints(port, port + 1 if has_replay else None)
        self.engine = EngineProcess(port, self.endpoints.replay_port)

    async def serve(self) -> None:
        """The process serves replays itself."""

    def close(self) -> None:
        self.engine.kill()


@dataclass
class Bed:
    """A worker whose indexer has all blocks of the first engine, which `accepted` batches stored.

    engine: its process.
    """

    mesh: WiredMesh
    app: WorkerApp
    engine: EngineProcess

    def claimed(self) -> set[int]:
        """The blocks that the indexer claims for the worker."""
        return self.mesh.published(self.app)

    def names(self, numbers: Iterable[int]) -> set[int]:
        """The names of these blocks."""
        partition = partition_of(self.app)
        return {int(names_of(partition, [one] * BLOCK)[0]) for one in numbers}

    async def subscribed(self) -> None:
        """Waits until the engine has a subscription, while the loop runs."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.to_thread(self.engine.run, "subscribed")

    async def claims_exactly(self, numbers: Iterable[int]) -> None:
        """Waits until the indexer claims these blocks and no others, as exact."""
        held = self.names(numbers)
        await until(
            lambda: self.claimed() == held and self.mesh.state(self.app) == "exact",
            "the indexer claims what the engine holds",
            RECOVERY_S,
        )
        assert await self.mesh.verified(self.app) == len(held)


@asynccontextmanager
async def read(accepted: int, *, has_replay: bool) -> AsyncIterator[Bed]:
    """A worker that has read this number of batches of its engine."""
    wire = ProcessWire(has_replay=has_replay)
    async with wired_mesh() as mesh, mesh.worker(1, wire) as app:
        bed = Bed(mesh, app, wire.engine)
        await bed.subscribed()
        bed.engine.run("publish", 0, accepted)
        held = bed.names(range(accepted))
        await until(lambda: bed.claimed() == held, "the first batches are read")
        yield bed


@pytest.mark.slow
@pytest.mark.parametrize("has_replay", [True, False], ids=["replay", "no-replay"])
@pytest.mark.parametrize("accepted", [0, 40])
@pytest.mark.parametrize("waiting", [60, 600])
@pytest.mark.parametrize("stored", [60, 130])
async def test_batches_of_a_dead_engine_that_wait_are_discarded(
    has_replay: bool, accepted: int, waiting: int, stored: int
) -> None:
    async with read(accepted, has_replay=has_replay) as bed:
        bed.engine.run("publish", accepted, waiting)
        bed.engine.run("flush")
        bed.engine.kill()
        bed.engine.start()
        await bed.subscribed()
        bed.engine.run("publish", SECOND, stored)
        await bed.claims_exactly(range(SECOND, SECOND + stored))


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("waiting", [60, 600])
async def test_batches_that_a_reader_could_not_receive_in_a_pause_are_replayed(
    restarts: int, waiting: int
) -> None:
    async with read(40, has_replay=True) as bed:
        for first in (SECOND, THIRD)[:restarts]:
            bed.engine.run("publish", first - 5000, waiting)
            bed.engine.run("flush")
            bed.engine.kill()
            bed.engine.start()
            bed.engine.run("publish", first, 130)
        await bed.claims_exactly(range(first, first + 130))


@pytest.mark.slow
@pytest.mark.parametrize("missed", [5, 100, 150], ids=["below", "next", "above"])
async def test_without_replay_an_engine_that_is_read_from_the_middle_on_is_degraded(
    missed: int,
) -> None:
    """missed: number of the first batch received; the dead engine would have continued at 100."""
    async with read(40, has_replay=False) as bed:
        bed.engine.run("publish", 40, 60)
        bed.engine.run("flush")
        bed.engine.kill()
        bed.engine.start()
        bed.engine.run("publish", SECOND, missed)
        await bed.subscribed()
        bed.engine.run("publish", THIRD, 10)
        held = bed.names(range(THIRD, THIRD + 10))
        await until(lambda: bed.claimed() == held, "only known blocks are claimed", RECOVERY_S)
        await until(lambda: bed.mesh.state(bed.app) == "degraded", "others are missing", RECOVERY_S)

"""The watch task: every snapshot reaches the router, and no registry error ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any, cast

import pytest

from common.errors import Unavailable
from common.registry import registry as registry_module
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.registry.registry import OnSnapshot, Registry
from common.request.placement import Query
from router_svc.core.router import Router
from router_svc.core.selectors import RoundRobinSelector
from router_svc.fleet_watch import FleetWatch


def seen(revision: int, *worker_ids: int) -> Snapshot:
    workers = [Instance(n, "mesh", "worker", "", "127.0.0.1:1", model="m") for n in worker_ids]
    return Snapshot(revision, {w.id: w for w in workers})


class FlakyRegistry:
    """Each watch returns one script of snapshots; then it fails, or (the last one) waits."""

    def __init__(self, *scripts: list[Snapshot | Exception]) -> None:
        self.scripts = list(scripts)
        self.opened = 0

    @asynccontextmanager
    async def watch(self, namespace: str) -> AsyncGenerator[Any, None]:
        assert namespace == "mesh"
        self.opened += 1
        steps = self.scripts.pop(0)
        first = steps.pop(0)
        if isinstance(first, Exception):
            raise first
        yield _Script(first, steps)


class _Script:
    def __init__(self, current: Snapshot, steps: list[Snapshot | Exception]) -> None:
        self.current = current
        self._steps = steps

    async def next(self) -> Snapshot:
        if not self._steps:
            await asyncio.Event().wait()
        step = self._steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step


async def workers_after(
    registry: FlakyRegistry, until: Callable[[Router], bool], *followers: OnSnapshot
) -> Router:
    router = Router(RoundRobinSelector())
    watch = FleetWatch(cast("Registry", registry), "mesh", router, lambda: 0.0, followers)
    task = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(20):
            while not (watch.first_snapshot.is_set() and until(router)):
                assert not task.done()
                await asyncio.sleep(0)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return router


def ids(router: Router) -> list[int]:
    return [c.placement.worker_id for c in router.fleet.all_candidates()]


@pytest.mark.row("S1-39")
async def test_every_snapshot_reaches_the_router() -> None:
    registry = FlakyRegistry([seen(1, 1), seen(2, 1, 2), seen(3, 2)])
    router = await workers_after(registry, lambda r: ids(r) == [2])
    assert router.fleet.has_snapshot


@pytest.mark.row("S1-39")
async def test_a_failing_registry_is_watched_again_and_the_fleet_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "WATCH_RETRY_DELAY_S", 0.001)
    registry = FlakyRegistry(
        [Unavailable("lost")],
        [seen(1, 1), OSError("lost as well")],
        [Snapshot(), RuntimeError("a bug in a registry adapter")],
        [seen(1, 1, 2)],
    )
    fleets = []

    def both_are_there(router: Router) -> bool:
        fleets.append(ids(router))
        return fleets[-1] == [1, 2]

    await workers_after(registry, both_are_there)
    assert registry.opened == 4
    assert [] not in fleets, "a watch without first report removes no worker"


async def test_a_follower_that_fails_receives_the_change_with_the_next_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "WATCH_RETRY_DELAY_S", 0.001)
    received: list[list[int]] = []

    def take(_: Snapshot, changes: SnapshotDiff) -> None:
        received.append([instance.id for instance in changes.joined])
        if len(received) == 1:
            raise RuntimeError("a bug in a follower")

    registry = FlakyRegistry([seen(1, 1)], [seen(2, 1, 2), seen(3, 1, 2, 3)])
    await workers_after(registry, lambda router: ids(router) == [1, 2, 3], take)
    assert received == [[1], [1, 2], [3]]


async def test_an_empty_namespace_counts_as_a_snapshot() -> None:
    router = await workers_after(FlakyRegistry([Snapshot(1)]), lambda r: True)
    assert router.fleet.has_snapshot
    assert ids(router) == []


@pytest.mark.parametrize("later", [[], [seen(1, 1)]], ids=["for good", "at first"])
async def test_a_registry_without_first_report_gives_no_fleet(later: list[Snapshot]) -> None:
    router = Router(RoundRobinSelector())
    registry = FlakyRegistry([Snapshot(), *later])
    watch = FleetWatch(cast("Registry", registry), "mesh", router, lambda: 0.0)
    task = asyncio.create_task(watch.run())
    for _ in range(10):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert registry.opened == 1, "the registry was opened"
    assert watch.first_snapshot.is_set() == router.fleet.has_snapshot == bool(later)
    if not later:
        with pytest.raises(Unavailable) as refused:
            router.decide(Query("m", 100), None, 0.0, Random(0))
        assert refused.value.reason == "FLEET_UNKNOWN"

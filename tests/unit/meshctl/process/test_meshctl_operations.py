"""Rolling restarts, drains and starts of members, with fake processes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from common.errors import Conflict, InvalidRequest
from common.runtime.tasks import TaskGroup
from meshctl.commands.control_handler import ControlHandler
from meshctl.process.control import ControlRequest
from meshctl.process.operations import Operations, Outcome
from meshctl.process.routable import Waiting
from meshctl.process.supervise import Child, State, Supervisor
from meshctl.services import ServiceSpec
from meshctl.view.screen import Screen
from tests.kit.supervised import FakeProcess, World, becomes_ready, dead, running, silent, spec
from tests.kit.waiting import until


@dataclass
class Bed:
    """A running mesh with its operations.

    missing: why a member is not routable, by its pid. closed: members whose port was closed.
    """

    world: World
    supervisor: Supervisor
    operations: Operations
    reports: list[tuple[str, str]] = field(default_factory=list)
    rotated: list[str] = field(default_factory=list)
    missing: dict[int, str] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)

    def report(self, name: str, state: str, _detail: str) -> None:
        self.reports.append((name, state))

    async def restart(self, *names: str, new_first: bool | None = None) -> Outcome:
        steps = self.operations.plan(names, new_first)
        return await self.operations.restart(steps, self.report, lambda: False, new_first)

    def states(self) -> list[State]:
        return [child.state for child in self.supervisor.children]

    def entries(self) -> list[str]:
        """What happened to the processes since the start."""
        return self.world.log.entries[len(self.supervisor.children) :]


def worker(name: str) -> ServiceSpec:
    args = ("--stable-name", f"host-{name}")
    return replace(spec(name), module="worker_svc", args=args, role="aggregated worker of m")


def scaled(counts: Mapping[str, int]) -> list[ServiceSpec]:
    return [worker(f"worker-{number}") for number in range(counts["worker"])]


@asynccontextmanager
async def bed(
    *names: str, born: Callable[[FakeProcess], None] = becomes_ready, routable_s: float = 20.0
) -> AsyncIterator[Bed]:
    world = World(born=born)
    specs = [worker(name) for name in names]
    async with running(world, *specs) as supervisor:
        rotated: list[str] = []
        restored: list[str] = []
        missing: dict[int, str] = {}
        closed: list[str] = []

        async def find_missing(child: Child) -> Waiting:
            return Waiting(missing.get(child.process.pid, "") if child.process else "")

        operations = Operations(
            supervisor,
            specs=lambda counts: scaled(counts) if counts else specs,
            counts=lambda counts: {"worker": len(specs), **counts},
            rotate_log=rotated.append,
            undo_start=lambda spec: restored.append(spec.name),
            last_log_line=lambda name: f"{name} loads weights",
            start_report_s=0.001,
            find_missing=find_missing,
            stop_listening=closed.append,
            environ={},
            routable_s=routable_s,
        )
        await supervisor.wait_all_ready()
        yield Bed(world, supervisor, operations, [], rotated, missing, closed, restored)


async def test_of_several_members_one_ends_before_the_next_one_starts() -> None:
    async with bed("worker-0", "worker-1") as mesh:
        outcome = await mesh.restart()
        assert mesh.entries() == [
            "TERM worker-0",
            "START worker-0",
            "TERM worker-1",
            "START worker-1",
        ]
        assert [item.name for item in outcome.replaced] == ["worker-0", "worker-1"]
        assert outcome.failed is None
        assert mesh.rotated == ["worker-0", "worker-1"]
        states = [(child.spec.name, child.state) for child in mesh.supervisor.children]
        assert states == [("worker-0", State.READY), ("worker-1", State.READY)]
    assert mesh.supervisor.is_clean


async def test_the_only_member_of_a_role_ends_after_its_successor_is_routable() -> None:
    async with bed("worker-0") as mesh:
        mesh.missing[101] = "frontend-0"
        restart = asyncio.ensure_future(mesh.restart())
        await until(lambda: len(mesh.world.processes) == 2, "the successor started")
        assert "TERM worker-0" not in mesh.world.log.entries
        mesh.missing.clear()
        outcome = await restart
        assert mesh.entries() == ["START worker-0", "TERM worker-0"]
        assert [item.new_first for item in outcome.replaced] == [True]
        states = [state for _, state in mesh.reports if state != "progress"]
        assert states == ["starting", "routable", "replaced"]
        assert [child.process is mesh.world.processes[1] for child in mesh.supervisor.children] == [
            True
        ]


async def test_a_successor_that_does_not_become_routable_ends_and_the_old_one_stays() -> None:
    async with bed("worker-0", routable_s=0.01) as mesh:
        mesh.missing[101] = "frontend-0 has no stream"
        outcome = await mesh.restart()
        reason = "not routable within 0.01 s: frontend-0 has no stream"
        assert outcome.failed == ("worker-0", reason)
        assert (mesh.rotated, mesh.restored) == (["worker-0"], ["worker-0"])
        (child,) = mesh.supervisor.children
        assert child.process is mesh.world.processes[0]
        assert child.state is State.READY


async def test_a_restart_stops_at_the_first_member_that_does_not_start() -> None:
    def born(process: FakeProcess) -> None:
        (becomes_ready if process.pid < 102 else dead)(process)

    async with bed("worker-0", "worker-1", born=born) as mesh:
        outcome = await mesh.restart()
        assert outcome.replaced == []
        assert outcome.failed is not None
        assert outcome.failed[0] == "worker-0"
        assert "exit status 1" in outcome.failed[1]
        assert "TERM worker-1" not in mesh.entries()
        # Its restarts are exhausted some time later, and the mesh goes on.
        await until(
            lambda: mesh.supervisor.children[0].state is State.FAILED, "its restarts are exhausted"
        )
        assert mesh.supervisor.children[1].state is State.READY


async def test_an_interrupted_restart_stops_after_the_present_member() -> None:
    async with bed("worker-0", "worker-1") as mesh:
        steps = mesh.operations.plan([], None)
        outcome = await mesh.operations.restart(
            steps, mesh.report, lambda: ("worker-0", "replaced") in mesh.reports
        )
        assert [item.name for item in outcome.replaced] == ["worker-0"]
        assert outcome.failed == ("worker-1", "the command was interrupted")


async def test_a_second_operation_is_refused_while_one_is_under_way() -> None:
    async with bed("worker-0") as mesh:
        mesh.missing[101] = "frontend-0"
        restart = asyncio.ensure_future(mesh.restart())
        await until(lambda: len(mesh.world.processes) == 2, "the successor started")
        with pytest.raises(Conflict, match="a restart of worker-0 is under way"):
            mesh.operations.plan([], None)
        mesh.missing.clear()
        await restart


async def test_a_member_that_has_become_the_only_live_one_is_replaced_new_first() -> None:
    def born(process: FakeProcess) -> None:
        (becomes_ready if process.pid in (100, 101, 103) else silent)(process)

    async with bed("worker-0", "worker-1", born=born) as mesh:
        steps = mesh.operations.plan(["worker-0"], None)
        assert [step.new_first for step in steps] == [False]
        mesh.world.processes[1].end(1)
        await until(lambda: mesh.states()[1] is State.STARTING, "worker-1 starts again")
        outcome = await mesh.operations.restart(steps, mesh.report, lambda: False)
        assert [item.new_first for item in outcome.replaced] == [True]
        assert mesh.entries() == ["START worker-1", "START worker-0", "TERM worker-0"]


async def test_a_restart_without_surge_stops_before_the_last_live_member() -> None:
    def born(process: FakeProcess) -> None:
        (becomes_ready if process.pid < 102 else silent)(process)

    async with bed("worker-0", "worker-1", born=born) as mesh:
        steps = mesh.operations.plan(["worker-0"], new_first=False)
        mesh.world.processes[1].end(1)
        await until(lambda: mesh.states()[1] is State.STARTING, "worker-1 starts again")
        outcome = await mesh.operations.restart(steps, mesh.report, lambda: False, False)
        assert outcome.failed is not None
        assert "worker-0 is the last live aggregated worker of m" in outcome.failed[1]
        assert mesh.entries() == ["START worker-1"]


async def test_of_two_operations_at_once_the_second_is_refused() -> None:
    async with bed("worker-0", "worker-1") as mesh:
        steps = mesh.operations.plan(["worker-0"], None)
        # It has not begun yet, like the restart of a client that does not wait.
        restart = mesh.operations.restart(steps, mesh.report, lambda: False)
        with pytest.raises(Conflict, match="a restart is under way"):
            await mesh.operations.drain("worker-1", mesh.report)
        with pytest.raises(Conflict, match="a restart is under way"):
            mesh.operations.restart(steps, mesh.report, lambda: False)
        assert (await restart).failed is None
        await mesh.operations.drain("worker-1", mesh.report)
        start = asyncio.ensure_future(mesh.operations.start("worker-1", mesh.report))
        # It reads the mesh file.
        await asyncio.sleep(0)
        with pytest.raises(Conflict, match="a start of worker-1 is under way"):
            mesh.operations.plan(["worker-0"], None)
        await start
        assert mesh.states() == [State.READY, State.READY]


async def test_a_restart_in_the_background_is_under_way_when_its_plan_is_sent() -> None:
    async with bed("worker-0", "worker-1") as mesh, TaskGroup() as background:
        screen = Screen(
            io.StringIO(),
            io.StringIO(),
            colour=False,
            clock=lambda: 0.0,
            tail=lambda _name: [],
            log=Path,
        )
        handler = ControlHandler(mesh.supervisor, mesh.operations, screen, background)
        request = ControlRequest(command="restart", wait=False)
        await handler.handle(request, lambda _line: None, lambda: False)
        with pytest.raises(Conflict, match="a restart is under way"):
            await handler.handle(request, lambda _line: None, lambda: False)


async def test_a_drained_member_stays_stopped_until_it_is_started() -> None:
    async with bed("worker-0", "worker-1") as mesh:
        with pytest.raises(InvalidRequest, match="start takes one stopped member"):
            await mesh.operations.start("worker-0", mesh.report)
        await mesh.operations.drain("worker-0", mesh.report)
        assert mesh.states() == [State.STOPPED, State.READY]
        with pytest.raises(InvalidRequest, match="last live"):
            await mesh.operations.drain("worker-1", mesh.report)
        await mesh.operations.start("worker-0", mesh.report)
        assert mesh.states() == [State.READY, State.READY]
        assert mesh.entries() == ["TERM worker-0", "START worker-0"]


async def test_a_restart_of_all_members_does_not_start_drained_ones() -> None:
    async with bed("worker-0", "worker-1") as mesh:
        await mesh.operations.drain("worker-0", mesh.report)
        outcome = await mesh.restart()
        assert [item.name for item in outcome.replaced] == ["worker-1"]
        assert mesh.states() == [State.STOPPED, State.READY]
        outcome = await mesh.restart("worker-0")
        assert [item.name for item in outcome.replaced] == ["worker-0"]
        assert mesh.states() == [State.READY, State.READY]


async def test_members_have_the_names_that_the_registry_has() -> None:
    async with bed("worker-0", "worker-1") as mesh:
        assert [step.name for step in mesh.operations.plan(["101"], None)] == ["worker-1"]
        await mesh.operations.drain("host-worker-1", mesh.report)
        await mesh.operations.start("host-worker-1", mesh.report)
        assert mesh.entries() == ["TERM worker-1", "START worker-1"]
        with pytest.raises(InvalidRequest, match=r"'101': no such member"):
            mesh.operations.plan(["101"], None)


async def test_only_a_drain_closes_the_port_of_a_member() -> None:
    async with bed("worker-0", "worker-1") as mesh:
        await mesh.restart(new_first=True)
        await mesh.restart(new_first=False)
        assert mesh.closed == []
        await mesh.operations.drain("worker-1", mesh.report)
        assert mesh.closed == ["worker-1"]


async def test_a_stop_during_a_restart_ends_both_processes_once() -> None:
    async with bed("worker-0", born=becomes_ready) as mesh:
        mesh.missing[101] = "frontend-0"
        restart = asyncio.ensure_future(mesh.restart())
        await until(lambda: len(mesh.world.processes) == 2, "the successor started")
        mesh.supervisor.stop()
        restart.cancel()
    assert mesh.world.log.entries.count("TERM worker-0") == 2
    assert all(process.ended.done() for process in mesh.world.processes)


async def test_a_process_that_hangs_at_its_start_does_not_hide_the_old_one() -> None:
    def born(process: FakeProcess) -> None:
        (becomes_ready if process.pid == 100 else silent)(process)

    async with bed("worker-0", born=born) as mesh:
        restart = asyncio.ensure_future(mesh.restart())
        await until(lambda: len(mesh.world.processes) == 2, "the successor started")
        assert [child.state for child in mesh.supervisor.children] == [State.READY, State.STARTING]
        # A slow start shows its progress.
        await until(lambda: ("worker-0", "progress") in mesh.reports, "the progress is reported")
        mesh.world.processes[1].report_ready()
        assert (await restart).failed is None


async def test_members_are_added_and_those_with_the_highest_numbers_drained() -> None:
    async with bed("worker-0", "worker-1") as mesh:
        await mesh.operations.scale({"worker": 4}, mesh.report)
        assert mesh.world.log.entries[2:] == ["START worker-2", "START worker-3"]
        assert mesh.states() == [State.READY] * 4
        await mesh.operations.scale({"worker": 1}, mesh.report)
        assert [child.spec.name for child in mesh.supervisor.children] == ["worker-0"]
        assert mesh.closed == ["worker-1", "worker-2", "worker-3"]
        # A restart has the present members.
        outcome = await mesh.restart()
        assert [item.name for item in outcome.replaced] == ["worker-0"]


async def test_a_scale_waits_until_peers_can_use_the_new_members_and_names_one_that_fails() -> None:
    def born(process: FakeProcess) -> None:
        (dead if process.spec.name == "worker-2" else becomes_ready)(process)

    async with bed("worker-0", born=born) as mesh:
        mesh.missing[101] = "router-0"
        scale = asyncio.ensure_future(mesh.operations.scale({"worker": 2}, mesh.report))
        await until(lambda: len(mesh.world.processes) == 2, "the new member started")
        with pytest.raises(Conflict, match="number of members is under way"):
            await mesh.operations.drain("worker-0", mesh.report, force=True)
        assert not scale.done()
        mesh.missing.clear()
        await scale
        with pytest.raises(InvalidRequest, match="worker-2: it ended"):
            await mesh.operations.scale({"worker": 3}, mesh.report)
        assert mesh.states()[:2] == [State.READY, State.READY]

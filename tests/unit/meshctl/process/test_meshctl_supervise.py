"""Restarts, deregistration and the order of the end, with fake processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from common.errors import InvalidRequest, Unavailable
from common.service.restarts import RestartPolicy
from meshctl.process.child import StartFailed
from meshctl.process.supervise import (
    BecameReady,
    Died,
    NotDeregistered,
    RestartsExhausted,
    State,
    Stopped,
    Supervisor,
)
from tests.kit.supervised import (
    WAIT_S,
    FakeProcess,
    World,
    becomes_ready,
    dead,
    running,
    silent,
    spec,
)


async def test_all_are_ready_when_the_last_one_is() -> None:
    world = World(born=silent)
    async with running(world, spec("a"), spec("b")) as supervisor:
        ready = asyncio.ensure_future(supervisor.wait_all_ready())
        await world.log.has("START b")
        world.processes[0].report_ready()
        await world.next_event(BecameReady)
        assert not ready.done()
        world.processes[1].report_ready()
        await ready


async def test_a_dead_service_is_deregistered_and_restarted() -> None:
    world = World(born=becomes_ready)
    async with running(world, spec("a")) as supervisor:
        await world.next_event(BecameReady)
        world.processes[0].end(-11)
        died = await world.next_event(Died)
        assert (died.service, died.status) == ("a", -11)
        assert died.restart_in_s is not None
        assert world.deregistered == [("ns", 100)]
        assert (await world.next_event(BecameReady)).line.pid == 101
        await supervisor.wait_all_ready()


async def test_an_unrequested_exit_with_status_zero_counts_as_a_death() -> None:
    world = World(born=becomes_ready)
    async with running(world, spec("a")):
        await world.next_event(BecameReady)
        world.processes[0].end(0)
        assert (await world.next_event(Died)).status == 0
        await world.next_event(BecameReady)


async def test_a_service_that_is_never_ready_stops_the_mesh() -> None:
    world = World(
        born=lambda process: (dead if process.spec.name == "a" else becomes_ready)(process)
    )
    async with running(world, spec("a"), spec("b")) as supervisor:
        assert await world.next_event(RestartsExhausted) == RestartsExhausted("a", 5)
        await supervisor.wait_for_stop()
        assert (await world.next_event(Stopped)).service == "b"
    assert world.log.entries.count("START a") == 5
    assert not supervisor.is_clean
    assert [child.state for child in supervisor.children] == [State.FAILED, State.STOPPED]


async def test_the_mesh_is_ready_and_goes_on_without_an_observer() -> None:
    world = World(
        born=lambda process: (dead if process.spec.name == "a" else becomes_ready)(process)
    )
    observer = replace(spec("a"), is_observer=True)
    async with running(world, observer, spec("b")) as supervisor:
        await supervisor.wait_all_ready()
        assert await world.next_event(RestartsExhausted) == RestartsExhausted("a", 5)
        assert [child.state for child in supervisor.children] == [State.FAILED, State.READY]
        assert supervisor.is_clean
        supervisor.stop()


async def test_an_invalid_configuration_stops_the_mesh_without_a_restart() -> None:
    def refuse(process: FakeProcess) -> None:
        process.line.set_result(StartFailed("--x: must be y"))
        process.end(2)

    world = World(born=refuse)
    async with running(world, spec("a")) as supervisor:
        died = await world.next_event(Died)
        assert (died.status, died.restart_in_s) == (2, None)
        assert died.start_error == "--x: must be y"
        exhausted = RestartsExhausted("a", 1, is_retryable=False, start_error=died.start_error)
        assert await world.next_event(RestartsExhausted) == exhausted
        await supervisor.wait_for_stop()
    assert world.log.entries == ["START a"]
    assert not supervisor.is_clean


async def test_a_service_that_cannot_be_started_counts_as_dead() -> None:
    world = World(born=becomes_ready)
    world.launch_error = OSError("no more processes")
    async with running(world, spec("a")):
        died = await world.next_event(Died)
        assert (died.status, died.reason) == (None, "no more processes")
        await world.next_event(RestartsExhausted)


async def test_a_service_that_hangs_during_its_start_is_killed_and_restarted() -> None:
    world = World(born=silent)
    async with running(world, spec("a"), start_s=0.01):
        assert "not ready within" in (await world.next_event(Died)).reason
        assert world.log.entries[:2] == ["START a", "KILL a"]


async def test_an_invalid_ready_line_counts_as_a_death() -> None:
    def nonsense(process: FakeProcess) -> None:
        process.line.set_exception(InvalidRequest("ready line.pid: Field required", "pid"))

    world = World(born=nonsense)
    async with running(world, spec("a")):
        assert (await world.next_event(Died)).reason == "ready line.pid: Field required"


@pytest.mark.parametrize("instance_id", ["7", "not a number"])
async def test_a_failing_registry_is_reported_and_does_not_prevent_a_restart(
    instance_id: str,
) -> None:
    world = World(born=lambda process: process.report_ready(instance_id))
    world.registry_error = Unavailable("the disk is full")
    async with running(world, spec("a")):
        await world.next_event(BecameReady)
        world.processes[0].end(1)
        assert (await world.next_event(NotDeregistered)).service == "a"
        await world.next_event(BecameReady)


async def test_services_stop_rank_by_rank() -> None:
    world = World(born=becomes_ready, obedient=False)
    specs = (spec("worker", 2), spec("front-0", 0), spec("router", 1), spec("front-1", 0))
    async with running(world, *specs) as supervisor:
        await supervisor.wait_all_ready()
        supervisor.stop()
        by_name = {process.spec.name: process for process in world.processes}
        for wave in (["front-0", "front-1"], ["router"], ["worker"]):
            await world.log.has(f"TERM {wave[-1]}")
            asked = world.log.entries[4:]
            assert asked[-len(wave) :] == [f"TERM {name}" for name in wave]
            for name in wave:
                by_name[name].end(0)
    assert asked == ["TERM front-0", "TERM front-1", "TERM router", "TERM worker"]
    assert supervisor.is_clean


async def test_a_service_that_exceeds_its_drain_limit_is_killed_and_reported() -> None:
    world = World(born=becomes_ready, obedient=False)
    async with running(world, spec("a", drain_s=0.01)) as supervisor:
        await supervisor.wait_all_ready()
        supervisor.stop()
        ended = await world.next_event(Stopped)
        assert (ended.status, ended.killed) == (-9, True)
        assert ended.after_s >= 0.01
    assert not supervisor.is_clean


async def test_a_kill_during_the_drain_ends_all_services_at_once() -> None:
    world = World(born=becomes_ready, obedient=False)
    async with running(world, spec("a", 0), spec("b", 1)) as supervisor:
        await supervisor.wait_all_ready()
        supervisor.stop()
        await world.log.has("TERM a")
        supervisor.kill()
        await world.next_event(Stopped)
    assert "KILL a" in world.log.entries
    assert "KILL b" in world.log.entries
    assert not supervisor.is_clean


async def test_a_stop_during_the_pause_prevents_the_restart() -> None:
    world = World(born=dead)
    policy = RestartPolicy(initial_pause_s=WAIT_S, max_pause_s=WAIT_S)
    async with running(world, spec("a"), policy=policy) as supervisor:
        await world.next_event(Died)
        assert [child.state for child in supervisor.children] == [State.WAITING]
        supervisor.stop()
    assert world.log.entries == ["START a"]
    assert [child.state for child in supervisor.children] == [State.STOPPED]


async def test_a_service_that_dies_during_the_drain_is_reported_and_not_restarted() -> None:
    world = World(born=becomes_ready, obedient=False)
    async with running(world, spec("a", 0), spec("b", 1)) as supervisor:
        await supervisor.wait_all_ready()
        supervisor.stop()
        await world.log.has("TERM a")
        world.processes[1].end(1)
        died = await world.next_event(Died)
        assert (died.service, died.restart_in_s) == ("b", None)
        world.processes[0].end(0)
    assert world.log.entries.count("START b") == 1


async def test_a_service_stopped_before_it_handles_signals_counts_as_a_clean_exit() -> None:
    world = World(born=silent, obedient=False)
    async with running(world, spec("a")) as supervisor:
        await world.log.has("START a")
        supervisor.stop()
        await world.log.has("TERM a")
        world.processes[0].end(-15)
    assert supervisor.is_clean


async def test_no_process_outlives_a_cancelled_supervisor() -> None:
    world = World(born=becomes_ready, obedient=False)
    supervisor = Supervisor(
        [spec("a")],
        world.start,
        world.deregister,
        namespace="ns",
        on_event=world.events.put_nowait,
        clock=asyncio.get_running_loop().time,
        rng=Random(1),
    )
    task = asyncio.ensure_future(supervisor.run())
    await world.next_event(BecameReady)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.log.entries == ["START a", "KILL a"]


async def test_a_service_that_was_live_and_stops_to_answer_is_killed_and_restarted() -> None:
    world = World(born=becomes_ready)
    answers = [False, True, False, False, True, False, False, False]
    async with running(world, spec("frontend-0"), answers=answers):
        died = await world.next_event(Died)
        assert (died.status, died.reason) == (-9, "it did not answer 3 liveness checks in a row")
        await world.next_event(BecameReady)
    assert world.log.entries.count("KILL frontend-0") == 1
    assert "CHECK 1 left" in world.log.entries, "two failures in a row are not enough"


async def test_a_service_that_was_never_live_is_not_killed() -> None:
    world = World(born=becomes_ready)
    async with running(world, spec("frontend-0"), answers=[False] * 20):
        await world.log.has("CHECK 0 left")
    assert world.log.entries[-1] == "TERM frontend-0"

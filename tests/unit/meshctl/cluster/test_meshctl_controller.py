"""The controller of a mesh on a fake cluster, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from common.errors import InvalidRequest, NotFound
from meshctl.cluster.controller import Controller
from meshctl.cluster.recommended import Recommendation
from meshctl.cluster.reconcile import Policy
from meshctl.cluster.state import CPU, Needs
from tests.kit import waiting
from tests.kit.cluster import START_S, FakeCluster, cluster, controller_of, deployment, node
from tests.sim.loop import run_virtually

MESH = deployment("routers: {count: 2}\nworkers: [{count: 2}]\n")
FULL = {"frontend": 1, "router": 2, "indexer": 1, "worker": 2}
LIMIT_S = 200.0
LOOK_S = 0.05


@asynccontextmanager
async def running(fake: FakeCluster, controller: Controller) -> AsyncIterator[Controller]:
    task = asyncio.ensure_future(controller.run())
    try:
        yield controller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], Awaitable[object]]) -> float:
    """Returns the virtual seconds until a condition holds."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await waiting.until(condition, "the condition holds", LIMIT_S, poll_s=LOOK_S)
    return loop.time() - began


def settled(controller: Controller, without: str = "") -> Callable[[], Awaitable[object]]:
    """Returns the condition that all members are routable. without: address of a node that has
    none."""

    async def is_settled() -> bool:
        status = controller.status()
        return status["is_settled"] and all(m["node"] != without for m in status["members"])

    return is_settled


async def least_while(
    fake: FakeCluster, group: str, condition: Callable[[], Awaitable[object]]
) -> int:
    """Returns the smallest number of routable members of a group until a condition holds."""
    least = 99

    async def observe() -> object:
        nonlocal least
        least = min(least, (await fake.counts()).get(group, 0))
        return await condition()

    await until(observe)
    return least


def run(body: Callable[[FakeCluster], Awaitable[None]], fake: FakeCluster | None = None) -> None:
    fake = fake or cluster()

    async def main() -> None:
        await body(fake)

    run_virtually(main())


def test_an_applied_mesh_starts_and_is_settled_when_all_members_are_routable() -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            assert not controller.status()["is_settled"]
            await controller.apply(MESH)
            took_s = await until(settled(controller))
            assert START_S <= took_s < START_S + 1
            assert await fake.counts() == FULL
            nodes = {m["name"]: m["node"] for m in controller.status()["members"]}
            assert nodes["router-0"] != nodes["router-1"]
            assert nodes["worker-0"] != nodes["worker-1"]

    run(body)


def test_workers_are_scaled_up_and_down_and_the_highest_numbers_drain() -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            await controller.apply(MESH)
            await until(settled(controller))
            await controller.scale({"worker": 6})
            await until(settled(controller))
            assert (await fake.counts())["worker"] == 6
            fake.log.clear()
            await controller.scale({"worker": 2})
            least = await least_while(fake, "worker", settled(controller))
            assert least == 2
            assert sorted(line for line in fake.log if line.startswith("stop")) == [
                f"stop worker-{number}.1" for number in range(2, 6)
            ]

    run(body)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_members_of_a_lost_node_are_replaced(is_noticed: bool) -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            await controller.apply(MESH)
            await until(settled(controller))
            members = controller.status()["members"]
            (lost,) = [m for m in members if m["name"] == "worker-0"]
            number = lost["node"].rpartition(".")[2]
            fake.kill_node(f"n{number}", is_noticed=is_noticed)
            took_s = await until(settled(controller, without=lost["node"]))
            limit_s = START_S + 2 + (0 if is_noticed else Policy().silent_s)
            assert took_s < limit_s
            assert await fake.counts() == FULL

    run(body)


def test_members_of_a_drained_node_move_without_a_moment_with_fewer() -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            await controller.apply(MESH)
            await until(settled(controller))
            for group in ("worker", "router"):
                (some,) = [m for m in controller.status()["members"] if m["name"] == f"{group}-0"]
                (here,) = [n for n in fake.live.values() if n.address == some["node"]]
                drained_at = asyncio.get_running_loop().time() + 60
                fake.live[here.id] = replace(here, is_draining=True, drained_at=drained_at)
                is_moved = settled(controller, without=here.address)
                assert await least_while(fake, group, is_moved) == 2
                fake.live[here.id] = here

    run(body)


def test_a_restarted_controller_goes_on_with_the_same_members_and_numbers() -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            await controller.apply(MESH)
            await controller.scale({"worker": 3})
            await until(settled(controller))
        fake.log.clear()
        async with running(fake, controller_of(fake)) as controller:
            await until(settled(controller))
            assert fake.log == []
            await controller.scale({"worker": 4})
            await until(settled(controller))
            assert (await fake.counts())["worker"] == 4

    run(body)


def test_a_controller_that_restarts_while_a_node_is_lost_replaces_its_members() -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            await controller.apply(MESH)
            await until(settled(controller))
        fake.kill_node("n1", is_noticed=True)
        async with running(fake, controller_of(fake)) as controller:
            await until(settled(controller))
            assert await fake.counts() == FULL

    run(body)


def test_nothing_changes_while_the_head_does_not_respond_and_the_reason_is_reported() -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            await controller.apply(MESH)
            await until(settled(controller))
            fake.log.clear()
            fake.is_reachable = False
            # Sleep: virtual.
            await asyncio.sleep(60)
            assert fake.log == []
            assert controller.status()["problem"] == "the head does not respond"
            assert await fake.counts() == FULL
            fake.is_reachable = True
            await asyncio.sleep(2)
            assert controller.status()["problem"] == ""

    run(body)


def test_a_restart_replaces_members_one_at_a_time_and_a_role_never_lacks_more_than_one() -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            await controller.apply(MESH)
            await until(settled(controller))
            before = {m["replica"] for m in controller.status()["members"]}
            names = await controller.restart([])
            assert len(names) == 6
            least = await least_while(fake, "worker", settled(controller))
            assert least == 1
            after = {m["replica"] for m in controller.status()["members"]}
            assert not before & after
            assert await controller.restart(["router"]) == ["router-0", "router-1"]
            with pytest.raises(InvalidRequest, match="no such member or service; did you mean"):
                await controller.restart(["routr"])

    run(body)


def test_the_only_frontend_is_replaced_without_a_moment_without_one() -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            await controller.apply(MESH)
            await until(settled(controller))
            await controller.restart(["frontend"])
            assert await least_while(fake, "frontend", settled(controller)) == 1

    run(body)


def test_a_drained_member_stays_stopped_and_the_last_of_a_role_is_kept() -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            await controller.apply(MESH)
            await until(settled(controller))
            await controller.drain("worker-0", is_forced=False)
            await until(settled(controller))
            assert (await fake.counts())["worker"] == 1
            with pytest.raises(InvalidRequest, match="is the last live"):
                await controller.drain("worker-1", is_forced=False)
            await controller.undrain("worker-0")
            await until(settled(controller))
            assert await fake.counts() == FULL

    run(body)


def test_the_mesh_ends_in_order_and_commands_are_refused_afterwards() -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            with pytest.raises(NotFound, match="no mesh runs"):
                await controller.scale({"worker": 1})
            await controller.apply(MESH)
            await until(settled(controller))
            fake.log.clear()
            await controller.stop()

            async def is_stopped() -> object:
                return controller.status()["is_stopped"]

            await until(is_stopped)
            groups = [line.split()[1].partition("-")[0] for line in fake.log if "stop" in line]
            assert groups == ["frontend", "router", "router", "worker", "worker", "indexer"]
            with pytest.raises(NotFound, match="no mesh runs"):
                await controller.scale({"worker": 1})

    run(body)


def test_a_member_that_fails_is_reported_and_tried_again_while_the_others_serve() -> None:
    async def body(fake: FakeCluster) -> None:
        broken = {"worker-1"}
        fake.fails = lambda name: name in broken
        async with running(fake, controller_of(fake)) as controller:
            await controller.apply(MESH)
            # Sleep: virtual.
            await asyncio.sleep(40)
            assert (await fake.counts())["worker"] == 1
            assert "failed; starts again in" in controller.status()["missing"]["worker-1"]
            assert 3 <= sum("start worker-1" in line for line in fake.log) <= 12
            broken.clear()
            await until(settled(controller))

    run(body)


def test_members_without_a_node_are_asked_of_the_autoscaler_and_start_when_it_adds_one() -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            await controller.apply(MESH)
            # Sleep: virtual.
            await asyncio.sleep(20)
            assert len(controller.status()["missing"]) == 3
            assert "waits for a node with 1 CPU" in str(controller.status()["missing"])
            assert fake.requested == [[Needs({CPU: 1.0})] * 6]
            fake.live["n9"] = node(9)
            await until(settled(controller))
            assert fake.requested[1:] == [[]]

    run(body, cluster(node(1, cpus=3)))


def test_the_number_of_workers_follows_the_routers_and_holds_without_data() -> None:
    text = "workers: [{count: 2, scaling: recommended}]"

    async def body(fake: FakeCluster) -> None:
        recommended: list[Recommendation] = []

        async def workers(count: int) -> float:
            async def has_count() -> bool:
                return (await fake.counts()).get("worker") == count

            return await until(has_count)

        async with running(fake, controller_of(fake, lambda: recommended)) as controller:
            await controller.apply(deployment(text))
            await until(settled(controller))
            # Sleep: virtual.
            await asyncio.sleep(30)
            assert (await fake.counts())["worker"] == 2
            recommended[:] = [Recommendation("sim", "aggregated", n) for n in (4, 3)]
            assert await workers(4) < 15
            recommended.clear()
            await asyncio.sleep(30)
            assert (await fake.counts())["worker"] == 4
            # The same file again keeps the present number.
            await controller.apply(deployment(text))
            assert controller.status()["counts"]["worker"] == 4
            recommended[:] = [Recommendation("sim", "aggregated", 1)]
            await workers(1)

    run(body)


def test_a_supervisor_that_responds_again_after_it_was_replaced_is_not_used_twice() -> None:
    async def body(fake: FakeCluster) -> None:
        async with running(fake, controller_of(fake)) as controller:
            await controller.apply(MESH)
            await until(settled(controller))
            for one in fake.replicas_by_id.values():
                one.is_silent = one.observed.member == "worker-0"
            # Sleep: virtual; shorter than the limit.
            await asyncio.sleep(Policy().silent_s / 2)
            for one in fake.replicas_by_id.values():
                one.is_silent = False
            await asyncio.sleep(20)
            counts: Mapping[str, int] = await fake.counts()
            assert counts == FULL

    run(body)

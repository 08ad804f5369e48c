"""The controller of a cluster with real services: all but Ray.

The nodes are addresses of this host. Each replica supervises a service process, as an actor of Ray
does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest

from meshctl.cluster.controller import Controller
from meshctl.cluster.deployment import Deployment, spec_on_node
from meshctl.cluster.reconcile import observed_start
from meshctl.cluster.replica import Replica
from meshctl.cluster.router_recommendations import read_recommendations
from meshctl.cluster.state import CPU, Needs, Node, Observed, Start
from meshctl.services import ServiceSpec
from tests.kit.cluster import deployment
from tests.kit.waiting import until

pytestmark = pytest.mark.slow

START_S = 50.0
MESH = """
registry: file
drain_s: 2
settings: {notice_s: 0}
frontends: {http_port: 0, settings: {canary_interval_s: 0}}
indexers: {count: 0}
workers: [{count: 2, settings: {speedup: 1}}]
"""


@dataclass
class Hosts:
    """A `Runner` whose nodes are addresses of this host. running: the replicas with what they were
    started for."""

    folder: Path
    live: list[Node]
    running: dict[str, tuple[Replica, Observed]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    stored: bytes = b""

    async def nodes(self) -> Sequence[Node]:
        return self.live

    async def replicas(self) -> Sequence[Observed]:
        return [
            _observe(one, observed, is_silent=observed.node_id in self.silent)
            for one, observed in self.running.values()
        ]

    async def start(self, start: Start, spec: ServiceSpec, deployment: Deployment) -> None:
        observed, address = observed_start(start), start.node.address
        placed = spec_on_node(spec, address, deployment.environ)
        options = deployment.read_options()
        folder = self.folder / observed.id
        one = Replica(placed, address, options, deployment.environ, folder)
        self.running[observed.id] = one, observed
        await one.start()

    async def stop(self, replica: Observed) -> None:
        self.running[replica.id][0].stop()

    async def forget(self, replica: Observed) -> None:
        one, _ = self.running.pop(replica.id)
        await one.close()

    async def save(self, raw: bytes) -> None:
        self.stored = raw

    async def load(self) -> bytes:
        return self.stored

    async def request_nodes(self, needs: Sequence[Needs]) -> None:
        raise AssertionError("all members have a node")

    async def kill(self, node_id: str) -> None:
        """Ends the processes of a node, and lets it not respond."""
        self.live = [node for node in self.live if node.id != node_id]
        self.silent.add(node_id)
        for one, observed in self.running.values():
            if observed.node_id == node_id:
                await one.close()


def _observe(one: Replica, observed: Observed, *, is_silent: bool) -> Observed:
    status = one.status()
    return replace(
        observed,
        phase=status.phase,
        detail=status.detail,
        instance_id=status.instance_id,
        addresses=status.addresses or {},
        pid=status.pid,
        silent_s=1.0 if is_silent else 0.0,
    )


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Hosts, Controller]]:
    hosts = Hosts(folder, [Node(f"n{i}", f"127.0.0.{i}", {CPU: 8}) for i in (2, 3, 4)])
    controller = Controller(hosts, read_recommendations)
    task = asyncio.create_task(controller.run())
    try:
        await controller.apply(deployment(MESH, registry_path=folder / "registry"))
        yield hosts, controller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for one, _ in hosts.running.values():
            await one.close()


async def settled(controller: Controller, without: str = "") -> dict[str, str]:
    """Waits until all members are routable, none of them on a node; returns the address of the node
    of each."""

    def nodes() -> dict[str, str]:
        status = controller.status()
        found = {member["name"]: member["node"] for member in status["members"]}
        is_over = status["is_settled"] and without not in found.values()
        return found if is_over else {}

    try:
        return await until(nodes, "all members are routable", START_S, poll_s=0.02)
    except AssertionError as error:
        raise AssertionError(f"{error}: {controller.status()}") from None


async def test_services_run_on_their_nodes_are_scaled_replaced_and_ended(tmp_path: Path) -> None:
    async with running(tmp_path) as (hosts, controller):
        nodes = await settled(controller)
        assert set(nodes) == {"frontend-0", "router-0", "worker-0", "worker-1"}
        assert nodes["worker-0"] != nodes["worker-1"]
        members = {member["name"]: member for member in controller.status()["members"]}
        # Each service binds and advertises the address of its node.
        for name, member in members.items():
            assert member["addresses"]["grpc"].partition(":")[0] == nodes[name]
        url = members["frontend-0"]["addresses"]["http"]
        assert url.startswith(f"http://{nodes['frontend-0']}:")
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=START_S) as http:

            async def workers() -> set[str]:
                health = (await http.get("/health")).json()
                return {i["name"] for i in health["instances"] if i["service"] == "worker"}

            async def chat(tokens: int) -> httpx.Response:
                body = {"model": "sim", "prompt": "Hello", "max_tokens": tokens}
                return await http.post("/v1/completions", json={**body, "ignore_eos": True})

            first = await chat(8)
            assert first.status_code == 200, first.text
            await controller.scale({"worker": 3})
            await settled(controller)
            assert await workers() == {"worker-0", "worker-1", "worker-2"}
            # The loss of a node while requests run on its worker.
            (lost,) = set(nodes.values()) - {nodes["frontend-0"], nodes["router-0"]}
            replies = [asyncio.create_task(chat(200)) for _ in range(12)]
            # Sleep: the requests run.
            await asyncio.sleep(0.3)
            victim = next(node.id for node in hosts.live if node.address == lost)
            await hosts.kill(victim)
            found = await asyncio.gather(*replies)
            assert [reply.status_code for reply in found] == [200] * 12
            assert len({reply.json()["choices"][0]["text"] for reply in found}) == 1
            await settled(controller, without=lost)
            assert await workers() == {"worker-0", "worker-1", "worker-2"}
            await controller.scale({"worker": 1})
            await settled(controller)
            assert await workers() == {"worker-0"}
            assert (await chat(8)).json()["choices"] == first.json()["choices"]

        async def recommended() -> list[str]:
            found = await read_recommendations(deployment(MESH), await hosts.replicas())
            return [f"{one.role} of {one.model}" for one in found if one.workers]

        assert await until(recommended, "the router recommends", START_S) == ["aggregated of sim"]
        await controller.stop()
        await until(lambda: controller.status()["is_stopped"], "all have ended", START_S)
        assert not hosts.running

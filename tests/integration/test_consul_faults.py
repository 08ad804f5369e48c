"""Faults of Consul and of workers on a real agent with gRPC health checks.

The contract suite covers operation without faults, with TTL checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import SystemRandom

import httpx
import pytest
from structlog.testing import capture_logs

from common.errors import (
    Conflict,
    InvalidRequest,
    MeshError,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from common.registry.card import Artifact, ModelCard
from common.registry.consul.registry import ConsulRegistry
from common.registry.consul.watch import RECONCILE_S
from common.registry.instances import HEALTH_META_KEY, Instance, Snapshot, new_instance_id
from common.registry.open import health_check_meta, open_registry
from common.registry.registry import Watch
from common.runtime.config import ServiceConfig, read_config
from common.service.health import ThreadedHealthServer
from tests.contract.consul_agent import ConsulAgent, running_agent
from tests.kit.waiting import WAIT_S, until

pytestmark = pytest.mark.slow

NS = "faults"
# One to two seconds on an idle machine.
DEAD_WITHIN_S = 20.0

# A process with a health server in a thread, as services have, without a registration.
WORKER = """
import sys, threading
from common.service.health import ThreadedHealthServer
thread = ThreadedHealthServer("127.0.0.1", 0)
thread.start()
thread.set("", True)
print(thread.address, flush=True)
threading.Event().wait(120)
"""


@dataclass
class Mesh:
    """An agent, its clients and their processes."""

    agent: ConsulAgent
    http: httpx.AsyncClient
    clients: list[ConsulRegistry] = field(default_factory=list)
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    def connect(
        self, unreachable_timeout_s: float = WAIT_S, card_check_interval_s: float = 30.0
    ) -> ConsulRegistry:
        self.clients.append(
            ConsulRegistry(
                self.agent.url,
                reconcile_interval_s=0.25,
                unreachable_timeout_s=unreachable_timeout_s,
                card_check_interval_s=card_check_interval_s,
            )
        )
        return self.clients[-1]

    async def process(self) -> tuple[asyncio.subprocess.Process, str]:
        """A worker process and its health address."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            WORKER,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.processes.append(process)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        return process, line.decode().strip()

    async def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
        await asyncio.gather(*(client.close() for client in self.clients))


@pytest.fixture(scope="module")
def agent() -> Iterator[ConsulAgent]:
    with running_agent() as made:
        yield made


@pytest.fixture
async def mesh(agent: ConsulAgent) -> AsyncIterator[Mesh]:
    agent.start()  # The previous test may have failed while it was stopped.
    agent.wipe()
    async with httpx.AsyncClient(base_url=agent.url, trust_env=False, timeout=WAIT_S) as http:
        made = Mesh(agent, http)
        yield made
        await made.close()


@pytest.fixture
def healthy() -> Iterator[ThreadedHealthServer]:
    """A health server in this process."""
    threaded_health = ThreadedHealthServer("127.0.0.1", 0)
    threaded_health.start()
    threaded_health.set("", True)
    yield threaded_health
    threaded_health.stop(1.0)


def worker(health: str | None, stable_name: str = "", **facts: str) -> Instance:
    meta = {} if health is None else {HEALTH_META_KEY: health}
    instance_id = new_instance_id(SystemRandom())
    return Instance(instance_id, NS, "worker", stable_name, "127.0.0.1:1", meta=meta, **facts)  # type: ignore[arg-type]


async def seen(watch: Watch, condition: Callable[[Snapshot], bool], within_s: float) -> float:
    """Seconds until `condition` holds for a snapshot."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(within_s):
            while not condition(watch.current):
                await watch.next()
    except TimeoutError:
        pytest.fail(f"not within {within_s} s; members: {list(watch.current.instances)}")
    return time.monotonic() - started


async def passing(mesh: Mesh) -> set[str]:
    """Ids (hex) that Consul lists as passing: the members for a new client."""
    with contextlib.suppress(httpx.HTTPError):
        response = await mesh.http.get(f"/v1/health/service/kvmesh-{NS}?passing")
        if response.is_success:
            return {entry["Service"]["ID"].rpartition("-")[2] for entry in response.json()}
    return set()


@contextlib.asynccontextmanager
async def steps_of(watch: Watch) -> AsyncIterator[list[frozenset[int]]]:
    """Every set of members of the watch during the block."""
    steps: list[frozenset[int]] = []

    async def follow() -> None:
        # Ends: the block cancels it.
        while True:
            steps.append(frozenset((await watch.next()).instances))

    task = asyncio.create_task(follow())
    try:
        yield steps
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def registered(mesh: Mesh, watch: Watch, *instances: Instance) -> None:
    owner = mesh.connect()
    await asyncio.gather(*(owner.register(each) for each in instances))
    await seen(watch, lambda s: s.instances.keys() >= {i.id for i in instances}, WAIT_S)


async def test_a_worker_is_a_member_once_consul_has_reached_its_health_address(
    mesh: Mesh, healthy: ThreadedHealthServer
) -> None:
    async with mesh.connect().watch(NS) as watch:
        one, wrong = worker(healthy.address), worker("127.0.0.1:1")
        owner = mesh.connect()
        await owner.register(wrong)
        await owner.register(one)
        await seen(watch, lambda s: bool(s.instances), WAIT_S)
        assert watch.current.instances == {one.id: one}


async def test_a_killed_process_leaves_in_time(mesh: Mesh) -> None:
    async with mesh.connect().watch(NS) as watch:
        process, address = await mesh.process()
        dying, other = worker(address), worker((await mesh.process())[1])
        await registered(mesh, watch, dying, other)
        process.kill()
        await seen(watch, lambda s: dying.id not in s.instances, DEAD_WITHIN_S)
        assert other.id in watch.current.instances


async def test_the_last_process_of_a_namespace_leaves_in_time_when_killed(mesh: Mesh) -> None:
    async with mesh.connect().watch(NS) as watch:
        process, address = await mesh.process()
        await registered(mesh, watch, worker(address))
        process.kill()
        await seen(watch, lambda s: not s.instances, DEAD_WITHIN_S)


async def test_a_hung_process_leaves_in_time_and_returns_when_it_continues(mesh: Mesh) -> None:
    async with mesh.connect().watch(NS) as watch:
        process, address = await mesh.process()
        one = worker(address)
        await registered(mesh, watch, one)
        process.send_signal(signal.SIGSTOP)
        await seen(watch, lambda s: not s.instances, DEAD_WITHIN_S)
        process.send_signal(signal.SIGCONT)
        await seen(watch, lambda s: s.instances == {one.id: one}, DEAD_WITHIN_S)


async def test_a_worker_with_a_closed_lease_leaves_although_its_health_is_serving(
    mesh: Mesh, healthy: ThreadedHealthServer
) -> None:
    """The last instance of its service: its departure note ends it, without a probe."""
    async with mesh.connect().watch(NS) as watch:
        lease = await mesh.connect().register(worker(healthy.address))
        await seen(watch, lambda s: bool(s.instances), WAIT_S)
        await lease.close()
        # With a probe it would remain.
        await seen(watch, lambda s: not s.instances, WAIT_S)


async def test_maintenance_mode_removes_a_worker_although_its_health_is_serving(
    mesh: Mesh, healthy: ThreadedHealthServer
) -> None:
    async with mesh.connect().watch(NS) as watch:
        one = worker(healthy.address)
        await registered(mesh, watch, one)
        url = f"/v1/agent/service/maintenance/kvmesh-{NS}-{one.id:016x}"
        await mesh.http.put(f"{url}?enable=true")
        await seen(watch, lambda s: not s.instances, WAIT_S)
        await mesh.http.put(f"{url}?enable=false")
        await seen(watch, lambda s: one.id in s.instances, WAIT_S)


async def test_owners_register_again_after_the_agent_lost_its_state_and_watches_keep_all_members(
    mesh: Mesh, healthy: ThreadedHealthServer
) -> None:
    members = [worker(healthy.address, f"w{n}") for n in range(10)]
    async with mesh.connect().watch(NS) as watch:
        await registered(mesh, watch, *members)
        before = watch.current
        async with steps_of(watch) as steps:
            mesh.agent.kill()
            assert not await passing(mesh)
            mesh.agent.start()
            expected = {f"{i.id:016x}" for i in members}

            async def are_back() -> bool:
                return await passing(mesh) == expected

            await until(are_back, "all registrations are back")
            # A further registration: when the watch shows it, all earlier changes have arrived.
            late = worker(healthy.address)
            await mesh.connect().register(late)
            await until(lambda: bool(steps), "the late registration is seen")
        assert steps == [frozenset({*before.instances, late.id})]


async def test_a_worker_that_died_during_an_agent_outage_leaves_afterwards(
    mesh: Mesh, healthy: ThreadedHealthServer
) -> None:
    async with mesh.connect().watch(NS) as watch:
        process, address = await mesh.process()
        dying, living = worker(address), worker(healthy.address)
        # Two owners: when one process dies, only its registration ends.
        owner = mesh.connect()
        await owner.register(dying)
        await registered(mesh, watch, living)
        await seen(watch, lambda s: len(s.instances) == 2, WAIT_S)
        mesh.agent.kill()
        process.kill()
        await process.wait()
        await owner.close()
        assert len(watch.current.instances) == 2, "a lost store does not change the members"
        mesh.agent.start()
        await seen(watch, lambda s: set(s.instances) == {living.id}, WAIT_S)


async def test_a_paused_agent_changes_nothing(mesh: Mesh, healthy: ThreadedHealthServer) -> None:
    members = [worker(healthy.address, f"w{n}") for n in range(5)]
    async with mesh.connect().watch(NS) as watch:
        await registered(mesh, watch, *members)
        client = mesh.connect(unreachable_timeout_s=0.2)
        known = await client.snapshot(NS)
        async with steps_of(watch) as steps:
            mesh.agent.pause()
            stopped_at = time.monotonic()
            try:
                assert await client.snapshot(NS) is known
                with pytest.raises(Unavailable, match="cannot reach Consul"):
                    await client.register(worker(None))
                # Sleep: the agent is stopped for this time.
                await asyncio.sleep(stopped_at + 3.0 - time.monotonic())
            finally:
                mesh.agent.resume()
            late = worker(healthy.address)
            await mesh.connect().register(late)
            await until(lambda: bool(steps), "the late registration is seen")
        expected = {*(i.id for i in members), late.id}
        assert steps == [frozenset(expected)]


def waits(logs: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    return [line for line in logs if line["event"] == "registry_awaited"]


async def test_a_registration_waits_for_an_agent_that_starts_later(
    mesh: Mesh, healthy: ThreadedHealthServer
) -> None:
    client, one, card = mesh.connect(), worker(healthy.address), ModelCard(name="early")
    mesh.agent.kill()
    with capture_logs() as logs:
        storing = asyncio.create_task(client.put_card(card))
        registering = asyncio.create_task(client.register(one))
        try:
            assert not (await client.snapshot(NS)).instances, "reads do not wait"
            with pytest.raises(Unavailable, match="cannot reach Consul"):
                await client.get_card(card.checksum)
            await until(lambda: len(waits(logs)) == 2, "both registries wait, and log it")
        finally:
            mesh.agent.start()
        await registering
        await storing
    assert await client.get_card(card.checksum) == card
    async with client.watch(NS) as watch:
        await seen(watch, lambda s: one.id in s.instances, WAIT_S)
    assert len(waits(logs)) == 2, "once each"


async def test_a_registration_without_an_agent_fails_after_the_timeout_and_can_be_repeated(
    mesh: Mesh, healthy: ThreadedHealthServer
) -> None:
    client, one = mesh.connect(unreachable_timeout_s=0.2), worker(healthy.address)
    mesh.agent.kill()
    try:
        with pytest.raises(Unavailable, match=mesh.agent.url) as rejected:
            await client.register(one)
        assert rejected.value.retry_after_s
    finally:
        mesh.agent.start()
    await client.register(one)
    async with client.watch(NS) as watch:
        await seen(watch, lambda s: one.id in s.instances, WAIT_S)


async def test_closing_a_registry_ends_its_wait_for_an_agent() -> None:
    client = ConsulRegistry("http://127.0.0.1:1")
    with capture_logs() as logs:
        registering = asyncio.create_task(client.register(worker(None)))
        await until(lambda: bool(logs), "it waits")
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await registering


async def test_a_watch_opened_without_an_agent_gets_members_once_it_runs(
    mesh: Mesh, healthy: ThreadedHealthServer
) -> None:
    mesh.agent.kill()
    client = mesh.connect()
    with capture_logs() as logs:
        async with client.watch(NS) as watch:
            assert watch.current == Snapshot()
            was_reachable = client.is_reachable
            mesh.agent.start()
            one = worker(healthy.address)
            await mesh.connect().register(one)
            await seen(watch, lambda s: one.id in s.instances, WAIT_S)
            assert (was_reachable, client.is_reachable) == (False, True)
    events = [line["event"] for line in logs if line.get("namespace") == NS]
    assert events == ["registry_lost", "registry_recovered"]


async def test_half_of_fifty_instances_killed_at_once_leave_in_time(
    mesh: Mesh, healthy: ThreadedHealthServer
) -> None:
    process, address = await mesh.process()
    dying = [worker(address, f"d{n}") for n in range(25)]
    living = [worker(healthy.address, f"l{n}") for n in range(25)]
    async with mesh.connect().watch(NS) as watch, mesh.connect().watch(NS) as other:
        await registered(mesh, watch, *dying, *living)
        process.kill()
        expected = {i.id for i in living}
        await seen(watch, lambda s: set(s.instances) == expected, DEAD_WITHIN_S)
        await seen(other, lambda s: set(s.instances) == expected, DEAD_WITHIN_S)


async def test_a_card_conflict_is_detected_before_consul_has_reached_the_first_worker(
    mesh: Mesh, healthy: ThreadedHealthServer
) -> None:
    first = worker(healthy.address, "a", model="m", card_checksum="c1")
    await mesh.connect().register(first)
    with pytest.raises(Conflict, match="c1"):
        await mesh.connect().register(worker(healthy.address, "b", model="m", card_checksum="c2"))


async def test_an_owner_restores_its_card_although_the_agent_kept_its_entry(
    mesh: Mesh, healthy: ThreadedHealthServer
) -> None:
    card = ModelCard(name="m", artifacts={"a": Artifact.of(b"x")})
    owner = mesh.connect(card_check_interval_s=0.1)
    await owner.put_card(card)
    await owner.register(worker(healthy.address, model="m", card_checksum=card.checksum))
    await owner.put_card(unused := ModelCard(name="n"))
    with capture_logs() as logs:
        # As servers that return without their state.
        (await mesh.http.delete("/v1/kv/?recurse")).raise_for_status()

        async def is_stored() -> bool:
            with contextlib.suppress(NotFound):
                return await mesh.connect().get_card(card.checksum) == card
            return False

        await until(is_stored, "the card is back")
    assert [line["card_checksum"] for line in logs if line["event"] == "card_restored"] == [
        card.checksum
    ]
    with pytest.raises(NotFound):
        await mesh.connect().get_card(unused.checksum)


async def test_a_card_larger_than_a_consul_value_is_stored_in_parts(mesh: Mesh) -> None:
    tokenizer = os.urandom(3 << 20)  # Not compressible.
    card = ModelCard(name="m", artifacts={"tokenizer.json": Artifact.of(tokenizer)})
    await mesh.connect().put_card(card)
    assert await mesh.connect().get_card(card.checksum) == card
    key = f"kvmesh/cards/{card.checksum}"
    response = await mesh.http.get(f"/v1/kv/{key}/manifest?raw")
    assert json.loads(response.content)["parts"] > 5
    await mesh.http.delete(f"/v1/kv/{key}/2")
    with pytest.raises(InvalidRequest) as rejected:
        await mesh.connect().get_card(card.checksum)
    assert rejected.value.field == "checksum"


@pytest.mark.parametrize("health", ["nowhere", "127.0.0.1", "http://x:1"])
async def test_an_invalid_health_address_is_rejected_by_name(mesh: Mesh, health: str) -> None:
    with pytest.raises(InvalidRequest) as rejected:
        await mesh.connect().register(worker(health))
    assert rejected.value.field == "meta.health"


@pytest.mark.parametrize("url", ["127.0.0.1:8500", "", "http://a b:x"])
def test_an_invalid_url_is_rejected_by_name(url: str) -> None:
    with pytest.raises(InvalidRequest) as rejected:
        ConsulRegistry(url)
    assert rejected.value.field == "consul_url"


async def test_a_registry_closed_during_registrations_leaves_no_services(
    mesh: Mesh, healthy: ThreadedHealthServer
) -> None:
    client = mesh.connect()
    tasks = [asyncio.create_task(client.register(worker(healthy.address))) for _ in range(8)]
    await asyncio.sleep(0)
    await client.close()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(o, Unavailable) or not isinstance(o, BaseException) for o in outcomes)

    async def has_no_service() -> bool:
        return not (await mesh.http.get("/v1/agent/services")).json()

    await until(has_no_service, "no service is left in Consul")


async def test_an_instance_too_large_for_consul_is_rejected(mesh: Mesh) -> None:
    huge = replace(worker(None), meta={"notes": "x" * 40_000})
    with pytest.raises(InvalidRequest, match="bytes") as rejected:
        await mesh.connect().register(huge)
    assert rejected.value.field == "meta"


async def test_an_instance_is_split_over_several_meta_values(mesh: Mesh) -> None:
    large = replace(worker(None), meta={"notes": 'ü"\\' * 1_000})
    async with mesh.connect().watch(NS) as watch:
        await registered(mesh, watch, large)
        assert watch.current.instances == {large.id: large}


async def test_a_foreign_service_of_the_same_name_is_logged_and_hides_no_instance(
    mesh: Mesh,
) -> None:
    foreign = {"Name": f"kvmesh-{NS}", "ID": "foreign", "Meta": {"json00": "{"}}
    await mesh.http.put("/v1/agent/service/register", json=foreign)
    one = worker(None)
    with capture_logs() as logs:
        async with mesh.connect().watch(NS) as watch:
            await registered(mesh, watch, one)
            assert watch.current.instances == {one.id: one}
    unreadable = [line for line in logs if line["event"] == "registry_entry_unreadable"]
    assert {line["id"] for line in unreadable} == {"foreign"}


async def test_a_watch_ends_at_once_although_its_query_blocks(mesh: Mesh) -> None:
    client = mesh.connect()
    async with client.watch(NS) as watch:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                while True:  # Members of the previous test may still leave.
                    await watch.next()
        started = time.monotonic()
    await client.close()
    assert time.monotonic() - started < RECONCILE_S / 2


async def test_blocking_queries_leave_connections_for_others(mesh: Mesh) -> None:
    client = mesh.connect()
    async with contextlib.AsyncExitStack() as stack:
        for n in range(40):
            await stack.enter_async_context(client.watch(f"{NS}-{n}"))
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(client.snapshot(f"{NS}-{n}") for n in range(40)))


def read(environ: dict[str, str]) -> ServiceConfig:
    config, _ = read_config(ServiceConfig, "ROUTER", environ, [])
    return config


def test_kvmesh_consul_token_overrides_consul_http_token() -> None:
    standard, own = {"CONSUL_HTTP_TOKEN": "t-standard"}, {"KVMESH_CONSUL_TOKEN": "t-own"}
    assert read({}).consul_token is None
    assert read(standard).consul_token == "t-standard"
    assert read(standard | own).consul_token == "t-own"
    assert read(own | {"KVMESH_ROUTER_CONSUL_TOKEN": "t-router"}).consul_token == "t-router"
    assert "t-standard" not in repr(read(standard))


def test_the_health_address_is_the_health_port_or_the_grpc_address() -> None:
    plain = ServiceConfig()
    assert health_check_meta(plain, "w1.example:5000", 6000) == {HEALTH_META_KEY: "w1.example:6000"}
    assert health_check_meta(plain, "[::1]:5000", 6000) == {HEALTH_META_KEY: "[::1]:6000"}
    assert health_check_meta(plain, "w1.example:5000", None) == {HEALTH_META_KEY: "w1.example:5000"}


async def test_the_configuration_opens_a_consul_registry_with_its_token(
    mesh: Mesh,
) -> None:
    update = {"registry": "consul", "consul_url": mesh.agent.url, "consul_token": "t"}
    config = read({}).model_copy(update=update)
    registry = open_registry(config)
    try:
        # An agent without ACLs ignores unknown tokens.
        assert not (await registry.snapshot(NS)).instances
    finally:
        await registry.close()


@contextlib.asynccontextmanager
async def rejecting_server(status: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that returns `status` to every request: its URL and the heads it received."""
    heads: list[bytes] = []

    async def reject(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 6\r\n\r\nreason".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(reject, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        ("403 Forbidden", PermissionDenied, "check consul_token"),
        ("404 Not Found", InvalidRequest, "404 for /v1/health/service/"),
    ],
)
async def test_a_rejected_request_is_an_error_without_a_retry(
    status: str, kind: type[MeshError], text: str
) -> None:
    async with rejecting_server(status) as (url, heads):
        registry = ConsulRegistry(url)
        with pytest.raises(kind, match=text):
            await registry.register(worker(None))
        await registry.close()
    assert len(heads) == 1


@pytest.mark.parametrize("token", [None, "configured"])
async def test_only_the_configured_token_is_sent(
    monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", "from-the-environment")  # py-consul reads it.
    async with rejecting_server("403 Forbidden") as (url, heads):
        registry = ConsulRegistry(url, token=token)
        with pytest.raises(PermissionDenied):
            await registry.register(worker(None))
        await registry.close()
    sent = [line for line in heads[0].decode().lower().split("\r\n") if "consul-token" in line]
    assert sent == ([] if token is None else [f"x-consul-token: {token}"])

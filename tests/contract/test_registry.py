"""One suite for every Registry.

An adapter joins by a class with the shape of `Mesh`, a name in `MESHES` and a case in `mesh`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import struct
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import SystemRandom
from typing import Any, Protocol

import httpx
import pytest
from structlog.testing import capture_logs

from common.errors import Conflict, InvalidRequest, NotFound, Unavailable
from common.registry.adapters import DesiredAdapter
from common.registry.card import Artifact, ModelCard
from common.registry.consul.registry import ConsulRegistry
from common.registry.file import POLL_INTERVAL_S, FileRegistry
from common.registry.instances import Instance, Snapshot, diff_snapshots, new_instance_id
from common.registry.registry import (
    MemoryRegistry,
    MemoryStore,
    Registry,
    Watch,
    desired_adapters,
    remove_adapter,
)
from common.registry.signature import EntrySigner
from tests.contract.consul_agent import ConsulAgent, running_agent
from tests.kit.waiting import WAIT_S, until

NS = "mesh-1"


class Owner(Protocol):
    """A process with a registration."""

    async def kill(self) -> None:
        """End it without clean-up."""


class Mesh(Protocol):
    """One store and its clients. The limits are guarantees of the adapter."""

    closed_within_s: float
    killed_within_s: float

    def connect(self) -> Registry:
        """Another client."""

    async def spawn(self, instance: Instance, *, forks: bool = False) -> Owner:
        """Register from a new process; with `forks`, it forks a child that outlives it."""

    def lose_entry(self, instance: Instance) -> None:
        """Remove a registration without its owner; skips where that is impossible."""

    def damage_card(self, checksum: str) -> None:
        """Change a byte of a stored card."""

    def lose_all(self) -> None:
        """Remove all that is stored; skips where that is impossible."""

    async def close(self) -> None:
        """End all clients and processes."""


# Immediately; at the next poll of a file registry, 50 ms later; or after half a second, if a Consul
# watch pauses after many changes. The rest is for a busy machine.
AT_ONCE_S = 3.0


class MemoryMesh:
    closed_within_s = AT_ONCE_S
    killed_within_s = AT_ONCE_S

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clients: list[MemoryRegistry] = []

    def connect(self) -> Registry:
        self.clients.append(MemoryRegistry(self.store))
        return self.clients[-1]

    async def spawn(self, instance: Instance, *, forks: bool = False) -> Owner:
        client = self.connect()
        await client.register(instance)
        return MemoryOwner(client)

    def lose_entry(self, instance: Instance) -> None:
        pytest.skip("memory cannot be changed from outside")

    def lose_all(self) -> None:
        pytest.skip("memory cannot be changed from outside")

    def damage_card(self, checksum: str) -> None:
        self.store.cards[checksum] = self.store.cards[checksum].replace(b"hermes", b"Hermes")

    async def close(self) -> None:
        for client in self.clients:
            await client.close()


class MemoryOwner:
    def __init__(self, client: Registry) -> None:
        self.client = client

    async def kill(self) -> None:
        await self.client.close()


OWNER_PROGRAM = """
import asyncio, os, sys, time
from pathlib import Path
from common.registry.file import FileRegistry
from common.registry.instances import Instance

async def main(path, raw, forks):
    await FileRegistry(Path(path)).register(Instance.from_json(raw))
    child = os.fork() if forks == "forks" else 0
    if forks == "forks" and child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


class FileMesh:
    closed_within_s = AT_ONCE_S
    killed_within_s = AT_ONCE_S

    def __init__(self, path: Path) -> None:
        self.path = path / "registry"
        self.clients: list[FileRegistry] = []
        self.owners: list[ChildOwner] = []

    def connect(self) -> Registry:
        self.clients.append(FileRegistry(self.path))
        return self.clients[-1]

    async def spawn(self, instance: Instance, *, forks: bool = False) -> Owner:
        owner = await ChildOwner.spawn(OWNER_PROGRAM, str(self.path), instance, forks)
        self.owners.append(owner)
        return owner

    def entry(self, instance: Instance) -> Path:
        return self.path / instance.namespace / "instances" / f"{instance.id:016x}.json"

    def lose_entry(self, instance: Instance) -> None:
        self.entry(instance).unlink()

    def lose_all(self) -> None:
        shutil.rmtree(self.path)

    def damage_card(self, checksum: str) -> None:
        file = self.path / "cards" / f"{checksum}.json"
        file.write_bytes(file.read_bytes().replace(b"hermes", b"Hermes"))

    async def close(self) -> None:
        for owner in self.owners:
            await owner.end()
        for client in self.clients:
            await client.close()


class ChildOwner:
    """A process that has registered. child: pid of its forked child, or 0."""

    def __init__(self, process: asyncio.subprocess.Process, child: int) -> None:
        self.process = process
        self.child = child

    @classmethod
    async def spawn(cls, program: str, store: str, instance: Instance, forks: bool) -> ChildOwner:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            store,
            instance.to_json(),
            "forks" if forks else "alone",
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        return cls(process, int(line))

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    async def end(self) -> None:
        if self.child:
            os.kill(self.child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.communicate()


CONSUL_OWNER_PROGRAM = """
import asyncio, os, sys, time
from common.registry.consul.registry import ConsulRegistry
from common.registry.instances import Instance

async def main(url, raw, forks):
    registry = ConsulRegistry(url, ttl_s=2.0, reconcile_interval_s=0.25)
    await registry.register(Instance.from_json(raw))
    child = os.fork() if forks == "forks" else 0
    if forks == "forks" and child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


class ConsulMesh:
    """Instances without a health address: TTL checks, here of 2 s."""

    closed_within_s = AT_ONCE_S
    killed_within_s = 2.0 + AT_ONCE_S

    def __init__(self, agent: ConsulAgent) -> None:
        self.agent = agent
        self.clients: list[ConsulRegistry] = []
        self.owners: list[ChildOwner] = []

    def connect(self) -> Registry:
        self.clients.append(ConsulRegistry(self.agent.url, ttl_s=2.0, reconcile_interval_s=0.25))
        return self.clients[-1]

    async def spawn(self, instance: Instance, *, forks: bool = False) -> Owner:
        owner = await ChildOwner.spawn(CONSUL_OWNER_PROGRAM, self.agent.url, instance, forks)
        self.owners.append(owner)
        return owner

    def lose_entry(self, instance: Instance) -> None:
        service_id = f"kvmesh-{instance.namespace}-{instance.id:016x}"
        self._put(f"/v1/agent/service/deregister/{service_id}")

    def lose_all(self) -> None:
        self.agent.wipe()

    def damage_card(self, checksum: str) -> None:
        key = f"/v1/kv/kvmesh/cards/{checksum}/0"
        stored = httpx.get(f"{self.agent.url}{key}?raw", trust_env=False).content
        card = zlib.decompress(stored).replace(b"hermes", b"Hermes")
        self._put(key, zlib.compress(card))

    def _put(self, path: str, content: bytes = b"") -> None:
        response = httpx.put(f"{self.agent.url}{path}", content=content, trust_env=False)
        response.raise_for_status()

    async def close(self) -> None:
        for owner in self.owners:
            await owner.end()
        await asyncio.gather(*(client.close() for client in self.clients))
        self.agent.wipe()


MESHES = ("memory", "file", "consul")


@pytest.fixture(scope="session")
def consul_agent() -> Iterator[ConsulAgent]:
    with running_agent() as agent:
        yield agent


@pytest.fixture(params=MESHES)
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mesh]:
    made: Mesh
    match request.param:
        case "memory":
            made = MemoryMesh()
        case "file":
            made = FileMesh(tmp_path)
        case _:
            made = ConsulMesh(request.getfixturevalue("consul_agent"))
    yield made
    await made.close()


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileMesh]:
    made = FileMesh(tmp_path)
    yield made
    await made.close()


def worker(stable_name: str = "", **facts: Any) -> Instance:
    # No process listens on port 1, so probes of this address fail.
    known: dict[str, Any] = {"address": "127.0.0.1:1"}
    return Instance(new_instance_id(SystemRandom()), NS, "worker", stable_name, **(known | facts))


CARD = ModelCard(
    name="Qwen/Qwen3-0.6B",
    tool_call_parser="hermes",
    artifacts={"tokenizer.json": Artifact.of(b"x" * 100_000)},
)


async def seen(
    watch: Watch, condition: Callable[[Snapshot], bool], within_s: float = WAIT_S
) -> Snapshot:
    """The first snapshot for which `condition` holds."""
    try:
        async with asyncio.timeout(within_s):
            while not condition(watch.current):
                await watch.next()
    except TimeoutError:
        pytest.fail(f"not seen within {within_s} s, but {list(watch.current.instances.values())}")
    return watch.current


async def settled(registry: Registry, *expected: Instance, namespace: str = NS) -> Snapshot:
    """The snapshot with exactly these members, once the store has it."""
    expected_by_id = {i.id: i for i in expected}

    async def has_settled() -> Snapshot | None:
        members = await registry.snapshot(namespace)
        return members if members.instances == expected_by_id else None

    members = await until(has_settled, f"the registry has {expected_by_id}")
    assert members is not None
    return members


async def test_another_client_sees_all_fields_of_a_registered_instance(mesh: Mesh) -> None:
    one = worker("w", model="m", taints=frozenset({"t"}), meta={"zone": "a"}, total_kv_blocks=7)
    async with mesh.connect().watch(NS) as watch:
        assert not watch.current.instances
        lease = await mesh.connect().register(one)
        members = await seen(watch, lambda s: one.id in s.instances)
    assert members.instances == {one.id: one}
    assert lease.instance == one


async def test_a_new_watch_has_the_instances_registered_before(mesh: Mesh) -> None:
    registry = mesh.connect()
    one = worker()
    await registry.register(one)
    await settled(mesh.connect(), one)
    async with registry.watch(NS) as own, mesh.connect().watch(NS) as other:
        assert own.current.instances == other.current.instances == {one.id: one}


async def test_an_instance_leaves_at_once_when_its_lease_closes(mesh: Mesh) -> None:
    lease = await mesh.connect().register(worker())
    async with mesh.connect().watch(NS) as watch:
        await seen(watch, lambda s: bool(s.instances))
        await lease.close()
        await seen(watch, lambda s: not s.instances, mesh.closed_within_s)
    await lease.close()


async def test_closing_a_registry_ends_its_leases_and_only_those(mesh: Mesh) -> None:
    closing, remaining = mesh.connect(), mesh.connect()
    await closing.register(worker())
    await closing.register(worker())
    other = worker()
    await remaining.register(other)
    await closing.close()
    await settled(remaining, other)
    await closing.close()


async def test_a_closed_registry_refuses_work_and_wakes_its_watches(mesh: Mesh) -> None:
    registry = mesh.connect()
    async with registry.watch(NS) as watch:
        waiting = asyncio.ensure_future(watch.next())
        await asyncio.wait((waiting,), timeout=0.001)
        await registry.close()
        with pytest.raises(Unavailable, match="closed"):
            await asyncio.wait_for(waiting, WAIT_S)
    with pytest.raises(Unavailable, match="closed"):
        await registry.register(worker())
    with pytest.raises(Unavailable, match="closed"):
        await registry.snapshot(NS)


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a forked child alive"])
async def test_the_instance_of_a_killed_process_leaves_in_time(mesh: Mesh, forks: bool) -> None:
    one, other = worker(), worker()
    owner = await mesh.spawn(one, forks=forks)
    await mesh.connect().register(other)
    async with mesh.connect().watch(NS) as watch:
        await seen(watch, lambda s: len(s.instances) == 2)
        await owner.kill()
        members = await seen(watch, lambda s: one.id not in s.instances, mesh.killed_within_s)
    assert members.instances == {other.id: other}


@pytest.mark.slow
async def test_a_supervisor_can_deregister_its_dead_child_twice(mesh: Mesh) -> None:
    one = worker()
    supervisor = mesh.connect()
    owner = await mesh.spawn(one)
    await settled(supervisor, one)
    await owner.kill()
    await supervisor.deregister(NS, one.id)
    await supervisor.deregister(NS, one.id)
    await settled(supervisor)


async def test_deregistering_an_unknown_id_changes_nothing(mesh: Mesh) -> None:
    registry = mesh.connect()
    one = worker()
    await registry.register(one)
    before = await settled(registry, one)
    await registry.deregister(NS, one.id ^ 1)
    assert await registry.snapshot(NS) == before


async def test_an_update_is_seen_as_a_change(mesh: Mesh) -> None:
    one = worker()
    lease = await mesh.connect().register(one)
    async with mesh.connect().watch(NS) as watch:
        before = await seen(watch, lambda s: one.id in s.instances)
        slow = replace(one, taints=frozenset({"slow"}))
        await lease.update(slow)
        after = await seen(watch, lambda s: bool(s.instances[one.id].taints))
    assert lease.instance == slow
    changes = diff_snapshots(before, after)
    assert (changes.joined, changes.left, changes.changed) == ((), (), (slow,))


async def test_an_instance_is_never_missing_while_it_is_updated(mesh: Mesh) -> None:
    one = worker()
    lease = await mesh.connect().register(one)
    watcher = mesh.connect()
    await settled(watcher, one)
    for n in range(200):
        await lease.update(replace(one, pid=n + 1))
        assert one.id in (await watcher.snapshot(NS)).instances
    await settled(watcher, replace(one, pid=200))


async def test_an_update_cannot_change_the_identity_of_an_instance(mesh: Mesh) -> None:
    one = worker("a")
    lease = await mesh.connect().register(one)
    for name, value in {
        "id": one.id ^ 1,
        "namespace": "x",
        "service": "router",
        "stable_name": "b",
    }.items():
        with pytest.raises(InvalidRequest) as rejected:
            await lease.update(replace(one, **{name: value}))  # type: ignore[arg-type]
        assert rejected.value.field == name
    assert lease.instance == one


async def test_a_closed_lease_cannot_be_updated(mesh: Mesh) -> None:
    registry = mesh.connect()
    one = worker()
    lease = await registry.register(one)
    await lease.close()
    with pytest.raises(Conflict, match="closed"):
        await lease.update(one)
    await settled(registry)


async def test_an_id_is_registered_once(mesh: Mesh) -> None:
    first, second = mesh.connect(), mesh.connect()
    one = worker()
    await first.register(one)
    for registry in (first, second):
        with pytest.raises(Conflict) as rejected:
            await registry.register(one)
        assert (rejected.value.reason, rejected.value.field) == ("INSTANCE_EXISTS", "id")


async def test_two_watches_see_the_same_members_independently(mesh: Mesh) -> None:
    registry = mesh.connect()
    one, two = worker(), worker()
    async with registry.watch(NS) as eager, registry.watch(NS) as lazy:
        await registry.register(one)
        await seen(eager, lambda s: len(s.instances) == 1)
        assert not lazy.current.instances
        await registry.register(two)
        await seen(eager, lambda s: len(s.instances) == 2)
        await seen(lazy, lambda s: s.instances == eager.current.instances)


async def test_changes_coalesce_for_a_slow_reader(mesh: Mesh) -> None:
    registry = mesh.connect()
    async with registry.watch(NS) as watch:
        leases = [await registry.register(worker()) for _ in range(10)]
        for lease in leases[1:]:
            await lease.close()
        remaining = leases[0].instance
        await settled(mesh.connect(), remaining)
        steps = 0
        # Ends: after the third step.
        while watch.current.instances != {remaining.id: remaining}:
            await asyncio.wait_for(watch.next(), WAIT_S)
            steps += 1
            assert steps <= 3, "nineteen changes did not coalesce"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.next(), 0.15)


async def test_revisions_grow_with_each_change_and_only_then(mesh: Mesh) -> None:
    registry = mesh.connect()
    empty = await settled(registry)
    one = worker()
    lease = await registry.register(one)
    joined = await settled(registry, one)
    assert (await registry.snapshot(NS)).revision == joined.revision
    two = replace(one, pid=4)
    await lease.update(two)
    changed = await settled(registry, two)
    await lease.close()
    left = await settled(registry)
    assert empty.revision < joined.revision < changed.revision < left.revision


async def test_a_namespace_that_was_read_and_is_empty_has_revision_one(
    mesh: Mesh,
) -> None:
    registry = mesh.connect()
    empty = await registry.snapshot(NS)
    assert (empty.revision, empty.instances) == (1, {})
    async with registry.watch(NS) as watch:
        assert watch.current.revision == 1


async def test_namespaces_do_not_see_each_other(mesh: Mesh) -> None:
    registry = mesh.connect()
    one = worker()
    await registry.register(one)
    await settled(registry, one)
    await settled(registry, namespace="mesh-2")
    with pytest.raises(InvalidRequest) as rejected:
        await registry.snapshot("../mesh-1")
    assert rejected.value.field == "namespace"


async def test_a_new_incarnation_supersedes_a_living_predecessor(mesh: Mesh) -> None:
    first, second = mesh.connect(), mesh.connect()
    old, new, bystander = worker("w0"), worker("w0"), worker("w1")
    old_lease = await first.register(old)
    await first.register(bystander)
    await settled(second, old, bystander)
    await second.register(new)
    await settled(first, new, bystander)
    # Neither an update nor the end of the old incarnation changes which one is the newest.
    await old_lease.update(replace(old, pid=9))
    await settled(second, new, bystander)
    await settled(mesh.connect(), new, bystander)
    await old_lease.close()
    await settled(second, new, bystander)


async def test_fifty_concurrent_registrations_are_all_seen(mesh: Mesh) -> None:
    workers = [worker(f"w{n}", model="m", card_checksum=CARD.checksum) for n in range(50)]
    clients = [mesh.connect() for _ in range(5)]
    async with mesh.connect().watch(NS) as watch:
        await asyncio.gather(*(clients[n % 5].register(w) for n, w in enumerate(workers)))
        members = await seen(watch, lambda s: len(s.instances) == 50)
    assert members.instances == {w.id: w for w in workers}


@pytest.mark.slow
async def test_three_hundred_processes_can_register_at_once(mesh: Mesh) -> None:
    workers = [worker(f"w{n}", model="m", card_checksum=CARD.checksum) for n in range(300)]
    clients = [mesh.connect() for _ in workers]
    async with asyncio.timeout(WAIT_S):
        pairs = zip(clients, workers, strict=True)
        await asyncio.gather(*(client.register(one) for client, one in pairs))
    members = await settled(clients[0], *workers)
    assert len(members.instances) == 300


async def test_any_client_finds_a_card_by_its_checksum(mesh: Mesh) -> None:
    await mesh.connect().put_card(CARD)
    await mesh.connect().put_card(CARD)
    assert await mesh.connect().get_card(CARD.checksum) == CARD


async def test_a_missing_card_is_an_error_that_names_the_key(mesh: Mesh) -> None:
    with pytest.raises(NotFound, match=f"cards/{CARD.checksum}"):
        await mesh.connect().get_card(CARD.checksum)


async def test_desired_adapters_are_read_by_all_clients_until_they_are_removed(mesh: Mesh) -> None:
    writer, reader = mesh.connect(), mesh.connect()
    assert await desired_adapters(reader, NS) == ()
    french = DesiredAdapter("french", "m", "file:///french", copies=2, copies_max=4)
    for adapter in (french, DesiredAdapter("basque", "m")):
        await writer.put_adapter(NS, adapter)
    assert await desired_adapters(reader, NS) == (DesiredAdapter("basque", "m"), french)
    assert await desired_adapters(reader, "other") == ()
    await reader.put_adapter(NS, replace(french, copies=3))
    assert await remove_adapter(writer, NS, "basque")
    assert not await remove_adapter(writer, NS, "basque")
    assert await desired_adapters(reader, NS) == (replace(french, copies=3),)
    assert (await reader.snapshot(NS)).instances == {}


async def test_a_desired_adapter_without_the_signature_of_the_mesh_is_left_out(
    files: FileMesh,
) -> None:
    signer = EntrySigner("secret")
    registry = FileRegistry(files.path, signer=signer)
    await files.connect().put_adapter(NS, DesiredAdapter("forged", "m"))
    await registry.put_adapter(NS, DesiredAdapter("signed", "m"))
    (files.path / NS / "adapters" / "ignored.txt").write_text("{}")
    with capture_logs() as logs:
        for _ in range(2):
            assert await desired_adapters(registry, NS) == (DesiredAdapter("signed", "m"),)
    assert [one["event"] for one in logs] == ["adapter_document_refused"]
    source = files.path / NS / "adapters"
    shutil.copytree(source, files.path / "other" / "adapters")
    assert await desired_adapters(registry, "other") == (), "a document is of one namespace"
    await registry.close()


async def test_a_damaged_card_is_rejected(mesh: Mesh) -> None:
    registry = mesh.connect()
    await registry.put_card(CARD)
    mesh.damage_card(CARD.checksum)
    with pytest.raises(InvalidRequest) as rejected:
        await registry.get_card(CARD.checksum)
    assert rejected.value.field == "checksum"


async def test_another_card_for_a_served_model_is_a_conflict_with_details(mesh: Mesh) -> None:
    registry = mesh.connect()
    first = worker("w0", model="m", card_checksum="c1")
    await registry.register(first)
    candidate = worker("w1", model="m", card_checksum="c2")
    with pytest.raises(Conflict) as rejected:
        await mesh.connect().register(candidate)
    assert rejected.value.reason == "CARD_CONFLICT"
    assert rejected.value.metadata == {"model": "m", "served_checksum": "c1"}
    assert "c2" in rejected.value.message
    await settled(registry, first)
    # Another model, another namespace and the same card are accepted.
    await registry.register(replace(candidate, model="n"))
    await registry.register(replace(candidate, id=candidate.id ^ 1, namespace="mesh-2"))
    await registry.register(worker("w2", model="m", card_checksum="c1"))


async def test_an_update_to_a_conflicting_card_changes_nothing(mesh: Mesh) -> None:
    registry = mesh.connect()
    one, two = worker(model="m", card_checksum="c1"), worker(model="n", card_checksum="c2")
    await registry.register(one)
    lease = await registry.register(two)
    with pytest.raises(Conflict, match="c1"):
        await lease.update(replace(two, model="m"))
    assert lease.instance == two
    await settled(registry, one, two)


async def test_a_model_can_have_another_card_once_its_last_instance_has_left(mesh: Mesh) -> None:
    registry = mesh.connect()
    one, two = (worker(model="m", card_checksum="c1") for _ in range(2))
    first, last = await registry.register(one), await registry.register(two)
    candidate = worker(model="m", card_checksum="c2")
    await first.close()
    await settled(registry, two)
    with pytest.raises(Conflict):
        await registry.register(candidate)
    await last.close()
    await settled(registry)
    await registry.register(candidate)
    await settled(registry, candidate)


@pytest.mark.slow
async def test_the_card_of_a_killed_worker_does_not_block_its_model(mesh: Mesh) -> None:
    registry = mesh.connect()
    owner = await mesh.spawn(worker(model="m", card_checksum="c1"))
    candidate = worker(model="m", card_checksum="c2")
    with pytest.raises(Conflict):
        await registry.register(candidate)
    await owner.kill()

    async def is_admitted() -> bool:
        with contextlib.suppress(Conflict):
            await registry.register(candidate)
            return True
        return False

    await until(is_admitted, "the name is free")


async def test_of_concurrent_registrations_with_different_cards_one_succeeds(mesh: Mesh) -> None:
    clients = [mesh.connect() for _ in range(4)]
    candidates = [worker(model="m", card_checksum=f"c{n}") for n in range(4)]
    outcomes = await asyncio.gather(
        *(c.register(w) for c, w in zip(clients, candidates, strict=True)), return_exceptions=True
    )
    rejected = [o for o in outcomes if isinstance(o, BaseException)]
    assert len(rejected) == 3
    assert all(isinstance(o, Conflict) for o in rejected)
    (winner,) = (w for w, o in zip(candidates, outcomes, strict=True) if o not in rejected)
    await settled(clients[0], winner)


async def test_an_owner_restores_its_deleted_entry(mesh: Mesh) -> None:
    one = worker()
    await mesh.connect().register(one)
    await settled(mesh.connect(), one)
    mesh.lose_entry(one)

    # A new client has no held entries: it reads only the store.
    async def is_back() -> bool:
        return one.id in (await mesh.connect().snapshot(NS)).instances

    await until(is_back, "the entry is back")


async def test_owners_restore_entry_and_card_of_a_store_that_lost_everything(mesh: Mesh) -> None:
    first, second = mesh.connect(), mesh.connect()
    one, two = (worker(model="m", card_checksum=CARD.checksum) for _ in range(2))
    for registry, instance in ((first, one), (second, two)):
        await registry.put_card(CARD)
        await registry.register(instance)
    mesh.lose_all()
    reader = mesh.connect()

    async def are_back() -> bool:
        return (await reader.snapshot(NS)).instances.keys() >= {one.id, two.id}

    async def is_stored() -> bool:
        with contextlib.suppress(NotFound):
            return await reader.get_card(CARD.checksum) == CARD
        return False

    await until(are_back, "the entries are back")
    await until(is_stored, "the card is back")


# Faults of the file registry only.


async def test_a_watch_keeps_its_members_while_the_directory_is_deleted(files: FileMesh) -> None:
    one, two = worker(), worker()
    lease = await files.connect().register(one)
    await files.connect().register(two)
    watcher = files.connect()
    before = await watcher.snapshot(NS)
    shutil.rmtree(files.path)
    assert await watcher.snapshot(NS) is before
    # Without the directory, liveness still follows from the locks.
    await lease.close()
    assert set((await watcher.snapshot(NS)).instances) == {two.id}

    async def is_back() -> bool:
        return set((await files.connect().snapshot(NS)).instances) == {two.id}

    await until(is_back, "the living owner is back")
    assert set((await watcher.snapshot(NS)).instances) == {two.id}


async def test_an_instance_above_the_entry_size_limit_is_rejected(files: FileMesh) -> None:
    registry = files.connect()
    loras = frozenset(f"{n:05}{'x' * 100}" for n in range(12_000))
    with pytest.raises(InvalidRequest, match="too large: "):
        await registry.register(worker(loras=loras))
    lease = await registry.register(worker())
    with pytest.raises(InvalidRequest):
        await lease.update(replace(lease.instance, loras=loras))
    assert (await registry.snapshot(NS)).instances == {lease.instance.id: lease.instance}


async def test_a_directory_that_cannot_be_read_gives_revision_zero(files: FileMesh) -> None:
    (files.path / NS).mkdir(parents=True)
    (files.path / NS / "instances").write_text("no directory")
    registry = files.connect()
    with capture_logs():
        assert (await registry.snapshot(NS)).revision == 0
    assert not registry.is_reachable


async def test_the_loss_and_the_recovery_of_a_registration_are_each_logged_once(
    files: FileMesh,
) -> None:
    one, registry = worker(), files.connect()
    await registry.register(one)
    states = [registry.is_reachable]
    with capture_logs() as logs:
        shutil.rmtree(files.path)
        files.path.write_text("in the way")

        async def is_noticed() -> bool:
            return any(line["event"] == "registration_lost" for line in logs)

        await until(is_noticed, "the loss is logged")
        states.append(registry.is_reachable)
        files.path.unlink()

        async def is_back() -> bool:
            return files.entry(one).exists()

        await until(is_back, "the entry is back")
        states.append(registry.is_reachable)
    assert states == [True, False, True]
    events = [line["event"] for line in logs]
    assert events == ["registration_lost", "registration_restored"]


async def test_a_directory_that_cannot_be_created_is_unavailable(files: FileMesh) -> None:
    files.path.write_text("in the way")
    with pytest.raises(Unavailable, match="cannot write"):
        await files.connect().register(worker())
    with pytest.raises(Unavailable, match="cannot write"):
        await files.connect().put_card(CARD)


async def test_invalid_files_are_logged_once_and_hide_no_instance(files: FileMesh) -> None:
    one, broken, alien = worker(), worker(), worker()
    registry = files.connect()
    await registry.register(one)
    for each in (broken, alien):
        await registry.register(each)
    # In place, so that the owner's lock stays on them.
    files.entry(broken).write_bytes(b'{"order":1,"instance":{"id":')
    files.entry(alien).write_bytes(files.entry(one).read_bytes())
    (files.entry(one).parent / "README.txt").write_text("hello")
    watcher = files.connect()
    with capture_logs() as logs:
        for _ in range(3):
            assert (await watcher.snapshot(NS)).instances == {one.id: one}
            (files.entry(one).parent / ".touch").touch()
    named = sorted((line["event"], line["path"]) for line in logs)
    assert named == [
        ("registry_entry_unreadable", files.entry(each).name)
        for each in sorted((broken, alien), key=lambda i: i.id)
    ] + [("registry_file_ignored", "README.txt")]


@pytest.mark.row("S0-19", "S0-26")
@pytest.mark.parametrize(
    ("raw", "shown"), [(b"{not json", "{not json"), (b"\xff\xfe", "<not UTF-8>")]
)
async def test_an_unreadable_entry_is_logged_with_name_and_text_and_the_next_is_read(
    files: FileMesh, raw: bytes, shown: str
) -> None:
    registry, watcher = files.connect(), files.connect()
    await registry.register(broken := worker())
    files.entry(broken).write_bytes(raw)  # In place, so that the lock stays on the file.
    with capture_logs() as logs:
        assert not (await watcher.snapshot(NS)).instances
        await watcher.register(one := worker())
        assert (await watcher.snapshot(NS)).instances == {one.id: one}
    (line,) = logs
    assert (line["event"], line["path"], line["value"]) == (
        "registry_entry_unreadable",
        files.entry(broken).name,
        shown,
    )
    assert "JSON" in line["error"]


async def test_an_unlocked_entry_is_removed_because_its_owner_is_dead(files: FileMesh) -> None:
    one, dead = worker(), worker()
    await files.connect().register(one)
    files.entry(dead).write_bytes(b'{"order":1,"instance":%s}' % dead.to_json())
    assert (await files.connect().snapshot(NS)).instances == {one.id: one}
    assert not files.entry(dead).exists()
    assert files.entry(one).exists()


async def test_a_deregistered_entry_is_gone_even_if_it_is_still_locked(files: FileMesh) -> None:
    one = worker()
    registry, watcher = files.connect(), files.connect()
    await registry.register(one)
    assert one.id in (await watcher.snapshot(NS)).instances
    await watcher.deregister(NS, one.id)
    # Without an await, the owner in this process cannot have restored its entry yet.
    assert one.id not in (await watcher.snapshot(NS)).instances

    async def is_back() -> bool:
        return one.id in (await watcher.snapshot(NS)).instances

    await until(is_back, "a live owner restores its entry")


async def test_old_hidden_files_of_dead_owners_are_removed(files: FileMesh) -> None:
    registry = files.connect()
    await registry.register(worker())
    directory = files.path / NS / "instances"
    old, young = directory / ".0000000000000001.json.a", directory / ".0000000000000002.json.b"
    for hidden in (old, young):
        hidden.touch()
    os.utime(old, (1, 1))
    await registry.snapshot(NS)
    assert not old.exists()
    assert young.exists()


async def test_a_damaged_card_is_repaired_by_the_next_owner(files: FileMesh) -> None:
    registry = files.connect()
    await registry.put_card(CARD)
    files.damage_card(CARD.checksum)
    await registry.put_card(CARD)
    assert await registry.get_card(CARD.checksum) == CARD


async def test_a_checksum_that_is_a_path_is_rejected(files: FileMesh) -> None:
    with pytest.raises(InvalidRequest) as rejected:
        await files.connect().get_card("../../etc/passwd")
    assert rejected.value.field == "card_checksum"


async def test_a_change_that_leaves_the_directorys_mtime_unchanged_is_seen(
    files: FileMesh,
) -> None:
    one, two = worker(), worker()
    registry, watcher = files.connect(), files.connect()
    await registry.register(one)
    directory = files.entry(one).parent
    # The second change leaves the same mtime as the first.
    stamp = time.time_ns() + 10_000_000_000
    os.utime(directory, ns=(stamp, stamp))
    assert set((await watcher.snapshot(NS)).instances) == {one.id}
    await registry.register(two)
    os.utime(directory, ns=(stamp, stamp))
    assert set((await watcher.snapshot(NS)).instances) == {one.id, two.id}


@contextlib.contextmanager
def card_check_held(files: FileMesh) -> Iterator[None]:
    gate = files.path / NS / "models" / "m"
    gate.parent.mkdir(parents=True)
    with gate.open("wb") as file:
        # struct flock: write lock on the whole file, by this open file description.
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
        yield


async def test_the_watches_of_one_client_share_its_polls(
    files: FileMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists, scandir = 0, os.scandir

    def counted(path: Path) -> object:
        nonlocal lists
        lists += 1
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    client, polls = files.connect(), 10
    async with contextlib.AsyncExitStack() as stack:
        watches = [await stack.enter_async_context(client.watch(NS)) for _ in range(20)]
        opened = lists
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(polls * POLL_INTERVAL_S):
                await asyncio.gather(*(watch.next() for watch in watches))
    assert 0 < lists - opened <= 3 * polls


async def test_a_registration_waits_while_the_card_of_another_is_checked(files: FileMesh) -> None:
    one = worker(model="m", card_checksum="c")
    registry = files.connect()
    with card_check_held(files):
        # Without a card there is nothing to wait for.
        await registry.register(other := worker())
        waiting = asyncio.ensure_future(registry.register(one))
        await asyncio.wait((waiting,), timeout=0.05)
        assert not waiting.done()
        await settled(registry, other)
    await asyncio.wait_for(waiting, WAIT_S)
    await settled(registry, other, one)


async def test_a_registration_fails_if_another_holds_the_card_check_too_long(
    files: FileMesh,
) -> None:
    registry = FileRegistry(files.path, card_check_wait_s=0.02)
    files.clients.append(registry)
    with (
        card_check_held(files),
        pytest.raises(Unavailable, match="another registration") as rejected,
    ):
        await registry.register(worker(model="m", card_checksum="c"))
    assert rejected.value.retry_after_s


@pytest.mark.slow
async def test_an_instance_is_never_missing_while_another_thread_updates_it(
    files: FileMesh,
) -> None:
    one = worker()
    ready = threading.Event()

    async def update_often() -> None:
        registry = FileRegistry(files.path)
        lease = await registry.register(one)
        ready.set()
        for n in range(1000):
            await lease.update(replace(one, pid=n + 1))
        await asyncio.sleep(0)
        finished.set()
        await asyncio.to_thread(checked.wait, WAIT_S)
        await registry.close()

    finished, checked = threading.Event(), threading.Event()
    owner = threading.Thread(target=lambda: asyncio.run(update_often()))
    owner.start()
    try:
        assert await asyncio.to_thread(ready.wait, WAIT_S)
        watcher = files.connect()
        missing_count = 0
        async with asyncio.timeout(WAIT_S):
            while not finished.is_set():
                missing_count += one.id not in (await watcher.snapshot(NS)).instances
        assert missing_count == 0
        await settled(watcher, replace(one, pid=1000))
    finally:
        checked.set()
        await asyncio.to_thread(owner.join, WAIT_S)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
async def test_no_file_descriptor_leaks(files: FileMesh) -> None:
    before = open_descriptors()
    registry = files.connect()
    async with registry.watch(NS) as watch:
        for n in range(100):
            lease = await registry.register(worker(model="m", card_checksum=f"c{n}"))
            await lease.update(replace(lease.instance, pid=n + 1))
            await registry.snapshot(NS)
            await lease.close()
        await seen(watch, lambda s: not s.instances)
    await registry.close()
    assert open_descriptors() <= before, "fewer if other objects were closed meanwhile"
    assert not os.listdir(files.path / NS / "instances")

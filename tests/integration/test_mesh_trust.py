"""What a process without the mesh token gets from a mesh that has one: through running services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from common.errors import MeshError, Unauthenticated
from common.registry.consul.entries import registration
from common.registry.consul.registry import ConsulRegistry
from common.registry.file import FileRegistry
from common.registry.file_lock import acquire_lock
from common.registry.instances import Instance, Service, new_instance_id
from common.registry.registry import Registry
from common.registry.signature import UNSIGNED, EntrySigner
from common.rpc import channel as rpc
from common.rpc.status import map_rpc_errors
from common.rpc.stream import open_stream
from common.runtime.member_key import MemberKey, MemberKeys
from common.runtime.mesh_auth import (
    CALL_VALID_S,
    ENTRY_RENEWED_AFTER_S,
    ENTRY_VALID_S,
    MeshSecret,
)
from tests.contract.consul_agent import ConsulAgent, running_agent
from tests.kit.processes import MODEL
from tests.kit.processes import Service as Process
from tests.kit.waiting import until, wait_for

TOKEN = "the secret of the mesh, 32 bytes"
WITH_TOKEN = rpc.Security(token=TOKEN)
NS = "default"
RNG = Random(15)
WAIT_S = 10.0


@dataclass
class Rogue:
    """A gRPC server without the token that takes every call. received: metadata and messages."""

    received: list[str] = field(default_factory=list)
    address: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Rogue]:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self,))  # type: ignore[arg-type]
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self
        finally:
            await server.stop(None)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if "Health" not in details.method:
            self.received += [details.method, repr(details.invocation_metadata)]

        async def take(requests: AsyncIterator[bytes], context: Any) -> None:
            await context.send_initial_metadata(())
            async for request in requests:
                self.received.append(repr(request))

        return grpc.stream_stream_rpc_method_handler(take)

    def instance(self, service: Service) -> Instance:
        return Instance(
            new_instance_id(RNG), NS, service, "", self.address, model=MODEL, kv_index="events"
        )


@pytest.fixture(scope="module")
def consul() -> Iterator[ConsulAgent]:
    with running_agent() as agent:
        yield agent


def file_registry(folder: Path, token: str | None = None, **options: Any) -> FileRegistry:
    return FileRegistry(folder, signer=EntrySigner(token, **options))


async def members(registry: Registry) -> set[int]:
    try:
        return set((await registry.snapshot(NS)).instances)
    finally:
        await registry.close()


# Services


def has_refused_or_called(process: Process, rogue: Rogue) -> bool:
    return process.log_path.read_text().count("is not signed") >= 4 or bool(rogue.received)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["file", "consul"])
async def test_a_rogue_member_gets_no_call_from_frontend_router_and_worker(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "registry"
    if store == "consul":
        url = request.getfixturevalue("consul").url
        flags = ["--registry=consul", f"--consul-url={url}"]
        registry: Registry = ConsulRegistry(url)
    else:
        flags = [f"--registry-path={folder}"]
        registry = FileRegistry(folder)
    flags += [f"--mesh-token={TOKEN}", "--notice-s=0", "--drain-s=0"]
    async with Rogue().serving() as rogue:
        for service in ("worker", "router", "indexer", "frontend"):
            await registry.register(rogue.instance(service))
        processes = [
            Process("worker", flags, tmp_path, "worker"),
            Process("router", flags, tmp_path, "router"),
            Process("frontend", flags, tmp_path, "frontend"),
        ]
        try:
            for process in processes:
                await asyncio.to_thread(process.wait_ready)
                await asyncio.to_thread(
                    wait_for, partial(has_refused_or_called, process, rogue), "all are refused"
                )
        finally:
            for process in processes:
                process.kill()
                process.close()
            await registry.close()
    assert rogue.received == []


@pytest.mark.slow
# Entries


async def test_a_member_sees_only_entries_that_the_token_signed(tmp_path: Path) -> None:
    signed, unsigned, other = (
        file_registry(tmp_path, token) for token in (TOKEN, None, "another token")
    )
    instances = [Rogue(address="127.0.0.1:1").instance("worker") for _ in range(3)]
    for owner, instance in zip((signed, unsigned, other), instances, strict=True):
        await owner.register(instance)
    assert await members(file_registry(tmp_path, TOKEN)) == {instances[0].id}
    assert await members(file_registry(tmp_path)) == {one.id for one in instances}
    for owner in (signed, unsigned, other):
        await owner.close()


@pytest.mark.parametrize("store", ["file", "consul"])
async def test_a_member_sees_whether_there_are_entries_that_its_token_did_not_sign(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def connect(token: str | None) -> Registry:
        if store == "file":
            return file_registry(tmp_path, token)
        return ConsulRegistry(request.getfixturevalue("consul").url, signer=EntrySigner(token))

    namespace = f"signed-{store}"
    registries = {token: connect(token) for token in (TOKEN, "another token", None)}

    async def seen() -> list[bool]:
        found = [await one.snapshot(namespace) for one in registries.values()]
        return [snapshot.has_unauthenticated for snapshot in found]

    assert await seen() == [False] * 3
    instance = replace(Rogue(address="127.0.0.1:1").instance("worker"), namespace=namespace)
    lease = await registries[TOKEN].register(instance)
    assert await seen() == [False, True, False]
    await lease.close()
    assert await seen() == [False] * 3
    for registry in registries.values():
        await registry.close()


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"127.0.0.1:1", b"127.0.0.1:2"), (b'"decode"', b'"prefill"'), (b'"order":', b'"order":9')],
)
async def test_a_changed_entry_is_no_member(tmp_path: Path, old: bytes, new: bytes) -> None:
    owner = file_registry(tmp_path, TOKEN)
    instance = replace(Rogue(address="127.0.0.1:1").instance("worker"), role="decode")
    await owner.register(instance)
    path = tmp_path / NS / "instances" / f"{instance.id:016x}.json"
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    assert await members(file_registry(tmp_path, TOKEN)) == set()
    await owner.close()


async def test_a_signed_entry_of_another_namespace_is_no_member(tmp_path: Path) -> None:
    owner = file_registry(tmp_path, TOKEN)
    instance = Rogue(address="127.0.0.1:1").instance("worker")
    await owner.register(instance)
    copy = tmp_path / "other" / "instances" / f"{instance.id:016x}.json"
    copy.parent.mkdir(parents=True)
    copy.write_bytes((tmp_path / NS / "instances" / copy.name).read_bytes())
    with copy.open("r+b") as file:
        acquire_lock(file.fileno())
        watcher = file_registry(tmp_path, TOKEN)
        assert not (await watcher.snapshot("other")).instances
        await watcher.close()
    await owner.close()


async def test_an_expired_entry_is_no_member_and_the_owner_renews_it_before(tmp_path: Path) -> None:
    now = [1000.0]
    owner = FileRegistry(tmp_path, signer=EntrySigner(TOKEN, lambda: now[0]), poll_interval_s=0.01)
    instance = Rogue(address="127.0.0.1:1").instance("worker")
    await owner.register(instance)
    path = tmp_path / NS / "instances" / f"{instance.id:016x}.json"
    first = path.read_bytes()
    late = 1000.0 + ENTRY_VALID_S + 2
    assert await members(file_registry(tmp_path, TOKEN, now_s=lambda: late)) == set()
    now[0] += ENTRY_RENEWED_AFTER_S + 1
    await until(lambda: path.read_bytes() != first, "the entry is renewed")
    assert await members(file_registry(tmp_path, TOKEN, now_s=lambda: late)) == {instance.id}
    await owner.close()


async def test_consul_entries_are_renewed_and_each_is_checked_once(consul: ConsulAgent) -> None:
    consul.wipe()
    now = [1000.0]
    checked: list[str] = []

    class Counting(EntrySigner):
        def check(self, text: bytes, signature: str) -> None:
            checked.append(signature)
            super().check(text, signature)

    owner = ConsulRegistry(
        consul.url, signer=EntrySigner(TOKEN, lambda: now[0]), reconcile_interval_s=0.05
    )
    rogue = ConsulRegistry(consul.url)
    watcher = ConsulRegistry(consul.url, signer=Counting(TOKEN, lambda: 1000.0))
    instance = Rogue(address="127.0.0.1:1").instance("worker")
    await owner.register(instance)
    await rogue.register(replace(instance, id=new_instance_id(RNG)))
    for _ in range(5):
        assert set((await watcher.snapshot(NS)).instances) == {instance.id}
    assert len([one for one in checked if one]) == 1
    now[0] += ENTRY_RENEWED_AFTER_S + 1

    async def is_renewed() -> bool:
        assert set((await watcher.snapshot(NS)).instances) == {instance.id}
        return len(set(checked)) >= 3

    await until(is_renewed, "the entry is renewed and checked")
    for one in (owner, rogue, watcher):
        await one.close()


# Entries of members with a key


def keyed(key: MemberKey | None) -> EntrySigner:
    """The signer of a process with the token; key: its own."""
    return EntrySigner(TOKEN, members=MemberKeys(key, is_required=True))


class _Forger(EntrySigner):
    """Writes the entry of any instance: with a proof of its own key, or with none."""

    def __init__(self, key: MemberKey | None) -> None:
        super().__init__(TOKEN)
        self._key = key

    def seal(self, instance: Instance) -> bytes:
        raw = instance.to_json()
        return raw if self._key is None else self._key.seal(raw)


@pytest.mark.parametrize("store", ["file", "consul"])
@pytest.mark.parametrize("has_key", [True, False])
async def test_a_member_cannot_write_the_entry_of_another_one(
    store: str, has_key: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if store == "consul":
        agent = request.getfixturevalue("consul")
        agent.wipe()
        open_store: Any = partial(ConsulRegistry, agent.url)
    else:
        open_store = partial(FileRegistry, tmp_path)
    key, thief = MemberKey(), MemberKey()
    instance = replace(Rogue(address="127.0.0.1:1").instance("worker"), id=key.id)
    forger = open_store(signer=_Forger(thief if has_key else None))
    await forger.register(replace(instance, address="127.0.0.1:2"))
    assert await members(open_store(signer=keyed(thief))) == set()
    await forger.close()
    owner = open_store(signer=keyed(key))
    await owner.register(instance)
    assert await members(open_store(signer=keyed(thief))) == {key.id}
    # A process of an earlier version ignores the proof.
    assert await members(open_store(signer=EntrySigner(TOKEN))) == {key.id}
    await owner.close()


async def test_the_owner_restores_its_entry_in_place_of_a_forged_one(consul: ConsulAgent) -> None:
    """A process that may write to Consul replaces the entry. The file registry: see
    `test_member_identity.py`."""
    consul.wipe()
    key = MemberKey()
    instance = replace(Rogue(address="127.0.0.1:1").instance("worker"), id=key.id)
    owner = ConsulRegistry(consul.url, signer=keyed(key), reconcile_interval_s=0.05)
    watcher = ConsulRegistry(consul.url, signer=keyed(MemberKey()))
    await owner.register(instance)
    async with watcher.watch(NS) as watch:
        raw = _Forger(None).seal(replace(instance, address="127.0.0.1:2"))
        forged = registration(instance, raw, 10.0, EntrySigner(TOKEN).sign(raw))
        body = {
            "Name": forged["name"],
            "ID": forged["service_id"],
            "Meta": forged["meta"],
            "Port": 2,
        }
        async with httpx.AsyncClient(base_url=consul.url, trust_env=False) as http:
            (await http.put("/v1/agent/service/register", json=body)).raise_for_status()
            url = f"/v1/agent/service/{forged['service_id']}"

            async def is_restored() -> bool:
                meta: dict[str, str] = (await http.get(url)).json()["Meta"]
                return meta == owner._leases[key.id]._meta

            await until(is_restored, "the owner registers again")
        addresses = {i.address for i in watch.current.instances.values()}
        addresses |= {i.address for i in (await watcher.snapshot(NS)).instances.values()}
    assert addresses == {"127.0.0.1:1"}
    await owner.close()
    await watcher.close()


async def test_an_entry_without_a_key_is_a_member_beside_those_with_keys(tmp_path: Path) -> None:
    """That of a process of an earlier version."""
    earlier = file_registry(tmp_path, TOKEN)
    instance = Rogue(address="127.0.0.1:1").instance("worker")
    await earlier.register(instance)
    assert await members(FileRegistry(tmp_path, signer=keyed(MemberKey()))) == {instance.id}
    await earlier.close()


# Calls


async def test_a_process_at_a_members_address_gets_no_token_and_no_message() -> None:
    """For example at the address of a worker that has ended, whose entry it replays."""
    attach = "/kvmesh.engine.v1.EngineService/Attach"
    async with (
        Rogue().serving() as rogue,
        open_stream(rogue.address, attach, BytesValue, WITH_TOKEN) as stream,
    ):
        with pytest.raises(Unauthenticated, match="does not prove"):
            await stream.write(BytesValue(value=b"secret prompt"))
    assert TOKEN not in repr(rogue.received)
    assert len(rogue.received) == 2, "the method and its metadata, and no message"


@asynccontextmanager
async def member(security: rpc.Security = WITH_TOKEN) -> AsyncIterator[str]:
    """A server, with the token; yields its address."""

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    addresses: set[str] = set()
    server = rpc.server(security=security, addresses=addresses)
    handlers: Any = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = rpc.bind(server, "127.0.0.1", 0, security=security)
    addresses |= rpc.own_addresses("127.0.0.1", port)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call_with(address: str, credential: str, method: str = "/t.T/Echo") -> bytes:
    async with rpc.channel(address) as channel:
        stub: Any = channel.unary_unary(method)
        call = stub(b"hi", metadata=(("authorization", credential),))
        with map_rpc_errors():
            reply: bytes = await call
            return reply


async def test_a_stolen_credential_works_neither_twice_nor_elsewhere_nor_later() -> None:
    secret = MeshSecret(TOKEN)
    now = time.time()
    async with member() as address:
        credential = secret.sign_call("/t.T/Echo", address, now)
        assert await call_with(address, credential) == b"hi"
        port = int(address.rpartition(":")[2])
        for refused, reason in (
            (credential, "used before"),
            (secret.sign_call("/t.T/Other", address, now), "wrong"),
            (secret.sign_call("/t.T/Echo", f"127.0.0.1:{port + 1}", now), "the call is for"),
            (secret.sign_call("/t.T/Echo", address, now - CALL_VALID_S - 5), "check the clocks"),
            (secret.sign_call("/t.T/Echo", address, now + CALL_VALID_S + 5), "check the clocks"),
            (MeshSecret("guess").sign_call("/t.T/Echo", address, now), "wrong"),
            (f"Bearer {TOKEN}", "proof"),
            ("KVMesh-1 1 2 3", "proof"),
            ("", "proof"),
        ):
            with pytest.raises(Unauthenticated, match=reason):
                await call_with(address, refused)


async def test_the_refusal_of_a_peer_reaches_a_caller_that_awaits_its_proof() -> None:
    other = rpc.Security(token="another")
    async with member() as address, rpc.channel(address, security=other) as channel:
        stub: Any = channel.unary_unary("/t.T/Echo")
        with pytest.raises(MeshError, match="the caller's mesh token is wrong"):
            await rpc.unary(stub, b"hi", timeout_s=10.0)


@pytest.mark.parametrize("has_token", [True, False])
async def test_the_response_of_a_process_without_the_token_is_refused(has_token: bool) -> None:
    peer = WITH_TOKEN if has_token else rpc.PLAINTEXT
    async with member(peer) as address, rpc.channel(address, security=WITH_TOKEN) as channel:
        echo: Any = channel.unary_unary("/t.T/Echo")
        if has_token:
            assert await rpc.unary(echo, b"hi", timeout_s=10.0) == b"hi"
            return
        with pytest.raises(Unauthenticated, match="does not prove"):
            await rpc.unary(echo, b"hi", timeout_s=10.0)


def test_without_a_token_nothing_is_signed_or_refused() -> None:
    assert UNSIGNED.sign(b"text") == ""
    UNSIGNED.check(b"text", "")
    assert not UNSIGNED.is_old("")

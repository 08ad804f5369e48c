"""Discovery: the members of the mesh and the cards of their models.

`Registry` is the interface. Its adapters are `MemoryRegistry` here, `common/registry/file.py` and
`common/registry/consul`; one contract suite tests all of them (`tests/contract/test_registry.py`).

A lost store does not stop serving: a watch keeps its last snapshot, and an owner restores its entry
and its card when they vanished or the store returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import NoReturn, Protocol

import structlog

from common.errors import Conflict, InvalidRequest, NotFound, Unavailable
from common.namespace import check_namespace
from common.registry.adapter_documents import AdapterDocuments
from common.registry.adapters import DesiredAdapter
from common.registry.card import ModelCard, decode_card, encode_card
from common.registry.instances import (
    Instance,
    Snapshot,
    SnapshotDiff,
    diff_snapshots,
    find_card_conflict,
)
from common.registry.signature import UNSIGNED
from common.streams.backoff import Backoff
from common.streams.peer import keep_connected

LOG = structlog.get_logger(__name__)

# Pause before a failed watch is opened again: first, and at most.
WATCH_RETRY_DELAY_S = 0.1
WATCH_RETRY_DELAY_MAX_S = 5.0


# Receives a snapshot, and what changed since the one before.
OnSnapshot = Callable[[Snapshot, SnapshotDiff], None]


class Lease(Protocol):
    """A registration. It ends with `close`, with its Registry, or with the process."""

    @property
    def instance(self) -> Instance:
        """The registered instance."""

    async def update(self, instance: Instance) -> None:
        """Replaces the registered instance by another state of the same incarnation.

        Raises InvalidRequest if id, namespace, service or stable_name differ, Conflict if the lease
        is closed or the card conflicts (see `Registry.register`), Unavailable.
        """

    async def close(self) -> None:
        """Deregisters at once. Idempotent."""


class Watch:
    """The changing members of one namespace, for one reader.

    current: the last result of `next`; at first the members when the watch was opened. Revision 0
    if the store could not be read.
    """

    def __init__(self, read: Callable[[], Snapshot], wait: Callable[[], Awaitable[object]]) -> None:
        """read: returns the members now; raises once the registry is closed. wait: until a
        change."""
        self._read = read
        self._wait = wait
        self.current = read()

    async def next(self) -> Snapshot:
        """Waits until the members differ from `current`; returns the new snapshot.

        Changes coalesce: a slow reader misses steps, never the last state. Raises Unavailable once
        the Registry is closed. A lost store is not a change and raises nothing.
        """
        while (latest := self._read()) is self.current:
            await self._wait()
        self.current = latest
        return latest


class Registry(Protocol):
    """A client of the store that all processes of a mesh share.

    Snapshots have live instances only, and only the newest incarnation of each stable_name.
    """

    @property
    def is_reachable(self) -> bool:
        """Whether the last read of the store succeeded, and the last write of each own entry."""

    async def register(self, instance: Instance) -> Lease:
        """Makes `instance` visible to all clients until the lease ends.

        All workers of a model in a namespace have one card. An instance with a card_checksum other
        than that of the live ones is rejected until the last of them is gone (its own predecessor
        by stable_name does not count).

        Raises Conflict (reason CARD_CONFLICT, or INSTANCE_EXISTS if the id is registered),
        Unavailable if the store cannot be reached.
        """

    def watch(self, namespace: str) -> AbstractAsyncContextManager[Watch]:
        """Watches the members of `namespace`. Any number of watches may be open."""

    async def snapshot(self, namespace: str) -> Snapshot:
        """Returns the members of `namespace` now; if the store is lost, the last known ones.

        Revision 0 if the store was never read.
        """

    async def put_card(self, card: ModelCard) -> None:
        """Stores `card` under its checksum, without expiry. Call before registering with that
        checksum. While an own entry has it, this client stores it again if the store loses it."""

    async def get_card(self, checksum: str) -> ModelCard:
        """Returns the verified card. Raises NotFound, InvalidRequest with the corrupt field."""

    async def put_adapter(self, namespace: str, adapter: DesiredAdapter) -> None:
        """Stores a desired adapter, in place of one of the same name, without expiry."""

    async def stored_adapters(self, namespace: str) -> tuple[DesiredAdapter, ...]:
        """Returns the desired adapters now, by name, and those that were removed. What cannot be
        read is logged and left out. Raises Unavailable."""

    async def deregister(self, namespace: str, instance_id: int) -> None:
        """Removes the instance of a dead owner without waiting for its lease. Idempotent.

        For supervisors of an exited child. A live owner restores its entry.
        """

    async def close(self) -> None:
        """Ends all leases and watches of this client. Idempotent."""


async def follow(
    registry: Registry,
    namespace: str,
    on_snapshot: OnSnapshot,
    rng: Random | None = None,
) -> NoReturn:
    """Calls `on_snapshot` with every snapshot of `namespace`, until cancelled.

    If the registry fails, the watch is opened again after a back-off. Snapshots of revision 0, for
    which the store was not read, are skipped.

    on_snapshot: its first difference is that from a mesh without members. If it raises, the
        difference is part of the next one.
    rng: of the back-off; None: a new one.
    """
    backoff = Backoff(WATCH_RETRY_DELAY_S, WATCH_RETRY_DELAY_MAX_S, rng or Random())
    before = Snapshot()

    async def watch_until_error() -> bool:
        nonlocal before
        async with registry.watch(namespace) as watch:
            snapshot = watch.current
            while True:
                if snapshot.revision > 0:
                    on_snapshot(snapshot, diff_snapshots(before, snapshot))
                    before = snapshot
                    backoff.reset()
                snapshot = await watch.next()

    def log_failure(error: Exception, pause_s: float) -> None:
        # The process continues with the last snapshot, whatever the error.
        LOG.warning("registry_watch_failed", error=repr(error), pause_s=round(pause_s, 3))

    await keep_connected(watch_until_error, backoff, log_failure)


async def desired_adapters(registry: Registry, namespace: str) -> tuple[DesiredAdapter, ...]:
    """Returns the adapters that workers shall hold, by name. Raises Unavailable."""
    stored = await registry.stored_adapters(namespace)
    return tuple(adapter for adapter in stored if not adapter.is_removed)


async def remove_adapter(registry: Registry, namespace: str, name: str) -> bool:
    """Removes a desired adapter; returns whether there was one. Raises Unavailable."""
    for adapter in await desired_adapters(registry, namespace):
        if adapter.name == name:
            await registry.put_adapter(namespace, replace(adapter, is_removed=True))
            return True
    return False


def raise_if_card_conflicts(conflicting: Instance | None, candidate: Instance) -> None:
    """Raises Conflict if `find_card_conflict` has found an instance with another card."""
    if conflicting is not None:
        raise Conflict(
            f"model {candidate.model!r} is served in namespace {candidate.namespace!r} under "
            f"another card: {conflicting.card_checksum[:12]} by "
            f"{conflicting.stable_name or conflicting.id}, here {candidate.card_checksum[:12]}",
            field="card_checksum",
            reason="CARD_CONFLICT",
            metadata={"model": candidate.model, "served_checksum": conflicting.card_checksum},
        )


def check_same_incarnation(registered: Instance, update: Instance) -> None:
    """Raises InvalidRequest if `update` is another incarnation."""
    for name in ("id", "namespace", "service", "stable_name"):
        if getattr(registered, name) != getattr(update, name):
            raise InvalidRequest(f"an update must not change {name}", name)


class MemoryStore:
    """The store of all MemoryRegistry clients of one process or simulation."""

    def __init__(self) -> None:
        self.cards: dict[str, bytes] = {}
        # By namespace and key.
        self.adapters: dict[str, dict[str, bytes]] = {}
        self._members: dict[str, _Members] = {}

    def members(self, namespace: str) -> _Members:
        check_namespace(namespace)
        return self._members.setdefault(namespace, _Members())

    def notify_watches(self) -> None:
        """Wakes every watch, since its registry may have been closed."""
        for members in self._members.values():
            members.notify()


class _Members:
    """Registered instances of one namespace; dict order is the order of registration."""

    def __init__(self) -> None:
        self.registered: dict[int, Instance] = {}
        self.snapshot = Snapshot().next_snapshot(())  # Revision 1: memory is always readable.
        self.changed = asyncio.Event()

    def put(self, instance: Instance) -> None:
        raise_if_card_conflicts(find_card_conflict(self.registered.values(), instance), instance)
        self.registered[instance.id] = instance
        self._publish()

    def remove(self, instance_id: int) -> None:
        self.registered.pop(instance_id, None)
        self._publish()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _publish(self) -> None:
        next_snapshot = self.snapshot.next_snapshot(self.registered.values())
        if next_snapshot is not self.snapshot:
            self.snapshot = next_snapshot
            self.notify()


class MemoryRegistry:
    """The registry of tests, simulations and single-process meshes. It is never lost."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self._store = MemoryStore() if store is None else store
        self._leases: dict[int, _MemoryLease] = {}
        self._documents = AdapterDocuments(UNSIGNED)
        self._closed = False

    @property
    def is_reachable(self) -> bool:
        return True

    async def register(self, instance: Instance) -> Lease:
        self._check_open()
        members = self._store.members(instance.namespace)
        if instance.id in members.registered or instance.id in self._leases:
            raise instance_exists_error(instance)
        members.put(instance)
        lease = _MemoryLease(self._leases, members, instance)
        self._leases[instance.id] = lease
        return lease

    @asynccontextmanager
    async def watch(self, namespace: str) -> AsyncGenerator[Watch, None]:
        yield Watch(
            lambda: self._read(namespace), lambda: self._store.members(namespace).changed.wait()
        )

    async def snapshot(self, namespace: str) -> Snapshot:
        return self._read(namespace)

    async def put_card(self, card: ModelCard) -> None:
        self._check_open()
        self._store.cards.setdefault(card.checksum, encode_card(card))

    async def get_card(self, checksum: str) -> ModelCard:
        self._check_open()
        raw = self._store.cards.get(checksum)
        if raw is None:
            raise card_not_found_error(checksum)
        return decode_card(raw, checksum)

    async def put_adapter(self, namespace: str, adapter: DesiredAdapter) -> None:
        self._check_open()
        check_namespace(namespace)
        stored = self._store.adapters.setdefault(namespace, {})
        stored[adapter.key] = self._documents.encode(namespace, adapter)

    async def stored_adapters(self, namespace: str) -> tuple[DesiredAdapter, ...]:
        self._check_open()
        return self._documents.decode(namespace, self._store.adapters.get(namespace, {}).items())

    async def deregister(self, namespace: str, instance_id: int) -> None:
        self._check_open()
        self._store.members(namespace).remove(instance_id)

    async def close(self) -> None:
        self._closed = True
        for lease in tuple(self._leases.values()):
            await lease.close()
        self._store.notify_watches()

    def _read(self, namespace: str) -> Snapshot:
        self._check_open()
        return self._store.members(namespace).snapshot

    def _check_open(self) -> None:
        if self._closed:
            raise registry_closed_error()


@dataclass(slots=True)
class _MemoryLease:
    """Open while `leases` contains it."""

    leases: dict[int, _MemoryLease]
    members: _Members
    instance: Instance

    async def update(self, instance: Instance) -> None:
        if self.leases.get(self.instance.id) is not self:
            raise lease_closed_error(self.instance)
        check_same_incarnation(self.instance, instance)
        self.members.put(instance)
        self.instance = instance

    async def close(self) -> None:
        if self.leases.get(self.instance.id) is self:
            del self.leases[self.instance.id]
            self.members.remove(self.instance.id)


def instance_exists_error(instance: Instance) -> Conflict:
    return Conflict(
        f"instance {instance.id} is already registered", field="id", reason="INSTANCE_EXISTS"
    )


def lease_closed_error(instance: Instance) -> Conflict:
    return Conflict(f"the lease of instance {instance.id} is closed", reason="LEASE_CLOSED")


def registry_closed_error() -> Unavailable:
    return Unavailable("the registry is closed", reason="REGISTRY_CLOSED")


def card_not_found_error(checksum: str) -> NotFound:
    return NotFound(f"there is no model card cards/{checksum}", field="card_checksum")

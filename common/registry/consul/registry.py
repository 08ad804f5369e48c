"""`Registry` on a Consul agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from typing import TypeVar

import structlog

from common.errors import InvalidRequest, MeshError, NotFound, PermissionDenied, Unavailable
from common.namespace import check_namespace
from common.registry.adapter_documents import AdapterDocuments
from common.registry.adapters import DesiredAdapter
from common.registry.card import ModelCard
from common.registry.consul.client import TOKEN_UNKNOWN, ConsulClient
from common.registry.consul.entries import (
    SIGNATURE_KEY,
    Listing,
    adapters_key,
    card_key,
    departure_key,
    pack_card,
    parse_manifest,
    registration,
    unpack_card,
)
from common.registry.consul.watch import (
    BACKOFF_MAX_S,
    BACKOFF_S,
    SPACING_MAX_S,
    SPACING_S,
    NamespaceView,
    is_alive,
)
from common.registry.instances import HEALTH_META_KEY, Instance, Snapshot, find_card_conflict
from common.registry.own_cards import OwnCards
from common.registry.registry import (
    Lease,
    Watch,
    card_not_found_error,
    check_same_incarnation,
    instance_exists_error,
    lease_closed_error,
    raise_if_card_conflicts,
    registry_closed_error,
)
from common.registry.signature import UNSIGNED, EntrySigner
from common.streams.backoff import Backoff

UNREACHABLE_TIMEOUT_S = 30.0
TTL_S = 10.0
RECONCILE_INTERVAL_S = 1.0
# A registration is listed within milliseconds, unless the agent has no servers.
LISTED_WITHIN_S = 5.0
DEPARTURE_KEPT_S = 3600.0
# Servers may lose their keys while an agent keeps its entries.
CARD_CHECK_INTERVAL_S = 30.0

LOG = structlog.get_logger(__name__)

T = TypeVar("T")


class ConsulRegistry:
    """`common.registry.registry.Registry` on the Consul agent at `url`.

    Raises InvalidRequest for an invalid `url` or `ca_path`.

    token: an ACL token, or None.
    ca_path: certificate authorities of an https agent; None: those of the system.
    signer: as of FileRegistry.
    ttl_s: life of TTL checks.
    reconcile_interval_s: how often owners check their entries.
    card_check_interval_s: how often owners check their cards, beside the times at which an entry
        was lost.
    unreachable_timeout_s: how long each step of `register` and `put_card` waits for a Consul that
        is unreachable or does not have the token, before it raises Unavailable or PermissionDenied.
    rng: for jitter.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_path: Path | None = None,
        signer: EntrySigner = UNSIGNED,
        ttl_s: float = TTL_S,
        reconcile_interval_s: float = RECONCILE_INTERVAL_S,
        card_check_interval_s: float = CARD_CHECK_INTERVAL_S,
        unreachable_timeout_s: float = UNREACHABLE_TIMEOUT_S,
        rng: Random | None = None,
    ) -> None:
        self._client = ConsulClient(url, token, signer, ca_path)
        self._signer = signer
        self._ttl_s = ttl_s
        self._reconcile_interval_s = reconcile_interval_s
        self._card_check_interval_s = card_check_interval_s
        self._unreachable_timeout_s = unreachable_timeout_s
        self._rng = SystemRandom() if rng is None else rng
        self._views: dict[str, NamespaceView] = {}
        self._leases: dict[int, _ConsulLease] = {}
        self._cards = OwnCards(self._has_card, self._store_card)
        self._documents = AdapterDocuments(signer)
        self._cards_due_at = 0.0
        self._reconcile_task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_reachable(self) -> bool:
        views, leases = tuple(self._views.values()), tuple(self._leases.values())
        return not any(view.is_lost for view in views) and not any(one.is_lost for one in leases)

    async def register(self, instance: Instance) -> Lease:
        self._check_open()
        # Raises for invalid instances before any call.
        registration(instance, self._signer.seal(instance), self._ttl_s)
        if instance.id in self._leases:
            raise instance_exists_error(instance)
        lease = _ConsulLease(self, instance)
        self._leases[instance.id] = lease
        try:
            rivals = await self._retry(partial(self._client.list_rivals, instance))
            if any(e.instance.id == instance.id for e in rivals.entries):
                raise instance_exists_error(instance)
            await self._raise_if_card_conflicts(rivals, instance)
            await self._sweep_departures(instance.namespace)
        except BaseException:
            self._leases.pop(instance.id, None)
            raise
        try:
            async with lease.lock:
                await self._publish_new(lease)
        except BaseException:
            await lease.close()
            raise
        if self._reconcile_task is None:
            self._reconcile_task = asyncio.create_task(
                self._reconcile(), name="consul-registry-reconcile"
            )
        return lease

    @asynccontextmanager
    async def watch(self, namespace: str) -> AsyncGenerator[Watch, None]:
        self._check_open()
        view = self._view(namespace)
        await view.refresh()
        async with view.followed():
            yield Watch(lambda: self._read(view), lambda: view.changed.wait())

    async def snapshot(self, namespace: str) -> Snapshot:
        self._check_open()
        view = self._view(namespace)
        await view.refresh()
        self._check_open()
        return view.snapshot

    async def put_card(self, card: ModelCard) -> None:
        self._check_open()
        await self._retry(partial(self._store_card, card))
        self._cards.add(card, (lease.instance for lease in self._leases.values()))
        self._cards_due_at = time.monotonic() + self._card_check_interval_s

    async def get_card(self, checksum: str) -> ModelCard:
        self._check_open()
        key = card_key(checksum)
        manifest = await self._client.get(f"{key}/manifest")
        if manifest is None:
            raise card_not_found_error(checksum)
        part_count = parse_manifest(manifest)
        parts = [await self._client.get(f"{key}/{n}") for n in range(part_count)]
        stored = [part for part in parts if part is not None]
        return await asyncio.to_thread(unpack_card, stored, checksum)

    async def put_adapter(self, namespace: str, adapter: DesiredAdapter) -> None:
        self._check_open()
        document = self._documents.encode(namespace, adapter)
        await self._client.put(adapters_key(namespace, adapter.key), document)

    async def stored_adapters(self, namespace: str) -> tuple[DesiredAdapter, ...]:
        self._check_open()
        documents = await self._client.get_all(adapters_key(namespace))
        return self._documents.decode(namespace, documents.items())

    async def deregister(self, namespace: str, instance_id: int) -> None:
        self._check_open()
        check_namespace(namespace)
        await self._client.withdraw(namespace, instance_id)

    async def close(self) -> None:
        self._closed = True
        if self._reconcile_task is not None:
            self._reconcile_task.cancel()
            await asyncio.wait((self._reconcile_task,))
        await asyncio.gather(*(lease.close() for lease in tuple(self._leases.values())))
        for view in self._views.values():
            await view.close()
        await self._client.close()
        # Raises if a bug ended the task earlier.
        if self._reconcile_task is not None and not self._reconcile_task.cancelled():
            self._reconcile_task.result()

    def _read(self, view: NamespaceView) -> Snapshot:
        self._check_open()
        view.raise_if_failed()
        return view.snapshot

    def _check_open(self) -> None:
        if self._closed:
            raise registry_closed_error()

    def _view(self, namespace: str) -> NamespaceView:
        check_namespace(namespace)
        if namespace not in self._views:
            self._views[namespace] = NamespaceView(self._client, namespace, self._rng)
        return self._views[namespace]

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of `call`, repeated while Consul is unreachable or does not have the
        token; its last error at the end."""
        deadline = time.monotonic() + self._unreachable_timeout_s
        backoff = Backoff(BACKOFF_S, BACKOFF_MAX_S, self._rng)
        while True:
            self._check_open()
            try:
                result = await call()
            except (Unavailable, PermissionDenied) as error:
                can_pass = isinstance(error, Unavailable) or error.reason == TOKEN_UNKNOWN
                if not can_pass or time.monotonic() >= deadline:
                    raise
                if not backoff.failures:
                    LOG.warning(
                        "registry_awaited", error=error.message, for_s=self._unreachable_timeout_s
                    )
            else:
                if backoff.failures:
                    LOG.info("registry_answered")
                return result
            await asyncio.sleep(backoff.next_s())

    async def _publish_new(self, lease: _ConsulLease) -> None:
        """Publishes, checks again once listed. Raises Conflict if an older entry has another
        card."""
        instance = lease.instance
        self._check_open()
        rivals = await self._retry(partial(self._publish_until_listed, lease))
        own_order = next(e.order for e in rivals.entries if e.instance.id == instance.id)
        await self._raise_if_card_conflicts(rivals, instance, own_order)

    async def _publish_until_listed(self, lease: _ConsulLease) -> Listing:
        # A retry repeats both: an agent may lose an entry it accepted.
        await lease.publish(lease.instance)
        return await self._wait_until_listed(lease.instance)

    async def _publish_update(self, lease: _ConsulLease, instance: Instance) -> None:
        """Publishes an update. Another card yields to any conflict, with older or younger
        entries."""
        before = lease.instance
        if instance.card_checksum in ("", before.card_checksum) and instance.model == before.model:
            await lease.publish(instance)
            return
        await self._raise_if_card_conflicts(await self._client.list_rivals(instance), instance)
        await lease.publish(instance)
        try:
            await self._raise_if_card_conflicts(await self._wait_until_listed(instance), instance)
        except BaseException:
            await lease.publish(before)
            raise

    async def _raise_if_card_conflicts(
        self, rivals: Listing, candidate: Instance, own_order: tuple[int, int] | None = None
    ) -> None:
        """Raises Conflict if a living entry serves the candidate's model under another card.

        rivals: of `list_rivals`; all entries are read only if there are some. own_order: younger
        entries do not count.
        """
        if all(e.instance.id == candidate.id for e in rivals.entries):
            return
        listing = await self._client.list_entries(candidate.namespace)
        counted = (e for e in listing.entries if own_order is None or e.order < own_order)
        remaining = sorted(counted, key=lambda e: e.order)
        while conflicting := find_card_conflict((e.instance for e in remaining), candidate):
            entry = next(e for e in remaining if e.instance is conflicting)
            if await is_alive(entry):
                raise_if_card_conflicts(conflicting, candidate)
            remaining.remove(entry)

    async def _wait_until_listed(self, instance: Instance) -> Listing:
        """Returns its rivals, once `instance` is listed: an agent updates its servers later."""
        deadline = time.monotonic() + LISTED_WITHIN_S
        spacing = Backoff(SPACING_S, SPACING_MAX_S, None)
        while True:
            rivals = await self._client.list_rivals(instance)
            if any(e.instance == instance for e in rivals.entries):
                return rivals
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"Consul does not list instance {instance.id} that its agent accepted", 1.0
                )
            await asyncio.sleep(spacing.next_s())

    async def _has_card(self, checksum: str) -> bool:
        return await self._client.get(f"{card_key(checksum)}/manifest") is not None

    async def _store_card(self, card: ModelCard) -> None:
        try:
            await self.get_card(card.checksum)
        except (NotFound, InvalidRequest):
            # Missing or damaged. The key is the content's checksum, so a write repairs it.
            key = card_key(card.checksum)
            for name, value in (await asyncio.to_thread(pack_card, card)).items():
                await self._client.put(f"{key}/{name}", value)

    async def _sweep_departures(self, namespace: str) -> None:
        """Deletes old departure notes. A failure is logged; the next registration sweeps."""
        try:
            for key, written_s in (await self._client.departures(namespace)).items():
                if time.time() - written_s > DEPARTURE_KEPT_S:
                    await self._client.delete(key)
        except Unavailable as error:
            LOG.warning("departures_not_swept", namespace=namespace, error=error.message)

    async def _reconcile(self) -> None:
        while True:
            await asyncio.sleep(self._reconcile_interval_s * (0.8 + 0.4 * self._rng.random()))
            leases = tuple(self._leases.values())
            are_restored = await asyncio.gather(*(lease.reconcile() for lease in leases))
            now = time.monotonic()
            if any(are_restored):
                self._cards_due_at = now
            if now >= self._cards_due_at and await self._cards.restore(
                lease.instance for lease in leases
            ):
                spread = 0.8 + 0.4 * self._rng.random()
                self._cards_due_at = now + self._card_check_interval_s * spread


class _ConsulLease:
    """An entry of the agent. `lock` orders registration, updates, reconciliation and the end."""

    def __init__(self, registry: ConsulRegistry, instance: Instance) -> None:
        self._registry = registry
        self._client = registry._client
        self.instance = instance
        self.lock = asyncio.Lock()
        self._is_open = True
        self._is_published = False
        # Of the published entry.
        self._meta: Mapping[str, str] = {}
        # Whether the last attempt to restore or renew the entry failed.
        self.is_lost = False

    async def update(self, instance: Instance) -> None:
        async with self.lock:
            if not self._is_open:
                raise lease_closed_error(self.instance)
            check_same_incarnation(self.instance, instance)
            await self._registry._publish_update(self, instance)

    async def publish(self, instance: Instance) -> None:
        """Replaces the agent's entry. After Unavailable it may be the old or the new one."""
        self._meta = await self._client.register(instance, self._registry._ttl_s)
        self.instance = instance
        self._is_published = True

    async def close(self) -> None:
        async with self.lock:
            if not self._is_open:
                return
            self._is_open = False
            self._registry._leases.pop(self.instance.id, None)
            try:
                await self._client.withdraw(self.instance.namespace, self.instance.id)
            except MeshError as error:
                # Consul removes it: its check fails from now on.
                LOG.warning("registry_entry_left_behind", id=self.instance.id, error=error.message)

    async def reconcile(self) -> bool:
        """Registers again if the entry is lost or another one; renews signature and TTL. Returns
        whether the entry was restored. Failures are logged."""
        async with self.lock:
            if not (self._is_open and self._is_published):
                return False
            try:
                await self._restore_or_renew()
            except MeshError as error:
                if not self.is_lost:
                    LOG.warning("registration_lost", id=self.instance.id, error=error.message)
                self.is_lost = True
                return False
            was_lost, self.is_lost = self.is_lost, False
            if was_lost:
                LOG.info("registration_restored", id=self.instance.id)
            return was_lost

    async def _restore_or_renew(self) -> None:
        namespace, instance_id = self.instance.namespace, self.instance.id
        if await self._client.registered_meta(namespace, instance_id) != self._meta:
            self.is_lost = True
            await self.publish(self.instance)
            await self._client.delete(departure_key(namespace, instance_id))
        elif self._registry._signer.is_old(self._meta.get(SIGNATURE_KEY, "")):
            await self.publish(self.instance)
        if HEALTH_META_KEY not in self.instance.meta:
            await self._client.renew_ttl(namespace, instance_id)

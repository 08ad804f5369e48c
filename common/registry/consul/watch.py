"""The members of a namespace as one process sees them, and probes of suspected instances."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import MeshError
from common.registry.consul.client import ConsulClient
from common.registry.consul.entries import Entry, HealthState, Listing, departure_key
from common.registry.instances import HEALTH_META_KEY, HEALTH_SERVICE_META_KEY, Snapshot
from common.streams.backoff import Backoff

# A blocking query sometimes misses a change of a check: this bounds the delay.
RECONCILE_S = 8.0
# How soon members that were kept by a probe are probed again.
REPROBE_S = 1.0
# Long enough for a busy host. A dead process refuses at once, so this delays hung ones only.
PROBE_TIMEOUT_S = 1.5
CONCURRENT_PROBES_MAX = 32
# Pause between queries; the longer one if they bring no change. A listing takes about 50 µs for
# each entry: while a large fleet starts, queries take a tenth of the time.
SPACING_S, SPACING_MAX_S = 0.02, 0.5
SPACING_S_PER_ENTRY = 0.0005
BACKOFF_S, BACKOFF_MAX_S = 0.05, 1.0

LOG = structlog.get_logger(__name__)


class NamespaceView:
    """Members of one namespace (passing, or alive when probed), and the task that follows them."""

    def __init__(self, client: ConsulClient, namespace: str, rng: Random) -> None:
        self._client = client
        self._namespace = namespace
        self._rng = rng
        self.snapshot = Snapshot()
        self.changed = asyncio.Event()
        self._members: dict[int, Entry] = {}
        self._kept: frozenset[int] = frozenset()
        self._index = 0
        self._lock = asyncio.Lock()
        self._watch_count = 0
        self._follow_task: asyncio.Task[None] | None = None
        # Whether the last read failed.
        self.is_lost = False
        self._unreadable: frozenset[str] = frozenset()

    async def refresh(self) -> None:
        """Reads the members now. If Consul fails, nothing changes."""
        async with self._lock:
            try:
                listing = await self._client.list_entries(self._namespace)
            except MeshError as error:
                self._log_lost(error)
                return
            await self._apply(listing)

    @asynccontextmanager
    async def followed(self) -> AsyncGenerator[None, None]:
        """Keeps the task that follows changes running."""
        self._watch_count += 1
        if self._follow_task is None:
            name = f"consul-watch-{self._namespace}"
            self._follow_task = asyncio.create_task(self._follow(), name=name)
            self._follow_task.add_done_callback(lambda _: self._notify())
        try:
            yield
        finally:
            self._watch_count -= 1
            if self._watch_count == 0:
                await self.close()

    async def close(self) -> None:
        """Stops following and wakes all watches."""
        task, self._follow_task = self._follow_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        self._notify()

    def raise_if_failed(self) -> None:
        """Raises the error that ended the task, rather than wait for a change that never comes."""
        if self._follow_task is not None and self._follow_task.done():
            self._follow_task.result()

    # Not keep_connected: each query continues the one before, and also idle ones are spaced.
    async def _follow(self) -> None:
        index = self._index
        backoff = Backoff(BACKOFF_S, BACKOFF_MAX_S, self._rng)
        idle = Backoff(SPACING_S, SPACING_MAX_S, None)
        spacing = idle.next_s()
        while True:
            started = time.monotonic()
            jittered_s = RECONCILE_S * (0.9 + 0.2 * self._rng.random())
            wait_s = REPROBE_S if self._kept else jittered_s
            try:
                listing = await self._client.wait_for_entries(self._namespace, index, wait_s)
            except MeshError as error:
                self._log_lost(error)
                await asyncio.sleep(backoff.next_s())
                index = 0  # After an outage the indices may start again.
                continue
            backoff.reset()
            has_changed = await self._apply_if_newer(listing, index)
            index = listing.index if listing.index >= index else 0
            elapsed = time.monotonic() - started
            if elapsed >= spacing or has_changed:
                idle.reset()
            spacing = max(idle.next_s(), SPACING_S_PER_ENTRY * len(listing.entries))
            await asyncio.sleep(max(0.0, spacing - elapsed))

    async def _apply_if_newer(self, listing: Listing, queried_index: int) -> bool:
        """Applies the result of a blocking query; returns whether the members changed."""
        if listing.index < queried_index:
            return False  # The index went backwards: query again from the start.
        before = self.snapshot
        async with self._lock:
            # A `refresh` during the query may have brought a newer state.
            if queried_index == 0 or listing.index >= self._index:
                await self._apply(listing)
        return self.snapshot is not before

    async def _apply(self, listing: Listing) -> None:
        # Each entry is logged once, until it is gone.
        for entry_id in listing.unreadable.keys() - self._unreadable:
            error = listing.unreadable[entry_id]
            LOG.warning("registry_entry_unreadable", id=entry_id, error=error)
        self._unreadable = frozenset(listing.unreadable)
        if self.is_lost:
            LOG.info("registry_recovered", namespace=self._namespace)
        self.is_lost = False
        listed = {e.instance.id: e for e in listing.entries}
        passing = {key: e for key, e in listed.items() if e.health is HealthState.PASSING}
        absent = [e for key, e in self._members.items() if key not in passing]
        kept = await self._find_living(absent, listed) if absent else {}
        if kept.keys() - self._kept:
            LOG.warning("registry_members_kept", namespace=self._namespace, ids=sorted(kept))
        self._kept = frozenset(kept)
        self._index = listing.index
        # Kept members come first: a listed registration is younger than a lost one.
        self._members = kept | dict(sorted(passing.items(), key=lambda item: item[1].order))
        next_snapshot = self.snapshot.next_snapshot(
            (e.instance for e in self._members.values()),
            has_unauthenticated=listing.has_unauthenticated,
        )
        if next_snapshot is not self.snapshot:
            self.snapshot = next_snapshot
            self._notify()

    async def _find_living(
        self, absent: Sequence[Entry], listed: Mapping[int, Entry]
    ) -> dict[int, Entry]:
        """Returns the entries of `absent` without a departure note that are alive, as listed if
        they are."""
        departed: Collection[str] = ()
        if any(e.instance.id not in listed for e in absent):
            with contextlib.suppress(MeshError):  # Without the notes, all are probed.
                departed = (await self._client.departures(self._namespace)).keys()
        candidates = [
            listed.get(e.instance.id, replace(e, health=HealthState.SUSPECTED))
            for e in absent
            if e.instance.id in listed
            or departure_key(self._namespace, e.instance.id) not in departed
        ]
        slots = asyncio.Semaphore(CONCURRENT_PROBES_MAX)
        alive = await asyncio.gather(*(is_alive(e, slots) for e in candidates))
        return {e.instance.id: e for e, lives in zip(candidates, alive, strict=True) if lives}

    def _log_lost(self, error: MeshError) -> None:
        if not self.is_lost:
            LOG.warning("registry_lost", namespace=self._namespace, error=error.message)
        self.is_lost = True

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


async def is_alive(entry: Entry, slots: asyncio.Semaphore | None = None) -> bool:
    """Returns whether an entry counts as a member: by Consul's checks, or by a probe if
    suspected."""
    if entry.health is not HealthState.SUSPECTED:
        return entry.health is HealthState.PASSING
    health_address = entry.instance.meta.get(HEALTH_META_KEY)
    async with slots or contextlib.nullcontext():
        if health_address is not None:
            health_service = entry.instance.meta.get(HEALTH_SERVICE_META_KEY, "")
            return await _is_serving(health_address, health_service)
        return await _accepts_connections(entry.instance.address)


async def _is_serving(address: str, service: str) -> bool:
    # A shared subchannel would answer from the back-off of an earlier failure.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # The package has no types.
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            response = await stub.Check(request, timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def _accepts_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True

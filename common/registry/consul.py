"""The registry of a mesh on many hosts: Consul's HTTP API, and the only file that speaks it.

    service kvmesh-<namespace>, tag <kind>    one entry an incarnation, ID ends in its id in hex
    kvmesh/<namespace>/models/<slug>          checksum of the card, for people; never an arbiter
    kvmesh/<namespace>/left/<id>              left on purpose; swept after an hour
    kvmesh/cards/<checksum>/manifest, 0 …     a card, immutable, deflated, in parts

One service a namespace, not one a kind: a watcher then has one blocking query, one index and one
consistent list, and an agent's 200 connections a client address go four times as far.

- An entry holds the whole Instance as JSON, cut over meta values (512 characters each), so that it
  changes in one step. Order of registration is Consul's CreateIndex: updates keep it; only when
  all servers lost their state do two *living* incarnations of one name come back in any order.
- Health: Consul asks `meta["health"]` (`host:port`, gRPC health, no TLS) every second. An instance
  without it has a TTL check, fed by its owner: for tests, and where mutual TLS bars the agent.
- Who is listed and passing is a member. Who was, and is not any more, is *asked* before it is given
  up: by the same gRPC health call, else by connecting. So an agent that lost its state, a leader
  that answers nonsense or a token that lost its rights evicts nobody who is alive. Three things are
  believed unasked: a note under `left/`, a TTL that ran out, and any failing check that is not ours
  (an operator's maintenance mode).
- A card is refused by looking before *and* after registering. Raft puts registrations in one order
  and each newcomer looks once it is listed, so of rivals the oldest stays and the others withdraw.
- Owners look every second whether their agent still knows them, and register again if not.
- Who registers, or stores a card, waits for a Consul that cannot be reached, as at the start of a
  whole mesh. Everything else fails at once, or goes on with what was seen last.

httpx alone, not py-consul: its asyncio half needs another HTTP library, its health queries have no
stale mode, and the dozen calls below are all we need.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import time
import zlib
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from random import Random, SystemRandom
from typing import Any, TypeVar
from urllib.parse import quote

import grpc
import httpx
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import InvalidRequest, MeshError, NotFound, PermissionDenied, Unavailable
from common.namespace import check_namespace
from common.registry.card import ModelCard, decode_card, encode_card, model_slug
from common.registry.instances import Instance, Snapshot, find_card_conflict
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

# Key of Instance.meta: the address whose gRPC health Consul asks.
HEALTH_META_KEY = "health"

PATIENCE_S = 30.0
TTL_S = 10.0
TEND_S = 1.0
# A blocking query now and then sleeps through a change of a check: this bounds how long.
RECONCILE_S = 8.0
# How soon those are asked again who answer although they are not listed.
HELD_AGAIN_S = 1.0
CALL_TIMEOUT_S = 2.0
NOTE_S = 0.9
CONNECT_TIMEOUT_S = 2.0
# A registration is listed within milliseconds, unless the agent has no servers.
LISTED_WITHIN_S = 5.0
# Of a machine that is busy: who is dead refuses at once, so that this delays the hung alone.
PROBE_S = 1.5
PROBES_AT_ONCE = 32
CHECK_INTERVAL_S = 1.0
CHECK_TIMEOUT_S = 0.5
REAP_S = 60
DEPARTURE_KEPT_S = 3600.0
# Consul allows 512 KiB a value, 512 characters a meta value and 64 of these.
CARD_PART_BYTES = 384 * 1024
CARD_BYTES_MAX = 512 << 20
META_VALUE_CHARS = 512
META_PARTS_MAX = 58
# Queries follow each other at these distances, the longer one when they bring nothing new.
SPACING_S, SPACING_MAX_S = 0.02, 0.5
BACKOFF_S, BACKOFF_MAX_S = 0.05, 1.0

_CHECKSUM = re.compile(r"[0-9a-f]{64}")
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\s/]+):(\d{1,5})")

LOG = structlog.get_logger(__name__)

T = TypeVar("T")


class ConsulRegistry:
    """`common.registry.registry.Registry` on the Consul agent at `url`.

    token: an ACL token, or None. ttl_s: life of TTL checks. tend_s: how often an owner looks after
    its entries. patience_s: how long at a stretch `register` and `put_card` wait for a Consul that
    cannot be reached, before they raise Unavailable. rng: for jitter. Raises InvalidRequest for a
    url that is none.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ttl_s: float = TTL_S,
        reconcile_interval_s: float = TEND_S,
        unreachable_timeout_s: float = PATIENCE_S,
        rng: Random | None = None,
    ) -> None:
        self._agent = _Agent(url, token)
        self._ttl_s = ttl_s
        self._tend_s = reconcile_interval_s
        self._patience_s = unreachable_timeout_s
        self._rng = SystemRandom() if rng is None else rng
        self._views: dict[str, _View] = {}
        self._leases: dict[int, _ConsulLease] = {}
        self._swept: set[str] = set()
        self._tending: asyncio.Task[None] | None = None
        self._closed = False

    async def register(self, instance: Instance) -> Lease:
        self._check_open()
        lease = _ConsulLease(self, self._agent, instance, self._ttl_s)
        if instance.id in self._leases:
            raise instance_exists_error(instance)
        self._leases[instance.id] = lease
        try:
            listing = await self._patiently(partial(self._agent.listing, instance.namespace))
            if any(e.instance.id == instance.id for e in listing.entries):
                raise instance_exists_error(instance)
            await self._raise_if_card_conflicts(listing.entries, instance)
            await self._sweep_left(instance.namespace)
        except BaseException:
            self._leases.pop(instance.id, None)
            raise
        await self._enter(lease, listing.index)
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend(), name="consul-registry-tend")
        return lease

    @asynccontextmanager
    async def watch(self, namespace: str) -> AsyncGenerator[Watch, None]:
        self._check_open()
        view = self._view(namespace)
        await view.refresh()
        async with view.followed():
            yield _ConsulWatch(self, view)

    async def snapshot(self, namespace: str) -> Snapshot:
        self._check_open()
        view = self._view(namespace)
        await view.refresh()
        self._check_open()
        return view.snapshot

    async def put_card(self, card: ModelCard) -> None:
        self._check_open()
        await self._patiently(partial(self._store, card))

    async def _store(self, card: ModelCard) -> None:
        try:
            await self.get_card(card.checksum)
        except (NotFound, InvalidRequest):
            # Not there, or damaged: content has its checksum for a name, so writing is repairing.
            packed = await asyncio.to_thread(lambda: zlib.compress(encode_card(card)))
            await self._write_card(f"kvmesh/cards/{card.checksum}", packed)

    async def get_card(self, checksum: str) -> ModelCard:
        self._check_open()
        if not _CHECKSUM.fullmatch(checksum):
            raise InvalidRequest(f"{checksum!r} is not 64 hex digits", "card_checksum")
        key = f"kvmesh/cards/{checksum}"
        manifest = await self._agent.get(f"{key}/manifest")
        if manifest is None:
            raise card_not_found_error(checksum)
        parts = [await self._agent.get(f"{key}/{n}") for n in range(_parts_of(manifest.value))]
        packed = b"".join(part.value for part in parts if part is not None)
        return await asyncio.to_thread(_unpack_card, packed, checksum)

    async def deregister(self, namespace: str, instance_id: int) -> None:
        self._check_open()
        check_namespace(namespace)
        await self._agent.withdraw(namespace, instance_id)

    async def close(self) -> None:
        self._closed = True
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait((self._tending,))
        await asyncio.gather(*(lease.close() for lease in tuple(self._leases.values())))
        for view in self._views.values():
            await view.close()
        await self._agent.close()
        # What ended the task early, if not we: a bug, to be seen.
        if self._tending is not None and not self._tending.cancelled():
            self._tending.result()

    def _check_open(self) -> None:
        if self._closed:
            raise registry_closed_error()

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, as soon as Consul can be reached; the last error when patience is over."""
        deadline, backoff = time.monotonic() + self._patience_s, BACKOFF_S
        while True:
            self._check_open()
            try:
                answer = await ask()
            except Unavailable as error:
                if time.monotonic() >= deadline:
                    raise
                if backoff == BACKOFF_S:
                    LOG.warning("registry_awaited", error=error.message, for_s=self._patience_s)
            else:
                if backoff > BACKOFF_S:
                    LOG.info("registry_answered")
                return answer
            await asyncio.sleep(backoff * (0.5 + self._rng.random()))
            backoff = min(2 * backoff, BACKOFF_MAX_S)

    def _view(self, namespace: str) -> _View:
        check_namespace(namespace)
        if namespace not in self._views:
            self._views[namespace] = _View(self._agent, namespace, self._rng)
        return self._views[namespace]

    async def _enter(self, lease: _ConsulLease, index: int) -> None:
        """Publish, look again once listed, and withdraw if somebody older has another card."""
        instance = lease.instance
        try:
            async with lease.turn:
                self._check_open()
                listing = await self._patiently(partial(self._list, lease, index))
                mine = next(e.order for e in listing.entries if e.instance.id == instance.id)
                older = [e for e in listing.entries if e.order < mine]
                await self._raise_if_card_conflicts(older, instance)
                await self._patiently(partial(self._point, instance))
        except BaseException:
            await lease.close()
            raise

    async def _list(self, lease: _ConsulLease, index: int) -> _Listing:
        """Publish, until listed. Both again if that fails: an agent may lose what it accepted."""
        await lease.publish(lease.instance)
        return await self._until_listed(lease.instance, index)

    async def _change(self, lease: _ConsulLease, instance: Instance) -> None:
        """Publish an update. One that brings another card yields to any rival, old or young."""
        if instance.card_checksum in ("", lease.instance.card_checksum) and (
            instance.model == lease.instance.model
        ):
            await lease.publish(instance)
            return
        before = lease.instance
        listing = await self._agent.listing(instance.namespace)
        await self._raise_if_card_conflicts(listing.entries, instance)
        await lease.publish(instance)
        try:
            listing = await self._until_listed(instance, listing.index)
            await self._raise_if_card_conflicts(listing.entries, instance)
            await self._point(instance)
        except BaseException:
            await lease.publish(before)
            raise

    async def _raise_if_card_conflicts(
        self, entries: Sequence[_Entry], candidate: Instance
    ) -> None:
        """Raise the Conflict `register` owes if one who lives serves the model otherwise."""
        living = sorted(entries, key=lambda e: e.order)
        while conflicting := find_card_conflict((e.instance for e in living), candidate):
            entry = next(e for e in living if e.instance is conflicting)
            if await _lives(entry):
                raise_if_card_conflicts(conflicting, candidate)
            living.remove(entry)

    async def _until_listed(self, instance: Instance, index: int) -> _Listing:
        """The listing in which `instance` stands as it is. The agent tells its servers later.

        Asked at distances: of n that register at once each is woken by all the others, and a
        listing has n entries to read.
        """
        deadline = time.monotonic() + LISTED_WITHIN_S
        spacing = SPACING_S
        while True:
            try:
                listing = await self._agent.listing(instance.namespace, index=index, wait_s=1.0)
            except Unavailable as unreachable:
                error = unreachable
            else:
                if any(e.instance == instance for e in listing.entries):
                    return listing
                error = Unavailable(
                    f"Consul does not list instance {instance.id} that its agent accepted", 1.0
                )
                index = listing.index if listing.index >= index else 0
            if time.monotonic() > deadline:
                raise error
            await asyncio.sleep(spacing)
            spacing = min(2 * spacing, SPACING_MAX_S)

    async def _point(self, instance: Instance) -> None:
        """Let `models/<slug>` name the card, by compare-and-set; who is late changes nothing."""
        if not instance.card_checksum:
            return
        key = f"kvmesh/{instance.namespace}/models/{model_slug(instance.model)}"
        stored = await self._agent.get(key)
        value = instance.card_checksum.encode()
        if stored is None or stored.value != value:
            await self._agent.put(key, value, cas=0 if stored is None else stored.index)

    async def _write_card(self, key: str, packed: bytes) -> None:
        starts = range(0, len(packed), CARD_PART_BYTES)
        for n, start in enumerate(starts):
            await self._agent.put(f"{key}/{n}", packed[start : start + CARD_PART_BYTES])
        # Last: a card with a manifest is complete.
        await self._agent.put(f"{key}/manifest", json.dumps({"parts": len(starts)}).encode())

    async def _sweep_left(self, namespace: str) -> None:
        """Remove old notes of those who left; once per namespace and client, and only if it can."""
        if namespace in self._swept:
            return
        self._swept.add(namespace)
        try:
            for key, written_s in (await self._agent.left(namespace)).items():
                if time.time() - written_s > DEPARTURE_KEPT_S:
                    await self._agent.delete(key)
        except Unavailable as error:
            self._swept.remove(namespace)  # for whoever registers next
            LOG.warning("departures_not_swept", namespace=namespace, error=error.message)

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(self._tend_s * (0.8 + 0.4 * self._rng.random()))
            await asyncio.gather(*(lease.tend() for lease in tuple(self._leases.values())))


class _ConsulLease:
    """A service of the agent. `turn` keeps entering, updates, tending and the end in order."""

    def __init__(
        self, registry: ConsulRegistry, agent: _Agent, instance: Instance, ttl_s: float
    ) -> None:
        self._registry = registry
        self._agent = agent
        self._instance = instance
        self._ttl_s = ttl_s
        self.turn = asyncio.Lock()
        self._is_open = True
        self._is_published = False
        self._is_troubled = False
        _service_json(instance, ttl_s)  # its errors are the caller's, before anything happens

    @property
    def instance(self) -> Instance:
        return self._instance

    async def update(self, instance: Instance) -> None:
        async with self.turn:
            if not self._is_open:
                raise lease_closed_error(self._instance)
            check_same_incarnation(self._instance, instance)
            await self._registry._change(self, instance)

    async def publish(self, instance: Instance) -> None:
        """Make the agent's entry this. Raises Unavailable; then it is as before, or unknown."""
        service = _service_json(instance, self._ttl_s)
        await self._agent.call("PUT", "/v1/agent/service/register", json_body=service)
        self._instance = instance
        self._is_published = True

    async def close(self) -> None:
        async with self.turn:
            if not self._is_open:
                return
            self._is_open = False
            self._registry._leases.pop(self._instance.id, None)
            try:
                await self._agent.withdraw(self._instance.namespace, self._instance.id)
            except MeshError as error:
                # Not lost: its check fails from now on, and Consul reaps it.
                LOG.warning("registry_entry_left_behind", id=self._instance.id, error=error.message)

    async def tend(self) -> None:
        """Register again if the agent forgot us; feed the TTL. Troubles are logged once."""
        async with self.turn:
            if not (self._is_open and self._is_published):
                return
            try:
                await self._tend()
            except MeshError as error:
                if not self._is_troubled:
                    LOG.warning("registration_lost", id=self._instance.id, error=error.message)
                self._is_troubled = True
            else:
                if self._is_troubled:
                    LOG.info("registration_restored", id=self._instance.id)
                self._is_troubled = False

    async def _tend(self) -> None:
        namespace, instance_id = self._instance.namespace, self._instance.id
        if not await self._agent.knows(namespace, instance_id):
            self._is_troubled = True
            await self.publish(self._instance)
            await self._agent.delete(_left_key(namespace, instance_id))
        if HEALTH_META_KEY not in self._instance.meta:
            check = quote(_check_id(namespace, instance_id), safe="")
            await self._agent.call("PUT", f"/v1/agent/check/pass/{check}")


class _ConsulWatch:
    def __init__(self, registry: ConsulRegistry, view: _View) -> None:
        self._registry = registry
        self._view = view
        self._current = view.snapshot

    @property
    def current(self) -> Snapshot:
        return self._current

    async def next(self) -> Snapshot:
        while True:
            self._registry._check_open()
            if self._view.snapshot is not self._current:
                self._current = self._view.snapshot
                return self._current
            self._view.raise_if_failed()
            await self._view.changed.wait()


class _View:
    """The members of one namespace as this process sees them, and the task that follows them.

    `_members` are those listed as passing, and those held: not listed so, but alive when asked.
    """

    def __init__(self, agent: _Agent, namespace: str, rng: Random) -> None:
        self._agent = agent
        self._namespace = namespace
        self._rng = rng
        self.snapshot = Snapshot()
        self.changed = asyncio.Event()
        self._members: dict[int, _Entry] = {}
        self._held: frozenset[int] = frozenset()
        self._index = 0
        self._turn = asyncio.Lock()
        self._followers = 0
        self._following: asyncio.Task[None] | None = None
        self._is_lost = False
        self._complaints: frozenset[str] = frozenset()

    async def refresh(self) -> None:
        """Read once, now; a lost store changes nothing."""
        async with self._turn:
            try:
                listing = await self._agent.listing(self._namespace)
            except MeshError as error:
                self._lose(error)
                return
            await self._take_in(listing)

    @asynccontextmanager
    async def followed(self) -> AsyncGenerator[None, None]:
        """Keeps the task alive that follows changes."""
        self._followers += 1
        if self._following is None:
            name = f"consul-watch-{self._namespace}"
            self._following = asyncio.create_task(self._follow(), name=name)
            self._following.add_done_callback(lambda _: self._wake())
        try:
            yield
        finally:
            self._followers -= 1
            if self._followers == 0:
                await self.close()

    async def close(self) -> None:
        task, self._following = self._following, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        self._wake()

    def raise_if_failed(self) -> None:
        """Let a reader see what ended the task, rather than wait for ever."""
        if self._following is not None and self._following.done():
            self._following.result()

    async def _follow(self) -> None:
        index, spacing, backoff = self._index, SPACING_S, BACKOFF_S
        while True:
            started = time.monotonic()
            try:
                listing = await self._agent.listing(
                    self._namespace, index=index, wait_s=self._wait_s(), stale=True
                )
            except MeshError as error:
                self._lose(error)
                await asyncio.sleep(backoff * (0.5 + self._rng.random()))
                # The store may come back with other indices.
                index, backoff = 0, min(2 * backoff, BACKOFF_MAX_S)
                continue
            backoff = BACKOFF_S
            brought_news = await self._follow_to(listing, index)
            index = listing.index if listing.index >= index else 0
            elapsed = time.monotonic() - started
            hurried = elapsed < spacing and not brought_news
            spacing = min(2 * spacing, SPACING_MAX_S) if hurried else SPACING_S
            await asyncio.sleep(max(0.0, spacing - elapsed))

    async def _follow_to(self, listing: _Listing, asked: int) -> bool:
        """Take in what a blocking query brought; whether it changed anything."""
        if listing.index < asked:
            return False  # the index went backwards: ask again from the start
        before = self.snapshot
        async with self._turn:
            # While it was under way a plain read may have brought something younger.
            if asked == 0 or listing.index >= self._index:
                await self._take_in(listing)
        return self.snapshot is not before

    def _wait_s(self) -> float:
        if self._held:
            return HELD_AGAIN_S
        return RECONCILE_S * (0.9 + 0.2 * self._rng.random())

    async def _take_in(self, listing: _Listing) -> None:
        self._complain(listing.unreadable)
        if self._is_lost:
            LOG.info("registry_found", namespace=self._namespace)
        self._is_lost = False
        listed = {e.instance.id: e for e in listing.entries}
        passing = {key: e for key, e in listed.items() if e.standing is _Standing.PASSING}
        absent = [e for key, e in self._members.items() if key not in passing]
        held = await self._hold(absent, listed) if absent else {}
        if held.keys() - self._held:
            LOG.warning("registry_members_held", namespace=self._namespace, ids=sorted(held))
        self._held = frozenset(held)
        self._index = listing.index
        # Those held come first: a registration that is listed is younger than one that was lost.
        self._members = held | dict(sorted(passing.items(), key=lambda item: item[1].order))
        next_snapshot = self.snapshot.next_snapshot(e.instance for e in self._members.values())
        if next_snapshot is not self.snapshot:
            self.snapshot = next_snapshot
            self._wake()

    async def _hold(
        self, absent: Sequence[_Entry], listed: Mapping[int, _Entry]
    ) -> dict[int, _Entry]:
        """Those of `absent` who did not leave and are alive, as they are listed if they are."""
        left: Collection[str] = ()
        if any(e.instance.id not in listed for e in absent):
            with contextlib.suppress(MeshError):  # no note is known then, so all are asked
                left = (await self._agent.left(self._namespace)).keys()
        asked = [
            listed.get(e.instance.id, e.doubted())
            for e in absent
            if e.instance.id in listed or _left_key(self._namespace, e.instance.id) not in left
        ]
        gate = asyncio.Semaphore(PROBES_AT_ONCE)
        alive = await asyncio.gather(*(_lives(e, gate) for e in asked))
        return {e.instance.id: e for e, lives in zip(asked, alive, strict=True) if lives}

    def _lose(self, error: MeshError) -> None:
        if not self._is_lost:
            LOG.warning("registry_lost", namespace=self._namespace, error=error.message)
        self._is_lost = True

    def _complain(self, unreadable: Mapping[str, str]) -> None:
        """Log each once, until it is gone."""
        for service_id in unreadable.keys() - self._complaints:
            LOG.warning("registry_entry_unreadable", id=service_id, error=unreadable[service_id])
        self._complaints = frozenset(unreadable)

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class _Standing(Enum):
    """What Consul's checks say: doubtful = critical, but to be asked before it is believed."""

    PASSING = 1
    DOUBTFUL = 2
    OUT = 3


@dataclass(frozen=True, slots=True)
class _Entry:
    """A registered instance. order grows with registrations; the id makes it total."""

    instance: Instance
    order: tuple[int, int]
    standing: _Standing

    def doubted(self) -> _Entry:
        """The same, not listed any more."""
        return _Entry(self.instance, self.order, _Standing.DOUBTFUL)


@dataclass(frozen=True, slots=True)
class _Listing:
    """All entries of a namespace at `index`; unreadable: service ID -> why."""

    index: int
    entries: tuple[_Entry, ...]
    unreadable: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Value:
    """A key's value; index: its ModifyIndex, for compare-and-set."""

    value: bytes
    index: int


class _Agent:
    """The dozen calls of Consul's HTTP API that are needed.

    Raises Unavailable when it cannot be reached or has no leader, PermissionDenied for 403,
    InvalidRequest for what Consul refuses.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._calls = _http_client(url, token, CALL_TIMEOUT_S, 16)
        # Blocking queries hold their connection: they must not starve the short calls.
        self._queries = _http_client(url, token, None, None)

    async def close(self) -> None:
        await self._calls.aclose()
        await self._queries.aclose()

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: bytes | None = None,
        json_body: object = None,
        absent_ok: bool = False,
    ) -> httpx.Response:
        """One short call; 404 is an answer if `absent_ok`."""
        request = self._calls.build_request(
            method, path, params=params, content=content, json=json_body
        )
        return await self._send(self._calls, request, absent_ok)

    async def listing(
        self, namespace: str, *, index: int = 0, wait_s: float = 0.0, stale: bool = False
    ) -> _Listing:
        """All registered instances; with an index, once it is passed or `wait_s` are over."""
        path = f"/v1/health/service/{quote(_service_name(namespace), safe='')}"
        params: dict[str, str] = {"stale": ""} if stale else {}
        if index:
            params |= {"index": str(index), "wait": f"{int(wait_s * 1000)}ms"}
            # Consul adds up to a sixteenth to the wait.
            timeout = httpx.Timeout(wait_s * 1.1 + 5.0, connect=CONNECT_TIMEOUT_S)
            request = self._queries.build_request("GET", path, params=params, timeout=timeout)
            return _read_listing(namespace, await self._send(self._queries, request))
        return _read_listing(namespace, await self.call("GET", path, params=params))

    async def knows(self, namespace: str, instance_id: int) -> bool:
        """Whether the agent has this registration."""
        path = f"/v1/agent/service/{quote(_service_id(namespace, instance_id), safe='')}"
        return (await self.call("GET", path, absent_ok=True)).status_code != 404

    async def withdraw(self, namespace: str, instance_id: int) -> None:
        """Note that the instance left on purpose, and remove it. Idempotent."""
        flags = {"flags": str(int(time.time()))}
        key = _left_key(namespace, instance_id)
        try:
            async with asyncio.timeout(NOTE_S):
                await self.call("PUT", f"/v1/kv/{quote(key)}", params=flags, content=b"")
        except (MeshError, TimeoutError) as error:
            # Without it watchers find out by asking: later, and only once it does not answer.
            LOG.warning("departure_not_noted", id=instance_id, error=str(error) or "timed out")
        service_id = quote(_service_id(namespace, instance_id), safe="")
        # Newer servers answer 404 to an unknown ID, older ones 200.
        await self.call("PUT", f"/v1/agent/service/deregister/{service_id}", absent_ok=True)

    async def left(self, namespace: str) -> dict[str, float]:
        """Keys of those who left on purpose -> Unix time of that."""
        path = f"/v1/kv/{quote(_left_key(namespace))}"
        response = await self.call("GET", path, params={"recurse": ""}, absent_ok=True)
        if response.status_code == 404:
            return {}
        return {item["Key"]: float(item["Flags"]) for item in response.json()}

    async def get(self, key: str) -> _Value | None:
        """The value of a key, None if there is none."""
        response = await self.call("GET", f"/v1/kv/{quote(key)}", absent_ok=True)
        if response.status_code == 404:
            return None
        (item,) = response.json()
        return _Value(base64.b64decode(item["Value"] or ""), int(item["ModifyIndex"]))

    async def put(self, key: str, value: bytes, *, cas: int | None = None) -> bool:
        """Write; with `cas` only if the ModifyIndex is still that (0: there is no such key)."""
        params = {} if cas is None else {"cas": str(cas)}
        response = await self.call("PUT", f"/v1/kv/{quote(key)}", params=params, content=value)
        return response.text.strip() == "true"

    async def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        await self.call("DELETE", f"/v1/kv/{quote(key)}")

    async def _send(
        self, client: httpx.AsyncClient, request: httpx.Request, absent_ok: bool = False
    ) -> httpx.Response:
        try:
            response = await client.send(request)
        except (httpx.HTTPError, OSError) as error:
            why = str(error) or type(error).__name__
            raise Unavailable(f"cannot reach Consul at {self._url}: {why}", 1.0) from error
        status, text = response.status_code, response.text[:200].strip()
        if response.is_success or (status == 404 and absent_ok):
            return response
        if status == 403:
            raise PermissionDenied(f"Consul refuses, look at consul_token: {text}")
        if status >= 500 or status == 429:
            raise Unavailable(f"Consul at {self._url} answers {status}: {text}", 1.0)
        raise InvalidRequest(f"Consul answers {status} to {request.url.path}: {text}")


async def _lives(entry: _Entry, gate: asyncio.Semaphore | None = None) -> bool:
    """Whether an entry counts: as Consul says if that is beyond doubt, else as it answers."""
    if entry.standing is not _Standing.DOUBTFUL:
        return entry.standing is _Standing.PASSING
    async with gate or contextlib.nullcontext():
        target = entry.instance.meta.get(HEALTH_META_KEY)
        if target is not None:
            return await _is_serving(target)
        return await _accepts(entry.instance.address)


async def _is_serving(target: str) -> bool:
    # Of its own: a shared subchannel would answer from the back-off of an earlier failure.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the package has no types
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def _http_client(
    url: str, token: str | None, timeout_s: float | None, connections_max: int | None
) -> httpx.AsyncClient:
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url!r} must begin with http:// or https://", "consul_url")
    try:
        return httpx.AsyncClient(
            base_url=url,
            headers={} if token is None else {"X-Consul-Token": token},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=connections_max),
            # Reading the system's authorities takes 20 ms, for nothing on a plain link.
            verify=url.startswith("https"),
            trust_env=False,
        )
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"{url!r} is no URL: {error}", "consul_url") from error


def _service_name(namespace: str) -> str:
    return f"kvmesh-{namespace}"


def _service_id(namespace: str, instance_id: int) -> str:
    return f"kvmesh-{namespace}-{instance_id:016x}"


def _check_id(namespace: str, instance_id: int) -> str:
    return f"service:{_service_id(namespace, instance_id)}"


def _left_key(namespace: str, instance_id: int | None = None) -> str:
    return f"kvmesh/{namespace}/left/" + ("" if instance_id is None else f"{instance_id:016x}")


def _service_json(instance: Instance, ttl_s: float) -> dict[str, object]:
    """The body of a registration. Raises InvalidRequest for a bad health address, or too much."""
    host, _, port = instance.address.rpartition(":")
    return {
        "Name": _service_name(instance.namespace),
        "ID": _service_id(instance.namespace, instance.id),
        "Tags": [instance.service],
        "Address": host.strip("[]"),
        "Port": int(port),
        "Meta": _meta(instance),
        "Check": _check_json(instance, ttl_s),
    }


def _check_json(instance: Instance, ttl_s: float) -> dict[str, object]:
    check: dict[str, object] = {
        "CheckID": _check_id(instance.namespace, instance.id),
        "Name": f"kvmesh {instance.service}",
        "DeregisterCriticalServiceAfter": f"{REAP_S}s",
    }
    target = instance.meta.get(HEALTH_META_KEY)
    if target is None:
        return check | {"TTL": f"{ttl_s}s", "Status": "passing"}
    if not _HOST_PORT.fullmatch(target):
        raise InvalidRequest(
            f"meta.health must be host:port, not {target!r}", f"meta.{HEALTH_META_KEY}"
        )
    # Critical until the agent has reached it: a wrong address never becomes routable.
    return check | {
        "GRPC": target,
        "Interval": f"{CHECK_INTERVAL_S}s",
        "Timeout": f"{CHECK_TIMEOUT_S}s",
    }


def _meta(instance: Instance) -> dict[str, str]:
    text = instance.to_json().decode("ascii")
    parts = [text[n : n + META_VALUE_CHARS] for n in range(0, len(text), META_VALUE_CHARS)]
    if len(parts) > META_PARTS_MAX:
        most = META_PARTS_MAX * META_VALUE_CHARS
        raise InvalidRequest(f"the instance takes {len(text)} bytes, {most} are allowed", "meta")
    # The rest is for people who look at Consul's pages; nobody reads it back.
    shown = {"model": instance.model, "role": instance.role, "stable_name": instance.stable_name}
    readable = {k: v.encode()[:META_VALUE_CHARS].decode(errors="ignore") for k, v in shown.items()}
    return readable | {f"json{n:02}": part for n, part in enumerate(parts)}


# Any: Consul's JSON, whose shape the checks below establish.
def _read_listing(namespace: str, response: httpx.Response) -> _Listing:
    try:
        index = int(response.headers["X-Consul-Index"])
        raw: list[Any] = response.json()
        if index < 1 or not isinstance(raw, list):
            raise ValueError(f"index {index}")
    except (KeyError, ValueError) as error:
        raise Unavailable(f"Consul's answer makes no sense: {error}", 1.0) from error
    entries, unreadable = [], {}
    for item in raw:
        try:
            entries.append(_read_entry(namespace, item))
        except InvalidRequest as error:
            unreadable[str(item["Service"]["ID"])] = error.message
    return _Listing(index, tuple(entries), unreadable)


def _read_entry(namespace: str, item: Any) -> _Entry:
    service = item["Service"]
    meta: Mapping[str, str] = service["Meta"] or {}
    text = "".join(meta[key] for key in sorted(meta) if re.fullmatch(r"json\d\d", key))
    instance = Instance.from_json(text)
    # Consul's names ignore case; ours do not.
    if instance.namespace != namespace or service["ID"] != _service_id(namespace, instance.id):
        raise InvalidRequest("it belongs elsewhere", "id")
    order = (int(service["CreateIndex"]), instance.id)
    return _Entry(instance, order, _standing(instance, item["Checks"]))


def _standing(instance: Instance, checks: Iterable[Any]) -> _Standing:
    failing = {check["CheckID"] for check in checks if check["Status"] != "passing"}
    if not failing:
        return _Standing.PASSING
    doubted = {"serfHealth"}
    if HEALTH_META_KEY in instance.meta:
        doubted.add(_check_id(instance.namespace, instance.id))
    return _Standing.DOUBTFUL if failing <= doubted else _Standing.OUT


def _parts_of(manifest: bytes) -> int:
    try:
        parts = int(json.loads(manifest)["parts"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"the card's manifest is damaged: {error}", "checksum") from error
    if not 0 < parts <= CARD_BYTES_MAX // CARD_PART_BYTES:
        raise InvalidRequest(f"the card's manifest names {parts} parts", "checksum")
    return parts


def _unpack_card(packed: bytes, checksum: str) -> ModelCard:
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(packed, CARD_BYTES_MAX)
    except zlib.error as error:
        raise InvalidRequest(f"the stored card is damaged: {error}", "checksum") from error
    if not inflate.eof:
        raise InvalidRequest("the stored card is cut short, or too large", "checksum")
    return decode_card(raw, checksum)

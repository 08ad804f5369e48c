"""Reads the mesh at an interval, once for all viewers.

Members come from the registry as they change. Each member is asked at most once an interval, and
all together at most `queries_per_s` times a second: in a mesh of 1,000 workers each is asked every
few seconds, by a bounded share of one core.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Final

import structlog

from common.access.key_file import KeyFile
from common.api_keys import KeyDocument
from common.inspection.members import read_member
from common.inspection.traffic import Traffic
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.registry.open import describe_registry
from common.registry.registry import Registry, follow
from common.rpc import channel as rpc
from console_svc.collect.batches import read_batches
from console_svc.collect.cards import Cards
from console_svc.collect.channels import Channels
from console_svc.collect.frontends import Frontends
from console_svc.collect.history import History
from console_svc.collect.indexes import read_index
from console_svc.collect.recent_requests import RecentRequests
from console_svc.collect.request_log import RequestLog
from console_svc.collect.roster import Roster, count_unhealthy
from console_svc.collect.scrape import sum_usage
from console_svc.collect.tenants import TenantShares, view_tenants
from console_svc.config import ConsoleConfig
from console_svc.state.batches import Batches
from console_svc.state.members import IndexView, Member, Model, Overview
from console_svc.state.tenants import Tenants

# Queries of members at a time.
QUERIES_MAX: Final = 32
QUERY_TIMEOUT_S: Final = 2.0
# Statistics of indexers have a line for each worker.
INDEX_INTERVAL_S: Final = 5.0
OVERVIEW_CURVES: Final = (*(field.name for field in fields(Traffic)), "kv_use")
OVERVIEW_POINTS: Final = 450
PROBLEMS_MAX: Final = 100
# Changes of the registry that follow each other are shown at once.
SETTLE_S: Final = 0.1

log = structlog.get_logger()


@dataclass(slots=True)
class Subscribers:
    """Callbacks after a change, and the number of changes."""

    version: int = 0
    callbacks: dict[object, Callable[[], None]] = field(default_factory=dict)

    def publish(self) -> None:
        self.version += 1
        for callback in tuple(self.callbacks.values()):
            try:
                callback()
            except Exception:
                # A page that fails must not stop the others.
                log.exception("subscriber_failed")


class Collector:
    """The newest figures of the mesh; the loops of `run` keep them."""

    def __init__(
        self,
        config: ConsoleConfig,
        registry: Registry,
        security: rpc.Security,
        keys: KeyFile | None,
        *,
        can_revoke: bool,
        subscribers: Subscribers,
    ) -> None:
        self._config = config
        self._registry = registry
        self._keys = keys
        self._can_revoke = can_revoke
        self._subscribers = subscribers
        self._snapshot_changed = asyncio.Event()
        self._history = History(OVERVIEW_CURVES, OVERVIEW_POINTS)
        self._shares = TenantShares()
        self._cards = Cards(registry.get_card)
        self._recent = RecentRequests()
        self._last_snapshot_at = 0.0
        self._index: dict[int, IndexView] = {}
        self.channels = Channels(security)
        self.roster = Roster(config.domain_taint)
        self.frontends = Frontends(config, config.frontend_key or config.metrics_key)
        self.requests = RequestLog(config.requests_max)
        self.overview = Overview(config.namespace, describe_registry(config))
        self.models: tuple[Model, ...] = ()
        self.tenants = Tenants()
        self.batches = Batches()
        self.cycle_s = 0.0
        """Duration of the last measurement."""
        self.queries = 0
        """Of members, since the start."""

    @property
    def index(self) -> tuple[IndexView, ...]:
        return tuple(sorted(self._index.values(), key=lambda view: view.indexer))

    def member(self, name_or_id: str) -> Member | None:
        for member in self.roster.members:
            if name_or_id in (member.name, member.id):
                return member
        return None

    async def follow_registry(self) -> None:
        """Keeps the members."""
        await follow(self._registry, self._config.namespace, self._on_snapshot)

    async def publish_changes(self) -> None:
        """Shows changes of the members at once."""
        while True:
            await self._snapshot_changed.wait()
            await asyncio.sleep(SETTLE_S)
            self._snapshot_changed.clear()
            members = self.roster.members
            await self.channels.close(self.channels.ids - {int(member.id) for member in members})
            self._recent.forget({int(member.id) for member in members})
            await self._cards.load(self.roster.instances("worker"))
            self.refresh()

    async def ask(self) -> None:
        """Asks members, each interval. Those that do not respond delay only each other."""
        loop = asyncio.get_running_loop()
        while True:
            began_at = loop.time()
            try:
                await self._ask_members(began_at)
            except Exception:
                # One bad response must not end the console.
                log.exception("query_failed")
            await self._pause(began_at)

    async def measure(self) -> None:
        """Reads the rest that is polled, and shows all, each interval."""
        loop = asyncio.get_running_loop()
        index_at = 0.0
        while True:
            began_at = loop.time()
            try:
                await asyncio.gather(
                    self.frontends.read(self.roster.instances("frontend")),
                    self._read_requests(),
                    self._read_batches(),
                )
                if began_at - index_at >= INDEX_INTERVAL_S:
                    index_at = began_at
                    await self._read_indexes()
                self._measured()
            except Exception:
                # The figures stay as they are; one bad response must not end the console.
                log.exception("measurement_failed")
            self.cycle_s = loop.time() - began_at
            await self._pause(began_at)

    async def _pause(self, began_at: float) -> None:
        """Waits for the rest of an interval."""
        passed_s = asyncio.get_running_loop().time() - began_at
        await asyncio.sleep(max(0.05, self._config.interval_s - passed_s))

    async def close(self) -> None:
        await self.channels.close_all()
        await self.frontends.close()

    def _on_snapshot(self, _: Snapshot, changes: SnapshotDiff) -> None:
        self.roster.apply(changes, time.time())
        self._last_snapshot_at = time.monotonic()
        self._snapshot_changed.set()

    async def _ask_members(self, now: float) -> None:
        count = max(1, round(self._config.queries_per_s * self._config.interval_s))
        due = self.roster.next_to_ask(count, now, self._config.interval_s)
        queue = iter(due)

        async def ask_next() -> None:
            for instance in queue:
                await self._ask(instance)

        await asyncio.gather(*(ask_next() for _ in range(min(QUERIES_MAX, len(due)))))

    async def _ask(self, instance: Instance) -> None:
        self.queries += 1
        async with self.channels.use(instance) as channel:
            state = await read_member(
                channel,
                instance.service,
                timeout_s=QUERY_TIMEOUT_S,
                reads_routable=self.roster.needs_routable(instance.id),
            )
        self.roster.responded(instance.id, state, time.time())
        if not state.has_responded:
            await self.channels.close([instance.id])

    async def _read_requests(self) -> None:
        async def read(frontend: Instance) -> None:
            async with self.channels.use(frontend) as channel:
                name = self.roster.name(frontend.id)
                self.requests.add(await self._recent.read(channel, frontend.id, name))

        await asyncio.gather(*map(read, self.roster.instances("frontend")))

    async def _read_batches(self) -> None:
        services = self.roster.instances("batch")
        name_of = self.roster.name
        self.batches = await read_batches(self.channels, services, self.batches, name_of)

    async def _read_indexes(self) -> None:
        indexers = self.roster.instances("indexer")
        by_id = {member.id: member for member in self.roster.members}

        async def read(indexer: Instance) -> IndexView:
            name, before = self.roster.name(indexer.id), self._index.get(indexer.id)
            async with self.channels.use(indexer) as channel:
                return await read_index(channel, name, before, by_id.get)

        views = await asyncio.gather(*map(read, indexers))
        self._index = {i.id: view for i, view in zip(indexers, views, strict=True)}

    def _measured(self) -> None:
        for id_, traffic in self.frontends.traffic.items():
            self.roster.set_traffic(
                id_,
                traffic.running,
                traffic.waiting,
                traffic.requests_per_s,
                traffic.tokens_per_s,
            )
        workers = [member for member in self.roster.members if member.service == "worker"]
        values = asdict(self._traffic(workers)) | {"kv_use": _kv_use(workers)}
        self._history.add(time.time(), values)
        usages = {name: scrape.usage for name, scrape in self.frontends.scrapes.items()}
        self._shares.add(time.monotonic(), usages)
        self.refresh()

    def _traffic(self, workers: Sequence[Member]) -> Traffic:
        return replace(
            self.frontends.total,
            running=_sum([worker.running for worker in workers]),
            waiting=_sum([worker.waiting for worker in workers]),
        )

    def refresh(self) -> None:
        """Computes what pages show of the newest figures."""
        members = self.roster.members
        workers = [member for member in members if member.service == "worker"]
        readiness = self.frontends.readiness.values()
        self.overview = Overview(
            namespace=self._config.namespace,
            registry=describe_registry(self._config),
            registry_problem=self._registry_problem(),
            members=len(members),
            unhealthy=count_unhealthy(members),
            traffic=self._traffic(workers),
            kv_use=_kv_use(workers),
            curves=self._history.curves(),
            problems=tuple(self._problems(members)),
        )
        self.models = self._cards.models(
            self.roster.instances("worker"),
            self.roster.name,
            {model: text for found in readiness for model, text in found.canaries.items()},
            {model: text for found in readiness for model, text in found.problems.items()},
        )
        document: KeyDocument | None = None if self._keys is None else self._keys.document
        self.tenants = view_tenants(
            document,
            sum_usage(self.frontends.scrapes),
            self._shares.recent(),
            can_revoke=self._can_revoke,
            now_s=time.time(),
            problem="; ".join(self.frontends.problems),
        )
        self._subscribers.publish()

    def _registry_problem(self) -> str:
        if not self._last_snapshot_at:
            return "the registry was not read yet"
        return "" if self._registry.is_reachable else "its last read failed"

    def _problems(self, members: tuple[Member, ...]) -> list[str]:
        found = [*self.frontends.problems]
        for readiness in self.frontends.readiness.values():
            found += [*readiness.reasons, *readiness.degraded]
        for member in members:
            if member.failure:
                found.append(f"{member.name}: its engine fails: {member.failure}")
            found += [f"{member.name} waits for {peer}" for peer in member.missing]
        found += [view.problem for view in self._index.values() if view.problem]
        if self.roster.unshown:
            found.append(f"{self.roster.unshown} members more than this console shows")
        return list(dict.fromkeys(found))[:PROBLEMS_MAX]


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _kv_use(workers: list[Member]) -> float | None:
    ranks = [rank for worker in workers for rank in worker.ranks]
    total = sum(rank.kv_total_blocks or 0 for rank in ranks)
    return sum(rank.kv_used_blocks for rank in ranks) / total if total else None

"""Publishes a worker's KV events and load: one Publish stream to each indexer in discovery.

Engine events pass through one `PublishedSource` per rank. All events of one loop turn form one
batch in its event log, from which each `IndexerLink` sends at its own pace.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

import structlog

from common.kv.events import Partition
from common.kv.load import LOAD_HEARTBEAT_S, Load
from common.registry.instances import Snapshot
from common.registry.registry import Registry, follow
from common.rpc import channel as rpc
from common.runtime.tasks import TaskGroup
from worker_svc.kv_events.event_log import PublishedSource
from worker_svc.kv_events.external_events import ExternalEvent, PagesCleared, split_event
from worker_svc.kv_events.publish_link import (
    IndexerLink,
    OpenCall,
    Publication,
    grpc_call_opener,
    log_position,
)

# Interval of reading the engine's load; a link sends it if it changed.
LOAD_SAMPLE_S = 0.1
# An indexer spends about 0.1 ms of CPU on a frame. The workers of a larger fleet send loads and
# small batches less often, down to the interval of an unchanged load (ADR 0057).
FULL_RATE_WORKERS = 500
# Between batches of events. An engine step frees and stores blocks every few milliseconds.
PUBLISH_SPACING_S = 0.02
# Between batches of less than BATCH_PAGES: decoding stores single blocks, which matter to the next
# turn of a conversation, seconds later (ADR 0039).
SMALL_BATCH_SPACING_S = 0.1
BATCH_PAGES = 64
# After this time without a shrink request, each interval publishes another tenth.
REGROW_INTERVAL_S = 30.0
REGROW_DIVISOR = 10
REGROW_BLOCKS_MIN = 1024
# Pages of events applied per loop turn: one to three milliseconds of work.
EVENT_PAGES_PER_TURN = 512
# Pages withdrawn, published or freed per loop turn: one or two milliseconds of work.
RESIZE_PAGES_PER_TURN = 1024

log = structlog.get_logger()


class Publisher:
    """Publishes the ranks of one worker, each of which is a source.

    sources: by rank.
    loads: returns the load of each rank; called every load_sample_s while there are links, less
        often in a fleet of more than 500 workers.
    open_call: opens a call to an indexer; None uses gRPC.
    counters: streams opened; snapshots and replays (gap repairs) started; batches sealed;
        events_lost; shrunk_blocks, regrown_blocks; unknown_rank (events dropped).
    """

    def __init__(
        self,
        worker_id: int,
        partition: Partition,
        sources: Mapping[int, PublishedSource],
        loads: Callable[[], Sequence[Load]],
        registry: Registry,
        namespace: str,
        *,
        security: rpc.Security = rpc.PLAINTEXT,
        rng: Random | None = None,
        open_call: OpenCall | None = None,
        load_sample_s: float = LOAD_SAMPLE_S,
    ) -> None:
        self.sources = sources
        self.counters: Counter[str] = Counter()
        self._rng = rng or Random()
        self.publication = Publication(
            worker_id,
            partition,
            sources,
            open_call or grpc_call_opener(security),
            self._rng,
            self.counters,
        )
        self._loads = loads
        self._load_sample_s = load_sample_s
        # Registered ones, this one included.
        self._workers = 1
        self._registry = registry
        self._namespace = namespace
        self._links: dict[int, tuple[IndexerLink, asyncio.Task[None]]] = {}
        # Events that are not applied yet.
        self._backlog: deque[ExternalEvent] = deque()
        # The next publication, and its loop time.
        self._publish_timer: asyncio.Handle | None = None
        self._publish_at = math.inf
        self._published_at = -math.inf
        # Applied since the last batch.
        self._unpublished_pages = 0
        # Whether a shrink started since the last regrow interval.
        self._has_shrunk_since_regrow = False
        # Whether the resize in progress is a shrink.
        self._is_shrinking = False
        # Log position of each rank at the end of the last shrink.
        self._shrink_positions: dict[int, tuple[int, int]] = {}

    @property
    def links(self) -> Sequence[IndexerLink]:
        """Returns the links, one per indexer in discovery."""
        return [link for link, _ in self._links.values()]

    def metric_values(self) -> dict[str, int]:
        """Returns all counters, including those of the sources, prefixed with `kv_`."""
        total = self.counters.copy()
        for source in self.sources.values():
            total.update(source.normalizer.counts)
            total["blocks"] += source.normalizer.published_blocks
        return {f"kv_{name}": count for name, count in total.items()}

    def take(self, events: Iterable[ExternalEvent]) -> None:
        """Applies engine events, in order; never raises. Call it in the event loop.

        The first EVENT_PAGES_PER_TURN pages are applied at once, the others in the next turns.
        """
        is_applying = bool(self._backlog)
        for event in events:
            try:
                self._backlog.extend(split_event(event, EVENT_PAGES_PER_TURN))
            except Exception:
                self._on_apply_error(event.rank)
        if not is_applying:
            self._apply_backlog()

    def _apply_backlog(self) -> None:
        pages = 0
        while self._backlog and pages < EVENT_PAGES_PER_TURN:
            event = self._backlog.popleft()
            pages += 1 if isinstance(event, PagesCleared) else len(event.hashes)
            source = self.sources.get(event.rank)
            if source is None:
                self.counters["unknown_rank"] += 1
                continue
            try:
                source.apply(event)
            except Exception:
                self._on_apply_error(event.rank)
        if self._backlog:
            asyncio.get_running_loop().call_soon(self._apply_backlog)
        self._unpublished_pages += pages
        self._schedule_publish(is_small=self._unpublished_pages < BATCH_PAGES)

    def _drop_backlog(self, rank: int) -> None:
        self._backlog = deque(event for event in self._backlog if event.rank != rank)

    def record_loss(self, rank: int, reason: str) -> None:
        """Starts a new, degraded epoch of a rank, because its events were lost."""
        log.warning("kv_events_lost", dp_rank=rank, reason=reason)
        self.counters["events_lost"] += 1
        self._drop_backlog(rank)
        self.sources[rank].record_loss()
        self._schedule_publish()

    def reset(self, rank: int) -> None:
        """Starts a new epoch of a rank, because its engine restarted with an empty cache."""
        self._drop_backlog(rank)
        self.sources[rank].reset()
        self._schedule_publish()

    async def run(self) -> None:
        async with TaskGroup() as tasks:
            tasks.create_task(self._report_loads(), name="kv load reports")
            tasks.create_task(self._regrow(), name="kv regrowth")
            # If the registry fails, publishing to the present indexers continues.
            await follow(
                self._registry,
                self._namespace,
                lambda snapshot, _: self._update_links(snapshot, tasks),
                self._rng,
            )

    def shrink(self, blocks: int, acked: Mapping[int, tuple[int, int]]) -> None:
        """Starts to withdraw `blocks` blocks, spread over the ranks in proportion.

        acked: position by rank that the requesting indexer has acknowledged. A request sent before
        the indexer acknowledged the end of the last shrink concerns blocks already withdrawn, and
        is ignored.
        """
        if self._is_resizing or any(
            acked.get(rank, (0, 0)) < at for rank, at in self._shrink_positions.items()
        ):
            return
        published = {
            rank: source.normalizer.published_blocks for rank, source in self.sources.items()
        }
        total = sum(published.values())
        if not total:
            return
        log.warning("kv_index_over_budget", requested=blocks, published=total)
        for rank, source in self.sources.items():
            # Rounded up: with fewer the indexer would request again.
            source.normalizer.shrink(-(-blocks * published[rank] // total))
        self._is_shrinking = self._has_shrunk_since_regrow = True
        self._resize()

    @property
    def _is_resizing(self) -> bool:
        return any(source.normalizer.is_resizing for source in self.sources.values())

    def _resize(self) -> None:
        """Performs one part of the resize; events until the next part are published in order."""
        for rank, source in self.sources.items():
            if source.normalizer.is_resizing:
                try:
                    blocks = source.normalizer.resize(RESIZE_PAGES_PER_TURN)
                    self.counters["shrunk_blocks" if blocks < 0 else "regrown_blocks"] += abs(
                        blocks
                    )
                except Exception:
                    self._on_apply_error(rank)
                break
        self._publish_changes()
        if self._is_resizing:
            asyncio.get_running_loop().call_soon(self._resize)
        elif self._is_shrinking:
            self._is_shrinking = False
            self._shrink_positions = {
                rank: log_position(source) for rank, source in self.sources.items()
            }

    def _schedule_publish(self, *, is_small: bool = False) -> None:
        """Publishes in the next turn of the loop, but not before the spacing after the last batch
        is over. is_small: of the batch as it is now."""
        loop = asyncio.get_running_loop()
        small_s = self._report_s(SMALL_BATCH_SPACING_S)
        publish_at = self._published_at + (small_s if is_small else PUBLISH_SPACING_S)
        if publish_at >= self._publish_at:
            return
        self._unschedule_publish()
        self._publish_at = publish_at
        if loop.time() >= publish_at:
            self._publish_timer = loop.call_soon(self._publish)
        else:
            self._publish_timer = loop.call_at(publish_at, self._publish)

    def _unschedule_publish(self) -> None:
        if self._publish_timer is not None:
            self._publish_timer.cancel()
        self._publish_timer, self._publish_at = None, math.inf

    def _publish(self) -> None:
        self._published_at = asyncio.get_running_loop().time()
        self._publish_changes()

    def _publish_changes(self) -> None:
        self._unschedule_publish()
        self._unpublished_pages = 0
        for rank, source in self.sources.items():
            try:
                self.counters["batches"] += len(source.seal_changes())
            except Exception:
                self._on_apply_error(rank)
            if source.normalizer.free_deferred(RESIZE_PAGES_PER_TURN):
                self._schedule_publish()
        for link in self.links:
            link.wake()

    def _on_apply_error(self, rank: int) -> None:
        # A defect of this process; the engine and its requests are not affected.
        log.exception("kv_events_failed", dp_rank=rank)
        self.record_loss(rank, "events could not be applied")

    async def _report_loads(self) -> None:
        is_failing = False
        while True:
            await asyncio.sleep(self._report_s(self._load_sample_s))
            if not self._links:
                continue
            try:
                loads = tuple(self._loads())
                is_failing = False
            except Exception:
                # Missing reports show the failure; events are useful without them.
                if not is_failing:
                    log.exception("engine_loads_failed")
                is_failing = True
                continue
            if self._publish_timer is not None:
                self._publish()  # events and load leave in one frame
            for link in self.links:
                link.report(loads)

    async def _regrow(self) -> None:
        # An indexer reports missing capacity, but no free capacity.
        while True:
            await asyncio.sleep(REGROW_INTERVAL_S)
            if not self._has_shrunk_since_regrow:
                self.grow()
            self._has_shrunk_since_regrow = False

    def grow(self) -> None:
        """Starts to publish a share of the withheld blocks, if any."""
        if self._is_resizing:
            return
        for source in self.sources.values():
            share = source.normalizer.published_blocks // REGROW_DIVISOR
            source.normalizer.grow(max(REGROW_BLOCKS_MIN, share))
        self._resize()

    def _report_s(self, least_s: float) -> float:
        """Returns the seconds between two frames of little urgency."""
        if self._workers <= FULL_RATE_WORKERS:
            return least_s
        return min(least_s * self._workers / FULL_RATE_WORKERS, LOAD_HEARTBEAT_S)

    def _update_links(self, snapshot: Snapshot, tasks: TaskGroup) -> None:
        self._workers = len(snapshot.of("worker"))
        indexers = {instance.id: instance for instance in snapshot.of("indexer")}
        for key, (link, task) in list(self._links.items()):
            if key not in indexers or indexers[key].address != link.indexer.address:
                task.cancel()
                del self._links[key]
        for key, indexer in indexers.items():
            if key not in self._links:
                link = IndexerLink(self.publication, indexer, self.shrink)
                task = tasks.create_task(link.run(), name=f"publish to indexer {key}")
                self._links[key] = (link, task)

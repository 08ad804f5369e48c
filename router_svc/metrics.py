"""The router's metrics: their names, and what is counted where.

Labels take values of fixed sets only: the configured selector, the classes of our errors, and the
operations of a session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.errors import MESH_ERROR_CLASSES, MeshError
from router_svc.core.approx_index import ApproxIndex
from router_svc.core.decision import Decision
from router_svc.core.pairing import BYPASS_REASONS
from router_svc.core.placement import FALLBACK_REASONS
from router_svc.core.query import Query, block_size_of, bookable_decode_blocks
from router_svc.core.replication import Replica
from router_svc.core.router import Router
from router_svc.core.sessions import AFFINITY_OUTCOMES
from router_svc.index_replica import IndexReplica

PREFIX = "kvmesh_router"
# What has another name is counted under this one: a selector of somebody else's may raise anything.
OTHER = "other"
OUTCOMES = ("placed", *(error.kind.lower() for error in MESH_ERROR_CLASSES), OTHER)
UNCLAIMED_KINDS = ("prefill_done", "output", "free", "announce_refused")
STAGES = ("block_hashes", "find_matches", "schedule", "total")
SOURCE_STATES = ("exact", "degraded", "stale", "gapped")
QUEUE_LIMITS = ("requests", "tokens", OTHER)
WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
DECISION_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25)


class Metrics:
    """Counters of one router process, in a Prometheus registry of their own.

    The gauges read the router when they are scraped.
    """

    def __init__(
        self,
        router: Router,
        index: IndexReplica | None = None,
        replica: Replica | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        prefix: str = PREFIX,
    ) -> None:
        self.registry = CollectorRegistry()
        decisions = Counter(
            f"{prefix}_decisions",
            "Decisions by selector and outcome; outcomes are placed or the error's kind.",
            ("selector", "outcome"),
            registry=self.registry,
        )
        selector = router.selector.name
        self._decisions = {name: decisions.labels(selector, name) for name in OUTCOMES}
        self._seconds = Histogram(
            f"{prefix}_decision_seconds",
            "Time to decide and book, without the wire and the wait in the queue.",
            buckets=DECISION_BUCKETS_S,
            registry=self.registry,
        )
        overhead = Histogram(
            f"{prefix}_overhead_seconds",
            "What a placed request waited for, by stage; total is all of them, and the rest.",
            ("stage",),
            buckets=DECISION_BUCKETS_S,
            registry=self.registry,
        )
        self._overhead = {stage: overhead.labels(stage) for stage in STAGES}
        fallbacks = Counter(
            f"{prefix}_aggregated_fallbacks",
            "Requests in one piece although the model has halves of pairs, by what was missing.",
            ("reason",),
            registry=self.registry,
        )
        self._fallbacks = {reason: fallbacks.labels(reason) for reason in FALLBACK_REASONS}
        bypasses = Counter(
            f"{prefix}_prefill_bypasses",
            "Requests in one piece although they could have been split, by why.",
            ("reason",),
            registry=self.registry,
        )
        self._bypasses = {reason: bypasses.labels(reason) for reason in BYPASS_REASONS}
        affinity = Counter(
            f"{prefix}_affinity",
            "Placed requests that name a session, by what became of its binding.",
            ("outcome",),
            registry=self.registry,
        )
        self._affinity = {outcome: affinity.labels(outcome) for outcome in AFFINITY_OUTCOMES}
        self._prompt_blocks = Counter(
            f"{prefix}_prompt_blocks", "Blocks of placed prompts.", registry=self.registry
        )
        self._overlap_blocks = Counter(
            f"{prefix}_overlap_blocks",
            "Those that the chosen worker held already, by the index.",
            registry=self.registry,
        )
        self._gauge(f"{prefix}_queue_requests", "Requests that wait for room.").set_function(
            lambda: len(router.queue)
        )
        self._gauge(f"{prefix}_queue_tokens", "Their prompt tokens.").set_function(
            lambda: router.queue.tokens
        )
        self._wait_seconds = Histogram(
            f"{prefix}_queue_wait_seconds",
            "How long those waited who had to, whatever became of them.",
            buckets=WAIT_BUCKETS_S,
            registry=self.registry,
        )
        queue_full = Counter(
            f"{prefix}_queue_full",
            "Requests turned away because the queue was full, by the limit that was reached.",
            ("limit",),
            registry=self.registry,
        )
        self._queue_full = {limit: queue_full.labels(limit) for limit in QUEUE_LIMITS}
        unclaimed = Counter(
            f"{prefix}_unclaimed",
            "Words about bookings that the router does not hold, or could not take.",
            ("kind",),
            registry=self.registry,
        )
        self._unclaimed = {kind: unclaimed.labels(kind) for kind in UNCLAIMED_KINDS}
        self.sessions = Gauge(f"{prefix}_sessions", "Open sessions.", registry=self.registry)
        self._gauge(f"{prefix}_bookings", "Live bookings.").set_function(lambda: len(router.book))
        self._gauge(
            f"{prefix}_expired_bookings", "Bookings that nobody renewed in time, since the start."
        ).set_function(lambda: router.book.expired)
        self._gauge(f"{prefix}_orphaned_bookings", "Bookings whose session died.").set_function(
            lambda: router.book.orphan_count
        )
        self._gauge(f"{prefix}_workers", "Workers that serve a model.").set_function(
            lambda: router.fleet.worker_count
        )
        guessed = Gauge(
            f"{prefix}_guessed_blocks",
            "Blocks that earlier decisions let workers hold: guesses where nothing is told of a "
            "cache, predictions beside what is told.",
            ("kind",),
            registry=self.registry,
        )
        entries = {"guesses": router.overlaps.approximate, "predictions": router.overlaps.predicted}
        for kind, entries_of_kind in entries.items():
            guessed.labels(kind).set_function(partial(_block_count, entries_of_kind))
        self._gauge(f"{prefix}_affinity_bindings", "Sessions bound to a worker.").set_function(
            lambda: len(router.affinity)
        )
        self._gauge(
            f"{prefix}_affinity_evicted", "Bindings forgotten for want of room, since the start."
        ).set_function(lambda: router.affinity.evicted)
        self._gauge(
            f"{prefix}_stale_reports", "Ranks whose load report is too old to count."
        ).set_function(lambda: router.book.stale_report_count(clock()))
        if index is not None:
            self._add_index_gauges(index, prefix)
        if replica is not None:
            self._add_peer_gauges(replica, prefix)

    def record_queue_wait(self, seconds: float) -> None:
        """One request left the queue, whatever became of it."""
        self._wait_seconds.observe(seconds)

    def refused(self, error: MeshError) -> None:
        """One request got an error; counts those that found the queue full."""
        if error.reason == "QUEUE_FULL":
            limit = error.metadata.get("limit_kind", OTHER)
            self._queue_full.get(limit, self._queue_full[OTHER]).inc()

    def decided(self, outcome: str, seconds: float) -> None:
        """One decision: `placed`, or the kind of the error in lower case; OTHER if we know none."""
        self._decisions.get(outcome, self._decisions[OTHER]).inc()
        self._seconds.observe(seconds)

    def placed(self, query: Query, decision: Decision, seconds: Sequence[float]) -> None:
        """One placement. seconds: of each of STAGES."""
        for stage, spent in zip(STAGES, seconds, strict=True):
            self._overhead[stage].observe(spent)
        self._prompt_blocks.inc(bookable_decode_blocks(query, block_size_of(query, None)))
        self._overlap_blocks.inc(decision.overlap_blocks)
        if decision.fallback:
            self._fallbacks[decision.fallback].inc()
        if decision.bypass:
            self._bypasses[decision.bypass].inc()
        if decision.affinity:
            self._affinity[decision.affinity].inc()

    def unclaimed(self, kind: str) -> None:
        """A word about a booking that came to nothing: one of UNCLAIMED_KINDS."""
        self._unclaimed[kind].inc()

    def _add_index_gauges(self, index: IndexReplica, prefix: str) -> None:
        feed = index.feed
        self._gauge(f"{prefix}_index_connected", "Whether an indexer is followed.").set_function(
            lambda: index.indexer_id is not None
        )
        self._gauge(
            f"{prefix}_index_blocks", "Blocks in the index; one held n times counts n times."
        ).set_function(lambda: feed.blocks)
        sources = Gauge(
            f"{prefix}_index_sources",
            "Ranks in the index by state; gapped ones do not count.",
            ("state",),
            registry=self.registry,
        )

        def count(state: str) -> int:
            return sum(feed.status(source).state == state for source in feed.sources())

        for state in SOURCE_STATES:
            sources.labels(state).set_function(partial(count, state))

    def _add_peer_gauges(self, replica: Replica, prefix: str) -> None:
        self._gauge(f"{prefix}_peers", "Routers that tell of their bookings.").set_function(
            lambda: len(replica.peers)
        )
        self._gauge(
            f"{prefix}_sync_resends", "How often a peer was asked to tell everything anew."
        ).set_function(lambda: replica.resends)
        self._gauge(
            f"{prefix}_sync_refused",
            "Entries of peers that were left out: they cannot be, or the book is full.",
        ).set_function(lambda: replica.refused)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)


def _block_count(index: ApproxIndex | None) -> int:
    return 0 if index is None else index.blocks

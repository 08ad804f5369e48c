"""The metrics of the router.

Label values come from fixed sets: the configured selector, the error classes, and enumerations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.errors import MESH_ERROR_CLASSES, MeshError
from router_svc.core.approx_index import ApproxIndex
from router_svc.core.pairing import BYPASS_REASONS
from router_svc.core.placement import FALLBACK_REASONS
from router_svc.core.query import Query, block_size_of, bookable_decode_blocks
from router_svc.core.replication import Replica
from router_svc.core.router import Decision, Router
from router_svc.core.sessions import AFFINITY_OUTCOMES
from router_svc.index_replica import IndexReplica

PREFIX = "kvmesh_router"
# The label of any other value: a selector of a plug-in may raise any error.
OTHER = "other"
OUTCOMES = ("placed", *(error.kind.lower() for error in MESH_ERROR_CLASSES), OTHER)
UNCLAIMED_KINDS = ("prefill_done", "output", "free", "announce_refused")
STAGES = ("block_hashes", "find_matches", "schedule", "total")
SOURCE_STATES = ("exact", "degraded", "stale", "gapped")
QUEUE_LIMITS = ("requests", "tokens", OTHER)
WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
DECISION_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25)


class Metrics:
    """The metrics of one router process, in a Prometheus registry of their own.

    The gauges read the router at each scrape.
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
            "Placement decisions by selector and outcome: placed, or the kind of the error.",
            ("selector", "outcome"),
            registry=self.registry,
        )
        selector = router.selector.name
        self._decisions = {name: decisions.labels(selector, name) for name in OUTCOMES}
        self._seconds = Histogram(
            f"{prefix}_decision_seconds",
            "Seconds to decide and book, without network and admission queue.",
            buckets=DECISION_BUCKETS_S,
            registry=self.registry,
        )
        overhead = Histogram(
            f"{prefix}_overhead_seconds",
            "Decision seconds of placed requests by stage; total includes all stages.",
            ("stage",),
            buckets=DECISION_BUCKETS_S,
            registry=self.registry,
        )
        self._overhead = {stage: overhead.labels(stage) for stage in STAGES}
        fallbacks = Counter(
            f"{prefix}_aggregated_fallbacks",
            "Requests served aggregated despite prefill or decode workers, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self._fallbacks = {reason: fallbacks.labels(reason) for reason in FALLBACK_REASONS}
        bypasses = Counter(
            f"{prefix}_prefill_bypasses",
            "Requests served aggregated although a pair was available, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self._bypasses = {reason: bypasses.labels(reason) for reason in BYPASS_REASONS}
        affinity = Counter(
            f"{prefix}_affinity",
            "Placed requests with a session, by outcome for its placement.",
            ("outcome",),
            registry=self.registry,
        )
        self._affinity = {outcome: affinity.labels(outcome) for outcome in AFFINITY_OUTCOMES}
        self._prompt_blocks = Counter(
            f"{prefix}_prompt_blocks", "KV blocks of placed prompts.", registry=self.registry
        )
        self._overlap_blocks = Counter(
            f"{prefix}_overlap_blocks",
            "KV blocks of placed prompts that the chosen worker held according to the index.",
            registry=self.registry,
        )
        self._gauge(f"{prefix}_queue_requests", "Requests in the admission queue.").set_function(
            lambda: len(router.queue)
        )
        self._gauge(f"{prefix}_queue_tokens", "Prompt tokens in the admission queue.").set_function(
            lambda: router.queue.tokens
        )
        self._wait_seconds = Histogram(
            f"{prefix}_queue_wait_seconds",
            "Seconds in the admission queue, all outcomes.",
            buckets=WAIT_BUCKETS_S,
            registry=self.registry,
        )
        queue_full = Counter(
            f"{prefix}_queue_full",
            "Requests rejected because the admission queue was full, by limit reached.",
            ("limit",),
            registry=self.registry,
        )
        self._queue_full = {limit: queue_full.labels(limit) for limit in QUEUE_LIMITS}
        unclaimed = Counter(
            f"{prefix}_unclaimed",
            "Reports about bookings that the router does not own or could not add, by kind.",
            ("kind",),
            registry=self.registry,
        )
        self._unclaimed = {kind: unclaimed.labels(kind) for kind in UNCLAIMED_KINDS}
        self.sessions = Gauge(
            f"{prefix}_sessions", "Open sessions of frontends.", registry=self.registry
        )
        self._gauge(f"{prefix}_bookings", "Bookings, including those of peers.").set_function(
            lambda: len(router.book)
        )
        self._gauge(
            f"{prefix}_expired_bookings", "Bookings that expired without renewal, since the start."
        ).set_function(lambda: router.book.expired)
        self._gauge(
            f"{prefix}_orphaned_bookings", "Bookings without an owner after their session ended."
        ).set_function(lambda: router.book.orphan_count)
        self._gauge(f"{prefix}_workers", "Workers that serve a model.").set_function(
            lambda: router.fleet.worker_count
        )
        derived_blocks = Gauge(
            f"{prefix}_guessed_blocks",
            "Blocks derived from earlier decisions: guesses for workers without KV events, "
            "predictions for workers with them.",
            ("kind",),
            registry=self.registry,
        )
        entries = {"guesses": router.overlaps.approximate, "predictions": router.overlaps.predicted}
        for kind, entries_of_kind in entries.items():
            derived_blocks.labels(kind).set_function(partial(_block_count, entries_of_kind))
        self._gauge(
            f"{prefix}_affinity_bindings", "Client sessions placed on a worker."
        ).set_function(lambda: len(router.affinity))
        self._gauge(
            f"{prefix}_affinity_evicted",
            "Session records evicted for lack of capacity, since the start.",
        ).set_function(lambda: router.affinity.evicted)
        self._gauge(
            f"{prefix}_stale_reports", "Ranks with a load report that is too old to count."
        ).set_function(lambda: router.book.ranks.stale_report_count(clock()))
        if index is not None:
            self._add_index_gauges(index, prefix)
        if replica is not None:
            self._add_peer_gauges(replica, prefix)

    def record_queue_wait(self, seconds: float) -> None:
        """Record a request that left the queue, all outcomes."""
        self._wait_seconds.observe(seconds)

    def refused(self, error: MeshError) -> None:
        """Record a request that failed; counts those that found the queue full."""
        if error.reason == "QUEUE_FULL":
            limit = error.metadata.get("limit_kind", OTHER)
            self._queue_full.get(limit, self._queue_full[OTHER]).inc()

    def decided(self, outcome: str, seconds: float) -> None:
        """Record a decision: `placed`, or the kind of the error in lower case, else OTHER."""
        self._decisions.get(outcome, self._decisions[OTHER]).inc()
        self._seconds.observe(seconds)

    def placed(self, query: Query, decision: Decision, seconds: Sequence[float]) -> None:
        """Record a placement. seconds: of each of STAGES."""
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
        """Record a report about a booking that had no effect: one of UNCLAIMED_KINDS."""
        self._unclaimed[kind].inc()

    def _add_index_gauges(self, index: IndexReplica, prefix: str) -> None:
        feed = index.feed
        self._gauge(
            f"{prefix}_index_connected", "1 if an indexer is followed, else 0."
        ).set_function(lambda: index.indexer_id is not None)
        self._gauge(
            f"{prefix}_index_blocks", "Blocks in the index; a block on n ranks counts n times."
        ).set_function(lambda: feed.blocks)
        sources = Gauge(
            f"{prefix}_index_sources",
            "Ranks in the index by state; blocks of gapped ranks are ignored.",
            ("state",),
            registry=self.registry,
        )

        def count(state: str) -> int:
            return sum(feed.status(source).state == state for source in feed.sources())

        for state in SOURCE_STATES:
            sources.labels(state).set_function(partial(count, state))

    def _add_peer_gauges(self, replica: Replica, prefix: str) -> None:
        self._gauge(f"{prefix}_peers", "Peer routers that send their bookings.").set_function(
            lambda: len(replica.peers)
        )
        self._gauge(f"{prefix}_sync_resends", "Full syncs requested from peers.").set_function(
            lambda: replica.resends
        )
        self._gauge(
            f"{prefix}_sync_refused",
            "Entries of peers that were refused: invalid, or too many bookings.",
        ).set_function(lambda: replica.refused)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)


def _block_count(index: ApproxIndex | None) -> int:
    return 0 if index is None else index.blocks

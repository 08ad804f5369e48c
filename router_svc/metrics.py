"""The metrics of the router.

Label values come from fixed sets: the configured selector, the error classes, and enumerations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    ) -> None:
        self.registry = CollectorRegistry()
        self._add_request_metrics(router.selector.name)
        self._add_gauges(router, clock)
        if index is not None:
            self._add_index_gauges(index)
        if replica is not None:
            self._gauge(
                "peers", "Peer routers that send their bookings.", lambda: len(replica.peers)
            )
            self._gauge("sync_resends", "Full syncs requested from peers.", lambda: replica.resends)
            self._gauge(
                "sync_refused",
                "Entries of peers that were refused: invalid, or too many bookings.",
                lambda: replica.refused,
            )

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

    def _add_request_metrics(self, selector: str) -> None:
        decisions = self._counter(
            "decisions",
            "Placement decisions by selector and outcome: placed, or the kind of the error.",
            "selector",
            "outcome",
        )
        self._decisions = {name: decisions.labels(selector, name) for name in OUTCOMES}
        self._seconds = self._histogram(
            "decision_seconds",
            "Seconds to decide and book, without network and admission queue.",
            DECISION_BUCKETS_S,
        )
        overhead = self._histogram(
            "overhead_seconds",
            "Decision seconds of placed requests by stage; total includes all stages.",
            DECISION_BUCKETS_S,
            "stage",
        )
        self._overhead = {stage: overhead.labels(stage) for stage in STAGES}
        self._wait_seconds = self._histogram(
            "queue_wait_seconds", "Seconds in the admission queue, all outcomes.", WAIT_BUCKETS_S
        )
        self._prompt_blocks = self._counter("prompt_blocks", "KV blocks of placed prompts.")
        self._overlap_blocks = self._counter(
            "overlap_blocks",
            "KV blocks of placed prompts that the chosen worker held according to the index.",
        )
        self._fallbacks = self._counters(
            "aggregated_fallbacks",
            "Requests served aggregated despite prefill or decode workers, by reason.",
            "reason",
            FALLBACK_REASONS,
        )
        self._bypasses = self._counters(
            "prefill_bypasses",
            "Requests served aggregated although a pair was available, by reason.",
            "reason",
            BYPASS_REASONS,
        )
        self._affinity = self._counters(
            "affinity",
            "Placed requests with a session, by outcome for its placement.",
            "outcome",
            AFFINITY_OUTCOMES,
        )
        self._queue_full = self._counters(
            "queue_full",
            "Requests rejected because the admission queue was full, by limit reached.",
            "limit",
            QUEUE_LIMITS,
        )
        self._unclaimed = self._counters(
            "unclaimed",
            "Reports about bookings that the router does not own or could not add, by kind.",
            "kind",
            UNCLAIMED_KINDS,
        )
        self.sessions = Gauge(
            f"{PREFIX}_sessions", "Open sessions of frontends.", registry=self.registry
        )

    def _add_gauges(self, router: Router, clock: Callable[[], float]) -> None:
        load_tracker, affinity = router.load_tracker, router.affinity
        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("queue_requests", "Requests in the admission queue.", lambda: len(router.queue)),
            (
                "queue_tokens",
                "Prompt tokens in the admission queue.",
                lambda: router.queue.tokens,
            ),
            ("bookings", "Bookings, including those of peers.", lambda: len(load_tracker)),
            (
                "expired_bookings",
                "Bookings that expired without renewal, since the start.",
                lambda: load_tracker.expired,
            ),
            (
                "orphaned_bookings",
                "Bookings without an owner after their session ended.",
                lambda: load_tracker.orphan_count,
            ),
            (
                "stale_reports",
                "Ranks with a load report that is too old to count.",
                lambda: load_tracker.ranks.stale_report_count(clock()),
            ),
            ("workers", "Workers that serve a model.", lambda: router.fleet.worker_count),
            ("affinity_bindings", "Client sessions placed on a worker.", lambda: len(affinity)),
            (
                "affinity_evicted",
                "Session records evicted for lack of capacity, since the start.",
                lambda: affinity.evicted,
            ),
        )
        for name, text, read in gauges:
            self._gauge(name, text, read)
        overlaps = router.overlaps
        self._gauges(
            "guessed_blocks",
            "Blocks derived from earlier decisions: guesses for workers without KV events, "
            "predictions for workers with them.",
            "kind",
            {
                "guesses": partial(_block_count, overlaps.approximate),
                "predictions": partial(_block_count, overlaps.predicted),
            },
        )

    def _add_index_gauges(self, index: IndexReplica) -> None:
        feed = index.feed

        def count(state: str) -> int:
            return sum(feed.status(source).state == state for source in feed.sources())

        self._gauge(
            "index_connected",
            "1 if an indexer is followed, else 0.",
            lambda: index.indexer_id is not None,
        )
        self._gauge(
            "index_blocks",
            "Blocks in the index; a block on n ranks counts n times.",
            lambda: feed.blocks,
        )
        self._gauges(
            "index_sources",
            "Ranks in the index by state; blocks of gapped ranks are ignored.",
            "state",
            {state: partial(count, state) for state in SOURCE_STATES},
        )

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(f"{PREFIX}_{name}", text, registry=self.registry).set_function(read)

    def _gauges(
        self, name: str, text: str, label: str, reads: Mapping[str, Callable[[], float]]
    ) -> None:
        gauge = Gauge(f"{PREFIX}_{name}", text, (label,), registry=self.registry)
        for value, read in reads.items():
            gauge.labels(value).set_function(read)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def _counters(
        self, name: str, text: str, label: str, values: Iterable[str]
    ) -> dict[str, Counter]:
        counter = self._counter(name, text, label)
        return {value: counter.labels(value) for value in values}


def _block_count(index: ApproxIndex | None) -> int:
    return 0 if index is None else index.blocks

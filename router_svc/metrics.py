"""The router's metrics: their names, and what is counted where.

Labels take values of fixed sets only: the configured selector, the classes of our errors, and the
operations of a session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.errors import MESH_ERRORS
from router_svc.core.query import Query, block_size_of, decode_charge
from router_svc.core.route import FALLBACKS, Decision, Router
from router_svc.index_replica import IndexReplica

PREFIX = "kvmesh_router"
OUTCOMES = ("placed", *(error.kind.lower() for error in MESH_ERRORS))
UNCLAIMED_KINDS = ("prefill_done", "output", "free", "announce_refused")
STAGES = ("block_hashes", "find_matches", "schedule", "total")
SOURCE_STATES = ("exact", "degraded", "stale", "gapped")
DECISION_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25)


class Metrics:
    """Counters of one router process, in a Prometheus registry of their own.

    The gauges read the router when they are scraped.
    """

    def __init__(
        self,
        router: Router,
        index: IndexReplica | None = None,
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
            "Time to decide and book, without the wire.",
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
        self._fallbacks = {reason: fallbacks.labels(reason) for reason in FALLBACKS}
        self._prompt_blocks = Counter(
            f"{prefix}_prompt_blocks", "Blocks of placed prompts.", registry=self.registry
        )
        self._overlap_blocks = Counter(
            f"{prefix}_overlap_blocks",
            "Those that the chosen worker held already, by the index.",
            registry=self.registry,
        )
        unclaimed = Counter(
            f"{prefix}_unclaimed",
            "Words about bookings that the router does not hold, or could not take.",
            ("kind",),
            registry=self.registry,
        )
        self._unclaimed = {kind: unclaimed.labels(kind) for kind in UNCLAIMED_KINDS}
        self.sessions = Gauge(f"{prefix}_sessions", "Open sessions.", registry=self.registry)
        self._gauge(f"{prefix}_bookings", "Live bookings.").set_function(lambda: len(router.book))
        self._gauge(f"{prefix}_orphaned_bookings", "Bookings whose session died.").set_function(
            lambda: router.book.orphan_count
        )
        self._gauge(f"{prefix}_workers", "Workers that serve a model.").set_function(
            lambda: router.fleet.worker_count
        )
        self._gauge(
            f"{prefix}_stale_reports", "Ranks whose load report is too old to count."
        ).set_function(lambda: router.book.stale_reports(clock()))
        if index is not None:
            self._watch_index(index, prefix)

    def decided(self, outcome: str, seconds: float) -> None:
        """One decision: `placed`, or the kind of the error in lower case."""
        self._decisions[outcome].inc()
        self._seconds.observe(seconds)

    def placed(self, query: Query, decision: Decision, seconds: Sequence[float]) -> None:
        """One placement. seconds: of each of STAGES."""
        for stage, spent in zip(STAGES, seconds, strict=True):
            self._overhead[stage].observe(spent)
        self._prompt_blocks.inc(decode_charge(query, block_size_of(query, None)))
        self._overlap_blocks.inc(decision.overlap_blocks)
        if decision.fallback:
            self._fallbacks[decision.fallback].inc()

    def unclaimed(self, kind: str) -> None:
        """A word about a booking that came to nothing: one of UNCLAIMED_KINDS."""
        self._unclaimed[kind].inc()

    def _watch_index(self, index: IndexReplica, prefix: str) -> None:
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

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

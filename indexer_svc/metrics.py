"""Metrics of the indexer. Label values come from fixed sets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram

from common.kv.events import SOURCE_STATES
from common.service.state_metrics import Reading, StateCollector, counter, gauge
from indexer_svc.ingest import Ingest

PREFIX = "kvmesh_indexer"
MATCH_BUCKETS_S = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 1e-2)


class Metrics:
    """Metrics of one indexer process, in their own Prometheus registry."""

    def __init__(self, ingest: Ingest, *, prefix: str = PREFIX) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(StateCollector(prefix, partial(_read_state, ingest)))
        self.match_seconds = Histogram(
            f"{prefix}_match_seconds",
            "Seconds of one match, without the RPC.",
            buckets=MATCH_BUCKETS_S,
            registry=self.registry,
        )
        self.subscribers_cut = Counter(
            f"{prefix}_subscribers_cut",
            "Subscriptions ended because the subscriber read too slowly.",
            registry=self.registry,
        )


def _read_state(ingest: Ingest) -> Iterator[Reading]:
    feed, counters = ingest.feed, ingest.feed.counters
    text = "Indexed blocks; a block held by n sources counts n times."
    yield gauge("blocks", text, feed.blocks)
    yield gauge("used_bytes", "Estimated memory of the index in bytes.", ingest.used_bytes)
    text = "Memory that the index may use in bytes; 0: no limit."
    yield gauge("budget_bytes", text, ingest.budget.budget_bytes)
    yield gauge("publishers", "Open Publish streams.", len(ingest.publishers))
    yield gauge("subscribers", "Open Subscribe streams.", len(ingest.subscribers))
    counts = feed.state_counts()
    states = {state: counts[state] for state in sorted(SOURCE_STATES)}
    yield gauge("sources", "Sources by state.", states, label="state")
    yield counter("batches", "Event batches applied.", counters.batches)
    text = "Event batches received again and ignored."
    yield counter("duplicates", text, counters.duplicates)
    yield counter("gaps", "Times a source became gapped.", counters.gaps)
    yield counter("snapshots", "Snapshots swapped in.", counters.snapshots)
    yield counter("overflows", "Buffers dropped at their size limit.", counters.overflows)
    text = "Ingest slices longer than twice their limit."
    yield counter("slow_slices", text, ingest.slow_slices)

"""Metrics of the indexer. Label values come from fixed sets."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.kv.events import SOURCE_STATES
from indexer_svc.ingest import Ingest

PREFIX = "kvmesh_indexer"
MATCH_BUCKETS_S = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 1e-2)


class Metrics:
    """Metrics of one indexer process, in their own Prometheus registry."""

    def __init__(self, ingest: Ingest, *, prefix: str = PREFIX) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_State(ingest, prefix))
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


class _State(Collector):
    """Values that are read at each scrape."""

    def __init__(self, ingest: Ingest, prefix: str) -> None:
        self._ingest = ingest
        self._prefix = prefix

    def collect(self) -> Iterable[Metric]:
        ingest, prefix = self._ingest, self._prefix
        feed, counters = ingest.feed, ingest.feed.counters
        for name, text, value in (
            ("blocks", "Indexed blocks; a block held by n sources counts n times.", feed.blocks),
            ("used_bytes", "Estimated memory of the index in bytes.", ingest.used_bytes),
            ("publishers", "Open Publish streams.", len(ingest.publishers)),
            ("subscribers", "Open Subscribe streams.", len(ingest.subscribers)),
        ):
            yield GaugeMetricFamily(f"{prefix}_{name}", text, value=value)
        states = feed.state_counts()
        sources = GaugeMetricFamily(f"{prefix}_sources", "Sources by state.", labels=["state"])
        for state in sorted(SOURCE_STATES):
            sources.add_metric([state], states[state])
        yield sources
        for name, text, value in (
            ("batches", "Event batches applied.", counters.batches),
            ("duplicates", "Event batches received again and ignored.", counters.duplicates),
            ("gaps", "Times a source became gapped.", counters.gaps),
            ("snapshots", "Snapshots swapped in.", counters.snapshots),
            ("overflows", "Buffers dropped at their size limit.", counters.overflows),
            ("slow_slices", "Ingest slices longer than twice their limit.", ingest.slow_slices),
        ):
            yield CounterMetricFamily(f"{prefix}_{name}", text, value=value)

"""The indexer's metrics: their names, and what is counted where.

Labels take values of fixed sets only: the states of a source, and what can happen to a batch.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.wire.kv import SOURCE_STATES
from indexer_svc.ingest import Ingest

PREFIX = "kvmesh_indexer"
MATCH_BUCKETS_S = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 1e-2)


class Metrics:
    """Counters of one indexer process, in a Prometheus registry of their own."""

    def __init__(self, ingest: Ingest, *, prefix: str = PREFIX) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_State(ingest, prefix))
        self.match_seconds = Histogram(
            f"{prefix}_match_seconds",
            "Time of one match, without the wire.",
            buckets=MATCH_BUCKETS_S,
            registry=self.registry,
        )
        self.subscribers_cut = Counter(
            f"{prefix}_subscribers_cut",
            "Subscribers that read too slowly and have to resume.",
            registry=self.registry,
        )


class _State(Collector):
    """Read when scraped."""

    def __init__(self, ingest: Ingest, prefix: str) -> None:
        self._ingest = ingest
        self._prefix = prefix

    def collect(self) -> Iterable[Metric]:
        ingest, prefix = self._ingest, self._prefix
        feed, counters = ingest.feed, ingest.feed.counters
        for name, text, value in (
            ("blocks", "Blocks claimed; one held by n sources counts n times.", feed.blocks),
            ("used_bytes", "Bytes the index is estimated to use.", ingest.used_bytes),
            ("publishers", "Open Publish streams.", len(ingest.publishers)),
            ("subscribers", "Open Subscribe streams.", len(ingest.subscribers)),
        ):
            yield GaugeMetricFamily(f"{prefix}_{name}", text, value=value)
        states = Tally(feed.status(source).state for source in feed.sources())
        sources = GaugeMetricFamily(f"{prefix}_sources", "Sources by state.", labels=["state"])
        for state in sorted(SOURCE_STATES):
            sources.add_metric([state], states[state])
        yield sources
        for name, text, value in (
            ("batches", "Event batches applied.", counters.batches),
            ("duplicates", "Event batches that were had.", counters.duplicates),
            ("gaps", "Times a source became gapped.", counters.gaps),
            ("snapshots", "Snapshots swapped in.", counters.snapshots),
            ("overflows", "Buffers that were dropped at their cap.", counters.overflows),
            ("slow_slices", "Slices of ingest over twice their time.", ingest.slow_slices),
        ):
            yield CounterMetricFamily(f"{prefix}_{name}", text, value=value)

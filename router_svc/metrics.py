"""The metrics of the router.

Label values come from fixed sets: the configured selector, the error classes, and enumerations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from common.errors import MESH_ERROR_CLASSES, MeshError
from common.request.placement import Query
from common.service.histogram import SingleThreadHistogram
from common.service.state_metrics import Reading, StateCollector, gauge
from router_svc.core.decision import DecisionRecord
from router_svc.core.key_affinity import KEY_OUTCOMES
from router_svc.core.pairing import BYPASS_REASONS
from router_svc.core.placement import FALLBACK_REASONS
from router_svc.core.query import block_size_of, bookable_decode_blocks
from router_svc.core.replicas import Replicas
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
    """The metrics of one router process, in their own registry. A scrape reads the gauges."""

    def __init__(
        self,
        router: Router,
        index: IndexReplica | None = None,
        replica: Replica | None = None,
        replicas: Replicas | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry()
        if replicas is not None:
            self.registry.register(ReplicasCollector(replicas))
        self._add_request_metrics(router.selector.name)
        self.registry.register(
            StateCollector(PREFIX, partial(_read_state, router, index, replica, clock))
        )

    def record_queue_wait(self, seconds: float) -> None:
        """Records a request that left the queue, all outcomes."""
        self._wait_seconds.observe(seconds)

    def refused(self, error: MeshError) -> None:
        """Records a request that failed; counts those that found the queue full."""
        if error.reason == "QUEUE_FULL":
            limit = error.metadata.get("limit_kind", OTHER)
            self._queue_full.get(limit, self._queue_full[OTHER]).inc()

    def decided(self, outcome: str, seconds: float) -> None:
        """Records a decision: `placed`, or the kind of the error in lower case, else OTHER."""
        self._decisions.get(outcome, self._decisions[OTHER]).inc()
        self._seconds.observe(seconds)

    def placed(self, query: Query, record: DecisionRecord, seconds: Sequence[float]) -> None:
        """Records a placement. seconds: of each of STAGES."""
        for stage, spent in zip(self._overhead, seconds, strict=True):
            stage.observe(spent)
        self._prompt_blocks.inc(bookable_decode_blocks(query, block_size_of(query, None)))
        self._overlap_blocks.inc(record.decision.overlap_blocks)
        if record.fallback:
            self._fallbacks[record.fallback].inc()
        if record.bypass:
            self._bypasses[record.bypass].inc()
        if record.affinity:
            self._affinity[record.affinity].inc()
        if record.key_affinity:
            self._key_affinity[record.key_affinity].inc()

    def unclaimed(self, kind: str) -> None:
        """Records a report about a booking that had no effect: one of UNCLAIMED_KINDS."""
        self._unclaimed[kind].inc()

    def _add_request_metrics(self, selector: str) -> None:
        decisions = self._counter(
            "decisions",
            "Placement decisions by selector and outcome: placed, or the kind of the error.",
            "selector",
            "outcome",
        )
        self._decisions = {name: decisions.labels(selector, name) for name in OUTCOMES}
        text = "Seconds to decide and book, without network and admission queue."
        self._seconds = self._histogram("decision_seconds", text, DECISION_BUCKETS_S).labels("")
        text = "Decision seconds of placed requests by stage; total includes all stages."
        overhead = self._histogram("overhead_seconds", text, DECISION_BUCKETS_S, "stage")
        self._overhead = [overhead.labels(stage) for stage in STAGES]
        text = "Seconds in the admission queue, all outcomes."
        self._wait_seconds = self._histogram("queue_wait_seconds", text, WAIT_BUCKETS_S).labels("")
        self._prompt_blocks = self._counter("prompt_blocks", "KV blocks of placed prompts.")
        text = "KV blocks of placed prompts that the chosen worker held according to the index."
        self._overlap_blocks = self._counter("overlap_blocks", text)
        text = "Requests served aggregated despite prefill or decode workers, by reason."
        self._fallbacks = self._counters("aggregated_fallbacks", text, "reason", FALLBACK_REASONS)
        text = "Requests served aggregated although a pair was available, by reason."
        self._bypasses = self._counters("prefill_bypasses", text, "reason", BYPASS_REASONS)
        text = "Placed requests with a session, by outcome for its placement."
        self._affinity = self._counters("affinity", text, "outcome", AFFINITY_OUTCOMES)
        text = "Placed requests whose client names their conversation, by outcome for its worker."
        self._key_affinity = self._counters("key_affinity", text, "outcome", KEY_OUTCOMES)
        text = "Requests rejected because the admission queue was full, by limit reached."
        self._queue_full = self._counters("queue_full", text, "limit", QUEUE_LIMITS)
        text = "Reports about bookings that the router does not own or could not add, by kind."
        self._unclaimed = self._counters("unclaimed", text, "kind", UNCLAIMED_KINDS)
        self.sessions = Gauge(
            f"{PREFIX}_sessions", "Open sessions of frontends.", registry=self.registry
        )

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], label: str | None = None
    ) -> SingleThreadHistogram:
        histogram = SingleThreadHistogram(f"{PREFIX}_{name}", text, bounds, label)
        self.registry.register(histogram)
        return histogram

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def _counters(
        self, name: str, text: str, label: str, values: Iterable[str]
    ) -> dict[str, Counter]:
        counter = self._counter(name, text, label)
        return {value: counter.labels(value) for value in values}


class ReplicasCollector(Collector):
    """The recommended number of workers of each pool, see docs/scaling.md. Values of `model` are
    models of the registry and of the configuration of frontends."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[GaugeMetricFamily]:
        pool = ("model", "role")
        text = "Workers that the load needs, by why; the greatest value of all routers counts."
        recommended = self._gauge("recommended_workers", text, (*pool, "reason"))
        present = self._gauge("pool_workers", "Workers that serve.", pool)
        text = "1 if no worker of the model is there or needed: it wakes at a request."
        asleep = self._gauge("pool_asleep", text, pool)
        for key, found in self._replicas:
            advice = found.advice
            recommended.add_metric((*key, advice.reason), advice.replicas)
            present.add_metric(key, found.sample.present)
            asleep.add_metric(key, found.state == "asleep")
        yield from (recommended, present, asleep)

    def _gauge(self, name: str, text: str, labels: Sequence[str]) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def _read_state(
    router: Router,
    index: IndexReplica | None,
    replica: Replica | None,
    clock: Callable[[], float],
) -> Iterator[Reading]:
    yield from _read_router(router, clock())
    if index is not None:
        yield from _read_index(index)
    if replica is not None:
        yield from _read_replica(replica)


def _read_router(router: Router, now: float) -> Iterator[Reading]:
    queue, tracker, affinity = router.queue, router.load_tracker, router.affinity
    yield gauge("queue_requests", "Requests in the admission queue.", len(queue))
    yield gauge("queue_tokens", "Prompt tokens in the admission queue.", queue.tokens)
    text = (
        "Seconds that the oldest request in the admission queue has waited; 0 without one. Lines of"
        " batches do not count."
    )
    yield gauge("queue_age_seconds", text, queue.oldest_wait_s(now))
    yield gauge("bookings", "Bookings, including those of peers.", len(tracker))
    text = "Bookings that expired without renewal, since the start."
    yield gauge("expired_bookings", text, tracker.expired)
    text = "Bookings without an owner after their session ended."
    yield gauge("orphaned_bookings", text, tracker.orphan_count)
    text = "Ranks with a load report that is too old to count."
    yield gauge("stale_reports", text, tracker.ranks.stale_report_count(now))
    yield gauge("workers", "Workers that serve a model.", router.fleet.worker_count)
    yield gauge("affinity_bindings", "Client sessions placed on a worker.", len(affinity))
    text = "Conversations that clients name, placed on a worker and not evicted."
    yield gauge("affinity_keys", text, len(router.key_affinity))
    text = "Session records evicted for lack of capacity, since the start."
    yield gauge("affinity_evicted", text, affinity.evicted)
    text = (
        "Blocks derived from earlier decisions: guesses for workers without KV events, "
        "predictions for workers with them."
    )
    indexes = {"guesses": router.overlaps.approximate, "predictions": router.overlaps.predicted}
    blocks = {kind: 0 if found is None else found.blocks for kind, found in indexes.items()}
    yield gauge("guessed_blocks", text, blocks, label="kind")


def _read_index(index: IndexReplica) -> Iterator[Reading]:
    is_connected = index.indexer_id is not None
    yield gauge("index_connected", "1 if an indexer is followed, else 0.", is_connected)
    text = "Blocks in the index; a block on n ranks counts n times."
    yield gauge("index_blocks", text, index.feed.blocks)
    counts = index.feed.state_counts()
    text = "Ranks in the index by state; blocks of gapped ranks are ignored."
    states = {state: counts[state] for state in SOURCE_STATES}
    yield gauge("index_sources", text, states, label="state")


def _read_replica(replica: Replica) -> Iterator[Reading]:
    yield gauge("peers", "Peer routers that send their bookings.", len(replica.peers))
    yield gauge("sync_resends", "Full syncs requested from peers.", replica.resends)
    text = "Entries of peers that were refused: invalid, or too many bookings."
    yield gauge("sync_refused", text, replica.refused)

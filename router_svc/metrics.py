"""The router's metrics: their names, and what is counted where.

Labels take values of fixed sets only: the configured selector, the classes of our errors, and the
operations of a session.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.errors import MESH_ERRORS
from router_svc.core.route import Router

PREFIX = "kvmesh_router"
OUTCOMES = ("placed", *(error.kind.lower() for error in MESH_ERRORS))
UNCLAIMED_KINDS = ("prefill_done", "output", "free", "announce_refused")
DECISION_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25)


class Metrics:
    """Counters of one router process, in a Prometheus registry of their own.

    The gauges read the router when they are scraped.
    """

    def __init__(self, router: Router, *, prefix: str = PREFIX) -> None:
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

    def decided(self, outcome: str, seconds: float) -> None:
        """One decision: `placed`, or the kind of the error in lower case."""
        self._decisions[outcome].inc()
        self._seconds.observe(seconds)

    def unclaimed(self, kind: str) -> None:
        """A word about a booking that came to nothing: one of UNCLAIMED_KINDS."""
        self._unclaimed[kind].inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

"""The use of the requests of one process: since its start for metrics, by hour in the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from common.usage import DIMENSIONS, UsageCounts, UsageKey
from frontend_svc.usage.store import UsageStore

# Keys that a process counts apart, so that adapters and new API keys cannot create more series.
KEYS_MAX = 2048
# The key of all others.
OTHER_KEY = UsageKey("other", "other", "other", "other")

_METRICS: Mapping[str, str] = {
    "requests": "Ended requests for which a placement was requested",
    "failed_requests": "Those with an error, or whose client disconnected",
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts that were in the KV cache",
    "output_tokens": "Tokens of responses",
}


class UsageLedger:
    """Counts ended requests. now_s: returns Unix seconds.

    The event loop's thread counts; a scrape may read from another thread.
    """

    def __init__(self, store: UsageStore, now_s: Callable[[], float]) -> None:
        self.store = store
        self._now_s = now_s
        self._totals: dict[UsageKey, UsageCounts] = {}

    def add(self, key: UsageKey, counts: UsageCounts) -> None:
        """Counts one request."""
        totals = self._totals.get(key)
        if totals is None:
            if len(self._totals) >= KEYS_MAX:
                key = OTHER_KEY
            totals = self._totals.setdefault(key, UsageCounts())
        totals += counts
        self.store.put(key, counts, self._now_s())

    @property
    def totals(self) -> Mapping[UsageKey, UsageCounts]:
        """The counts since the start of the process."""
        return {key: copy(counts) for key, counts in self._totals.copy().items()}


class UsageCollector(Collector):
    """The counts of a ledger. prefix: of the metric names."""

    def __init__(self, ledger: UsageLedger, prefix: str) -> None:
        self._ledger = ledger
        self._prefix = prefix

    def collect(self) -> Iterator[CounterMetricFamily]:
        totals = self._ledger.totals
        for name, text in _METRICS.items():
            family = CounterMetricFamily(f"{self._prefix}_usage_{name}", text, labels=DIMENSIONS)
            for key, counts in totals.items():
                labels = (key.tenant, key.key, key.model, key.adapter)
                family.add_metric(labels, getattr(counts, name))
            yield family

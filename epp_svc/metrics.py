"""The metrics of the endpoint picker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry

from common.service.histogram import SingleThreadHistogram
from common.service.state_metrics import Reading, StateCollector, counter, gauge
from epp_svc.placing import Booked

PREFIX: Final = "kvmesh_epp"
# complete: the response has ended. reset: the stream ended before it. The others got a response of
# the picker: 429, 503, 4xx, 500.
OUTCOMES: Final = ("complete", "reset", "shed", "unavailable", "refused", "internal")
PICK_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class Metrics:
    """The metrics of one process, in their own registry."""

    def __init__(self, open_requests: Callable[[], int], unrouted: Callable[[], int]) -> None:
        """
        - open_requests: returns the streams that are open.
        - unrouted: returns the requests that were placed without a router.
        """
        self.registry = CollectorRegistry()
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self._prompts = Counter({"tokens": 0, "unread": 0})
        self._tokens = Counter({"prompt": 0, "predicted_cached": 0})
        self._moved = 0
        self._open_requests = open_requests
        self._unrouted = unrouted
        self._pick_seconds = SingleThreadHistogram(
            f"{PREFIX}_pick_seconds",
            "Seconds between the end of a request and its pick, tokenizing and queue included.",
            PICK_BUCKETS_S,
            None,
        )
        self.registry.register(self._pick_seconds)
        self.registry.register(StateCollector(PREFIX, self._read))

    def ended(self, outcome: str, pick_s: float | None) -> None:
        """Counts a request at its end. pick_s: None if it was never complete."""
        self._outcomes[outcome] += 1
        if pick_s is not None:
            self._pick_seconds.labels("").observe(pick_s)

    def placed(self, booked: Booked, *, has_moved: bool) -> None:
        """Counts a placed request at its end."""
        self._prompts["unread" if booked.prompt.first is None else "tokens"] += 1
        self._tokens["prompt"] += booked.prompt.total
        self._tokens["predicted_cached"] += booked.decision.predicted_cached_tokens
        self._moved += has_moved

    def _read(self) -> Iterator[Reading]:
        yield counter("requests", "Requests by outcome.", dict(self._outcomes), label="outcome")
        text = "Placed requests by what was read of the prompt."
        yield counter("prompts", text, dict(self._prompts), label="read")
        text = "Prompt tokens of placed requests, and those of them predicted to be cached."
        yield counter("tokens", text, dict(self._tokens), label="kind")
        text = "Requests that another endpoint than the chosen one has served."
        yield counter("moved_requests", text, self._moved)
        text = "Requests that were placed without a router."
        yield counter("unrouted_requests", text, self._unrouted())
        yield gauge("open_requests", "Open streams of gateways.", self._open_requests())

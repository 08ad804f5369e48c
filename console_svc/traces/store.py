"""The last traces, by id (pure).

Bounds: `traces_max` traces of `spans_max` spans, and `bytes_max` in all; the trace without a new
span for the longest time goes first. A console of a busy mesh keeps a share of the traces: that of
which the ids are below a limit, so that all spans of a trace have the same fate whichever process
sends them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from console_svc.traces.spans import Span

# New traces a second above which only a share is kept.
TRACES_PER_S: Final = 200.0
# Attributes of a root span by which a request is found.
ID_ATTRIBUTES: Final = ("request_id", "x_request_id")
_RATE_WINDOW_S: Final = 1.0
_ID_DIGITS: Final = 8


@dataclass(slots=True)
class StoredTrace:
    """The spans of one trace. dropped: spans above the limit."""

    trace_id: str
    spans: dict[str, Span] = field(default_factory=dict)
    dropped: int = 0
    size_bytes: int = 0
    request_ids: set[str] = field(default_factory=set)

    @property
    def root(self) -> Span | None:
        """The span of the HTTP request; None: it has not arrived."""
        return next((span for span in self.spans.values() if span.service == "frontend"), None)


class TraceStore:
    """The traces of one console."""

    def __init__(self, traces_max: int, spans_max: int, bytes_max: int) -> None:
        self._traces_max, self._spans_max, self._bytes_max = traces_max, spans_max, bytes_max
        self._traces: OrderedDict[str, StoredTrace] = OrderedDict()
        self._by_request: dict[str, str] = {}
        self._window_s, self._seen = 0.0, set[str]()
        self._share = 1.0
        self.size_bytes = 0
        self.received = 0
        """Spans since the start."""
        self.dropped = 0
        """Spans that were not kept."""

    def __len__(self) -> int:
        return len(self._traces)

    @property
    def share(self) -> float:
        """Share of new traces that is kept."""
        return self._share

    def admits(self, trace_id: str, now_s: float) -> bool:
        """Returns whether a span of a trace is kept. now_s: of a monotonic clock."""
        self.received += 1
        if trace_id in self._traces:
            return True
        if now_s - self._window_s >= _RATE_WINDOW_S:
            passed_s = now_s - self._window_s
            rate = len(self._seen) / passed_s
            self._share = min(1.0, TRACES_PER_S / rate) if rate else 1.0
            self._window_s, self._seen = now_s, set()
        if len(self._seen) < 100 * TRACES_PER_S:
            self._seen.add(trace_id)
        if self._share < 1.0:
            limit = self._share * 16**_ID_DIGITS
            # The first digits of some SDKs are a time.
            if int(trace_id[-_ID_DIGITS:], 16) >= limit:
                self.dropped += 1
                return False
        return True

    def add(self, spans: Iterable[Span]) -> None:
        """Keeps spans that `admits` permits. A span that was sent twice counts once."""
        for span in spans:
            self._add(span)
        while len(self._traces) > self._traces_max or self.size_bytes > self._bytes_max:
            self._forget_oldest()

    def find(self, id_: str) -> StoredTrace | None:
        """Returns the trace with this id, or of the request with it."""
        return self._traces.get(id_) or self._traces.get(self._by_request.get(id_, ""))

    def newest(self) -> list[StoredTrace]:
        """Returns all traces, the one with the newest span first."""
        return list(reversed(self._traces.values()))

    def _add(self, span: Span) -> None:
        trace = self._traces.get(span.trace_id)
        if trace is None:
            trace = self._traces[span.trace_id] = StoredTrace(span.trace_id)
        self._traces.move_to_end(span.trace_id)
        if span.span_id in trace.spans:
            return
        if len(trace.spans) >= self._spans_max:
            trace.dropped += 1
            self.dropped += 1
            return
        trace.spans[span.span_id] = span
        trace.size_bytes += span.size_bytes
        self.size_bytes += span.size_bytes
        for name in ID_ATTRIBUTES:
            if id_ := span.attributes.get(name):
                trace.request_ids.add(id_)
                self._by_request[id_] = span.trace_id

    def _forget_oldest(self) -> None:
        _, trace = self._traces.popitem(last=False)
        self.size_bytes -= trace.size_bytes
        for id_ in trace.request_ids:
            if self._by_request.get(id_) == trace.trace_id:
                del self._by_request[id_]

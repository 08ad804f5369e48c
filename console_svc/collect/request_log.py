"""The recent requests of all frontends (pure)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from console_svc.state.requests import RequestRow
from console_svc.traces.store import ID_ATTRIBUTES, StoredTrace, TraceStore


class RequestLog:
    """The last `rows_max` requests that frontends have reported, by id."""

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._rows: OrderedDict[str, RequestRow] = OrderedDict()
        self._by_other_id: dict[str, str] = {}

    def add(self, rows: Iterable[RequestRow]) -> None:
        """Adds ended requests, oldest first."""
        for row in rows:
            self._rows[row.request_id] = row
            for other in (row.client_id, row.trace_id):
                if other:
                    self._by_other_id[other] = row.request_id
        while len(self._rows) > self._rows_max:
            _, row = self._rows.popitem(last=False)
            for other in (row.client_id, row.trace_id):
                if self._by_other_id.get(other) == row.request_id:
                    del self._by_other_id[other]

    def find(self, id_: str) -> RequestRow | None:
        return self._rows.get(id_) or self._rows.get(self._by_other_id.get(id_, ""))

    def newest(self, traces: TraceStore) -> tuple[RequestRow, ...]:
        """Returns the newest requests first, with those that only have spans here: of frontends of
        an earlier version."""
        rows = list(self._rows.values())
        known = {row.trace_id for row in rows if row.trace_id}
        rows += filter(None, (row_of(t) for t in traces.newest() if t.trace_id not in known))
        rows.sort(key=lambda row: row.received_s, reverse=True)
        return tuple(rows[: self._rows_max])


def row_of(trace: StoredTrace) -> RequestRow | None:
    """Returns what the spans of a trace state about its request; None without the span of the
    frontend."""
    root = trace.root
    if root is None:
        return None
    attributes = root.attributes
    # Both legs of a split request are submitted at once.
    legs = sorted(
        (span for span in trace.spans.values() if span.service == "worker"),
        key=lambda span: (span.attributes.get("disagg_role") == "decode", span.start_ns),
    )
    roles = [span.attributes.get("disagg_role", "") for span in legs]
    placed = [s for s in trace.spans.values() if "predicted_cached_tokens" in s.attributes]
    predicted = max(placed, key=lambda span: span.end_ns).attributes if placed else {}
    cached = [s.attributes[_CACHED] for s in legs if _CACHED in s.attributes]
    reasons = [s.attributes.get("finish_reason", "") for s in legs]
    status = root.error or next(filter(None, reversed(reasons)), "")
    return RequestRow(
        request_id=attributes.get(ID_ATTRIBUTES[0], trace.trace_id),
        trace_id=trace.trace_id,
        received_s=root.start_ns / 1e9,
        client_id=attributes.get(ID_ATTRIBUTES[1], ""),
        frontend=root.member,
        model=attributes.get("model", ""),
        endpoint=attributes.get("url.path", ""),
        tenant=attributes.get("tenant", ""),
        http_status=_int(attributes.get("http.response.status_code")),
        status=status,
        error=root.error,
        is_error=bool(root.error),
        total_ms=(root.end_ns - root.start_ns) / 1e6,
        ttft_ms=_float(attributes.get("ttft_ms")),
        prompt_tokens=_int(attributes.get("gen_ai.usage.input_tokens")),
        output_tokens=_int(attributes.get("gen_ai.usage.output_tokens")),
        cached_tokens=_int(cached[0]) if cached else None,
        predicted_cached_tokens=_int(predicted.get("predicted_cached_tokens")),
        workers=tuple(span.member for span in legs),
        is_split="prefill" in roles and "decode" in roles,
        attempts=_int(attributes.get("attempts")) or 0,
    )


_CACHED = "gen_ai.usage.cache_read.input_tokens"


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None

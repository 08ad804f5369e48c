"""The tree of a request, from its spans or from its record (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from console_svc.state.requests import RequestRow, SpanLink, Stage, Trace, TraceSpan
from console_svc.traces.spans import Span
from console_svc.traces.store import StoredTrace

_DEPTH_MAX: Final = 32


def build_trace(stored: StoredTrace) -> Trace:
    """Returns the spans of a trace in the order of a tree. A span whose parent is missing is a
    root."""
    spans = stored.spans
    origin_ns = min((span.start_ns for span in spans.values()), default=0)
    children: dict[str, list[Span]] = {}
    for span in sorted(spans.values(), key=lambda span: (span.start_ns, -span.end_ns)):
        parent = span.parent_id if span.parent_id in spans else ""
        children.setdefault(parent, []).append(span)
    rows: list[TraceSpan] = []
    # With the depth; the last one is next.
    rest = [(span, 0) for span in reversed(children.get("", ()))]
    while rest:
        span, depth = rest.pop()
        rows.append(_row(span, depth, origin_ns))
        below = children.get(span.span_id, ()) if depth < _DEPTH_MAX else ()
        rest += [(child, depth + 1) for child in reversed(below)]
    end_ns = max((span.end_ns for span in spans.values()), default=0)
    root = stored.root
    request_id = "" if root is None else root.attributes.get("request_id", "")
    return Trace(
        trace_id=stored.trace_id,
        request_id=request_id or next(iter(sorted(stored.request_ids)), ""),
        started_s=origin_ns / 1e9,
        duration_ms=(end_ns - origin_ns) / 1e6,
        spans=tuple(rows),
        links=tuple(_links(spans.values(), spans.keys())),
        dropped_spans=stored.dropped,
    )


def build_stages(row: RequestRow) -> Trace | None:
    """Returns the stages of a request without spans; None if its frontend reports none."""
    if row.total_ms is None:
        return None
    root = TraceSpan(
        span_id="request",
        parent_id="",
        depth=0,
        service="frontend",
        member=row.frontend,
        name=row.endpoint or "request",
        start_ms=0.0,
        duration_ms=row.total_ms,
        attributes={"model": row.model, "status": row.status},
        error=row.status if row.is_error else "",
    )
    stages = [_stage(stage, row) for stage in row.stages]
    names = {stage.name for stage in stages}
    links = [SpanLink("prefill", "decode")] if {"prefill", "decode"} <= names else []
    return Trace(
        trace_id="",
        request_id=row.request_id,
        started_s=row.received_s,
        duration_ms=row.total_ms,
        spans=(root, *stages),
        links=tuple(links),
        is_stages=True,
    )


def _stage(stage: Stage, row: RequestRow) -> TraceSpan:
    return TraceSpan(
        span_id=stage.name,
        parent_id="request",
        depth=1,
        service=stage.service,
        member=stage.member or row.frontend,
        name=stage.name,
        start_ms=stage.start_ms,
        duration_ms=stage.duration_ms,
        links=("prefill",) if stage.name == "decode" and row.is_split else (),
    )


def _row(span: Span, depth: int, origin_ns: int) -> TraceSpan:
    return TraceSpan(
        span_id=span.span_id,
        parent_id=span.parent_id,
        depth=depth,
        service=span.service,
        member=span.member,
        name=span.name,
        start_ms=(span.start_ns - origin_ns) / 1e6,
        duration_ms=max(0, span.end_ns - span.start_ns) / 1e6,
        links=span.links,
        attributes=span.attributes,
        events=tuple(((at_ns - origin_ns) / 1e6, name) for at_ns, name in span.events),
        error=span.error,
    )


def _links(spans: Iterable[Span], known: Iterable[str]) -> Iterable[SpanLink]:
    """Yields the links between spans of the trace."""
    ids = frozenset(known)
    for span in spans:
        for linked in span.links:
            if linked in ids:
                yield SpanLink(linked, span.span_id)

"""Spans of a request as a tree of lines (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Attributes that a line shows, in this order.
_SHOWN = ("kvmesh.stable_name", "disagg_role", "finish_reason", "tokens", "error.type")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the work on a request. start_ms: on any clock that the spans of a trace share."""

    span_id: str
    service: str
    name: str
    start_ms: float
    ms: float
    parent_id: str = ""
    """Empty: the root."""
    links: tuple[str, ...] = ()
    """Ids of other spans that it follows."""
    attributes: Mapping[str, str] = field(default_factory=dict)

    def json_object(self, origin_ms: float) -> dict[str, object]:
        return {
            "span_id": self.span_id,
            "parent_id": self.parent_id or None,
            "service": self.service,
            "name": self.name,
            "start_ms": round(self.start_ms - origin_ms, 3),
            "ms": round(self.ms, 3),
            "links": list(self.links),
            "attributes": dict(self.attributes),
        }


def tree_lines(spans: Sequence[Span]) -> list[str]:
    """Returns one line for each span below its parent: the milliseconds since the first span, the
    duration, and the spans that it is linked to."""
    by_id = {span.span_id: span for span in spans}
    origin_ms = min((span.start_ms for span in spans), default=0.0)
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_ms):
        parent_id = span.parent_id if span.parent_id in by_id else ""
        children.setdefault(parent_id, []).append(span)
    lines: list[str] = []

    def add(parent_id: str, depth: int) -> None:
        for span in children.get(parent_id, ()):
            label = "  " * depth + " ".join(filter(None, (span.service, span.name)))
            notes = [span.attributes[name] for name in _SHOWN if span.attributes.get(name)]
            notes += [f"linked to {_describe(by_id.get(id_), id_)}" for id_ in span.links]
            times = f"{span.start_ms - origin_ms:9.1f} {span.ms:9.1f} ms"
            lines.append(f"{times}  {label}  {', '.join(notes)}".rstrip())
            if span.span_id != parent_id:
                add(span.span_id, depth + 1)

    add("", 0)
    return lines


def _describe(span: Span | None, span_id: str) -> str:
    """Returns what a link leads to. None: a span that the trace does not have."""
    if span is None:
        return span_id
    role = span.attributes.get("disagg_role", "")
    name = span.attributes.get("kvmesh.stable_name", "")
    return " ".join(filter(None, (role, span.name, f"of {name}" if name else "")))

"""The spans of a request on a time axis, with an arrow from prefill to decode (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from console_svc.charts.style import (
    ACCENT,
    MUTED,
    STRONG_LINE,
    SURFACE,
    TEXT,
    Option,
    category_axis,
    picture,
    role_color,
    text_style,
    tone_color,
    value_axis,
)
from console_svc.charts.units import duration
from console_svc.state.requests import SpanLink, Trace, TraceSpan

SPANS_MAX = 60
"""Drawn spans; the table has all."""
_ROW_PX, _FRAME_PX = 30, 46
_MARGIN = 1.14
"""Room for the text behind the last bar."""
_LABEL_CHARS, _LABELS_PX = 40, 270


def height_px(trace: Trace) -> int:
    return _FRAME_PX + _ROW_PX * max(1, min(SPANS_MAX, len(trace.spans)))


def role_of(span: TraceSpan) -> str:
    """Returns `prefill` or `decode` for a leg of a pair, else the service."""
    role = span.attributes.get("disagg_role", "")
    return role if role in ("prefill", "decode") else span.service


def label_of(span: TraceSpan) -> str:
    """Returns name and member, behind the depth of the span."""
    text = " · ".join(filter(None, (span.name, span.member)))
    text = text if len(text) <= _LABEL_CHARS else f"{text[: _LABEL_CHARS - 1]}…"
    return f"{'   ' * min(span.depth, 4)}{text}"


def describe_links(trace: Trace) -> tuple[str, ...]:
    """Returns each arrow as a sentence."""
    spans = {span.span_id: span for span in trace.spans}
    return tuple(
        _describe_link(spans, link)
        for link in trace.links
        if link.from_id in spans and link.to_id in spans
    )


def _describe_link(spans: Mapping[str, TraceSpan], link: SpanLink) -> str:
    source, target = spans[link.from_id], spans[link.to_id]
    wait = duration(arrow_end_ms(spans, link) - _end(source))
    return f"{_short(target)} follows {_short(source)}: linked, {wait} after its end"


def arrow_end_ms(spans: Mapping[str, TraceSpan], link: SpanLink) -> float:
    """Returns when the span that follows can use its predecessor: after its own start and the end
    of the predecessor."""
    target = spans[link.to_id]
    return max(target.start_ms, min(_end(spans[link.from_id]), _end(target)))


def waterfall(trace: Trace) -> Option:
    """Returns one row a span, in the order of the trace."""
    spans = trace.spans[:SPANS_MAX]
    rows = {span.span_id: at for at, span in enumerate(spans)}
    end = max((_end(span) for span in spans), default=0.0) or 1.0
    return picture(
        _describe(trace),
        grid={"left": _LABELS_PX, "right": 8, "top": 26, "bottom": 4},
        xAxis=value_axis(
            min=0,
            max=_rounded_up(end * _MARGIN),
            position="top",
            splitNumber=6,
            axisLabel={**text_style(MUTED, 11), "formatter": "{value} ms", "showMaxLabel": False},
        ),
        yAxis=category_axis(
            [label_of(span) for span in spans],
            inverse=True,
            axisLabel={
                **text_style(TEXT, 12),
                "align": "left",
                "margin": _LABELS_PX - 4,
                "interval": 0,
            },
        ),
        series=[
            _offsets(spans),
            _bars(spans, {link.from_id for link in trace.links}),
            _links(trace, rows),
            _events(spans, rows),
        ],
    )


def _offsets(spans: Sequence[TraceSpan]) -> Option:
    return {
        "type": "bar",
        "stack": "span",
        "silent": True,
        "itemStyle": {"color": "transparent"},
        "emphasis": {"disabled": True},
        "data": [span.start_ms for span in spans],
    }


def _bars(spans: Sequence[TraceSpan], senders: Set[str]) -> Option:
    """senders: ids of spans from which an arrow starts."""
    rich = {"link": text_style(ACCENT, 11)}
    return {
        "type": "bar",
        "name": "spans",
        "stack": "span",
        "barWidth": 12,
        "barMinHeight": 2,
        "emphasis": {"disabled": True},
        "label": {
            "show": True,
            "position": "right",
            "distance": 9,
            "rich": rich,
            **text_style(MUTED, 11),
        },
        "data": [
            {
                "value": round(span.duration_ms, 3),
                "name": _tooltip(span),
                "itemStyle": _bar_style(span),
                "label": {
                    "formatter": duration(span.duration_ms)
                    + ("  {link|KV handoff ↓}" if span.span_id in senders else "")
                },
            }
            for span in spans
        ],
    }


def _bar_style(span: TraceSpan) -> Option:
    """Returns the colour of the role; a failed span has a border, too."""
    border = {"borderColor": tone_color("bad"), "borderWidth": 2} if span.error else {}
    return {"color": role_color(role_of(span)), **border}


def _links(trace: Trace, rows: Mapping[str, int]) -> Option:
    """Returns the arrows. They have a series of their own, named `links`, for tests."""
    spans = {span.span_id: span for span in trace.spans}
    drawn = [link for link in trace.links if link.from_id in rows and link.to_id in rows]
    return {
        "type": "lines",
        "name": "links",
        "coordinateSystem": "cartesian2d",
        "symbol": ["circle", "arrow"],
        "symbolSize": [7, 12],
        "z": 5,
        "lineStyle": {"color": ACCENT, "width": 2.5, "opacity": 1},
        "emphasis": {"disabled": True},
        "data": [
            {
                "name": _describe_link(spans, link),
                "coords": [
                    [_end(spans[link.from_id]), rows[link.from_id]],
                    [arrow_end_ms(spans, link), rows[link.to_id]],
                ],
            }
            for link in drawn
        ],
    }


def _events(spans: Sequence[TraceSpan], rows: Mapping[str, int]) -> Option:
    return {
        "type": "scatter",
        "symbol": "diamond",
        "symbolSize": 9,
        "z": 6,
        "itemStyle": {"color": SURFACE, "borderColor": STRONG_LINE, "borderWidth": 1.5},
        "emphasis": {"disabled": True},
        "data": [
            {"value": [at_ms, rows[span.span_id]], "name": f"{name}\nat {duration(at_ms)}"}
            for span in spans
            for at_ms, name in span.events
        ],
    }


def _tooltip(span: TraceSpan) -> str:
    lines = [
        " · ".join(filter(None, (span.name, span.service, span.member))),
        f"{duration(span.start_ms)} to {duration(_end(span))} ({duration(span.duration_ms)})",
        *(f"{name}: {value}" for name, value in list(span.attributes.items())[:8]),
    ]
    return "\n".join([*lines, f"error: {span.error}"] if span.error else lines)


def _describe(trace: Trace) -> str:
    links = describe_links(trace)
    parts = [f"Waterfall of {len(trace.spans)} spans in {duration(trace.duration_ms)}.", *links]
    return " ".join([*parts, "The table below has all spans."])


def _short(span: TraceSpan) -> str:
    return f"{role_of(span)} on {span.member}" if span.member else span.name


def _end(span: TraceSpan) -> float:
    return span.start_ms + span.duration_ms


def _rounded_up(value: float) -> float:
    """Returns the next number of two digits and zeros."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit

"""The waterfall: rows in the order of the trace, and the arrow from prefill to decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from console_svc.charts.waterfall import SPANS_MAX, describe_links, height_px, waterfall
from console_svc.state.requests import SpanLink
from tests.kit.console import pair_trace, span


def _series(option: Any, name: str) -> Any:
    return next(s for s in option["series"] if s.get("name") == name)


def test_the_arrow_leads_from_the_end_of_prefill_to_decode() -> None:
    option = waterfall(pair_trace())
    (arrow,) = _series(option, "links")["data"]
    assert arrow["coords"] == [[90, 2], [90, 3]]
    assert _series(option, "links")["symbol"][1] == "arrow"


def test_the_arrow_leads_to_the_start_of_a_decode_that_begins_after_prefill() -> None:
    trace = pair_trace()
    decode = replace(trace.spans[3], start_ms=120.0, duration_ms=500.0)
    option = waterfall(replace(trace, spans=(*trace.spans[:3], decode)))
    assert _series(option, "links")["data"][0]["coords"] == [[90, 2], [120.0, 3]]


def test_the_arrow_is_a_sentence_too() -> None:
    (sentence,) = describe_links(pair_trace())
    assert sentence.startswith("decode on decode-rack-a-1 follows prefill on prefill-rack-a-0")
    assert sentence in waterfall(pair_trace())["aria"]["label"]["description"]


def test_bars_start_at_the_start_of_their_span() -> None:
    option = waterfall(pair_trace())
    assert option["series"][0]["data"] == [0, 4, 8, 9]
    assert [bar["value"] for bar in _series(option, "spans")["data"]] == [812, 3, 82, 800]
    assert option["yAxis"]["inverse"] is True


def test_a_link_to_a_span_that_was_dropped_is_not_drawn() -> None:
    trace = replace(pair_trace(), links=(SpanLink("gone", "4"),))
    assert _series(waterfall(trace), "links")["data"] == []
    assert describe_links(trace) == ()


def test_a_failed_span_has_a_border_and_its_error_in_the_tooltip() -> None:
    trace = pair_trace()
    failed = replace(trace.spans[2], error="KV transfer timed out")
    bar = _series(waterfall(replace(trace, spans=(failed,))), "spans")["data"][0]
    assert bar["itemStyle"]["borderWidth"] == 2
    assert "KV transfer timed out" in bar["name"]


@pytest.mark.parametrize("count", [0, SPANS_MAX + 40])
def test_a_trace_of_any_size_is_a_bounded_picture(count: int) -> None:
    spans = tuple(span(str(n), "step", n, 1) for n in range(count))
    trace = replace(pair_trace(), spans=spans, links=())
    assert len(_series(waterfall(trace), "spans")["data"]) <= SPANS_MAX
    assert height_px(trace) <= height_px(replace(trace, spans=spans[:SPANS_MAX])) + 40

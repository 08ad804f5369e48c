"""The bounded store of spans, the tree of a request, and the OTLP messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from console_svc.collect.request_log import RequestLog, row_of
from console_svc.state.requests import RequestRow, Stage
from console_svc.traces.receiver import read_spans
from console_svc.traces.spans import TEXT_CHARS_MAX, Span
from console_svc.traces.store import TRACES_PER_S, TraceStore
from console_svc.traces.tree import build_stages, build_trace

MS = 1_000_000


def trace_id(number: int) -> str:
    return f"{number * 0x9E3779B97F4A7C15:032x}"[-32:]


def span(
    trace: str,
    id_: int,
    parent: int = 0,
    *,
    service: str = "worker",
    start_ms: int = 0,
    ms: int = 1,
    links: Iterable[int] = (),
    attributes: Mapping[str, str] | None = None,
    member: str = "",
) -> Span:
    return Span(
        trace_id=trace,
        span_id=f"{id_:016x}",
        parent_id=f"{parent:016x}" if parent else "",
        service=service,
        member=member or f"{service}-0",
        name=f"span-{id_}",
        start_ns=start_ms * MS,
        end_ns=(start_ms + ms) * MS,
        links=tuple(f"{link:016x}" for link in links),
        attributes=attributes or {},
        events=(),
        error="",
    )


def disaggregated(trace: str) -> list[Span]:
    """The spans of a split request, in the order in which they may arrive."""
    root = {"request_id": "r1", "x_request_id": "mine", "model": "m", "attempts": "1"}
    predicted = {"predicted_cached_tokens": "32"}
    prefill = {"disagg_role": "prefill", "gen_ai.usage.cache_read.input_tokens": "16"}
    decode = {"disagg_role": "decode"}
    return [
        span(trace, 4, 1, start_ms=3, ms=31, links=[3], attributes=decode, member="d"),
        span(trace, 3, 1, start_ms=4, ms=9, attributes=prefill, member="p"),
        span(trace, 2, 1, service="router", start_ms=2, attributes=predicted),
        span(trace, 1, 0, service="frontend", start_ms=0, ms=40, attributes=root),
    ]


def test_the_tree_has_parents_before_children_and_the_link_from_prefill_to_decode() -> None:
    store = TraceStore(10, 100, 1 << 20)
    store.add(disaggregated(trace_id(1)))
    for id_ in (trace_id(1), "r1", "mine"):
        found = store.find(id_)
        assert found is not None
        trace = build_trace(found)
        assert [(s.name, s.depth, s.start_ms) for s in trace.spans] == [
            ("span-1", 0, 0.0),
            ("span-2", 1, 2.0),
            ("span-4", 1, 3.0),
            ("span-3", 1, 4.0),
        ]
        (link,) = trace.links
        assert (int(link.from_id, 16), int(link.to_id, 16)) == (3, 4)
        assert (trace.request_id, trace.duration_ms) == ("r1", 40.0)


def test_a_span_without_its_parent_is_shown_as_a_root() -> None:
    store = TraceStore(10, 100, 1 << 20)
    store.add([span(trace_id(1), 5, 77), span(trace_id(1), 6, 5)])
    found = store.find(trace_id(1))
    assert found is not None
    assert [(s.name, s.depth) for s in build_trace(found).spans] == [("span-5", 0), ("span-6", 1)]


def test_the_store_is_bounded_by_traces_spans_and_bytes() -> None:
    store = TraceStore(3, 4, 1 << 20)
    for number in range(5):
        named = {"request_id": f"r{number}"}
        store.add(span(trace_id(number), id_, attributes=named) for id_ in range(1, 7))
    assert len(store) == 3
    assert store.find("r0") is store.find(trace_id(1)) is None
    newest = store.find("r4")
    assert newest is not None
    assert (len(newest.spans), newest.dropped) == (4, 2)
    large = TraceStore(1000, 1000, 10_000)
    large.add(span(trace_id(n), n, attributes={"text": "x" * 900}) for n in range(1, 100))
    assert large.size_bytes <= 10_000
    assert len(large) < 10


def test_a_span_that_is_sent_twice_counts_once() -> None:
    store = TraceStore(3, 10, 1 << 20)
    store.add([span(trace_id(1), 1), span(trace_id(1), 1)])
    found = store.find(trace_id(1))
    assert found is not None
    assert len(found.spans) == 1


def test_of_too_many_traces_a_share_is_kept_with_all_of_its_spans() -> None:
    store = TraceStore(100_000, 10, 1 << 30)
    rate = int(4 * TRACES_PER_S)
    now = 100.0
    for number in range(rate):
        store.admits(trace_id(number), now + number / rate)
    store.admits(trace_id(0), now + 1.0)
    later = [trace_id(number) for number in range(rate, 2 * rate)]
    kept = [id_ for id_ in later if store.admits(id_, now + 1.1)]
    assert 0.15 < len(kept) / rate < 0.35
    assert [id_ for id_ in later if store.admits(id_, now + 1.2)] == kept


def test_a_message_keeps_the_names_of_its_process_and_cuts_long_texts() -> None:
    def attribute(key: str, text: str) -> common_pb2.KeyValue:
        return common_pb2.KeyValue(key=key, value=common_pb2.AnyValue(string_value=text))

    names = [attribute("service.name", "worker"), attribute("kvmesh.stable_name", "worker-1")]
    sent = trace_pb2.Span(
        trace_id=bytes(range(16)),
        span_id=bytes(range(8)),
        name="generate",
        start_time_unix_nano=1,
        end_time_unix_nano=2,
        attributes=[attribute(f"a{n}", "x" * 1000) for n in range(100)],
        links=[trace_pb2.Span.Link(span_id=bytes([7] * 8))],
        status=trace_pb2.Status(code=trace_pb2.Status.STATUS_CODE_ERROR, message="lost"),
    )
    invalid = trace_pb2.Span(trace_id=b"short", span_id=bytes(8))
    message = trace_service_pb2.ExportTraceServiceRequest(
        resource_spans=[
            trace_pb2.ResourceSpans(
                resource=resource_pb2.Resource(attributes=names),
                scope_spans=[trace_pb2.ScopeSpans(spans=[sent, invalid])],
            )
        ]
    )
    (found,) = read_spans(message, TraceStore(10, 10, 1 << 20))
    assert (found.service, found.member, found.error) == ("worker", "worker-1", "lost")
    assert found.links == ("07" * 8,)
    assert len(found.attributes) == 48
    assert {len(text) for text in found.attributes.values()} == {TEXT_CHARS_MAX}


def test_a_request_is_listed_from_its_spans_and_its_record_has_precedence() -> None:
    store = TraceStore(10, 100, 1 << 20)
    store.add(disaggregated(trace_id(1)))
    log = RequestLog(10)
    (row,) = log.newest(store)
    assert (row.request_id, row.client_id, row.is_split) == ("r1", "mine", True)
    assert row.workers == ("p", "d")
    assert (row.predicted_cached_tokens, row.cached_tokens) == (32, 16)
    log.add([RequestRow("r1", trace_id(1), received_s=1.0, total_ms=3.0)])
    (row,) = log.newest(store)
    assert row.total_ms == 3.0
    assert log.find(trace_id(1)) is row


def test_the_list_of_requests_is_bounded() -> None:
    log = RequestLog(3)
    log.add(RequestRow(f"r{n}", client_id=f"c{n}", received_s=float(n)) for n in range(5))
    assert [row.request_id for row in log.newest(TraceStore(1, 1, 1))] == ["r4", "r3", "r2"]
    assert log.find("c0") is log.find("r1") is None
    assert log.find("c4") is not None


def test_a_request_without_spans_has_stages_with_the_link() -> None:
    stages = (
        Stage("route", "router", "router-0", 0.0, 2.0),
        Stage("prefill", "worker", "p", 2.0, 5.0),
        Stage("decode", "worker", "d", 9.0, 11.0),
    )
    row = RequestRow("r1", total_ms=20.0, frontend="f", stages=stages, is_split=True)
    trace = build_stages(row)
    assert trace is not None
    assert trace.is_stages
    assert [(s.name, s.member) for s in trace.spans[1:]] == [
        ("route", "router-0"),
        ("prefill", "p"),
        ("decode", "d"),
    ]
    assert [(link.from_id, link.to_id) for link in trace.links] == [("prefill", "decode")]
    assert build_stages(RequestRow("r2")) is None


def test_spans_without_that_of_a_frontend_make_no_row() -> None:
    store = TraceStore(10, 100, 1 << 20)
    store.add([span(trace_id(1), 1)])
    found = store.find(trace_id(1))
    assert found is not None
    assert row_of(found) is None

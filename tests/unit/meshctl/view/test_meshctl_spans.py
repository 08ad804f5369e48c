"""Spans as lines."""

from __future__ import annotations

from meshctl.view.spans import Span, tree_lines


def test_a_span_stands_below_its_parent_with_its_times_and_links() -> None:
    prefill = {"disagg_role": "prefill", "kvmesh.stable_name": "p-0"}
    lines = tree_lines(
        [
            Span("3", "worker", "generate", 112.0, 8.0, "1", ("2",), {"disagg_role": "decode"}),
            Span("2", "worker", "generate", 102.5, 5.25, "1", (), prefill),
            Span("1", "frontend", "http-request", 100.0, 20.0, "remote"),
        ]
    )
    assert lines == [
        "      0.0      20.0 ms  frontend http-request",
        "      2.5       5.2 ms    worker generate  p-0, prefill",
        "     12.0       8.0 ms    worker generate  decode, linked to prefill generate of p-0",
    ]


def test_a_link_to_a_span_of_another_trace_is_its_id() -> None:
    assert tree_lines([Span("1", "s", "n", 0.0, 1.0, links=("abc",))])[0].endswith("linked to abc")
    assert tree_lines([]) == []

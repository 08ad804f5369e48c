"""Stages of a request, from its log line or record."""

from __future__ import annotations

from typing import Any

import pytest

from meshctl.commands.trace import stages
from meshctl.request_files import FoundRequest, FoundWorker


def found(**fields: Any) -> FoundRequest:
    return FoundRequest({"request_id": "r", "total_ms": 100.0, **fields}, "a.log")


MEMBERS = {
    "1": FoundWorker("prefill-0", "prefill"),
    "2": FoundWorker("decode-0", "decode"),
    "3": FoundWorker("worker-0", "aggregated"),
}
TIMES = {"prefill_wait_time_ms": 3.0, "prefill_time_ms": 20.0, "ttft_ms": 30.0}


def test_a_pair_has_a_handoff_and_a_link_from_decode_to_prefill() -> None:
    root, *parts = stages(found(workers=["1", "2"], completion_tokens=7, **TIMES), MEMBERS)
    assert (root.ms, root.parent_id) == (100.0, "")
    assert [(part.name, part.start_ms, part.ms) for part in parts] == [
        ("wait for a worker", 0.0, 3.0),
        ("prefill", 3.0, 20.0),
        ("handoff", 23.0, pytest.approx(7)),
        ("output", 30.0, 70.0),
    ]
    assert parts[1].attributes["kvmesh.stable_name"] == "prefill-0"
    assert parts[3].links == (parts[1].span_id,)
    assert parts[3].attributes["tokens"] == "7 tokens"


def test_what_precedes_the_router_is_a_stage_if_it_is_known() -> None:
    _, *parts = stages(found(workers=["3"], tokenized_ms=1.0, **TIMES), MEMBERS)
    assert [(part.name, part.start_ms, part.ms) for part in parts[:2]] == [
        ("tokenize", 0.0, 1.0),
        ("wait for a worker", 1.0, 2.0),
    ]


def test_an_aggregated_worker_has_no_handoff() -> None:
    _, *parts = stages(found(workers=["3"], **TIMES), MEMBERS)
    assert [part.name for part in parts] == [
        *("wait for a worker", "prefill", "first token", "output"),
    ]
    assert parts[-1].links == ()
    assert {part.attributes.get("kvmesh.stable_name", "worker-0") for part in parts} == {"worker-0"}


def test_a_request_without_a_token_and_unknown_workers_has_what_is_known() -> None:
    (root,) = stages(found(workers=["9"], failure="WORKER_LOST"), {})
    assert root.attributes == {"failure": "WORKER_LOST"}
    _, *parts = stages(found(workers=["9"], **TIMES), {})
    assert parts[-1].attributes["kvmesh.stable_name"] == "9"

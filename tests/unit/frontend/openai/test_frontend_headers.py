"""Headers with routing hints: they win over the body, and invalid ones are refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.request.preprocessed import RoutingHints, SessionAction, SessionControl
from frontend_svc.errors import HEADER_FIELDS
from frontend_svc.openai.body.headers import read_headers, with_headers
from frontend_svc.openai.body.nvext import NvextRouter
from frontend_svc.openai.body.parsing import parse_completion
from frontend_svc.openai.body.preprocessing import routing_hints, strict_priority
from frontend_svc.openai.body.schema import CompletionRequest

ALL = {
    "x-kvmesh-backend-instance-id": str(2**64 - 1),
    "x-kvmesh-prefill-worker-id": "1",
    "x-kvmesh-decode-worker-id": "2",
    "x-kvmesh-dp-rank": "3",
    "x-kvmesh-prefill-dp-rank": "4",
    "x-kvmesh-priority": "-5",
    "x-kvmesh-strict-priority": str(2**32 - 1),
    "x-kvmesh-osl": "6",
    "x-kvmesh-session-id": "alice and bob",
    "x-kvmesh-ttft-target-ms": "500",
    "x-kvmesh-itl-target-ms": "20",
}


def raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def nvext_of(headers: dict[str, str], **nvext: Any) -> CompletionRequest:
    body = {"model": "m", "prompt": "hi", "nvext": nvext or None}
    return with_headers(parse_completion(orjson.dumps(body)), read_headers(raw(headers)))


def hints(headers: dict[str, str], **nvext: Any) -> RoutingHints | None:
    return routing_hints(nvext_of(headers, **nvext).nvext)


def test_each_header_reaches_the_router() -> None:
    assert ALL.keys() == HEADER_FIELDS.keys()
    assert hints(ALL) == RoutingHints(
        backend_instance_id=2**64 - 1,
        prefill_worker_id=1,
        decode_worker_id=2,
        dp_rank=3,
        prefill_dp_rank=4,
        priority=-5,
        priority_jump=0.0,
        expected_output_tokens=6,
        session_control=SessionControl("alice and bob"),
    )
    nvext = nvext_of(ALL).nvext
    assert nvext is not None
    assert nvext.router == NvextRouter(ttft_target=500.0, itl_target=20.0)
    assert strict_priority(nvext) == 2**32 - 1


def test_the_documentation_has_each_header_with_the_field_it_stands_for() -> None:
    page = (Path(__file__).parents[4] / "docs" / "http.md").read_text()
    rows = dict(re.findall(r"^\| `(x-kvmesh-[a-z-]+)` \| `([a-z_.]+)` \|", page, re.MULTILINE))
    assert rows == {name: ".".join(path) for name, path in HEADER_FIELDS.items()}


def test_without_kvmesh_headers_nothing_changes() -> None:
    others = {"x-request-id": "5", "x-kvmeshed": "1", "authorization": "x", "x-dynamo-osl": "no"}
    assert read_headers(raw(others)) is None
    body = {"agent_hints": {"strict_priority": 7}}
    assert nvext_of(others, **body) == nvext_of({}, **body)
    assert strict_priority(nvext_of({}, **body).nvext) == 7
    assert strict_priority(nvext_of({}).nvext) == 0


def test_a_header_wins_over_the_body_and_leaves_the_rest_of_it() -> None:
    body = {
        "agent_hints": {"priority": 1, "strict_priority": 2, "osl": 3},
        "session_control": {"session_id": "a", "action": "close"},
        "dp_rank": 8,
        "decode_worker_id": 9,
        "top_k": 10,
    }
    headers = {
        "x-kvmesh-strict-priority": "20",
        "x-kvmesh-session-id": "b",
        "x-kvmesh-dp-rank": "0",
    }
    request = nvext_of(headers, **body)
    assert strict_priority(request.nvext) == 20
    assert routing_hints(request.nvext) == RoutingHints(
        priority=1,
        priority_jump=1.0,
        expected_output_tokens=3,
        session_control=SessionControl("b", SessionAction.CLOSE),
        dp_rank=0,
        decode_worker_id=9,
    )
    assert request.nvext is not None
    assert request.nvext.top_k == 10


@pytest.mark.parametrize(
    ("name", "value", "message_part"),
    [
        ("x-kvmesh-strict-priority", "-1", ">= 0"),
        ("x-kvmesh-strict-priority", str(2**32), "<= 4294967295"),
        ("x-kvmesh-strict-priority", "high", "an integer"),
        ("x-kvmesh-strict-priority", "", "an integer"),
        ("x-kvmesh-strict-priority", "1.0", "an integer"),
        ("x-kvmesh-strict-priority", "+1", "an integer"),
        ("x-kvmesh-strict-priority", "1, 2", "an integer"),
        ("x-kvmesh-strict-priority", "\xb2", "an integer"),
        ("x-kvmesh-strict-priority", "9" * 5000, "an integer"),
        ("x-kvmesh-priority", str(2**31), "<= 2147483647"),
        ("x-kvmesh-priority", str(-(2**31) - 1), ">= -2147483648"),
        ("x-kvmesh-osl", "-3", ">= 0"),
        ("x-kvmesh-dp-rank", "-1", ">= 0"),
        ("x-kvmesh-backend-instance-id", str(2**64), "18446744073709551615"),
        ("x-kvmesh-session-id", "", "1 or more characters"),
        ("x-kvmesh-session-id", "x" * 257, "at most 256 characters"),
        ("x-kvmesh-session-id", "caf\xe9", "ASCII"),
        ("x-kvmesh-tenant", "me", "Unknown header"),
        ("x-kvmesh-" + "y" * 5000, "me", "Unknown header"),
    ],
)
def test_an_invalid_header_is_refused_by_name(name: str, value: str, message_part: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_headers(raw({"x-kvmesh-osl": "1"} | {name: value}))
    assert refused.value.field == name[:80]
    assert message_part in refused.value.message
    assert len(refused.value.message) < 1000
    assert (name in refused.value.message) == (len(name) <= 80)


def test_a_repeated_header_is_refused() -> None:
    twice = [(b"x-kvmesh-osl", b"1"), (b"x-kvmesh-osl", b"1")]
    with pytest.raises(InvalidRequest, match="more than once") as refused:
        read_headers(twice)
    assert refused.value.field == "x-kvmesh-osl"


@given(
    st.sampled_from([n for n in HEADER_FIELDS if n != "x-kvmesh-session-id"]),
    st.binary(max_size=30),
)
def test_any_bytes_are_a_decimal_number_or_refused(name: str, value: bytes) -> None:
    try:
        nvext = read_headers([(name.encode(), value)])
    except InvalidRequest as error:
        assert error.field == name  # noqa: PT017 - both results are valid
        return
    part: Any = nvext
    for step in HEADER_FIELDS[name]:
        part = getattr(part, step)
    assert part == int(value)

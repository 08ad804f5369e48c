"""The names of conversations, and their affinity keys."""

from __future__ import annotations

import pytest

from frontend_svc.request.conversation import SESSION_HEADERS, affinity_key, conversation_name
from frontend_svc.responses.ids import request_of, response_id


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_each_header_names_the_conversation_and_wins_over_the_body(header: bytes) -> None:
    headers = {b"host": b"h", header: b" s-1 "}
    assert conversation_name(headers, "shared", "resp") == b"s-1"


def test_the_first_header_counts_and_an_empty_one_does_not() -> None:
    headers = dict.fromkeys(SESSION_HEADERS, b"later") | {SESSION_HEADERS[0]: b"first"}
    assert conversation_name(headers, None) == b"first"
    assert conversation_name({SESSION_HEADERS[0]: b""}, "key") == b"key"


def test_the_cache_key_precedes_the_continued_response() -> None:
    assert conversation_name({}, "key", "abc") == b"key"
    assert conversation_name({}, None, "abc") == b"abc"
    assert conversation_name({b"x-kvmesh-session-id": b"s"}, None) == b""


def test_a_key_depends_on_tenant_model_and_name() -> None:
    keys = {
        affinity_key("a", "m", b"s"),
        affinity_key("b", "m", b"s"),
        affinity_key("a", "m2", b"s"),
        affinity_key("a", "m", b"s2"),
        affinity_key("", "m", b"s"),
    }
    assert len(keys) == 5
    assert affinity_key("a", "m", b"s") in keys, "the same at each call"
    assert all(0 < one < 2**64 for one in keys)
    assert affinity_key("a", "m", b"") == 0


def test_a_response_names_its_request() -> None:
    assert request_of(response_id("ab" * 16, 7)) == "ab" * 16
    assert request_of("mine") == "mine"

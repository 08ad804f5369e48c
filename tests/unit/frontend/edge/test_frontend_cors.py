"""Which responses pages of other sites may read."""

from __future__ import annotations

import pytest

from frontend_svc.edge.cors import CorsPolicy, is_preflight

SITE = b"https://chat.example.org"
POLICY, ANY = CorsPolicy(frozenset({SITE.decode()})), CorsPolicy(frozenset({"*"}))
ASKS = {b"origin": SITE, b"access-control-request-method": b"POST"}


def test_a_preflight_request_has_an_origin_and_names_the_method() -> None:
    assert is_preflight("OPTIONS", ASKS)
    assert not is_preflight("POST", ASKS)
    for name in ASKS:
        assert not is_preflight("OPTIONS", {key: ASKS[key] for key in ASKS if key != name})


@pytest.mark.parametrize(("policy", "allowed"), [(POLICY, SITE), (ANY, b"*")])
def test_an_allowed_site_may_send_the_headers_that_it_asks_for(
    policy: CorsPolicy, allowed: bytes
) -> None:
    asks = {**ASKS, b"access-control-request-headers": b"x-a, authorization"}
    status, headers, body = policy.preflight(asks)
    assert (status, body) == (200, b"OK")
    assert dict(headers) == {
        b"content-type": b"text/plain; charset=utf-8",
        b"vary": b"origin, access-control-request-method, access-control-request-headers, "
        b"access-control-request-private-network",
        b"access-control-allow-origin": allowed,
        b"access-control-allow-methods": b"GET, POST, DELETE",
        b"access-control-allow-headers": b"x-a, authorization",
        b"access-control-max-age": b"600",
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({b"origin": b"https://evil.example"}, b"origin"),
        ({b"origin": SITE + b".evil.example"}, b"origin"),
        ({b"origin": b"null"}, b"origin"),
        ({b"access-control-request-method": b"PUT"}, b"method"),
        ({b"access-control-request-private-network": b"true"}, b"private-network"),
    ],
)
def test_other_preflight_requests_are_refused(change: dict[bytes, bytes], reason: bytes) -> None:
    status, headers, body = POLICY.preflight({**ASKS, **change})
    assert (status, body) == (400, b"Disallowed CORS " + reason)
    allows = b"access-control-allow-origin" in dict(headers)
    assert allows == (reason != b"origin")


def test_pages_of_allowed_sites_may_read_responses() -> None:
    exposed = b"x-request-id, request-id, retry-after, retry-after-ms"
    other = {b"access-control-expose-headers": exposed, b"vary": b"Origin"}
    assert dict(POLICY.response_headers(SITE)) == {**other, b"access-control-allow-origin": SITE}
    assert dict(ANY.response_headers(SITE)) == {**other, b"access-control-allow-origin": b"*"}
    assert dict(POLICY.response_headers(b"https://evil.example")) == other
    assert dict(POLICY.response_headers(None)) == {b"vary": b"Origin"}

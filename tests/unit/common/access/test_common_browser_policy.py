"""Which requests of web pages are served."""

from __future__ import annotations

import pytest

from common.access.browser_policy import BrowserPolicy

OWN, SITE = "127.0.0.1:8000", "https://chat.example.org"
LOCAL = BrowserPolicy(frozenset({SITE}), frozenset(), checks_host=True)
OPEN = BrowserPolicy(frozenset(), frozenset(), checks_host=False)
NAMED = BrowserPolicy(frozenset(), frozenset({"api.example.org"}), checks_host=True)
ANY = BrowserPolicy(frozenset({"*"}), frozenset(), checks_host=True)


def refused(
    policy: BrowserPolicy, host: str, origin: str = "", media: str = "application/json"
) -> str:
    headers = [(b"host", host.encode()), (b"content-type", media.encode())]
    if origin:
        headers.append((b"origin", origin.encode()))
    refusal = policy.refusal("POST", headers)
    return "" if refusal is None else str(refusal.field)


@pytest.mark.parametrize(
    ("policy", "host", "origin", "field"),
    [
        (LOCAL, OWN, "", ""),
        (LOCAL, "localhost", "", ""),
        (LOCAL, "LOCALHOST:1", "", ""),
        (LOCAL, "[::1]:8000", "", ""),
        (LOCAL, "rebound.example:8000", "", "host"),
        (LOCAL, "127.0.0.1.rebound.example", "", "host"),
        (LOCAL, "a@b:c:d", "", "host"),
        (LOCAL, "[::1", "", "host"),
        (OPEN, "frontend:8000", "", ""),
        (NAMED, "api.example.org", "", ""),
        (NAMED, "API.example.org:443", "", ""),
        (NAMED, "other.example.org", "", "host"),
        (LOCAL, OWN, SITE, ""),
        (LOCAL, OWN, SITE + ".evil.example", "origin"),
        (LOCAL, OWN, "null", "origin"),
        (LOCAL, OWN, "http://127.0.0.1:8000", ""),
        (LOCAL, OWN, "http://127.0.0.1:9000", "origin"),
        (LOCAL, "localhost:8000", "http://localhost:8000", ""),
        # The same name in both is the sign of a rebinding, unless the server has that name.
        (OPEN, "rebound.example", "http://rebound.example", "origin"),
        (NAMED, "api.example.org", "https://api.example.org", ""),
        (ANY, OWN, "https://evil.example", ""),
    ],
)
def test_a_page_is_served_if_its_site_is_allowed_or_is_this_server(
    policy: BrowserPolicy, host: str, origin: str, field: str
) -> None:
    assert refused(policy, host, origin) == field


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_page_must_send_json_and_other_clients_need_not(media: str) -> None:
    assert refused(LOCAL, OWN, SITE, media) == "content-type"
    assert refused(LOCAL, OWN, "", media) == ""
    assert refused(LOCAL, OWN, SITE, "application/json; charset=utf-8") == ""

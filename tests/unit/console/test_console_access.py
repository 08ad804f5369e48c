"""Sessions of operators, failed logins, and the gate before the pages."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from common.access.browser_policy import BrowserPolicy
from common.access.caller import KeyTable
from common.access.key_file import KeyFile, edited_tenants, remove_key
from common.access.login_links import create_link
from common.api_keys import KeyDocument, hash_of
from common.errors import Overloaded, PermissionDenied, Unauthenticated
from console_svc.access.failures import FAILURES_MAX, WINDOW_S, LoginFailures
from console_svc.access.gate import Gate, Message, Receive, Scope, Send, read_cookie
from console_svc.access.login import Logins
from console_svc.access.sessions import IDLE_S, LONGEST_S, SESSIONS_MAX, Operator, Sessions

COOKIE = "kvmesh_console_1"
ADMIN, OTHER = "kvmesh_admin", "kvmesh_other"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def key_entry(id_: str, text: str, *scopes: str) -> dict[str, object]:
    created = datetime(2026, 1, 1, tzinfo=UTC).isoformat()
    return {"id": id_, "sha256": hash_of(text.encode()), "scopes": scopes, "created": created}


@pytest.fixture
def key_path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    keys = [key_entry("k_admin", ADMIN, "admin"), key_entry("k_other", OTHER, "infer")]
    path.write_text(json.dumps({"tenants": {"ops": {"keys": keys}}}))
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def key_file(key_path: Path) -> KeyFile:
    return KeyFile(key_path)


@pytest.fixture
def logins(tmp_path: Path, key_file: KeyFile, clock: Clock) -> Logins:
    numbers = count()
    sessions = Sessions(lambda: f"session-{next(numbers)}")
    folder = tmp_path / "links"
    return Logins(sessions, LoginFailures(), folder, key_file, clock, lambda: 5000.0)


def test_only_a_key_with_the_scope_admin_logs_in(logins: Logins) -> None:
    with pytest.raises(Unauthenticated):
        logins.by_key("kvmesh_wrong", "a")
    with pytest.raises(PermissionDenied, match="admin"):
        logins.by_key(OTHER, "a")
    session = logins.find(logins.by_key(ADMIN, "a"))
    assert session is not None
    assert session.operator.name == "k_admin"


def test_a_link_logs_in_once(logins: Logins, tmp_path: Path) -> None:
    create_link(tmp_path / "links", "http://x", "token", 5000.0)
    assert logins.find(logins.by_link("token", "a"))
    with pytest.raises(Unauthenticated, match="was used"):
        logins.by_link("token", "a")


def test_failures_of_others_at_the_address_do_not_refuse_a_link(
    logins: Logins, tmp_path: Path
) -> None:
    for _ in range(FAILURES_MAX):
        with pytest.raises(Unauthenticated):
            logins.by_link("wrong", "a")
    with pytest.raises(Overloaded):
        logins.by_link("wrong", "a")
    create_link(tmp_path / "links", "http://x", "token", 5000.0)
    assert logins.find(logins.by_link("token", "a"))


def test_failures_of_one_address_delay_its_logins_only(logins: Logins, clock: Clock) -> None:
    for _ in range(FAILURES_MAX):
        with pytest.raises(Unauthenticated):
            logins.by_key("wrong", "a")
    with pytest.raises(Overloaded) as refused:
        logins.by_key(ADMIN, "a")
    assert refused.value.retry_after_s == WINDOW_S
    assert logins.by_key(ADMIN, "b")
    clock.now += WINDOW_S
    assert logins.by_key(ADMIN, "a")


def test_a_session_ends_by_logout_idleness_age_and_number(logins: Logins, clock: Clock) -> None:
    token = logins.by_key(ADMIN, "a")
    logins.end(token)
    assert logins.find(token) is None
    idle = logins.by_key(ADMIN, "a")
    clock.now += IDLE_S + 1
    assert logins.find(idle) is None
    long = logins.by_key(ADMIN, "a")
    for _ in range(int(LONGEST_S / IDLE_S) + 1):
        clock.now += IDLE_S - 1
        found = logins.find(long)
    assert found is None
    first = logins.by_key(ADMIN, "a")
    clock.now += 1
    for _ in range(SESSIONS_MAX):
        logins.by_key(ADMIN, "a")
    assert logins.find(first) is None
    assert logins.open_sessions == SESSIONS_MAX


def test_a_revoked_key_ends_its_sessions_and_what_they_have_open(
    logins: Logins, key_file: KeyFile, key_path: Path
) -> None:
    token, ended = logins.by_key(ADMIN, "a"), list[str]()
    session = logins.find(token)
    assert session is not None
    session.on_end.add(lambda: ended.append("page"))
    logins.sweep()
    assert not ended
    with edited_tenants(key_path) as tenants:
        remove_key(tenants, "k_admin")
    key_file.reload()
    logins.sweep()
    assert ended == ["page"]
    assert logins.find(token) is None


# The gate.


async def page(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        await asyncio.Event().wait()
    headers = [(b"cache-control", b"max-age=1")] if "static" in scope["path"] else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"page"})


@pytest.fixture
def gate(logins: Logins) -> Gate:
    policy = BrowserPolicy(frozenset(), frozenset(), checks_host=True, is_json_only=False)
    return Gate(page, logins, policy, lambda: COOKIE)


async def receive_nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


# Any: ASGI.
async def get(gate: Gate, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Message) -> None:
        sent.append(dict(message))

    given = {"host": "127.0.0.1:1", **headers}
    pairs = [(name.encode(), value.encode()) for name, value in given.items()]
    scope: Scope = {"type": "http", "method": "GET", "path": path, "headers": pairs}
    await gate(scope, receive_nothing, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found


async def test_without_a_session_only_login_and_liveness_are_served(gate: Gate) -> None:
    for path in ("/login", "/live", "/ready"):
        assert (await get(gate, path))[0] == 200
    for path in ("/", "/requests/x", "/_nicegui/a.js", "/metrics", "/health", "/login/x"):
        assert (await get(gate, path))[0] == 401
    status, headers = await get(gate, "/requests", accept="text/html")
    assert (status, headers["location"]) == (303, "/login?next=%2Frequests")


async def test_a_session_opens_the_pages_and_a_foreign_cookie_does_not(
    gate: Gate, logins: Logins
) -> None:
    token = logins.by_key(ADMIN, "a")
    assert (await get(gate, "/", cookie=f"{COOKIE}={token}"))[0] == 200
    assert (await get(gate, "/", cookie=f"kvmesh_console_2={token}"))[0] == 401
    assert (await get(gate, "/", cookie=f"{COOKIE}=x"))[0] == 401


async def test_programs_read_metrics_with_a_key_of_an_administrator(gate: Gate) -> None:
    assert (await get(gate, "/metrics", authorization=f"Bearer {ADMIN}"))[0] == 200
    assert (await get(gate, "/metrics", authorization=f"Bearer {OTHER}"))[0] == 401
    assert (await get(gate, "/", authorization=f"Bearer {ADMIN}"))[0] == 401


async def test_other_names_of_the_server_and_pages_of_other_sites_are_refused(
    gate: Gate, logins: Logins
) -> None:
    cookie = f"{COOKIE}={logins.by_key(ADMIN, 'a')}"
    assert (await get(gate, "/", cookie=cookie, host="evil.example"))[0] == 400
    assert (await get(gate, "/", cookie=cookie, origin="http://evil.example"))[0] == 403
    assert (await get(gate, "/", cookie=cookie, origin="http://127.0.0.1:1"))[0] == 200


async def test_pages_have_a_content_policy_and_are_not_stored(gate: Gate, logins: Logins) -> None:
    cookie = f"{COOKIE}={logins.by_key(ADMIN, 'a')}"
    _, headers = await get(gate, "/", cookie=cookie)
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    # Else the forms of login and logout have the origin `null`, which is refused.
    assert headers["referrer-policy"] == "same-origin"
    _, headers = await get(gate, "/static.js", cookie=cookie)
    assert headers["cache-control"] == "max-age=1"


async def open_websocket(
    gate: Gate, sent: list[str], accepted: asyncio.Event | None = None, **headers: str
) -> None:
    async def send(message: Message) -> None:
        sent.append(message["type"])
        if accepted is not None:
            accepted.set()

    given = {"host": "127.0.0.1:1", **headers}
    pairs = [(name.encode(), value.encode()) for name, value in given.items()]
    scope: Scope = {"type": "websocket", "path": "/_nicegui_ws/", "headers": pairs}
    await gate(scope, receive_nothing, send)


async def test_a_websocket_needs_a_session_and_ends_with_it(gate: Gate, logins: Logins) -> None:
    token, sent = logins.by_key(ADMIN, "a"), list[str]()
    await open_websocket(gate, sent)
    await open_websocket(gate, sent, cookie=f"{COOKIE}={token}", origin="http://evil.example")
    assert sent == ["websocket.close"] * 2
    sent.clear()
    async with asyncio.timeout(5.0):
        accepted, cookie = asyncio.Event(), f"{COOKIE}={token}"
        opened = asyncio.create_task(open_websocket(gate, sent, accepted, cookie=cookie))
        await accepted.wait()
        logins.end(token)
        await opened
    assert sent == ["websocket.accept", "websocket.close"]


def test_operators_of_a_link_have_no_key() -> None:
    assert Operator().name == "one-time link"


def test_a_slow_read_of_the_keys_does_not_undo_a_revocation(
    key_file: KeyFile, key_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read, may_go_on, build = threading.Event(), threading.Event(), KeyTable.of

    def build_slowly(document: KeyDocument) -> KeyTable:
        if threading.current_thread().name == "slow":
            is_read.set()
            assert may_go_on.wait(5.0)
        return build(document)

    monkeypatch.setattr(KeyTable, "of", build_slowly)
    key_path.write_text(key_path.read_text() + "\n")
    slow = threading.Thread(target=key_file.reload, name="slow")
    slow.start()
    assert is_read.wait(5.0)
    with edited_tenants(key_path) as tenants:
        remove_key(tenants, "k_admin")
    newer = threading.Thread(target=key_file.reload)
    newer.start()
    newer.join(0.1)
    may_go_on.set()
    slow.join()
    newer.join()
    with pytest.raises(Unauthenticated):
        key_file.find(ADMIN.encode())


@pytest.mark.parametrize("other", ['prefs={"a": 1, "b": "c d"}', "x[y]=1", "flag", "a b=c"])
def test_cookies_of_other_servers_of_the_host_do_not_hide_the_session(other: str) -> None:
    header = f"{other}; {COOKIE}=token".encode()
    assert read_cookie({"headers": [(b"cookie", header)]}, COOKIE) == "token"

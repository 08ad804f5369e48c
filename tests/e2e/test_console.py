"""A console process beside a mesh: login, pages, metrics, and its end."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from common.access.login_links import read_url
from common.api_keys import hash_of
from meshctl.commands.console import new_link
from tests.kit.processes import Mesh, Service
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

ADMIN, OTHER = "kvmesh_admin", "kvmesh_other"


def write_keys(path: Path, *ids: str) -> None:
    created = datetime(2026, 1, 1, tzinfo=UTC).isoformat()
    known = {"admin": (ADMIN, ["admin"]), "other": (OTHER, ["infer"])}
    keys = [
        {"id": id_, "sha256": hash_of(text.encode()), "scopes": scopes, "created": created}
        for id_, (text, scopes) in known.items()
        if id_ in ids
    ]
    path.write_text(json.dumps({"tenants": {"ops": {"keys": keys}}}))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with Mesh(tmp_path_factory.mktemp("mesh"), workers=1, named=True) as running:
        yield running


@pytest.fixture
def keys(mesh: Mesh) -> Path:
    path = mesh.folder / "keys.json"
    write_keys(path, "admin", "other")
    return path


@pytest.fixture
def console(mesh: Mesh, keys: Path) -> Iterator[Service]:
    service = mesh.spawn("console", f"--api-keys={keys}").wait_ready()
    yield service
    service.close()


@pytest.fixture
def browser(console: Service) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=console.addresses["http"], timeout=WAIT_S, trust_env=False
    ) as client:
        client.headers["accept"] = "text/html"
        yield client


def log_in(browser: httpx.Client, key: str) -> httpx.Response:
    return browser.post("/login", data={"key": key, "next": "/"})


def test_a_link_opens_the_pages_once(browser: httpx.Client, mesh: Mesh) -> None:
    assert browser.get("/").headers["location"] == "/login?next=%2F"
    folder = mesh.folder / "console"
    link = new_link(folder, read_url(folder))
    assert browser.head(link).status_code == 200
    response = browser.get(link)
    assert response.status_code == 200
    cookie = response.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    page = browser.get("/")
    assert page.status_code == 200
    assert "unsafe-eval" in page.headers["content-security-policy"]
    assert "https://" not in "".join(
        part for part in page.text.split('"') if part.endswith((".js", ".css"))
    )
    assert httpx.get(link, trust_env=False).status_code == 403
    assert browser.post("/logout").status_code == 303
    assert browser.get("/").status_code == 303


def test_only_keys_of_administrators_open_the_pages(browser: httpx.Client) -> None:
    assert browser.get("/login").status_code == 200
    assert log_in(browser, OTHER).status_code == 403
    assert log_in(browser, "wrong").status_code == 403
    assert browser.get("/").status_code == 303
    assert log_in(browser, ADMIN).status_code == 200
    assert browser.get("/").status_code == 200


def test_a_revoked_key_ends_its_session(browser: httpx.Client, keys: Path) -> None:
    log_in(browser, ADMIN)
    assert browser.get("/").status_code == 200
    write_keys(keys, "other")
    wait_for(lambda: browser.get("/").status_code == 303, "the session ends")


def test_failed_logins_are_limited(browser: httpx.Client) -> None:
    statuses = [log_in(browser, "wrong").status_code for _ in range(6)]
    assert statuses == [403] * 5 + [429]
    response = log_in(browser, ADMIN)
    assert response.status_code == 429
    assert 0 < int(response.headers["retry-after"]) <= 60


def test_other_names_and_sites_are_refused(browser: httpx.Client) -> None:
    assert browser.get("/live", headers={"host": "evil.example"}).status_code == 400
    page = {"origin": "http://evil.example"}
    assert browser.post("/login", data={"key": ADMIN}, headers=page).status_code == 403


def test_programs_read_health_and_metrics_with_a_key(browser: httpx.Client) -> None:
    assert browser.get("/live").json() == {"status": "live"}
    assert browser.get("/ready").json() == {"ready": True}
    key = {"authorization": f"Bearer {ADMIN}"}

    def sees_all() -> bool:
        return bool(browser.get("/health", headers=key).json()["members"] == 3)

    wait_for(sees_all, "it sees the members")
    text = browser.get("/metrics", headers=key).text
    assert "kvmesh_console_members 3.0" in text
    assert 'service="console"' in text
    assert browser.get("/metrics", headers={"authorization": "x"}).status_code == 303


def test_it_drains_and_no_service_waits_for_it(console: Service, mesh: Mesh) -> None:
    assert mesh.http.get(f"{mesh.url}/ready").json()["ready"]
    folder = mesh.folder / "console"
    assert read_url(folder) == console.addresses["http"]
    console.send(signal.SIGTERM)
    assert console.wait() == 0
    assert read_url(folder) == ""
    assert mesh.http.get(f"{mesh.url}/ready").json()["ready"]

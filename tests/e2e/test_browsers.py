"""Requests that web pages make a browser send, and trace flags of clients."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import httpx
import pytest

from tests.kit.processes import MODEL, Mesh, Service
from tests.kit.waiting import wait_for

pytestmark = pytest.mark.slow

SITE = "https://chat.example.org"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TRACE_ID = "0" * 31 + "1"  # sampled by every ratio that goes by the id
TRACED = {"traceparent": f"00-{TRACE_ID}-{'1' * 16}-01"}
# No collector listens there: spans are dropped.
TRACES = ["--otlp-endpoint=http://127.0.0.1:9", "--trace-sample-ratio=0"]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    flags = [f"--cors-origins={SITE}", *TRACES]
    folder = tmp_path_factory.mktemp("mesh")
    with Mesh(folder, workers=1, worker_flags=["--speedup=0"], frontend_flags=flags) as mesh:
        mesh.spawn("frontend", "--trust-traceparent", "--allowed-hosts=api.example").wait_ready()
        wait_for(mesh.is_complete, "the frontends use the router and the worker")
        yield mesh


def post(
    mesh: Mesh, headers: Mapping[str, str], path: str = "/v1/chat/completions"
) -> httpx.Response:
    return mesh.http.post(mesh.url + path, json=CHAT, headers=headers)


def test_pages_of_allowed_sites_are_served_and_of_others_refused(mesh: Mesh) -> None:
    allowed = post(mesh, {"origin": SITE})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, SITE)
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    preflight = mesh.http.options(
        f"{mesh.url}/v1/chat/completions", headers={"origin": SITE, **asks}
    )
    assert preflight.status_code == 200
    assert "POST" in preflight.headers["access-control-allow-methods"]
    for origin in ("https://evil.example", "null"):
        other = post(mesh, {"origin": origin})
        assert other.status_code == 403
        assert (other.json()["error"]["param"], other.json()["error"]["code"]) == (
            "origin",
            "permission_denied",
        )
        assert "access-control-allow-origin" not in other.headers
    form = post(mesh, {"origin": SITE, "content-type": "text/plain"})
    assert (form.status_code, form.json()["error"]["param"]) == (415, "content-type")


def test_other_names_of_the_host_are_refused_unless_they_are_listed(mesh: Mesh) -> None:
    for path in ("/v1/chat/completions", "/metrics", "/live"):
        rebound = post(mesh, {"host": "rebound.example"}, path)
        assert (rebound.status_code, rebound.json()["error"]["code"]) == (400, "invalid_host")
    second = mesh.running("frontend")[1].addresses["http"]
    for host, status in (("api.example", 200), ("rebound.example", 400)):
        assert httpx.get(f"{second}/live", headers={"host": host}).status_code == status


# Any: the fields of log events.
def ended(frontend: Service, client_id: str) -> list[dict[str, Any]]:
    """The log lines of a request."""
    lines = frontend.events("request")
    return [one for one in lines if one.get("client_request_id") == client_id]


def test_a_client_decides_about_its_trace_only_if_the_frontend_trusts_it(mesh: Mesh) -> None:
    own, trusting = mesh.running("frontend")
    for frontend, expected in ((own, None), (trusting, TRACE_ID)):
        url = frontend.addresses["http"]
        client_id = f"traced-{secrets.token_hex(4)}"  # another one in a further run of the test
        headers = {**TRACED, "x-request-id": client_id}
        response = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers=headers)
        assert response.status_code == 200
        (event,) = wait_for(partial(ended, frontend, client_id), "the request is logged")
        assert event.get("trace_id") == expected

"""The table of routes: its entries, its documentation, and dispatch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend_svc.edge.asgi import AsgiApp, Receive, Scope, Send, send_response
from frontend_svc.endpoints.plain import PATH_PARAMETERS
from frontend_svc.endpoints.route import Route
from frontend_svc.routes.dispatch import Dispatcher
from frontend_svc.routes.table import METRICS, ROUTES, routes

DOCS = Path(__file__).parents[4] / "docs/http.md"
ROUTE_HEADER = b"x-route"
STORING = (
    *("/v1/files", "/v1/batches", "/v1/conversations"),
    *("/v1/conversations/{id}", "/v1/conversations/{id}/items"),
)
_ROW = re.compile(r"^\| `(\S+) (\S+)` \| (\S+) \| (\S+) \|", re.M)


def key_of(route: Route) -> str:
    """Returns what docs/http.md states about the key of a route."""
    if route.is_open:
        return "none"
    return "any" if route.permission is None else f"`{route.permission.value}`"


def test_each_route_has_a_row_in_the_documentation_and_nothing_else() -> None:
    expected = [
        (
            route.method,
            route.path.replace(":path}", "}"),
            key_of(route),
            f"`{route.label}`" if route.label else "-",
        )
        for route in ROUTES
    ]
    assert sorted(_ROW.findall(DOCS.read_text())) == sorted(expected)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_the_entry_of_a_route_is_complete(route: Route) -> None:
    assert route.operation.summary
    assert not (route.is_open and route.permission)
    # A counted route takes a body. Of the others, only those do that store one.
    is_counted, is_stored = bool(route.label), route.path in STORING
    assert is_counted == bool(route.span_operation)
    has_body = is_counted or (is_stored and route.method == "POST")
    assert has_body == bool(route.operation.bodies)
    if is_counted:
        assert route.method == "POST"
        assert route.permission is not None
        assert route.operation.example is not None


def test_no_method_of_a_path_has_two_entries() -> None:
    served = [(method, route.path) for route in ROUTES for method in route.methods]
    assert len(served) == len(set(served))


def test_the_path_of_the_metrics_is_configured() -> None:
    paths = {route.path for route in routes("/internal/metrics")}
    assert paths == {route.path for route in ROUTES} - {METRICS.path} | {"/internal/metrics"}


def named(route: Route) -> AsgiApp:
    """Returns an application whose responses name the route and the parameters."""

    async def serve(scope: Scope, _: Receive, send: Send) -> None:
        values = scope.get(PATH_PARAMETERS, {}).values()
        text = " ".join([route.method, route.path, *map(repr, values)])
        await send_response(send, 200, ((ROUTE_HEADER, text.encode("unicode_escape")),), b"")

    return serve


async def request(path: str, method: str) -> httpx.Response:
    """Returns the response of an API with the paths of all routes and without keys."""
    dispatcher = Dispatcher((route, named(route)) for route in ROUTES)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await dispatcher({**scope, "state": {}}, receive, send)

    transport = httpx.ASGITransport(app=serve)
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        return await client.request(method, path)


@pytest.mark.parametrize(
    ("method", "path", "served"),
    [
        ("POST", "/v1/completions", "POST /v1/completions"),
        ("GET", "/v1/models/", "GET /v1/models/{name:path} ''"),
        ("GET", "/v1/models/a/b", "GET /v1/models/{name:path} 'a/b'"),
        ("GET", "/v1/models/a%2Fb%0A", "GET /v1/models/{name:path} 'a/b\\n'"),
        ("HEAD", "/v1/models/a", "GET /v1/models/{name:path} 'a'"),
        ("GET", "/v1/responses/input_tokens", "GET /v1/responses/{id} 'input_tokens'"),
        ("POST", "/v1/responses/input_tokens", "POST /v1/responses/input_tokens"),
        ("POST", "/v1/responses/compact", "POST /v1/responses/compact"),
        ("GET", "/v1/responses/compact", "GET /v1/responses/{id} 'compact'"),
        ("DELETE", "/v1/responses/r", "DELETE /v1/responses/{id} 'r'"),
        ("GET", "/v1/responses/r/input_items", "GET /v1/responses/{id}/input_items 'r'"),
        ("HEAD", "/live", "GET /live"),
        ("HEAD", "/api/hello", "GET /api/hello"),
    ],
)
async def test_a_request_is_served_by_the_route_of_its_method_and_path(
    method: str, path: str, served: str
) -> None:
    response = await request(path, method)
    route = response.headers.get(ROUTE_HEADER.decode())
    assert (response.status_code, route) == (200, served.encode("unicode_escape").decode())


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("POST", "/live", "GET, HEAD"),
        ("HEAD", "/metrics", "GET"),
        ("PUT", "/v1/responses/r", "DELETE, GET, HEAD"),
        ("PUT", "/v1/responses/input_tokens", "DELETE, GET, HEAD, POST"),
        ("OPTIONS", "/v1/models", "GET, HEAD"),
    ],
)
async def test_another_method_is_a_405_with_the_methods_of_the_path(
    method: str, path: str, allowed: str
) -> None:
    response = await request(path, method)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        error = response.json()["error"]
        assert error["code"] == "method_not_allowed"
        assert error["message"] == f"Method not allowed: {method} {path}"


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/v1/completions/", "/v1/responses/", "/v1/responses/a/b", "/v1/models2"),
        *("/metrics%0A", "/metrics%00", "/metrics/", "/metrics%2F", "//metrics", "/Metrics"),
        *("/health%0A", "/live%0A"),
    ],
)
async def test_any_other_path_is_a_404(path: str) -> None:
    response = await request(path, "GET")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/batches"])
async def test_a_refusal_has_the_form_of_the_api_above_the_path(path: str) -> None:
    # Any: JSON.
    body: Any = (await request(path, "GET")).json()
    assert (body["type"], body["error"]["details"]["param"]) == ("error", None)

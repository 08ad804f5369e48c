"""The web application: NiceGUI's pages, the login, and the routes for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastapi import FastAPI
from nicegui import Client, ui
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from console_svc import pages
from console_svc.access.login_page import LoginPages
from console_svc.state.console_state import ConsoleState

TITLE = "KVMesh console"
# Messages of a page that are sent again after a broken connection.
HISTORY_MESSAGES = 200
# Pages that no browser is connected to, each of which takes 1 to 2 MB: those that load now, those
# of a program without scripts, and those of broken connections.
UNCONNECTED_MAX = 128


def build_web(
    state: ConsoleState,
    login: LoginPages,
    metrics: CollectorRegistry,
    health: Callable[[], Mapping[str, object]],
    is_ready: Callable[[], bool],
    *,
    reconnect_s: float,
) -> FastAPI:
    """Returns the application; one process has at most one.

    - health: returns what `/health` states.
    - is_ready: whether the console serves, and does not drain.
    """

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> Response:
        return JSONResponse({"ready": is_ready()}, 200 if is_ready() else 503)

    async def report_health(_: Request) -> Response:
        return JSONResponse(dict(health()), 200 if is_ready() else 503)

    async def scrape(_: Request) -> Response:
        return Response(generate_latest(metrics), headers={"content-type": CONTENT_TYPE_LATEST})

    web = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    web.router.routes += [
        Route("/live", live, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/health", report_health, methods=["GET"]),
        Route("/metrics", scrape, methods=["GET"]),
        *login.routes(),
    ]
    pages.register(state)
    # All assets are part of the package; Tailwind's compiler in the browser is left out.
    ui.run_with(
        web,
        title=TITLE,
        dark=None,
        tailwind=False,
        unocss="mini",
        language="en-US",
        reconnect_timeout=reconnect_s,
        message_history_length=HISTORY_MESSAGES,
        show_welcome_message=False,
        storage_secret=None,
    )
    return web


def remove_unconnected_pages() -> None:
    """Removes the oldest pages without a connection, so that UNCONNECTED_MAX of them remain. A
    browser whose page is removed loads it again."""
    unconnected = [page for page in Client.instances.values() if not page.has_socket_connection]
    unconnected.sort(key=lambda page: page.created)
    for page in unconnected[: max(0, len(unconnected) - UNCONNECTED_MAX)]:
        page.delete()


def count_viewers() -> int:
    """Returns the open pages."""
    return sum(client.has_socket_connection for client in Client.instances.values())

"""Each page, through a running console that follows a mesh of processes, without a browser.

The console runs in the process of the test, because `nicegui.testing.User` reads the elements of
its pages there; the login, the gate and the HTTP server are those of production.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path

import httpx
import pytest
from nicegui import Client, ElementFilter, ui
from nicegui.testing.general import nicegui_reset_globals
from nicegui.testing.user import User

from common.access.login_links import create_link
from console_svc.app import ConsoleApp
from console_svc.config import ConsoleConfig
from tests.kit.apps import living
from tests.kit.processes import Mesh
from tests.kit.waiting import WAIT_S, until

EMPTY_PAGES = (
    ("/", "No member is registered"),
    ("/requests", "No request yet"),
    ("/index", "No indexer is registered"),
    ("/tenants", "The mesh has no API keys"),
    ("/usage", "No usage yet"),
    ("/batches", "The mesh has no batch service"),
    ("/models", "No model is served"),
    ("/keys", "The mesh has no API keys"),
    ("/playground", "No model is served"),
    ("/replay", "No replay yet"),
    ("/members/worker-9", "No such member is registered"),
    ("/requests/chatcmpl-1", "The console has no request with this id"),
)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@asynccontextmanager
async def viewed(folder: Path, otlp_port: int = 0) -> AsyncIterator[User]:
    """Starts a console on the registry of the folder; yields an operator that has logged in."""
    config = ConsoleConfig(
        registry_path=folder / "registry",
        http_port=0,
        otlp_port=otlp_port,
        login_path=folder / "console",
        interval_s=0.2,
    )
    with nicegui_reset_globals():
        async with living(ConsoleApp(config)) as app:
            link = create_link(folder / "console", app.url, secrets.token_urlsafe(32), time.time())
            async with httpx.AsyncClient(base_url=app.url, trust_env=False) as http:
                refused = await http.get("/", headers={"accept": "text/html"})
                assert refused.status_code == 303
                assert (await http.get(link)).status_code == 200
                yield User(http)


def texts(user: User) -> list[str]:
    """Returns the texts of the page: those of elements that are seen, and those of tables."""
    with user:
        found = [
            str(e.props.get("text") or getattr(e, "text", "")) for e in ElementFilter() if e.visible
        ]
        tables = [str(row) for table in ElementFilter(kind=ui.table) for row in table.rows]
    return found + tables


async def sees(user: User, expected: str) -> None:
    await until(lambda: _sees(user, expected), f"the page shows {expected!r}", WAIT_S, 0.05)


async def _sees(user: User, expected: str) -> bool:
    return any(expected in text for text in texts(user))


async def test_each_page_without_data_says_what_to_do(tmp_path: Path) -> None:
    async with viewed(tmp_path) as user:
        for path, expected in EMPTY_PAGES:
            await user.open(path)
            await sees(user, expected)


async def test_pages_that_no_browser_opens_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with viewed(tmp_path) as user:
        # Each console imports the module anew.
        monkeypatch.setattr(import_module("console_svc.web"), "UNCONNECTED_MAX", 3)
        await user.open("/keys")
        opened = user.client
        assert opened is not None
        for _ in range(8):
            # As a program without scripts.
            assert (await user.http_client.get("/keys")).status_code == 200
        newest = list(Client.instances)[-3:]
        await until(
            lambda: _are([opened.id, *newest]), "the oldest pages without a connection are removed"
        )


async def _are(pages: list[str]) -> bool:
    return list(Client.instances) == pages


@pytest.fixture
def otlp_port() -> int:
    return free_port()


@pytest.fixture
def mesh(tmp_path: Path, otlp_port: int) -> Iterator[Mesh]:
    flags = [f"--otlp-endpoint=http://127.0.0.1:{otlp_port}", "--trace-sample-ratio=1"]
    with Mesh(
        tmp_path,
        workers=0,
        prefill=1,
        decode=1,
        indexers=1,
        worker_flags=flags,
        router_flags=flags,
        frontend_flags=flags,
        named=True,
    ) as found:
        yield found


async def test_each_page_shows_a_running_mesh(mesh: Mesh, tmp_path: Path, otlp_port: int) -> None:
    async with viewed(tmp_path, otlp_port) as user:
        prompt = list(range(300, 420))
        response = await asyncio.to_thread(mesh.post_completion, "seen", prompt, max_tokens=8)
        assert response.status_code == 200, response.text
        for path, expected in (
            ("/", "decode-1"),
            ("/", "joined at"),
            ("/members/prefill-1", "worker · prefill"),
            ("/index", "prefill-1"),
            ("/models", "1 prefill, 1 decode"),
            ("/requests", "prefill-1 → decode-1"),
        ):
            await user.open(path)
            await sees(user, expected)
        await user.open("/requests/seen")
        await sees(user, "decode on decode-1 follows prefill on prefill-1: linked")
        await sees(user, "chosen by router-1 (kv)")
        await sees(user, "Prefill: candidates")


async def test_batches_are_shown_with_their_progress_and_the_service_that_runs_them(
    tmp_path: Path,
) -> None:
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "sim", "prompt": "Hi", "max_tokens": 2},
    }
    with Mesh(tmp_path, workers=1, batches=1, named=True, worker_flags=["--speedup=20"]) as mesh:
        async with viewed(tmp_path) as user:
            await user.open("/batches")
            await sees(user, "No batch yet")
            form = {"file": ("lines.jsonl", json.dumps(line).encode())}
            file = mesh.http.post(
                f"{mesh.url}/v1/files", data={"purpose": "batch"}, files=form
            ).json()
            body = {
                "input_file_id": file["id"],
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            }
            batch = mesh.http.post(f"{mesh.url}/v1/batches", json=body).json()
            await sees(user, batch["id"])
            await sees(user, "completed")
            await sees(user, "by batch-1")

"""The pages of the console. They show a `ConsoleState`, and start what it offers; nothing else."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from nicegui import app, ui

from console_svc.pages import (
    batches,
    index,
    keys,
    member,
    models,
    overview,
    playground,
    replay,
    request,
    requests,
    tenants,
    usage,
)
from console_svc.state.console_state import ConsoleState

ASSETS = Path(__file__).parent.parent / "assets"

_PAGES = (
    *(overview, member, requests, request, index, tenants, usage, batches, models, keys),
    playground,
    replay,
)


def register(state: ConsoleState) -> None:
    """Defines all pages and their files. Called once, before the server starts."""
    style = ASSETS / "console.css"
    # A new version has a new address, so that no browser keeps the old one.
    version = sha256(style.read_bytes()).hexdigest()[:12]
    app.add_static_files("/assets", ASSETS)
    head = f'<link rel="stylesheet" href="/assets/console.css?v={version}">'
    ui.add_head_html(f"{head}<script>document.documentElement.lang = 'en'</script>", shared=True)
    for page in _PAGES:
        page.define(state)

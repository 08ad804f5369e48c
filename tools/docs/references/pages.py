"""All generated pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tools.docs.references.commands import commands_page
from tools.docs.references.grpc_api import grpc_page
from tools.docs.references.http_api import http_page
from tools.docs.references.log_events import log_events_page
from tools.docs.references.settings import settings_page

FOLDER: Final = Path("docs/reference")
PAGES: Final[dict[str, Callable[[], str]]] = {
    "settings.md": settings_page,
    "meshctl.md": commands_page,
    "http.md": http_page,
    "grpc.md": grpc_page,
    "log-events.md": log_events_page,
}


def write_pages(root: Path) -> None:
    """Writes the pages below the root of a repository."""
    for name, make in PAGES.items():
        (root / FOLDER / name).write_text(make(), "utf-8")


def stale_pages(root: Path) -> list[str]:
    """Returns a text for each page that differs from the code."""
    return [
        f"{FOLDER / name} is not that of the code: run `make reference`"
        for name, make in PAGES.items()
        if not (root / FOLDER / name).is_file()
        or (root / FOLDER / name).read_text("utf-8") != make()
    ]

"""Chromium on pages of the console: looks, console messages, foreign requests, accessibility."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Playwright

CHROMIUM = Path("/usr/bin/chromium")
INSTALL = "apt-get install --yes chromium"
# As long as tests of services wait (tests/kit/waiting.py).
WAIT_MS = 30_000
SIZE = {"width": 1440, "height": 900}
# Without these Chromium contacts servers of its vendor.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
# A page may have an element that is scrolled by its links; Quasar's table has no rule for it.
_AXE_RULES_OFF = ("scrollable-region-focusable",)


class Chromium:
    """One browser process for all journeys."""

    def __init__(self, playwright: Playwright, executable: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvmesh-console-")
        self.browser: Browser = playwright.chromium.launch(
            executable_path=str(executable), headless=True, args=list(FLAGS)
        )

    def close(self) -> None:
        self.browser.close()
        self._folder.cleanup()

    @contextmanager
    def visitor(self, url: str, *, scheme: str = "light") -> Iterator[Visitor]:
        """Opens a window of a new visitor without cookies."""
        context = self.browser.new_context(viewport=SIZE, color_scheme=scheme, base_url=url)
        context.set_default_timeout(WAIT_MS)
        visitor = Visitor(context, url)
        try:
            yield visitor
        finally:
            context.close()


class Visitor:
    """A window, and what it should not have: errors, and requests to other servers."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context = context
        self.page: Page = context.new_page()
        self.faults: list[str] = []
        self._url = url
        self.page.on("console", self._log)
        self.page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        self.page.on("request", self._request)

    def _log(self, message: Any) -> None:
        if message.type == "error":
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self._url, "data:", "blob:")):
            self.faults.append(f"request to another server: {request.url}")

    def log_in(self, key: str) -> None:
        self.page.goto("/login")
        self.page.get_by_label("key", exact=False).fill(key)
        self.page.keyboard.press("Enter")
        self.page.wait_for_url(lambda url: "/login" not in url)

    def open(self, path: str, heading: str) -> None:
        """Opens a page, and waits until it has its heading and its connection."""
        self.page.goto(path)
        self.page.get_by_role("heading", level=1, name=heading).wait_for()
        self.page.wait_for_function("() => window.socket && window.socket.connected")

    def shoot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(path), full_page=True)

    def accessibility_faults(self) -> list[str]:
        """Returns what axe finds, a line for each rule."""
        results = Axe().run(self.page).response["violations"]
        return [
            f"{found['id']}: {found['help']} ({len(found['nodes'])} places, first "
            f"{found['nodes'][0]['target']})"
            for found in results
            if found["id"] not in _AXE_RULES_OFF
        ]

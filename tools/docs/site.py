"""The built site: each link and anchor of its pages exists, and a page loads local files only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from tools.docs.links import LinkReport

# Attributes by which a page loads a file, by the name of the element; others only link.
_LOADED: Final = {
    "script": "src",
    "img": "src",
    "source": "src",
    "iframe": "src",
    "object": "data",
}
_CSS_URL: Final = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


class _Html(HTMLParser):
    """The ids of a page, the targets of its links and the files that it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.ids.update(values[name] for name in ("id", "name") if name in values)
        if tag == "link" and "stylesheet" in values.get("rel", "").split():
            self.loaded.append(values.get("href", ""))
        elif tag in ("a", "link") and "href" in values:
            self.links.append(values["href"])
        elif target := values.get(_LOADED.get(tag, "")):
            self.loaded.append(target)


def check_site(folder: Path) -> LinkReport:
    """Returns the report on the pages of a folder, which has their styles and scripts too."""
    report = LinkReport()
    pages = {path: _read(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(folder).as_posix()
        for target in page.loaded:
            report.checked += 1
            if problem := _problem_of_file(folder, path, target):
                report.dead.append(f"{name}: loads {target}: {problem}")
        for target in page.links:
            if urlsplit(target).scheme or target.startswith("//"):
                report.external.append((name, target))
                continue
            report.checked += 1
            if problem := _problem_of_link(folder, path, target, pages):
                report.dead.append(f"{name}: {target}: {problem}")
    report.dead += _foreign_styles(folder)
    return report


def _read(path: Path) -> _Html:
    page = _Html()
    page.feed(path.read_text("utf-8"))
    return page


def _problem_of_file(folder: Path, page: Path, target: str) -> str:
    parts = urlsplit(target)
    if parts.scheme == "data":
        return ""
    if parts.scheme or parts.netloc:
        return "is on another server"
    file = (page.parent / unquote(parts.path)).resolve()
    return "" if file.is_file() and file.is_relative_to(folder) else "no such file"


def _problem_of_link(folder: Path, page: Path, target: str, pages: dict[Path, _Html]) -> str:
    parts = urlsplit(target)
    file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not file.is_relative_to(folder) or not file.is_file():
        return "no such file"
    found = pages.get(file)
    anchor = unquote(parts.fragment)
    return "no such anchor" if found and anchor and anchor not in found.ids else ""


def _foreign_styles(folder: Path) -> Iterator[str]:
    """Yields the styles that load files of other servers."""
    for path in sorted(folder.rglob("*.css")):
        for first, second in _CSS_URL.findall(path.read_text("utf-8")):
            target = first or second
            if urlsplit(target).scheme not in ("", "data") or target.startswith("//"):
                yield f"{path.relative_to(folder).as_posix()}: loads {target}: is on another server"

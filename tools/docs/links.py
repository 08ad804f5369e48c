"""The links of the pages as they are in the repository: each target and anchor exists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from tools.docs.markdown import Page, read_page


@dataclass(slots=True)
class LinkReport:
    """What was found. dead: a text for each dead link; external: page and target, not fetched."""

    checked: int = 0
    dead: list[str] = field(default_factory=list)
    external: list[tuple[str, str]] = field(default_factory=list)


def check_links(root: Path, pages: Iterable[Path]) -> LinkReport:
    """Returns the report on the links of pages below `root`."""
    report = LinkReport()
    for path in pages:
        name = path.relative_to(root).as_posix()
        for link in _page(path).links:
            if link.is_external:
                report.external.append((name, link.target))
                continue
            report.checked += 1
            report.dead += [
                f"{name}:{link.line}: {link.target}: {problem}"
                for problem in _problems(root, path, unquote(link.target))
            ]
    return report


def _problems(root: Path, page: Path, target: str) -> Iterator[str]:
    """Yields what is wrong with a target, at most one text."""
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.is_relative_to(root):
        yield "is outside of the repository"
    elif not file.is_file():
        yield "no such file"
    elif anchor and file.suffix == ".md" and anchor not in _page(file).anchors:
        yield "no such heading"


@cache
def _page(path: Path) -> Page:
    return read_page(path.read_text("utf-8"))

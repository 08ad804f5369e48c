"""The documentation: its links, its generated pages, and the checks of both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.docs.__main__ import pages
from tools.docs.links import check_links
from tools.docs.markdown import read_page, slug
from tools.docs.references.pages import PAGES, stale_pages
from tools.docs.site import check_site
from tools.style.sources import ROOT, tracked_files


def test_every_link_and_anchor_of_the_pages_exists() -> None:
    report = check_links(ROOT, pages())
    assert report.checked > 300
    assert report.dead == []


@pytest.mark.slow
def test_the_generated_pages_are_those_of_the_code() -> None:
    assert stale_pages(ROOT) == []


def test_a_stale_generated_page_is_found(tmp_path: Path) -> None:
    assert len(stale_pages(tmp_path)) == len(PAGES)


def test_every_page_of_docs_is_in_the_navigation() -> None:
    names = {name for name in tracked_files("docs/*.md") if not name.startswith("docs/adr/")}
    index = (ROOT / "docs/index.md").read_text()
    blocks = re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.DOTALL | re.MULTILINE)
    entries = {
        f"docs/{line}.md"
        for block in blocks
        for line in block.splitlines()
        if line and not line.startswith(":")
    }
    missing = names - entries - {"docs/index.md"}
    assert not missing, "add them to a toctree of docs/index.md"


def test_every_decision_is_in_the_list_of_decisions() -> None:
    numbers = {Path(name).name[:4] for name in tracked_files("docs/adr/*.md")} - {"0000"}
    rows = re.findall(r"^\| \[(\d{4})\]", (ROOT / "docs/adr/0000-index.md").read_text(), re.M)
    assert sorted(rows) == sorted(numbers)


def test_a_dead_file_and_a_dead_anchor_are_found_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Other\n\n## Same\n\n## Same\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n[a](other.md) [b](other.md#same-1) [c](#page) [d](https://a.example/x)\n\n"
        "| x |\n|---|\n| [e](none.md) |\n\n[f](other.md#same-2) `[g](none.md)` ![h](none.png)\n"
        "[i](../outside.md)\n"
    )
    report = check_links(tmp_path, [page])
    assert report.dead == [
        "page.md:7: none.md: no such file",
        "page.md:9: other.md#same-2: no such heading",
        "page.md:9: none.png: no such file",
        "page.md:9: ../outside.md: is outside of the repository",
    ]
    assert report.external == [("page.md", "https://a.example/x")]
    assert report.checked == 7


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Meshctl, `top`", "meshctl-top"),
        ("While the registry is unavailable", "while-the-registry-is-unavailable"),
        ("ADR 0006 · Settings", "adr-0006--settings"),
    ],
)
def test_anchors_are_those_of_github(heading: str, anchor: str) -> None:
    assert read_page(f"## {heading}\n").anchors == {anchor}
    assert slug(heading.replace("`", "")) == anchor


def test_a_built_page_that_links_to_nothing_or_loads_from_elsewhere_is_found(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.html").write_text(
        '<link rel="stylesheet" href="https://cdn.example/x.css"><script src="a.js"></script>'
        '<h1 id="top">A</h1><a href="#top">1</a><a href="b.html#none">2</a><a href="c.html">3</a>'
        '<a href="https://other.example/">4</a>'
    )
    (tmp_path / "b.html").write_text('<img src="data:image/png;base64,AA"><p id="here"></p>')
    (tmp_path / "a.css").write_text('@import "https://fonts.example/f.css";')
    report = check_site(tmp_path)
    assert report.dead == [
        "a.html: loads https://cdn.example/x.css: is on another server",
        "a.html: loads a.js: no such file",
        "a.html: b.html#none: no such anchor",
        "a.html: c.html: no such file",
        "a.css: loads https://fonts.example/f.css: is on another server",
    ]
    assert report.external == [("a.html", "https://other.example/")]

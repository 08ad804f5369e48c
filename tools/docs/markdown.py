"""What the checks read of a page: the anchors of its headings, and its links."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

# Not in an anchor: all but letters, digits, "_", "-" and spaces (the rule of GitHub and of MyST).
_REMOVED: Final = re.compile(r"[^\w\- ]")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:")


@dataclass(frozen=True, slots=True)
class Link:
    """A link or an image.

    line: the first line of its paragraph or table.
    """

    target: str
    line: int

    @property
    def is_external(self) -> bool:
        return _SCHEME.match(self.target) is not None


@dataclass(frozen=True, slots=True)
class Page:
    """The parts of a page that links name."""

    anchors: frozenset[str]
    links: tuple[Link, ...]


def read_page(text: str) -> Page:
    """Returns the anchors and links of a text."""
    tokens = _parser().parse(text)
    return Page(frozenset(_anchors(tokens)), tuple(_links(tokens)))


def slug(heading: str) -> str:
    """Returns the anchor of a heading without a namesake before it."""
    return _REMOVED.sub("", heading.strip().lower()).replace(" ", "-")


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark").enable("table")


def _anchors(tokens: list[Token]) -> Iterator[str]:
    seen: Counter[str] = Counter()
    for token, inline in pairwise(tokens):
        if token.type != "heading_open":
            continue
        text = "".join(
            child.content
            for child in inline.children or ()
            if child.type in ("text", "code_inline", "text_special")
        )
        name = slug(text)
        yield f"{name}-{seen[name]}" if seen[name] else name
        seen[name] += 1


def _links(tokens: list[Token]) -> Iterator[Link]:
    line = 0
    for token in tokens:
        line = token.map[0] + 1 if token.map else line
        for child in token.children or ():
            target = child.attrGet("href" if child.type == "link_open" else "src")
            if child.type in ("link_open", "image") and target:
                yield Link(str(target), line)

"""What generated pages share: their head, and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

# An underscore inside of a word has no meaning.
_SPECIAL: Final = re.compile(r"[\\*<\[]|(?<!\w)_|_(?!\w)")


def page(title: str, source: str, *parts: str) -> str:
    """Returns a page. source: what it is generated from, as a part of a sentence."""
    head = f"# {title}\n\n<!-- Generated from {source} by `make reference`; do not edit. -->"
    return "\n\n".join([head, *(part.strip("\n") for part in parts if part)]) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; texts may have several lines, but no more than one paragraph."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def code(text: str) -> str:
    """Returns a text as code; an empty one stays empty."""
    return f"`{text}`" if text else ""


def prose(text: str) -> str:
    """Returns a text in which no character has a meaning for Markdown outside of code."""
    parts = text.split("`")
    parts[::2] = [_SPECIAL.sub(r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

"""The known name that is similar to an unknown one. It imports nothing of the project."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str], beginnings: Iterable[str] = ("--",)) -> str:
    """Returns `; did you mean X?` if one of the known names is similar, else "".

    beginnings: that names have in common, which is no similarity; the first that fits counts.
    """
    beginning = next((text for text in beginnings if name.startswith(text)), "")
    tails = {
        known_name.removeprefix(beginning): known_name
        for known_name in known
        if known_name.startswith(beginning)
    }
    near = difflib.get_close_matches(name.removeprefix(beginning), tails, n=1, cutoff=0.75)
    return f"; did you mean {tails[near[0]]}?" if near else ""

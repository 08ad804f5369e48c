"""Text that may be the start of a marker (pure)."""

from __future__ import annotations


def overlap(text: str, marker: str) -> int:
    """Returns length of the longest suffix of `text` that is a proper prefix of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)

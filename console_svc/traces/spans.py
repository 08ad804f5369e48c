"""Spans as the console keeps them, and what of a message it keeps (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ATTRIBUTES_MAX: Final = 48
TEXT_CHARS_MAX: Final = 300
LINKS_MAX: Final = 8
EVENTS_MAX: Final = 8
# Of the objects of a span, without its texts.
_SPAN_BYTES: Final = 700


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the work on a request. Times are Unix nanoseconds; ids are hex digits."""

    trace_id: str
    span_id: str
    parent_id: str
    """"": the root."""

    service: str
    member: str
    """Stable name of the instance, or its id."""

    name: str
    start_ns: int
    end_ns: int
    links: tuple[str, ...]
    """Ids of other spans that it follows."""

    attributes: Mapping[str, str]
    events: tuple[tuple[int, str], ...]
    error: str

    @property
    def size_bytes(self) -> int:
        """An estimate of its memory."""
        texts = sum(len(name) + len(text) + 100 for name, text in self.attributes.items())
        return _SPAN_BYTES + texts + 100 * (len(self.links) + len(self.events)) + len(self.error)


def cut(text: str) -> str:
    """Returns the beginning of a text that is too long."""
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[: TEXT_CHARS_MAX - 1]}…"

"""Bounds on the number of JSON values in a body, checked before it is parsed (pure).

A parser creates an object for each value, and the validation takes microseconds for each: a body
within its limit of bytes could cost seconds. Counts of characters cost a nanosecond per byte.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from common.errors import InvalidRequest
from frontend_svc.openai.body.validation_errors import INVALID_JSON

# Objects and lists. A long conversation has thousands; tools and their schemas have some more.
CONTAINERS_MAX: Final = 1 << 15
# Strings, keys included.
STRINGS_MAX: Final = 1 << 17
# Commas between values: the largest prompts have 2**20 token ids.
COMMAS_MAX: Final = (1 << 20) + (1 << 17)
# Shorter bodies cannot exceed a limit.
_BYTES_MIN: Final = 2 * CONTAINERS_MAX


class JsonCounts(NamedTuple):
    """Numbers of values in a JSON text. Exact for valid JSON, else some upper bound of what a
    parser may create before it finds the error. containers: objects and lists."""

    containers: int
    strings: int
    commas: int


def check_size(body: bytes) -> None:
    """Raises InvalidRequest for a body with too many values. The time is linear in its bytes."""
    if len(body) <= _BYTES_MIN:
        return
    # Nearly all bodies are within the limits even if text counts too.
    if _problem(_count(body)) and (problem := _problem(count_values(body))):
        raise InvalidRequest(f"The body has {problem} are allowed.", reason=INVALID_JSON)


def count_values(body: bytes) -> JsonCounts:
    """Counts outside of strings. If there are too many strings, only these are counted."""
    # Without escaped characters, each quote begins or ends a string.
    text = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if (quotes := text.count(b'"')) > 2 * STRINGS_MAX:
        return JsonCounts(0, quotes // 2, 0)
    return _count(b'""'.join(text.split(b'"')[::2]))


def _count(text: bytes) -> JsonCounts:
    containers = text.count(b"{") + text.count(b"[")
    return JsonCounts(containers, text.count(b'"') // 2, text.count(b","))


def _problem(counts: JsonCounts) -> str:
    """Returns the first limit that is exceeded; "" if none is."""
    limits = JsonCounts(CONTAINERS_MAX, STRINGS_MAX, COMMAS_MAX)
    names = ("objects and lists", "strings", "commas between values")
    for count, limit, name in zip(counts, limits, names, strict=True):
        if count > limit:
            return f"{count} {name}, and {limit}"
    return ""

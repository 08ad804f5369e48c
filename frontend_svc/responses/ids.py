"""Ids of responses and of their items (pure).

`resp_` is followed by the id of the request (32 hex digits) and by 16 hex digits: the instance id
of the frontend that wrote the response, and, in the highest bit, whether the batch service stores
it. The id of an item contains that of its response, so that a client can refer to a stored item by
its id alone.
"""

from __future__ import annotations

import re
from typing import Final

_RESPONSE_ID: Final = re.compile(r"resp_[0-9a-f]{32}([0-9a-f]{16})")
_DURABLE: Final = 1 << 63
_ITEM_ID: Final = re.compile(r"[a-z]+_([0-9a-f]{48})_[a-z]*[0-9]+")


def response_id(request_id: str, frontend_id: int, *, is_durable: bool = False) -> str:
    """request_id: 32 hex digits. frontend_id: below 2^63. is_durable: in the batch service."""
    return f"resp_{request_id}{frontend_id | (_DURABLE if is_durable else 0):016x}"


def request_of(response_id: str) -> str:
    """Returns the id of the request of a response, or whatever has another form."""
    match = _RESPONSE_ID.fullmatch(response_id)
    return response_id if match is None else response_id[5:37]


def frontend_of(response_id: str) -> int | None:
    """Returns the frontend that wrote a response; None if this is no id of a response."""
    match = _RESPONSE_ID.fullmatch(response_id)
    return None if match is None else int(match[1], 16) & ~_DURABLE


def is_durable(response_id: str) -> bool:
    """Returns whether the batch service stores a response, unless it was not there."""
    match = _RESPONSE_ID.fullmatch(response_id)
    return match is not None and bool(int(match[1], 16) & _DURABLE)


def item_id(kind: str, response_id: str, index: int, *, is_input: bool = False) -> str:
    """Returns the id of an item. kind: prefix, for example `msg`. index: in the output, or in the
    input."""
    return f"{kind}_{response_id.removeprefix('resp_')}_{'in' if is_input else ''}{index}"


def response_of_item(item_id: str) -> str | None:
    """Returns the response with an item; None if this is no id of an item."""
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else f"resp_{match[1]}"

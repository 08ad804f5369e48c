"""Refusals of calls about stored responses, which frontends and the batch service share (pure)."""

from __future__ import annotations

from typing import Final

from common.errors import InvalidRequest, NotFound

RESPONSE_TOO_LARGE: Final = "RESPONSE_TOO_LARGE"
NOT_STREAMED: Final = "NOT_STREAMED"

_FIELD: Final = "response_id"


def not_stored(response_id: str, why_removed: str) -> NotFound:
    """Returns the refusal of a response that is not there. why_removed: to make room."""
    text = "is not stored: it has expired, was deleted or not stored, or was removed because"
    return NotFound(f"the response {response_id!r} {text} {why_removed}", field=_FIELD)


def not_streamed(response_id: str) -> InvalidRequest:
    """Returns the refusal to send the events of a response that has none."""
    text = f"the response {response_id!r} was not made with 'background' and 'stream'"
    return InvalidRequest(text, "stream", reason=NOT_STREAMED)


def not_in_background(response_id: str) -> InvalidRequest:
    """Returns the refusal to cancel a response that runs with its client."""
    text = f"the response {response_id!r} did not run in the background"
    return InvalidRequest(text, _FIELD)

"""Bookings of one frontend at a router, and a load tracker that has its session."""

from __future__ import annotations

from typing import Any

from common.request.placement import Placement
from router_svc.core.booking import Booking, BookingKey
from router_svc.core.load_tracker import LoadTracker

FRONTEND = 7
WORKER = Placement(1, 0)


def key(request: int | str = 0, attempt: int = 0, frontend_id: int = FRONTEND) -> BookingKey:
    """Returns the key of an attempt. request: the request id, or the number of request `r0`."""
    request_id = request if isinstance(request, str) else f"r{request}"
    return BookingKey(frontend_id, request_id, attempt)


def booking(request: int | str = 0, worker: Placement = WORKER, **fields: Any) -> Booking:
    """Returns a booking of 100 prefill tokens and 7 blocks. fields: other fields of `Booking`."""
    given: dict[str, Any] = {"prefill_tokens": 100, "decode_blocks": 7, **fields}
    return Booking(key(request), "m", worker, **given)


def tracker_with_session() -> tuple[LoadTracker, int]:
    """Returns a load tracker, and the session of the frontend in it."""
    load_tracker = LoadTracker()
    return load_tracker, load_tracker.open_session(FRONTEND)

"""What the calls of an RPC take from it: request id, trace and the time that is left.

The server's interceptor binds them to the task of the RPC; outgoing calls carry them on.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping
from contextvars import ContextVar

import structlog

from common.runtime import telemetry

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
AUTHORIZATION_KEY = "authorization"

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

_request_id: ContextVar[str | None] = ContextVar("kvmesh_request_id", default=None)
_deadline: ContextVar[float | None] = ContextVar("kvmesh_deadline", default=None)


def request_id() -> str | None:
    """Returns the request id of the current task, or None."""
    return _request_id.get()


def remaining_time_s(timeout_s: float) -> float:
    """Returns the timeout of an outgoing call: `timeout_s`, or the shorter rest of the current
    RPC's time."""
    deadline = _deadline.get()
    if deadline is None:
        return timeout_s
    return max(0.0, min(timeout_s, deadline - asyncio.get_running_loop().time()))


def outgoing_metadata(credential: str | None = None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of an outgoing call: credential, request id and traceparent, if set."""
    entries = (
        (AUTHORIZATION_KEY, credential),
        (REQUEST_ID_KEY, _request_id.get()),
        (TRACEPARENT_KEY, telemetry.current_traceparent()),
    )
    return tuple((key, value) for key, value in entries if value is not None)


def bind_incoming_request_id(headers: Mapping[str, str | bytes]) -> str:
    header_value = headers.get(REQUEST_ID_KEY)
    # Ids appear in logs and headers: an unprintable or long one is replaced.
    is_valid = isinstance(header_value, str) and _REQUEST_ID.fullmatch(header_value)
    effective_id = header_value if isinstance(header_value, str) and is_valid else uuid.uuid4().hex
    # Each RPC is a task with its own context, so no reset is needed.
    _request_id.set(effective_id)
    structlog.contextvars.bind_contextvars(request_id=effective_id)
    return effective_id


def bind_incoming_deadline(remaining_s: float | None, timeout_s: float | None) -> float | None:
    """Sets the RPC's deadline for outgoing calls; returns the limit to enforce here, or None.

    grpc cancels the handler at the caller's deadline, so only calls without one have a limit here.
    """
    left_s = timeout_s if remaining_s is None else remaining_s
    if left_s is not None:
        _deadline.set(asyncio.get_running_loop().time() + left_s)
    return timeout_s if remaining_s is None else None

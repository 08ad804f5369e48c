"""Stored responses, what they may have at most, and the end of those in the background (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from batch_svc.core.batch import Owner
from batch_svc.core.limits import MB
from batch_svc.core.results import Reply
from batch_svc.core.streams import StoredOutput
from common.conversation_append import NO_CONVERSATION, Append

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseLimits:
    """The limits of one service."""

    response_bytes: int = 16 * MB
    """Of a response with its conversation."""

    tenant_bytes: int = 1024 * MB
    """Of the responses of a tenant."""

    keep_s: float = 30 * DAY_S
    """After which responses are removed."""

    tenant_background: int = 256
    """Responses of a tenant in the background that have not ended."""


class ResponseStatus(StrEnum):
    """The state of a response in the background, as in OpenAI's API; one that did not run in the
    background has none."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


# States of a response whose items its conversation gets.
APPENDING = (ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE)
NOT_ENDED = (ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS)
# The same as a condition of SQL.
NOT_ENDED_SQL = f"status IN ({', '.join(repr(str(status)) for status in NOT_ENDED)})"


@dataclass(frozen=True, slots=True)
class ResponseRow:
    """A response as it is stored. response: its object, as JSON. input_items: the items before its
    output, each as JSON."""

    id: str
    response: bytes
    input_items: Sequence[bytes]

    @property
    def size(self) -> int:
        """Bytes that count for its tenant."""
        return len(self.response) + sum(map(len, self.input_items)) + len(self.input_items)


def join_items(items: Iterable[bytes]) -> bytes:
    """Returns items as one value: JSON has no line breaks."""
    return b"\n".join(items)


def split_items(joined: bytes) -> tuple[bytes, ...]:
    """Returns the items of `join_items`."""
    return tuple(joined.split(b"\n")) if joined else ()


@dataclass(frozen=True, slots=True)
class OpenResponse:
    """A response in the background that has not ended. has_expired: it has waited for too long."""

    id: str
    tenant: str
    has_expired: bool


@dataclass(frozen=True, slots=True)
class ResponseRun:
    """What a frontend needs to run a response. created_at: Unix seconds of its object."""

    owner: Owner
    row: ResponseRow
    request: bytes
    created_at: int
    append: Append = NO_CONVERSATION

    output: StoredOutput | None = None
    """What is stored of it; None: it is not stored as it is generated."""


@dataclass(frozen=True, slots=True)
class ResponseCount:
    """Responses in the background of one tenant with one status."""

    tenant: str
    status: str
    count: int


def with_status(response: bytes, status: str) -> bytes:
    """Returns the object of a response with another status."""
    return orjson.dumps(orjson.loads(response) | {"status": status})


def failed_response(response: bytes, message: str, code: str = "server_error") -> bytes:
    """Returns the object of a response that failed.

    - code: of OpenAI's API: `server_error` or `invalid_prompt`.
    """
    error = {"code": code, "message": message}
    return orjson.dumps(orjson.loads(response) | {"status": "failed", "error": error})


def ended_response(response: bytes, reply: Reply) -> tuple[ResponseStatus, bytes]:
    """Returns the status and the object of a response after its last run.

    - response: its object until then.
    - reply: of the frontend.
    """
    try:
        # Any: JSON.
        value: Any = orjson.loads(reply.body)
        if reply.status < 300:
            return ResponseStatus(value["status"]), reply.body
        message = str(value["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        message = f"the frontend sent no response, with the status {reply.status}"
    code = "server_error" if reply.status >= 500 or reply.status < 400 else "invalid_prompt"
    return ResponseStatus.FAILED, failed_response(response, message, code)


def next_to_run(
    waiting: Sequence[OpenResponse], running: Mapping[str, int], most: int
) -> list[OpenResponse]:
    """Returns the responses that run next: each time the oldest one of the tenant with the fewest.

    - waiting: oldest first.
    - running: responses that run, by tenant.
    - most: to return.
    """
    counts = dict(running)
    by_tenant: dict[str, list[OpenResponse]] = {}
    for one in reversed(waiting):
        by_tenant.setdefault(one.tenant, []).append(one)
    chosen: list[OpenResponse] = []
    while by_tenant and len(chosen) < most:
        tenant = min(by_tenant, key=lambda name: (counts.get(name, 0), name))
        chosen.append(by_tenant[tenant].pop())
        counts[tenant] = counts.get(tenant, 0) + 1
        if not by_tenant[tenant]:
            del by_tenant[tenant]
    return chosen

"""What becomes of a line after a try, and how its result is written (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

# Statuses of refusals for lack of capacity or workers: the line waits, however often.
_BUSY: Final = frozenset({408, 409, 425, 429, 503})
# Codes of those statuses that a line may cause itself, by a prompt that ends its workers.
_WORKER_LOST: Final = frozenset({"worker_lost", "not_migratable"})
# A line that no worker had within its time limit waits as well; one that ran for as long does not.
_TIMEOUT: Final = 504
# A model that is not served, and a key that the frontend has not read, perhaps only now; other
# errors of a client stay what they are.
_NOT_YET: Final = frozenset({401, 404})
BUSY_PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Reply:
    """The response to a line."""

    status: int
    body: bytes
    request_id: str
    retry_after_s: float | None = None
    """None: another try does not help."""


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a line. row: its line in the output or error file, as JSON."""

    is_error: bool
    row: bytes


@dataclass(frozen=True, slots=True)
class Retry:
    """A line, or a response in the background, is sent again after a pause. is_busy: no capacity,
    which does not count as a try."""

    pause_s: float
    is_busy: bool


def judge(
    line_id: str, custom_id: str, reply: Reply, *, failures: int, attempts_max: int
) -> Result | Retry:
    """Returns the result of a line, or that it is sent again. The rest is as of `retry_of`."""
    retry = retry_of(reply, failures=failures, attempts_max=attempts_max)
    return _result(line_id, custom_id, reply) if retry is None else retry


def retry_of(reply: Reply, *, failures: int, attempts_max: int) -> Retry | None:
    """Returns whether the same request is sent again after a reply; None: it is not.

    - failures: tries that failed by an error of the server, before this one.
    """
    was_placed = reply.retry_after_s is None
    is_busy = reply.status in _BUSY or (reply.status == _TIMEOUT and not was_placed)
    if is_busy and _error_code(reply.body) not in _WORKER_LOST:
        pause_s = min(reply.retry_after_s or BUSY_PAUSE_S, PAUSE_MAX_S)
        return Retry(pause_s, is_busy=True)
    is_fault = reply.status >= 500 or reply.status in _BUSY or reply.status in _NOT_YET
    if is_fault and failures + 1 < attempts_max:
        return Retry(min(2.0**failures, PAUSE_MAX_S), is_busy=False)
    return None


def _result(line_id: str, custom_id: str, reply: Reply) -> Result:
    """Returns the result of a line that has a response, also one with an error status."""
    try:
        # Any: JSON.
        body: Any = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        text = f"the response, with the status {reply.status}, is not JSON"
        return Result(True, error_row(line_id, custom_id, "invalid_response", text))
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
    try:
        return Result(reply.status >= 300, _row(line_id, custom_id, response, None))
    except orjson.JSONEncodeError:
        # orjson reads deeper values than it writes.
        text = f"the response, with the status {reply.status}, is nested too deeply"
        return Result(True, error_row(line_id, custom_id, "invalid_response", text))


def _error_code(body: bytes) -> str:
    """Returns the code of an error response; empty: it has none."""
    try:
        # Any: JSON.
        value: Any = orjson.loads(body)
        return str(value["error"]["code"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""


def error_row(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Returns the row of a line without a response."""
    return _row(line_id, custom_id, None, {"code": code, "message": message})


def _row(line_id: str, custom_id: str, response: object, error: object) -> bytes:
    row = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(row) + b"\n"

"""The messages of a WebSocket of the Responses API: JSON texts of both ends (pure).

A client sends events `response.create`, whose other fields are those of `POST /v1/responses`. The
server sends the events of a stream of that route, and errors, which have the form of its errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from common.errors import InvalidRequest, MeshError, Unsupported
from frontend_svc.errors import INVALID, HttpError
from frontend_svc.openai.body.parsing import parse_json_object
from frontend_svc.openai.body.validation_errors import (
    INVALID_TYPE,
    INVALID_VALUE,
    missing_parameter,
    type_name,
)
from frontend_svc.responses.errors import RESPONSES_ERRORS

CREATE: Final = "response.create"
# Codex CLI reports with it that it has read a response.
PROCESSED: Final = "response.processed"
STEER: Final = "response.steer"
STREAM_ID_CHARS_MAX: Final = 128

# Headers of an error that concern its body.
_BODY_HEADERS: Final = frozenset({"content-type", "content-length"})

# Any: JSON.
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CreateEvent:
    """An event that asks for a response."""

    body: bytes
    """Of `POST /v1/responses`, for a stream."""

    stream_id: str | None = None
    """The lane in which it waits for earlier ones; its events have it. None: the lane without a
    name."""

    generates: bool = True
    """Whether the response has output."""


class EventRefused(Exception):
    """An event that is refused. answer: the message that reports it."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(answer)
        self.answer = answer


def parse_event(raw: bytes) -> CreateEvent | None:
    """Returns the event in a message of a client; None for one that needs no answer. Raises
    EventRefused."""
    stream_id: str | None = None
    try:
        event = parse_json_object(raw)
        stream_id = _stream_id(event)
        return _create_event(event, stream_id)
    except MeshError as error:
        raise EventRefused(refusal(error, stream_id)) from None


def _create_event(event: Json, stream_id: str | None) -> CreateEvent | None:
    kind = event.pop("type", None)
    if kind == PROCESSED:
        return None
    if kind is None:
        raise missing_parameter("type")
    if kind == STEER:
        raise EventRefused(_steer_failed(event))
    if kind != CREATE:
        text = f"Invalid 'type': {_shown(kind)} is no event of a client; send {CREATE!r}."
        raise InvalidRequest(text, "type", reason=INVALID_VALUE)
    if event.pop("stream", None) not in (None, True):
        raise Unsupported("stream", "responses over a WebSocket are always streamed")
    if event.get("background") not in (None, False):
        raise Unsupported("background", "send the body to POST /v1/responses")
    generates = event.pop("generate", None)
    if not isinstance(generates, bool | None):
        raise _wrong_type("generate", "true or false", generates)
    body = orjson.dumps(event | {"stream": True})
    return CreateEvent(body, stream_id, generates is not False)


def _steer_failed(event: Json) -> bytes:
    """Returns the event by which OpenAI's clients learn that a response takes no more input."""
    previous, more = event.get("previous_response_id"), event.get("input")
    if not isinstance(previous, str):
        raise missing_parameter("previous_response_id")
    error = {
        "type": INVALID,
        "code": "steering_not_supported",
        "message": "responses are not steered here; send response.create after the end",
    }
    steer = {"previous_response_id": previous, "input": more}
    failed = {"type": f"{STEER}.failed", "sequence_number": 0, "error": error, "steer": steer}
    return orjson.dumps(failed)


def _stream_id(event: Json) -> str | None:
    stream_id = event.pop("stream_id", None)
    if stream_id is None:
        return None
    if not isinstance(stream_id, str):
        raise _wrong_type("stream_id", "a string", stream_id)
    if not 0 < len(stream_id) <= STREAM_ID_CHARS_MAX:
        text = f"it has {len(stream_id)} characters, the limit is 1 to {STREAM_ID_CHARS_MAX}"
        raise InvalidRequest(f"Invalid 'stream_id': {text}.", "stream_id", reason=INVALID_VALUE)
    return stream_id


def server_events(sent: bytes, stream_id: str | None) -> Iterator[bytes]:
    """Yields the JSON of each event in a part of a stream, which ends with a whole event. A comment
    with a value, which the client asked for by an annotation, becomes an event of its own.

    - sent: server-sent events.
    """
    for block in sent.split(b"\n\n"):
        if block.startswith(b": "):
            name, _, value = block[2:].partition(b" ")
            if value:
                text = b'{"type":"nvext.annotation","name":"%b","value":%b}' % (name, value)
                yield _in_lane(text, stream_id)
        elif block:
            _, _, data = (b"\n" + block).partition(b"\ndata: ")
            yield _in_lane(data, stream_id)


def error_message(
    status: int, body: bytes, headers: Iterable[tuple[str, str]], stream_id: str | None
) -> bytes:
    """Returns the event of an error.

    - body: `{"error": {...}}`.
    - headers: those that the error has as a response.
    """
    error: Json = orjson.loads(body)["error"]
    shown = {name: value for name, value in headers if name not in _BODY_HEADERS}
    # OpenAI's SDK reads the headers in `error`, Codex CLI beside it.
    event = {"type": "error", "status": status, "error": error | {"headers": shown}}
    return _in_lane(orjson.dumps(event | {"headers": shown}), stream_id)


def refusal(error: MeshError, stream_id: str | None = None) -> bytes:
    """Returns the event of an error outside of a response."""
    response: HttpError = RESPONSES_ERRORS.http_error(error, "", ())
    return error_message(response.status, response.body, response.headers, stream_id)


def _in_lane(event: bytes, stream_id: str | None) -> bytes:
    """Returns a JSON object with the name of its lane."""
    if stream_id is None:
        return event
    return b'{"stream_id":%b,%b' % (orjson.dumps(stream_id), event[1:])


def _wrong_type(field: str, expected: str, value: object) -> InvalidRequest:
    text = f"Invalid '{field}': must be {expected}, but got {type_name(value)}."
    return InvalidRequest(text, field, reason=INVALID_TYPE)


# Any: JSON.
def _shown(value: Any) -> str:
    """Returns a value of a client for an error."""
    return repr(value[:64]) if isinstance(value, str) else type_name(value)

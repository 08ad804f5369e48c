"""Messages of a WebSocket: events of the client, and events and errors of the server."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from openai.types.responses import ResponseSteerFailedEvent

from common.errors import InvalidRequest, Overloaded
from frontend_svc.openai.output.sse import KEEP_ALIVE
from frontend_svc.websocket.messages import (
    STREAM_ID_CHARS_MAX,
    CreateEvent,
    EventRefused,
    error_message,
    parse_event,
    refusal,
    server_events,
)

# Any, here and below: JSON.
Json = dict[str, Any]


def created(**fields: Any) -> CreateEvent:
    event = parse_event(orjson.dumps({"type": "response.create", **fields}))
    assert event is not None
    return event


def error_of(raw: bytes) -> Json:
    """The `error` of an event that is refused."""
    with pytest.raises(EventRefused) as refused:
        parse_event(raw)
    error: Json = json.loads(refused.value.answer)
    assert (error["type"], error["status"]) == ("error", 400)
    details: Json = error["error"]
    return details


def test_an_event_is_the_body_of_a_streamed_request() -> None:
    event = created(model="sim", input="Hi", store=False, stream_id="a", generate=False)
    body = json.loads(event.body)
    assert body == {"model": "sim", "input": "Hi", "store": False, "stream": True}
    assert (event.stream_id, event.generates) == ("a", False)


@pytest.mark.parametrize("stream", [None, True])
def test_a_stream_may_be_named(stream: bool | None) -> None:
    event = created(model="sim", stream=stream, background=False, generate=True)
    assert json.loads(event.body) == {"model": "sim", "stream": True, "background": False}
    assert (event.stream_id, event.generates) == (None, True)


def test_the_report_of_a_client_that_it_has_read_a_response_needs_no_answer() -> None:
    assert parse_event(b'{"type": "response.processed", "response_id": "resp_1"}') is None


@pytest.mark.parametrize(
    ("raw", "param", "code"),
    [
        (b"{", None, "invalid_json"),
        (b"\xff", None, "invalid_json"),
        (b"[]", None, "invalid_type"),
        (b"{}", "type", "missing_required_parameter"),
        (b'{"type": "session.update"}', "type", "invalid_value"),
        (b'{"type": 1}', "type", "invalid_value"),
        (
            b'{"type": "response.steer"}',
            "previous_response_id",
            "missing_required_parameter",
        ),
        (b'{"type": "response.create", "stream": false}', "stream", "unsupported_parameter"),
        (b'{"type": "response.create", "background": true}', "background", "unsupported_parameter"),
        (b'{"type": "response.create", "generate": 1}', "generate", "invalid_type"),
        (b'{"type": "response.create", "stream_id": 1}', "stream_id", "invalid_type"),
        (b'{"type": "response.create", "stream_id": ""}', "stream_id", "invalid_value"),
    ],
)
def test_an_invalid_event_is_refused_by_name(raw: bytes, param: str | None, code: str) -> None:
    error = error_of(raw)
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"


def test_input_for_a_response_that_runs_is_returned() -> None:
    steer = {"previous_response_id": "resp_1", "input": "Stop."}
    with pytest.raises(EventRefused) as refused:
        parse_event(orjson.dumps({"type": "response.steer", **steer}))
    failed = ResponseSteerFailedEvent.model_validate_json(refused.value.answer)
    assert failed.error.code == "steering_not_supported"
    assert failed.steer.to_dict() == steer


def test_the_error_of_a_long_stream_id_states_the_limit() -> None:
    name = "a" * (STREAM_ID_CHARS_MAX + 1)
    error = error_of(orjson.dumps({"type": "response.create", "stream_id": name}))
    assert f"{len(name)} characters, the limit is 1 to {STREAM_ID_CHARS_MAX}" in error["message"]


def test_each_event_of_a_stream_is_a_message() -> None:
    text = b'{"delta":"data: a\\n\\ndata: b"}'
    sent = b"event: x\ndata: %b\n\nevent: y\ndata: {}\n\n" % text
    assert list(server_events(sent, None)) == [text, b"{}"]


def test_an_event_has_the_name_of_its_lane() -> None:
    (event,) = server_events(b'event: x\ndata: {"type":"x"}\n\n', 'a"b')
    assert json.loads(event) == {"stream_id": 'a"b', "type": "x"}


def test_a_comment_is_an_event_if_it_has_a_value() -> None:
    (event,) = server_events(KEEP_ALIVE + b': request_id "r 1"\n\n', None)
    assert json.loads(event) == {"type": "nvext.annotation", "name": "request_id", "value": "r 1"}


def test_an_error_has_its_status_and_headers() -> None:
    message = json.loads(refusal(Overloaded(2.0, "busy"), "a"))
    assert (message["status"], message["stream_id"]) == (503, "a")
    assert message["headers"] == {
        "x-should-retry": "true",
        "retry-after": "2",
        "retry-after-ms": "2000",
    }
    assert message["error"]["headers"] == message["headers"]
    assert message["error"]["code"] == "overloaded"


def test_an_error_response_becomes_an_error_event() -> None:
    body = b'{"error":{"message":"m","type":"t","param":null,"code":"c"}}'
    headers = [("content-type", "application/json"), ("x-request-id", "r")]
    assert json.loads(error_message(404, body, headers, None)) == {
        "type": "error",
        "status": 404,
        "error": {
            "message": "m",
            "type": "t",
            "param": None,
            "code": "c",
            "headers": {"x-request-id": "r"},
        },
        "headers": {"x-request-id": "r"},
    }


def test_a_refusal_keeps_the_reason_of_the_error() -> None:
    error = InvalidRequest("old", reason="WEBSOCKET_CONNECTION_LIMIT_REACHED")
    message = json.loads(refusal(error))
    assert message["error"]["code"] == "websocket_connection_limit_reached"
    assert "stream_id" not in message

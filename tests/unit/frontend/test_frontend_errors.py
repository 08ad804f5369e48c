from __future__ import annotations

import httpx2
import openai
import orjson
import pytest

from common.errors import (
    MESH_ERROR_CLASSES,
    Conflict,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MeshError,
    NotFound,
    Overloaded,
    PermissionDenied,
    PromptTooLong,
    RequestCancelled,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    UnknownModel,
    Unsupported,
    WorkerLost,
)
from frontend_svc.errors import (
    BODY_TOO_LARGE,
    INTERNAL_MESSAGE,
    ErrorType,
    client_param,
    error_event,
    error_type,
    http_error,
)

TABLE: list[tuple[BaseException, int, str, str, ErrorType]] = [
    (
        InvalidRequest("bad", "n"),
        400,
        "invalid_request_error",
        "invalid_value",
        ErrorType.VALIDATION,
    ),
    (
        InvalidRequest("bad", "n", reason="INVALID_TYPE"),
        400,
        "invalid_request_error",
        "invalid_type",
        ErrorType.VALIDATION,
    ),
    (
        InvalidRequest("big", reason=BODY_TOO_LARGE),
        413,
        "invalid_request_error",
        "body_too_large",
        ErrorType.VALIDATION,
    ),
    (
        Unsupported("tools", "not yet"),
        400,
        "invalid_request_error",
        "unsupported_parameter",
        ErrorType.VALIDATION,
    ),
    (
        PromptTooLong("long", "messages"),
        400,
        "invalid_request_error",
        "context_length_exceeded",
        ErrorType.VALIDATION,
    ),
    (NotFound("none"), 404, "invalid_request_error", "not_found", ErrorType.NOT_FOUND),
    (UnknownModel("m"), 404, "invalid_request_error", "model_not_found", ErrorType.NOT_FOUND),
    (Conflict("state"), 409, "invalid_request_error", "conflict", ErrorType.VALIDATION),
    (
        Unauthenticated("no key"),
        401,
        "invalid_request_error",
        "invalid_api_key",
        ErrorType.UNAUTHORIZED,
    ),
    (
        PermissionDenied("no"),
        403,
        "permission_error",
        "permission_denied",
        ErrorType.UNAUTHORIZED,
    ),
    (
        Overloaded(2.5, reason="TENANT_REQUESTS"),
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
        ErrorType.RATE_LIMITED,
    ),
    (Overloaded(2.5), 503, "server_error", "overloaded", ErrorType.OVERLOAD),
    (Unavailable("no worker"), 503, "server_error", "unavailable", ErrorType.UNAVAILABLE),
    (WorkerLost(retryable=True), 503, "server_error", "worker_lost", ErrorType.WORKER_LOST),
    (WorkerLost(retryable=False), 502, "server_error", "worker_lost", ErrorType.WORKER_LOST),
    (
        DeadlineExceeded(),
        504,
        "timeout_error",
        "deadline_exceeded",
        ErrorType.RESPONSE_TIMEOUT,
    ),
    (RequestCancelled(), 499, "request_cancelled", "request_cancelled", ErrorType.CANCELLED),
    (
        Unimplemented("files"),
        501,
        "invalid_request_error",
        "not_implemented",
        ErrorType.NOT_IMPLEMENTED,
    ),
    (InternalError("secret"), 500, "server_error", "internal_error", ErrorType.INTERNAL),
    (MeshError("secret"), 500, "server_error", "internal_error", ErrorType.INTERNAL),
    (KeyError("secret"), 500, "server_error", "internal_error", ErrorType.INTERNAL),
]


@pytest.mark.parametrize(("error", "status", "kind", "code", "label"), TABLE)
def test_each_error_has_its_status_body_and_label(
    error: BaseException, status: int, kind: str, code: str, label: ErrorType
) -> None:
    response = http_error(error)
    body = orjson.loads(response.body)
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert response.status == status
    assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    assert response.error_type is error_type(error) is label


def test_every_class_of_error_is_in_the_table() -> None:
    assert {type(row[0]) for row in TABLE} >= set(MESH_ERROR_CLASSES)


def test_the_invalid_field_is_the_param() -> None:
    error = InvalidRequest("not a string", "messages[1].content")
    details = orjson.loads(http_error(error).body)["error"]
    assert details["param"] == "messages[1].content"
    assert details["message"] == "not a string"


@pytest.mark.parametrize(
    ("kept", "error_text"),
    [
        ("query.routing.backend_instance_id", "nvext.backend_instance_id"),
        (
            "query.routing.routing_constraints.required_taints",
            "nvext.routing_constraints.required_taints",
        ),
        ("query.routing.session_control", "nvext.session_control"),
        ("query.routing.lora_name", "model"),
        ("routing.lora_name", "model"),
        ("routing.dp_rank", "nvext.dp_rank"),
        ("sampling_options.top_k", "top_k"),
        ("messages[0].content", "messages[0].content"),
    ],
)
def test_a_field_has_its_name_in_the_body(kept: str, error_text: str) -> None:
    assert client_param(kept) == error_text
    for body in (
        http_error(Unavailable("no worker", field=kept)).body,
        error_event(Unavailable("no worker", field=kept))[len(b"data: ") :],
    ):
        assert orjson.loads(body)["error"]["param"] == error_text
    client_message = orjson.loads(http_error(Unsupported(kept, "the value is invalid")).body)[
        "error"
    ]
    assert client_message["message"] == f"'{error_text}' is not supported: the value is invalid."


def test_a_field_set_by_a_header_has_the_name_of_the_header() -> None:
    error = Unavailable("no worker", field="query.routing.session_control.session_id")
    headers = {b"x-kvmesh-session-id": b"bob", b"host": b"here"}
    name = "x-kvmesh-session-id"
    assert orjson.loads(http_error(error, headers).body)["error"]["param"] == name
    assert client_param("query.routing.dp_rank", headers) == "nvext.dp_rank"
    assert client_param("messages", headers) == "messages"


@pytest.mark.parametrize("error", [InternalError("secret", field="secret"), ValueError("secret")])
def test_internal_errors_show_no_details(error: BaseException) -> None:
    body = http_error(error).body
    assert b"secret" not in body
    assert orjson.loads(body)["error"]["message"] == INTERNAL_MESSAGE
    assert b"secret" not in error_event(error)


@pytest.mark.parametrize("error", [row[0] for row in TABLE])
def test_the_sdk_retries_exactly_the_retryable_errors(error: BaseException) -> None:
    headers = dict(http_error(error).headers)
    retryable = isinstance(error, MeshError) and error.retryable
    assert headers["x-should-retry"] == ("true" if retryable else "false")
    assert ("retry-after" in headers) is retryable
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("given_s", "seconds", "milliseconds"),
    [
        (2.5, "3", "2500"),
        (0.2, "1", "200"),
        (None, "1", "1000"),
        (0.0, "1", "1000"),
        (600, "60", "60000"),
    ],
)
def test_a_retry_delay_is_bounded_and_rounded_up(
    given_s: float | None, seconds: str, milliseconds: str
) -> None:
    headers = dict(http_error(Overloaded(given_s)).headers)
    assert headers["retry-after"] == seconds
    assert headers["retry-after-ms"] == milliseconds


def test_a_401_names_the_authentication_scheme() -> None:
    assert ("www-authenticate", "Bearer") in http_error(Unauthenticated("no key")).headers


def sdk(status: int, body: bytes, headers: dict[str, str]) -> openai.OpenAI:
    transport = httpx2.MockTransport(
        lambda _: httpx2.Response(status, headers=headers, content=body)
    )
    return openai.OpenAI(
        api_key="none",
        base_url="http://frontend/v1",
        http_client=httpx2.Client(transport=transport),
    )


def test_the_sdk_raises_its_own_error_with_our_message() -> None:
    response = http_error(InvalidRequest("not a number", "temperature", reason="INVALID_TYPE"))
    with (
        sdk(response.status, response.body, dict(response.headers)) as client,
        pytest.raises(openai.BadRequestError) as raised,
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert raised.value.param == "temperature"
    assert raised.value.code == "invalid_type"
    assert "not a number" in raised.value.message


def test_an_error_event_in_a_stream_is_raised_by_the_sdk() -> None:
    event = error_event(WorkerLost("the worker was lost", retryable=False))
    assert event.startswith(b'data: {"error":')
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    headers = {"content-type": "text/event-stream"}
    with sdk(200, event, headers) as client:
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="the worker was lost"):
            next(iter(stream))

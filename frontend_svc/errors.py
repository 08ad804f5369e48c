"""Maps errors to the response of the OpenAI API: status, body, headers, SSE event (pure).

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`. Decisions:

- `Overloaded` is 429 only if the *client* exceeds its own limit (reason `TENANT_...`), so that
  slowing down helps, or if the mesh cannot meet its latency target (`TARGET_UNMET`): a later
  request, or one with another target, may be served. If the mesh is full it is 503 with
  `Retry-After`, like `Unavailable`; 529 is not a registered status, and proxies do not handle it.
  The label `error_type` distinguishes them.
- The OpenAI SDK retries 408, 409, 429 and every 5xx by default, so each response has
  `x-should-retry`: true exactly if the error is retryable. The SDK reads the delay from
  `retry-after-ms`; `retry-after` has whole seconds, rounded up.
- An `InternalError`, and any exception that is not a `MeshError`, shows none of its text; the log
  has it. One with the reason INVALID_OUTPUT is the fault of an engine: it is 502 and shows what
  is wrong.
- `param`, and the message, name the field as the client sent it: a field of the body or a header.
- 499 (the client closed the request) appears only in logs and metrics.

After the first byte of a stream the status cannot change: `error_event` is then the last event,
without a `[DONE]` after it, and the SDK raises it as `APIError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

import orjson

from common.errors import (
    INVALID_OUTPUT,
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
from common.request.placement import TARGET_UNMET

# Reasons with their own status: InvalidRequest with BODY_TOO_LARGE is 413; Overloaded with a reason
# that starts with TENANT_REASON_PREFIX, or TARGET_UNMET, is 429.
BODY_TOO_LARGE = "BODY_TOO_LARGE"
TENANT_REASON_PREFIX = "TENANT_"
# Reason of the error if a started response cannot continue on another worker.
NOT_MIGRATABLE = "NOT_MIGRATABLE"

# Header -> path of its field in `nvext`.
HEADER_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "x-kvmesh-backend-instance-id": ("backend_instance_id",),
        "x-kvmesh-prefill-worker-id": ("prefill_worker_id",),
        "x-kvmesh-decode-worker-id": ("decode_worker_id",),
        "x-kvmesh-dp-rank": ("dp_rank",),
        "x-kvmesh-prefill-dp-rank": ("prefill_dp_rank",),
        "x-kvmesh-priority": ("agent_hints", "priority"),
        "x-kvmesh-strict-priority": ("agent_hints", "strict_priority"),
        "x-kvmesh-osl": ("agent_hints", "osl"),
        "x-kvmesh-session-id": ("session_control", "session_id"),
        "x-kvmesh-ttft-target-ms": ("router", "ttft_target"),
        "x-kvmesh-itl-target-ms": ("router", "itl_target"),
    }
)

# For errors without a delay: long enough to spread retries, short enough to wait.
RETRY_AFTER_S = 1.0
# The SDK ignores delays above a minute.
RETRY_AFTER_MAX_S = 60.0

# Among the names of headers if the body names its extensions `kvmesh`.
ALIAS = b"kvmesh"

INTERNAL_MESSAGE = "The server had an error while processing your request."


class ErrorType(StrEnum):
    """Values of the metric label `error_type`; NONE: the request did not fail."""

    NONE = ""
    VALIDATION = "validation"
    NOT_FOUND = "not_found"
    UNAUTHORIZED = "unauthorized"
    RATE_LIMITED = "rate_limited"
    OVERLOAD = "overload"
    UNAVAILABLE = "unavailable"
    WORKER_LOST = "worker_lost"
    CANCELLED = "cancelled"
    RESPONSE_TIMEOUT = "response_timeout"
    NOT_IMPLEMENTED = "not_implemented"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error response. headers: names in lower case; error_type: label for metrics."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...]
    error_type: ErrorType


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How an API writes its errors."""

    http_error: Callable[[BaseException, str, Container[bytes]], HttpError]
    """Returns the response for an error. Arguments: the error, the id in the header of the
    response, the names of the request's headers."""

    client_message: Callable[[MeshError, Container[bytes]], tuple[str, str | None]]
    """Returns message and `param` with the client's field names, as `client_message`."""

    route_error: Callable[[int, str, str, str], bytes]
    """Returns the body for a path or method without a route. Arguments: status, message, code, the
    id in the header of the response."""

    # Any: a JSON schema.
    schema: Mapping[str, Any]
    """Schema of a body."""

    has_request_id: bool = False
    """Whether responses have the header `request-id` beside `x-request-id`."""


@dataclass(frozen=True, slots=True)
class _Mapping:
    """code: OpenAI's `code`; None: the error's reason, or _INVALID_VALUE without one."""

    status: int
    type: str
    code: str | None
    error_type: ErrorType


# The `type` of errors of the client.
INVALID = "invalid_request_error"
_INVALID_VALUE = "invalid_value"
_REFUSAL_CODES = frozenset(
    {
        *("invalid_json", "invalid_type", "invalid_value", "missing_required_parameter"),
        *("unknown_parameter", "unsupported_parameter", "context_length_exceeded"),
        *("body_too_large", "model_not_found"),
        *("invalid_media", "media_refused", "media_too_large", "media_unavailable"),
    }
)
# Path of a field inside the mesh -> path in the client's body.
_FIELD_PREFIXES = (
    ("query.routing.lora_name", "model"),
    ("query.routing.", "nvext."),
    ("query.ttft_target_ms", "nvext.router.ttft_target"),
    ("query.itl_target_ms", "nvext.router.itl_target"),
    ("query.config_override.", "nvext.router_config_override."),
    ("extra_args", "nvext.extra_args"),
    ("routing.lora_name", "model"),
    ("routing.cache_salt", "cache_salt"),
    ("routing.", "nvext."),
    ("stop_conditions.stop_token_ids_hidden", "stop_token_ids"),
    ("stop_conditions.stop_token_ids_visible", "stop_token_ids"),
    ("stop_conditions.", ""),
    ("output_options.prompt_logprobs", "echo"),
    ("output_options.", ""),
    ("sampling_options.guided_decoding.whitespace_pattern", "guided_whitespace_pattern"),
    ("sampling_options.", ""),
)
_HEADER_BY_FIELD = {".".join(("nvext", *path)): header for header, path in HEADER_FIELDS.items()}

_TENANT_LIMIT = _Mapping(429, "rate_limit_error", "rate_limit_exceeded", ErrorType.RATE_LIMITED)
_TARGET_UNMET = _Mapping(429, "rate_limit_error", "target_unmet", ErrorType.RATE_LIMITED)
_TOO_LARGE = _Mapping(413, INVALID, "body_too_large", ErrorType.VALIDATION)
_WORKER_LOST_FINAL = _Mapping(502, "server_error", "worker_lost", ErrorType.WORKER_LOST)
_INVALID_OUTPUT = _Mapping(502, "server_error", "invalid_output", ErrorType.INTERNAL)
_NOT_MIGRATABLE = _Mapping(503, "server_error", "not_migratable", ErrorType.WORKER_LOST)

_TABLE: dict[type[MeshError], _Mapping] = {
    InvalidRequest: _Mapping(400, INVALID, None, ErrorType.VALIDATION),
    Unsupported: _Mapping(400, INVALID, "unsupported_parameter", ErrorType.VALIDATION),
    PromptTooLong: _Mapping(400, INVALID, "context_length_exceeded", ErrorType.VALIDATION),
    NotFound: _Mapping(404, INVALID, "not_found", ErrorType.NOT_FOUND),
    UnknownModel: _Mapping(404, INVALID, "model_not_found", ErrorType.NOT_FOUND),
    Conflict: _Mapping(409, INVALID, "conflict", ErrorType.VALIDATION),
    Unauthenticated: _Mapping(401, INVALID, "invalid_api_key", ErrorType.UNAUTHORIZED),
    PermissionDenied: _Mapping(
        403, "permission_error", "permission_denied", ErrorType.UNAUTHORIZED
    ),
    Overloaded: _Mapping(503, "server_error", "overloaded", ErrorType.OVERLOAD),
    Unavailable: _Mapping(503, "server_error", "unavailable", ErrorType.UNAVAILABLE),
    WorkerLost: _Mapping(503, "server_error", "worker_lost", ErrorType.WORKER_LOST),
    DeadlineExceeded: _Mapping(
        504, "timeout_error", "deadline_exceeded", ErrorType.RESPONSE_TIMEOUT
    ),
    RequestCancelled: _Mapping(499, "request_cancelled", "request_cancelled", ErrorType.CANCELLED),
    Unimplemented: _Mapping(501, INVALID, "not_implemented", ErrorType.NOT_IMPLEMENTED),
    InternalError: _Mapping(500, "server_error", "internal_error", ErrorType.INTERNAL),
}


def http_error(error: BaseException, headers: Container[bytes] = ()) -> HttpError:
    """Returns the response for `error`; any exception that is not a MeshError counts as
    InternalError.
    headers: names of the request's headers."""
    mapping = _mapping_of(error)
    return HttpError(
        mapping.status,
        _response_body(error, mapping, headers),
        _response_headers(error, mapping),
        mapping.error_type,
    )


def client_param(field: str, headers: Container[bytes] = ()) -> str:
    """Returns the name of a field as the client sent it: in the body, or as a header."""
    for internal_prefix, client_prefix in _FIELD_PREFIXES:
        if field.startswith(internal_prefix):
            field = client_prefix + field.removeprefix(internal_prefix)
            break
    header = _HEADER_BY_FIELD.get(field, "")
    if header.encode() in headers:
        return header
    is_alias = ALIAS in headers and field.startswith("nvext.")
    return f"{ALIAS.decode()}.{field.removeprefix('nvext.')}" if is_alias else field


def client_message(error: MeshError, headers: Container[bytes] = ()) -> tuple[str, str | None]:
    """Returns message and `param` of an error with the client's field names. headers: see
    `http_error`."""
    if not error.field:
        return error.message, None
    param = client_param(error.field, headers)
    return error.message.replace(f"'{error.field}'", f"'{param}'"), param


def error_type(error: BaseException) -> ErrorType:
    return _mapping_of(error).error_type


def refusal_code(error: BaseException) -> str | None:
    """Returns the metric label `code` of a refused body; None for other errors."""
    if not isinstance(error, InvalidRequest | UnknownModel):
        return None
    _, _, code = error_details(error)
    return code if code in _REFUSAL_CODES else "other"


def is_server_fault(error: BaseException) -> bool:
    """Returns whether the status of the response is 5xx."""
    return _mapping_of(error).status >= 500


def error_body(message: str, type_: str, param: str | None, code: str | None) -> bytes:
    """Returns the JSON of an error in OpenAI's form."""
    details = {"message": message, "type": type_, "param": param, "code": code}
    return orjson.dumps({"error": details})


def error_event(error: BaseException) -> bytes:
    """Returns the last SSE event of a stream that fails after its first byte."""
    return b"data: " + _response_body(error, _mapping_of(error), ()) + b"\n\n"


def _mapping_of(error: BaseException) -> _Mapping:
    match error:
        case Overloaded() if error.reason.startswith(TENANT_REASON_PREFIX):
            return _TENANT_LIMIT
        case Overloaded() if error.reason == TARGET_UNMET:
            return _TARGET_UNMET
        case InvalidRequest() if error.reason == BODY_TOO_LARGE:
            return _TOO_LARGE
        case InternalError() if error.reason == INVALID_OUTPUT:
            return _INVALID_OUTPUT
        case WorkerLost() if error.reason == NOT_MIGRATABLE:
            return _NOT_MIGRATABLE
        case WorkerLost() if not error.retryable:
            return _WORKER_LOST_FINAL
    for cls in type(error).__mro__:
        if cls in _TABLE:
            return _TABLE[cls]
    return _TABLE[InternalError]


def error_details(
    error: BaseException, headers: Container[bytes] = ()
) -> tuple[str, str | None, str | None]:
    """Returns message, `param` and `code` of an error. headers: see `http_error`."""
    mapping = _mapping_of(error)
    if not isinstance(error, MeshError) or mapping is _TABLE[InternalError]:
        return INTERNAL_MESSAGE, None, mapping.code
    code = mapping.code
    if code is None:
        code = _INVALID_VALUE if error.reason == error.kind else error.reason.lower()
    return *client_message(error, headers), code


def _response_body(error: BaseException, mapping: _Mapping, headers: Container[bytes]) -> bytes:
    message, param, code = error_details(error, headers)
    return error_body(message, mapping.type, param, code)


def _response_headers(error: BaseException, mapping: _Mapping) -> tuple[tuple[str, str], ...]:
    retryable = isinstance(error, MeshError) and error.retryable
    headers = [
        ("content-type", "application/json"),
        ("x-should-retry", "true" if retryable else "false"),
    ]
    if mapping.status == 401:
        headers.append(("www-authenticate", "Bearer"))
    if isinstance(error, MeshError) and retryable:
        after_s = min(max(error.retry_after_s or RETRY_AFTER_S, 0.001), RETRY_AFTER_MAX_S)
        headers.append(("retry-after", str(math.ceil(after_s))))
        headers.append(("retry-after-ms", str(math.ceil(after_s * 1000))))
    return tuple(headers)


OPENAI_ERRORS: Final = ErrorForm(
    http_error=lambda error, _, headers: http_error(error, headers),
    client_message=client_message,
    route_error=lambda _, message, code, __: error_body(message, INVALID, None, code),
    schema={
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
)
"""The form of the OpenAI API, and of all routes without an API of another maker."""

"""The errors that services raise. Pure.

Each class states how the caller should react. `common/rpc/status.py` converts errors to gRPC
status and back; the frontend converts them to OpenAI bodies. `kind` names the class on the wire and
never changes. `reason` is a stable UPPER_SNAKE token for programs; it defaults to the kind and can
be more specific (`Unavailable("...", reason="NO_DECODE_WORKER")`) without a new class.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import ClassVar, Self, TypedDict, Unpack

# Reasons of several services. An InternalError: an engine broke its contract, or the response lacks
# the form that its request asked for.
INVALID_OUTPUT = "INVALID_OUTPUT"
# A WorkerLost: an engine that works has lost the request.
REQUEST_STALLED = "REQUEST_STALLED"

_EMPTY_METADATA: Mapping[str, str] = MappingProxyType({})


class _Details(TypedDict, total=False):
    reason: str | None
    metadata: Mapping[str, str] | None


class _Parts(_Details, total=False):
    field: str | None
    retry_after_s: float | None


class MeshError(Exception):
    """Base class of all errors that services raise.

    message: a sentence that a client may read.
    field: path of the request field at fault (`messages[1].content`), or None.
    retry_after_s: seconds after which the same call may succeed, or None.
    metadata: a few details for programs.
    retryable: whether the same request may be sent again, elsewhere or later.
    """

    kind: ClassVar[str] = "MESH_ERROR"
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.reason = self.kind if reason is None else reason
        self.metadata = _EMPTY_METADATA if metadata is None else MappingProxyType(dict(metadata))

    @classmethod
    def restore(
        cls, message: str, *, retryable: bool | None = None, **parts: Unpack[_Parts]
    ) -> Self:
        """Returns an error with exactly these parts; subclass constructors compose their
        message."""
        error = cls.__new__(cls)
        MeshError.__init__(error, message, **parts)
        if retryable is not None:
            error.retryable = retryable
        return error

    def copy(self, message: str | None = None, field: str | None = None) -> Self:
        """Returns an equal error without traceback, with another message and field if given."""
        return self.restore(
            self.message if message is None else message,
            field=self.field if field is None else field,
            retry_after_s=self.retry_after_s,
            reason=self.reason,
            metadata=self.metadata,
            retryable=self.retryable,
        )


class InvalidRequest(MeshError):
    """The request is invalid: change it. `field` names the invalid part."""

    kind = "INVALID_REQUEST"

    def __init__(self, message: str, field: str | None = None, **details: Unpack[_Details]) -> None:
        super().__init__(message, field=field, **details)


class Unsupported(InvalidRequest):
    """The field is known but not supported here: leave it out."""

    kind = "UNSUPPORTED"

    def __init__(self, field: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(f"'{field}' is not supported: {message}.", field, reason=reason)


class PromptTooLong(InvalidRequest):
    """The prompt exceeds the model's context length: shorten it."""

    kind = "PROMPT_TOO_LONG"


class NotFound(MeshError):
    """The named object does not exist: do not retry."""

    kind = "NOT_FOUND"


class UnknownModel(NotFound):
    """The model is not served here: use another name."""

    kind = "UNKNOWN_MODEL"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the model {model!r} does not exist or is not served",
            field="model",
            metadata={"model": model},
        )


class Conflict(MeshError):
    """A precondition failed: read the current state before the next try."""

    kind = "CONFLICT"


class Unauthenticated(MeshError):
    """Credentials are missing or wrong: authenticate."""

    kind = "UNAUTHENTICATED"


class PermissionDenied(MeshError):
    """The caller is authenticated but not permitted: request the permission."""

    kind = "PERMISSION_DENIED"


class Overloaded(MeshError):
    """A limit is reached and nothing ran: send the request again after `retry_after_s`."""

    kind = "OVERLOADED"
    retryable = True

    def __init__(
        self,
        retry_after_s: float | None = None,
        message: str = "at capacity",
        **details: Unpack[_Details],
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **details)


class Unavailable(MeshError):
    """No server can handle the call now: try later or elsewhere."""

    kind = "UNAVAILABLE"
    retryable = True

    def __init__(
        self,
        message: str,
        retry_after_s: float | None = None,
        *,
        field: str | None = None,
        **details: Unpack[_Details],
    ) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s, **details)


class WorkerLost(MeshError):
    """The worker disappeared, hung or refused. `retryable`: another worker may take over."""

    kind = "WORKER_LOST"

    def __init__(
        self,
        message: str = "the worker was lost",
        *,
        retryable: bool,
        **details: Unpack[_Details],
    ) -> None:
        super().__init__(message, **details)
        self.retryable = retryable


class DeadlineExceeded(MeshError):
    """The deadline passed: allow more time or request less work."""

    kind = "DEADLINE_EXCEEDED"

    def __init__(
        self, message: str = "the deadline passed", *, metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, metadata=metadata)


class RequestCancelled(MeshError):
    """The request was cancelled, by the caller or on its behalf: no action needed."""

    kind = "REQUEST_CANCELLED"

    def __init__(
        self, message: str = "the request was cancelled", **details: Unpack[_Details]
    ) -> None:
        super().__init__(message, **details)


class Unimplemented(MeshError):
    """The server does not implement the operation: do not retry."""

    kind = "UNIMPLEMENTED"


class InternalError(MeshError):
    """A bug in this project: report it. Never raised for an error of a peer or a client."""

    kind = "BUG"


class StatusCode(IntEnum):
    """gRPC status codes by number; `grpc.StatusCode` holds the same names."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


STATUS_CODE_BY_ERROR: Mapping[type[MeshError], StatusCode] = {
    InvalidRequest: StatusCode.INVALID_ARGUMENT,
    Unsupported: StatusCode.INVALID_ARGUMENT,
    PromptTooLong: StatusCode.INVALID_ARGUMENT,
    NotFound: StatusCode.NOT_FOUND,
    UnknownModel: StatusCode.NOT_FOUND,
    Conflict: StatusCode.FAILED_PRECONDITION,
    Unauthenticated: StatusCode.UNAUTHENTICATED,
    PermissionDenied: StatusCode.PERMISSION_DENIED,
    Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: StatusCode.UNAVAILABLE,
    WorkerLost: StatusCode.ABORTED,
    DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
    RequestCancelled: StatusCode.CANCELLED,
    Unimplemented: StatusCode.UNIMPLEMENTED,
    InternalError: StatusCode.INTERNAL,
}
"""The gRPC status of each class that a peer can send."""

MESH_ERROR_CLASSES: tuple[type[MeshError], ...] = tuple(STATUS_CODE_BY_ERROR)

ERROR_CLASS_BY_KIND: Mapping[str, type[MeshError]] = {cls.kind: cls for cls in MESH_ERROR_CLASSES}


def status_code(error: MeshError) -> StatusCode:
    """Returns the gRPC status code of an error; INTERNAL for a class outside the table."""
    return STATUS_CODE_BY_ERROR.get(type(error), StatusCode.INTERNAL)

"""The one family of errors: each class says what the caller should do about it.

Services raise these and nothing else on purpose; `common/rpc/interceptors.py` turns them into gRPC
status and back, the frontend into OpenAI bodies. `kind` names the class on the wire and never
changes; `reason` is a stable UPPER_SNAKE token for machines and defaults to the kind, so a caller
may say more (`Unavailable("...", reason="NO_DECODE_WORKER")`) without a new class.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Self

_EMPTY_METADATA: Mapping[str, str] = MappingProxyType({})


class MeshError(Exception):
    """What all our errors carry.

    message: a sentence for people, fit to be shown to a client.
    field: the request field at fault, as a path (`messages[1].content`), or None.
    retry_after_s: seconds after which the same call may succeed, or None.
    metadata: small facts for machines, string to string.
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
        cls,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retryable: bool | None = None,
    ) -> Self:
        """The error a peer raised, from its parts; the constructors below compose messages."""
        error = cls.__new__(cls)
        MeshError.__init__(
            error,
            message,
            field=field,
            retry_after_s=retry_after_s,
            reason=reason,
            metadata=metadata,
        )
        if retryable is not None:
            error.retryable = retryable
        return error


class InvalidRequest(MeshError):
    """The request is wrong and stays wrong: change it. `field` names the culprit."""

    kind = "INVALID_REQUEST"

    def __init__(
        self,
        message: str,
        field: str | None = None,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, field=field, reason=reason, metadata=metadata)


class Unsupported(InvalidRequest):
    """A field we understand and cannot honour: leave it out."""

    kind = "UNSUPPORTED"

    def __init__(self, field: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(f"'{field}' is not supported: {message}.", field, reason=reason)


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the model's context: shorten it."""

    kind = "PROMPT_TOO_LONG"


class NotFound(MeshError):
    """The named thing does not exist: do not retry."""

    kind = "NOT_FOUND"


class UnknownModel(NotFound):
    """No such model is served here: name another."""

    kind = "UNKNOWN_MODEL"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the model {model!r} does not exist or is not served",
            field="model",
            metadata={"model": model},
        )


class Conflict(MeshError):
    """The state of things forbids it (failed precondition): read the state again first."""

    kind = "CONFLICT"


class Unauthenticated(MeshError):
    """No credentials, or wrong ones: authenticate."""

    kind = "UNAUTHENTICATED"


class PermissionDenied(MeshError):
    """Known caller, not allowed: ask for the right."""

    kind = "PERMISSION_DENIED"


class Overloaded(MeshError):
    """Full for now and nothing ran: send it again after `retry_after_s`."""

    kind = "OVERLOADED"
    retryable = True

    def __init__(
        self,
        retry_after_s: float | None = None,
        message: str = "at capacity",
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, reason=reason, metadata=metadata)


class Unavailable(MeshError):
    """Nobody is there who could do it: try again later or elsewhere."""

    kind = "UNAVAILABLE"
    retryable = True

    def __init__(
        self,
        message: str,
        retry_after_s: float | None = None,
        *,
        field: str | None = None,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            message, field=field, retry_after_s=retry_after_s, reason=reason, metadata=metadata
        )


class WorkerLost(MeshError):
    """The worker vanished, hung or refused; `retryable` says whether another may take over."""

    kind = "WORKER_LOST"

    def __init__(
        self,
        message: str = "the worker was lost",
        *,
        retryable: bool,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retryable = retryable


class DeadlineExceeded(MeshError):
    """The caller's time ran out: allow more, or ask for less."""

    kind = "DEADLINE_EXCEEDED"

    def __init__(
        self, message: str = "the deadline passed", *, metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, metadata=metadata)


class RequestCancelled(MeshError):
    """The caller, or somebody on its behalf, gave the request up: nothing to do."""

    kind = "REQUEST_CANCELLED"

    def __init__(
        self,
        message: str = "the request was cancelled",
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)


class Unimplemented(MeshError):
    """This server does not offer the operation: call something else."""

    kind = "UNIMPLEMENTED"


class InternalError(MeshError):
    """Our mistake: report it. Never raised for what a peer or a client did wrong."""

    kind = "BUG"


# Every class a peer can send, for the table in interceptors and for tests that walk them all.
MESH_ERROR_CLASSES: tuple[type[MeshError], ...] = (
    InvalidRequest,
    Unsupported,
    PromptTooLong,
    NotFound,
    UnknownModel,
    Conflict,
    Unauthenticated,
    PermissionDenied,
    Overloaded,
    Unavailable,
    WorkerLost,
    DeadlineExceeded,
    RequestCancelled,
    Unimplemented,
    InternalError,
)

"""The status of failed RPCs: MeshErrors to gRPC status with details, and back.

Services only raise `MeshError`s; the server's interceptor sends their status, and
`mesh_error_from_rpc` turns it back into the error that the peer raised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import grpc
import grpc.aio
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from common import errors
from common.errors import MeshError

LOG = structlog.get_logger(__name__)

STATUS_DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "kvmesh"

_GRPC_CODE_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}
# For a status that carries no details of ours: proxies, the gRPC library, other servers.
_ERROR_BY_CODE: Mapping[grpc.StatusCode, type[MeshError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Conflict,
    grpc.StatusCode.ALREADY_EXISTS: errors.Conflict,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    # Not by us, or it would carry details: a failure of the transport.
    grpc.StatusCode.INTERNAL: errors.Unavailable,
    # Not by us, or there would be no status to read: a stopping server answers so to calls that it
    # has not begun.
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unimplemented,
}

# The errors that a failure of the transport becomes, if they come without details of ours.
_OF_TRANSPORT = (
    errors.Unavailable,
    errors.Overloaded,
    errors.DeadlineExceeded,
    errors.InternalError,
)

# What grpc reports for a write on a connection that was reset.
_RESET_TEXTS = {"Internal error from Core": "the connection was reset"}

# grpc rejects headers above 8 KiB with growing probability, so long errors are cut. Worst case in
# bytes: the message three times as percent-encoded text, and once in the details; their base64 is
# 4/3 of their sum.
_MESSAGE_BYTES_MAX = 768
_FIELD_BYTES_MAX = 256
_VALUE_BYTES_MAX = 128
_METADATA_ENTRIES_MAX = 8
# Keys in ErrorInfo's metadata that the receiver removes.
_KIND_KEY, _RETRYABLE_KEY = "kind", "retryable"


def mesh_error_to_status(error: MeshError) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """Returns the gRPC status code of an error, and its status with details. Long texts are cut."""
    code = errors.status_code(error)
    status = status_pb2.Status(code=code, message=_truncate(error.message, _MESSAGE_BYTES_MAX))
    entries = list(error.metadata.items())[:_METADATA_ENTRIES_MAX]
    metadata = {
        _truncate(key, _VALUE_BYTES_MAX): _truncate(value, _VALUE_BYTES_MAX)
        for key, value in entries
    }
    metadata[_KIND_KEY] = type(error).kind
    metadata[_RETRYABLE_KEY] = "true" if error.retryable else "false"
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(
            reason=_truncate(error.reason, _VALUE_BYTES_MAX), domain=ERROR_DOMAIN, metadata=metadata
        )
    )
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_truncate(error.field, _FIELD_BYTES_MAX),
            description=_truncate(error.message, _FIELD_BYTES_MAX),
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None and math.isfinite(error.retry_after_s):
        delay = Duration()
        delay.FromNanoseconds(round(max(0.0, error.retry_after_s) * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return _GRPC_CODE_BY_NUMBER[code], status


def mesh_error_from_rpc(error: grpc.aio.AioRpcError) -> MeshError:
    """Returns the error that a peer raised; without usable details, the class nearest to the
    status."""
    trailing = error.trailing_metadata()
    raw = trailing.get(STATUS_DETAILS_KEY) if trailing is not None else None
    text = _RESET_TEXTS.get(error.details() or "", error.details() or "")
    return mesh_error_from_status(error.code(), text, raw if isinstance(raw, bytes) else None)


def mesh_error_from_status(
    code: grpc.StatusCode, message: str, raw_details: bytes | None
) -> MeshError:
    """Returns the same for the parts of a status. raw_details: its STATUS_DETAILS_KEY."""
    message = message or code.name
    info, field, retry_after_s = _unpack_details(raw_details)
    cls = errors.ERROR_CLASS_BY_KIND.get(info.metadata[_KIND_KEY]) if info is not None else None
    if info is not None and cls is not None:
        metadata = {k: v for k, v in info.metadata.items() if k not in (_KIND_KEY, _RETRYABLE_KEY)}
        return cls.restore(
            message,
            field=field,
            retry_after_s=retry_after_s,
            reason=info.reason,
            metadata=metadata,
            retryable=info.metadata.get(_RETRYABLE_KEY) == "true",
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        # The library reports a message above the limit as "exhausted"; a retry cannot succeed.
        return errors.InvalidRequest(message, reason="MESSAGE_TOO_LARGE")
    cls = _ERROR_BY_CODE.get(code, errors.InternalError)
    return cls.restore(message, field=field, retry_after_s=retry_after_s)


def code_name(error: MeshError) -> str:
    """Returns the gRPC code of an error in lower case, such as `unavailable`."""
    return _GRPC_CODE_BY_NUMBER[errors.status_code(error)].name.lower()


@contextmanager
def map_rpc_errors() -> Iterator[None]:
    """Turns AioRpcErrors of the block into MeshErrors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise mesh_error_from_rpc(error) from error


def has_no_response(error: MeshError) -> bool:
    """Returns whether a call failed with this error because its peer did not respond, so that the
    text is that of the transport. error: of `map_rpc_errors`."""
    cause = error.__cause__
    if not (isinstance(cause, grpc.aio.AioRpcError) and isinstance(error, _OF_TRANSPORT)):
        return False
    trailing = cause.trailing_metadata()
    raw = trailing.get(STATUS_DETAILS_KEY) if trailing is not None else None
    return _unpack_details(raw if isinstance(raw, bytes) else None)[0] is None


def _unpack_details(
    raw: bytes | None,
) -> tuple[error_details_pb2.ErrorInfo | None, str | None, float | None]:
    info, field, retry_after_s = None, None, None
    try:
        details = () if raw is None else status_pb2.Status.FromString(raw).details
    except DecodeError:
        LOG.debug("status_details_unreadable")
        return info, field, retry_after_s
    for detail in details:
        error_info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        try:
            if detail.Unpack(error_info) and error_info.domain == ERROR_DOMAIN:
                info = error_info
            elif detail.Unpack(bad_request) and bad_request.field_violations:
                field = bad_request.field_violations[0].field
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        except DecodeError:
            LOG.debug("status_detail_unreadable", type=detail.type_url)
    return info, field, retry_after_s


def _truncate(text: str, bytes_max: int) -> str:
    """Returns at most `bytes_max` bytes of UTF-8; lone surrogates (from a client's JSON) are
    replaced."""
    data = text.encode(errors="replace")
    if len(data) <= bytes_max:
        return data.decode()
    return data[: bytes_max - 3].decode(errors="ignore") + "…"

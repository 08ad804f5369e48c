"""MeshError to and from its message inside streams whose RPC status stays OK."""

from __future__ import annotations

import math

from common.errors import MESH_ERROR_CLASSES, InternalError, MeshError
from common.rpc.interceptors import mesh_error_to_status
from kvmesh.types.v1 import error_pb2

_CLASS_BY_KIND = {error.kind: error for error in MESH_ERROR_CLASSES}
_RETRY_AFTER_MS_MAX = 2**32 - 1
# A stream carries more than a status does, but what a client sent may be in here.
_TEXT_CHARS_MAX = 4096


def error_to_proto(error: MeshError) -> error_pb2.Error:
    """The message; `error_from_proto` restores an equal error, but that long texts are cut."""
    message = error_pb2.Error(
        code=mesh_error_to_status(error)[1].code,
        kind=error.kind,
        reason=error.reason,
        message=_wire_text(error.message),
        field=_wire_text(error.field or ""),
        retryable=error.retryable,
        metadata={_wire_text(key): _wire_text(value) for key, value in error.metadata.items()},
    )
    if error.retry_after_s is not None and math.isfinite(error.retry_after_s):
        retry_after_ms = round(max(0.0, error.retry_after_s) * 1000)
        message.retry_after_ms = min(retry_after_ms, _RETRY_AFTER_MS_MAX)
    return message


def _wire_text(text: str) -> str:
    """The text as protobuf takes it: not endless, no half surrogate pairs."""
    if len(text) > _TEXT_CHARS_MAX:
        text = text[: _TEXT_CHARS_MAX - 1] + "…"
    return text.encode(errors="replace").decode()


def error_from_proto(message: error_pb2.Error) -> MeshError:
    """The error a peer put into a stream; a kind we do not know becomes a Bug that says so."""
    kind, text = _CLASS_BY_KIND.get(message.kind), message.message
    if kind is None:
        kind, text = InternalError, f"{text} (an error of the unknown kind {message.kind!r})"
    return kind.restore(
        text,
        field=message.field or None,
        retry_after_s=(
            message.retry_after_ms / 1000 if message.HasField("retry_after_ms") else None
        ),
        reason=message.reason or None,
        metadata=dict(message.metadata),
        retryable=message.retryable,
    )

"""MeshError to and from its message inside streams, where the RPC status stays OK."""

from __future__ import annotations

import math

from common.errors import ERROR_CLASS_BY_KIND, InternalError, MeshError, status_code
from kvmesh.types.v1 import error_pb2

_RETRY_AFTER_MS_MAX = 2**32 - 1
# A stream carries more than a status, but the text may contain client input.
_TEXT_CHARS_MAX = 4096


def error_to_proto(error: MeshError) -> error_pb2.Error:
    """Returns the message. Texts over 4096 characters are truncated; the rest is lossless."""
    message = error_pb2.Error(
        code=status_code(error),
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
    """Returns the text truncated and without lone surrogates, which protobuf refuses."""
    if len(text) > _TEXT_CHARS_MAX:
        text = text[: _TEXT_CHARS_MAX - 1] + "…"
    return text.encode(errors="replace").decode()


def error_from_proto(message: error_pb2.Error) -> MeshError:
    """Returns the error that a peer sent; an unknown kind becomes an InternalError."""
    cls, text = ERROR_CLASS_BY_KIND.get(message.kind), message.message
    if cls is None:
        cls, text = InternalError, f"{text} (an error of the unknown kind {message.kind!r})"
    return cls.restore(
        text,
        field=message.field or None,
        retry_after_s=(
            message.retry_after_ms / 1000 if message.HasField("retry_after_ms") else None
        ),
        reason=message.reason or None,
        metadata=dict(message.metadata),
        retryable=message.retryable,
    )

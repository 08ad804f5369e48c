"""Files and batches as OpenAI's API writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmesh.batch.v1 import batch_pb2

_TIMES = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at"),
    *("expired_at", "cancelling_at", "cancelled_at"),
)

# Any, here and below: JSON.
Json = dict[str, Any]


def file_object(file: batch_pb2.File) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at or None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: batch_pb2.Batch) -> Json:
    errors = [
        {
            "code": error.code,
            "message": error.message,
            "param": error.param or None,
            "line": error.line or None,
        }
        for error in batch.errors
    ]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{name: getattr(batch, name) or None for name in _TIMES},
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": dict(batch.metadata) or None,
    }


def page(objects: Sequence[Json], *, has_more: bool) -> Json:
    """Returns a page of a list."""
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }

"""Files, batches and their states (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """The state of a batch, as in OpenAI's API."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = (Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED)
# Of a batch whose lines may be sent, and of one that cancelling changes.
OPEN = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING)
# Why a batch that is finalized ends: the status that it gets.
TIMES: Mapping[Status, str] = {
    Status.IN_PROGRESS: "in_progress_at",
    Status.FINALIZING: "finalizing_at",
    Status.COMPLETED: "completed_at",
    Status.FAILED: "failed_at",
    Status.EXPIRED: "expired_at",
    Status.CANCELLING: "cancelling_at",
    Status.CANCELLED: "cancelled_at",
}
"""The column of the time at which a batch gets a status."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The client that made a file or batch; "" without API keys."""

    tenant: str = ""
    key_id: str = ""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file without its content. Times are Unix seconds; expires_at: 0: never."""

    id: str
    filename: str
    purpose: str
    size: int
    created_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch as it is stored. times: Unix seconds by column; 0: it has not happened."""

    id: str
    owner: Owner
    endpoint: str
    input_file_id: str
    window: str
    status: Status
    created_at: float
    expires_at: float
    times: Mapping[str, float]
    output_file_id: str = ""
    error_file_id: str = ""
    output_expires_s: int = 0
    ends_as: str = ""
    """While it is finalized: the status that it gets then."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    # JSON objects with code, message, param and line.
    errors: tuple[Mapping[str, object], ...] = ()

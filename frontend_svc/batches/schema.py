"""Bodies and queries of files and batches (pure). What a value may be, the batch service checks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from frontend_svc.openai.body.fields import StrictModel, check_pair_count

Id = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_-]+$")]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    BeforeValidator(check_pair_count),
]


class ExpiresAfter(StrictModel):
    """When files are removed: seconds after they were made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class BatchRequest(StrictModel):
    """The body of `POST /v1/batches`. input_file_id: of a file with the purpose `batch`. endpoint:
    the route of its lines. completion_window: `24h`."""

    input_file_id: Id
    endpoint: Annotated[str, Field(max_length=64)]
    completion_window: Annotated[str, Field(max_length=16)]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class FilesQuery(StrictModel):
    """The query of `GET /v1/files`. after: the id of the file before the page."""

    purpose: Annotated[str, Field(max_length=64)] | None = None
    limit: Annotated[int, Field(ge=1, le=10_000, strict=False)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    after: Id | None = None


class BatchesQuery(StrictModel):
    """The query of `GET /v1/batches`. after: the id of the batch before the page."""

    limit: Annotated[int, Field(ge=1, le=100, strict=False)] = 20
    after: Id | None = None


class UploadFields(StrictModel):
    """The form of `POST /v1/files`. purpose: `batch`. file: JSON Lines."""

    purpose: Literal["batch"]
    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]

"""What files and batches may have at most (pure)."""

from __future__ import annotations

from dataclasses import dataclass

MB = 1 << 20
# Of OpenAI's API.
CUSTOM_ID_CHARS_MAX = 512
FILENAME_CHARS_MAX = 512
ERRORS_MAX = 32
WINDOW_S = 24 * 3600
COMPLETION_WINDOW = "24h"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
UPLOAD_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The limits of one service."""

    file_bytes: int = 200 * MB
    """Of a file."""

    lines: int = 50_000
    """Of a batch."""

    tenant_bytes: int = 10_240 * MB
    """Of the files of a tenant."""

    tenant_batches: int = 64
    """Of a tenant, not ended."""

    tenant_lines: int = 1_000_000
    """Of the batches of a tenant that have not ended."""

"""Configuration of the batch service: flags `--...` and variables `KVMESH_BATCH_...`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from batch_svc.core.conversations import ConversationLimits
from batch_svc.core.limits import BatchLimits
from batch_svc.core.responses import DAY_S, ResponseLimits
from common.runtime.config import ServiceConfig

_DEFAULTS = BatchLimits()
_RESPONSES = ResponseLimits()
_CONVERSATIONS = ConversationLimits()


class BatchConfig(ServiceConfig):
    """The settings of a batch service."""

    database_file: Path = Path(".run/batches.db")
    """File of the embedded database, which has the files and batches of all tenants. On a disk of
    this host; services of one host may share it."""
    database_url: str | None = Field(default=None, repr=False)
    """PostgreSQL instead: postgresql://USER:PASSWORD@HOST/DATABASE. Services of several hosts may
    share it. It needs more packages: pip install 'kvmesh[postgres]'."""
    lease_s: Annotated[float, Field(ge=1, le=300)] = 10.0
    """Seconds after which another service on the same database runs the batches, if the one that
    does has not renewed its lease."""
    lines_in_flight: Annotated[int, Field(ge=1, le=4096)] = 256
    """Most lines sent at a time. About what the idle workers run at once, and a few more."""
    line_timeout_s: Annotated[float, Field(ge=1)] = 900.0
    """Longest time of one try of a line in seconds, with its wait for idle capacity, or of one of a
    response in the background."""
    line_attempts: PositiveInt = 5
    """Tries of a line that fails by an error of the server, or has a model or key that is not there
    yet. Refusals for lack of capacity, and waits for it, are not counted."""
    file_limit_mb: Annotated[int, Field(ge=1, le=512)] = _DEFAULTS.file_bytes >> 20
    """Largest file in MB."""
    batch_lines_max: Annotated[int, Field(ge=1, le=1_000_000)] = _DEFAULTS.lines
    """Most lines of a batch."""
    tenant_files_mb: PositiveInt = _DEFAULTS.tenant_bytes >> 20
    """Most MB of files of one tenant, results included; above it uploads are refused."""
    tenant_batches_max: PositiveInt = _DEFAULTS.tenant_batches
    """Most batches of one tenant that have not ended."""
    tenant_lines_max: PositiveInt = _DEFAULTS.tenant_lines
    """Most lines of one tenant in batches that have not ended."""
    file_days: Annotated[int, Field(ge=1, le=3650)] = 30
    """Days after which files are removed, unless the client chooses an earlier time."""
    response_limit_mb: Annotated[int, Field(ge=1, le=48)] = _RESPONSES.response_bytes >> 20
    """Largest stored response in MB, with the conversation before it. A larger one stays in the
    memory of its frontend."""
    tenant_responses_mb: PositiveInt = _RESPONSES.tenant_bytes >> 20
    """Most MB of stored responses of one tenant; above it its oldest ones are removed."""
    responses_in_flight: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most responses in the background (`background: true`) that run at a time. The others wait, by
    turns of their tenants."""
    tenant_background_max: PositiveInt = _RESPONSES.tenant_background
    """Most responses of one tenant in the background that have not ended; above it new ones are
    refused."""
    response_days: Annotated[int, Field(ge=1, le=3650)] = 30
    """Days after which stored responses are removed."""
    conversation_items_max: PositiveInt = _CONVERSATIONS.items
    """Most items of a conversation. A response that continues a full one is refused."""
    conversation_limit_mb: Annotated[int, Field(ge=1, le=48)] = (
        _CONVERSATIONS.conversation_bytes >> 20
    )
    """Most MB of the items of a conversation."""
    tenant_conversations_max: PositiveInt = _CONVERSATIONS.tenant_conversations
    """Most conversations of one tenant; above it new ones are refused."""
    conversation_days: Annotated[int, Field(ge=0, le=3650)] = 0
    """Days after its last new item after which a conversation is removed. 0: never."""
    in_prefix_order: bool = True
    """Send the lines of a batch with a common beginning one after the other, so that they share KV
    caches. Off: in the order of the file."""

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(
            file_bytes=self.file_limit_mb << 20,
            lines=self.batch_lines_max,
            tenant_bytes=self.tenant_files_mb << 20,
            tenant_batches=self.tenant_batches_max,
            tenant_lines=self.tenant_lines_max,
        )

    @property
    def response_limits(self) -> ResponseLimits:
        return ResponseLimits(
            response_bytes=self.response_limit_mb << 20,
            tenant_bytes=self.tenant_responses_mb << 20,
            keep_s=self.response_days * DAY_S,
            tenant_background=self.tenant_background_max,
        )

    @property
    def conversation_limits(self) -> ConversationLimits:
        return ConversationLimits(
            items=self.conversation_items_max,
            conversation_bytes=self.conversation_limit_mb << 20,
            tenant_conversations=self.tenant_conversations_max,
            keep_s=self.conversation_days * DAY_S,
        )

    def problems(self) -> list[str]:
        found = super().problems()
        url = self.database_url
        if url is not None and not url.startswith(("postgresql://", "postgres://")):
            found.append("database_url: must begin with postgresql://")
        if url is not None and find_spec("asyncpg") is None:
            found.append("database_url: needs more packages: pip install 'kvmesh[postgres]'")
        return found

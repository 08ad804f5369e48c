"""Revocation of API keys, in the file that frontends follow."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import structlog

from common.access.key_file import KeyFile, edited_tenants, remove_key
from common.errors import PermissionDenied, Unavailable

log = structlog.get_logger()


def can_revoke(path: Path | None) -> bool:
    """Returns whether this process may replace the file."""
    return path is not None and os.access(path.parent, os.W_OK) and os.access(path, os.R_OK)


async def revoke_key(path: Path | None, keys: KeyFile | None, key_id: str) -> None:
    """Removes a key. Raises NotFound, PermissionDenied and Unavailable."""
    if path is None or keys is None or not can_revoke(path):
        raise PermissionDenied("this console may not change the file of API keys (--api-keys)")

    def edit(path: Path, keys: KeyFile) -> None:
        with edited_tenants(path) as tenants:
            remove_key(tenants, key_id)
        keys.reload()

    try:
        await asyncio.to_thread(edit, path, keys)
    except OSError as error:
        raise Unavailable(f"{path} cannot be changed: {error.strerror}") from error
    log.info("key_revoked", key_id=key_id)

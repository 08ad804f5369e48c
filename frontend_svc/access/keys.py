"""The check of API keys: once per request, before its body is read."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from common.api_keys import KeyDocument, Permission, parse_keys
from common.errors import MeshError
from frontend_svc.access.caller import ANONYMOUS, Caller, KeyTable
from frontend_svc.access.quotas import Quota, TenantQuotas
from frontend_svc.edge.asgi import AsgiApp, Receive, Scope, Send

# Time until a change of the file is in effect.
RELOAD_INTERVAL_S = 1.0
# Key of the KeyFile in the state of a scope; absent: the API has no keys.
_KEYS = "kvmesh.api_keys"
# Key of the TenantQuotas, beside it.
_QUOTAS = "kvmesh.quotas"

log = structlog.get_logger()


class KeyFile:
    """The keys of a file, which is read again while `follow` runs. An invalid or missing file
    leaves the keys as they are; it is logged at its second read, because at the first another
    program may be writing it. Raises OSError and InvalidRequest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: bytes | None = None
        # The error of the last read, and how many reads before it had the same one.
        self._error: str | None = None
        self._repeats = 0
        self._read()

    def identify(self, scope: Scope) -> Caller:
        """Returns the client of a request. Raises Unauthenticated."""
        return self._table.identify(scope["headers"], time.time())

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            await asyncio.to_thread(self.reload)

    def reload(self) -> None:
        """Reads the file; a file that has not changed since the last time changes nothing."""
        error = None
        try:
            self._read()
        except (OSError, MeshError) as raised:
            error = str(raised)
        self._repeats = self._repeats + 1 if error is not None and error == self._error else 0
        self._error = error
        if self._repeats == 1:
            log.warning("api_keys_rejected", path=str(self._path), error=error)

    def _read(self) -> None:
        raw = self._path.read_bytes()
        if raw == self._last:
            return
        self.document: KeyDocument = parse_keys(raw)
        self._table = KeyTable.of(self.document)
        self._last = raw
        keys = len(self._table.callers)
        log.info("api_keys_loaded", tenants=len(self.document.tenants), keys=keys)


def with_keys(api: AsgiApp, keys: KeyFile, quotas: TenantQuotas) -> AsgiApp:
    """Returns the same API, whose `admit` demands a key, and whose requests have the quotas of
    tenants."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][_KEYS] = keys
        scope["state"][_QUOTAS] = quotas
        await api(scope, receive, send)

    return serve


def admit(scope: Scope, needed: Permission | None) -> Caller:
    """Returns the client of a request. needed: what its key must permit; None: any key will do.
    Raises Unauthenticated and PermissionDenied."""
    keys: KeyFile | None = scope["state"].get(_KEYS)
    if keys is None:
        return ANONYMOUS
    caller = keys.identify(scope)
    if needed is not None:
        caller.require(needed)
    return caller


def quota_of(scope: Scope, caller: Caller) -> Quota | None:
    """Returns the quota of a client's new request; None without limits."""
    quotas: TenantQuotas | None = scope["state"].get(_QUOTAS)
    return None if quotas is None else quotas.quota(caller, time.monotonic())

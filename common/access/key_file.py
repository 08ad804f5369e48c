"""The file of API keys on the disk: follows its changes, and edits it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from common.access.caller import Caller, Headers, KeyTable
from common.api_keys import ApiKey, KeyDocument, Tenant, hash_of, parse_keys
from common.errors import MeshError, NotFound

# Time until a change of the file is in effect.
RELOAD_INTERVAL_S = 1.0

log = structlog.get_logger()


class KeyFile:
    """The keys of a file, which is read again while `follow` runs. An invalid or missing file
    leaves the keys as they are; it is logged at its second read, because at the first another
    program may be writing it. Raises OSError and InvalidRequest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Held during a read: of two at a time, the one that read first must not win.
        self._reading = threading.Lock()
        self._last: bytes | None = None
        # The error of the last read, and how many reads before it had the same one.
        self._error: str | None = None
        self._repeats = 0
        self._read()

    def identify(self, headers: Headers) -> Caller:
        """Returns the client of a request, whose header names are in lower case. Raises
        Unauthenticated."""
        return self._table.identify(headers, time.time())

    def find(self, key: bytes) -> Caller:
        """Returns the client with a key. Raises Unauthenticated."""
        return self.find_hash(hash_of(key))

    def find_hash(self, sha256: str) -> Caller:
        """Returns the client with the key of this hash. Raises Unauthenticated."""
        return self._table.find(sha256, time.time())

    def find_id(self, tenant: str, key_id: str) -> Caller:
        """Returns the client with the key of this tenant and id. Raises Unauthenticated."""
        return self._table.find_id(tenant, key_id, time.time())

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            await asyncio.to_thread(self.reload)

    def reload(self) -> None:
        """Reads the file; a file that has not changed since the last time changes nothing."""
        with self._reading:
            self._reload()

    def _reload(self) -> None:
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


@contextlib.contextmanager
def edited_tenants(path: Path) -> Iterator[dict[str, Tenant]]:
    """Replaces a file, in one step, by the tenants that the block leaves; creates it. Other edits
    wait."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        document, mode = KeyDocument(), 0o600
        if path.exists():
            document, mode = parse_keys(path.read_bytes()), stat.S_IMODE(path.stat().st_mode)
        tenants = dict(document.tenants)
        yield tenants
        document = document.model_copy(update={"tenants": tenants})
        text = document.model_dump_json(indent=2, exclude_defaults=True).encode() + b"\n"
        parse_keys(text)
        new = path.with_name(f".{path.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(new, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_key(tenants: dict[str, Tenant], key_id: str) -> tuple[str, ApiKey]:
    """Removes a key; returns its tenant and the key. Raises NotFound."""
    for name, tenant in tenants.items():
        for key in tenant.keys:
            if key.id == key_id:
                others = tuple(other for other in tenant.keys if other is not key)
                tenants[name] = tenant.model_copy(update={"keys": others})
                return name, key
    raise NotFound(f"no key has the id {key_id!r}")

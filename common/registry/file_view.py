"""What one process sees of a namespace in the file registry; `file.py` has the format."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import TypeAdapter

from common.errors import InvalidRequest, Unauthenticated
from common.registry.file_lock import inode_of_path, is_locked, open_regular, read_whole
from common.registry.folder_changes import FolderChanges
from common.registry.instances import Instance, Snapshot, parse_json
from common.registry.signature import EntrySigner

LOGGED_CHARS_MAX = 500
# A hidden file this old belongs to an owner that died before it could rename it.
ABANDONED_AFTER_S = 60.0
# An entry may be replaced this often during one attempt to open it.
OPEN_ATTEMPTS_MAX = 16
ENTRY_BYTES_MAX = 1 << 20

_INSTANCE_FIELD = b',"instance":'
_ENTRY_NAME = re.compile(r"[0-9a-f]{16}\.json")

LOG = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _EntryRecord:
    """Content of an entry file. order: CLOCK_MONOTONIC at registration, ns, one scale per host."""

    order: int
    instance: Instance


_ENTRY_RECORD_ADAPTER: TypeAdapter[_EntryRecord] = TypeAdapter(_EntryRecord)


def entry_name(instance_id: int) -> str:
    """Returns the name of an entry file."""
    return f"{instance_id:016x}.json"


def encode_entry(order: int, instance: Instance, signer: EntrySigner) -> tuple[str, bytes]:
    """Returns the signature and the content of an entry file. Raises InvalidRequest if too
    large."""
    content = b'{"order":%d%s%s}' % (order, _INSTANCE_FIELD, signer.seal(instance))
    signature = signer.sign(content)
    if signature:
        content += b"\n" + signature.encode()
    if len(content) > ENTRY_BYTES_MAX:
        raise InvalidRequest(
            f"instance too large: {len(content)}/{ENTRY_BYTES_MAX} bytes", "instance"
        )
    return signature, content


@dataclass(slots=True)
class _Entry:
    """An open entry file. instance: None if unreadable. fd: keeps the inode in use.
    is_authenticated: False if it is not proved to be of this mesh."""

    fd: int
    inode: int
    order: int
    instance: Instance | None
    is_authenticated: bool = True


class FolderView:
    """The members of one namespace as one process sees them. Removes files of dead owners."""

    def __init__(
        self, directory: Path, namespace: str, changes: FolderChanges, signer: EntrySigner
    ) -> None:
        self.directory = directory
        self._signer = signer
        self._changes = changes
        # Whether changes since the last poll are noticed, and those before it.
        self.is_observed = False
        self.change_count = 0
        # Whether the last poll could read the folder.
        self.is_listed = True
        self._namespace = namespace
        self.snapshot = Snapshot()
        # Monotonic seconds.
        self.polled_at = -math.inf
        self.entries: dict[str, _Entry] = {}
        self._has_changed = True  # Since the snapshot was made.
        self._warned_names: set[str] = set()

    def poll(self) -> Snapshot:
        """Returns the current members: lists the directory and queries every lock."""
        self.polled_at = time.monotonic()
        self.change_count = self._changes.count
        self.is_observed = self._changes.observe(self.directory)
        self.is_listed = self._load_listing()
        for name, entry in tuple(self.entries.items()):
            # An update unlocks the old file after the new one has taken its name.
            if not is_locked(entry.fd) and not self.load_entry(name):
                self._drop_entry(name)
        if self._has_changed and (self.is_listed or self.snapshot.revision):
            self._has_changed = False
            self.snapshot = self.snapshot.next_snapshot(
                self.instances(),
                has_unauthenticated=not all(e.is_authenticated for e in self.entries.values()),
            )
        return self.snapshot

    def close(self) -> None:
        for entry in self.entries.values():
            os.close(entry.fd)
        self.entries.clear()

    def instances(self) -> list[Instance]:
        """Returns the instances of the last poll, oldest first, superseded ones included."""
        entries = sorted(self.entries.values(), key=lambda e: e.order)
        return [e.instance for e in entries if e.instance is not None]

    def _load_listing(self) -> bool:
        """Loads new and replaced files; False if the directory cannot be read."""
        try:
            with os.scandir(self.directory) as items:
                listed = {item.name: item.inode() for item in items}
        except FileNotFoundError:
            # Not created yet, or lost: known entries live as long as their locks are held.
            return True
        except OSError as error:
            self._warn_once(str(self.directory), "registry_unreadable", error)
            return False
        self._warned_names.intersection_update(listed)
        for name, inode in listed.items():
            known_entry = self.entries.get(name)
            if known_entry is not None and known_entry.inode == inode:
                continue
            if _ENTRY_NAME.fullmatch(name):
                self.load_entry(name)
            elif name.startswith("."):
                _remove_if_abandoned(self.directory / name)
            else:
                self._warn_once(name, "registry_file_ignored", "the name is not <id>.json")
        for name in self.entries.keys() - listed.keys():
            if os.fstat(self.entries[name].fd).st_size == 0:
                self._drop_entry(name)
        return True

    def load_entry(self, name: str) -> bool:
        """Loads the file under `name` if its owner lives, else removes it; returns which."""
        path = self.directory / name
        try:
            for _ in range(OPEN_ATTEMPTS_MAX):
                fd = open_regular(path, os.O_RDONLY)
                if is_locked(fd):
                    entry = self._read_entry(name, fd)
                    self._drop_entry(name)
                    self.entries[name] = entry
                    self._has_changed = True
                    return True
                try:
                    # The order matters: it was unlocked *before* it is found in place here.
                    if inode_of_path(path) == os.fstat(fd).st_ino:
                        path.unlink(missing_ok=True)
                        LOG.info(
                            "registry_entry_removed", path=str(path), reason="its owner has ended"
                        )
                        return False
                finally:
                    os.close(fd)
                # An update has replaced the file since it was opened.
        except FileNotFoundError:
            return False
        except OSError as error:
            self._warn_once(name, "registry_entry_unreadable", error)
            return False
        return name in self.entries  # The owner updates it all the time: it lives.

    def _read_entry(self, name: str, fd: int) -> _Entry:
        inode = os.fstat(fd).st_ino
        try:
            raw = read_whole(fd, ENTRY_BYTES_MAX)
        except OSError as error:
            self._warn_once(name, "registry_entry_unreadable", error.strerror)
            return _Entry(fd, inode, 0, None)
        try:
            text, _, signature = raw.partition(b"\n")
            self._signer.check(text, signature.decode(errors="replace"))
            record = parse_json(_ENTRY_RECORD_ADAPTER, text, name)
            instance = record.instance
            if (entry_name(instance.id), instance.namespace) != (name, self._namespace):
                raise InvalidRequest(
                    f"it holds instance {instance.id:016x} of {instance.namespace!r}", "id"
                )
            sealed = text.partition(_INSTANCE_FIELD)[2].removesuffix(b"}")
            self._signer.check_seal(sealed, instance.id)
        except Unauthenticated as error:
            LOG.warning("registry_entry_unauthenticated", path=name, error=error.message)
            return _Entry(fd, inode, 0, None, is_authenticated=False)
        except InvalidRequest as error:
            if raw:
                LOG.warning(
                    "registry_entry_unreadable",
                    path=name,
                    error=error.message,
                    value=_decode_or_placeholder(raw),
                )
            return _Entry(fd, inode, 0, None)
        return _Entry(fd, inode, record.order, instance)

    def _drop_entry(self, name: str) -> None:
        entry = self.entries.pop(name, None)
        if entry is not None:
            os.close(entry.fd)
            self._has_changed = True

    def _warn_once(self, name: str, event: str, reason: object) -> None:
        """Logs once, until the file is gone."""
        if name not in self._warned_names:
            self._warned_names.add(name)
            LOG.warning(event, path=name, error=str(reason))


def _decode_or_placeholder(raw: bytes) -> str:
    try:
        return raw.decode()[:LOGGED_CHARS_MAX]
    except UnicodeDecodeError:
        return "<not UTF-8>"


def _remove_if_abandoned(temp_path: Path) -> None:
    """Removes the hidden file of an owner that died between writing and renaming."""
    with contextlib.suppress(OSError):
        if time.time() - temp_path.stat().st_mtime > ABANDONED_AFTER_S:
            temp_path.unlink()

"""The registry of a mesh on one host: files in a directory, and kernel locks for liveness.

    <path>/<namespace>/instances/<id, 16 hex digits>.json    one an incarnation, locked by its owner
    <path>/<namespace>/.admission                            held while a card is checked
    <path>/cards/<checksum>.json                             immutable

Local file systems of Linux only (open file description locks, fcntl(2)). *The lock is the truth*:
an instance lives as long as the write lock on its file is held, and the kernel drops that lock with
the process, however it ends; no heartbeat, no timeout, no false death under load. Details that
matter:

- Watchers *query* the lock (F_OFD_GETLK). Probing by taking a shared one would make an owner's own
  attempt fail.
- A file is written and locked under a hidden name, then renamed: what is visible is complete and
  locked. An update is a new file renamed over the old one, whose lock goes after the rename. So
  an unlocked file that still has its name has a dead owner, for good, and anyone may remove it.
- Such a lock belongs to the open file description and would outlive its owner in a forked child
  (as flock does): O_CLOEXEC closes it in children that exec, a fork hook in those that do not.
- Watchers keep a descriptor of each entry. If the directory, or an entry, vanishes, they go on
  asking the locks, and each owner puts its entry back within a poll. An *empty* file was withdrawn
  (`deregister` truncates before it unlinks), even though its lock may still be held.

Files of instances are a few hundred bytes on a local disk, a poll of 100 of them is some 0.1 ms:
that is done on the event loop, where it needs no thread and no lock. Cards hold megabytes and are
synced to disk: they go through a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import struct
import tempfile
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import TypeAdapter

from common.errors import InvalidRequest, MeshError, Unavailable
from common.namespace import check_namespace
from common.registry.card import ModelCard, decode_card, encode_card
from common.registry.instances import (
    Instance,
    Snapshot,
    find_card_conflict,
    parse_json,
)
from common.registry.registry import (
    Lease,
    Watch,
    card_not_found_error,
    check_same_incarnation,
    instance_exists_error,
    lease_closed_error,
    raise_if_card_conflicts,
    registry_closed_error,
)

POLL_INTERVAL_S = 0.05
# A check takes about a millisecond.
CARD_CHECK_WAIT_S = 5.0
# A directory's mtime has the kernel's tick as its grain: one younger than this proves nothing yet.
MTIME_RESOLUTION_NS = 100_000_000
# The listing is repeated this often even if the mtime stands still.
POLLS_PER_LISTING = 20
ENTRY_BYTES_MAX = 1 << 20
# A hidden file this old was left by an owner that died before it could rename it.
ABANDONED_AFTER_S = 60.0

_ENTRY_NAME = re.compile(r"[0-9a-f]{16}\.json")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")
# struct flock of 64-bit Linux: type, whence, start, length (0 = all), pid (0 for such locks).
_FLOCK = struct.Struct("hhqqi4x")
_WRITE_LOCK = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_UNLOCK = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW

LOG = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _EntryRecord:
    """What an entry file holds. order: CLOCK_MONOTONIC at registration, ns, one scale a host."""

    order: int
    instance: Instance


_ENTRY_RECORD_ADAPTER: TypeAdapter[_EntryRecord] = TypeAdapter(_EntryRecord)


class FileRegistry:
    """`common.registry.registry.Registry` on the directory `path`, created if need be.

    poll_s: how often watches look, and owners look after their entries. One task, owned by this
    object, tends the entries; it ends with `close`.
    admission_wait_s: how long `register` waits for another whose card is being checked; after it
    Unavailable, since that process must be stopped or stuck.
    """

    def __init__(
        self,
        path: Path,
        *,
        poll_interval_s: float = POLL_INTERVAL_S,
        card_check_wait_s: float = CARD_CHECK_WAIT_S,
    ) -> None:
        self._path = path
        self._poll_interval_s = poll_interval_s
        self._card_check_wait_s = card_check_wait_s
        self._views: dict[str, _NamespaceView] = {}
        self._leases: dict[int, _FileLease] = {}
        self._reconcile_task: asyncio.Task[None] | None = None
        self._closed = False
        registry_ref = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _detach_in_child(registry_ref()))

    async def register(self, instance: Instance) -> Lease:
        self._check_open()
        view = self._view(instance.namespace)
        if instance.id in self._leases or view.is_registered(instance.id):
            raise instance_exists_error(instance)
        lease = _FileLease(self, view.directory, instance, time.monotonic_ns())
        await self._publish_if_card_agrees(instance, lambda: lease.publish(instance))
        self._leases[instance.id] = lease
        if self._reconcile_task is None:
            self._reconcile_task = asyncio.create_task(self._reconcile(), name="file-registry-tend")
        return lease

    @asynccontextmanager
    async def watch(self, namespace: str) -> AsyncGenerator[Watch, None]:
        self._check_open()
        yield _FileWatch(self, self._view(namespace), self._poll_interval_s)

    async def snapshot(self, namespace: str) -> Snapshot:
        self._check_open()
        return self._view(namespace).poll()

    async def put_card(self, card: ModelCard) -> None:
        self._check_open()
        await asyncio.to_thread(_store_card, self._card_path(card.checksum), card)

    async def get_card(self, checksum: str) -> ModelCard:
        self._check_open()
        return await asyncio.to_thread(_load_card, self._card_path(checksum), checksum)

    async def deregister(self, namespace: str, instance_id: int) -> None:
        self._check_open()
        path = self._view(namespace).directory / _entry_name(instance_id)
        with _map_os_errors(path):
            _withdraw_entry(path)

    async def close(self) -> None:
        self._closed = True
        if self._reconcile_task is not None:
            self._reconcile_task.cancel()
            await asyncio.wait((self._reconcile_task,))
        for lease in tuple(self._leases.values()):
            await lease.close()
        for view in self._views.values():
            view.close()
        self._views.clear()
        # What ended the task early, if not we: a bug, to be seen.
        if self._reconcile_task is not None and not self._reconcile_task.cancelled():
            self._reconcile_task.result()

    def detach_leases(self) -> None:
        """Be closed without deregistering: for a forked child, the leases are its parent's."""
        self._closed = True
        for lease in self._leases.values():
            lease.detach()
        self._leases.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise registry_closed_error()

    def _view(self, namespace: str) -> _NamespaceView:
        check_namespace(namespace)
        if namespace not in self._views:
            self._views[namespace] = _NamespaceView(self._path / namespace / "instances", namespace)
        return self._views[namespace]

    def _card_path(self, checksum: str) -> Path:
        if not _CHECKSUM.fullmatch(checksum):
            raise InvalidRequest(f"{checksum!r} is not 64 hex digits", "card_checksum")
        return self._path / "cards" / f"{checksum}.json"

    async def _publish_if_card_agrees(
        self, instance: Instance, publish: Callable[[], None]
    ) -> None:
        """Publish once the card is agreed to; others cannot register under a card meanwhile."""
        view = self._view(instance.namespace)
        _remove_abandoned_files(view.directory)
        if not instance.card_checksum:
            publish()
            return
        deadline = time.monotonic() + self._card_check_wait_s
        while not self._try_publish(view, instance, publish):
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"another registration holds {view.card_check_lock}", self._poll_interval_s
                )
            await asyncio.sleep(self._poll_interval_s / 10)

    def _try_publish(
        self, view: _NamespaceView, instance: Instance, publish: Callable[[], None]
    ) -> bool:
        # Asked again: the registry may have been closed while we waited.
        self._check_open()
        with _map_os_errors(view.card_check_lock):
            view.directory.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(view.card_check_lock, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o600)
        try:
            if not _try_lock(lock_fd):
                return False
            raise_if_card_conflicts(find_card_conflict(view.members(), instance), instance)
            publish()
            return True
        finally:
            _release_lock(lock_fd)
            os.close(lock_fd)

    async def _reconcile(self) -> None:
        while True:
            await asyncio.sleep(self._poll_interval_s)
            for lease in tuple(self._leases.values()):
                lease.reconcile()


class _FileLease:
    """A locked entry file. Invariant: `_fd` is None before it is published and once closed."""

    def __init__(
        self, registry: FileRegistry, directory: Path, instance: Instance, order: int
    ) -> None:
        self._registry = registry
        self._path = directory / _entry_name(instance.id)
        self._instance = instance
        self._registered_at_ns = order
        self._fd: int | None = None
        self._is_publish_failing = False

    @property
    def instance(self) -> Instance:
        return self._instance

    async def update(self, instance: Instance) -> None:
        check_same_incarnation(self._instance, instance)
        await self._registry._publish_if_card_agrees(
            instance, lambda: self._publish_update(instance)
        )

    async def close(self) -> None:
        self._registry._leases.pop(self._instance.id, None)
        fd = self.detach(keep_open=True)
        if fd is None:
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                if _inode_of_path(self._path) == os.fstat(fd).st_ino:
                    self._path.unlink()
        except OSError as error:
            # Not lost: the file stays behind unlocked, and the next watcher removes it.
            LOG.warning("registry_entry_left_behind", path=str(self._path), error=str(error))
        finally:
            # Unlocking ends the lock even where a child shares the description.
            _release_lock(fd)
            os.close(fd)

    def detach(self, *, keep_open: bool = False) -> int | None:
        """Be closed, leaving the file alone; the descriptor is the caller's if `keep_open`."""
        fd, self._fd = self._fd, None
        if fd is not None and not keep_open:
            os.close(fd)
        return fd

    def publish(self, instance: Instance) -> None:
        """Write, lock and rename the entry; all is as before when it raises.

        Raises Unavailable, and InvalidRequest for an entry that nobody would read.
        """
        record = b'{"order":%d,"instance":%s}' % (self._registered_at_ns, instance.to_json())
        if len(record) > ENTRY_BYTES_MAX:
            raise InvalidRequest(
                f"the entry has {len(record)} bytes, more than {ENTRY_BYTES_MAX}", "instance"
            )
        with _map_os_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = _write_atomically(self._path, record, _acquire_lock)
        self.detach()
        self._fd = fd
        self._instance = instance

    def reconcile(self) -> None:
        """Put the entry back if it vanished; log once when that fails and once when it works."""
        try:
            if self._is_file_current():
                return
            self.publish(self._instance)
        except (OSError, Unavailable) as error:
            if not self._is_publish_failing:
                LOG.warning("registration_lost", path=str(self._path), error=str(error))
            self._is_publish_failing = True
        else:
            LOG.info("registration_restored", path=str(self._path))
            self._is_publish_failing = False

    def _publish_update(self, instance: Instance) -> None:
        # Asked here, not in update(): the lease may end while admission waits.
        if self._fd is None:
            raise lease_closed_error(self._instance)
        self.publish(instance)

    def _is_file_current(self) -> bool:
        if self._fd is None:
            return True
        own_stat = os.fstat(self._fd)
        return own_stat.st_size > 0 and _inode_of_path(self._path) == own_stat.st_ino


@dataclass(slots=True)
class _Entry:
    """An entry file we hold open. instance is None if it could not be read; fd keeps the inode."""

    fd: int
    inode: int
    order: int
    instance: Instance | None


# An entry whose owner updates it all the time is looked at so often before the next poll.
OPEN_ATTEMPTS_MAX = 16


class _NamespaceView:
    """The members of one namespace as this process sees them; reads, and sweeps up the dead."""

    def __init__(self, directory: Path, namespace: str) -> None:
        self.directory = directory
        self.card_check_lock = directory.parent / ".admission"
        self._namespace = namespace
        self._snapshot = Snapshot()
        self._was_listed = False  # Whether the directory, or its absence, was seen at all.
        self._entries: dict[str, _Entry] = {}
        self._warned_names: set[str] = set()
        self._listing_stamp: tuple[int, int] | None = None
        self._polls_until_listing = 0

    def poll(self) -> Snapshot:
        """Poll once: list the directory if it may have changed, ask every lock."""
        changed = self._scan_directory_if_due() or (
            self._was_listed and not self._snapshot.revision
        )
        changed |= self._drop_dead_entries()
        if changed:
            self._snapshot = self._snapshot.next_snapshot(self._instances_in_order())
        return self._snapshot

    def members(self) -> list[Instance]:
        """All live instances now, oldest first, superseded ones too."""
        self._listing_stamp = None
        self.poll()
        return list(self._instances_in_order())

    def is_registered(self, instance_id: int) -> bool:
        """Whether a live owner has registered this id."""
        self.members()
        return _entry_name(instance_id) in self._entries

    def close(self) -> None:
        for entry in self._entries.values():
            os.close(entry.fd)
        self._entries.clear()

    def _instances_in_order(self) -> Iterator[Instance]:
        for entry in sorted(self._entries.values(), key=lambda e: e.order):
            if entry.instance is not None:
                yield entry.instance

    def _scan_directory_if_due(self) -> bool:
        try:
            directory_stat = os.stat(self.directory)
            listing_stamp = (directory_stat.st_mtime_ns, directory_stat.st_ino)
            self._polls_until_listing -= 1
            if listing_stamp == self._listing_stamp and self._polls_until_listing > 0:
                return False
            # A change within the mtime's grain after this listing would leave it the same.
            is_settled = time.time_ns() - directory_stat.st_mtime_ns > MTIME_RESOLUTION_NS
            with os.scandir(self.directory) as directory_entries:
                listed = {item.name: item.inode() for item in directory_entries}
        except FileNotFoundError:
            # Not there yet, or lost: those we know are alive as long as their locks are held.
            self._was_listed = True
            self._listing_stamp = None
            return False
        except OSError as error:
            self._warn_once(str(self.directory), "registry_unreadable", error)
            self._listing_stamp = None
            return False
        self._was_listed = True
        self._warned_names.intersection_update(listed)
        self._listing_stamp = listing_stamp if is_settled else None
        self._polls_until_listing = POLLS_PER_LISTING
        return self._apply_listing(listed)

    def _apply_listing(self, listed: dict[str, int]) -> bool:
        changed = False
        for name, inode in listed.items():
            known_entry = self._entries.get(name)
            if known_entry is not None and known_entry.inode == inode:
                continue
            if _ENTRY_NAME.fullmatch(name):
                changed |= self._load_entry(name)
            elif not name.startswith("."):
                self._warn_once(name, "registry_file_ignored", "not an entry's name")
        for name in self._entries.keys() - listed.keys():
            if os.fstat(self._entries[name].fd).st_size == 0:
                self._drop_entry(name)
                changed = True
        return changed

    def _drop_dead_entries(self) -> bool:
        changed = False
        for name, entry in tuple(self._entries.items()):
            if _is_locked(entry.fd):
                continue
            changed = True
            # An update unlocks the old file; the new one already stands in its place then.
            if not self._load_entry(name):
                self._drop_entry(name)
        return changed

    def _load_entry(self, name: str) -> bool:
        """Take in the file now under `name`, if its owner lives; else remove it."""
        path = self.directory / name
        for _ in range(OPEN_ATTEMPTS_MAX):
            try:
                fd = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
            except FileNotFoundError:
                return False
            except OSError as error:
                self._warn_once(name, "registry_entry_unreadable", error)
                return False
            try:
                if _is_locked(fd):
                    entry = self._read_entry(name, fd)
                    break
                is_removed = self._remove_dead_file(path, fd)
                os.close(fd)
                if is_removed:
                    return False
                # An update put another file in its place between the opening and the look.
            except OSError as error:
                os.close(fd)
                self._warn_once(name, "registry_entry_unreadable", error)
                return False
        else:
            return name in self._entries  # its owner is busy updating: it lives
        self._drop_entry(name)
        self._entries[name] = entry
        return True

    def _remove_dead_file(self, path: Path, fd: int) -> bool:
        """Remove a dead owner's file: it was seen unlocked *before* it is seen in place.

        False if another file has taken the place meanwhile.
        """
        if _inode_of_path(path) != os.fstat(fd).st_ino:
            return False
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        LOG.info("registry_entry_removed", path=str(path), reason="its owner is gone")
        return True

    def _read_entry(self, name: str, fd: int) -> _Entry:
        inode = os.fstat(fd).st_ino
        raw = os.pread(fd, ENTRY_BYTES_MAX, 0)
        try:
            record = parse_json(_ENTRY_RECORD_ADAPTER, raw, name)
            instance = record.instance
            if (_entry_name(instance.id), instance.namespace) != (name, self._namespace):
                raise InvalidRequest("it belongs elsewhere", "id")
        except InvalidRequest as error:
            if raw:
                LOG.warning("registry_entry_unreadable", path=name, error=error.message)
            return _Entry(fd, inode, 0, None)
        return _Entry(fd, inode, record.order, instance)

    def _drop_entry(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            os.close(entry.fd)

    def _warn_once(self, name: str, event: str, reason: object) -> None:
        """Log it once, until the file is gone."""
        if name not in self._warned_names:
            self._warned_names.add(name)
            LOG.warning(event, path=name, error=str(reason))


class _FileWatch:
    """Polls by itself while `next` is awaited: no task, and errors reach the reader."""

    def __init__(
        self, registry: FileRegistry, view: _NamespaceView, poll_interval_s: float
    ) -> None:
        self._registry = registry
        self._view = view
        self._poll_interval_s = poll_interval_s
        self._current = view.poll()

    @property
    def current(self) -> Snapshot:
        return self._current

    async def next(self) -> Snapshot:
        while True:
            self._registry._check_open()
            latest = self._view.poll()
            if latest is not self._current:
                self._current = latest
                return latest
            await asyncio.sleep(self._poll_interval_s)


def _entry_name(instance_id: int) -> str:
    return f"{instance_id:016x}.json"


def _try_lock(fd: int) -> bool:
    try:
        _acquire_lock(fd)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: POSIX allows both.
        return False
    return True


def _acquire_lock(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WRITE_LOCK)


def _release_lock(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _UNLOCK)


def _is_locked(fd: int) -> bool:
    """Whether another open file description holds a lock; takes none itself."""
    lock_type: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WRITE_LOCK))[0]
    return lock_type != fcntl.F_UNLCK


def _inode_of_path(path: Path) -> int | None:
    try:
        return os.stat(path, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


def _write_atomically(path: Path, data: bytes, before_rename: Callable[[int], None]) -> int:
    """Let a file with `data` appear at `path` at once and whole; returns its descriptor.

    `before_rename` locks or syncs the file before it gets its name.
    """
    fd, temp_path = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        before_rename(fd)
        os.rename(temp_path, path)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp_path)
        raise
    return fd


def _withdraw_entry(path: Path) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | _OPEN_FLAGS)
    except FileNotFoundError:
        return
    try:
        os.ftruncate(fd, 0)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    finally:
        os.close(fd)


def _remove_abandoned_files(directory: Path) -> None:
    """Remove what owners left that died between writing and renaming."""
    with _map_os_errors(directory), contextlib.suppress(FileNotFoundError):
        for temp_path in directory.glob(".*.json.*"):
            if time.time() - temp_path.stat().st_mtime > ABANDONED_AFTER_S:
                temp_path.unlink()


def _store_card(path: Path, card: ModelCard) -> None:
    try:
        _load_card(path, card.checksum)
    except MeshError:
        # Not there, or damaged: content has its checksum for a name, so replacing is repairing.
        with _map_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(_write_atomically(path, encode_card(card), os.fsync))


def _load_card(path: Path, checksum: str) -> ModelCard:
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise card_not_found_error(checksum) from error
    except OSError as error:
        raise Unavailable(f"cannot read {path}: {error.strerror}") from error
    return decode_card(raw, checksum)


@contextlib.contextmanager
def _map_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror}") from error


def _detach_in_child(registry: FileRegistry | None) -> None:
    if registry is not None:
        registry.detach_leases()

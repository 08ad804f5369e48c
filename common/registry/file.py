"""The registry of a mesh on one host: files in a directory, and kernel locks for liveness.

    <path>/<namespace>/instances/<id, 16 hex digits>.json   one per incarnation, locked by its owner
    <path>/<namespace>/models/<slug>                        locked while a card is checked
    <path>/<namespace>/adapters/<key>.json                  one per desired adapter, signed likewise
    <path>/cards/<checksum>.json                            immutable

An entry's second line is its signature (`common/registry/signature.py`), empty without mesh token.
Folders have mode 0700 and files 0600. An entry is a regular file of at most ENTRY_BYTES_MAX.

Local file systems of Linux only. *The lock is the truth*: an instance lives as long as its owner
holds the write lock on its file. The kernel drops that lock with the process, however it ends: no
heartbeat, no time-out, no false death under load.

- Watchers *query* the lock (F_OFD_GETLK). A probe that took a shared lock would make an owner's
  own attempt fail.
- A file is written and locked under a hidden name, then renamed: a visible file is complete and
  locked. An update renames a new file over the old one and then unlocks the old one. Therefore an
  unlocked file that still has its name has a dead owner, and any process may remove it.
- The lock belongs to the open file description and would outlive its owner in a forked child (as
  with flock). O_CLOEXEC closes it in children that exec, a fork hook in those that do not.
- Watchers keep a descriptor of each entry. If the directory or an entry vanishes, they continue to
  query the locks, and each owner restores its own entry and card within a second.
  An *empty* file was withdrawn (`deregister` truncates before it unlinks), even if still locked.

A model's lock file holds the checksum of the card that was registered last. All live instances of
the model have it. A registration with the same one shares the lock and reads no other entry; any
other takes the lock for itself and reads the entries.

Instance files have a few hundred bytes; a poll takes 2 µs for each and runs on the event loop. It
follows a change of the folder (`folder_changes.py`); the end of an owner is one too. The least
pause between polls grows with their number, so that polls take the same share of a core in a fleet
of any size. Cards have megabytes and are synced to disk in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from common.errors import InvalidRequest, MeshError, Unavailable
from common.namespace import check_namespace
from common.registry.adapter_documents import AdapterDocuments
from common.registry.adapters import ADAPTER_BYTES_MAX, DesiredAdapter
from common.registry.card import CARD_BYTES_MAX, ModelCard, decode_card, encode_card, model_slug
from common.registry.file_lock import (
    acquire_lock,
    inode_of_path,
    make_private,
    open_regular,
    read_whole,
    release_lock,
    try_lock,
    write_atomically,
)
from common.registry.file_view import FolderView, encode_entry, entry_name
from common.registry.folder_changes import FolderChanges
from common.registry.instances import Instance, Snapshot, find_card_conflict
from common.registry.own_cards import OwnCards
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
from common.registry.signature import UNSIGNED, EntrySigner

# Between polls of a folder without reports of its changes by the kernel.
POLL_INTERVAL_S = 0.05
# Between polls of a folder with such reports.
RECHECK_INTERVAL_S = 1.0
# The kernel reports the end of an owner just before it releases the lock.
SETTLE_S = 0.005
POLL_S_PER_ENTRY = 0.0005
# A check takes less than a millisecond.
CARD_CHECK_WAIT_S = 5.0

_CHECKSUM = re.compile(r"[0-9a-f]{64}")

LOG = structlog.get_logger(__name__)


class FileRegistry:
    """`common.registry.registry.Registry` on the directory `path`, created if missing.

    signer: signs own entries; entries that it does not accept are not members.
    Owners check their entries and watches read when the kernel reports a change of the folder, and
    every RECHECK_INTERVAL_S. poll_interval_s: the least time between two reads, and at least
    POLL_S_PER_ENTRY for each entry; all of it where the kernel reports nothing.
    card_check_wait_s: how long `register` waits for the card check of another registration.
    After that it raises Unavailable: the other process is stopped or stuck.
    """

    def __init__(
        self,
        path: Path,
        *,
        signer: EntrySigner = UNSIGNED,
        poll_interval_s: float = POLL_INTERVAL_S,
        card_check_wait_s: float = CARD_CHECK_WAIT_S,
    ) -> None:
        self._path = path
        self._signer = signer
        self._poll_interval_s = poll_interval_s
        self._card_check_wait_s = card_check_wait_s
        self._views: dict[str, FolderView] = {}
        self._changes = FolderChanges()
        self._leases: dict[int, _FileLease] = {}
        self._cards = OwnCards(self._has_card, self._store_card)
        self._documents = AdapterDocuments(signer)
        self._reconcile_task: asyncio.Task[None] | None = None
        self._closed = False
        registry_ref = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _detach_in_child(registry_ref()))

    @property
    def is_reachable(self) -> bool:
        views, leases = tuple(self._views.values()), tuple(self._leases.values())
        return all(view.is_listed for view in views) and not any(one.is_lost for one in leases)

    async def register(self, instance: Instance) -> Lease:
        self._check_open()
        view = self._view(instance.namespace)
        if instance.id in self._leases or view.load_entry(entry_name(instance.id)):
            raise instance_exists_error(instance)
        lease = _FileLease(self, view.directory, instance, time.monotonic_ns())
        await self._publish_if_card_agrees(instance, lease.publish)
        self._leases[instance.id] = lease
        if self._reconcile_task is None:
            self._reconcile_task = asyncio.create_task(
                self._reconcile(), name="file-registry-reconcile"
            )
        return lease

    @asynccontextmanager
    async def watch(self, namespace: str) -> AsyncGenerator[Watch, None]:
        # Polls while `next` is awaited: no task, and errors reach the reader.
        self._view(namespace).polled_at = -math.inf
        yield Watch(lambda: self._read_recent(namespace), lambda: self._pause(namespace))

    async def snapshot(self, namespace: str) -> Snapshot:
        return self._read(namespace)

    async def put_card(self, card: ModelCard) -> None:
        self._check_open()
        await self._store_card(card)
        self._cards.add(card, (lease.instance for lease in self._leases.values()))

    async def get_card(self, checksum: str) -> ModelCard:
        self._check_open()
        return await asyncio.to_thread(_load_card, self._card_path(checksum), checksum)

    async def put_adapter(self, namespace: str, adapter: DesiredAdapter) -> None:
        self._check_open()
        path = self._adapter_folder(namespace) / f"{adapter.key}.json"
        document = self._documents.encode(namespace, adapter)
        await asyncio.to_thread(_store_document, path, document)

    async def stored_adapters(self, namespace: str) -> tuple[DesiredAdapter, ...]:
        self._check_open()
        documents = await asyncio.to_thread(_load_documents, self._adapter_folder(namespace))
        return self._documents.decode(namespace, documents)

    async def deregister(self, namespace: str, instance_id: int) -> None:
        self._check_open()
        path = self._view(namespace).directory / entry_name(instance_id)
        with _map_os_errors(path), contextlib.suppress(FileNotFoundError):
            os.close(open_regular(path, os.O_WRONLY | os.O_TRUNC))
            path.unlink()

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
        self._changes.close()
        # Raises if a bug ended the task earlier.
        if self._reconcile_task is not None and not self._reconcile_task.cancelled():
            self._reconcile_task.result()

    def detach_leases(self) -> None:
        """Closes without deregistering: in a forked child, the leases belong to the parent."""
        self._closed = True
        for lease in self._leases.values():
            lease.detach()
        self._leases.clear()

    def _read(self, namespace: str) -> Snapshot:
        self._check_open()
        return self._view(namespace).poll()

    def _read_recent(self, namespace: str) -> Snapshot:
        """Returns what `_read` does, but all watches share one poll in each half of a poll
        interval."""
        self._check_open()
        view = self._view(namespace)
        if time.monotonic() - view.polled_at < self._poll_s(view) / 2:
            return view.snapshot
        return view.poll()

    async def _pause(self, namespace: str) -> None:
        """Waits until a poll may find something new."""
        view = self._view(namespace)
        if not view.is_observed:
            await asyncio.sleep(self._poll_s(view))
            return
        if await self._changes.wait(view.change_count, RECHECK_INTERVAL_S):
            next_poll_at = view.polled_at + self._poll_s(view)
            await asyncio.sleep(max(SETTLE_S, next_poll_at - time.monotonic()))

    def _poll_s(self, view: FolderView) -> float:
        return max(self._poll_interval_s, POLL_S_PER_ENTRY * len(view.entries))

    def _check_open(self) -> None:
        if self._closed:
            raise registry_closed_error()

    def _view(self, namespace: str) -> FolderView:
        if namespace not in self._views:
            check_namespace(namespace)
            directory = self._path / namespace / "instances"
            self._views[namespace] = FolderView(directory, namespace, self._changes, self._signer)
        return self._views[namespace]

    def _adapter_folder(self, namespace: str) -> Path:
        check_namespace(namespace)
        return self._path / namespace / "adapters"

    def _card_path(self, checksum: str) -> Path:
        if not _CHECKSUM.fullmatch(checksum):
            raise InvalidRequest(f"{checksum!r} is not 64 hex digits", "card_checksum")
        return self._path / "cards" / f"{checksum}.json"

    async def _has_card(self, checksum: str) -> bool:
        path = self._card_path(checksum)
        with _map_os_errors(path):
            return path.exists()

    async def _store_card(self, card: ModelCard) -> None:
        await asyncio.to_thread(_store_card, self._card_path(card.checksum), card)

    async def _publish_if_card_agrees(
        self, instance: Instance, publish: Callable[[Instance], None]
    ) -> None:
        """Checks the card and publishes, under a lock against other cards of the model."""
        if not instance.card_checksum:
            publish(instance)
            return
        path = self._path / instance.namespace / "models" / model_slug(instance.model)
        deadline = time.monotonic() + self._card_check_wait_s
        while not self._try_publish(path, instance, publish):
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"another registration holds {path} for more than "
                    f"{self._card_check_wait_s:g} s",
                    self._poll_interval_s,
                )
            await asyncio.sleep(self._poll_interval_s / 10)

    def _try_publish(
        self, path: Path, instance: Instance, publish: Callable[[Instance], None]
    ) -> bool:
        self._check_open()  # Again: the wait for the lock may have been long.
        with _map_os_errors(path):
            make_private(path, 3)
            fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            if not try_lock(fd, shared=True):
                return False
            checksum = instance.card_checksum.encode()
            if os.pread(fd, len(checksum) + 1, 0) != checksum:
                if not try_lock(fd):
                    return False
                view = self._view(instance.namespace)
                view.poll()
                raise_if_card_conflicts(find_card_conflict(view.instances(), instance), instance)
                os.ftruncate(fd, 0)
                os.pwrite(fd, checksum, 0)
            publish(instance)
            return True
        finally:
            release_lock(fd)
            os.close(fd)

    async def _reconcile(self) -> None:
        while True:
            count = self._changes.count
            folders = {lease.directory for lease in self._leases.values()}
            if all(map(self._changes.observe, folders)):
                await self._changes.wait(count, RECHECK_INTERVAL_S)
            await asyncio.sleep(self._poll_interval_s)
            leases = tuple(self._leases.values())
            for lease in leases:
                lease.reconcile()
            await self._cards.restore(lease.instance for lease in leases)


class _FileLease:
    """A locked entry file. Invariant: `_fd` is None before it is published and once closed."""

    def __init__(
        self, registry: FileRegistry, directory: Path, instance: Instance, order: int
    ) -> None:
        self._registry = registry
        self.directory = directory
        self._path = directory / entry_name(instance.id)
        self.instance = instance
        self._order = order
        self._fd: int | None = None
        self._signature = ""
        # Whether the last attempt to restore or renew the entry failed.
        self.is_lost = False

    async def update(self, instance: Instance) -> None:
        check_same_incarnation(self.instance, instance)
        await self._registry._publish_if_card_agrees(instance, self._publish_update)

    async def close(self) -> None:
        self._registry._leases.pop(self.instance.id, None)
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                if inode_of_path(self._path) == os.fstat(fd).st_ino:
                    self._path.unlink()
        except OSError as error:
            # The file stays unlocked, and the next watcher removes it.
            LOG.warning("registry_entry_left_behind", path=str(self._path), error=str(error))
        finally:
            release_lock(fd)
            os.close(fd)

    def detach(self) -> None:
        """Closes the descriptor and leaves the file alone."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def publish(self, instance: Instance) -> None:
        """Replaces the entry, or keeps it and raises Unavailable, or InvalidRequest if too
        large."""
        signature, content = encode_entry(self._order, instance, self._registry._signer)
        with _map_os_errors(self._path):
            make_private(self._path, 3)
            fd = write_atomically(self._path, content, acquire_lock)
        self.detach()
        self._fd = fd
        self._signature = signature
        self.instance = instance

    def reconcile(self) -> None:
        """Restores a lost entry, renews an old signature; logs the first failure and the
        recovery."""
        if self._fd is None:
            return
        try:
            own_stat = os.fstat(self._fd)
            is_present = own_stat.st_size > 0 and inode_of_path(self._path) == own_stat.st_ino
            is_old = self._registry._signer.is_old(self._signature)
            if is_present and not is_old:
                self.is_lost = False
                return
            self.publish(self.instance)
            if is_present:
                self.is_lost = False
                return
        except (OSError, Unavailable) as error:
            if not self.is_lost:
                LOG.warning("registration_lost", path=str(self._path), error=str(error))
            self.is_lost = True
        else:
            LOG.info("registration_restored", path=str(self._path))
            self.is_lost = False

    def _publish_update(self, instance: Instance) -> None:
        # Checked here, not in update(): the lease may end during the wait for the card check.
        if self._fd is None:
            raise lease_closed_error(self.instance)
        self.publish(instance)


def _store_document(path: Path, content: bytes) -> None:
    with _map_os_errors(path):
        make_private(path, 3)
        os.close(write_atomically(path, content, os.fsync))


def _load_documents(folder: Path) -> list[tuple[str, bytes]]:
    """Returns name without suffix, and content, of each document of a folder. A document that is
    removed meanwhile is left out."""
    found = []
    try:
        with os.scandir(folder) as items:
            names = [item.name for item in items]
        for name in names:
            key, suffix = os.path.splitext(name)
            if suffix != ".json" or name.startswith("."):
                continue
            with contextlib.suppress(FileNotFoundError):
                fd = open_regular(folder / name, os.O_RDONLY)
                try:
                    found.append((key, read_whole(fd, ADAPTER_BYTES_MAX)))
                finally:
                    os.close(fd)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Unavailable(f"cannot read {folder}: {error.strerror}") from error
    return found


def _store_card(path: Path, card: ModelCard) -> None:
    try:
        _load_card(path, card.checksum)
    except MeshError:
        # Missing or damaged. The name is the content's checksum, so a write repairs it.
        with _map_os_errors(path):
            make_private(path, 2)
            os.close(write_atomically(path, encode_card(card), os.fsync))


def _load_card(path: Path, checksum: str) -> ModelCard:
    try:
        fd = open_regular(path, os.O_RDONLY)
        try:
            raw = read_whole(fd, CARD_BYTES_MAX)
        finally:
            os.close(fd)
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

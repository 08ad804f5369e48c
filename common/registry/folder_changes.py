"""Notices that files in a folder of this host appear, change, vanish or lose their owner.

The kernel reports these events (inotify), also that a process with an open file has ended. An event
is only a reason to read the folder now and not later.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from pathlib import Path

_CREATED, _DELETED, _WRITER_CLOSED = 0x100, 0x200, 0x8
_MOVED, _FOLDER_GONE = 0x40 | 0x80, 0x400 | 0x800
_EVENTS = _CREATED | _DELETED | _WRITER_CLOSED | _MOVED | _FOLDER_GONE
# Any number of events; their content is not read.
_READ_BYTES = 1 << 16


class FolderChanges:
    """The changes of all observed folders. count: how many reports there were so far. Without
    inotify, or when a limit of the kernel is reached, nothing is observed."""

    def __init__(self) -> None:
        self.count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd: int | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._is_available = hasattr(self._libc, "inotify_init1")
        self._waiters: set[asyncio.Future[None]] = set()

    def observe(self, folder: Path) -> bool:
        """Returns whether changes of the folder, as it is now, are noticed from here on."""
        if self._fd is None and not self._open():
            return False
        path = os.fsencode(folder)
        return bool(self._libc.inotify_add_watch(self._fd, path, _EVENTS) >= 0)

    async def wait(self, count: int, timeout_s: float) -> bool:
        """Waits until more than `count` changes were reported; False after `timeout_s`."""
        if self.count == count:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait((waiter,), timeout=timeout_s)
            finally:
                self._waiters.discard(waiter)
        return self.count != count

    def close(self) -> None:
        fd, self._fd, self._is_available = self._fd, None, False
        if fd is not None:
            assert self._loop is not None, "set together"
            if not self._loop.is_closed():
                self._loop.remove_reader(fd)
            os.close(fd)

    def _open(self) -> bool:
        if not self._is_available:
            return False
        fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if fd < 0:
            self._is_available = False
            return False
        self._fd, self._loop = fd, asyncio.get_running_loop()
        self._loop.add_reader(fd, self._on_readable)
        return True

    def _on_readable(self) -> None:
        assert self._fd is not None, "the reader was removed"
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, _READ_BYTES)
        self.count += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

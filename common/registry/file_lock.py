"""Files that live as long as a lock on them: open file description locks of Linux, fcntl(2).

A registry folder is private to one user. Names in it may still be planted, for example in a folder
that was made with a wide umask: files are opened without following links or waiting for a peer
(a FIFO), and only regular files are read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600

# struct flock of 64-bit Linux: type, whence, start, length (0 = all), pid (0 for such locks).
_FLOCK = struct.Struct("hhqqi4x")
_WRITE_LOCK = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_READ_LOCK = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
_UNLOCK = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)


def open_regular(path: Path, flags: int) -> int:
    """Returns a descriptor of a regular file. Raises OSError, for links and special files too."""
    fd = os.open(path, flags | _OPEN_FLAGS, _FILE_MODE)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def read_whole(fd: int, bytes_max: int) -> bytes:
    """Returns the content of a file. Raises OSError, before it reads, if that exceeds
    `bytes_max`."""
    size = os.fstat(fd).st_size
    if size > bytes_max:
        raise OSError(errno.EFBIG, f"file too large: {size}/{bytes_max} bytes")
    return os.pread(fd, size, 0)


def make_private(file: Path, depth: int) -> None:
    """Creates the `depth` innermost folders of a file for this user only; own ones become so."""
    for folder in reversed(file.parents[:depth]):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, _FOLDER_MODE)
        found = folder.stat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if is_own and stat.S_IMODE(found.st_mode) != _FOLDER_MODE:
            folder.chmod(_FOLDER_MODE)


def acquire_lock(fd: int) -> None:
    """Takes the write lock. Raises OSError if another open file description holds one."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WRITE_LOCK)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Takes the write or (`shared`) read lock, or turns the one into the other, if no lock of
    another description prevents it; returns whether none did.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _READ_LOCK if shared else _WRITE_LOCK)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: POSIX allows both.
        return False
    return True


def release_lock(fd: int) -> None:
    """Releases the lock, also where a child process shares the description."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _UNLOCK)


def is_locked(fd: int) -> bool:
    """Returns whether another open file description holds a lock. Takes none itself."""
    lock_type: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WRITE_LOCK))[0]
    return lock_type != fcntl.F_UNLCK


def inode_of_path(path: Path) -> int | None:
    """Returns the inode under a name, None if there is none."""
    try:
        return os.stat(path, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


def write_atomically(path: Path, data: bytes, before_rename: Callable[[int], None]) -> int:
    """Replaces the file in one step; returns its descriptor. before_rename: locks or syncs it."""
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

"""Functions that trials run in tests."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path


def prepare() -> None:
    """Called by the process that forks, before the first trial."""


def double(value: int) -> int:
    return 2 * value


def length(text: str) -> int:
    return len(text)


def refuse(text: str) -> None:
    raise ValueError(text)


def loop() -> None:
    while True:
        pass


def wait(path: str) -> None:
    """Writes its process id, and waits for its end."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.close(descriptor)
    os.symlink(str(os.getpid()), f"{path}.pid")
    # Sleep: it stands for a library that waits.
    time.sleep(600.0)


def allocate(size: int) -> int:
    return len(bytearray(size))


def crash() -> None:
    sys.setrecursionlimit(1_000_000)
    ctypes.string_at(0)


def text_of(size: int) -> str:
    return "x" * size


def raise_panic() -> None:
    raise BaseException("a panic")  # as those of Rust's libraries


def write_file(path: str) -> None:
    Path(path).write_text("text")

"""Ports for a program that binds them itself, up to a minute later: an engine, a Consul agent.

What the system gives away by itself (`ip_local_port_range`) may be somebody's by then. So these are
below it, and every process begins to look at a place of its own.
"""

from __future__ import annotations

import os
import socket
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Final

FIRST: Final = 10_240
# Exclusive; below what Linux gives away by itself, and below SGLang's own.
LAST: Final = 30_000
# Ports between the places where two processes with neighbouring ids begin.
STRIDE: Final = 16
# Where the system leaves less room than this below its own range, that range is ignored.
ROOM_MIN: Final = 4096

_LOCAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, *, start: int | None = None) -> int:
    """The first of `count` TCP ports in a row that were free a moment ago, on loopback.

    start: where to look first, modulo the range; by default this process's own place. Raises
    OSError when there are none, ValueError for a count below 1 or above STRIDE's hundredfold.
    """
    if not 1 <= count <= 100 * STRIDE:
        raise ValueError(f"count: {count} is not in 1..{100 * STRIDE}")
    last = min(LAST, _ephemeral_from())
    if last - FIRST < ROOM_MIN:
        last = LAST
    span = last - FIRST - count
    begin = _own_place() if start is None else start
    for step in range(0, span, count):
        base = FIRST + (begin + step) % span
        if _are_free(base, count):
            return base
    raise OSError(f"no {count} free ports in a row from {FIRST} to {last}")


def _own_place() -> int:
    return zlib.crc32(socket.gethostname().encode()) % LAST + os.getpid() * STRIDE


def _ephemeral_from() -> int:
    try:
        return int(_LOCAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return LAST  # not Linux, or its files are hidden: its usual range is above


def _are_free(base: int, count: int) -> bool:
    with ExitStack() as held:
        try:
            for port in range(base, base + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

"""Free ports for a program that binds them up to a minute later: an engine, a Consul agent.

They are below the range of automatically assigned ports (`ip_local_port_range`), because another
process may receive one of those meanwhile. Each process starts its search at an offset of its own.
"""

from __future__ import annotations

import os
import socket
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Final

PORT_MIN: Final = 10_240
# Exclusive; below the automatic range of Linux and the ports of SGLang.
PORT_LIMIT: Final = 30_000
# Distance between the first candidates of two processes with consecutive ids.
PROCESS_STRIDE: Final = 16
# If the system leaves fewer ports than this below the automatic range, the range is ignored.
RANGE_SIZE_MIN: Final = 4096

_EPHEMERAL_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, *, start: int | None = None) -> int:
    """Returns the first of `count` consecutive TCP ports that are free on loopback.

    start: offset of the first candidate, modulo the range; None for the offset of this process.
    Raises OSError if there are none, ValueError for a count outside 1..100 * PROCESS_STRIDE.
    """
    if not 1 <= count <= 100 * PROCESS_STRIDE:
        raise ValueError(f"count: {count} is not in 1..{100 * PROCESS_STRIDE}")
    limit = min(PORT_LIMIT, _ephemeral_range_start())
    if limit - PORT_MIN < RANGE_SIZE_MIN:
        limit = PORT_LIMIT
    start_count = limit - PORT_MIN - count
    if start is None:
        host_offset = zlib.crc32(socket.gethostname().encode()) % PORT_LIMIT
        start = host_offset + os.getpid() * PROCESS_STRIDE
    for step in range(0, start_count, count):
        base = PORT_MIN + (start + step) % start_count
        if _are_ports_free(base, count):
            return base
    raise OSError(f"no {count} consecutive free ports from {PORT_MIN} to {limit}")


def _ephemeral_range_start() -> int:
    try:
        return int(_EPHEMERAL_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return PORT_LIMIT  # Not Linux, or /proc is hidden: the usual range is above.


def _are_ports_free(base: int, count: int) -> bool:
    with ExitStack() as open_sockets:
        try:
            for port in range(base, base + count):
                open_sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

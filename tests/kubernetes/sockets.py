"""The TCP connections of processes, as Linux shows them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_ESTABLISHED = "01"
Address = tuple[str, int]


def connections() -> Iterator[tuple[int, Address]]:
    """Yields the inode and the remote address of each connection of this host (IPv4, and IPv4 in
    IPv6)."""
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _ESTABLISHED and (remote := _address(fields[2])):
                yield int(fields[9]), remote


def owners(names: Mapping[int, str]) -> dict[int, str]:
    """Returns the name of the process of each socket, by inode. names: by process id; children
    belong to their parent."""
    found = {}
    for pid, name in _with_children(names).items():
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if target.startswith("socket:["):
                        found[int(target[8:-1])] = name
    return found


def _with_children(names: Mapping[int, str]) -> dict[int, str]:
    found, open_ids = dict(names), list(names)
    while open_ids:  # Ends: a process has one parent.
        pid = open_ids.pop()
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{task}/children").read_text()
                for child in map(int, children.split()):
                    found[child] = found[pid]
                    open_ids.append(child)
    return found


def _address(text: str) -> Address | None:
    host, port = text.split(":")
    if len(host) == 32:
        if host[:24] != "0000000000000000FFFF0000":
            return None
        host = host[24:]
    return socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)

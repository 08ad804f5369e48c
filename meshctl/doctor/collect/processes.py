"""Processes of this host, from /proc: which one listens on a port, its state, limits, settings.

Descriptors and variables of other users' processes cannot be read; such facts are absent.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from common.runtime.config import PREFIX
from meshctl.doctor.facts import ProcessFacts

PROC = Path("/proc")
# Of a line of /proc/net/tcp.
_LISTENING = "0A"
_SERVICE_MODULE = re.compile(r"(frontend|router|indexer|worker)_svc")
_OPEN_FILES = re.compile(r"^Max open files\s+(\d+)", re.MULTILINE)


def find_listeners(ports: Iterable[int]) -> dict[int, int]:
    """Returns the process id of a listener by port, of those ports that have one.

    Of several processes with the same socket, the first one is likely the one that opened it.
    """
    wanted = set(ports)
    port_by_inode = {inode: port for inode, port in _listening_sockets().items() if port in wanted}
    found: dict[int, int] = {}
    for folder in PROC.iterdir() if port_by_inode else ():
        if not folder.name.isdecimal():
            continue
        for inode in _socket_inodes(folder / "fd"):
            if (port := port_by_inode.get(inode)) is not None:
                pid = int(folder.name)
                found[port] = min(found.get(port, pid), pid)
    return found


def read_process(pid: int) -> ProcessFacts | None:
    """Returns what can be read about a process; None if it has ended."""
    folder = PROC / str(pid)
    words = _read_words(folder / "cmdline")
    try:
        # The name of the program is in brackets and may contain blanks and brackets.
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return ProcessFacts(
        pid=pid,
        command=describe_command(words),
        state=state,
        descriptors=_count_descriptors(folder),
        descriptor_limit=_read_descriptor_limit(folder),
        settings=read_settings(words, _read_environ(folder)),
        folder=_read_folder(folder),
    )


def describe_command(words: list[str]) -> str:
    """Returns the program of a command line and its module or script: other words may be
    secrets."""
    if not words:
        return "a process of another user"
    shown = [Path(words[0]).name]
    if words[1:2] == ["-m"]:
        shown += words[1:3]
    elif words[1:2] and words[1].endswith(".py"):
        shown.append(words[1])
    return " ".join(shown)


def read_settings(words: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of a service by field name, from its command line and its variables.

    Empty if the command line is not that of a service. A flag has precedence over the variable of
    the service, and this over the mesh-wide one.
    """
    modules = [module for word in words if (module := _SERVICE_MODULE.search(word))]
    if not modules:
        return {}
    service = modules[0][1]
    found: dict[str, str] = {}
    for prefix in (PREFIX, f"{PREFIX}{service.upper()}_"):
        for name, text in environ.items():
            if name.startswith(prefix):
                found[name.removeprefix(prefix).lower()] = text
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, text = word.partition("=")
        if flag.startswith("--"):
            name = flag.removeprefix("--").replace("-", "_")
            found[name] = text if equals else following
    return found


def _listening_sockets() -> dict[str, int]:
    """Returns the port of each listening TCP socket, by inode."""
    found = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / name).read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == _LISTENING:
                    found[parts[9]] = int(parts[1].rpartition(":")[2], 16)
    return found


def _socket_inodes(folder: Path) -> Iterable[str]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    yield target[8:-1]


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _read_environ(folder: Path) -> dict[str, str]:
    pairs = (word.partition("=") for word in _read_words(folder / "environ"))
    return {name: text for name, _, text in pairs if name.startswith(PREFIX)}


def _count_descriptors(folder: Path) -> int | None:
    try:
        return len(os.listdir(folder / "fd"))
    except OSError:
        return None


def _read_descriptor_limit(folder: Path) -> int | None:
    with contextlib.suppress(OSError):
        if found := _OPEN_FILES.search((folder / "limits").read_text()):
            return int(found[1])
    return None


def _read_folder(folder: Path) -> Path:
    try:
        return Path(os.readlink(folder / "cwd"))
    except OSError:
        return Path()

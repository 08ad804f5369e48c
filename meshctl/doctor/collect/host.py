"""Facts about this host: folders, files of secrets, ports, limits."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import socket
import stat
import tempfile
from pathlib import Path

from common.api_keys import parse_keys
from common.errors import InvalidRequest
from common.runtime.build import build_id
from common.runtime.hosts import WILDCARD_HOSTS, is_loopback
from meshctl.doctor.facts import FileFacts, FolderFacts, HostFacts

_MB = 1 << 20


def read_host() -> HostFacts:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostFacts(
        build=build_id(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        cores=len(os.sched_getaffinity(0)),
        descriptor_limit=1 << 30 if hard == resource.RLIM_INFINITY else hard,
    )


def read_folder(path: Path, use: str) -> FolderFacts:
    """Returns the space of a folder, and whether a file can be written there. If it does not exist,
    the folder in which it would be created counts."""
    existing = next(
        folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir()
    )
    error = ""
    try:
        # Without a name, where the file system can do that: watches of the folder see nothing.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
            file.flush()
    except OSError as raised:
        error = raised.strerror or str(raised)
    free_mb = None
    with contextlib.suppress(OSError):
        system = os.statvfs(existing)
        free_mb = system.f_bavail * system.f_frsize / _MB
    return FolderFacts(existing, use, error, free_mb)


def read_secret_file(path: Path, setting: str, *, has_keys: bool) -> FileFacts:
    """Returns the mode of a file of secrets, and why it cannot be used. has_keys: whether it is a
    file of API keys, which is also parsed."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        raw = path.read_bytes()
        if has_keys:
            parse_keys(raw)
    except FileNotFoundError:
        return FileFacts(path, setting)
    except OSError as error:
        return FileFacts(path, setting, None, error.strerror or str(error))
    except InvalidRequest as error:
        return FileFacts(path, setting, mode, error.message)
    return FileFacts(path, setting, mode)


def is_local(host: str) -> bool:
    """Returns whether an address is one of this host."""
    bare = host.strip("[]")
    if is_loopback(bare) or host in WILDCARD_HOSTS:
        return True
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(bare, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False

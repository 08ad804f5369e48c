"""One-time links for logging in, as files of a private folder.

A program that may write into the folder, which belongs to the user of the mesh, may create a link:
it writes an empty file, named by the hash of a token. The first login with the token removes the
file. So links need no call, no secret of both programs, and no text of a token on the disk.
"""

from __future__ import annotations

import os
import stat
from hashlib import sha256
from pathlib import Path

from common.errors import PermissionDenied

# Of both programs, if their settings name no other one.
DEFAULT_FOLDER = Path(".run/console")
# In which a link must be used.
LINK_S = 600.0
# Unused links; more remove the oldest ones.
LINKS_MAX = 32

_SUFFIX = ".link"
# Names the address of the server, for programs that create links.
_URL_FILE = "url"


def open_folder(folder: Path) -> None:
    """Creates a folder that only its user can read. Raises OSError, and PermissionDenied if other
    users can write into an existing one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        text = f"{folder} must belong to this user, and others must not write into it"
        raise PermissionDenied(f"{text}; chmod 700 {folder}", field="login_path")


def write_url(folder: Path, url: str) -> None:
    """States where the server is. Raises OSError."""
    new = folder / f".{_URL_FILE}"
    new.write_text(url)
    new.replace(folder / _URL_FILE)


def remove_url(folder: Path, url: str) -> None:
    """Removes what `write_url` wrote, unless another server has replaced it."""
    if read_url(folder) == url:
        (folder / _URL_FILE).unlink(missing_ok=True)


def read_url(folder: Path) -> str:
    """Returns where the server is; "" if none serves this folder."""
    try:
        return (folder / _URL_FILE).read_text()
    except OSError:
        return ""


def create_link(folder: Path, url: str, token: str, now_s: float) -> str:
    """Returns a link that logs in once, within LINK_S. Raises OSError and PermissionDenied.

    - url: of the server.
    - token: random, of 256 bits.
    - now_s: Unix seconds.
    """
    open_folder(folder)
    links = sorted(_links(folder), key=_written_s)
    for old in links:
        if now_s - _written_s(old) > LINK_S:
            old.unlink(missing_ok=True)
    for old in links[: max(0, len(links) - LINKS_MAX + 1)]:
        old.unlink(missing_ok=True)
    path = _path(folder, token)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    os.utime(path, (now_s, now_s))
    return f"{url}/login?token={token}"


def redeem(folder: Path, token: str, now_s: float) -> bool:
    """Returns whether a token is that of an unused link; it is used then. now_s: Unix seconds."""
    path = _path(folder, token)
    try:
        is_valid = 0 <= now_s - path.stat().st_mtime <= LINK_S
        # Of two logins at a time, the second one finds no file.
        path.unlink()
    except OSError:
        return False
    return is_valid


def _links(folder: Path) -> list[Path]:
    return list(folder.glob(f"*{_SUFFIX}"))


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _path(folder: Path, token: str) -> Path:
    return folder / f"{sha256(token.encode()).hexdigest()}{_SUFFIX}"

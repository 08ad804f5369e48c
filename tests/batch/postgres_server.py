"""A PostgreSQL server of Debian in a folder of its own, which a test may kill and start again."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import IO

from tests.kit.waiting import wait_for

INSTALL = "apt-get install postgresql"
# Root may not run the server.
_USER = "postgres"
_START_S = 60.0


class NoServer(RuntimeError):
    """The server is not installed."""


def find_programs() -> Path:
    """Returns the folder of the newest server. Raises NoServer with the command to install it."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3])
    )
    if not found:
        raise NoServer(f"PostgreSQL is missing: {INSTALL}")
    return found[-1].parent


class PostgresServer:
    """A server on a port of this host, without a password."""

    def __init__(self, folder: Path, port: int) -> None:
        self._programs = find_programs()
        self._folder, self._port = folder, port
        self._user = _USER if os.getuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        user = self._user or pwd.getpwuid(os.getuid()).pw_name
        return f"postgresql://{user}@127.0.0.1:{self._port}/postgres"

    @property
    def pid(self) -> int:
        assert self._process is not None, "started"
        return self._process.pid

    def create(self) -> None:
        """Creates the files of the server."""
        self._folder.mkdir()
        if self._user is not None:
            shutil.chown(self._folder, self._user, self._user)
            for parent in self._folder.parents:
                if parent.stat().st_uid == 0 and parent != Path("/tmp"):
                    parent.chmod(parent.stat().st_mode | 0o011)
        subprocess.run(
            [self._programs / "initdb", "-D", self._folder / "data", "-A", "trust", "-E", "UTF8"],
            check=True,
            stdout=subprocess.DEVNULL,
            user=self._user,
            cwd="/",
        )

    def start(self) -> None:
        """Starts the server, and waits until it accepts connections."""
        if self._log is None:
            self._log = (self._folder / "log").open("ab")
        self._process = subprocess.Popen(
            [
                *(self._programs / "postgres", "-D", self._folder / "data"),
                *("-p", str(self._port), "-h", "127.0.0.1", "-k", self._folder),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            user=self._user,
            cwd="/",
        )
        wait_for(self._is_up, f"PostgreSQL accepts connections: {self._folder / 'log'}", _START_S)

    def kill(self) -> None:
        """SIGKILL to the server; its processes end by that."""
        assert self._process is not None, "started"
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def restart(self) -> None:
        """Starts the server after `kill`, once the processes of the one before have ended."""

        def started() -> bool:
            try:
                self.start()
            except AssertionError:
                return False
            return True

        wait_for(started, "PostgreSQL starts again", _START_S)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
        if self._log is not None:
            self._log.close()

    def _is_up(self) -> bool:
        assert self._process is not None, "started"
        if self._process.poll() is not None:
            # The processes of a killed server may still hold its memory.
            raise AssertionError("PostgreSQL has ended at its start")
        try:
            socket.create_connection(("127.0.0.1", self._port), 1.0).close()
        except OSError:
            return False
        return True

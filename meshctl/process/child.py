"""Child processes: started on a leash, heard through their ready line, ended with all their own.

Every child leads a session of its own: a terminal's Ctrl-C reaches the supervisor only, which then
ends the children in order, and a kill reaches all that the child started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from common.registry.instances import parse_json
from meshctl.process import parent_guard as leash
from meshctl.services import ServiceSpec

LOG_BYTES_MAX = 16 << 20
# A start that failed may end with a long traceback in one line.
TAIL_BYTES = 1 << 16
TAIL_LINES = 20
READY_BYTES_MAX = 1 << 16

_PARENT_GUARD = str(Path(leash.__file__).resolve())


@dataclass(frozen=True, slots=True)
class ReadyLine:
    """What a service says once it is ready (common/service/lifecycle.py writes it).

    addresses: `grpc` -> `host:port`, of a frontend also `http`.
    """

    name: str
    pid: int
    instance_id: str
    addresses: Mapping[str, str] = field(default_factory=dict)


_READY_LINE: TypeAdapter[ReadyLine] = TypeAdapter(ReadyLine)


def parse_ready_line(raw: bytes) -> ReadyLine:
    """Raises InvalidRequest, naming what is missing or wrong."""
    return parse_json(_READY_LINE, raw, "ready line")


def with_parent_guard(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` until this process dies."""
    return [sys.executable, "-I", "-S", _PARENT_GUARD, str(os.getpid()), *command]


class ChildProcess:
    """A running child. Make it from the main thread (see parent_guard.py), inside a running loop.

    ready_fd: the read end of the pipe for its ready line, owned by this object.
    """

    def __init__(self, popen: subprocess.Popen[bytes], ready_fd: int) -> None:
        self._popen = popen
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._ready_line = bytearray()
        self._ready_line_done = asyncio.Event()
        self._ready_fd = ready_fd
        os.set_blocking(ready_fd, False)
        self._loop.add_reader(ready_fd, self._read_line)
        # No thread that waits, no SIGCHLD handler, and we say when the pid is let go.
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def ready(self) -> ReadyLine | None:
        """The ready line; None if it never came. Raises InvalidRequest if it makes no sense."""
        await self._ready_line_done.wait()
        return parse_ready_line(bytes(self._ready_line)) if self._ready_line else None

    async def wait(self) -> int:
        """The exit status, once it ended; -n: by signal n."""
        await self._ended.wait()
        return self._popen.returncode

    def terminate(self) -> None:
        """SIGTERM to the child, which is to end what it started."""
        if not self._ended.is_set():
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the child and all of its session that did not leave its process group."""
        if not self._ended.is_set():
            self._kill_group()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Not yet waited for, so the number of the group cannot have gone to somebody else.
        self._kill_group()
        self._popen.wait()
        self._ended.set()
        # What it wrote just before is still in the pipe.
        self._read_line()
        self._end_line()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _read_line(self) -> None:
        if self._ready_line_done.is_set():
            return
        try:
            part = os.read(self._ready_fd, READY_BYTES_MAX)
        except BlockingIOError:
            return
        self._ready_line += part
        if not part or b"\n" in part or len(self._ready_line) > READY_BYTES_MAX:
            self._end_line()

    def _end_line(self) -> None:
        if not self._ready_line_done.is_set():
            self._ready_line_done.set()
            self._loop.remove_reader(self._ready_fd)
            os.close(self._ready_fd)


class ProcessLauncher:
    """Starts services as `python -m MODULE`; their output goes to LOG_DIR/NAME.log.

    A log of an earlier run is kept as NAME.log.1. A log is bounded at restarts only (one over
    LOG_BYTES_MAX is put aside as well): in between the service writes to the file by itself.
    """

    def __init__(self, log_dir: Path, environ: Mapping[str, str]) -> None:
        self._log_dir = log_dir
        self._environ = dict(environ)
        self._log_offsets: dict[str, int] = {}

    def log_path(self, name: str) -> Path:
        """The log of the service `name`."""
        return self._log_dir / f"{name}.log"

    def start(self, spec: ServiceSpec) -> ChildProcess:
        """Raises OSError if there is no process, descriptor or log to be had."""
        read_end, write_end = os.pipe()
        try:
            command = [sys.executable, "-m", spec.module, *spec.args, "--ready-fd", str(write_end)]
            popen = self._popen(spec.name, with_parent_guard(command), write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return ChildProcess(popen, read_end)

    def tail(self, name: str) -> list[str]:
        """The last lines that the service's last start wrote, at most TAIL_LINES."""
        try:
            with self.log_path(name).open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_offsets.get(name, 0), end - TAIL_BYTES))
                lines = log.read(TAIL_BYTES).decode(errors="replace").splitlines()
        except OSError as error:
            return [f"(its log cannot be read: {error})"]
        return lines[-TAIL_LINES:]

    def _popen(self, name: str, command: Sequence[str], fd: int) -> subprocess.Popen[bytes]:
        path = self.log_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        needs_rotation = name not in self._log_offsets or path.stat().st_size > LOG_BYTES_MAX
        if needs_rotation and path.exists():
            path.replace(path.with_name(f"{path.name}.1"))
        with path.open("ab") as log:
            self._log_offsets[name] = log.tell()
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(fd,),
                env=self._environ,
                start_new_session=True,
            )

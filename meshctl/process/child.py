"""Child processes: started under a parent guard, observed by their ready line, killed as a group.

Each child leads a session of its own. A Ctrl-C on the terminal reaches only the supervisor, which
stops the children in order, and a kill reaches all processes that the child started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from common.registry.instances import parse_json
from common.runtime.ready_line import ReadyLineReader
from meshctl.process import parent_guard
from meshctl.process.environment import service_environment
from meshctl.process.listeners import Listeners
from meshctl.services import ServiceSpec, process_count

LOG_BYTES_MAX = 16 << 20
# A crash may end with a long traceback in one line.
TAIL_BYTES = 1 << 16
TAIL_LINES = 20

_PARENT_GUARD = str(Path(parent_guard.__file__).resolve())


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The line that a service writes when its start has failed, before it exits."""

    error: str


@dataclass(frozen=True, slots=True)
class ReadyLine:
    """The line that a service writes when it is ready (see common/service/lifecycle.py).

    addresses: `grpc` -> `host:port`; of a frontend also `http`.
    """

    name: str
    pid: int
    instance_id: str
    addresses: Mapping[str, str] = field(default_factory=dict)


_READY_LINE: TypeAdapter[ReadyLine] = TypeAdapter(ReadyLine)
_START_FAILED: TypeAdapter[StartFailed] = TypeAdapter(StartFailed)


def with_parent_guard(command: Sequence[str]) -> list[str]:
    """Returns the command line that runs `command` and stops it when this process dies."""
    return [sys.executable, "-I", "-S", _PARENT_GUARD, str(os.getpid()), *command]


class ChildProcess:
    """A running child. Create it on the main thread (see parent_guard.py)."""

    def __init__(self, popen: subprocess.Popen[bytes], ready_fd: int) -> None:
        """Observes a started process.

        ready_fd: the read end of the pipe for the ready line; this object closes it.
        """
        self.pid = popen.pid
        self._popen = popen
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._ready_line = ReadyLineReader(ready_fd)
        self._ready_line_done = asyncio.Event()
        self._loop.add_reader(ready_fd, self._read_line)
        # A pidfd needs no waiting thread and no SIGCHLD handler, and the pid is reaped only here.
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    async def ready(self) -> ReadyLine | StartFailed | None:
        """Returns the line of the service; None if it exited without one. Raises InvalidRequest."""
        await self._ready_line_done.wait()
        raw = self._ready_line.received
        if not raw:
            return None
        if raw.startswith(b'{"error"'):
            return parse_json(_START_FAILED, raw, "ready line")
        return parse_json(_READY_LINE, raw, "ready line")

    async def wait(self) -> int:
        """Returns the exit status after the child exits; -n: killed by signal n."""
        await self._ended.wait()
        return self._popen.returncode

    def terminate(self) -> None:
        """Sends SIGTERM to the child, which stops the processes that it started."""
        if not self._ended.is_set():
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the process group of the child."""
        if not self._ended.is_set():
            self._kill_group()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # The child is not reaped yet, so its group id cannot belong to another process.
        self._kill_group()
        self._popen.wait()
        self._ended.set()
        # Its last output may still be in the pipe.
        self._read_line()
        self._end_line()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _read_line(self) -> None:
        if not self._ready_line_done.is_set() and self._ready_line.read():
            self._end_line()

    def _end_line(self) -> None:
        if not self._ready_line_done.is_set():
            self._ready_line_done.set()
            self._loop.remove_reader(self._ready_line.fd)
            self._ready_line.close()


class ProcessLauncher:
    """Starts services as `python -m MODULE`; their output goes to LOG_DIR/NAME.log.

    The log of an earlier run is kept as NAME.log.1. Logs rotate only at restarts, also above
    LOG_BYTES_MAX: a running service writes to the file directly.
    """

    def __init__(
        self,
        log_dir: Path,
        environ: Mapping[str, str],
        pass_environ: Sequence[str] = (),
        listeners: Listeners | None = None,
    ) -> None:
        """
        - environ: of this process; a service receives the part that it needs.
        - pass_environ: see `UpOptions`.
        - listeners: from which frontends accept.
        """
        self._log_dir = log_dir
        self._environ = environ
        self._pass_environ = pass_environ
        self._listeners = listeners
        self._log_offsets: dict[str, int] = {}

    def log_path(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    def start(self, spec: ServiceSpec) -> ChildProcess:
        """Starts a service. Raises OSError without a process, a descriptor, a port or a log."""
        fds = [listener.fileno() for listener in self._open_port(spec)]
        read_end, write_end = os.pipe()
        try:
            command = [sys.executable, "-m", spec.module, *spec.args, "--ready-fd", str(write_end)]
            if fds:
                command += ["--http-fd", ",".join(map(str, fds))]
            environ = service_environment(self._environ, spec.module, self._pass_environ)
            environ = spec.with_environ(environ)
            popen = self._popen(spec.name, with_parent_guard(command), environ, [*fds, write_end])
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return ChildProcess(popen, read_end)

    def _open_port(self, spec: ServiceSpec) -> Sequence[socket.socket]:
        """Returns the sockets that a process accepts from. Raises CannotListen."""
        if self._listeners is None:
            return ()
        if spec.binds_port:
            self._listeners.close(spec.name)
            return ()
        if spec.http_port is not None:
            self._listeners.add(spec.name, spec.http_port)
        return self._listeners.open(spec.name, process_count(spec, self._environ))

    def rotate_log(self, name: str) -> None:
        """Gives the next process of a service a log of its own; the one before keeps NAME.log.1."""
        self._log_offsets.pop(name, None)

    def restore_log(self, name: str) -> None:
        """Gives the service before the last `rotate_log` its log back; that of the failed process
        becomes NAME.log.1."""
        path = self.log_path(name)
        kept, failed = path.with_name(f"{path.name}.1"), path.with_name(f"{path.name}.failed")
        # Without an offset no process has started since.
        if name in self._log_offsets and path.exists() and kept.exists():
            path.replace(failed)
            kept.replace(path)
            failed.replace(kept)
        self._log_offsets[name] = 0

    def tail(self, name: str) -> list[str]:
        """Returns the last lines of the service's current log, at most TAIL_LINES of its last
        start."""
        try:
            with self.log_path(name).open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_offsets.get(name, 0), end - TAIL_BYTES))
                lines = log.read(TAIL_BYTES).decode(errors="replace").splitlines()
        except OSError as error:
            return [f"(its log cannot be read: {error})"]
        return lines[-TAIL_LINES:]

    def log_bytes(self, name: str) -> int:
        """Returns the size of the service's current log; 0 without one."""
        try:
            return self.log_path(name).stat().st_size
        except OSError:
            return 0

    def _popen(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], fds: Sequence[int]
    ) -> subprocess.Popen[bytes]:
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
                pass_fds=fds,
                env=environ,
                start_new_session=True,
            )

"""The parent of a frontend's processes: forks them, restarts those that end, forwards the stop.

The parent holds no connection and runs no event loop. It binds the HTTP port without listening, so
that the port stays reserved; each process listens on a socket of its own (SO_REUSEPORT). Sockets of
a launcher (`http_fd`) are dealt to the processes in turn: they outlive both, so that connections
wait in the socket of a process that starts again. Processes are forked and not executed, because
the imports of a frontend take a second and 60 MB.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import structlog

from common.runtime import log
from common.runtime.ready_line import ReadyLineReader, write_ready_line
from common.service.lifecycle import report_start_failure
from common.service.restarts import RestartPolicy, Restarts
from frontend_svc.config import FrontendConfig
from frontend_svc.edge.sockets import listen
from frontend_svc.processes.siblings import Siblings

LOG = structlog.get_logger(__name__)

RESTARTS = RestartPolicy(initial_pause_s=0.1, max_pause_s=10.0, reset_after_s=30.0)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD)
PR_SET_PDEATHSIG = 1
EXIT_CRASHED = 70

# Runs one process until it ends; exits.
Serve = Callable[[FrontendConfig, Siblings], NoReturn]


@dataclass
class _Process:
    """A slot."""

    slot: int
    pid: int = 0
    """0: not running."""
    ready_line: ReadyLineReader | None = None
    """Of a process that is not ready and has not ended."""
    line: dict[str, Any] | None = None
    """What the process reported when it was ready."""
    grpc_port: int = 0
    restarts: Restarts = field(default_factory=lambda: Restarts(RESTARTS, None))
    restart_at: float = 0.0


def run_processes(config: FrontendConfig, serve: Serve) -> NoReturn:
    """Runs the processes of a frontend until it is stopped, and exits."""
    logs = log.setup(config.log_level, config.log_format, service="frontend")
    try:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-"))
            ports: dict[str, int] = {}
            if not config.http_fd:
                http = (config.http_host, config.http_port, "http_port")
                ports["http_port"] = _reserve(stack, *http)
            if config.metrics_port is not None:
                metrics = (config.effective_metrics_host, config.metrics_port, "metrics_port")
                ports["metrics_port"] = _reserve(stack, *metrics)
            status = _Parent(config.model_copy(update=ports), serve, Path(folder)).run()
    except Exception as error:
        report_start_failure(error, "frontend", config.ready_fd)
        status = 1
    finally:
        logs.close()
    raise SystemExit(status)


def _reserve(stack: contextlib.ExitStack, host: str, port: int, setting: str) -> int:
    """Binds the port until `stack` is left; its number."""
    # Without SO_REUSEPORT this fails if another program serves the port.
    with listen(host, port, setting=setting) as probe:
        port = probe.getsockname()[1]
    stack.enter_context(listen(host, port, shared=True, setting=setting))
    return port


def process_config(config: FrontendConfig, slot: int) -> FrontendConfig:
    """Returns the settings of one process: those that must differ between members have its
    number."""
    return config.model_copy(
        update={
            "port": config.port + slot if config.port else 0,
            "health_port": config.health_port + slot if config.health_port else config.health_port,
            "stable_name": f"{config.stable_name}-{slot}" if config.stable_name else "",
            "audit_log": _numbered(config.audit_log, slot),
            "request_trace": _numbered(config.request_trace, slot),
            "http_fd": config.http_fd[slot :: config.processes],
            "ready_fd": None,
        }
    )


def _numbered(file: str, slot: int) -> str:
    path = Path(file)
    return str(path.with_stem(f"{path.stem}-{slot}")) if file else ""


def _close_sockets(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class _Parent:
    def __init__(self, config: FrontendConfig, serve: Serve, folder: Path) -> None:
        self._config = config
        self._serve = serve
        self._folder = folder
        self._processes = [_Process(slot) for slot in range(config.processes)]
        self._is_ready = False
        self._is_stopping = False
        self._has_reported = False
        self._status = 0

    def run(self) -> int:
        """Returns the exit status after all processes have ended."""
        wake_fd, write_fd = os.pipe()
        os.set_blocking(wake_fd, False)
        os.set_blocking(write_fd, False)
        for number in SIGNALS:
            # The number goes to the pipe; nothing runs at the moment of the signal.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for process in self._processes:
            self._start(process)
        while any(process.pid for process in self._processes) or not self._is_stopping:
            fds = [
                process.ready_line.fd
                for process in self._processes
                if process.ready_line is not None
            ]
            select.select([wake_fd, *fds], [], [], self._next_restart_in_s())
            with contextlib.suppress(BlockingIOError):
                for received in os.read(wake_fd, 512):
                    self._on_signal(received)
            for process in self._processes:
                self._follow(process)
        return self._status

    def _next_restart_in_s(self) -> float | None:
        """Returns the seconds until the next restart; None if no process waits for one."""
        due = [process.restart_at for process in self._processes if not process.pid]
        return None if self._is_stopping or not due else max(0.0, min(due) - time.monotonic())

    def _on_signal(self, number: int) -> None:
        """Forwards a stop, also a second one, which ends a process at once."""
        if number in STOP_SIGNALS:
            LOG.info("draining", reason=f"signal {signal.Signals(number).name}")
            self._stop()

    def _stop(self) -> None:
        if not self._is_stopping:
            # The port refuses connections once neither a process nor the launcher has its sockets.
            _close_sockets(self._config.http_fd)
        self._is_stopping = True
        for process in self._processes:
            if process.pid:
                os.kill(process.pid, signal.SIGTERM)

    def _follow(self, process: _Process) -> None:
        """Observes one process, and starts the next one when it is due."""
        if process.ready_line is not None and process.ready_line.read():
            self._on_ready_line(process, process.ready_line)
        if process.pid:
            pid, wait_status = os.waitpid(process.pid, os.WNOHANG)
            if pid:
                self._on_end(process, os.waitstatus_to_exitcode(wait_status))
        elif not self._is_stopping and time.monotonic() >= process.restart_at:
            self._start(process)

    def _start(self, process: _Process) -> None:
        read_fd, write_fd = os.pipe()
        parent_pid = os.getpid()
        # The handlers of the parent must not run in the child.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        pid = os.fork()
        if pid == 0:
            self._run_child(process, parent_pid, write_fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(write_fd)
        process.pid, process.ready_line, process.line = pid, ReadyLineReader(read_fd), None

    def _run_child(self, process: _Process, parent_pid: int, ready_fd: int) -> NoReturn:
        """Serves in a forked process. Nothing of the parent's stack may run after it."""
        status = EXIT_CRASHED
        try:
            # A killed parent ends its processes, as if they were one.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent_pid:
                os._exit(status)
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            # Ctrl-C reaches the parent too, which forwards it.
            signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})
            if self._config.ready_fd is not None and not self._has_reported:
                os.close(self._config.ready_fd)
            update = {"ready_fd": ready_fd}
            if process.grpc_port:
                # Under its address the mesh knows the successor as such.
                update["port"] = process.grpc_port
            config = process_config(self._config, process.slot)
            _close_sockets(set(self._config.http_fd).difference(config.http_fd))
            siblings = Siblings(self._folder, process.slot, self._config.processes)
            self._serve(config.model_copy(update=update), siblings)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _on_ready_line(self, process: _Process, reader: ReadyLineReader) -> None:
        reader.close()
        process.ready_line = None
        line = json.loads(reader.received or b"{}")
        if "addresses" not in line:
            if not self._is_ready:
                self._report(line or {"error": f"process {process.slot} ended"})
            return
        process.line = line
        process.restarts.ready(time.monotonic())
        process.grpc_port = int(line["addresses"]["grpc"].rsplit(":", 1)[1])
        lines = [process.line for process in self._processes if process.line is not None]
        if not self._is_ready and len(lines) == len(self._processes):
            self._is_ready = True
            self._report({**lines[0], "pid": os.getpid()})

    def _report(self, line: dict[str, Any]) -> None:
        if self._config.ready_fd is not None and not self._has_reported:
            self._has_reported = True
            with contextlib.suppress(OSError):
                write_ready_line(self._config.ready_fd, line)

    def _on_end(self, process: _Process, status: int) -> None:
        """Plans the next start; a frontend that was never ready ends instead."""
        process.pid = 0
        if self._is_stopping:
            if status not in (0, -signal.SIGTERM):
                self._status = status if status > 0 else 1
            return
        if not self._is_ready:
            self._status = status if status > 0 else 1
            self._stop()
            return
        now = time.monotonic()
        pause_s = process.restarts.ended(now)
        process.restart_at = now + pause_s
        LOG.error("process_ended", process=process.slot, status=status, restart_in_s=pause_s)

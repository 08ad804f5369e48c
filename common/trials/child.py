"""The process of trials: it imports the functions once, and forks for each trial; see `trials.py`.

A forked process writes the time, runs one function with limits, writes the reply and ends. So a
trial starts within milliseconds, and all its memory is free after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import math
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import orjson

from common.trials.child_process import frame, limit_memory, receive, set_limit
from common.trials.trial import Trial, TrialLimits

# What a trial writes first: when it began, in seconds of the clock that all processes share.
BEGIN_TIME: Final = struct.Struct("!d")
# Of the whole process: serving has precedence.
NICE: Final = 10
_OPEN_FILES_MAX: Final = 16


def _serve(control: socket.socket) -> None:
    """Forks for each connection that arrives on the socket, until it ends."""
    os.nice(NICE)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended processes
    gc.collect()
    gc.freeze()  # forked processes do not copy these pages
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        connection = socket.socket(fileno=descriptors[0])
        try:
            is_child = os.fork() == 0
        except OSError:  # too many processes: the connection ends without a time
            is_child = False
        if is_child:
            control.close()
            _run_trial(connection)
        connection.close()


def _run_trial(connection: socket.socket) -> None:
    """Runs the trial of a connection, and ends the process."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The serving process is trusted. This one, after an input, is not: its result is JSON.
        trial: Trial = pickle.loads(receive(connection))
        _limit(trial.limits)
        _end_with(connection)
        connection.sendall(BEGIN_TIME.pack(time.monotonic()))
        _limit_time(trial.limits)
        reply = _reply(trial)
        fcntl.fcntl(connection, fcntl.F_SETFL, 0)
        connection.sendall(frame(reply))
        status = 0
    except (OSError, MemoryError):  # the serving process has ended the trial, or sees its end
        pass
    finally:
        os._exit(status)


def _reply(trial: Trial) -> bytes:
    try:
        return orjson.dumps({"result": find_function(trial.function)(*trial.arguments)})
    except ValueError as error:
        return orjson.dumps({"refused": str(error)})
    except MemoryError:
        raise
    except BaseException as error:  # a panic of a library is not an Exception
        return orjson.dumps({"refused": f"{type(error).__name__}: {error}"})


def find_function(path: str) -> Callable[..., Any]:
    """Returns the function of a path `module:name`."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _limit(limits: TrialLimits) -> None:
    """Lets the kernel end this process at its limits, whatever code it runs then."""
    # If a container has no memory left, the kernel ends the trial and not a service.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit_memory(pages * resource.getpagesize() + limits.memory_bytes)
    set_limit(resource.RLIMIT_FSIZE, 0)
    set_limit(resource.RLIMIT_NOFILE, _OPEN_FILES_MAX)
    set_limit(resource.RLIMIT_CPU, math.ceil(limits.cpu_s) + 1)


def _limit_time(limits: TrialLimits) -> None:
    """Lets timers end this process, by their signals. After the time is sent: without it, an end
    would read as one of the process that forks."""
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)


def _end_with(connection: socket.socket) -> None:
    """Lets the kernel end this process when the serving process closes the connection: SIGIO."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC)
    try:
        if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            raise ConnectionResetError("closed before")
    except BlockingIOError:
        pass


if __name__ == "__main__":
    for prepare in sys.argv[2:]:
        find_function(prepare)()
    with socket.socket(fileno=int(sys.argv[1])) as own_socket:
        _serve(own_socket)

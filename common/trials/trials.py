"""Runs functions on untrusted inputs in processes that can be ended, before this process does.

Libraries that compile grammars, load tokenizers or decode media take time and memory that their
input decides, in one call that no exception and no thread can interrupt. So a forked process runs
that call first. The kernel ends it at its limits; an input that passes is taken by this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import subprocess
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final

import orjson
import structlog

from common.errors import Overloaded, Unavailable
from common.trials import child
from common.trials.child_process import (
    LENGTH_BYTES,
    TRIAL,
    end_child,
    frame,
    start_child,
    unexpected_ends,
)
from common.trials.trial import Trial, TrialExceeded, TrialLimits, TrialRefused

_STARTS_MAX: Final = 2
# Time for a trial to begin: the process may have to start, and forks for one after the other.
BEGIN_S: Final = 20.0
# Time for the kernel to end a trial at its limits.
_END_S: Final = 5.0
_READ_BYTES: Final = 1 << 16
# Before a reply.
_HEAD_BYTES: Final = child.BEGIN_TIME.size + LENGTH_BYTES

log = structlog.get_logger()


class Trials:
    """Runs trials, all at once: `FairTrials` bounds them. Its process starts with the first trial
    and ends with this object. prepare: functions as `module:name` that the process calls when it
    starts, so that trials need not; they start no threads."""

    def __init__(self, prepare: Sequence[str]) -> None:
        self._prepare = tuple(prepare)
        self._forker: _Forker | None = None
        self._start_lock = asyncio.Lock()

    # Any: JSON, and arguments of any function.
    async def run(self, trial: Trial) -> Any:
        """Returns the result of the function. Cancelling the call ends the process of the trial.

        Raises TrialRefused if the input is invalid, TrialExceeded if it exceeds a limit, Overloaded
        if it gets too little of the processor, and Unavailable if no process can be started.
        """
        request = frame(pickle.dumps(trial))
        for _ in range(_STARTS_MAX):
            forker = await self._started_forker()
            with forker.connect() as connection:
                reply = await _exchange(connection, request, trial.limits, BEGIN_S)
            if reply is not None:
                return _result(*reply, trial)
            self._drop(forker)  # it has ended, hangs, or cannot fork
        raise Unavailable("no process for a trial could be started", 1.0)

    async def _started_forker(self) -> _Forker:
        async with self._start_lock:
            if self._forker is None:
                self._forker = await asyncio.to_thread(_Forker, self._prepare)
            return self._forker

    def _drop(self, forker: _Forker) -> None:
        if self._forker is forker:
            log.warning("trial_process_ended")
            unexpected_ends[TRIAL] += 1
            self._forker = None


class _Forker:
    """The process that forks for each trial; it ends with this object. Blocks while it starts."""

    def __init__(self, prepare: Sequence[str]) -> None:
        try:
            process, self._control = start_child(child.__name__, prepare, own_session=False)
        except OSError as error:
            raise Unavailable(f"no process for a trial: {error}", 1.0) from error
        self.pid = process.pid
        weakref.finalize(self, _end, process, self._control)

    def connect(self) -> socket.socket:
        """Returns the connection to a new trial. It ends at once if the process has ended."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
        ours.setblocking(False)
        return ours


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    end_child(process)


async def _exchange(
    connection: socket.socket, request: bytes, limits: TrialLimits, begin_s_max: float
) -> tuple[bytes, float] | None:
    """Returns the reply and the seconds that it took; an empty one if the trial was ended or
    replies more, None if it did not begin in time."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    # Stated by the trial: this process may see its begin late, and its end would seem too early.
    began_at: float | None = None
    try:
        async with asyncio.timeout(begin_s_max) as timeout:
            await loop.sock_sendall(connection, request)
            while part := await loop.sock_recv(connection, _READ_BYTES):
                received += part
                if began_at is None and len(received) >= child.BEGIN_TIME.size:
                    (began_at,) = child.BEGIN_TIME.unpack_from(received)
                    timeout.reschedule(loop.time() + limits.wall_s + _END_S)
                if began_at is None or len(received) < _HEAD_BYTES:
                    continue
                size = int.from_bytes(received[child.BEGIN_TIME.size : _HEAD_BYTES], "big")
                if size > limits.reply_bytes:
                    break
                if len(received) == _HEAD_BYTES + size:
                    return bytes(received[_HEAD_BYTES:]), time.monotonic() - began_at
    except OSError:  # the process has ended, or hangs
        pass
    return None if began_at is None else (b"", time.monotonic() - began_at)


# Any: JSON.
def _result(reply: bytes, elapsed_s: float, trial: Trial) -> Any:
    if reply:
        try:
            value = orjson.loads(reply)
        except orjson.JSONDecodeError:
            value = {}
        if "result" in value:
            return value["result"]
        if "refused" in value:
            raise TrialRefused(value["refused"])
    limits = trial.limits
    if elapsed_s >= limits.wall_s:
        text = f"a trial did not end within {limits.wall_s:g} s: the processor is busy"
        raise Overloaded(1.0, text)
    if elapsed_s >= limits.cpu_s:
        raise TrialExceeded(f"it takes more than {limits.cpu_s:g} s", is_time=True)
    memory = f"{limits.memory_bytes >> 20} MiB of memory"
    text = f"it needs more than {memory} or {limits.reply_bytes} bytes of output"
    raise TrialExceeded(text, is_time=False)

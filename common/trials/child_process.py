"""A Python process with a socket to this one, and the frames between both.

A frame is its content behind its length (u32, big endian).
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Final

LENGTH_BYTES: Final = 4
TEMPLATE: Final = "template"
TRIAL: Final = "trial"
# Of this operating system process, by kind: child processes that ended before their owner ended
# them. Their owners start others.
unexpected_ends: Final = Counter({TEMPLATE: 0, TRIAL: 0})


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def receive(source: socket.socket) -> bytearray:
    """Returns the content of the next frame. Raises OSError at the end."""
    size = int.from_bytes(_receive_bytes(source, LENGTH_BYTES), "big")
    return _receive_bytes(source, size)


def _receive_bytes(source: socket.socket, count: int) -> bytearray:
    received = bytearray()
    while len(received) < count:
        part = source.recv(min(count - len(received), 1 << 20))
        if not part:
            raise ConnectionResetError("the connection ended")
        received += part
    return received


def start_child(
    module: str, arguments: Sequence[str] = (), *, own_session: bool = True
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a module as a process; its first argument is the number of its socket. Returns the
    process and this end of the socket. Raises OSError.

    own_session: gives it a share of the processor as large as this process has. Otherwise its
    priority (`nice`) counts beside this process: Linux compares those of one session only.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                env={"PYTHONPATH": os.pathsep.join(sys.path), **_ONE_THREAD},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Both are without the signals of a terminal.
                start_new_session=own_session,
                process_group=None if own_session else 0,
            )
    except BaseException:
        ours.close()
        raise
    return process, ours


# A fork copies no thread, and each one takes address space from the limit of memory.
_ONE_THREAD: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
}


def end_child(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def limit_memory(memory_bytes: int) -> None:
    """Limits the address space of this process, and writes no core files when it is ended."""
    set_limit(resource.RLIMIT_AS, memory_bytes)
    set_limit(resource.RLIMIT_CORE, 0)


def set_limit(kind: int, value: int) -> None:
    """Sets a limit of this process; a lower hard limit stays in force."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))

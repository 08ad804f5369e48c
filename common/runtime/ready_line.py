"""The line with which a process reports to its launcher that it is ready or has failed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

# Of an error in a ready line.
ERROR_CHARS_MAX = 4096
# Of a ready line that is read.
BYTES_MAX = 1 << 16


def write_ready_line(fd: int, content: Mapping[str, object]) -> None:
    """Writes one JSON line to the descriptor `ready_fd` and closes it. Raises OSError."""
    # One write that fits into the pipe; closed, so that the reader sees the end.
    os.write(fd, json.dumps(content).encode() + b"\n")
    os.close(fd)


class ReadyLineReader:
    """Reads the ready line of one process from a pipe, without blocking."""

    received: bytes
    """The line, or its part that has arrived; empty if the process ended without one."""

    def __init__(self, fd: int) -> None:
        """Creates it for the read end of the pipe, which it owns."""
        os.set_blocking(fd, False)
        self.fd = fd
        self.received = b""

    def read(self) -> bool:
        """Takes what has arrived. Returns whether the line is complete, too long, or will not be
        complete because the process ended; then the caller closes the reader."""
        try:
            part = os.read(self.fd, BYTES_MAX)
        except BlockingIOError:
            return False
        self.received += part
        return not part or b"\n" in part or len(self.received) > BYTES_MAX

    def close(self) -> None:
        os.close(self.fd)

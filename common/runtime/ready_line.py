"""The line with which a process reports to its launcher that it is ready or has failed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

# Of an error in a ready line.
ERROR_CHARS_MAX = 4096


def write_ready_line(fd: int, content: Mapping[str, object]) -> None:
    """Writes one JSON line to the descriptor `ready_fd` and closes it. Raises OSError."""
    # One write that fits into the pipe; closed, so that the reader sees the end.
    os.write(fd, json.dumps(content).encode() + b"\n")
    os.close(fd)

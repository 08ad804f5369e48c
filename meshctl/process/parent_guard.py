"""Replaces itself with a command that receives SIGTERM when its parent dies.

    python -I -S parent_guard.py PARENT_PID COMMAND ARG...

It is a separate program because `preexec_fn` would run Python between fork and exec, where another
thread may hold any lock. It imports only the standard library and costs about 10 ms.

Linux sends the signal when the *thread* that created this process ends, so the parent must start
children on its main thread. The setting survives exec (except of set-user-ID files) and is not
inherited by children of the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CANNOT_EXECUTE = 126


def main(argv: list[str]) -> int:
    """Executes the command; returns only on failure."""
    parent, command = int(argv[0]), argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), zero, zero, zero) != 0:
        sys.stderr.write(f"parent_guard: prctl: {os.strerror(ctypes.get_errno())}\n")
        return CANNOT_EXECUTE
    # The parent may have died before prctl; then no signal arrives.
    if os.getppid() != parent:
        return 128 + signal.SIGTERM
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"parent_guard: {command[0]}: {error.strerror}\n")
    return CANNOT_EXECUTE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The HTTP sockets of frontends, which outlive their processes.

Each frontend accepts from a socket of meshctl (its `--http-fd`). While a frontend is replaced, or
starts again after its death, connections wait in the socket instead of being refused; old and new
process may accept from it at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable, Iterator, Mapping

BACKLOG = 4096


class CannotListen(Exception):
    """A port cannot be bound; the message states the reason and the remedy."""


@contextlib.contextmanager
def listeners(host: str, ports: Iterable[tuple[str, int]]) -> Iterator[Mapping[str, socket.socket]]:
    """Listens on ports until the block is left.

    ports: name of each frontend, and its port; 0: any. Raises CannotListen.
    """
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(_listen(host, port)) for name, port in ports}


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Lingering connections of an earlier run do not matter.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        problem = f"cannot be bound: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            problem = "is in use; free it, or choose another with --http-port"
        raise CannotListen(f"port {port} of {host} {problem}") from error
    return listener


def check_port(host: str, port: int) -> None:
    """Raises CannotListen if a frontend could not bind a port; port 0 always passes."""
    if port:
        _listen(host, port).close()

"""The HTTP sockets of frontends, which outlive their processes.

Each frontend accepts from a socket of meshctl (its `--http-fd`). While a frontend is replaced, or
starts again after its death, connections wait in the socket instead of being refused; old and new
process may accept from it at the same time. The port of a drained or failed frontend is closed, so
that its clients do not wait for a process that never starts.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Mapping

BACKLOG = 4096
HTTP_PORT = "--http-port"


class CannotListen(OSError):
    """A port cannot be bound; the message states the reason and the remedy."""


class Listeners:
    """The listening sockets of frontends.

    - ports: of each frontend; 0: any.
    """

    def __init__(self, host: str, ports: Mapping[str, int]) -> None:
        self._host = host
        self._ports = dict(ports)
        self._sockets: dict[str, socket.socket] = {}

    def open(self, name: str) -> socket.socket | None:
        """Returns the socket of a service, which listens; None if it is not one of the frontends.
        Raises CannotListen."""
        if name not in self._ports:
            return None
        if name not in self._sockets:
            listener = _listen(self._host, self._ports[name])
            self._ports[name] = listener.getsockname()[1]
            self._sockets[name] = listener
        return self._sockets[name]

    def close(self, name: str) -> None:
        """Refuses connections to a frontend once its processes have ended. Idempotent."""
        if name in self._sockets:
            self._sockets.pop(name).close()


@contextlib.contextmanager
def listeners(host: str, ports: Mapping[str, int]) -> Iterator[Listeners]:
    """Listens on the ports of frontends until the block is left; 0: any. Raises CannotListen."""
    opened = Listeners(host, ports)
    try:
        for name in ports:
            opened.open(name)
        yield opened
    finally:
        for name in ports:
            opened.close(name)


def _listen(host: str, port: int, flag: str = HTTP_PORT) -> socket.socket:
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
            problem = f"is in use; free it, or choose another with {flag}"
        raise CannotListen(f"port {port} of {host} {problem}") from error
    return listener


def check_port(host: str, port: int, flag: str = HTTP_PORT) -> None:
    """Raises CannotListen if a service could not bind a port; port 0 always passes. flag: sets
    it."""
    if port:
        _listen(host, port, flag).close()

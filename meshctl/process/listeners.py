"""The HTTP sockets of frontends, which outlive their processes.

Each frontend accepts from sockets of meshctl (its `--http-fd`), of which each of its processes
needs one. While a frontend is replaced, or starts again after its death, connections wait in the
sockets instead of being refused; old and new processes may accept from them at the same time. The
port of a drained or failed frontend is closed, so that its clients do not wait for a process that
never starts.

The sockets of one frontend share its port (SO_REUSEPORT): the kernel gives each new connection to
one of those that listen. So the number of processes may change: a socket that is added listens when
its process accepts from it, and one that has a process no more is given to another.
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
        self._sockets: dict[str, list[socket.socket]] = {}

    def open(self, name: str, count: int = 1) -> list[socket.socket]:
        """Returns the sockets of a service, at least `count`, of which the first listens; none if
        it is not one of the frontends. Raises CannotListen."""
        if name not in self._ports:
            return []
        opened = self._sockets.setdefault(name, [])
        if not opened:
            # Another socket with SO_REUSEPORT would be no obstacle to the ones below.
            check_port(self._host, self._ports[name])
        while len(opened) < count:
            opened.append(_bind(self._host, self._ports[name], is_shared=True))
            self._ports[name] = opened[0].getsockname()[1]
        opened[0].listen(BACKLOG)
        return opened

    def add(self, name: str, port: int) -> None:
        """Takes a further frontend, before its first `open`. Idempotent."""
        self._ports.setdefault(name, port)

    def keep(self, name: str, count: int) -> None:
        """Closes the sockets of a frontend beyond the first `count`, from which no process
        accepts."""
        opened = self._sockets.get(name, [])
        for listener in opened[count:]:
            listener.close()
        del opened[count:]

    def close(self, name: str) -> None:
        """Refuses connections to a frontend once its processes have ended. Idempotent."""
        self.keep(name, 0)

    def close_all(self) -> None:
        """Refuses connections to all frontends."""
        for name in self._ports:
            self.close(name)


@contextlib.contextmanager
def listeners(host: str, ports: Mapping[str, int]) -> Iterator[Listeners]:
    """Listens on the ports of frontends until the block is left; 0: any. Raises CannotListen."""
    opened = Listeners(host, ports)
    try:
        for name in ports:
            opened.open(name)
        yield opened
    finally:
        opened.close_all()


def _bind(host: str, port: int, *, is_shared: bool, flag: str = HTTP_PORT) -> socket.socket:
    """is_shared: with other sockets of this program."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Lingering connections of an earlier run do not matter.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        if not is_shared:
            listener.listen()
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
        _bind(host, port, is_shared=False, flag=flag).close()

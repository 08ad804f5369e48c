"""Sockets of the HTTP server, and how many connections they may have."""

from __future__ import annotations

import socket

import structlog

from common.errors import Conflict, InvalidRequest
from common.runtime.config import flag_name
from common.runtime.descriptors import raise_descriptor_limit

SEND_BUFFER_BYTES = 256 << 10
# Descriptors for files and other services.
OTHER_DESCRIPTORS = 512
# Connections above the limit that still receive a 503.
REFUSED_MAX = 256
# With fewer a frontend does not start, unless its configuration has fewer.
CONNECTIONS_MIN = 256

log = structlog.get_logger()


def listen(
    host: str, port: int, *, shared: bool = False, setting: str = "http_port"
) -> socket.socket:
    """Returns a bound socket. Raises Conflict if the address is not available.

    - shared: with other sockets; those that listen share the connections.
    - setting: the field that `port` is from.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listen_socket = socket.socket(family, socket.SOCK_STREAM)
    listen_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listen_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Connections inherit it. The kernel would buffer megabytes for each client that does not read.
    listen_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listen_socket.bind((host, port))
    except OSError as error:
        listen_socket.close()
        raise Conflict(
            f"cannot serve HTTP on {host}:{port}: {error.strerror}; choose another port with "
            f"{flag_name(setting)} or KVMESH_FRONTEND_{setting.upper()}",
            field=setting,
            reason="ADDRESS_IN_USE",
        ) from error
    return listen_socket


def inherit(fd: int) -> socket.socket:
    """Returns the socket that a launcher passed. It has a port, and listens by the time of the
    first accept. Raises InvalidRequest."""
    try:
        inherited = socket.socket(fileno=fd)
        has_port = inherited.type == socket.SOCK_STREAM and bool(inherited.getsockname()[1])
    except OSError as error:
        raise InvalidRequest(f"{fd} is not a socket: {error.strerror}", "http_fd") from error
    if not has_port:
        inherited.close()
        raise InvalidRequest(f"{fd} is not a socket that is bound to a port", "http_fd")
    inherited.set_inheritable(False)
    inherited.setblocking(False)
    inherited.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return inherited


def connection_limit(connections_max: int) -> int:
    """Returns the connections that the limit of descriptors permits; raises that limit if
    possible. Raises ConfigError if it permits fewer than CONNECTIONS_MIN."""
    others = OTHER_DESCRIPTORS + REFUSED_MAX
    needed = min(connections_max, CONNECTIONS_MIN)
    use = f"({others}, and {needed} for HTTP connections)"
    descriptors = raise_descriptor_limit(connections_max + others, minimum=needed + others, use=use)
    limit = descriptors - others
    if limit < connections_max:
        log.warning("connections_limited", connections_max=limit, descriptors=descriptors)
    return limit

"""The health of a gRPC port, requested over a plain socket.

A container engine requests it every few seconds, and the imports of grpc alone take more CPU time
than everything else here. So this module has the few frames of HTTP/2 that one unary call needs,
and imports no other part of the project.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Iterator

TIMEOUT_S = 3.0
PATH = b"/grpc.health.v1.Health/Check"
STATUS_NAMES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
SERVING = STATUS_NAMES[1]
# Codes of gRPC, by their numbers.
_CODES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND"),
    *("ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"),
    *("ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"),
    "UNAUTHENTICATED",
)

# Frames of HTTP/2 (RFC 9113).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ACK, _END_STREAM, _END_HEADERS, _PADDED = 1, 1, 4, 8
_STREAM = 1


class _CallError(Exception):
    """The call has no response; the message has the code of gRPC and the reason."""


def is_address(text: str) -> bool:
    """Returns whether a text is HOST:PORT."""
    host, colon, port = text.rpartition(":")
    return bool(host and colon and port.isascii() and port.isdigit() and int(port) < 65536)


def health(address: str, service: str = "") -> int:
    """Returns 0 if the port reports SERVING, else 1. Prints a line, on standard error if not
    SERVING."""
    status, error = probe(address, service)
    out = sys.stdout if status == SERVING else sys.stderr
    out.write(f"{address}: {error or status}\n")
    return 0 if status == SERVING else 1


def probe(address: str, service: str = "") -> tuple[str, str]:
    """Returns the status of a service of a port, and why it is unknown."""
    try:
        return STATUS_NAMES[check(address, service)], ""
    except _CallError as error:
        text = str(error)
    if text.startswith("NOT_FOUND"):
        text = f"NOT_FOUND: no service {service!r} here"
    return STATUS_NAMES[0], text


def check(address: str, service: str = "") -> int:
    """Returns the status of a service of a port, an index of STATUS_NAMES. Raises _CallError."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + TIMEOUT_S
    try:
        with socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S) as connection:
            connection.sendall(_request(address, service))
            return _read_response(connection, deadline)
    except TimeoutError:
        raise _CallError(f"DEADLINE_EXCEEDED: no response within {TIMEOUT_S:g} s") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise _CallError(f"UNAVAILABLE: failed to connect: {reason}") from error


def _request(address: str, service: str) -> bytes:
    name = service.encode()
    message = b"\x0a" + _length(len(name), 0x80) + name if name else b""
    headers = (
        b"\x83\x86"  # :method POST, :scheme http
        + b"\x04" + _text(PATH)
        + b"\x01" + _text(address.encode())
        + b"\x00" + _text(b"content-type") + _text(b"application/grpc")
        + b"\x00" + _text(b"te") + _text(b"trailers")
    )  # fmt: skip
    body = struct.pack(">BL", 0, len(message)) + message
    return (
        _PREFACE
        + _frame(_SETTINGS, 0, 0)
        + _frame(_HEADERS, _END_HEADERS, _STREAM, headers)
        + _frame(_DATA, _END_STREAM, _STREAM, body)
    )


def _read_response(connection: socket.socket, deadline: float) -> int:
    """Returns the status in the response. Raises _CallError, and OSError of the connection."""
    data = b""
    for kind, flags, stream, payload in _frames(connection, deadline):
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            connection.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _GOAWAY or (kind == _RST_STREAM and stream == _STREAM):
            raise _CallError("UNAVAILABLE: the server ended the call")
        elif kind == _DATA:
            data += _content(flags, payload)
            # A call with an error may have an empty message before its trailers.
            if status := _status_in(data):
                return status
        elif kind == _HEADERS and flags & _END_STREAM:
            if problem := _describe_trailers(_content(flags, payload)):
                raise _CallError(problem)
            return 0
    raise _CallError("UNAVAILABLE: the server closed the connection; does the port have TLS?")


def _frames(connection: socket.socket, deadline: float) -> Iterator[tuple[int, int, int, bytes]]:
    """Yields kind, flags, stream and payload of frames, until the server closes the connection."""
    received = b""
    # Ends: the socket raises TimeoutError at the deadline.
    while True:
        if len(received) >= 9:
            length, kind, flags = int.from_bytes(received[:3], "big"), received[3], received[4]
            if len(received) >= 9 + length:
                stream = int.from_bytes(received[5:9], "big") & 0x7FFFFFFF
                yield kind, flags, stream, received[9 : 9 + length]
                received = received[9 + length :]
                continue
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(65_536)
        if not data:
            return
        received += data


def _content(flags: int, payload: bytes) -> bytes:
    """Returns the payload of a frame without its padding. Servers send no priority."""
    if flags & _PADDED:
        payload = payload[1 : len(payload) - payload[0]]
    return payload


def _status_in(data: bytes) -> int:
    """Returns field 1 of a HealthCheckResponse after its prefix of 5 bytes; 0 if it is absent."""
    message = data[5:]
    is_known = len(message) >= 2 and message[0] == 0x08 and message[1] < len(STATUS_NAMES)
    return message[1] if is_known else 0


def _describe_trailers(block: bytes) -> str:
    """Returns the code of gRPC with the reason; "" for success."""
    # Imported here: its tables take 5 ms, and a health check without an error has no need of them.
    from hpack import Decoder

    headers = {str(name): str(value) for name, value in Decoder().decode(block)}
    code = headers.get("grpc-status", "2")
    number = int(code) if code.isdigit() else 2
    if not number:
        return ""
    name = _CODES[number] if number < len(_CODES) else f"code {number}"
    return f"{name}: {headers.get('grpc-message', '')}"


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBL", kind, flags, stream) + payload


def _text(value: bytes) -> bytes:
    """Returns a string of HPACK (RFC 7541) without Huffman coding."""
    return _length(len(value), 0x7F) + value


def _length(value: int, limit: int) -> bytes:
    """Returns a length: an integer of HPACK with a prefix of 7 bits, or of Protocol Buffers."""
    if value < limit:
        return bytes((value,))
    rest, encoded = (value - limit, [limit]) if limit == 0x7F else (value, [])
    while rest >= 0x80:
        encoded.append(rest % 0x80 | 0x80)
        rest //= 0x80
    return bytes((*encoded, rest))

"""The HTTP port under clients that send ambiguous requests, too many headers, or nothing."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time

import pytest

from frontend_svc.edge.server import HEAD_BYTES_MAX, HEADERS_MAX, BoundedProtocol
from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

CONNECTIONS_MAX = 2050
SLOW_CLIENTS = 2000
HOST = b"host: localhost\r\n"
CHAT = json.dumps(
    {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
).encode()
HIDDEN = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


mesh = mesh_fixture(
    workers=1, worker_flags=["--speedup=0"], frontend_flags=[f"--connections-max={CONNECTIONS_MAX}"]
)


def connect(mesh: Mesh) -> socket.socket:
    host, _, port = mesh.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def exchange(mesh: Mesh, *parts: bytes) -> bytes:
    """All that the server sends until it closes."""
    with connect(mesh) as client:
        received = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
            # Ends: the server closes, or the time limit of the socket.
            while data := client.recv(1 << 16):
                received += data
        return received


def post(
    headers: bytes, body: bytes = CHAT, *, host: bytes = HOST, version: bytes = b"1.1"
) -> bytes:
    line = b"POST /v1/chat/completions HTTP/" + version + b"\r\n"
    return line + host + headers + b"\r\n" + body


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


CLOSE = b"connection: close\r\n"
LENGTH = b"content-length: %d\r\n" % len(CHAT)
CHUNKED = b"transfer-encoding: chunked\r\n"
# Each hides a request from a proxy that reads the length in the other way.
SMUGGLING = {
    "content-length and chunked": post(LENGTH + CHUNKED, b"0\r\n\r\n" + HIDDEN),
    "chunked and content-length": post(CHUNKED + b"content-length: 5\r\n", b"0\r\n\r\n" + HIDDEN),
    "two lengths": post(LENGTH + b"content-length: 0\r\n", HIDDEN),
    "two equal lengths": post(LENGTH + LENGTH, CHAT + HIDDEN),
    "a list of lengths": post(b"content-length: 0, 0\r\n", HIDDEN),
    "a length with a sign": post(b"content-length: +0\r\n", HIDDEN),
    "a hexadecimal length": post(b"content-length: 0x0\r\n", HIDDEN),
    "a length with a space inside": post(b"content-length: 1 0\r\n", HIDDEN),
    "a length of 30 digits": post(b"content-length: " + b"9" * 30 + b"\r\n", HIDDEN),
    "chunked behind another coding": post(b"transfer-encoding: chunked, identity\r\n", HIDDEN),
    "an unknown coding": post(b"transfer-encoding: xchunked\r\n", HIDDEN),
    "chunked twice": post(CHUNKED + CHUNKED + b"content-length: 4\r\n", b"0\r\n\r\n" + HIDDEN),
    "a vertical tab before chunked": post(b"transfer-encoding: \x0bchunked\r\n", HIDDEN),
    "a space before the colon": post(
        b"transfer-encoding : chunked\r\n" + LENGTH, b"0\r\n\r\n" + HIDDEN
    ),
    "a folded header": post(b"transfer-encoding:\r\n chunked\r\n" + LENGTH, b"0\r\n\r\n" + HIDDEN),
    "a bare line feed between headers": post(b"x: y\n" + CHUNKED + LENGTH, b"0\r\n\r\n" + HIDDEN),
    "a carriage return in a value": post(b"x: y\r" + CHUNKED + LENGTH, b"0\r\n\r\n" + HIDDEN),
    "a NUL in a value": post(b"x: \0\r\n" + CHUNKED + LENGTH, b"0\r\n\r\n" + HIDDEN),
    "a header without a name": post(b": chunked\r\n" + LENGTH, HIDDEN),
    "a chunk of negative size": post(CHUNKED, b"-1\r\n\r\n" + HIDDEN),
    "a chunk size above 64 bits": post(CHUNKED, b"1" + b"0" * 16 + b"\r\n" + HIDDEN),
    "a chunk without its end": post(CHUNKED, b"1\r\nxx0\r\n\r\n" + HIDDEN),
    "two hosts": post(LENGTH, CHAT, host=HOST + b"host: other\r\n"),
    "no host": post(LENGTH, CHAT, host=b""),
    "an unknown version": post(LENGTH, CHAT, version=b"1.7"),
    "HTTP/0.9": b"GET /live\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLING)
def test_an_ambiguous_request_is_refused_and_hides_no_other(mesh: Mesh, name: str) -> None:
    received = exchange(mesh, SMUGGLING[name])
    assert STATUS.findall(received) == [b"400"], received
    assert b'"live"' not in received


def test_a_trailer_is_no_header_and_valid_requests_are_served(mesh: Mesh) -> None:
    trailer = post(CHUNKED + CLOSE, chunked(CHAT)[:-2] + b"x-kvmesh-wrong: 1\r\n\r\n")
    assert STATUS.findall(exchange(mesh, trailer)) == [b"200"]
    assert STATUS.findall(exchange(mesh, post(LENGTH, host=b"", version=b"1.0"))) == [b"200"]
    pipelined = [HIDDEN, HIDDEN, HIDDEN[:-2] + CLOSE + b"\r\n"]
    assert STATUS.findall(exchange(mesh, *pipelined)) == [b"200"] * 3


@pytest.mark.parametrize(
    "head",
    [
        b"x: " + b"y" * HEAD_BYTES_MAX + b"\r\n",
        b"".join(b"x%d: y\r\n" % number for number in range(HEADERS_MAX)),
        b"x: " + b"y" * (64 << 20),
    ],
    ids=["bytes", "count", "64 MB without an end"],
)
def test_too_many_headers_are_refused_before_they_cost_time(mesh: Mesh, head: bytes) -> None:
    begin = time.monotonic()
    received = exchange(mesh, b"GET /live HTTP/1.1\r\n" + HOST + head + b"\r\n")
    # Without reading what it still sends, a client may lose the response.
    assert STATUS.findall(received) in ([b"431"], []), received[:200]
    assert time.monotonic() - begin < 2.0
    long_id = b"x-request-id: " + b"x" * 4096 + b"\r\n"
    assert STATUS.findall(exchange(mesh, post(LENGTH + CLOSE + long_id))) == [b"200"]


def test_slow_clients_are_closed_and_do_not_delay_others(mesh: Mesh) -> None:
    begin = time.monotonic()
    clients = [connect(mesh) for _ in range(SLOW_CLIENTS)]
    for number, client in enumerate(clients):
        client.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-slow: "[: number % 40])
    others = []
    for _ in range(50):
        sent_at = time.monotonic()
        assert STATUS.findall(exchange(mesh, post(LENGTH + CLOSE))) == [b"200"]
        others.append(time.monotonic() - sent_at)
    print(f"others: p50 {sorted(others)[25] * 1e3:.1f} ms, longest {max(others) * 1e3:.1f} ms")
    clients += [connect(mesh) for _ in range(CONNECTIONS_MAX - SLOW_CLIENTS + 10)]
    received = exchange(mesh, post(LENGTH))
    assert STATUS.findall(received) == [b"503"]
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
    while time.monotonic() - begin < BoundedProtocol.head_timeout_s / 2:  # they send on
        for client in clients[:SLOW_CLIENTS:100]:
            with contextlib.suppress(ConnectionError):  # "y" is no method
                client.sendall(b"y")
        # Sleep: the pace of slow clients.
        time.sleep(0.5)
    for client in clients:
        with contextlib.suppress(ConnectionError):
            # Ends: the server closes, or the time limit of the socket.
            while client.recv(1 << 12):
                pass
        client.close()
    print(f"closed after {time.monotonic() - begin:.1f} s")
    assert time.monotonic() - begin < BoundedProtocol.head_timeout_s + 5
    assert STATUS.findall(exchange(mesh, post(LENGTH + CLOSE))) == [b"200"]
    wait_for(lambda: mesh.frontend.process.poll() is None, "the frontend runs")

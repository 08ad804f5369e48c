"""A hostile client that floods a port, and a peaceful one that measures it meanwhile.

    python -m tests.kit.floods flood HOST:PORT FLOOD METHOD SECONDS CONNECTIONS
    python -m tests.kit.floods ping HOST:PORT PID METHOD IS_NEW

The first sends one flood, and prints a JSON line: bytes sent, connections opened, and the text of
the last GOAWAY of ENHANCE_YOUR_CALM. The second sends pings until its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.kit.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    FLOODS,
    GRPC,
    HEAD,
    PING,
    PREFACE,
    RESET,
    SETTINGS,
    WINDOW_UPDATE,
    calm_text,
    frame,
    headers,
    prefixed,
    request,
)

ROOT = Path(__file__).parents[2]
WRITE_BYTES = 64 << 10
# The beginning of a frame that opens the window of a call.
STREAM_WINDOW = frame(WINDOW_UPDATE, payload=bytes(4))[:9]
PING_INTERVAL_S = 0.005
PING_TIMEOUT_S = 20.0
LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)

HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\n"
    b"connection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
SWITCHED = b"HTTP/1.1 101 "


@dataclass(frozen=True, slots=True)
class Flood:
    """What one hostile connection sends."""

    first: bytes
    """Once."""

    part: bytes = b""
    """Afterwards, until the connection ends; empty: nothing."""

    window_bytes: int = 0
    """How many bytes of parts are sent in all, once the window of the call is open; 0: any number,
    at once."""

    answer: bytes = b""
    """What the server sends before the parts are sent; empty: they follow at once."""

    is_held: bool = False
    """Whether the connection stays open when nothing is left to send; otherwise it is replaced."""


def _resets(method: str) -> bytes:
    """Returns streams that are begun and reset, as in CVE-2023-44487."""
    pairs = ((":method", "POST"), (":scheme", "http"), (":path", method), GRPC)
    reset = struct.pack(">L", 8)
    return b"".join(
        headers(*pairs, stream=stream) + frame(RESET, payload=reset, stream=stream)
        for stream in range(1, 2000, 2)
    )


def http2_floods(method: str) -> dict[str, Flood]:
    """Returns floods of a gRPC port, by name. method: that their calls begin."""
    call = request(method)
    start = PREFACE + frame(SETTINGS, stream=0)
    bomb = b"\x40\x01a\x7f\x81\x16" + bytes(400) + b"\xbe" * 15_000
    empty = prefixed(b"")
    found = {name: Flood(call, part) for name, part in FLOODS.items()}
    return found | {
        "ping_before_a_call": Flood(start, FLOODS["ping"]),
        "settings_before_a_call": Flood(start, FLOODS["settings"]),
        "empty_messages": Flood(call, frame(DATA, payload=empty * 3000), 4_000_000, is_held=True),
        "messages_of_a_frame_each": Flood(
            call, frame(DATA, payload=empty), 4_000_000, is_held=True
        ),
        "messages_above_the_window": Flood(call, frame(DATA, payload=empty * 3000)),
        "continuation": Flood(start + frame(HEAD), frame(CONTINUATION, payload=b"x" * 100)),
        "empty_continuation": Flood(start + frame(HEAD), frame(CONTINUATION)),
        "rapid_reset": Flood(start + _resets(method)),
        "header_bomb": Flood(start + frame(HEAD, END_HEADERS, bomb)),
        "connections": Flood(b"", is_held=True),
        "connections_with_preface": Flood(start, is_held=True),
        "reconnects": Flood(start),
    }


def http_floods() -> dict[str, Flood]:
    """Returns floods of the frontend's HTTP port, by name."""
    return {
        "pipelined": Flood(b"", LIVE),
        "small_chunks": Flood(CHUNKED, b"1\r\n \r\n"),
        "headers": Flood(LIVE[:-2], b"a: b\r\n"),
        "not_http": Flood(PREFACE, frame(PING, payload=bytes(8), stream=0)),
        "connections": Flood(b"", is_held=True),
        "reconnects": Flood(LIVE),
        "websocket_pings": Flood(HANDSHAKE, b"\x89\x80" + bytes(4), answer=SWITCHED),
        "websocket_errors": Flood(HANDSHAKE, b"\x81\x81" + bytes(4) + b"{", answer=SWITCHED),
        "websocket_parts": Flood(HANDSHAKE, b"\x01\x80" + bytes(4), answer=SWITCHED),
    }


@dataclass(slots=True)
class _Hostile:
    """One hostile connection."""

    unsent: bytes
    received: bytes = b""
    awaits_window: bool = False
    awaits_answer: bool = False


@dataclass(slots=True)
class _Attacker:
    """The hostile connections of one flood."""

    address: tuple[str, int]
    flood: Flood
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    sent: int = 0
    opened: int = 0
    calm: str = ""

    def run(self, connections: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for _ in range(connections):
            self._open()
        while time.monotonic() < deadline:
            for key, events in self.selector.select(0.05):
                self._serve(key, events)

    def _open(self) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(self.address)
        self.opened += 1
        flood = self.flood
        hostile = _Hostile(flood.first, b"", flood.window_bytes > 0, bool(flood.answer))
        self.selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, hostile)

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        connection: Any = key.fileobj
        hostile: _Hostile = key.data
        try:
            if events & selectors.EVENT_READ:
                self._receive(connection, hostile)
            if events & selectors.EVENT_WRITE:
                count = connection.send(hostile.unsent) if hostile.unsent else 0
                self.sent += count
                hostile.unsent = hostile.unsent[count:]
                if not hostile.unsent:
                    self._continue(connection, hostile)
        except BlockingIOError:
            return
        except OSError:
            self._close(connection, hostile)

    def _receive(self, connection: socket.socket, hostile: _Hostile) -> None:
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionError
        hostile.received = (hostile.received + data)[: 1 << 16]
        if hostile.awaits_answer and self.flood.answer in hostile.received:
            hostile.awaits_answer = False
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self.selector.modify(connection, events, hostile)
        if hostile.awaits_window and STREAM_WINDOW in hostile.received and not hostile.unsent:
            hostile.awaits_window = False
            count = self.flood.window_bytes // len(self.flood.part)
            hostile.unsent = self.flood.part * count
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self.selector.modify(connection, events, hostile)

    def _continue(self, connection: socket.socket, hostile: _Hostile) -> None:
        """Handles a connection that has sent all it had to send."""
        flood = self.flood
        if hostile.awaits_answer:
            self.selector.modify(connection, selectors.EVENT_READ, hostile)
        elif flood.part and not flood.window_bytes:
            hostile.unsent = flood.part * (WRITE_BYTES // len(flood.part) + 1)
        elif flood.is_held or hostile.awaits_window:
            self.selector.modify(connection, selectors.EVENT_READ, hostile)
        else:
            with contextlib.suppress(OSError):
                hostile.received += connection.recv(1 << 16)
            self._close(connection, hostile)

    def _close(self, connection: socket.socket, hostile: _Hostile) -> None:
        self.calm = calm_text(hostile.received) or self.calm
        self.selector.unregister(connection)
        connection.close()
        self._open()


def flood_of(name: str, method: str) -> Flood:
    """Returns a flood. method: of its calls; empty: of the HTTP port."""
    return (http2_floods(method) if method else http_floods())[name]


@contextlib.contextmanager
def flooding(
    address: str, name: str, method: str, seconds: float, connections: int
) -> Iterator[Callable[[], dict[str, Any]]]:
    """Sends a flood from another process. Yields a function that returns its figures at its end."""
    command = [sys.executable, "-m", "tests.kit.floods", "flood", address, name, method]
    command += [str(seconds), str(connections)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        yield lambda: json.loads(process.communicate(timeout=seconds + 30)[0])
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Peaceful:
    """A connection that sends pings, one after the other.

    The time of a ping is without that in which either process, or the kernel's delivery of packets,
    waited for a processor, so that it does not depend on what else runs on the machine.
    """

    address: str
    pid: int
    """Of the process that responds."""

    method: str
    """Of the call on a gRPC port; empty: the connection speaks HTTP."""

    is_new: bool = False
    """Whether each ping has a connection of its own, which the time includes."""

    @contextlib.contextmanager
    def measured(self) -> Iterator[PingFigures]:
        """Sends pings from another process during the block. The figures are there after it."""
        command = [sys.executable, "-m", "tests.kit.floods", "ping", self.address, str(self.pid)]
        command += [self.method, str(int(self.is_new))]
        figures = PingFigures()
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            try:
                assert process.stdout is not None
                # An empty line after the first response, or the figures if there was none.
                first = process.stdout.readline().strip()
                yield figures
                rest, _ = process.communicate(timeout=PING_TIMEOUT_S + 10)
                for name, value in json.loads(first or rest).items():
                    setattr(figures, name, value)
            finally:
                process.kill()


@dataclass(slots=True)
class PingFigures:
    """What a peaceful connection has measured."""

    worst_ms: float = 0.0
    worst_wall_ms: float = 0.0
    """With the time in which a process waited for a processor."""

    pings: int = 0
    error: str = ""
    """Why the connection ended; empty if it did not."""


class _Pinger:
    """Measures a peaceful connection until the standard input ends."""

    def __init__(self, address: str, pid: int, method: str, *, is_new: bool) -> None:
        self._address, self._pid, self._is_new = _host_port(address), pid, is_new
        self._first, self._ping, self._response = b"", LIVE, b"}"
        if method:
            self._first = request(method)
            self._ping = frame(PING, payload=b"peaceful", stream=0)
            self._response = frame(PING, 1, b"peaceful", 0)
        self._figures = PingFigures()
        # Threads of the kernel that deliver packets on a busy machine.
        self._network_pids = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/comm")
            if path.read_text().startswith("ksoftirqd")
        ]

    def run(self) -> PingFigures:
        try:
            if self._is_new:
                self._run_new()
            else:
                with self._connected() as connection:
                    while self._continues(PING_INTERVAL_S):
                        self._measure(connection, self._now())
        except OSError as error:
            self._figures.error = f"the peaceful connection ended: {error}"
        return self._figures

    def _run_new(self) -> None:
        while self._continues(10 * PING_INTERVAL_S):
            began = self._now()
            with self._connected() as connection:
                self._measure(connection, began)

    def _continues(self, pause_s: float) -> bool:
        return not select.select([sys.stdin], [], [], pause_s)[0]

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=PING_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(self._first)
        return connection

    def _measure(self, connection: socket.socket, began: tuple[float, float]) -> None:
        connection.sendall(self._ping)
        received = b""
        # Ends: the response, or the end of the connection; each read has a limit.
        while self._response not in received:
            data = connection.recv(1 << 16)
            if not data:
                raise ConnectionError(f"closed by the server after {received!r}")
            received += data
        ended, figures = self._now(), self._figures
        wall_ms, waited_ms = (1000 * (ended[part] - began[part]) for part in (0, 1))
        if not figures.pings:
            print(flush=True)
        if figures.pings or self._is_new:  # the first one includes the connection
            figures.worst_wall_ms = max(figures.worst_wall_ms, round(wall_ms, 1))
            figures.worst_ms = max(figures.worst_ms, round(wall_ms - waited_ms, 1))
        figures.pings += 1

    def _now(self) -> tuple[float, float]:
        """Returns the time, and how long both processes have waited for a processor."""
        waits_s = map(_processor_wait_s, (self._pid, os.getpid(), *self._network_pids))
        return time.perf_counter(), sum(waits_s)


def _processor_wait_s(pid: int) -> float:
    """Returns how long the main thread of a process was ready to run and did not."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def rss_mb(pid: int) -> float:
    """Returns the resident memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    return int(values["VmRSS"].split()[0]) / 1024


def main(what: str, address: str, *options: str) -> None:
    if what == "ping":
        pid, method, is_new = options
        pinger = _Pinger(address, int(pid), method, is_new=bool(int(is_new)))
        print(json.dumps(asdict(pinger.run())))
        return
    name, method, seconds, connections = options
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    attacker = _Attacker(_host_port(address), flood_of(name, method))
    attacker.run(int(connections), float(seconds))
    print(json.dumps({"sent": attacker.sent, "opened": attacker.opened, "calm": attacker.calm}))


if __name__ == "__main__":
    main(*sys.argv[1:])

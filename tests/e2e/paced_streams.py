"""Streams of evenly paced tokens, and the longest time without one."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import WAIT_S, wait_for

STREAMS = 16
# Between two tokens of a paced stream, in seconds: usually 0.03.
GAP_MAX_S = 0.4
# Above this pause of a thread that only sleeps, a machine is busy: usually 0.002.
BUSY_PAUSE_S = 0.05
PAUSE_TICK_S = 0.005
MEASUREMENTS_MAX = 5
MESSAGE = {"role": "user", "content": "x"}
_BODY = {
    "model": MODEL,
    "messages": [MESSAGE],
    "stream": True,
    "ignore_eos": True,
    "max_tokens": 8000,
}


class PacedStream(threading.Thread):
    """Streamed responses, one after another, and the longest time between two events of one."""

    def __init__(
        self, url: str, stop: threading.Event, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.gap_s = 0.0
        self.events = 0
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=WAIT_S)
        self._stop_reading = stop
        self._headers = dict(headers or {})

    def run(self) -> None:
        # A response lasts a minute; a test may take longer on a busy machine.
        while not self._stop_reading.is_set():
            self._read_response()

    def _read_response(self) -> None:
        self._connection.request("POST", "/v1/chat/completions", json.dumps(_BODY), self._headers)
        response = self._connection.getresponse()
        last: float | None = None
        while not self._stop_reading.is_set() and response.readline():
            if (now := time.monotonic()) and last is not None:
                self.gap_s = max(self.gap_s, now - last)
            last = now
            self.events += 1
        self._connection.close()


def wait_for_events(streams: Sequence[PacedStream], count: int) -> None:
    """Waits until each stream has received `count` more events."""
    targets = [stream.events + count for stream in streams]
    wait_for(
        lambda: all(one.events >= target for one, target in zip(streams, targets, strict=True)),
        f"{count} events on each stream",
    )


@contextmanager
def paced_streams(
    mesh: Mesh, headers: Mapping[str, str] | None = None
) -> Iterator[Sequence[PacedStream]]:
    """Streams of a mesh whose worker has the sim's default speed; they have begun. headers: of
    their requests."""
    stop = threading.Event()
    streams = [PacedStream(mesh.url, stop, headers) for _ in range(STREAMS)]
    for stream in streams:
        stream.start()
    try:
        wait_for_events(streams, 20)
        yield streams
    finally:
        stop.set()
        for stream in streams:
            stream.join(WAIT_S)


class MachinePauses(threading.Thread):
    """Measures how long other programs keep the processor from a thread that only sleeps."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self._stop_measuring = threading.Event()

    def __enter__(self) -> MachinePauses:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_measuring.set()
        self.join()

    def run(self) -> None:
        while True:
            begin = time.monotonic()
            # Sleep: its excess is what is measured.
            if self._stop_measuring.wait(PAUSE_TICK_S):
                return
            self.longest_s = max(self.longest_s, time.monotonic() - begin - PAUSE_TICK_S)


# Any: JSON.
def post_beside(
    streams: Sequence[PacedStream], url: str, path: str, body: bytes
) -> tuple[int, Any, float, float]:
    """Status, JSON and seconds of a response, and the longest gap of the streams until then.

    It is measured again if the gap is too long on a machine that was busy meanwhile: a token passes
    three processes, and each one waits for the processor.
    """
    for _ in range(MEASUREMENTS_MAX):
        with MachinePauses() as pauses:
            status, value, seconds, gap_s = _post_once(streams, url, path, body)
        if gap_s <= GAP_MAX_S or pauses.longest_s < BUSY_PAUSE_S:
            break
        print(f"measured again: gap {gap_s:.3f} s, pauses of the machine {pauses.longest_s:.3f} s")
    return status, value, seconds, gap_s


# Any: JSON.
def _post_once(
    streams: Sequence[PacedStream], url: str, path: str, body: bytes
) -> tuple[int, Any, float, float]:
    for stream in streams:
        stream.gap_s = 0.0
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=WAIT_S)
    begin = time.monotonic()
    connection.request("POST", path, body)
    response = connection.getresponse()
    value = json.loads(response.read())
    connection.close()
    seconds = time.monotonic() - begin
    wait_for_events(streams, 2)
    return response.status, value, seconds, max(stream.gap_s for stream in streams)

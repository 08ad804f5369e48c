"""Large bodies of many small values: they are refused, and other streams go on."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from frontend_svc.core.openai.body_size import CONTAINERS_MAX
from tests.e2e.mesh import MODEL, WAIT_S, Mesh, wait_for

pytestmark = pytest.mark.slow

STREAMS = 16
# Between two tokens of a paced stream, in seconds: usually 0.03.
GAP_MAX_S = 0.25
MEGABYTE = 1 << 20
MESSAGE = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# Any, here and below: JSON.
Json = Any


def repeated(value: Json, size: int) -> list[Json]:
    """A list of copies that takes `size` bytes as JSON."""
    return [value] * (size // (len(json.dumps(value, separators=(",", ":"))) + 1))


def chat(messages: list[Json], **fields: Json) -> Json:
    return {"model": MODEL, "messages": messages, "max_tokens": 4, **fields}


# Name -> path, body, `param` of the error; a body is as large as many clients may send.
FLOODS: dict[str, tuple[str, Json, str | None]] = {
    "messages": ("/v1/chat/completions", chat(repeated(MESSAGE, 8 * MEGABYTE)), None),
    "messages within the total": (
        "/v1/chat/completions",
        chat([MESSAGE] * (CONTAINERS_MAX - 100)),
        "messages",
    ),
    "parts": (
        "/v1/chat/completions",
        chat([{"role": "user", "content": [{"type": "text", "text": "x"}] * 16_000}]),
        "messages[0].content",
    ),
    "calls": (
        "/v1/chat/completions",
        chat([{"role": "assistant", "tool_calls": [CALL] * 10_000}]),
        "messages[0].tool_calls",
    ),
    "enum of a tool": (
        "/v1/chat/completions",
        chat(
            [MESSAGE],
            tools=[
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"enum": repeated("", 8 * MEGABYTE)}},
                }
            ],
        ),
        None,
    ),
    "long messages": (
        "/v1/chat/completions",
        chat([{"role": "user", "content": "able about " * 100}] * 4000),
        "messages",
    ),
    "prompts": (
        "/v1/completions",
        {"model": MODEL, "prompt": repeated("x", 8 * MEGABYTE)},
        None,
    ),
    "token ids": (
        "/v1/completions",
        {"model": MODEL, "prompt": repeated(1, 8 * MEGABYTE)},
        None,
    ),
    "messages of /v1/messages": (
        "/v1/messages",
        chat(repeated(MESSAGE, 8 * MEGABYTE)),
        None,
    ),
    "blocks": (
        "/v1/messages",
        chat([{"role": "user", "content": [{"type": "text", "text": "x"}] * 16_000}]),
        "messages[0].content",
    ),
    "items": ("/v1/responses", {"model": MODEL, "input": repeated(MESSAGE, 8 * MEGABYTE)}, None),
    "items within the total": (
        "/v1/responses",
        {"model": MODEL, "input": [MESSAGE] * (CONTAINERS_MAX - 100)},
        "input",
    ),
    "include": (
        "/v1/responses",
        {"model": MODEL, "input": "x", "include": [1] * 100_000},
        "include[0]",
    ),
    "inputs": ("/v1/embeddings", {"model": MODEL, "input": repeated("x", 8 * MEGABYTE)}, None),
    "tokenize": ("/tokenize", {"model": MODEL, "messages": repeated(MESSAGE, 8 * MEGABYTE)}, None),
    "count_tokens": (
        "/v1/messages/count_tokens",
        {"model": MODEL, "messages": repeated(MESSAGE, 8 * MEGABYTE)},
        None,
    ),
    "lists": ("/detokenize", {"model": MODEL, "tokens": repeated([], 8 * MEGABYTE)}, None),
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    # Without an explicit speed, the sim paces its tokens as a GPU does.
    with Mesh(tmp_path_factory.mktemp("mesh"), workers=1) as mesh:
        yield mesh


class PacedStream(threading.Thread):
    """A streamed response, and the longest time between two of its events."""

    def __init__(self, url: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.gap_s = 0.0
        self.events = 0
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=WAIT_S)
        self._stop_reading = stop

    def run(self) -> None:
        body = chat([MESSAGE], stream=True, ignore_eos=True) | {"max_tokens": 8000}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = self._connection.getresponse()
        last: float | None = None
        while not self._stop_reading.is_set() and response.readline():
            if (now := time.monotonic()) and last is not None:
                self.gap_s = max(self.gap_s, now - last)
            last = now
            self.events += 1
        self._connection.close()


def post(url: str, path: str, body: bytes) -> tuple[int, Json, float]:
    """Status, JSON and seconds of a response."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=WAIT_S)
    begin = time.monotonic()
    connection.request("POST", path, body)
    response = connection.getresponse()
    value = json.loads(response.read())
    connection.close()
    return response.status, value, time.monotonic() - begin


def wait_for_events(streams: list[PacedStream], count: int) -> None:
    """Waits until each stream has received `count` more events."""
    targets = [stream.events + count for stream in streams]
    wait_for(
        lambda: all(one.events >= target for one, target in zip(streams, targets, strict=True)),
        f"{count} events on each stream",
    )


def test_streams_go_on_while_bodies_of_many_small_values_are_refused(mesh: Mesh) -> None:
    bodies = {
        name: (path, json.dumps(body, separators=(",", ":")).encode(), param)
        for name, (path, body, param) in FLOODS.items()
    }
    stop = threading.Event()
    streams = [PacedStream(mesh.url, stop) for _ in range(STREAMS)]
    for stream in streams:
        stream.start()
    wait_for_events(streams, 20)
    failures = []
    for name, (path, body, param) in bodies.items():
        for stream in streams:
            stream.gap_s = 0.0
        status, value, seconds = post(mesh.url, path, body)
        wait_for_events(streams, 2)
        gap_s = max(stream.gap_s for stream in streams)
        error = value.get("error", {})
        named = error.get("details", error).get("param")
        print(f"{name:26} {len(body) / 1e6:5.1f} MB  {status}  {seconds:5.2f} s  gap {gap_s:5.3f}")
        if (status, named) != (400, param) or gap_s > GAP_MAX_S:
            failures.append((name, status, value, gap_s))
    stop.set()
    for stream in streams:
        stream.join(WAIT_S)
    assert not failures

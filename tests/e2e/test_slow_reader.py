"""Clients that read slower than tokens arrive, while other clients read fast."""

from __future__ import annotations

import json
import re
import socket
import time

import pytest

from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.waiting import WAIT_S

pytestmark = pytest.mark.slow

TOKENS = 3000
# With 20 alternatives a token, the response is several times as large as the socket buffers.
BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "seed": 1,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
}
PAUSE_S = 2.0


mesh = mesh_fixture(worker_flags=["--speedup=1000000"])


def send_request(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(WAIT_S)
    client.connect((host, int(port)))
    body = json.dumps(BODY).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
    client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return client


def read_events(client: socket.socket) -> str:
    """The events up to the end, without what differs between responses."""
    received = b""
    with client:
        # Ends: the server closes, or the time limit of the socket.
        while part := client.recv(1 << 20):
            received += part
    head, _, chunked = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), received[:500]
    text = b""
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        text += rest[: int(size, 16)]
        chunked = rest[int(size, 16) + 2 :]
    return re.sub(r'"(id|created)":[^,]+,', "", text.decode())


def test_a_client_that_pauses_receives_the_same_events(mesh: Mesh) -> None:
    slow, fast = send_request(mesh.url), send_request(mesh.url)
    expected = read_events(fast)
    assert expected.count("data: ") == TOKENS + 3  # role, tokens, finish reason, DONE
    assert expected.endswith("data: [DONE]\n\n")
    # Sleep: the client does not read for this time.
    time.sleep(PAUSE_S)
    assert read_events(slow) == expected

"""A client that disconnects: the worker's slot is free within 250 ms.

The workers report their open slots over gRPC, polled every few milliseconds after the client's
socket is closed.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for

FREE_TIMEOUT_S = 0.25
CLIENT_COUNT = 50
# A twentieth of real speed: 120 ms a token, and 600 prompt tokens a second.
SPEEDUP = 0.05
FLAGS = [f"--speedup={SPEEDUP}", "--max-num-batched-tokens=1024"]
LONG_PROMPT = "able about above accept " * 600


mesh = mesh_fixture(worker_flags=FLAGS)


@pytest.fixture(autouse=True)
def _no_open_slots(mesh: Mesh) -> Iterator[None]:
    yield
    wait_for(lambda: open_slots(mesh) == 0, "the next test starts without open slots")


def open_slots(mesh: Mesh) -> int:
    """Returns the open slots of all workers, counting requests still in their engines."""
    total = 0
    for worker in mesh.workers:
        load = worker.load()
        total += max(load.open_slots, sum(row.running + row.waiting for row in load.loads))
    return total


def steps(mesh: Mesh) -> int:
    return sum(worker.load().loads[0].engine_step for worker in mesh.workers)


def end_count(mesh: Mesh, end_kind: str) -> int:
    return sum(worker.counters().get(end_kind, 0) for worker in mesh.workers)


def send_request(url: str, prompt: str, *, stream: bool, padding: int = 0) -> socket.socket:
    """Sends a request; returns its connection. padding: additional bytes of the body."""
    body = (
        json.dumps(
            {
                "model": MODEL,
                "prompt": prompt,
                "max_tokens": 500,
                "ignore_eos": True,
                "stream": stream,
            }
        ).encode()
        + b" " * padding
    )
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)), WAIT_S)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def read_token(client: socket.socket) -> None:
    """Waits for the first event of a stream."""
    received, deadline = b"", time.monotonic() + WAIT_S
    while b"data: " not in received:
        part = client.recv(65536)
        assert part, f"the response ended: {received!r}"
        assert time.monotonic() < deadline, f"no event in {WAIT_S:g} s: {received!r}"
        received += part


def wait_until_freed(mesh: Mesh) -> float:
    """Returns the seconds from now until no worker has an open slot."""
    began = time.monotonic()
    wait_for(lambda: open_slots(mesh) == 0, "every slot is freed")
    return time.monotonic() - began


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "unary"])
@pytest.mark.parametrize("prompt", [LONG_PROMPT, "Hi"], ids=["in prefill", "after a token"])
@pytest.mark.slow
def test_a_disconnected_client_frees_its_slot_in_time(
    mesh: Mesh, stream: bool, prompt: str
) -> None:
    stopped, before = end_count(mesh, "stopped"), steps(mesh)
    client = send_request(mesh.url, prompt, stream=stream)
    wait_for(lambda: open_slots(mesh) == 1, "a worker has the request")
    if prompt == "Hi":
        # The first step computes the prompt and its token; with the second, tokens flow.
        wait_for(lambda: steps(mesh) >= before + 2, "the engine generates tokens")
        if stream:
            read_token(client)
    client.close()
    took_s = wait_until_freed(mesh)
    print(f"freed in {took_s * 1000:.0f} ms")
    assert took_s < FREE_TIMEOUT_S
    if prompt == LONG_PROMPT:
        assert steps(mesh) <= before + 1, "the prompt was computed to its end"
    # An explicit abort, so that the engine's own abort runs.
    assert end_count(mesh, "stopped") == stopped + 1
    wait_for(lambda: mesh.router.bookings() == 0, "the router has no booking")


@pytest.mark.slow
def test_the_client_of_a_large_body_frees_its_slot_in_time(mesh: Mesh) -> None:
    """The server pauses reading such a body, and must see the disconnect nevertheless."""
    client = send_request(mesh.url, LONG_PROMPT, stream=True, padding=1 << 20)
    wait_for(lambda: open_slots(mesh) == 1, "a worker has the request")
    client.close()
    assert wait_until_freed(mesh) < FREE_TIMEOUT_S


@pytest.mark.slow
@pytest.mark.parametrize("follows_at_once", [True, False])
def test_pipelined_requests_end_with_their_connection(mesh: Mesh, follows_at_once: bool) -> None:
    client = send_request(mesh.url, LONG_PROMPT, stream=True)
    if not follows_at_once:
        wait_for(lambda: open_slots(mesh) == 1, "a worker has the first request")
    body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 1}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    client.sendall(head.encode() + body)
    wait_for(lambda: open_slots(mesh) == 1, "a worker has the first request")
    client.close()
    assert wait_until_freed(mesh) < FREE_TIMEOUT_S


@pytest.mark.slow
def test_many_clients_that_disconnect_at_once_free_their_slots_in_time(mesh: Mesh) -> None:
    stopped = end_count(mesh, "stopped")
    clients = [
        send_request(mesh.url, LONG_PROMPT if number % 2 else "Hi", stream=number % 4 < 2)
        for number in range(CLIENT_COUNT)
    ]
    wait_for(lambda: open_slots(mesh) == CLIENT_COUNT, "workers have all requests")
    for client in clients:
        client.close()
    took_s = wait_until_freed(mesh)
    print(f"{CLIENT_COUNT} freed in {took_s * 1000:.0f} ms")
    assert took_s < FREE_TIMEOUT_S
    assert end_count(mesh, "stopped") == stopped + CLIENT_COUNT
    wait_for(lambda: mesh.router.bookings() == 0, "the router has no booking")


@pytest.mark.slow
@pytest.mark.row("S4-38", "S4-39")
def test_a_killed_frontend_frees_the_slots_of_its_clients_in_time(mesh: Mesh) -> None:
    frontend = mesh.spawn("frontend").wait_ready()
    url = frontend.addresses["http"]
    wait_for(
        lambda: mesh.http.get(f"{url}/ready").status_code == 200, "the second frontend is ready"
    )
    stopped, closed = end_count(mesh, "stopped"), end_count(mesh, "closed")
    clients = [send_request(url, prompt, stream=True) for prompt in ("Hi", LONG_PROMPT)]
    wait_for(lambda: open_slots(mesh) == 2, "workers have both requests")
    frontend.kill()
    took_s = wait_until_freed(mesh)
    print(f"freed in {took_s * 1000:.0f} ms")
    assert took_s < FREE_TIMEOUT_S
    # The streams broke: generators are closed, not aborted.
    assert (end_count(mesh, "stopped"), end_count(mesh, "closed")) == (stopped, closed + 2)
    wait_for(lambda: mesh.router.bookings() == 0, "the router has no booking")
    for client in clients:
        client.close()


def test_a_connection_serves_a_request_after_six_idle_seconds(mesh: Mesh) -> None:
    """Many clients keep an idle connection for 5 s: the server must not close it first."""
    connection = HTTPConnection(mesh.url.removeprefix("http://"), timeout=WAIT_S)
    connection.connect()
    connection.auto_open = 0  # A closed connection is an error here.
    for pause_s in (6.0, 0.0):
        connection.request("GET", "/live")
        response = connection.getresponse()
        assert response.status == 200
        response.read()
        # Sleep: the connection is idle for this time.
        time.sleep(pause_s)
    connection.close()

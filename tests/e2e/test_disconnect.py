"""Clients that go away: the worker's slot is free within 250 ms, whatever it was doing.

Freed is what the workers themselves say, asked over gRPC every few milliseconds from the moment in
which the client's socket is closed.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.e2e.mesh import MODEL, WAIT_S, Mesh, logs_on_failure, wait_for

FREE_TIMEOUT_S = 0.25
CLIENT_COUNT = 50
# At a twentieth of real time: 120 ms a token, and 600 prompt tokens a second.
SPEEDUP = 0.05
FLAGS = [f"--speedup={SPEEDUP}", "--max-num-batched-tokens=1024"]
LONG_PROMPT = "able about above accept " * 600


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    with Mesh(folder, worker_flags=FLAGS) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def _logs(mesh: Mesh, request: pytest.FixtureRequest) -> Iterator[None]:
    with logs_on_failure(mesh, request):
        yield
        wait_for(lambda: open_slots(mesh) == 0, "no slot is left to the next test")


def open_slots(mesh: Mesh) -> int:
    """Slots open at the workers, and at least what their engines still hold."""
    total = 0
    for worker in mesh.workers:
        load = worker.load()
        total += max(load.open_slots, sum(row.running + row.waiting for row in load.loads))
    return total


def steps(mesh: Mesh) -> int:
    return sum(worker.load().loads[0].engine_step for worker in mesh.workers)


def end_count(mesh: Mesh, end_kind: str) -> int:
    return sum(worker.counters().get(end_kind, 0) for worker in mesh.workers)


def send_request(url: str, prompt: str, *, stream: bool) -> socket.socket:
    """A client whose request is sent."""
    body = json.dumps(
        {"model": MODEL, "prompt": prompt, "max_tokens": 500, "ignore_eos": True, "stream": stream}
    ).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)), WAIT_S)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def read_token(client: socket.socket) -> None:
    """Returns when the first event of a stream is here."""
    received = b""
    while b"data: " not in received:
        part = client.recv(65536)
        assert part, f"the answer ended: {received!r}"
        received += part


def wait_until_freed(mesh: Mesh) -> float:
    """Seconds from now until no worker has a slot open."""
    began = time.monotonic()
    wait_for(lambda: open_slots(mesh) == 0, "every slot is freed")
    return time.monotonic() - began


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "unary"])
@pytest.mark.parametrize("prompt", [LONG_PROMPT, "Hi"], ids=["in prefill", "after a token"])
@pytest.mark.slow
def test_a_client_that_goes_away_frees_its_slot_in_time(
    mesh: Mesh, stream: bool, prompt: str
) -> None:
    stopped, before = end_count(mesh, "stopped"), steps(mesh)
    client = send_request(mesh.url, prompt, stream=stream)
    wait_for(lambda: open_slots(mesh) == 1, "the request is at a worker")
    if prompt == "Hi":
        # The first step computes the prompt and its token; with the second, tokens flow.
        wait_for(lambda: steps(mesh) >= before + 2, "tokens are made")
        if stream:
            read_token(client)
    client.close()
    took_s = wait_until_freed(mesh)
    print(f"freed in {took_s * 1000:.0f} ms")
    assert took_s < FREE_TIMEOUT_S
    if prompt == LONG_PROMPT:
        assert steps(mesh) <= before + 1, "the prompt was computed to its end"
    # Told explicitly, so that the engine's own abort runs.
    assert end_count(mesh, "stopped") == stopped + 1
    wait_for(lambda: mesh.router.bookings() == 0, "the router's books are empty")


@pytest.mark.slow
def test_a_crowd_that_goes_away_at_once_frees_all_its_slots_in_time(mesh: Mesh) -> None:
    stopped = end_count(mesh, "stopped")
    clients = [
        send_request(mesh.url, LONG_PROMPT if number % 2 else "Hi", stream=number % 4 < 2)
        for number in range(CLIENT_COUNT)
    ]
    wait_for(lambda: open_slots(mesh) == CLIENT_COUNT, "all requests are at workers")
    for client in clients:
        client.close()
    took_s = wait_until_freed(mesh)
    print(f"{CLIENT_COUNT} freed in {took_s * 1000:.0f} ms")
    assert took_s < FREE_TIMEOUT_S
    assert end_count(mesh, "stopped") == stopped + CLIENT_COUNT
    wait_for(lambda: mesh.router.bookings() == 0, "the router's books are empty")


@pytest.mark.slow
@pytest.mark.row("S4-38", "S4-39")
def test_a_frontend_that_dies_frees_the_slots_of_its_clients_in_time(mesh: Mesh) -> None:
    frontend = mesh.spawn("frontend").wait_ready()
    url = frontend.addresses["http"]
    wait_for(
        lambda: mesh.http.get(f"{url}/ready").status_code == 200, "the second frontend is ready"
    )
    stopped, closed = end_count(mesh, "stopped"), end_count(mesh, "closed")
    clients = [send_request(url, prompt, stream=True) for prompt in ("Hi", LONG_PROMPT)]
    wait_for(lambda: open_slots(mesh) == 2, "both requests are at workers")
    frontend.kill()
    took_s = wait_until_freed(mesh)
    print(f"freed in {took_s * 1000:.0f} ms")
    assert took_s < FREE_TIMEOUT_S
    # Streams that were merely dropped: generators closed, nothing aborted.
    assert (end_count(mesh, "stopped"), end_count(mesh, "closed")) == (stopped, closed + 2)
    wait_for(lambda: mesh.router.bookings() == 0, "the router's books are empty")
    for client in clients:
        client.close()

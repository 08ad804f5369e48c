"""What holds for every stock server that takes token ids: the checks of SGLang's and vLLM's tests.

The blocks of their meshes have 16 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

from tests.adapters.known_streams import CountingServer, KnownStreams, busiest
from tests.adapters.servers_mesh import PATIENT_S, Json, Server, ServersMesh
from tests.adapters.tcp_proxy import TcpProxy
from tests.kit.waiting import wait_for

# Of `prompt_of`.
BLOCKS = 10
INVALID: Json = {
    **{"max_tokens": -1, "temperature": 9, "top_p": 2, "min_tokens": 99, "n": 0},
    **{"guided_grammar": "root ::= (", "prompt": [10**9]},
}


class TokenServer(Server, CountingServer, Protocol):
    """A server that takes token ids and publishes KV events."""

    replay_port: int

    @property
    def events_port(self) -> int:
        """Where it publishes KV events."""

    def freeze(self) -> None:
        """Stops all its processes."""

    def thaw(self) -> None:
        """Lets them go on."""

    def killed(self) -> AbstractContextManager[None]:
        """Kills it, and starts it again at the end."""

    def generate(self, prompt: Sequence[int], count: int = 1) -> None:
        """Sends a request past the mesh."""


def prompt_of(seed: int, count: int = 160) -> list[int]:
    """Returns token ids that no other seed has."""
    return [100 + (seed * 977 + at * 31) % 3000 for at in range(count)]


def wait_for_return(mesh: ServersMesh, server: TokenServer) -> None:
    """Waits until the mesh uses a server again."""
    wait_for(lambda: mesh.serves(server), "it is back", PATIENT_S)


def check_invalid_fields(mesh: ServersMesh, servers: Sequence[TokenServer]) -> None:
    """Invalid fields are refused by name, and no server counts as failing."""
    for name, value in INVALID.items():
        body = {"model": mesh.model, "prompt": "a", "max_tokens": 2} | {name: value}
        assert mesh.post("/v1/completions", body, 400)["error"]["param"] == name
    assert all(mesh.serves(one) for one in servers), "their circuits are closed"


def check_salts(mesh: ServersMesh, server: TokenServer) -> None:
    """A cache salt separates blocks at the server and in the index."""
    prompt = prompt_of(50)

    def is_stored(salt: str) -> bool:
        return mesh.overlap(prompt, **({"cache_salt": salt} if salt else {}))[1] == BLOCKS

    for salt, others in (("one", ("two", "")), ("two", ("",))):
        found = mesh.complete_at(server, prompt, cache_salt=salt)
        assert not found["usage"]["prompt_tokens_details"]["cached_tokens"]
        wait_for(partial(is_stored, salt), "its blocks are stored", PATIENT_S)
        assert not any(is_stored(one) for one in others)


def check_decisions(folder: Path, servers: Sequence[TokenServer], *flags: str) -> None:
    """Decisions stand in for the events that a mesh does not read. flags: of the adapter."""
    with ServersMesh(folder, servers, "--no-kv-events", *flags) as mesh:
        for seed in range(60, 64):
            prompt = prompt_of(seed)
            worker = str(mesh.complete(prompt)["nvext"]["worker_id"])
            assert mesh.overlap(prompt) == (worker, BLOCKS)


def check_replay(folder: Path, server: TokenServer, *flags: str) -> None:
    """Events missed while the connection was cut are replayed. flags: of the adapter."""
    before, missed = prompt_of(70), prompt_of(71)
    with TcpProxy(server.events_port) as proxy:
        events = f"--server-kv-events=tcp://127.0.0.1:{proxy.port}"
        replay = f"--server-kv-replay=tcp://127.0.0.1:{server.replay_port}"
        with ServersMesh(folder, [server], events, replay, *flags, indexers=1) as mesh:
            server.generate(before)
            wait_for(lambda: mesh.overlap(before)[1] == BLOCKS, "they reach the router", PATIENT_S)
            proxy.cut()
            server.generate(missed)
            # Sleep: events would have arrived by now.
            time.sleep(1.0)
            assert mesh.overlap(missed)[1] == 0, "nothing arrives"
            assert mesh.overlap(before)[1] == BLOCKS, "nothing was withdrawn"
            proxy.restore()
            wait_for(lambda: mesh.overlap(missed)[1] == BLOCKS, "they are replayed", PATIENT_S)
            assert mesh.overlap(before)[1] == BLOCKS
            (worker,) = mesh.workers
            assert not worker.events("kv_events_lost")


def check_hang(
    mesh: ServersMesh, servers: Sequence[TokenServer], prompts: Sequence[list[int]], length: int
) -> None:
    """Streams leave a server that hangs and continue exactly; it is used again when it goes on.
    length: of each stream, in tokens."""
    assert all(mesh.serves(one) for one in servers), "all have computed"
    streams = KnownStreams(mesh, prompts, length)
    streams.wait_begun()
    loser = busiest(servers)
    loser.freeze()
    try:
        assert streams.found() == streams.expected, "they continued exactly"
        _complete_others(mesh)
    finally:
        loser.thaw()
    wait_for_return(mesh, loser)


def check_loss(
    mesh: ServersMesh, servers: Sequence[TokenServer], prompts: Sequence[list[int]], length: int
) -> None:
    """Streams continue exactly when their server is killed, and it comes back empty as the same
    worker. length: of each stream, in tokens."""
    cached = prompt_of(200)
    for server in servers:
        mesh.complete_at(server, cached)
    streams = KnownStreams(mesh, prompts, length)
    streams.wait_begun()
    loser = busiest(servers)
    worker = mesh.worker_of(loser)
    with loser.killed():
        assert streams.found() == streams.expected, "they continued exactly"
        _complete_others(mesh)
    wait_for_return(mesh, loser)
    assert mesh.worker_of(loser) == worker, "it kept its worker"
    wait_for(lambda: mesh.overlap(cached)[0] != worker, "the index has its empty cache")


def _complete_others(mesh: ServersMesh) -> None:
    """Completes requests while a server is lost."""
    for at in range(6):
        mesh.complete(prompt_of(230 + at, 40), 2)

"""Streams of token ids that are known before, for the loss of a server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from tests.adapters.servers_mesh import PATIENT_S, ServersMesh, Stream
from tests.kit.waiting import wait_for


class CountingServer(Protocol):
    """A server that counts its requests."""

    def running(self) -> int:
        """Returns the number of requests that it has."""


S = TypeVar("S", bound=CountingServer)


class KnownStreams:
    """Greedy responses of `length` tokens to prompts, sent once before and now streamed."""

    def __init__(self, mesh: ServersMesh, prompts: Sequence[list[int]], length: int) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            whole = [*pool.map(lambda one: mesh.complete(one, length), prompts)]
        self.expected = [one["nvext"]["completion_token_ids"] for one in whole]
        facts = {"extra_fields": ["completion_token_ids"]}
        body: dict[str, Any] = {"model": mesh.model, "max_tokens": length, "temperature": 0}
        body |= {"ignore_eos": True, "nvext": facts}
        path = "/v1/completions"
        self._streams = [Stream(mesh, path, body | {"prompt": one}) for one in prompts]

    def wait_begun(self) -> None:
        """Waits until each has tokens."""
        for stream in self._streams:
            stream.wait_begun()

    def found(self) -> Sequence[Any]:
        """Returns the token ids of each response."""
        ends = [[one["nvext"] for one in it.join() if "nvext" in one] for it in self._streams]
        return [end[-1]["completion_token_ids"] if end else None for end in ends]


def busiest(servers: Sequence[S]) -> S:
    """Returns the server that reports the most requests, at least one; it may report them late."""
    wait_for(lambda: any(one.running() for one in servers), "a server computes", PATIENT_S)
    return max(servers, key=lambda one: one.running())

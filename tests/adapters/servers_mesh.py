"""A mesh whose workers are one adapter process, and its clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tests.kit.processes import Mesh
from tests.kit.waiting import wait_for

# For long responses on a busy machine.
PATIENT_S = 300.0
_FACTS = ["worker_id", "kv_hit", "completion_token_ids"]
ADAPTER_FLAGS = ("--engine=openai", "--canary-idle-s=2", "--canary-timeout-s=5")

# Any, here and below: JSON.
Json = Any


class Server(Protocol):
    """A server behind the adapter."""

    @property
    def url(self) -> str:
        """Its base URL."""


class ServersMesh(Mesh):
    """A mesh with one worker process for these servers, which have one model."""

    def __init__(self, folder: Path, servers: Sequence[Server], *flags: str, **shape: Any) -> None:
        """flags: of the adapter; without --server-… the servers' URLs are given."""
        if not any(one.startswith(("--server-file", "--server-dns")) for one in flags):
            flags = (f"--server-urls={','.join(one.url for one in servers)}", *flags)
        super().__init__(folder, workers=1, worker_flags=[*ADAPTER_FLAGS, *flags], **shape)
        self._servers_count = len(servers)

    def is_complete(self) -> bool:
        """Whether the frontend is ready and has a worker for each server."""
        is_ready = self.http.get(f"{self.url}/ready").json()["ready"]
        return is_ready and len(self.known_instance_ids("worker")) == self._servers_count

    @cached_property
    def model(self) -> str:
        """The model of the servers; adapters may follow."""
        (name,) = self.model_names()
        return name

    def worker_of(self, server: Server) -> str:
        """Returns the id of the worker for a server, as the registry has it."""
        address = f'"{server.url.removeprefix("http://")}"'
        entries = (self.folder / "registry" / "default" / "instances").glob("*.json")
        (found,) = [one.stem for one in entries if address in one.read_text()]
        return str(int(found, 16))

    def post(self, path: str, body: Json, status: int = 200, **headers: str) -> Json:
        """Returns the response of the frontend, which must have this status."""
        url = f"{self.url}{path}"
        response = self.http.post(url, json=body, headers=_named(headers), timeout=PATIENT_S)
        assert response.status_code == status, response.text
        return response.json()

    def complete(self, prompt: Sequence[int], count: int = 8, **fields: Json) -> Json:
        """Returns a greedy response for token ids."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": count, "temperature": 0}
        body |= {"ignore_eos": True, "nvext": {"extra_fields": _FACTS}}
        return self.post("/v1/completions", body | fields)

    def complete_at(self, server: Server, prompt: Sequence[int], **fields: Json) -> Json:
        """Returns a greedy response of one server."""
        placed = {"extra_fields": _FACTS, "backend_instance_id": self.worker_of(server)}
        return self.complete(prompt, **{"nvext": placed, **fields})

    def overlap(self, prompt: Sequence[int], **fields: Json) -> tuple[str, int]:
        """Returns the worker that a router would choose, and its cached blocks."""
        found = self.complete(prompt, nvext={"annotations": ["query_instance_id"]}, **fields)[
            "nvext"
        ]
        return str(found["worker_id"]), found["kv_hit"]["overlap_blocks"]

    def serves(self, server: Server) -> bool:
        """Returns whether a request that must run at this server succeeds."""
        body = {"model": self.model, "messages": [{"role": "user", "content": "Hi"}]}
        response = self.http.post(
            f"{self.url}/v1/chat/completions",
            json=body | {"max_tokens": 1},
            headers={"x-kvmesh-backend-instance-id": self.worker_of(server)},
            timeout=PATIENT_S,
        )
        return response.status_code == 200

    def chat(self, text: str = "Hello there", **fields: Json) -> Json:
        """Returns a greedy response to one message."""
        messages = [{"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "max_tokens": 12, "temperature": 0}
        return self.post("/v1/chat/completions", body | fields)


def _named(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns headers by their names in HTTP."""
    return {name.replace("_", "-"): value for name, value in headers.items()}


class Stream:
    """A streamed response, read by a thread. events: so far; text: their content."""

    def __init__(self, mesh: Mesh, path: str, body: Json, **headers: str) -> None:
        self.events: list[Json] = []
        self.is_closed = False
        self._mesh, self._path, self._body, self._headers = mesh, path, body, _named(headers)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        url, body = f"{self._mesh.url}{self._path}", self._body | {"stream": True}
        with self._mesh.http.stream(
            "POST", url, json=body, headers=self._headers, timeout=PATIENT_S
        ) as response:
            for line in response.iter_lines():
                if self.is_closed:
                    return
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))

    def wait_begun(self) -> Stream:
        """Waits for the first events."""
        wait_for(lambda: len(self.events) > 1, "the response has begun", PATIENT_S)
        return self

    def close(self) -> None:
        """Disconnects with the next event."""
        self.is_closed = True

    @property
    def is_open(self) -> bool:
        """Whether it has neither ended nor disconnected."""
        return self._thread.is_alive()

    def join(self) -> list[Json]:
        """Returns all events."""
        self._thread.join(PATIENT_S)
        assert not self._thread.is_alive(), "the response has ended"
        return self.events

    @property
    def text(self) -> str:
        deltas = [one["choices"][0]["delta"] for one in self.events if one.get("choices")]
        return "".join(filter(None, (delta.get("content") for delta in deltas)))

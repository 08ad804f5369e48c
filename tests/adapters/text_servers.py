"""Servers without token ids: llama-server, and a frontend of ours as a plain OpenAI API."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Protocol

import httpx

from tests.adapters.stock_server import END_S, StockServer
from tests.kit.processes import Mesh, Service

SLOTS = 2


class TextServer(Protocol):
    """One server with SLOTS slots.

    model: its name of the model. long_tokens: of a response that takes seconds.
    """

    url: str
    model: str
    long_tokens: int

    def running(self) -> int:
        """Returns the number of requests that it computes or keeps waiting."""

    def freeze(self) -> None:
        """Stops it, as a machine that hangs."""

    def thaw(self) -> None:
        """Lets it go on."""

    def kill(self) -> None:
        """Ends it at once."""

    def start(self) -> None:
        """Starts it again at the same URL."""

    def wait_ready(self) -> object:
        """Waits until it serves."""


class LlamaServer(StockServer):
    """A llama-server with its load in /metrics."""

    model = "tiny"
    long_tokens = 3000

    def __init__(self, program: str, model: Path, folder: Path, port: int, *flags: str) -> None:
        command = [
            *(program, "--model", str(model), "--alias", self.model, "--port", str(port)),
            *("--ctx-size", str(SLOTS * 8192), "--parallel", str(SLOTS), "--no-kv-unified"),
            *("--threads", "1", "--threads-batch", "1", "--metrics", "--no-warmup"),
            *flags,
        ]
        super().__init__(f"http://127.0.0.1:{port}", command, folder / f"llama-{port}.log")

    def running(self) -> int:
        names = ("llamacpp:requests_processing ", "llamacpp:requests_deferred ")
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=END_S).text
        values = [line.split()[-1] for line in text.splitlines() if line.startswith(names)]
        return sum(int(float(one)) for one in values)


class _MeshAtPort(Mesh):
    """A mesh whose frontend has the same port when it is started again."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder, workers=1, worker_flags=[f"--max-num-seqs={SLOTS}"])
        self._flags["frontend"] = [f"--http-port={port}"]


class MeshServer:
    """A mesh of its own with one sim worker; its frontend is the server."""

    model = "sim"
    long_tokens = 600

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._mesh = _MeshAtPort(folder, port)
        self._mesh.__enter__()

    @property
    def _frontend(self) -> Service:
        return self._mesh.frontend

    def close(self) -> None:
        """Ends all its processes."""
        self._mesh.close()

    def running(self) -> int:
        loads = self._mesh.workers[0].load().loads
        return sum(load.running + load.waiting for load in loads)

    def freeze(self) -> None:
        self._frontend.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._frontend.send(signal.SIGCONT)

    def kill(self) -> None:
        self._frontend.kill()

    def start(self) -> None:
        self._mesh.spawn("frontend")

    def wait_ready(self) -> object:
        return self._frontend.wait_ready()


# Any: JSON.
def ask(url: str, path: str, body: Any) -> Any:
    """Returns the response of a server itself."""
    response = httpx.post(f"{url}{path}", json=body, trust_env=False, timeout=200.0)
    assert response.status_code == 200, response.text
    return response.json()

"""The servers behind the pickers: stock SGLang, or stand-ins with a prefix cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

import httpx

from common.runtime.free_ports import free_ports
from tests.adapters.stock_server import SglangServer
from tests.kit.model_server import MODEL
from tests.kit.processes import PARENT_GUARD, ROOT
from tests.kit.waiting import wait_for

START_S = 60.0


class Server(Protocol):
    """A server in a process of its own."""

    url: str

    @property
    def address(self) -> str: ...
    def flush(self) -> None: ...
    def running(self) -> int: ...
    def kill(self) -> None: ...


class StandInServer:
    """A process of `tests/kit/caching_server.py`."""

    def __init__(self, folder: Path, port: int, *flags: str) -> None:
        """port: of HTTP; the next two are those of KV events and replays."""
        self.url = f"http://127.0.0.1:{port}"
        self._log: IO[bytes] = (folder / f"server-{port}.log").open("wb")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(PARENT_GUARD), str(os.getpid())),
                *(sys.executable, "-m", "tests.kit.caching_server", f"--port={port}"),
                *(f"--events-port={port + 1}", *flags),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}:{ROOT}"},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    def wait_ready(self) -> StandInServer:
        wait_for(self._responds, f"{self.url} serves", START_S)
        return self

    def flush(self) -> None:
        httpx.post(f"{self.url}/flush_cache", json={}, trust_env=False).raise_for_status()

    def running(self) -> int:
        """Returns the number of requests that it computes."""
        counts = httpx.get(f"{self.url}/counts", trust_env=False).json()
        return int(counts["running"])

    def kill(self) -> None:
        """Kills it. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _responds(self) -> bool:
        assert self._process.poll() is None, "the server ended"
        try:
            return httpx.get(f"{self.url}/health", trust_env=False).is_success
        except httpx.HTTPError:
            return False


class StockSglang(SglangServer):
    """A stock SGLang server."""

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    def flush(self) -> None:
        httpx.post(f"{self.url}/flush_cache", trust_env=False).raise_for_status()


@contextmanager
def two_servers(folder: Path, *, is_sglang: bool) -> Iterator[tuple[Sequence[Server], str]]:
    """Yields two servers that serve, and the name of their model."""
    port = free_ports(6)
    servers: list[StockSglang] | list[StandInServer]
    if is_sglang:
        from worker_svc.engines.sglang.make_model import write_tiny_model

        write_tiny_model(folder / "tiny")
        flags = ("--enable-cache-report",)
        servers = [StockSglang(folder / "tiny", folder, port + 3 * at, *flags) for at in range(2)]
        model = "tiny"
    else:
        servers = [StandInServer(folder, port + 3 * at, "--pages=2600") for at in range(2)]
        model = MODEL
    try:
        for server in servers:
            server.wait_ready()
        yield servers, model
    finally:
        for server in servers:
            server.kill()

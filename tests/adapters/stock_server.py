"""Servers as operators start them: processes of their own, by their own command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self

import httpx

from tests.kit.processes import PARENT_GUARD

START_S = 600.0
END_S = 30.0
# For a response on a busy machine.
RESPONSE_S = 300.0
# On a CPU, in a pool that fits any machine.
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--dtype", "float32"),
    *("--max-total-tokens", "8192", "--mem-fraction-static", "0.3", "--sleep-on-idle"),
)


class StockServer:
    """One server with a group of processes."""

    health_path = "/health"

    def __init__(self, url: str, command: Sequence[str], log_path: Path) -> None:
        self.url = url
        self.log_path = log_path
        self._command = command
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it, also again after `kill`."""
        assert self._process is None, "it runs"
        self._log = self.log_path.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PARENT_GUARD), str(os.getpid()), *self._command],
            cwd=self.log_path.parent,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def wait_ready(self) -> Self:
        """Waits until it serves. Raises AssertionError with its log."""
        deadline = time.monotonic() + START_S
        while True:
            assert self._process is not None, "it was started"
            assert self._process.poll() is None, f"the server ended\n{self.tail()}"
            assert time.monotonic() < deadline, f"the server does not start\n{self.tail()}"
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}{self.health_path}", trust_env=False).status_code == 200:
                    return self
            # Sleep: a server starts in seconds.
            time.sleep(0.5)

    def freeze(self) -> None:
        """Stops all its processes, as a machine that hangs."""
        assert self._process is not None, "it runs"
        os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets them go on."""
        assert self._process is not None, "it runs"
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kills all its processes. Idempotent."""
        if self._process is not None and self._log is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(END_S)
            self._log.close()
            self._process = None

    @contextmanager
    def killed(self) -> Iterator[None]:
        """Kills it, and starts it again at the end."""
        self.kill()
        try:
            yield
        finally:
            self.start()
            self.wait_ready()

    # Any: JSON.
    def get(self, path: str) -> Any:
        """Returns a page of the server itself."""
        response = httpx.get(f"{self.url}{path}", trust_env=False, timeout=END_S)
        assert response.status_code == 200, response.text
        return response.json()

    # Any: JSON.
    def post(self, path: str, body: Any) -> Any:
        """Returns a response of the server itself."""
        url = f"{self.url}{path}"
        response = httpx.post(url, json=body, timeout=RESPONSE_S, trust_env=False)
        assert response.status_code == 200, response.text
        return response.json()

    def tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-3000:]


class SglangServer(StockServer):
    """A server of `python -m sglang.launch_server` with KV events."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        port: int,
        *flags: str,
        events_format: str = "",
        python: str = sys.executable,
    ) -> None:
        """port: of HTTP; the next two are those of KV events and replay. python: with SGLang."""
        self.replay_port = port + 2
        events = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port + 1}",
            "replay_endpoint": f"tcp://*:{port + 2}",
        }
        if events_format:
            events["format"] = events_format
        command = [
            *(python, "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--served-model-name", "tiny", "--port", str(port), "--page-size", "16"),
            *("--kv-events-config", json.dumps(events), *CPU_FLAGS, *flags),
        ]
        super().__init__(f"http://127.0.0.1:{port}", command, folder / f"sglang-{port}.log")

    @property
    def events_port(self) -> int:
        """Where it publishes KV events."""
        return self.replay_port - 1

    def running(self) -> int:
        """Returns the number of requests that it computes or keeps waiting."""
        loads = self.get("/v1/loads")["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    def generate(self, prompt: Sequence[int], count: int = 1) -> None:
        """Sends a request past the mesh. Raises AssertionError."""
        sampling = {"max_new_tokens": count, "ignore_eos": True, "temperature": 0}
        self.post("/generate", {"input_ids": prompt, "sampling_params": sampling})

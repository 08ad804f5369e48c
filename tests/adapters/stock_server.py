"""SGLang servers as operators start them: by `python -m sglang.launch_server`, unchanged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import httpx

from tests.kit.processes import PARENT_GUARD

START_S = 300.0
END_S = 30.0
# On a CPU, in a pool that fits any machine.
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--dtype", "float32"),
    *("--max-total-tokens", "8192", "--mem-fraction-static", "0.3", "--sleep-on-idle"),
    *("--max-running-requests", "16"),
)


class StockServer:
    """One SGLang server with KV events, of `python -m sglang.launch_server`."""

    def __init__(self, model: Path, folder: Path, port: int, *flags: str) -> None:
        """port: of HTTP; the next two are those of KV events and replay."""
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = folder / f"sglang-{port}.log"
        events = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port + 1}",
            "replay_endpoint": f"tcp://*:{port + 2}",
        }
        self._log: IO[bytes] = self.log_path.open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(PARENT_GUARD), str(os.getpid())),
                *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
                *("--served-model-name", "tiny", "--port", str(port), "--page-size", "16"),
                *("--kv-events-config", json.dumps(events), *CPU_FLAGS, *flags),
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def wait_ready(self) -> StockServer:
        """Waits until it serves. Raises AssertionError with its log."""
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, f"the server ended\n{self.tail()}"
            assert time.monotonic() < deadline, f"the server does not start\n{self.tail()}"
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.5)

    def kill(self) -> None:
        """Kills all its processes. Idempotent."""
        if not self._log.closed:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(END_S)
            self._log.close()

    def running(self) -> int:
        """Returns the number of requests that it computes."""
        loads = httpx.get(f"{self.url}/v1/loads", trust_env=False).json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    def tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-3000:]

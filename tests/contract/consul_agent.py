"""A real Consul agent for tests: in memory, on free ports; tests kill, pause and restart it.

The binary: `consul` on the PATH, else what KVMESH_CONSUL names, else `.tools/bin/consul`, which
deploy/consul_get.sh fetches where it can (root on Debian). Without one, tests that need it skip.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.runtime.free_ports import free_ports
from tests.kit.waiting import wait_for

ROOT = Path(__file__).parents[2]
START_S = 15.0
FETCH_S = 60.0
# The default is 200 connections per address; a test may have hundreds of clients.
LIMITS = "-hcl=limits { http_max_conns_per_client = 4096 }"
PORTS = ("http", "dns", "grpc", "server", "serf-lan", "serf-wan")


@functools.cache
def consul_binary() -> str:
    """The path of the binary. Without one, skips the test with the reason."""
    for found in (shutil.which("consul"), os.environ.get("KVMESH_CONSUL")):
        if found:
            return found
    try:
        fetched = subprocess.run(
            [ROOT / "deploy" / "consul_get.sh", ROOT / ".tools"],
            capture_output=True,
            text=True,
            timeout=FETCH_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", "") or "").strip().splitlines()
        pytest.skip(
            "no Consul: not on the PATH, KVMESH_CONSUL is not set, and deploy/consul_get.sh failed"
            f" ({lines[-1] if lines else error})"
        )
    return fetched.stdout.strip()


class ConsulAgent:
    """`consul agent -dev` on its own ports, which stay the same; a restart loses its state."""

    def __init__(self, *flags: str) -> None:
        """flags: more flags of the agent."""
        self._binary = consul_binary()
        self._flags = flags
        first = free_ports(len(PORTS))
        self._ports = range(first, first + len(PORTS))
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it is the leader. No-op if it runs."""
        if self._process is not None:
            return
        flags = [f"-{n}-port={p}" for n, p in zip(PORTS, self._ports, strict=True)]
        self._process = subprocess.Popen(
            [
                *(self._binary, "agent", "-dev", "-bind=127.0.0.1", "-log-level=err", LIMITS),
                *(*flags, *self._flags),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        process = self._process

        def is_leader() -> bool:
            assert process.poll() is None, "Consul exited at start"
            return self._is_leader()

        wait_for(is_leader, "Consul has become the leader", START_S)

    def kill(self) -> None:
        """Kill it without clean-up."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop it; its exit status is then 1."""
        self._end(signal.SIGINT)

    def pause(self) -> None:
        """Suspend the process; returns once all of its threads have stopped."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Continue the process."""
        self._signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Remove all services and keys."""
        with httpx.Client(base_url=self.url, trust_env=False) as http:
            for service_id in http.get("/v1/agent/services").json():
                http.put(f"/v1/agent/service/deregister/{service_id}")
            http.delete("/v1/kv/?recurse")

    def _is_leader(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            response = httpx.get(f"{self.url}/v1/status/leader", trust_env=False, timeout=1.0)
            return bool(response.text.strip('"\n '))
        return False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def running_agent() -> Iterator[ConsulAgent]:
    """A running agent for the block."""
    agent = ConsulAgent()
    agent.start()
    try:
        yield agent
    finally:
        agent.stop()

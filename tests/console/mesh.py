"""A mesh with prefill and decode workers, API keys, a console and load."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv" / "bin"
START_S = 90.0
STOP_S = 40.0
REQUEST_S = 30.0
TENANTS = ("acme", "globex", "initech")
MODEL = "sim"
TOPICS = ("routers", "caches", "workers", "tokens", "queues", "leases", "meshes", "prefixes")


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def wait_for(what: str, check: Callable[[], Any], timeout_s: float) -> Any:
    """Returns the first true result. Raises AssertionError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := check():
            return found
        # Sleep: between two checks.
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {timeout_s:g} s")


class Process:
    """A process of the environment of the project; its output is in a file."""

    def __init__(self, command: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(environ),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def check_runs(self) -> None:
        """Raises AssertionError with the end of its output if it has ended."""
        if self._process.poll() is not None:
            raise AssertionError(f"{self.log.name} ended:\n{self.output()[-2000:]}")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)


class ConsoleMesh:
    """The processes, and what the journeys need of them."""

    def __init__(self, folder: Path, *, prefill: int = 2, decode: int = 2) -> None:
        self.folder = folder
        self.keys_path = folder / "keys.json"
        self.http_port, self.console_port, self.otlp_port = (free_port() for _ in range(3))
        self.api = f"http://127.0.0.1:{self.http_port}"
        self.url = f"http://127.0.0.1:{self.console_port}"
        self.environ = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'protos'}:{ROOT}",
            "PATH": f"{BIN}:{os.environ.get('PATH', '')}",
            "KVMESH_REGISTRY_PATH": str(folder / "registry"),
            "KVMESH_FRONTEND_API_KEYS": str(self.keys_path),
            "KVMESH_CONSOLE_API_KEYS": str(self.keys_path),
            "KVMESH_CONSOLE_LOGIN_PATH": str(folder / "console"),
            "KVMESH_CONSOLE_INTERVAL_S": "1",
            "KVMESH_TRACE_SAMPLE_RATIO": "1",
            # A journey sends a request that is not sampled.
            "KVMESH_FRONTEND_TRUST_TRACEPARENT": "on",
        }
        self.keys = {tenant: self.create_key(tenant) for tenant in TENANTS}
        self.operator_key = self.create_key("operators", "admin,infer,explain,routing")
        self.environ["KVMESH_CONSOLE_FRONTEND_KEY"] = self.operator_key
        self.environ["OPENAI_API_KEY"] = self.keys["acme"]
        flags = ["--prefill", str(prefill), "--decode", str(decode), "--routers", "2"]
        flags += ["--http-port", str(self.http_port), "--log-dir", str(folder / "logs")]
        flags += ["--consoles", "1", "--console-port", str(self.console_port)]
        flags += ["--console-otlp-port", str(self.otlp_port)]
        self._process = self._start("mesh", [str(BIN / "meshctl"), "up", *flags])
        self._stop_load = threading.Event()
        self._threads: list[threading.Thread] = []
        self.answered = 0

    def _start(self, name: str, command: Sequence[str]) -> Process:
        return Process(command, self.folder / f"{name}.log", self.environ)

    def meshctl(self, *arguments: str) -> str:
        """Returns the output of a command. Raises AssertionError with its errors."""
        done = subprocess.run(
            [str(BIN / "meshctl"), *arguments],
            cwd=ROOT,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=REQUEST_S,
            check=False,
        )
        if done.returncode not in (0, 1) or (done.returncode and not done.stdout):
            raise AssertionError(f"meshctl {' '.join(arguments)}: {done.stderr[-500:]}")
        return done.stdout

    def create_key(self, tenant: str, scopes: str = "infer,embeddings,explain") -> str:
        """Returns the text of a new key."""
        flags = ("--api-keys", str(self.keys_path), "create", tenant, "--scopes", scopes, "--json")
        created: str = json.loads(self.meshctl("keys", *flags))["key"]
        return created

    def key_ids(self, tenant: str) -> list[str]:
        rows = json.loads(self.meshctl("keys", "--api-keys", str(self.keys_path), "list", "--json"))
        return [row["id"] for row in rows if row["tenant"] == tenant]

    def wait_ready(self) -> None:
        """Waits until a chat succeeds and the console serves."""

        def is_ready() -> bool:
            self._process.check_runs()
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=2):
                    return self.chat("Are you there?", max_tokens=2)[0] == 200
            except (OSError, urllib.error.URLError):
                return False

        wait_for("the mesh and its console serve", is_ready, START_S)

    def chat(
        self,
        content: str,
        *,
        key: str = "",
        max_tokens: int = 24,
        request_id: str = "",
        traceparent: str = "",
    ) -> tuple[int, dict[str, Any]]:
        """Returns the status and the body of a chat that is not streamed."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
        }
        headers = {
            "content-type": "application/json",
            "authorization": f"Bearer {key or self.keys['acme']}",
            **({"x-request-id": request_id} if request_id else {}),
            **({"traceparent": traceparent} if traceparent else {}),
        }
        request = urllib.request.Request(
            f"{self.api}/v1/chat/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def begin_load(self, clients: int = 3) -> None:
        """Sends chats until `stop`, with prompts that share long prefixes."""
        for at in range(clients):
            thread = threading.Thread(target=self._send, args=(TENANTS[at % len(TENANTS)], at))
            thread.start()
            self._threads.append(thread)

    def _send(self, tenant: str, at: int) -> None:
        prefix = f"You are the assistant of {tenant}. " + "Be brief, exact and kind. " * 60
        turn = 0
        while not self._stop_load.wait(0.15):
            topic = TOPICS[(turn + at) % len(TOPICS)]
            try:
                status, _ = self.chat(
                    f"{prefix}Explain {topic}.",
                    key=self.keys[tenant],
                    max_tokens=16 + 24 * (turn % 4),
                )
            except (OSError, urllib.error.URLError, ValueError):
                continue
            self.answered += status == 200
            turn += 1

    def workers(self, role: str) -> dict[str, int]:
        """Returns the process ids of the workers of a role by name, as printed."""
        ready = re.compile(rf"({role}-\d+)\s+ready.* pid (\d+)")
        return {name: int(pid) for name, pid in ready.findall(self._process.output())}

    def stop(self) -> None:
        self._stop_load.set()
        for thread in self._threads:
            thread.join(REQUEST_S)
        self._process.stop()

"""Sends mutated bodies to all POST routes of a mesh, and events to its WebSocket. The last line is
JSON; exit status 1 if a response has status 5xx, an error without its form, or none, or if the
frontend's memory grows in the second half. Before, other texts fill the caches of its tokenizer,
which are bounded: one of segments, and in each thread one of words (about 80 MB).

    python -m tests.fuzz [--bodies 100000] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import string
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from tests.fuzz.bodies import BODIES, MODEL, mutate
from tests.kit.processes import Mesh, Service

# In place of a path: bodies of POST /v1/responses are events of a WebSocket.
WEBSOCKET = "websocket"
CONCURRENCY = 24
TIMEOUT_S = 60.0
# Memory is measured after each round, without open requests.
ROUNDS = 20
# From the third to the last quarter; measurements differ by a few MB, so the least ones count.
GROWTH_MAX_MB = 4.0
# Texts of 20,000 characters; a thread's cache is full after 1,000.
FILLERS = 8_000
FAILURES = Path(".run") / "fuzz"
FAILURES_MAX = 50
LAST_EVENTS = ("error", "response.completed", "response.incomplete", "response.failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Mesh(
            Path(folder),
            batches=1,
            worker_flags=["--speedup=1000"],
            # Stored responses are no leak.
            frontend_flags=["--response-store-mb=1"],
        ) as mesh,
    ):
        fuzz = Fuzz(mesh, arguments.seed)
        asyncio.run(fuzz.fill_caches())
        asyncio.run(fuzz.run(arguments.bodies))
        result = fuzz.result()
    for failure in fuzz.failures[:20]:
        print(failure)
    print(json.dumps(result))
    return bool(fuzz.failures) or result["growth_mb"] > GROWTH_MAX_MB


class Fuzz:
    """One run against a mesh. failures: one line each, with the file of the body."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        self.failures: list[str] = []
        self._mesh = mesh
        self._seed = seed
        self._statuses: Counter[int] = Counter()
        self._memory_mb: list[float] = []
        self._seconds = 0.0
        self._paths = [path for path in BODIES if _is_served(mesh, path)]
        self._paths.append(WEBSOCKET)

    async def run(self, bodies: int) -> None:
        """Sends that many bodies, round-robin over the routes."""
        started_at = time.monotonic()
        limits = httpx.Limits(max_connections=CONCURRENCY)
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, limits=limits) as http:

            async def send_bodies(numbers: Iterator[int]) -> None:
                for number in numbers:
                    await self._send(http, number)

            size = -(-bodies // ROUNDS)
            for start in range(0, bodies, size):
                numbers = iter(range(start, min(start + size, bodies)))
                await asyncio.gather(*(send_bodies(numbers) for _ in range(CONCURRENCY)))
                self._memory_mb.append(memory_mb(self._mesh.frontend))
        self._seconds = time.monotonic() - started_at
        for service in self._mesh.services:
            if service.events("request_failed"):
                self.failures.append(f"{service.kind}: request_failed in its log")
        if not self._mesh.is_complete():
            self.failures.append("a process has ended")

    async def fill_caches(self) -> None:
        """Sends different texts until the tokenizer's caches are full, in each of its threads."""
        chance, words = Random(self._seed), string.ascii_letters + " "
        limits = httpx.Limits(max_connections=CONCURRENCY)
        url = f"{self._mesh.url}/tokenize"

        async def send(http: httpx.AsyncClient) -> None:
            for _ in range(FILLERS // CONCURRENCY):
                parts = ("".join(chance.choices(words, k=2000)) for _ in range(10))
                body = {"model": MODEL, "prompt": "<|im_start|>".join(parts)}
                (await http.post(url, json=body)).raise_for_status()

        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, limits=limits) as http:
            await asyncio.gather(*(send(http) for _ in range(CONCURRENCY)))

    def result(self) -> dict[str, Any]:
        third, last = len(self._memory_mb) // 2, len(self._memory_mb) * 3 // 4
        return {
            "bodies": self._statuses.total(),
            "seconds": round(self._seconds),
            "routes": len(self._paths),
            "statuses": dict(sorted(self._statuses.items())),
            "failures": len(self.failures),
            "memory_mb": [round(one) for one in self._memory_mb],
            "growth_mb": round(min(self._memory_mb[last:]) - min(self._memory_mb[third:last]), 1),
        }

    async def _send(self, http: httpx.AsyncClient, number: int) -> None:
        path, chance = self._paths[number % len(self._paths)], Random(f"{self._seed} {number}")
        if path == WEBSOCKET:
            await self._send_event(number, as_event(mutate("/v1/responses", chance)))
            return
        raw = mutate(path, chance)
        try:
            response = await http.post(
                f"{self._mesh.url}{path}", content=raw, headers={"x-request-id": f"fuzz-{number}"}
            )
        except httpx.HTTPError as error:
            self._statuses[0] += 1
            self._record(number, path, raw, repr(error))
            return
        self._statuses[response.status_code] += 1
        problem = find_problem(response)
        if problem:
            self._record(number, path, raw, f"{problem}: {response.text[:300]}")

    async def _send_event(self, number: int, raw: bytes) -> None:
        """Sends an event over a connection of its own."""
        url = self._mesh.url.replace("http", "ws", 1) + "/v1/responses"
        last: dict[str, Any] = {"type": ""}
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                connect(url, proxy=None, max_size=None) as client,
            ):
                await client.send(raw, text=True)
                while not last["type"].startswith(LAST_EVENTS):
                    last = json.loads(await client.recv())
        except (OSError, WebSocketException) as error:
            self._statuses[0] += 1
            self._record(number, WEBSOCKET, raw, repr(error))
            return
        status = last.get("status", 200)
        self._statuses[status] += 1
        details = last.get("error") or {}
        has_form = last["type"] != "error" or bool(details.get("message") and details.get("type"))
        if status >= 500 or not has_form or b"server_error" in json.dumps(last).encode():
            self._record(number, WEBSOCKET, raw, json.dumps(last)[:300])

    def _record(self, number: int, path: str, raw: bytes, problem: str) -> None:
        FAILURES.mkdir(parents=True, exist_ok=True)
        file = FAILURES / f"{self._seed}-{number}.body"
        if len(self.failures) < FAILURES_MAX:
            file.write_bytes(raw)
        self.failures.append(f"{path} {file}: {problem}")


def as_event(raw: bytes) -> bytes:
    """Returns a body as an event; one that is no object, as it is."""
    event = b'{"type": "response.create", '
    return raw.replace(b"{", event, 1) if raw.startswith(b'{"') else raw


def find_problem(response: httpx.Response) -> str:
    """What is wrong with a response; "" if nothing."""
    status = response.status_code
    if status >= 500:
        return str(status)
    if status == 200:
        # An error in the middle of a stream; 400 is the client's, for example of a schema.
        failed = "\nevent: error\n" in response.text or '"server_error"' in response.text
        return "error in a stream" if failed else ""
    try:
        error = response.json()["error"]
        has_form = bool(error["message"] and error["type"])
    except (ValueError, LookupError, TypeError):
        has_form = False
    return "" if has_form else f"{status} without the form of an error"


def memory_mb(service: Service) -> float:
    """The resident memory of a process."""
    status = Path(f"/proc/{service.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def _is_served(mesh: Mesh, path: str) -> bool:
    response = mesh.http.post(f"{mesh.url}{path}", json={"model": MODEL})
    return response.status_code not in (404, 501)


if __name__ == "__main__":
    sys.exit(main())

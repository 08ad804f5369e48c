"""Replaces 20 of 120 sim workers under load and measures the effect on clients and router.

    python -m tests.chaos.churn [--hosts 12] [--replaced 2] [--warm-s 20] [--after-s 20]

The mesh: a frontend, a router and an indexer in processes of their own, and ten workers in each
further process (`worker_host.py`). Clients send one request after the other; a prompt is one of
PREFIX_GROUPS shared prefixes and a unique end. The workers of `--replaced` processes are killed and
as many are started at once. The hit rate of a request is the share of its prompt's tokens that its
worker had cached, by usage. The last line is a JSON object:

    errors, inexact    responses that failed, or differ from the sim model
    hit_before         mean hit rate of the warm mesh; hit_lowest: of the worst second afterwards
    hit_back_s         from the kill to the second from which the hit rate stays within 10 %
    known_s            from the kill until all sources are exact again in the router's index
    ready_s            of that, until the new workers were ready
    snapshot_s         from a new router's readiness until its index has all workers
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from common.runtime.tasks import TaskGroup
from tests.chaos.worker_host import WORKERS_PER_HOST
from tests.kit.oracle import Oracle
from tests.kit.processes import MODEL, Mesh, Service
from tests.kit.waiting import until

CLIENTS = 8
PREFIX_GROUPS = 60
SHARED_TOKENS = 384
UNIQUE_TOKENS = 16
OUTPUT_TOKENS = 4
# Ids of plain words in the sim model's vocabulary.
PROMPT_TOKEN_IDS = range(300, 1000)
HIT_TOLERANCE = 0.9
WAIT_S = 180.0
WORKER_MODULE = "tests.chaos.worker_host"
WORKER_FLAGS = ("--speedup=20", "--log-level=warning")


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request. at: its start, `time.monotonic`. error: "" if it succeeded."""

    at: float
    took_s: float
    prompt: list[int]
    text: str
    cached: int
    error: str = ""

    @property
    def hit(self) -> float:
        return self.cached / len(self.prompt)


class Churn:
    """One run."""

    def __init__(self, mesh: Mesh, options: argparse.Namespace) -> None:
        self._mesh = mesh
        self._options = options
        self._workers = options.hosts * WORKERS_PER_HOST
        self._results: list[RequestResult] = []
        self._rng = Random(7)
        self._shared_prefixes = [
            self._rng.choices(PROMPT_TOKEN_IDS, k=SHARED_TOKENS) for _ in range(PREFIX_GROUPS)
        ]

    async def run(self) -> dict[str, Any]:
        await self._start()
        await self._wait_until(
            lambda: self._exact_sources(self._mesh.router) == self._workers, "all sources are exact"
        )
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http, TaskGroup() as tasks:
            clients = [tasks.create_task(self._run_client(http)) for _ in range(CLIENTS)]
            # Sleep: the load before the churn.
            await asyncio.sleep(self._options.warm_s)
            killed_at = time.monotonic()
            ready_s, index_recovered_s = await self._replace(killed_at)
            # Sleep: the load after a kill.
            await asyncio.sleep(max(0.0, killed_at + self._options.after_s - time.monotonic()))
            for client in clients:
                client.cancel()
        snapshot_s = await self._snapshot()
        return {
            "workers": self._workers,
            "replaced": self._options.replaced * WORKERS_PER_HOST,
            **self._figures(killed_at),
            "ready_s": round(ready_s, 2),
            "known_s": round(index_recovered_s, 2),
            "snapshot_s": round(snapshot_s, 2),
        }

    async def _start(self) -> None:
        hosts = [self._mesh.spawn("worker") for _ in range(self._options.hosts)]
        rest = [self._mesh.spawn(kind) for kind in ("indexer", "router", "frontend")]
        for service in (*hosts, *rest):
            await asyncio.to_thread(service.wait_ready, WAIT_S)

    async def _replace(self, killed_at: float) -> tuple[float, float]:
        """Kills hosts and starts new ones; returns the seconds until these are ready and exact."""
        victims = self._mesh.workers[: self._options.replaced]
        for victim in victims:
            victim.process.kill()
        for victim in victims:
            victim.process.wait()
        for new in [self._mesh.spawn("worker") for _ in victims]:
            await asyncio.to_thread(new.wait_ready, WAIT_S)
        ready_s = time.monotonic() - killed_at
        await self._wait_until(
            lambda: self._exact_sources(self._mesh.router) == self._workers, "all sources are exact"
        )
        return ready_s, time.monotonic() - killed_at

    async def _snapshot(self) -> float:
        router = self._mesh.spawn("router")
        await asyncio.to_thread(router.wait_ready, WAIT_S)
        began = time.monotonic()
        await self._wait_until(
            lambda: self._exact_sources(router) == self._workers, "a new router has all sources"
        )
        return time.monotonic() - began

    def _exact_sources(self, router: Service) -> int:
        """Returns the exact sources of the router's index; -1 while others are not exact."""
        text = httpx.get(f"http://{router.addresses['metrics']}/metrics", trust_env=False).text
        found = {
            sample.labels["state"]: int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "kvmesh_router_index_sources"
        }
        return found["exact"] if sum(found.values()) == found["exact"] else -1

    async def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            await until(lambda: asyncio.to_thread(condition), what, WAIT_S, 0.02)
        except AssertionError as error:
            error.add_note(self._mesh.logs())
            raise

    async def _run_client(self, http: httpx.AsyncClient) -> None:
        while True:
            prompt = self._rng.choice(self._shared_prefixes) + self._rng.choices(
                PROMPT_TOKEN_IDS, k=UNIQUE_TOKENS
            )
            began = time.monotonic()
            response = await http.post(f"{self._mesh.url}/v1/completions", json=body_of(prompt))
            took_s = time.monotonic() - began
            if response.status_code != 200:
                self._results.append(RequestResult(began, took_s, prompt, "", 0, response.text))
                continue
            body = response.json()
            cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            text = body["choices"][0]["text"]
            self._results.append(RequestResult(began, took_s, prompt, text, cached))

    def _figures(self, killed_at: float) -> dict[str, Any]:
        oracle = Oracle()
        good = [a for a in self._results if not a.error]
        failed = [a.error for a in self._results if a.error]
        inexact = sum(
            a.text != oracle.completion(a.prompt, OUTPUT_TOKENS, ignore_eos=True).text for a in good
        )
        before = [a.hit for a in good if killed_at - self._options.warm_s / 2 <= a.at < killed_at]
        hit_before = _mean(before)
        seconds = [
            _mean([a.hit for a in good if second <= a.at - killed_at < second + 1])
            for second in range(self._options.after_s)
        ]
        low = [n for n, hit in enumerate(seconds) if hit < HIT_TOLERANCE * hit_before]
        rate = len(before) / (self._options.warm_s / 2)
        return {
            "requests": len(self._results),
            "requests_per_s": round(rate, 1),
            "errors": len(failed),
            **({"why": sorted(set(failed))[:3]} if failed else {}),
            "inexact": inexact,
            "slowest_ms": round(max(a.took_s for a in good) * 1000),
            "hit_before": round(hit_before, 3),
            "hit_lowest": round(min(seconds), 3),
            "hit_back_s": low[-1] + 1 if low else 0,
            "hit_by_second": [round(hit, 3) for hit in seconds],
        }


def body_of(prompt: list[int]) -> dict[str, Any]:
    """Returns the body of a completion of token ids."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def main() -> None:
    """Runs once and prints the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=12)
    parser.add_argument("--replaced", type=int, default=2)
    parser.add_argument("--warm-s", type=int, default=20)
    parser.add_argument("--after-s", type=int, default=20)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kvmesh-churn-") as folder:
        mesh = Mesh(
            Path(folder),
            worker_module=WORKER_MODULE,
            worker_flags=WORKER_FLAGS,
            router_flags=["--metrics-port=0"],
        )
        try:
            line = asyncio.run(Churn(mesh, options).run())
        finally:
            mesh.close()
    print(json.dumps({**line, "load": [round(load, 1), round(os.getloadavg()[0], 1)]}))


if __name__ == "__main__":
    main()

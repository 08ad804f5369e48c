"""Starts many sim workers and measures what a large fleet costs the other services.

    python -m tests.chaos.scale [--workers 300] [--per-process 20] [--idle-s 20] [--load-s 20]

The mesh: a frontend, a router and an indexer in processes of their own; `--per-process` workers in
each further process (`worker_host.py`). Prints one JSON line:

    routable_s     from the start of the first worker process until the frontend and the router see
                   all workers and the router's index has all of them as exact
    idle, loaded   by service: CPU in percent of a core, without requests and at RATE requests/s
    rss_mb         by service, at the end
    decision_us    p50 and p99 of a decision of the router under load, interpolated in its histogram
    outcomes       count of responses by status, or of errors
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.measure import cpu_s, rss_mb
from common.runtime.tasks import TaskGroup
from tests.chaos.churn import WORKER_FLAGS, WORKER_MODULE, body_of
from tests.kit.processes import Mesh, Service

RATE = 200
# Services that are measured; workers only fill the machine.
SERVICES = ("indexer", "router", "frontend")
PREFIX_GROUPS, SHARED_TOKENS, UNIQUE_TOKENS = 60, 384, 16
# Ids of plain words in the sim model's vocabulary.
PROMPT_TOKEN_IDS = range(300, 1000)
START_WAIT_S = 600.0
# Until the streams that the start opened have settled.
SETTLE_S = 3.0


class Scale:
    """One run on a mesh without processes."""

    def __init__(self, mesh: Mesh, options: argparse.Namespace) -> None:
        self._mesh = mesh
        self._options = options
        self._rng = Random(7)
        self._prefixes = [
            self._rng.choices(PROMPT_TOKEN_IDS, k=SHARED_TOKENS) for _ in range(PREFIX_GROUPS)
        ]
        self._outcomes: Counter[str] = Counter()

    async def run(self) -> dict[str, Any]:
        options = self._options
        services = {kind: self._mesh.spawn(kind) for kind in SERVICES}
        for service in services.values():
            await asyncio.to_thread(service.wait_ready, START_WAIT_S)
        routable_s = await self._start_workers(services)
        # Sleep: the processes settle before they are measured idle.
        await asyncio.sleep(SETTLE_S)
        idle = await self._cpu_percent(services, options.idle_s)
        before = _decision_buckets(services["router"])
        load = asyncio.create_task(self._send_requests(options.load_s))
        loaded = await self._cpu_percent(services, options.load_s)
        await load
        after = _decision_buckets(services["router"])
        counts = {bound: after[bound] - before[bound] for bound in after}
        return {
            "workers": options.workers,
            "routable_s": round(routable_s, 1),
            "idle": idle,
            "loaded": loaded,
            "rss_mb": {kind: round(rss_mb(service.pid)) for kind, service in services.items()},
            "decision_us": [round(1e6 * _quantile(counts, q)) for q in (0.5, 0.99)],
            "outcomes": dict(self._outcomes),
        }

    async def _start_workers(self, services: Mapping[str, Service]) -> float:
        """Returns the seconds until every worker is routable."""
        options, started_at = self._options, time.monotonic()
        hosts = [self._mesh.spawn("worker") for _ in range(options.workers // options.per_process)]
        while await asyncio.to_thread(self._routable_workers, services) != options.workers:
            dead = [host for host in hosts if host.process.poll() is not None]
            waited_s = time.monotonic() - started_at
            assert not dead, self._mesh.logs()
            assert waited_s < START_WAIT_S, self._mesh.logs()
            # Sleep: a poll with a deadline that also checks the processes.
            await asyncio.sleep(0.1)
        return time.monotonic() - started_at

    def _routable_workers(self, services: Mapping[str, Service]) -> int:
        router = services["router"]
        try:
            return min(
                round(router.metric("kvmesh_router_workers")),
                round(router.metric('kvmesh_router_index_sources{state="exact"}')),
                len(self._mesh.known_instance_ids("worker")),
            )
        except httpx.TransportError:  # The frontend closed an idle connection.
            return 0

    async def _cpu_percent(
        self, services: Mapping[str, Service], duration_s: float
    ) -> dict[str, float]:
        before = {kind: cpu_s(service.pid) for kind, service in services.items()}
        started_at = time.monotonic()
        # Sleep: the processor time of this interval is measured.
        await asyncio.sleep(duration_s)
        elapsed_s = time.monotonic() - started_at
        return {
            kind: round(100 * (cpu_s(service.pid) - before[kind]) / elapsed_s, 1)
            for kind, service in services.items()
        }

    async def _send_requests(self, duration_s: float) -> None:
        """Sends RATE requests/s at equal intervals, whether or not responses arrive."""
        url = f"{self._mesh.url}/v1/completions"
        # The frontend closes connections that were idle for 5 s.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        async with (
            httpx.AsyncClient(timeout=60.0, trust_env=False, limits=limits) as http,
            TaskGroup() as tasks,
        ):
            started_at = time.monotonic()
            for number in range(round(RATE * duration_s)):
                # Sleep: the pace of requests.
                await asyncio.sleep(max(0.0, started_at + number / RATE - time.monotonic()))
                tasks.create_task(self._send(http, url))

    async def _send(self, http: httpx.AsyncClient, url: str) -> None:
        unique = self._rng.choices(PROMPT_TOKEN_IDS, k=UNIQUE_TOKENS)
        try:
            body = body_of(self._rng.choice(self._prefixes) + unique)
            self._outcomes[str((await http.post(url, json=body)).status_code)] += 1
        except httpx.HTTPError as error:
            self._outcomes[repr(error)] += 1


def _decision_buckets(router: Service) -> dict[float, float]:
    """Returns the cumulative counts of the router's decision times, by upper bound in seconds."""
    text = httpx.get(f"http://{router.addresses['metrics']}/metrics", trust_env=False).text
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "kvmesh_router_decision_seconds_bucket"
    }


def _quantile(counts: Mapping[float, float], share: float) -> float:
    """Returns a quantile of cumulative counts, interpolated in its bucket if that has a limit."""
    wanted, low, below = share * max(counts.values()), 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if count >= wanted and math.isfinite(bound):
            return low + (bound - low) * (wanted - below) / max(1.0, count - below)
        if math.isfinite(bound):
            low, below = bound, count
    return low


def main() -> None:
    """Runs once and prints the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=300)
    parser.add_argument("--per-process", type=int, default=20)
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--load-s", type=float, default=20.0)
    parser.add_argument("--logs", type=Path, help="keep the logs in this folder, which exists")
    options = parser.parse_args()
    if options.workers % options.per_process:
        parser.error("--workers must be a multiple of --per-process")
    os.environ["WORKERS_PER_HOST"] = str(options.per_process)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kvmesh-scale-") as folder:
        mesh = Mesh(
            options.logs or Path(folder),
            worker_module=WORKER_MODULE,
            worker_flags=WORKER_FLAGS,
            router_flags=["--metrics-port=0"],
        )
        try:
            line = asyncio.run(Scale(mesh, options).run())
        finally:
            mesh.close()
    print(json.dumps({**line, "load": [round(load_before, 1), round(os.getloadavg()[0], 1)]}))


if __name__ == "__main__":
    main()

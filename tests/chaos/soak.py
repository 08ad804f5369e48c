"""Mixed load with cancellations and kills: `python -m tests.chaos.soak [--minutes 20]`.

One mesh of two prefill, two decode and two aggregated workers, two routers, two indexers and one
frontend. CLIENTS clients send one request after the other: streamed and unary, short and long
prompts with shared beginnings, 1 to 200 tokens. A fifth of the requests is cancelled at a random
moment. Every KILL_EVERY_S the youngest process of one kind is killed (SIGKILL) and a successor is
started; the kinds take turns. The oldest process of each kind lives through the whole run.

Every complete response is compared with the sim model. Prints one JSON line:

    errors, inexact    responses that failed, or differ from the sim model
    left               resources that the mesh still holds REST_S after the load, by holder
    slopes             of each process that lived through the run: growth per minute of resident
                       memory (MB), open files, event loop tasks and metric series; a least-squares
                       line through the samples after the first third of the run
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from statistics import linear_regression
from typing import Any

import httpx

from tests.chaos.client import Reply, connect, fetch
from tests.chaos.storm import REST_S, find_leftovers
from tests.kit.oracle import Oracle
from tests.kit.processes import Mesh, Service
from tests.kit.waiting import until

CLIENTS = 16
CANCELLED_SHARE = 0.2
KILL_EVERY_S = 30.0
KILLED_KINDS = ("decode", "worker", "prefill", "router", "indexer")
PREFIX_GROUPS = 20
SAMPLE_EVERY_S = 5.0
# Caches and allocators fill in this share of the run, whose samples do not count.
WARM_UP_SHARE = 1 / 3
# Small caches are full soon.
WORKER_FLAGS = ("--total-kv-blocks=2048", "--metrics-port=0")
# Growth per minute above which a run has failed.
SLOPE_MAX = {"rss_mb": 0.5, "open_files": 0.5, "tasks": 0.5, "series": 1.0}
_METRIC_BY_FIGURE = {
    "rss_mb": "process_resident_memory_bytes",
    "open_files": "process_open_fds",
    "tasks": "kvmesh_event_loop_tasks",
}


class Soak:
    """One run. rng: draws requests and moments of cancellation."""

    def __init__(self, mesh: Mesh, minutes: float, rng: Random) -> None:
        self._mesh = mesh
        self._duration_s = minutes * 60
        self._rng = rng
        self._oracle = Oracle()
        self._outcomes: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._kills: Counter[str] = Counter()
        self._began = 0.0
        self._samples: dict[str, list[tuple[float, dict[str, float]]]] = {}

    async def run(self) -> dict[str, Any]:
        """Returns the figures of the run."""
        self._began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kill_in_turn())
            tasks.create_task(self._sample())
            for number in range(CLIENTS):
                tasks.create_task(self._client(number))
        left = await asyncio.to_thread(find_leftovers, self._mesh, REST_S)
        return {
            "requests": sum(self._outcomes.values()),
            **{name: self._outcomes[name] for name in ("cancelled", "errors", "inexact")},
            "why": [reason for reason, _ in self._reasons.most_common(3)],
            "kills": dict(self._kills),
            "left": left,
            "slopes": {name: _slopes(samples) for name, samples in self._samples.items()},
        }

    def _is_over(self) -> bool:
        return time.monotonic() - self._began >= self._duration_s

    async def _client(self, number: int) -> None:
        sent = 0
        # Ends: the duration has passed; each call has a limit.
        while not self._is_over():
            sent += 1
            words = "able about above accept " * self._rng.choice((1, 8, 100))
            group = self._rng.randrange(PREFIX_GROUPS)
            prompt = f"Group {group}: {words} client {number}, request {sent}"
            reply = Reply(prompt, self._rng.randrange(1, 201))
            stream = self._rng.random() < 0.7
            if self._rng.random() < CANCELLED_SHARE:
                await self._cancel(reply, stream)
            else:
                self._count(await fetch(self._mesh.url, reply, stream=stream))

    async def _cancel(self, reply: Reply, stream: bool) -> None:
        call = await connect(self._mesh.url, reply, stream=stream)
        try:
            async with asyncio.timeout(self._rng.uniform(0.0, 1.0)):
                await call.ended.wait()
        except TimeoutError:
            call.hang_up()
        self._outcomes["cancelled"] += 1

    def _count(self, reply: Reply) -> None:
        if reply.error:
            self._outcomes["errors"] += 1
            self._reasons[reply.error] += 1
            return
        expected = self._oracle.completion(reply.prompt, reply.tokens, ignore_eos=True)
        is_exact = (reply.text, reply.finish_reason) == (expected.text, expected.finish_reason)
        self._outcomes["exact" if is_exact else "inexact"] += 1

    async def _kill_in_turn(self) -> None:
        # Ends: the duration has passed.
        while not self._is_over():
            for kind in KILLED_KINDS:
                # Sleep: the pace of kills.
                await asyncio.sleep(KILL_EVERY_S)
                if self._is_over():
                    return
                victim = self._mesh.of_kind(kind)[-1]
                await asyncio.to_thread(victim.kill)
                successor = self._mesh.spawn(kind)
                await asyncio.to_thread(successor.wait_ready)
                self._kills[kind] += 1

    async def _sample(self) -> None:
        """Samples the processes that are never killed."""
        survivors = [self._mesh.of_kind(kind)[0] for kind in (*KILLED_KINDS, "frontend")]
        async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:
            while not self._is_over():
                at = (time.monotonic() - self._began) / 60
                for service in survivors:
                    sample = _figures((await http.get(_metrics_url(service))).text)
                    self._samples.setdefault(service.name, []).append((at, sample))
                # Sleep: the pace of samples.
                await asyncio.sleep(SAMPLE_EVERY_S)


def _metrics_url(service: Service) -> str:
    if service.service_name == "frontend":
        return f"{service.addresses['http']}/metrics"
    return f"http://{service.addresses['metrics']}/metrics"


def _figures(metrics: str) -> dict[str, float]:
    """Returns the figures of one scrape."""
    lines = [line for line in metrics.splitlines() if not line.startswith("#")]
    values = dict(line.rsplit(" ", 1) for line in lines)
    figures = {name: float(values[metric]) for name, metric in _METRIC_BY_FIGURE.items()}
    return {**figures, "rss_mb": figures["rss_mb"] / 2**20, "series": float(len(lines))}


def _slopes(samples: list[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """Returns the growth of each figure per minute. samples: (minutes, figures)."""
    counted = samples[int(len(samples) * WARM_UP_SHARE) :]
    minutes = [at for at, _ in counted]
    return {
        name: round(linear_regression(minutes, [f[name] for _, f in counted]).slope, 3)
        for name in counted[0][1]
    }


def missed_limits(line: dict[str, Any]) -> list[str]:
    """Returns the names of the figures beyond their limits."""
    missed = [name for name in ("errors", "inexact", "left") if line[name]]
    for service, slopes in line["slopes"].items():
        missed += [f"{service} {name}" for name, most in SLOPE_MAX.items() if slopes[name] > most]
    return missed


async def _run(mesh: Mesh, options: argparse.Namespace) -> dict[str, Any]:
    await until(mesh.is_complete, "the mesh is complete")
    return await Soak(mesh, options.minutes, Random(options.seed)).run()


def main(argv: list[str]) -> int:
    """Runs once; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1, help="of requests and cancellations")
    options = parser.parse_args(argv)
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="kvmesh-soak-") as folder,
        Mesh(
            Path(folder),
            workers=2,
            prefill=2,
            decode=2,
            routers=2,
            indexers=2,
            worker_flags=WORKER_FLAGS,
            router_flags=["--metrics-port=0"],
            indexer_flags=["--metrics-port=0"],
        ) as mesh,
    ):
        figures = asyncio.run(_run(mesh, options))
    line = {"case": "soak", "minutes": options.minutes, **figures}
    load_now = os.getloadavg()[0]
    missed = missed_limits(line)
    print(json.dumps({**line, "missed": missed, "load": [round(load, 1), round(load_now, 1)]}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

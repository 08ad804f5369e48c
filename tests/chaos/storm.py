"""Cancels thousands of requests: `python -m tests.chaos.storm [--requests 2000]`.

Half of the requests go to a mesh of aggregated workers, half to prefill and decode workers. Each
client disconnects at a random moment: during a stream, before a unary response, before the first
token of a long prompt, or during a gRPC Generate call at a worker. Control requests run meanwhile;
their responses must be byte-identical to those before the storm.

Prints one JSON line for each mesh, and one for both. Afterwards it counts slots, KV blocks, rooms,
bookings, requests in flight, open files and memory. Then it drains all services, which must have no
call left to cut. The exit status is 1 if a count has not returned to its old value.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio

from common.request.preprocessed import PreprocessedRequest, StopConditions, TokenIds
from common.wire.preprocessed import to_proto
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from tests.chaos.cases import AGGREGATED, DISAGGREGATED, Shape
from tests.chaos.client import HttpCall, Reply, connect, content_of, fetch
from tests.kit.processes import MODEL, Mesh, Service
from tests.kit.waiting import WAIT_S, until

CONCURRENCY = 64
REST_S = 15.0
# Memory is compared from this share of the requests on: before, caches and allocators fill.
BASELINE_AT = 0.5
RSS_GROWTH_MAX_MB = 6.0
# Few blocks, so that caches and their indexes are full before memory is compared.
KV_BLOCKS = 2048
OPEN_FILES_GROWTH_MAX = 8
# Fields that differ in every response.
_VARIABLE_FIELDS = re.compile(r'"id":"[^"]*"|"created":\d+')
_INFLIGHT = re.compile(r"^\w*inflight_requests\{[^}]*\} (\d+)", re.MULTILINE)
_MESHES = {"agg": AGGREGATED, "pd": DISAGGREGATED}
# No service waits for a later value.
_STOP_ORDER = ("frontend", "router", "worker", "indexer")


async def _hang_up_at(call: HttpCall, events: int, after_s: float) -> None:
    """Disconnects after `events` events, after `after_s` seconds, or at the end."""
    with contextlib.suppress(AssertionError):
        await until(
            lambda: call.reply.events >= events or call.ended.is_set(), "the call ends", after_s
        )
    call.hang_up()


class Storm:
    """The storm on one mesh. rng: draws kinds and moments of cancellation."""

    def __init__(self, mesh: Mesh, requests: int, rng: Random) -> None:
        self._mesh = mesh
        self._requests = requests
        self._rng = rng
        self._sent = 0
        self._cancel_methods: Counter[str] = Counter()
        self._controls: Counter[str] = Counter()
        self._expected: dict[bool, str] = {}
        self._mismatch = ""
        self._is_over = False
        self._baseline: dict[str, dict[str, float]] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def run(self) -> dict[str, Any]:
        """Runs the storm and waits until the mesh is idle; returns the figures."""
        self._expected = {stream: await self._control(stream) for stream in (True, False)}
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            control = tasks.create_task(self._check_controls())
            clients = [tasks.create_task(self._client()) for _ in range(CONCURRENCY)]
            await asyncio.wait(clients)
            self._is_over = True
            await control
        took_s = time.monotonic() - began
        for channel in self._channels.values():
            await channel.close()
        left = await asyncio.to_thread(find_leftovers, self._mesh, REST_S)
        return {
            "cancelled": dict(sorted(self._cancel_methods.items())),
            "s": round(took_s, 1),
            "controls": dict(self._controls),
            **({"odd": self._mismatch} if self._mismatch else {}),
            "left": left,
            "growth": self._growth(),
        }

    # -- cancelled requests ---------------------------------------------------------------------

    async def _client(self) -> None:
        # Ends: after that many requests; each has a limit.
        while self._sent < self._requests:
            self._sent += 1
            if self._sent == int(self._requests * BASELINE_AT):
                self._baseline = {s.name: _figures(s) for s in self._mesh.services}
            await self._cancel_one(self._sent)

    async def _cancel_one(self, number: int) -> None:
        cancel_method = self._rng.choice(("stream", "unary", "before_first_token", "grpc"))
        self._cancel_methods[cancel_method] += 1
        rng = self._rng
        match cancel_method:
            case "stream":
                await self._hang_up(number, 4, rng.randrange(1, 40), WAIT_S, stream=True)
            case "unary":
                await self._hang_up(number, 4, 1, rng.uniform(0.0, 0.3), stream=False)
            case "before_first_token":
                await self._hang_up(number, 1200, 1, rng.uniform(0.0, 0.1), stream=True)
            case _:
                await self._cancel_generate(number)

    async def _hang_up(
        self, number: int, words: int, events: int, after_s: float, *, stream: bool
    ) -> None:
        prompt = f"Gone {number}: " + "able about above accept " * (words // 4)
        call = await connect(self._mesh.url, Reply(prompt, 200), stream=stream)
        await _hang_up_at(call, events, after_s)

    async def _cancel_generate(self, number: int) -> None:
        workers = [w for w in self._mesh.workers if w.kind != "prefill"]
        address = self._rng.choice(workers).address
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address)
        request = PreprocessedRequest(
            model=MODEL,
            token_ids=TokenIds.of([5, 6, 7, number]),
            stop_conditions=StopConditions(max_tokens=200, ignore_eos=True),
        )
        call = engine_pb2_grpc.EngineServiceStub(channel).Generate(
            engine_pb2.GenerateRequest(request=to_proto(request), request_id=f"gone-{number}")
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0.0, 0.2)):
                async for _ in call:
                    pass
        call.cancel()

    # -- control requests -----------------------------------------------------------------------

    async def _check_controls(self) -> None:
        # Ends: the storm is over; each request has a limit.
        while not self._is_over:
            for stream, expected in self._expected.items():
                response = await self._control(stream)
                self._controls["same" if response == expected else "different"] += 1
                if response != expected:
                    self._mismatch = self._mismatch or f"{response} instead of {expected}"

    async def _control(self, stream: bool) -> str:
        """Returns the response without its variable fields, or its error."""
        reply = await fetch(self._mesh.url, Reply("A control", 20), stream=stream)
        return reply.error or _VARIABLE_FIELDS.sub("", content_of(reply.raw)[1])

    def _growth(self) -> dict[str, dict[str, float]]:
        """Returns the growth of each service since BASELINE_AT."""
        figures = {}
        for service in self._mesh.services:
            before, now = self._baseline[service.name], _figures(service)
            figures[service.name] = {name: round(now[name] - before[name], 1) for name in now}
        return figures


def find_leftovers(mesh: Mesh, rest_s: float) -> dict[str, int]:
    """Waits up to rest_s until the mesh is idle; returns the resources still held, by holder."""
    deadline = time.monotonic() + rest_s
    while (left := _held(mesh)) and time.monotonic() < deadline:
        # Sleep: a poll with a deadline; what is left then is a result.
        time.sleep(0.05)
    return left


def _held(mesh: Mesh) -> dict[str, int]:
    left: Counter[str] = Counter()
    for worker in mesh.workers:
        load, counts = worker.load(), worker.counters()
        ended = sum(
            counts.get(outcome, 0) for outcome in ("finished", "stopped", "failed", "closed")
        )
        left[f"{worker.name} slots"] = load.open_slots
        left[f"{worker.name} uncounted"] = counts.get("accepted", 0) - ended
        for row in load.loads:
            left[f"{worker.name} requests"] += row.running + row.waiting
            left[f"{worker.name} blocks"] += row.kv_used_blocks
            left[f"{worker.name} rooms"] += row.rooms_open
    for router in mesh.running("router"):
        left[f"{router.name} bookings"] = router.bookings()
    for url in mesh.urls:
        shown = mesh.http.get(f"{url}/metrics").text
        left["in flight"] += sum(map(int, _INFLIGHT.findall(shown)))
    return {what: count for what, count in left.items() if count}


def _figures(service: Service) -> dict[str, float]:
    """Returns resident memory in MB, threads and open files, from /proc."""
    status = Path(f"/proc/{service.pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "rss_mb": int(values["VmRSS"].split()[0]) / 1024,
        "threads": float(values["Threads"]),
        "files": float(len(os.listdir(f"/proc/{service.pid}/fd"))),
    }


def storm(name: str, shape: Shape, requests: int, seed: int) -> dict[str, Any]:
    """Runs one storm; returns its JSON line."""
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="kvmesh-storm-") as folder,
        Mesh(
            Path(folder),
            workers=shape.workers,
            prefill=shape.prefill,
            decode=shape.decode,
            indexers=shape.indexers,
            worker_flags=[f"--total-kv-blocks={KV_BLOCKS}"],
            frontend_flags=["--notice-s=0.3"],
            router_flags=["--notice-s=0.3"],
        ) as mesh,
    ):
        figures = asyncio.run(Storm(mesh, requests, Random(seed)).run())
        cut = _end_all(mesh)
    line = {"case": f"storm/{name}", "requests": requests, **figures, "calls_cut": cut}
    load_now = os.getloadavg()[0]
    return {**line, "missed": _missed(line), "load": [round(load, 1), round(load_now, 1)]}


def _end_all(mesh: Mesh) -> list[str]:
    """Drains all services; returns cut calls and bad exit statuses."""
    cut = []
    for service_name in _STOP_ORDER:
        services = mesh.running(service_name)
        for service in services:
            service.send(signal.SIGTERM)
        for service in services:
            if (status := service.wait()) != 0:
                cut.append(f"{service.name} ended with {status}")
            events = service.events("calls_cancelled")
            cut += [f"{service.name}: {event}" for event in events]
    return cut


def _missed(line: dict[str, Any]) -> list[str]:
    missed = [name for name in ("left", "calls_cut") if line[name]]
    if line["controls"].get("different") or not line["controls"].get("same"):
        missed.append("controls")
    for service, growth in line["growth"].items():
        if growth["rss_mb"] > RSS_GROWTH_MAX_MB:
            missed.append(f"{service} memory")
        if growth["files"] > OPEN_FILES_GROWTH_MAX:
            missed.append(f"{service} files")
    return missed


def main(argv: list[str]) -> int:
    """Runs the storms; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.storm", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="number of cancelled requests")
    parser.add_argument("--seed", type=int, default=1, help="of kinds and moments of cancellation")
    parser.add_argument("--mesh", choices=sorted(_MESHES), action="append", help="only this mesh")
    options = parser.parse_args(argv)
    names = options.mesh or list(_MESHES)
    lines = []
    for name in names:
        line = storm(name, _MESHES[name], options.requests // len(names), options.seed)
        print(json.dumps(line), flush=True)
        lines.append(line)
    print(json.dumps(_summary(lines)), flush=True)
    return 1 if any(line["missed"] for line in lines) else 0


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the line for all meshes. rss_growth_mb: maximum of all services."""
    growths = [growth["rss_mb"] for line in lines for growth in line["growth"].values()]
    return {
        "case": "storm",
        "cancelled": sum(line["requests"] for line in lines),
        "left": sum(sum(line["left"].values()) for line in lines),
        "calls_cut": sum(len(line["calls_cut"]) for line in lines),
        "controls_same": sum(line["controls"].get("same", 0) for line in lines),
        "controls_different": sum(line["controls"].get("different", 0) for line in lines),
        "rss_growth_mb": max(growths),
        "missed": [f"{line['case']}: {what}" for line in lines for what in line["missed"]],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

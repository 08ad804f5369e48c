"""kill -9 of one of two routers during long streams, repeatedly: how long are loads wrong?

    python -m tests.e2e.router_kills [--kills 40] [--busy 0]

Two frontends hold bookings that do not change. Alternately, the new router starts after the kill,
or shortly before it, so that it becomes ready while the frontend of the dead router may be moving
to the remaining one. A router is *right* if it has exactly one booking of each response: the
original one or one of a later attempt, since starved workers lose responses to others. Responses
placed while no router responded have no booking.
--busy: processes that each occupy a core. The last line is a JSON object; for each kill

    ready_s         from the kill until the new router was ready; 0: it was ready before
    right_s         from readiness (and the kill) until the new router was right
    wrong_after_s   seconds of wrong bookings after that, until each router had one frontend
    left_wrong_s    seconds of wrong bookings at the other router since the kill
    balanced_s      from readiness until each router had one frontend
    unrouted        placements without a router by then, since the mesh was started
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.measure import print_report
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from tests.kit.processes import MODEL, PARENT_GUARD, Mesh, Service
from tests.kit.waiting import WAIT_S, until

LONG_TIMEOUT_S = 60.0
POLL_S = 0.01
STREAMS = 6
TARGET_S = 1.0
# Kills before a new mesh is started, so that the streams outlast them.
KILLS_A_MESH = 8
# Random head start of an early router; a start takes 0.4 s on an idle machine.
HEAD_START_S = (0.1, 0.6)
BUSY_LOOP = "while True: pass"

T = TypeVar("T")
BookingKey = tuple[int, str, int]
Bookings = dict[BookingKey, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Kill:
    """The measurements of one kill; see the module. is_early: the new router started before it."""

    is_early: bool
    ready_s: float
    right_s: float
    wrong_after_s: float
    left_wrong_s: float
    balanced_s: float
    unrouted: int
    load_1m: float


def now() -> float:
    return time.monotonic()


async def wait_until(
    condition: Callable[[], T | None], description: str, timeout_s: float = LONG_TIMEOUT_S
) -> T:
    """The first true value; `condition` runs in a thread, because it queries processes."""
    value = await until(lambda: asyncio.to_thread(condition), description, timeout_s, POLL_S)
    assert value is not None
    return value


def bookings(router: Service) -> Bookings:
    """Worker and prefill tokens of a router's bookings, by key. Blocks grow with the response."""
    stub = router_pb2_grpc.RouterServiceStub(router.channel)
    return {
        (b.frontend_id, b.key.request_id, b.key.attempt): (b.worker.worker_id, b.prefill_tokens)
        for b in stub.Dump(router_pb2.DumpRequest(), timeout=WAIT_S).bookings
    }


def agreed_bookings(mesh: Mesh, count: int) -> Bookings | None:
    """The bookings of all routers, if they are equal, prefilled, and `count` with the unrouted
    ones.
    """
    held = [bookings(router) for router in mesh.of_kind("router")]
    is_same = all(one == held[0] for one in held) and len(held[0]) <= count
    if not is_same or any(b[1] for b in held[0].values()):
        return None
    return held[0] if len(held[0]) >= count - unrouted(mesh) else None


def gauge(router: Service, name: str) -> float:
    """A router's metric without labels."""
    return metric(f"http://{router.addresses['metrics']}", f"kvmesh_router_{name}")


def unrouted(mesh: Mesh) -> int:
    """Placements without a router so far; they have no bookings."""
    return sum(int(metric(url, "kvmesh_frontend_unrouted_total")) for url in mesh.urls)


def metric(url: str, name: str) -> float:
    """A metric without labels."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", trust_env=False).text)
    (value,) = (s.value for f in families for s in f.samples if s.name == name)
    return value


def is_balanced(mesh: Mesh) -> bool:
    """Whether each router has a peer, and one of the two frontends."""
    return all(
        (gauge(router, "sessions"), gauge(router, "peers")) == (1, 1)
        for router in mesh.of_kind("router")
    )


def body_of(prompt: str, tokens: int) -> dict[str, Any]:
    """The body of a completion with `tokens` output tokens."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}


def is_consistent(seen: Bookings, held: Bookings, unrouted: Callable[[], int]) -> bool:
    """Whether a router has exactly one booking of each response in `held`, and the same values for
    the same attempts; up to `unrouted` bookings may be missing.
    """
    seen_responses, required = (Counter(key[:2] for key in tracked) for tracked in (seen, held))
    if seen_responses - required or any(seen[key] != held[key] for key in seen.keys() & held):
        return False
    missing = (required - seen_responses).total()
    return not missing or missing <= unrouted()


class BookingsTracker:
    """Watches one router's bookings."""

    def __init__(self, mesh: Mesh, router: Service, held: Bookings) -> None:
        self._mesh = mesh
        self._router = router
        self._held = held
        self._seen: Bookings = {}
        self._consistent = asyncio.Event()
        self.consistent_at = 0.0
        self.inconsistent_s = 0.0  # Seconds, after the first consistent state.

    async def wait_until_consistent(self) -> None:
        """Returns after the first consistent state. Raises AssertionError after LONG_TIMEOUT_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LONG_TIMEOUT_S):
                await self._consistent.wait()
        difference = self._seen.items() ^ self._held.items()
        assert self._consistent.is_set(), (
            f"{self._router.name} has {self._seen}; difference {difference}"
        )

    async def watch(self) -> None:
        """Ends only when cancelled. A check counts from its start to the start of the next one."""
        # Ends: the caller cancels it.
        while True:
            began = now()
            is_now_consistent = await asyncio.to_thread(self._check)
            if is_now_consistent and not self._consistent.is_set():
                self.consistent_at = now()
                self._consistent.set()
            # Sleep: the pace of measurements.
            await asyncio.sleep(POLL_S)
            if not is_now_consistent and self._consistent.is_set():
                self.inconsistent_s += now() - began

    def _check(self) -> bool:
        self._seen = bookings(self._router)
        return is_consistent(self._seen, self._held, partial(unrouted, self._mesh))


@asynccontextmanager
async def watch_bookings(
    mesh: Mesh, router: Service, held: Bookings
) -> AsyncIterator[BookingsTracker]:
    """Watch a router's bookings during the block."""
    tracked = BookingsTracker(mesh, router, held)
    task = asyncio.create_task(tracked.watch())
    try:
        yield tracked
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def kill_one(mesh: Mesh, held: Bookings, head_start_s: float | None) -> Kill:
    """Kill the older router and measure the effects. head_start_s: None: start the new one after
    it.
    """
    victim, left = mesh.of_kind("router")
    new = None
    async with watch_bookings(mesh, left, held) as survivor_tracked:
        await survivor_tracked.wait_until_consistent()
        if head_start_s is not None:
            new = mesh.spawn("router")
            # Sleep: the head start is part of the case.
            await asyncio.sleep(head_start_s)
        victim.kill()
        killed_at = now()
        new = new or mesh.spawn("router")
        await asyncio.to_thread(new.wait_ready)
        ready_at = now()
        async with watch_bookings(mesh, new, held) as tracked:
            await tracked.wait_until_consistent()
            await wait_until(partial(is_balanced, mesh), "each router has a frontend again")
            balanced_at = now()
    return Kill(
        is_early=head_start_s is not None,
        ready_s=round(ready_at - killed_at, 3),
        right_s=round(tracked.consistent_at - ready_at, 3),
        wrong_after_s=round(tracked.inconsistent_s, 3),
        left_wrong_s=round(survivor_tracked.inconsistent_s, 3),
        balanced_s=round(balanced_at - ready_at, 3),
        unrouted=await asyncio.to_thread(unrouted, mesh),
        load_1m=round(os.getloadavg()[0], 1),
    )


async def kills(mesh: Mesh, count: int, rng: Random) -> list[Kill]:
    """Kill `count` routers in sequence, while STREAMS long responses run."""
    async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
        streams = [
            asyncio.create_task(
                http.post(f"{mesh.urls[n % 2]}/v1/completions", json=body_of(f"Stream {n}", 4000))
            )
            for n in range(STREAMS)
        ]
        try:
            await wait_until(lambda: is_balanced(mesh), "each router has a frontend")
            seen = []
            for number in range(count):
                held = await wait_until(
                    lambda: agreed_bookings(mesh, STREAMS), "both routers have all bookings"
                )
                head_start_s = rng.uniform(*HEAD_START_S) if number % 2 else None
                seen.append(await kill_one(mesh, held, head_start_s))
            assert not any(stream.done() for stream in streams), (
                "the streams must outlast the kills"
            )
            return seen
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)


def make_mesh(folder: Path, **shape: Any) -> Mesh:
    """Two routers and two frontends, and workers slow enough for long responses."""
    flags = {"router_flags": ["--metrics-port=0"], "worker_flags": ["--speedup=0.1"]}
    return Mesh(folder, frontends=2, routers=2, indexers=0, **{**flags, **shape})


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that each occupy a core, during the block."""
    parent_guard = [sys.executable, "-I", "-S", str(PARENT_GUARD), str(os.getpid())]
    busy_processes = [
        subprocess.Popen([*parent_guard, sys.executable, "-c", BUSY_LOOP]) for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in busy_processes:
            process.kill()
            process.wait()


def main() -> int:
    """Run the kills and print the report; returns 1 if a new router was not right in time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--busy", type=int, default=0)
    options = parser.parse_args()
    rng, seen = Random(1), list[Kill]()
    while (left := options.kills - len(seen)) > 0:
        with (
            tempfile.TemporaryDirectory() as folder,
            make_mesh(Path(folder)) as mesh,
            busy(options.busy),
        ):
            try:
                seen += asyncio.run(kills(mesh, min(left, KILLS_A_MESH), rng))
            except BaseException:
                print(mesh.logs(), file=sys.stderr)
                raise
        print(f"{len(seen)} of {options.kills}", file=sys.stderr)
    slowest_s = max(kill.right_s for kill in seen)
    result = {
        "right_median_s": median(kill.right_s for kill in seen),
        "right_slowest_s": slowest_s,
        "wrong_after_s": round(sum(kill.wrong_after_s for kill in seen), 3),
        "left_wrong_s": round(sum(kill.left_wrong_s for kill in seen), 3),
        "target_s": TARGET_S,
        "is_met": slowest_s <= TARGET_S,
        "kills": [asdict(kill) for kill in seen],
    }
    print_report("router_kills", vars(options), result)
    return int(not result["is_met"])


if __name__ == "__main__":
    sys.exit(main())

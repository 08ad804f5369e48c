"""Runs one case: starts its mesh, loads it, injects the fault, and reports what clients received.

The load: the streams of the case, all begun before the fault, and a fresh request every
FRESH_EVERY_S, until the streams have ended, a request from after the fault has succeeded, and the
fault has lasted FAULT_DURATION_S. A hang ends when all requests have ended. Every response is
compared with the exact response of the sim model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.cases import Case
from tests.chaos.client import Reply, fetch
from tests.chaos.cut_worker import CUT, MEND
from tests.chaos.frozen_worker import FREEZE, THAW
from tests.kit.oracle import Oracle
from tests.kit.processes import Mesh, Service
from tests.kit.waiting import until

FRESH_EVERY_S = 0.05
FRESH_TOKENS = 8
# The fault is injected when this share of the streams' tokens has arrived.
FAULT_AT_SHARE = 0.4
RECOVERY_MAX_S = 20.0
# Time in which requests are sent during the fault; for a hang, far beyond its detection.
FAULT_DURATION_S = {
    "kill": 2.0,
    "term": 2.0,
    "stop": 6.0,
    "freeze": 6.0,
    "cut": 6.0,
    "none": 0.0,
}
REST_S = 15.0
# Delay of a load balancer before it avoids a draining frontend; below the frontend's notice.
BALANCER_S = 0.2
# Clients of a killed frontend. Their streams fail; the work they leave must be freed.
LOST_STREAMS = 16
WORKER_MODULE = "tests.chaos.frozen_worker"
CUT_WORKER_MODULE = "tests.chaos.cut_worker"
STREAMS_BEGIN_S = 120.0
STALL_TICK_S = 0.005

_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "freeze": FREEZE,
    "term": signal.SIGTERM,
    "cut": CUT,
}
_UNDO = {"stop": signal.SIGCONT, "freeze": THAW, "cut": MEND}


@dataclass(slots=True)
class Observations:
    """What clients received in a case. streams: pauses count; fresh: sent around the fault."""

    streams: list[Reply] = field(default_factory=list)
    fresh: list[Reply] = field(default_factory=list)
    fault_at: float = 0.0
    stall_s: float = 0.0
    left: str = ""
    migrations: int = 0
    statuses: list[int] = field(default_factory=list)


def run_case(case: Case, *, keep_logs: Path | None = None) -> dict[str, Any]:
    """Returns the JSON line of a case. keep_logs: folder for the logs; None: not kept."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kvmesh-chaos-") as name:
        folder = Path(name) if keep_logs is None else keep_logs
        with Mesh(
            folder,
            **asdict(case.shape),
            worker_flags=case.worker_flags,
            worker_module=CUT_WORKER_MODULE if case.action == "cut" else WORKER_MODULE,
        ) as mesh:
            observations = asyncio.run(_CaseRun(case, mesh).run())
    line = report(case, observations, Oracle())
    return {**line, "load": [round(load, 1), round(os.getloadavg()[0], 1)]}


def report(case: Case, observations: Observations, oracle: Oracle) -> dict[str, Any]:
    """Returns the figures and the limits that they miss."""
    everything = [*observations.streams, *observations.fresh]
    failed = [reply for reply in everything if reply.error]
    inexact = [reply for reply in everything if not reply.error and not _is_exact(reply, oracle)]
    longest = max(observations.streams, key=lambda reply: reply.pause_s)
    after = [r for r in observations.fresh if r.begun_at >= observations.fault_at and not r.error]
    recovered_at = min((r.ended_at for r in after), default=None)
    line: dict[str, Any] = {
        "case": case.name,
        "streams": case.streams,
        "errors": len(failed),
        "inexact": len(inexact),
        "longest_pause_ms": round(longest.pause_s * 1000),
        "pause_limit_ms": None if case.pause_s is None else round(case.pause_s * 1000),
        "recovery_s": None
        if recovered_at is None
        else round(recovered_at - observations.fault_at, 3),
        "requests": len(everything),
        "slowest_fresh_ms": round(
            max((_took_s(r) for r in observations.fresh), default=0.0) * 1000
        ),
        "migrations": observations.migrations,
        "client_stall_ms": round(observations.stall_s * 1000),
    }
    missed = list(_missed(case, observations, line))
    reasons = sorted({reply.error for reply in failed})[:3]
    return {**line, "missed": missed, **({"why": reasons} if reasons else {})}


def _missed(case: Case, observations: Observations, line: dict[str, Any]) -> Iterable[str]:
    for name in ("errors", "inexact"):
        if line[name]:
            yield name
    if case.pause_s is not None and line["longest_pause_ms"] > case.pause_s * 1000:
        yield "longest_pause_ms"
    if line["recovery_s"] is None and not case.rolling:
        yield "recovery_s"
    if line["migrations"] and not case.migrates:
        yield "migrations"
    if observations.left:
        yield f"not freed: {observations.left}"


def _took_s(reply: Reply) -> float:
    return reply.ended_at - reply.begun_at


def _is_exact(reply: Reply, oracle: Oracle) -> bool:
    expected = oracle.completion(reply.prompt, reply.tokens, ignore_eos=True)
    return (reply.text, reply.finish_reason) == (expected.text, expected.finish_reason)


class _CaseRun:
    def __init__(self, case: Case, mesh: Mesh) -> None:
        self._case = case
        self._mesh = mesh
        self._observations = Observations()
        self._urls = mesh.urls
        self._sent = 0
        self._stopping = False
        self._respawned: list[Service] = []
        self._fetches: list[asyncio.Task[Reply]] = []

    async def run(self) -> Observations:
        await fetch(self._urls[0], Reply("Warm up", 4))
        async with self._measure_stalls(), asyncio.TaskGroup() as tasks:
            if self._case.rolling:
                await self._roll(tasks)
            else:
                await self._run_single_fault(tasks)
        await asyncio.to_thread(self._wait_until_idle)
        return self._observations

    # -- one fault ------------------------------------------------------------------------------

    async def _run_single_fault(self, tasks: asyncio.TaskGroup) -> None:
        case, observations = self._case, self._observations
        frontends = [self._mesh.of_kind("frontend")[-1]] if "frontend" in case.targets else []
        safe = self._safe_urls(frontends)
        observations.streams = [
            Reply(f"Stream number {n}", case.tokens) for n in range(case.streams)
        ]
        streams = [
            tasks.create_task(fetch(safe[n % len(safe)], reply))
            for n, reply in enumerate(observations.streams)
        ]
        for frontend in frontends if case.action == "kill" else []:
            for n in range(LOST_STREAMS):
                lost = Reply(f"Lost stream {n}", case.tokens)
                tasks.create_task(fetch(frontend.addresses["http"], lost))
        fresh = tasks.create_task(self._fresh(tasks, safe))
        token_threshold = FAULT_AT_SHARE * case.streams * case.tokens
        await until(
            lambda: sum(r.events for r in observations.streams) >= token_threshold,
            "streams run",
            STREAMS_BEGIN_S,
        )
        victims = await asyncio.to_thread(self._select_targets)
        observations.fault_at = time.monotonic()
        await self._inject(victims)
        if case.lasts_s:
            # Sleep: the fault lasts for this time.
            await asyncio.sleep(case.lasts_s)
            self._undo(victims)
        await asyncio.wait(streams)
        await self._await_recovery()
        # Sleep: a fault that ends before it is detected proves nothing.
        await asyncio.sleep(
            observations.fault_at + FAULT_DURATION_S[case.action] - time.monotonic()
        )
        self._stopping = True
        await fresh
        await asyncio.gather(*self._fetches)
        if not case.lasts_s:
            self._undo(victims)
        for victim in victims if case.action == "term" else ():
            status = await asyncio.to_thread(victim.wait, REST_S)
            assert status == 0, victim.tail()

    def _undo(self, victims: list[Service]) -> None:
        for victim in victims if self._case.action in _UNDO else ():
            victim.send(_UNDO[self._case.action])

    def _safe_urls(self, frontends: list[Service]) -> list[str]:
        """Returns the frontends that must fail no request; a draining one is among them."""
        lost = set() if self._case.action == "term" else {f.addresses["http"] for f in frontends}
        return [url for url in self._urls if url not in lost]

    def _select_targets(self) -> list[Service]:
        """Returns one process of each kind: the busiest worker, else the youngest process. A total
        fault has all."""
        if self._case.is_total:
            return [one for kind in self._case.targets for one in self._mesh.of_kind(kind)]

        def work(service: Service) -> int:
            return service.open_slots() if service.service_name == "worker" else 0

        return [max(reversed(self._mesh.of_kind(kind)), key=work) for kind in self._case.targets]

    async def _inject(self, victims: list[Service]) -> None:
        case = self._case
        for victim in victims:
            victim.send(_SIGNALS[case.action])
        if case.respawn:
            self._respawned = [self._mesh.spawn(kind) for kind in case.targets]
        if case.action == "term":
            # Sleep: a load balancer notices the drain after this time.
            await asyncio.sleep(BALANCER_S)
            drained_urls = {v.addresses["http"] for v in victims if v.service_name == "frontend"}
            self._urls = [url for url in self._urls if url not in drained_urls]

    async def _fresh(self, tasks: asyncio.TaskGroup, safe: list[str]) -> None:
        """Sends new requests until the case stops."""
        words = "able about above accept " * (self._case.fresh_words // 4)
        # Ends: the case stops.
        while not self._stopping:
            self._sent += 1
            urls = [url for url in safe if url in self._urls]
            reply = Reply(f"Fresh {self._sent}: {words}", FRESH_TOKENS)
            self._observations.fresh.append(reply)
            fetching = fetch(urls[self._sent % len(urls)], reply)
            self._fetches.append(tasks.create_task(fetching))
            # Sleep: the pace of new requests.
            await asyncio.sleep(FRESH_EVERY_S)

    async def _await_recovery(self) -> None:
        """Waits for a success; without one it returns too, and the report shows it."""
        fault_at = self._observations.fault_at

        def recovered() -> bool:
            successes = (
                r for r in reversed(self._observations.fresh) if r.ended_at and not r.error
            )
            return any(r.begun_at >= fault_at for r in successes)

        with contextlib.suppress(AssertionError):
            await until(recovered, "a request succeeds", RECOVERY_MAX_S)

    # -- rolling --------------------------------------------------------------------------------

    async def _roll(self, tasks: asyncio.TaskGroup) -> None:
        case, observations = self._case, self._observations
        clients = [tasks.create_task(self._loop(n)) for n in range(case.streams)]
        await until(
            lambda: len(observations.streams) == case.streams, "streams begin", STREAMS_BEGIN_S
        )
        await until(
            lambda: all(r.events for r in observations.streams[: case.streams]),
            "streams run",
            STREAMS_BEGIN_S,
        )
        observations.fault_at = time.monotonic()
        for old in list(self._mesh.services):
            if not case.kinds or old.kind in case.kinds:
                await self._replace(old)
        self._stopping = True
        await asyncio.wait(clients)

    async def _loop(self, client: int) -> None:
        """Reads one stream after the other."""
        count = 0
        # Ends: the case stops; each stream has a limit.
        while not self._stopping:
            count += 1
            reply = Reply(f"Client {client}, stream {count}", self._case.tokens)
            self._observations.streams.append(reply)
            await fetch(self._urls[client % len(self._urls)], reply)

    async def _replace(self, old: Service) -> None:
        new = self._mesh.spawn(old.kind)
        await asyncio.to_thread(new.wait_ready)
        await until(self._mesh.is_complete, f"the mesh has {new.name}", REST_S)
        if old.service_name == "frontend":
            self._urls = [url for url in self._mesh.urls if url != old.addresses["http"]]
        old.send(signal.SIGTERM)
        status = await asyncio.to_thread(old.wait, REST_S)
        assert status == 0, old.tail()

    # -- the end --------------------------------------------------------------------------------

    def _wait_until_idle(self) -> None:
        """Waits until the live processes have freed everything; records what is left."""
        for service in self._respawned:
            service.wait_ready()
        deadline = time.monotonic() + REST_S
        while (left := self._find_leftovers()) and time.monotonic() < deadline:
            # Sleep: a poll with a deadline; what is left then is a result.
            time.sleep(0.05)
        self._observations.left = left
        frontends = [s for s in self._mesh.services if s.service_name == "frontend"]
        lines = [line for frontend in frontends for line in frontend.events("request")]
        self._observations.migrations = sum(max(0, line.get("attempts", 1) - 1) for line in lines)

    def _find_leftovers(self) -> str:
        left = []
        for worker in self._mesh.workers:
            load = worker.load()
            held = {
                "slots": load.open_slots,
                "running": sum(row.running + row.waiting for row in load.loads),
                "blocks": sum(row.kv_used_blocks for row in load.loads),
                "rooms": sum(row.rooms_open for row in load.loads),
            }
            left += [f"{worker.name}: {n} {what}" for what, n in held.items() if n]
        for router in self._mesh.running("router"):
            if count := router.bookings():
                left.append(f"{router.name}: {count} bookings")
        return ", ".join(left)

    @asynccontextmanager
    async def _measure_stalls(self) -> AsyncIterator[None]:
        """Measures the stalls of this process: shorter pauses prove nothing about the mesh."""

        async def watch() -> None:
            while True:
                before = time.monotonic()
                # Sleep: its lateness is measured.
                await asyncio.sleep(STALL_TICK_S)
                late_s = time.monotonic() - before - STALL_TICK_S
                self._observations.stall_s = max(self._observations.stall_s, late_s)

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()

"""A supervisor with fake processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import TypeVar

from common.service.restarts import RestartPolicy
from meshctl.process.child import ReadyLine, StartFailed
from meshctl.process.supervise import Event, Supervisor
from meshctl.services import ServiceSpec

WAIT_S = 20.0
FAST = RestartPolicy(initial_pause_s=0.001, max_pause_s=0.004)
E = TypeVar("E", bound=Event)


class Journal:
    """The calls of the fakes, in order."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._written = asyncio.Event()

    def write(self, entry: str) -> None:
        self.entries.append(entry)
        self._written.set()

    async def has(self, entry: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while entry not in self.entries:
                self._written.clear()
                await self._written.wait()


class FakeProcess:
    """A service process. obedient: it ends on SIGTERM. `log` collects its calls."""

    def __init__(self, spec: ServiceSpec, pid: int, log: Journal, obedient: bool) -> None:
        self.spec = spec
        self.pid = pid
        self.log = log
        self.obedient = obedient
        self.line: asyncio.Future[ReadyLine | StartFailed | None] = asyncio.Future()
        self.ended: asyncio.Future[int] = asyncio.Future()

    async def ready(self) -> ReadyLine | StartFailed | None:
        return await asyncio.shield(self.line)

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    def terminate(self) -> None:
        self.log.write(f"TERM {self.spec.name}")
        if self.obedient:
            self.end(0)

    def kill(self) -> None:
        self.log.write(f"KILL {self.spec.name}")
        self.end(-9)

    def report_ready(self, instance_id: str | None = None) -> None:
        name = instance_id or str(self.pid)
        self.line.set_result(ReadyLine(self.spec.name, self.pid, name, {}))

    def end(self, status: int) -> None:
        if not self.ended.done():
            self.ended.set_result(status)
        if not self.line.done():
            self.line.set_result(None)


class World:
    """Launcher, registrar and event receiver of a supervisor in one object."""

    def __init__(self, *, born: Callable[[FakeProcess], None], obedient: bool = True) -> None:
        self.born = born
        self.obedient = obedient
        self.processes: list[FakeProcess] = []
        self.log = Journal()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.deregistered: list[tuple[str, int]] = []
        self.registry_error: Exception | None = None
        self.launch_error: OSError | None = None

    def start(self, spec: ServiceSpec) -> FakeProcess:
        if self.launch_error is not None:
            raise self.launch_error
        self.log.write(f"START {spec.name}")
        process = FakeProcess(spec, 100 + len(self.processes), self.log, self.obedient)
        self.processes.append(process)
        self.born(process)
        return process

    async def deregister(self, namespace: str, instance_id: int) -> None:
        if self.registry_error is not None:
            raise self.registry_error
        self.deregistered.append((namespace, instance_id))

    async def next_event(self, kind: type[E]) -> E:
        """The next event of a kind; earlier events are skipped."""
        async with asyncio.timeout(WAIT_S):
            while True:
                event = await self.events.get()
                if isinstance(event, kind):
                    return event


def spec(name: str, rank: int = 0, drain_s: float = WAIT_S) -> ServiceSpec:
    return ServiceSpec(name, "module", (), rank, drain_s)


def becomes_ready(process: FakeProcess) -> None:
    process.report_ready()


def dead(process: FakeProcess) -> None:
    process.end(1)


def silent(process: FakeProcess) -> None:
    pass


@asynccontextmanager
async def running(
    world: World,
    *specs: ServiceSpec,
    policy: RestartPolicy = FAST,
    start_s: float = WAIT_S,
    answers: Sequence[bool] = (),
) -> AsyncIterator[Supervisor]:
    remaining = list(answers)

    async def is_live(_line: ReadyLine) -> bool:
        world.log.write(f"CHECK {len(remaining)} left")
        return remaining.pop(0) if remaining else True

    supervisor = Supervisor(
        specs,
        world.start,
        world.deregister,
        namespace="ns",
        on_event=world.events.put_nowait,
        clock=asyncio.get_running_loop().time,
        rng=Random(1),
        policy=policy,
        start_s=start_s,
        is_live=is_live,
        live_failures_max=3 if answers else 0,
        live_interval_s=0.001,
    )
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        try:
            yield supervisor
        finally:
            supervisor.stop()

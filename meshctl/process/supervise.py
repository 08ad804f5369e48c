"""Keeps services running: restarts the dead, ends the living in order.

A service that died is deregistered at once, by us: nobody else knows before its lease has run out.
Invariants: a service has at most one process; after `run` none is left, however `run` ends; once
`stop` was called nothing is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from random import Random
from typing import Protocol

from common.errors import InvalidRequest, MeshError
from common.runtime.tasks import TaskGroup
from common.service.lifecycle import EXIT_CONFIG
from meshctl.process.backoff import Backoff, Policy
from meshctl.process.child import ReadyLine
from meshctl.services import ServiceSpec

DEREGISTER_S = 3.0
# From SIGKILL to the end: more only in an uninterruptible system call.
KILL_S = 5.0


class Process(Protocol):
    """A started service (`meshctl.process.child.ChildProcess`, or a fake)."""

    @property
    def pid(self) -> int: ...

    async def ready(self) -> ReadyLine | None:
        """Its ready line; None if it never came. Raises InvalidRequest if it makes no sense."""
        ...

    async def wait(self) -> int:
        """The exit status, once it ended; -n: by signal n."""
        ...

    def terminate(self) -> None:
        """Ask it to end. Nothing happens if it has."""
        ...

    def kill(self) -> None:
        """End it and all that it started."""
        ...


class Launcher(Protocol):
    """What starts processes."""

    def start(self, spec: ServiceSpec) -> Process:
        """Raises OSError if it cannot be started at all."""
        ...


class Registrar(Protocol):
    """The part of `common.registry.registry.Registry` that a supervisor needs."""

    async def deregister(self, namespace: str, instance_id: int) -> None: ...


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BecameReady:
    """after_s: since its process was started."""

    service: str
    line: ReadyLine
    after_s: float


@dataclass(frozen=True, slots=True)
class Died:
    """It ended unasked. status: of its exit, -n: by signal n, None: it could not be started.

    why: what is known beyond the status, or "". again_in_s: None if it is given up or the mesh is
    being stopped.
    """

    service: str
    status: int | None
    why: str
    ran_s: float
    again_in_s: float | None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """It ended `tries` times and was never ready. can_heal: whether time could have helped."""

    service: str
    tries: int
    can_heal: bool = True


@dataclass(frozen=True, slots=True)
class Ended:
    """It ended as asked; killed: because it did not in `after_s`."""

    service: str
    status: int
    after_s: float
    killed: bool


@dataclass(frozen=True, slots=True)
class NotDeregistered:
    """Its instance stays in the registry until its lease has run out."""

    service: str
    why: str


@dataclass(frozen=True, slots=True)
class Undying:
    """Not even SIGKILL ended it, in KILL_S."""

    service: str
    pid: int


Event = BecameReady | Died | GivenUp | Ended | NotDeregistered | Undying


class Child:
    """A service and what became of it; for others to read."""

    def __init__(self, spec: ServiceSpec, backoff: Backoff) -> None:
        self.spec = spec
        self.backoff = backoff
        self.state = State.STARTING
        self.process: Process | None = None
        self.line: ReadyLine | None = None
        self.started_at = 0.0
        self.asked_at: float | None = None
        self.killed = False


class Supervisor:
    """Keeps `specs` running until `stop`, and says what happens by calling `tell`.

    registrar: None leaves the dead to the registry's own checks. start_s: a service that is not
    ready this long after its start is killed, which counts as a death. clock: monotonic seconds.
    """

    def __init__(
        self,
        specs: Iterable[ServiceSpec],
        launcher: Launcher,
        registrar: Registrar | None,
        *,
        namespace: str,
        tell: Callable[[Event], None],
        clock: Callable[[], float],
        rng: Random,
        policy: Policy | None = None,
        start_s: float = 60.0,
    ) -> None:
        policy = Policy() if policy is None else policy
        self.children: Sequence[Child] = [Child(spec, Backoff(policy, rng)) for spec in specs]
        self.clean = True
        self._launcher = launcher
        self._registrar = registrar
        self._namespace = namespace
        self._tell = tell
        self._clock = clock
        self._start_s = start_s
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Returns when all services have ended after `stop`; `clean` says whether all went well.

        Giving a service up stops the others, in order.
        """
        async with TaskGroup() as group:
            keepers = {
                child.spec.name: group.create_task(self._keep(child), name=child.spec.name)
                for child in self.children
            }
            await self._stop.wait()
            for _, wave in groupby(sorted(self.children, key=_rank), key=_rank):
                endings = [self._end(child, keepers[child.spec.name]) for child in wave]
                await asyncio.gather(*endings)

    def stop(self) -> None:
        """Start no more, and end all in order. Idempotent."""
        self._stop.set()

    def kill(self) -> None:
        """End all at once."""
        self._stop.set()
        for child in self.children:
            if child.process is not None:
                child.killed = True
                child.process.kill()

    async def stopping(self) -> None:
        """Returns once `stop` was called, or a service given up."""
        await self._stop.wait()

    async def all_ready(self) -> None:
        """Returns at a moment when every service is ready."""
        while any(child.state is not State.READY for child in self.children):
            self._changed.clear()
            await self._changed.wait()

    async def _keep(self, child: Child) -> None:
        while not self._stop.is_set():
            pause_s = await self._live_once(child)
            if pause_s is None:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()
        self._enter(child, State.STOPPED)

    async def _live_once(self, child: Child) -> float | None:
        """One process, from start to end. The pause before the next one; None: there is none."""
        self._enter(child, State.STARTING)
        child.started_at = self._clock()
        try:
            process = self._launcher.start(child.spec)
        except OSError as error:
            return self._died(child, None, str(error))
        child.process = process
        try:
            why = await self._await_ready(child, process)
            status = await process.wait()
        except BaseException:
            # Whatever ends this task must not leave a process behind that nobody keeps.
            process.kill()
            raise
        child.process = None
        line, child.line = child.line, None
        if line is not None:
            await self._deregister(child, line)
        if child.asked_at is not None or child.killed:
            self._ended(child, status)
            return None
        return self._died(child, status, why)

    async def _await_ready(self, child: Child, process: Process) -> str:
        """Returns when it is ready or will not be, and then why; "" if it just ended."""
        try:
            async with asyncio.timeout(self._start_s):
                line = await process.ready()
                if line is None:
                    await process.wait()
                    return ""
        except TimeoutError:
            process.kill()
            return f"not ready within {self._start_s:g} s"
        except InvalidRequest as error:
            process.kill()
            return error.message
        child.line = line
        child.backoff.ready(self._clock())
        self._enter(child, State.READY if child.asked_at is None else State.STOPPING)
        self._tell(BecameReady(child.spec.name, line, self._clock() - child.started_at))
        return ""

    def _died(self, child: Child, status: int | None, why: str) -> float | None:
        now = self._clock()
        can_heal = status != EXIT_CONFIG
        pause_s = child.backoff.ended(now, can_heal=can_heal)
        given_up = pause_s is None
        if self._stop.is_set():
            pause_s = None
            # Nobody asked this one to end.
            self.clean = False
        self._enter(child, State.STOPPED if pause_s is None else State.WAITING)
        self._tell(Died(child.spec.name, status, why, now - child.started_at, pause_s))
        if given_up and not self._stop.is_set():
            self.clean = False
            self._enter(child, State.FAILED)
            self._tell(GivenUp(child.spec.name, child.backoff.failures, can_heal))
            self.stop()
        return pause_s

    def _ended(self, child: Child, status: int) -> None:
        now = self._clock()
        self._enter(child, State.STOPPED)
        # SIGTERM by itself: it was asked before it could listen.
        self.clean = self.clean and not child.killed and status in (0, -signal.SIGTERM)
        after_s = now - (now if child.asked_at is None else child.asked_at)
        self._tell(Ended(child.spec.name, status, after_s, child.killed))

    async def _deregister(self, child: Child, line: ReadyLine) -> None:
        if self._registrar is None:
            return
        try:
            async with asyncio.timeout(DEREGISTER_S):
                await self._registrar.deregister(self._namespace, int(line.instance_id))
        except (MeshError, ValueError, TimeoutError) as error:
            self._tell(NotDeregistered(child.spec.name, str(error) or type(error).__name__))

    async def _end(self, child: Child, keeper: asyncio.Task[None]) -> None:
        """Ends one service in bounded time."""
        if child.process is not None:
            child.asked_at = self._clock()
            self._enter(child, State.STOPPING)
            child.process.terminate()
        await asyncio.wait({keeper}, timeout=child.spec.drain_s)
        if child.process is not None:
            child.killed = True
            child.process.kill()
        await asyncio.wait({keeper}, timeout=KILL_S + DEREGISTER_S)
        if not keeper.done():
            self.clean = False
            pid = 0 if child.process is None else child.process.pid
            self._tell(Undying(child.spec.name, pid))
            keeper.cancel()

    def _enter(self, child: Child, state: State) -> None:
        child.state = state
        self._changed.set()


def _rank(child: Child) -> int:
    return child.spec.drain_rank

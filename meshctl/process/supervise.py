"""Supervises services: restarts exited ones, stops all in order.

The supervisor deregisters a dead service at once; peers would notice only when its lease expires.
Invariants: a `Child` has at most one process, and a service at most one child, except while it is
replaced; no process remains after `run`; after `stop` no service starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from random import Random
from typing import Protocol

from common.errors import InternalError, InvalidRequest, MeshError
from common.runtime.tasks import TaskGroup
from common.service.lifecycle import EXIT_CONFIG
from common.service.restarts import RestartPolicy, Restarts
from meshctl.process.child import ReadyLine, StartFailed
from meshctl.services import ServiceSpec

DEREGISTER_TIMEOUT_S = 3.0
# From SIGKILL to the exit; longer only in an uninterruptible system call.
KILL_TIMEOUT_S = 5.0
LIVE_INTERVAL_S = 3.0


class Process(Protocol):
    """A started service (`meshctl.process.child.ChildProcess`, or a fake)."""

    pid: int

    async def ready(self) -> ReadyLine | StartFailed | None:
        """Returns the line of the service; None if it exited without one. Raises InvalidRequest."""
        ...

    async def wait(self) -> int:
        """Returns the exit status; -n: killed by signal n."""
        ...

    def terminate(self) -> None:
        """Sends SIGTERM; no effect after the exit."""
        ...

    def kill(self) -> None:
        """Kills the process and all that it started."""
        ...


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BecameReady:
    """after_s: seconds since the process started."""

    service: str
    line: ReadyLine
    after_s: float


@dataclass(frozen=True, slots=True)
class Died:
    """The service exited without a request to stop."""

    service: str
    status: int | None
    """Exit status; -n: killed by signal n; None: it could not be started."""

    reason: str
    """Details beyond the status; empty: none."""

    uptime_s: float
    restart_in_s: float | None
    """None without a restart."""

    start_error: str = ""
    """See `Child`."""


@dataclass(frozen=True, slots=True)
class RestartsExhausted:
    """The service exited `attempts` times and was never ready.

    is_retryable: False if the configuration is invalid. start_error: see `Child`.
    """

    service: str
    attempts: int
    is_retryable: bool = True
    start_error: str = ""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The service exited after a request to stop. killed: SIGKILL was needed."""

    service: str
    status: int
    after_s: float
    killed: bool


@dataclass(frozen=True, slots=True)
class NotDeregistered:
    """The instance stays in the registry until its lease expires."""

    service: str
    reason: str


@dataclass(frozen=True, slots=True)
class KillFailed:
    """The process did not exit within KILL_TIMEOUT_S after SIGKILL."""

    service: str
    pid: int


Event = BecameReady | Died | RestartsExhausted | Stopped | NotDeregistered | KillFailed


@dataclass(slots=True, eq=False)
class Child:
    """The state of one service; read-only outside the supervisor."""

    spec: ServiceSpec
    restarts: Restarts
    state: State = State.STARTING
    process: Process | None = None
    line: ReadyLine | None = None
    start_error: str = ""
    """Why its last start failed, as the service reported it; "": it did not."""
    end_reason: str = ""
    """How its last process ended."""
    start_limit: asyncio.Timeout | None = None
    """Of the present start, while it is not ready."""
    started_at: float = 0.0
    stop_requested_at: float | None = None
    killed: bool = False
    is_replacement: bool = False
    """The mesh goes on without it if it is never ready."""
    no_restart: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it shall not start again."""


class Supervisor:
    """Keeps `specs` running until `stop`; reports events by `on_event`.

    start: starts a service; raises OSError.
    deregister: see `Registry`.
    clock: monotonic seconds.
    start_s: a service that is not ready after this time is killed, which counts as an exit.
    is_live: returns whether a ready service answers.
    live_failures_max: a service that was live and then failed so many checks in a row is killed.
    """

    def __init__(
        self,
        specs: Iterable[ServiceSpec],
        start: Callable[[ServiceSpec], Process],
        deregister: Callable[[str, int], Awaitable[None]],
        *,
        namespace: str,
        on_event: Callable[[Event], None],
        clock: Callable[[], float],
        rng: Random,
        policy: RestartPolicy = RestartPolicy(),  # noqa: B008  # frozen
        start_s: float = 60.0,
        is_live: Callable[[ReadyLine], Awaitable[bool]] | None = None,
        live_failures_max: int = 0,
        live_interval_s: float = LIVE_INTERVAL_S,
    ) -> None:
        self._new_restarts: Callable[[], Restarts] = lambda: Restarts(policy, rng)
        self._children = [Child(spec, self._new_restarts()) for spec in specs]
        self._group: TaskGroup | None = None
        self._keep_tasks: dict[Child, asyncio.Task[None]] = {}
        self.is_clean = True
        self._start = start
        self._deregister = deregister
        self._namespace = namespace
        self._on_event = on_event
        self._clock = clock
        self._ready_timeout_s = start_s
        self._is_live = is_live
        self._live_failures_max = live_failures_max
        self._live_interval_s = live_interval_s
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Runs until all services have exited after `stop`; then `is_clean` is False after
        failures.

        A service with exhausted restarts stops the others in order.
        """
        async with TaskGroup() as self._group:
            for child in self._children:
                self._keep(child)
            await self._stop.wait()
            rank = attrgetter("spec.drain_rank")
            for _, same_rank in groupby(sorted(self._children, key=rank), key=rank):
                await asyncio.gather(*map(self._stop_child, same_rank))

    @property
    def children(self) -> Sequence[Child]:
        """The services, in the order of display; of one that is replaced, the old one first."""
        return tuple(self._children)

    def is_given_up(self, name: str) -> bool:
        """Returns whether no process of a service runs or starts again, because one has failed."""
        states = {child.state for child in self._children if child.spec.name == name}
        return State.FAILED in states and states <= {State.FAILED, State.STOPPED}

    def stop(self) -> None:
        """Stops all services in order and starts none. Idempotent."""
        self._stop.set()
        for child in self._children:
            child.no_restart.set()

    def kill(self) -> None:
        self.stop()
        for child in self._children:
            if child.process is not None:
                child.killed = True
                child.process.kill()

    def add(self, spec: ServiceSpec, *, after: Child | None = None) -> Child:
        """Starts one more process while the mesh runs. If it is never ready, the others go on.

        after: the child of the same service that it replaces, or beside which it is listed; None:
        it is the last one.
        """
        child = Child(spec, self._new_restarts(), is_replacement=True)
        at = len(self._children) if after is None else self._children.index(after) + 1
        self._children.insert(at, child)
        if self._stop.is_set():
            child.no_restart.set()
        self._keep(child)
        return child

    async def end(self, child: Child) -> None:
        """Stops one service in bounded time; it does not start again."""
        child.no_restart.set()
        await self._stop_child(child)

    def remove(self, child: Child) -> None:
        """Forgets a service that has ended."""
        self._children.remove(child)
        del self._keep_tasks[child]
        self._notify()

    async def wait_ready(self, child: Child) -> str:
        """Waits until a service is ready, or one start of it has failed; the reason, "" if
        ready."""
        while child.state is not State.READY:
            if child.restarts.failures or child.no_restart.is_set():
                return child.start_error or child.end_reason or "it was stopped"
            await self._wait_for_change()
        return ""

    def _keep(self, child: Child) -> None:
        if self._group is None:
            raise InternalError("the supervisor does not run")
        task = self._group.create_task(self._keep_running(child), name=child.spec.name)
        self._keep_tasks[child] = task

    def extend_start(self, child: Child) -> None:
        """Restarts the time limit of a service that is not ready yet."""
        if child.start_limit is not None:
            now = asyncio.get_running_loop().time()
            child.start_limit.reschedule(now + self._ready_timeout_s)

    async def wait_for_stop(self) -> None:
        """Waits until `stop` was called or a service exhausted its restarts."""
        await self._stop.wait()

    async def wait_all_ready(self) -> None:
        """Waits until every service that the mesh needs is ready at the same time."""
        while any(
            child.state is not State.READY for child in self._children if not child.spec.is_observer
        ):
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        changed = self._changed
        await changed.wait()

    async def _keep_running(self, child: Child) -> None:
        while not child.no_restart.is_set():
            pause_s = await self._run_once(child)
            if pause_s is None:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await child.no_restart.wait()
        self._set_state(child, State.STOPPED)

    async def _run_once(self, child: Child) -> float | None:
        """Runs a process to its exit; returns the pause before the next one, None without one."""
        self._set_state(child, State.STARTING)
        child.started_at, child.start_error = self._clock(), ""
        try:
            process = self._start(child.spec)
        except OSError as error:
            return self._record_death(child, None, str(error))
        child.process = process
        try:
            reason = await self._await_ready(child, process)
            liveness_watch = asyncio.create_task(self._kill_when_hung(child, process))
            try:
                status = await process.wait()
            finally:
                liveness_watch.cancel()
            if liveness_watch.done() and not liveness_watch.cancelled():
                reason = reason or liveness_watch.result()
        except BaseException:
            # The process must not outlive the task that supervises it.
            process.kill()
            raise
        child.process = None
        line, child.line = child.line, None
        if line is not None:
            await self._deregister_instance(child, line)
        if child.stop_requested_at is not None or child.killed:
            self._record_stop(child, status)
            return None
        return self._record_death(child, status, reason)

    async def _await_ready(self, child: Child, process: Process) -> str:
        """Waits for the ready line; returns the reason of a failure, "" if ready or exited."""
        try:
            async with asyncio.timeout(self._ready_timeout_s) as child.start_limit:
                line = await process.ready()
                child.start_limit = None
                if not isinstance(line, ReadyLine):
                    child.start_error = line.error if line is not None else ""
                    await process.wait()
                    return ""
        except TimeoutError:
            child.start_limit = None
            process.kill()
            return f"not ready within {self._ready_timeout_s:g} s"
        except InvalidRequest as error:
            process.kill()
            return error.message
        child.line = line
        child.restarts.ready(self._clock())
        self._set_state(child, State.READY if child.stop_requested_at is None else State.STOPPING)
        self._on_event(BecameReady(child.spec.name, line, self._clock() - child.started_at))
        return ""

    async def _kill_when_hung(self, child: Child, process: Process) -> str:
        """Kills a process that was live and does not answer any more; the reason, "" if ended."""
        was_live, failures = False, 0
        while child.line is not None and self._is_live is not None and self._live_failures_max:
            await asyncio.sleep(self._live_interval_s)
            if child.state is not State.READY:
                break
            is_live = await self._is_live(child.line)
            was_live, failures = was_live or is_live, 0 if is_live else failures + 1
            if was_live and failures >= self._live_failures_max and child.state is State.READY:
                process.kill()
                return f"it did not answer {failures} liveness checks in a row"
        return ""

    def _record_death(self, child: Child, status: int | None, reason: str) -> float | None:
        now = self._clock()
        is_retryable = status != EXIT_CONFIG
        pause_s: float | None = child.restarts.ended(now)
        is_given_up = child.restarts.is_exhausted(is_retryable=is_retryable)
        if is_given_up:
            pause_s = None
        if child.no_restart.is_set():
            pause_s = None
            # An exit during the stop, before its own SIGTERM.
            self.is_clean = self.is_clean and not self._stop.is_set()
        child.end_reason = f"{reason or 'it ended'} (exit status {status})"
        self._set_state(child, State.STOPPED if pause_s is None else State.WAITING)
        uptime_s, error = now - child.started_at, child.start_error
        self._on_event(Died(child.spec.name, status, reason, uptime_s, pause_s, error))
        if is_given_up and not child.no_restart.is_set():
            self._set_state(child, State.FAILED)
            self._on_event(
                RestartsExhausted(child.spec.name, child.restarts.failures, is_retryable, error)
            )
            if not (child.is_replacement or child.spec.is_observer):
                self.is_clean = False
                self.stop()
        return pause_s

    def _record_stop(self, child: Child, status: int) -> None:
        now = self._clock()
        self._set_state(child, State.STOPPED)
        # -SIGTERM: the signal arrived before the service had installed its handler.
        self.is_clean = self.is_clean and not child.killed and status in (0, -signal.SIGTERM)
        after_s = now - (now if child.stop_requested_at is None else child.stop_requested_at)
        self._on_event(Stopped(child.spec.name, status, after_s, child.killed))

    async def _deregister_instance(self, child: Child, line: ReadyLine) -> None:
        try:
            async with asyncio.timeout(DEREGISTER_TIMEOUT_S):
                await self._deregister(self._namespace, int(line.instance_id))
        except (MeshError, ValueError, TimeoutError) as error:
            self._on_event(NotDeregistered(child.spec.name, str(error) or type(error).__name__))

    async def _stop_child(self, child: Child) -> None:
        """Stops one service in bounded time."""
        keep_task = self._keep_tasks.get(child)
        if keep_task is None:
            return  # It has been replaced.
        # A second SIGTERM would end it at once.
        if child.process is not None and child.stop_requested_at is None:
            child.stop_requested_at = self._clock()
            self._set_state(child, State.STOPPING)
            child.process.terminate()
        await asyncio.wait({keep_task}, timeout=child.spec.drain_s)
        if child.process is not None:
            child.killed = True
            child.process.kill()
        await asyncio.wait({keep_task}, timeout=KILL_TIMEOUT_S + DEREGISTER_TIMEOUT_S)
        if not keep_task.done():
            self.is_clean = False
            pid = 0 if child.process is None else child.process.pid
            self._on_event(KillFailed(child.spec.name, pid))
            keep_task.cancel()

    def _set_state(self, child: Child, state: State) -> None:
        child.state = state
        self._notify()

    def _notify(self) -> None:
        # All that wait see this change, and wait for the next one on a new event.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

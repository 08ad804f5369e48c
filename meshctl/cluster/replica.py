"""One replica on its node: runs the process of a service, and reports its state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

from common.registry.open import open_registry
from common.registry.registry import Registry
from common.rpc.channel import security_from_config
from common.runtime.config import PREFIX
from common.runtime.env import environ as process_environ
from meshctl.cluster.state import Phase
from meshctl.options import UpOptions
from meshctl.process.child import ProcessLauncher
from meshctl.process.listeners import Listeners
from meshctl.process.liveness import is_live
from meshctl.process.routable import find_missing
from meshctl.process.supervise import Child, Event, State, Supervisor
from meshctl.services import ServiceSpec
from meshctl.view.screen import describe_log_line

POLL_S = 0.1
# Of one that is routable: it stays so until it drains.
SETTLED_POLL_S = 1.0
DETAIL_CHARS_MAX = 200
_PHASES = {
    State.STARTING: Phase.STARTING,
    State.WAITING: Phase.STARTING,
    State.STOPPING: Phase.STOPPING,
    State.STOPPED: Phase.STOPPED,
    State.FAILED: Phase.FAILED,
}


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a replica."""

    phase: Phase
    detail: str = ""
    """What it waits for, or why it failed."""
    instance_id: str = ""
    addresses: Mapping[str, str] | None = None
    pid: int = 0
    failures: int = 0
    log: str = ""


class Replica:
    """Supervises the process of one service.

    - spec: as it runs on this node.
    - address: of this node.
    - options: of the mesh.
    - environ: variables for the service beside those of this process.
    - folder: of its log, its own.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        address: str,
        options: UpOptions,
        environ: Mapping[str, str],
        folder: Path,
    ) -> None:
        self._spec = spec
        # Settings are those of the mesh, whatever the processes of the node have.
        own = {k: v for k, v in process_environ().items() if not k.startswith(PREFIX)}
        inherited = {**own, **environ}
        prefix = f"{PREFIX}FRONTEND_"
        http_host = spec.with_environ(inherited).get(f"{prefix}HTTP_HOST") or address
        ports = {} if spec.http_port is None else {spec.name: spec.http_port}
        self._listeners = Listeners(http_host, ports)
        self._launcher = ProcessLauncher(folder, inherited, options.pass_environ, self._listeners)
        self._registry: Registry = open_registry(options)
        self._security = security_from_config(options)
        self._supervisor = Supervisor(
            [],
            self._launcher.start,
            self._registry.deregister,
            namespace=options.namespace,
            on_event=self._on_event,
            clock=time.monotonic,
            rng=SystemRandom(),
            start_s=options.ready_s,
            is_live=partial(is_live, security=self._security),
            live_failures_max=options.live_failures_max,
        )
        self._child: Child | None = None
        self._waits_for = ""
        self._routable_id = ""
        """Instance id of the process that became routable."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Starts the process, and keeps it running. Does not wait for it."""
        self._spawn(self._supervisor.run())
        # The supervisor takes services once it runs.
        await asyncio.sleep(0)
        self._child = self._supervisor.add(self._spec)
        self._spawn(self._watch())

    def stop(self) -> None:
        """Drains and ends the process; it does not start again."""
        if self._child is not None and not self._child.no_restart.is_set():
            self._listeners.close(self._spec.name)
            self._spawn(self._supervisor.end(self._child))

    async def close(self) -> None:
        """Ends the process at once, and what observes it."""
        self._supervisor.kill()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listeners.close(self._spec.name)
        await self._registry.close()

    def status(self) -> Status:
        """Returns the state."""
        child, log = self._child, str(self._launcher.log_path(self._spec.name))
        if child is None:
            return Status(Phase.STARTING, log=log)
        line = child.line
        phase, detail = _PHASES.get(child.state, Phase.READY), ""
        if phase is Phase.READY and line is not None:
            is_routable = line.instance_id == self._routable_id
            phase = Phase.ROUTABLE if is_routable else Phase.READY
            detail = "" if is_routable else self._waits_for
        elif phase in (Phase.FAILED, Phase.STARTING):
            detail = child.start_error or child.end_reason or self._last_line()
        return Status(
            phase,
            detail[:DETAIL_CHARS_MAX],
            "" if line is None else line.instance_id,
            {} if line is None else dict(line.addresses),
            0 if child.process is None else child.process.pid,
            child.restarts.failures,
            log,
        )

    def tail(self) -> list[str]:
        """Returns the last lines of the log."""
        return self._launcher.tail(self._spec.name)

    def _last_line(self) -> str:
        return describe_log_line("".join(self.tail()[-1:]))

    def _on_event(self, event: Event) -> None:
        # The status has all of it.
        pass

    async def _watch(self) -> None:
        """Follows whether the peers can use the process, and extends the limit of a start whose log
        grows."""
        child, log_bytes = self._child, 0
        assert child is not None, "started"
        while True:
            if child.state is State.STARTING:
                size = self._launcher.log_bytes(self._spec.name)
                if size != log_bytes:
                    log_bytes = size
                    self._supervisor.extend_start(child)
            line = child.line
            is_settled = line is not None and line.instance_id == self._routable_id
            if line is not None and not is_settled and child.state is State.READY:
                waiting = await find_missing(self._security, child)
                self._waits_for = waiting.missing
                if not waiting.missing:
                    self._routable_id = line.instance_id
            await asyncio.sleep(SETTLED_POLL_S if is_settled else POLL_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

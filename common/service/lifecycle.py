"""One life for every room: STARTING -> READY -> DRAINING -> STOPPED, and the only owner of signals.

Start: the app binds, builds and warms up; then health is SERVING; then it registers, last.
Drain (first SIGTERM or SIGINT, or an essential task that ended): health NOT_SERVING for good;
deregister; `notice_s` in which new work is still taken, because peers learn late; then `drain_s`
for streams to end; then tasks are cancelled and their cleanup awaited; the app closes; telemetry is
flushed. Every step is bounded, a failed or slow one is logged and the rest still happens.

Exit status: 0 after a drain that was asked for; 1 when something failed; `EXIT_CONFIG` when the
app cannot be built as it is configured; 128 + n at once upon a second signal n; `EXIT_STUCK` when a
task would not end although cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.errors import Conflict, InternalError, MeshError
from common.rpc import channel as rpc
from common.runtime import log, telemetry
from common.runtime.config import ConfigError, ServiceConfig

LOG = structlog.get_logger(__name__)

DEREGISTER_TIMEOUT_S = 3.0
DRAIN_MARGIN_S = 5.0  # `drain` may take this much longer than it was given, to clean up.
CLOSE_TIMEOUT_S = 10.0
RECANCEL_INTERVAL_S = 0.5
CANCEL_TIMEOUT_S = 1.0
FLUSH_TIMEOUT_S = 0.9
EXIT_CONFIG = 2
EXIT_STUCK = 70

# Collections of the oldest generation pause 24 ms at 300k objects; frozen start-up objects and rare
# collections of the young make that ~0.
GC_THRESHOLDS = (50_000, 20, 50)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STATUS_SERVING = health_pb2.HealthCheckResponse.SERVING
_STATUS_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

T = TypeVar("T")


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What a started app is: its instance id, and its addresses (`grpc` -> `host:port`, ...)."""

    instance_id: str
    addresses: Mapping[str, str]


class App(Protocol):
    """The composition root of a room, as the lifecycle sees it. Each method is called once."""

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        """Bind, build, warm up; spawn essential tasks; add grpc services to `lifecycle.health`."""
        ...

    async def register(self) -> None:
        """Become known to others. Not called when `start` failed."""
        ...

    async def deregister(self) -> None:
        """Become unknown; idempotent, also called when `register` was cut short."""
        ...

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Stop accepting, let streams end within `grace_s`, cancel the rest and await its cleanup.

        Returns what was cut, for the log; usually `rpc.stop(server, grace_s, calls)`.
        """
        ...

    async def close(self) -> None:
        """Close clients and files; also called when `start` failed half-way."""
        ...


class ThreadedHealthServer:
    """gRPC health on a port of its own, from a thread that a busy event loop cannot delay.

    `port` is the bound one, `address` it with the bound host. Raises Conflict when it is taken.
    Consul's checks go here: their time-out is below the longest stall of a loaded loop, and they
    cannot send a token, so this port asks for none (it says nothing but SERVING or not). That the
    loop really works is for peers to judge, from the heartbeats of their streams.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(2, thread_name_prefix="health"),
            options=[("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)],
        )
        # Non-blocking: a Watch does not occupy one of the two threads.
        self._servicer = health.HealthServicer(experimental_non_blocking=True)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        self.set("", False)
        rpc.check_bindable(host, port, "health_port")
        address = rpc.join_address(host, port)
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:  # taken since it was asked for
            raise Conflict(f"cannot bind {address}: {error}", field="health_port") from error
        self.address = rpc.join_address(host, self.port)

    def start(self) -> None:
        """Starts to answer; NOT_SERVING until told otherwise."""
        self._server.start()

    def set(self, service: str, serving: bool) -> None:
        """Changes the answer for one service; '' is the whole process."""
        self._servicer.set(service, _STATUS_SERVING if serving else _STATUS_NOT_SERVING)

    def drain(self) -> None:
        """NOT_SERVING for good."""
        self._servicer.enter_graceful_shutdown()

    def stop(self, timeout_s: float) -> None:
        """Closes the port."""
        self._server.stop(None).wait(timeout_s)


class HealthReporter:
    """One answer to "are you serving?", told to every place that gives it.

    A service is SERVING when the process is READY and nobody has set the service to False. Nothing
    is SERVING before that or after drain began.
    """

    def __init__(self, threaded_health: ThreadedHealthServer | None = None) -> None:
        self.servicer = health.aio.HealthServicer()
        self.threaded_health = threaded_health
        self._requested_status = {"": True}
        self._is_enabled = False

    @property
    def port(self) -> int | None:
        """The port of its own that health is served on; None without one."""
        return None if self.threaded_health is None else self.threaded_health.port

    async def set(self, service: str, serving: bool) -> None:
        """What a room says about one of its services (full name), or '' about all of itself."""
        self._requested_status[service] = serving
        await self._publish_status(service)

    async def set_enabled(self, is_enabled: bool) -> None:
        """READY or not yet; the lifecycle's."""
        self._is_enabled = is_enabled
        for service in tuple(self._requested_status):
            await self._publish_status(service)

    async def drain(self) -> None:
        """NOT_SERVING for good; the lifecycle's."""
        self._is_enabled = False
        await self.servicer.enter_graceful_shutdown()
        if self.threaded_health is not None:
            self.threaded_health.drain()

    async def _publish_status(self, service: str) -> None:
        serving = self._is_enabled and self._requested_status[service]
        await self.servicer.set(service, _STATUS_SERVING if serving else _STATUS_NOT_SERVING)
        if self.threaded_health is not None:
            self.threaded_health.set(service, serving)


class Lifecycle:
    """What an app may ask of its lifecycle: tasks with an owner, health, and an orderly end.

    Not a TaskGroup: that cancels everything at the first failure, where we want to drain.
    """

    def __init__(self, health: HealthReporter) -> None:
        self.health = health
        self.phase = Phase.STARTING
        self.failed = False
        self.why = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ready_event = asyncio.Event()
        self._drain_requested = asyncio.Event()

    def spawn(
        self, work: Coroutine[Any, Any, T], *, name: str, essential: bool = True
    ) -> asyncio.Task[T]:
        """Runs `work` in a task that is cancelled, and awaited, at the end of this life.

        An essential task must not end before the drain: if it does, that is logged, the process
        drains and its exit status is 1. The failure of another is only logged.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda done_task: self._on_task_done(done_task, essential))
        return task

    def drain(self, why: str, *, failed: bool = False) -> None:
        """Asks for the drain; only the first reason is kept, but any failure counts."""
        self.failed = self.failed or failed
        if not self._drain_requested.is_set():
            self.why = why
            self._drain_requested.set()

    def set_ready(self) -> None:
        """READY from now on; the lifecycle's."""
        self.phase = Phase.READY
        self._ready_event.set()

    async def ready(self) -> None:
        """Returns once READY; never, if the start fails."""
        await self._ready_event.wait()

    async def wait_for_drain_request(self) -> None:
        """Returns once the drain was asked for."""
        await self._drain_requested.wait()

    @property
    def is_draining(self) -> bool:
        """Whether the drain was asked for."""
        return self._drain_requested.is_set()

    async def cancel_tasks(self, timeout_s: float) -> list[str]:
        """Cancels what was spawned and awaits it; the names of what is still running after that."""
        tasks = tuple(self._tasks)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while tasks:
            for task in tasks:
                task.cancel()
            # Again after a while: `asyncio.wait_for` of Python 3.11, in libraries, may lose one.
            remaining_s = max(0.0, deadline - asyncio.get_running_loop().time())
            _, pending = await asyncio.wait(tasks, timeout=min(remaining_s, RECANCEL_INTERVAL_S))
            tasks = tuple(pending) if remaining_s > RECANCEL_INTERVAL_S else ()
        return sorted(task.get_name() for task in self._tasks)

    def _on_task_done(self, task: asyncio.Task[Any], essential: bool) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            LOG.error("task failed", task=task.get_name(), essential=essential, exc_info=error)
        elif essential and not self.is_draining:
            LOG.error("essential task ended", task=task.get_name())
        if essential and (error is not None or not self.is_draining):
            self.drain(f"task {task.get_name()} ended", failed=True)


async def run(
    app: App,
    *,
    notice_s: float,
    drain_s: float,
    ready_fd: int | None = None,
    threaded_health_server: ThreadedHealthServer | None = None,
    tracing: telemetry.Telemetry | None = None,
    name: str = "kvmesh",
    signals: bool = True,
    on_ready: Callable[[], object] = lambda: None,
    hard_exit: Callable[[int], object] = os._exit,
) -> int:
    """Runs an app from start to end and returns the exit status.

    on_ready: called when all is built. hard_exit: what ends the process upon a second signal or a
    stuck task; tests pass their own.
    """
    lifecycle = Lifecycle(HealthReporter(threaded_health_server))
    with _signal_handlers(lifecycle, hard_exit) if signals else contextlib.nullcontext():
        await lifecycle.health.set_enabled(False)
        if threaded_health_server is not None:
            threaded_health_server.start()
        registration = _Registration()
        start_task = lifecycle.spawn(
            _start_app(app, lifecycle, registration, name, on_ready, ready_fd),
            name="start",
            essential=False,
        )
        await lifecycle.wait_for_drain_request()
        await _drain(app, lifecycle, start_task, registration, notice_s=notice_s, drain_s=drain_s)
        await _shut_down(app, lifecycle, tracing, hard_exit)
    lifecycle.phase = Phase.STOPPED
    status = 1 if lifecycle.failed else 0
    LOG.info("stopped", service=name, status=status, why=lifecycle.why)
    return status


def run_main(factory: Callable[[], Coroutine[Any, Any, int]]) -> NoReturn:
    """Runs a coroutine on uvloop and exits with the status it returns."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(factory())
    sys.exit(status)


def run_service(
    name: str,
    config: ServiceConfig,
    build: Callable[[], App],
    *,
    instance_id: str = "",
    warnings: Sequence[str] = (),
) -> NoReturn:
    """The whole of a room's `__main__` after its configuration: logs, telemetry, life, exit.

    build: makes the app, inside the running loop. warnings: those of `read_config`, for the log.
    """
    logs = log.setup(config.log_level, config.log_format, service=name, instance_id=instance_id)

    def hard_exit(status: int) -> None:
        logs.close(0.2)
        os._exit(status)

    async def build_and_run() -> int:
        threaded_health = None
        try:
            if config.health_port is not None:
                threaded_health = ThreadedHealthServer(config.host, config.health_port)
            app = build()
        except Exception as error:
            _log_start_failure(error, name)
            return EXIT_CONFIG if isinstance(error, ConfigError) else 1
        return await run(
            app,
            notice_s=config.notice_s,
            drain_s=config.drain_s,
            ready_fd=config.ready_fd,
            threaded_health_server=threaded_health,
            tracing=tracing,
            name=name,
            on_ready=freeze_startup_objects,
            hard_exit=hard_exit,
        )

    try:
        for warning in warnings:
            LOG.warning("configuration", detail=warning)
        tracing = telemetry.setup(
            name, instance_id, config.otlp_endpoint, config.trace_sample_ratio
        )
        run_main(build_and_run)
    finally:
        logs.close()


@dataclass(slots=True)
class _Registration:
    """Whether registration was begun, so that it has to be undone."""

    has_begun: bool = False


async def _start_app(
    app: App,
    lifecycle: Lifecycle,
    registration: _Registration,
    name: str,
    on_ready: Callable[[], object],
    ready_fd: int | None,
) -> None:
    try:
        ready = await app.start(lifecycle)
        await lifecycle.health.set_enabled(True)
        registration.has_begun = True
        await app.register()
        on_ready()
    except Exception as error:
        _log_start_failure(error, name)
        lifecycle.drain("start failed", failed=True)
        return
    lifecycle.set_ready()
    addresses = dict(ready.addresses)
    if (threaded_health := lifecycle.health.threaded_health) is not None:
        addresses["health"] = threaded_health.address
    LOG.info("ready", service=name, instance=ready.instance_id, addresses=addresses)
    if ready_fd is not None:
        _write_ready_line(ready_fd, name, ready.instance_id, addresses)


def _log_start_failure(error: Exception, name: str) -> None:
    """One line. What operators can mend says all in a sentence, anything else is for developers."""
    if isinstance(error, MeshError | ConfigError) and not isinstance(error, InternalError):
        field = getattr(error, "field", None)
        field_details = {"field": field} if field else {}
        LOG.error(
            "start failed", service=name, error=str(error).replace("\n", "; "), **field_details
        )
    else:
        LOG.error("start failed", service=name, exc_info=error)


def freeze_startup_objects() -> None:
    """Takes what start-up built out of garbage collection and makes collections rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _write_ready_line(fd: int, name: str, instance_id: str, addresses: Mapping[str, str]) -> None:
    line = {"name": name, "pid": os.getpid(), "instance_id": instance_id, "addresses": addresses}
    try:
        # One write, below the size that pipes take at once; closed, so that readers see its end.
        os.write(fd, json.dumps(line).encode() + b"\n")
        os.close(fd)
    except OSError as error:
        LOG.warning("nobody takes the ready line", fd=fd, error=str(error))


async def _drain(
    app: App,
    lifecycle: Lifecycle,
    start_task: asyncio.Task[None],
    registration: _Registration,
    *,
    notice_s: float,
    drain_s: float,
) -> None:
    lifecycle.phase = Phase.DRAINING
    LOG.info("draining", why=lifecycle.why, notice_s=notice_s, drain_s=drain_s)
    await lifecycle.health.drain()
    if not start_task.done():
        start_task.cancel()
        await asyncio.wait({start_task}, timeout=CLOSE_TIMEOUT_S)
    if registration.has_begun:
        await _run_shutdown_step(lifecycle, "deregister", app.deregister(), DEREGISTER_TIMEOUT_S)
        # Peers learn late that we are leaving; until then their new calls are welcome.
        await asyncio.sleep(notice_s)
        cancelled_calls = await _run_shutdown_step(
            lifecycle, "drain", app.drain(drain_s), drain_s + DRAIN_MARGIN_S
        )
        if cancelled_calls:
            LOG.warning(
                "cut at the end of the drain",
                calls=len(cancelled_calls),
                names=list(cancelled_calls)[:20],
            )


async def _shut_down(
    app: App,
    lifecycle: Lifecycle,
    tracing: telemetry.Telemetry | None,
    hard_exit: Callable[[int], object],
) -> None:
    await lifecycle.cancel_tasks(CLOSE_TIMEOUT_S)
    await _run_shutdown_step(lifecycle, "close", app.close(), CLOSE_TIMEOUT_S)
    if (threaded_health := lifecycle.health.threaded_health) is not None:
        await asyncio.to_thread(threaded_health.stop, 1.0)
    if tracing is not None and not await asyncio.to_thread(tracing.shutdown, FLUSH_TIMEOUT_S):
        LOG.warning("spans left behind: the collector did not take them in time")
    if stuck_tasks := await lifecycle.cancel_tasks(0):
        LOG.error("tasks would not end", tasks=stuck_tasks)
        hard_exit(EXIT_STUCK)


async def _run_shutdown_step(
    lifecycle: Lifecycle, name: str, work: Coroutine[Any, Any, T], limit_s: float
) -> T | None:
    """Runs one step of the end. A failure or a step too slow is logged; the next ones still run."""
    task = lifecycle.spawn(work, name=name, essential=False)
    # Not asyncio.timeout: that waits for ever on a step that does not heed its cancellation.
    await asyncio.wait({task}, timeout=limit_s)
    if task.done() and not task.cancelled() and task.exception() is None:
        return task.result()
    lifecycle.failed = True
    if not task.done():
        LOG.error("step of the end took too long", step=name, limit_s=limit_s)
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)
    return None


@contextlib.contextmanager
def _signal_handlers(lifecycle: Lifecycle, hard_exit: Callable[[int], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    received_signals: list[int] = []

    def on_signal(signal_number: signal.Signals) -> None:
        received_signals.append(signal_number)
        if len(received_signals) == 1:
            lifecycle.drain(f"signal {signal_number.name}")
            return
        LOG.error("second signal, exiting at once", signal=signal_number.name)
        hard_exit(128 + signal_number)

    for signal_number in _SIGNALS:
        loop.add_signal_handler(signal_number, on_signal, signal_number)
    try:
        yield
    finally:
        for signal_number in _SIGNALS:
            loop.remove_signal_handler(signal_number)

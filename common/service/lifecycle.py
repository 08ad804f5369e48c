"""The lifecycle of every service: STARTING -> READY -> DRAINING -> STOPPED. It owns the signals.

Start: the app starts; then health is SERVING (of the process: when it is routable, see
`health.py`); then the app registers.
Drain, on the first SIGTERM or SIGINT or when an essential task ends: health is NOT_SERVING; the app
deregisters; it accepts requests for `notice_s`, because peers see the deregistration late, and
until its peers send it no more; streams may end for the rest of `drain_s`; tasks are cancelled and
awaited; the app closes; telemetry is flushed. Every step has a time limit. A failed or slow step is
logged, and the next steps still run.

Exit status: 0 after a requested drain; 1 after a failure; `EXIT_CONFIG` for an invalid
configuration; 128 + n at once on a second signal n (a SIGTERM within a second of the first is the
same); `EXIT_STUCK` if a cancelled task does not end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import structlog
import uvloop

from common.errors import InternalError, MeshError
from common.runtime import log, telemetry
from common.runtime.config import (
    ConfigError,
    ServiceConfig,
)
from common.runtime.ready_line import ERROR_CHARS_MAX, write_ready_line
from common.runtime.span_export import ClientFiles
from common.service.health import HealthReporter, ThreadedHealthServer

LOG = structlog.get_logger(__name__)

DEREGISTER_TIMEOUT_S = 3.0
LEFT_MARGIN_S = 1.0
DRAIN_MARGIN_S = 5.0  # For the cleanup of `drain`, after its grace period.
CLOSE_TIMEOUT_S = 10.0
RECANCEL_INTERVAL_S = 0.5
CANCEL_TIMEOUT_S = 1.0
FLUSH_TIMEOUT_S = 0.9
# A second SIGTERM within this time of the first counts as the same: if the parent of a process
# dies, the kernel may send the signal that was requested for that once for each of its threads.
SAME_SIGTERM_S = 1.0
EXIT_CONFIG = 2
EXIT_STUCK = 70

# A collection of the oldest generation pauses 24 ms at 300k objects. Frozen start-up objects and
# rare collections of the young generation reduce that to ~0.
GC_THRESHOLDS = (50_000, 20, 50)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """Instance id and addresses (`grpc` -> `host:port`, ...) of a started app."""

    instance_id: str
    addresses: Mapping[str, str]


class App(Protocol):
    """A service, as the lifecycle runs it. Each method is called once."""

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        """Binds, builds, warms up; spawns essential tasks; sets services in `lifecycle.health`."""

    async def register(self) -> None:
        """Registers. Not called if `start` failed."""

    async def deregister(self) -> None:
        """Deregisters. Idempotent; also called if `register` was cancelled."""

    async def left(self, timeout_s: float) -> None:
        """Returns when no peer sends work to it any more, after `timeout_s` at most. Called after
        `deregister`."""

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Refuses new calls, waits `grace_s` for streams, cancels the rest, awaits its cleanup.

        Returns the names of cancelled calls; usually `rpc.stop(server, grace_s, calls)`.
        """

    async def close(self) -> None:
        """Closes clients and files. Also called if `start` failed."""


class Lifecycle:
    """Tasks, health and drain of one app. Unlike a TaskGroup, it drains if a task fails."""

    def __init__(self, health: HealthReporter) -> None:
        self.health = health
        self.failed = False
        self.has_registered = False  # Set before `register`, which may fail halfway.
        self.reason = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.ready_event = asyncio.Event()
        self.drain_requested = asyncio.Event()

    def spawn(
        self, work: Coroutine[Any, Any, T], *, name: str, essential: bool = True
    ) -> asyncio.Task[T]:
        """Runs `work` in a task that is cancelled and awaited at the end of the lifecycle.

        If an essential task ends before the drain, the process logs it, drains, and exits with
        status 1. The failure of another task is only logged.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda done_task: self._on_task_done(done_task, essential))
        return task

    def drain(self, reason: str, *, failed: bool = False) -> None:
        """Requests the drain. The first reason is kept; any failure counts."""
        self.failed = self.failed or failed
        if not self.is_draining:
            self.reason = reason
            self.drain_requested.set()

    async def ready(self) -> None:
        """Returns when READY; never if the start fails."""
        await self.ready_event.wait()

    @property
    def is_draining(self) -> bool:
        """Whether a drain is requested."""
        return self.drain_requested.is_set()

    async def cancel_tasks(self, timeout_s: float) -> list[str]:
        """Cancels and awaits the spawned tasks; the names of those still running after that."""
        tasks = tuple(self._tasks)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while tasks:
            for task in tasks:
                task.cancel()
            # Repeated, because `asyncio.wait_for` of Python 3.11 may lose a cancellation.
            remaining_s = max(0.0, deadline - asyncio.get_running_loop().time())
            _, pending = await asyncio.wait(tasks, timeout=min(remaining_s, RECANCEL_INTERVAL_S))
            tasks = tuple(pending) if remaining_s > RECANCEL_INTERVAL_S else ()
        return sorted(task.get_name() for task in self._tasks)

    def _on_task_done(self, task: asyncio.Task[Any], essential: bool) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            LOG.error("task_failed", task=task.get_name(), essential=essential, exc_info=error)
        elif essential and not self.is_draining:
            LOG.error("essential_task_ended", task=task.get_name())
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
    """Runs an app to its end; the exit status. hard_exit: for a second signal or a stuck task."""
    lifecycle = Lifecycle(HealthReporter(threaded_health_server))
    with _signal_handlers(lifecycle, hard_exit) if signals else contextlib.nullcontext():
        await lifecycle.health.set_enabled(False)
        if threaded_health_server is not None:
            threaded_health_server.start()
        start_task = lifecycle.spawn(
            _start_app(app, lifecycle, name, on_ready, ready_fd),
            name="start",
            essential=False,
        )
        await lifecycle.drain_requested.wait()
        await _drain(app, lifecycle, start_task, notice_s=notice_s, drain_s=drain_s)
        await _shut_down(app, lifecycle, tracing, hard_exit)
    status = 1 if lifecycle.failed else 0
    LOG.info("stopped", service=name, status=status, reason=lifecycle.reason)
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
    """Runs an app with logs and telemetry, and exits. warnings: of `read_config`, for the log."""
    logs = log.setup(
        config.log_level,
        config.log_format,
        service=name,
        instance_id=instance_id,
        stable_name=config.stable_name,
    )

    def hard_exit(status: int) -> None:
        logs.close(0.2)
        os._exit(status)

    async def build_and_run() -> int:
        threaded_health = None
        try:
            tracing = set_up_traces(name, instance_id, config)
            if config.health_port is not None:
                threaded_health = ThreadedHealthServer(config.host, config.health_port)
            app = build()
        except Exception as error:
            report_start_failure(error, name, config.ready_fd)
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
            LOG.warning("config_warning", detail=warning)
        run_main(build_and_run)
    finally:
        logs.close()


def set_up_traces(name: str, instance_id: str, config: ServiceConfig) -> telemetry.Telemetry:
    """Installs the tracer provider of a service. Raises InvalidRequest."""
    return telemetry.setup(
        name,
        instance_id,
        config.otlp_endpoints,
        config.trace_sample_ratio,
        config.stable_name,
        ClientFiles(config.otlp_ca_path, config.otlp_cert_path, config.otlp_key_path),
    )


async def _start_app(
    app: App,
    lifecycle: Lifecycle,
    name: str,
    on_ready: Callable[[], object],
    ready_fd: int | None,
) -> None:
    try:
        ready = await app.start(lifecycle)
        await lifecycle.health.set_enabled(True)
        lifecycle.has_registered = True
        await app.register()
        on_ready()
    except Exception as error:
        report_start_failure(error, name, ready_fd)
        lifecycle.drain("start failed", failed=True)
        return
    lifecycle.ready_event.set()
    addresses = dict(ready.addresses)
    if (threaded_health := lifecycle.health.threaded_health) is not None:
        addresses["health"] = threaded_health.address
    LOG.info("ready", service=name, instance=ready.instance_id, addresses=addresses)
    line = {"name": name, "pid": os.getpid()}
    _write_ready_line(ready_fd, line | {"instance_id": ready.instance_id, "addresses": addresses})


def report_start_failure(error: Exception, name: str, ready_fd: int | None) -> None:
    """Writes the ready line {"error": ...}, and one log line.

    Both contain the message if the operator can fix the error. Otherwise the log has the traceback,
    the ready line its last line.
    """
    if isinstance(error, MeshError | ConfigError) and not isinstance(error, InternalError):
        message = str(error).replace("\n", "; ")
        field = getattr(error, "field", None)
        field_details = {"field": field} if field else {}
        LOG.error("start_failed", service=name, error=message, **field_details)
    else:
        message = traceback.format_exception_only(error)[-1].strip()
        LOG.error("start_failed", service=name, exc_info=error)
    _write_ready_line(ready_fd, {"error": message[:ERROR_CHARS_MAX]})


def freeze_startup_objects() -> None:
    """Excludes start-up objects from garbage collection and makes collections rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _write_ready_line(fd: int | None, content: Mapping[str, object]) -> None:
    if fd is None:
        return
    try:
        write_ready_line(fd, content)
    except OSError as error:
        LOG.warning("ready_line_not_written", fd=fd, error=str(error))


async def _drain(
    app: App,
    lifecycle: Lifecycle,
    start_task: asyncio.Task[None],
    *,
    notice_s: float,
    drain_s: float,
) -> None:
    LOG.info("draining", reason=lifecycle.reason, notice_s=notice_s, drain_s=drain_s)
    await lifecycle.health.drain()
    if not start_task.done():
        start_task.cancel()
        await asyncio.wait({start_task}, timeout=CLOSE_TIMEOUT_S)
    if lifecycle.has_registered:
        await _run_shutdown_step(lifecycle, "deregister", app.deregister(), DEREGISTER_TIMEOUT_S)
        # Peers see the deregistration late; until then their new calls are accepted.
        loop = asyncio.get_running_loop()
        notice_ends_at = loop.time() + notice_s
        # At least half of the drain is left for streams.
        limit_s = notice_s + drain_s / 2
        await _run_shutdown_step(lifecycle, "left", app.left(limit_s), limit_s + LEFT_MARGIN_S)
        await asyncio.sleep(max(0.0, notice_ends_at - loop.time()))
        grace_s = max(0.0, drain_s - (loop.time() - notice_ends_at))
        cancelled_calls = await _run_shutdown_step(
            lifecycle, "drain", app.drain(grace_s), grace_s + DRAIN_MARGIN_S
        )
        if cancelled_calls:
            names = list(cancelled_calls)[:20]
            LOG.warning("calls_cancelled", calls=len(cancelled_calls), names=names)


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
    late = () if tracing is None else await asyncio.to_thread(tracing.shutdown, FLUSH_TIMEOUT_S)
    if late:
        LOG.warning("spans_lost", endpoints=late, reason="not accepted in time")
    if stuck_tasks := await lifecycle.cancel_tasks(0):
        LOG.error("tasks_stuck", tasks=stuck_tasks)
        hard_exit(EXIT_STUCK)


async def _run_shutdown_step(
    lifecycle: Lifecycle, name: str, work: Coroutine[Any, Any, T], limit_s: float
) -> T | None:
    """Runs one shutdown step. A failed or slow step is logged."""
    task = lifecycle.spawn(work, name=name, essential=False)
    # Not asyncio.timeout: that waits forever for a step that ignores its cancellation.
    await asyncio.wait({task}, timeout=limit_s)
    if task.done() and not task.cancelled() and task.exception() is None:
        return task.result()
    lifecycle.failed = True
    if not task.done():
        LOG.error("shutdown_step_timed_out", step=name, limit_s=limit_s)
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)
    return None


@contextlib.contextmanager
def _signal_handlers(lifecycle: Lifecycle, hard_exit: Callable[[int], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    # With their times.
    received_signals: list[tuple[int, float]] = []

    def on_signal(signal_number: signal.Signals) -> None:
        received_signals.append((signal_number, time.monotonic()))
        if len(received_signals) == 1:
            lifecycle.drain(f"signal {signal_number.name}")
            return
        first, first_at = received_signals[0]
        is_same = first == signal_number == signal.SIGTERM
        if is_same and time.monotonic() - first_at < SAME_SIGTERM_S:
            return
        LOG.error("second_signal", signal=signal_number.name)
        hard_exit(128 + signal_number)

    for signal_number in _SIGNALS:
        loop.add_signal_handler(signal_number, on_signal, signal_number)
    try:
        yield
    finally:
        for signal_number in _SIGNALS:
            loop.remove_signal_handler(signal_number)

"""Lifecycle: order of start and drain, causes of the end, exit status, time limits of all steps."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs

from common.errors import Conflict, InternalError, Unavailable
from common.runtime.config import ConfigError
from common.service import lifecycle
from common.service.lifecycle import SAME_SIGTERM_S, Lifecycle, ServiceInfo, run

ROOT = Path(__file__).resolve().parents[4]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def read_health(lifecycle: Lifecycle, service: str) -> int:
    servicer: Any = (
        lifecycle.health.servicer
    )  # Any: the stubs require a context that Check does not use.
    reply = await servicer.Check(health_pb2.HealthCheckRequest(service=service), None)
    return int(reply.status)


async def nothing(_lifecycle: Lifecycle) -> None:
    """A no-op step."""


Body = Callable[[Lifecycle], Awaitable[None]]


class FakeApp:
    """Records each step with its health; a step may have a body."""

    def __init__(
        self, cancelled: Sequence[str] = (), **bodies: Callable[[Lifecycle], Awaitable[None]]
    ) -> None:
        self.steps: list[tuple[str, bool]] = []
        self.lifecycle: Lifecycle | None = None
        self.started = asyncio.Event()
        self._bodies = bodies
        self._cancelled = cancelled

    async def _record(self, step: str) -> None:
        assert self.lifecycle is not None
        serving = await read_health(self.lifecycle, "") == SERVING
        self.steps.append((step, serving))
        await self._bodies.get(step, nothing)(self.lifecycle)

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        self.lifecycle = lifecycle
        self.started.set()
        await self._record("start")
        return ServiceInfo("7", {"grpc": "127.0.0.1:1"})

    async def register(self) -> None:
        await self._record("register")

    async def deregister(self) -> None:
        await self._record("deregister")

    async def left(self, timeout_s: float) -> None:
        assert self.lifecycle is not None
        await self._bodies.get("left", nothing)(self.lifecycle)

    async def drain(self, grace_s: float) -> Sequence[str]:
        await self._record("drain")
        return self._cancelled

    async def close(self) -> None:
        await self._record("close")

    @property
    def order(self) -> list[str]:
        return [step for step, _ in self.steps]


async def drain_now(lifecycle: Lifecycle) -> None:
    lifecycle.drain("requested by the test")


def spawning(
    work: Callable[[Lifecycle], Any], *, name: str = "work", essential: bool = True
) -> Callable[[Lifecycle], Awaitable[None]]:
    async def body(lifecycle: Lifecycle) -> None:
        lifecycle.spawn(work(lifecycle), name=name, essential=essential)

    return body


async def run_app(app: FakeApp, **options: Any) -> int:
    options = {"notice_s": 0.0, "drain_s": 0.1, "signals": False, **options}
    return await asyncio.wait_for(run(app, **options), 30)


async def wait_for_ready(app: FakeApp) -> Lifecycle:
    await app.started.wait()
    assert app.lifecycle is not None
    await asyncio.wait_for(app.lifecycle.ready(), 20)
    return app.lifecycle


@contextmanager
def limits(**values: float) -> Iterator[None]:
    """Shorter time limits."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(lifecycle, name, value)
        yield


async def test_the_steps_run_in_order_with_the_matching_health() -> None:
    app = FakeApp(start=spawning(end_when_ready))
    assert await run_app(app) == 1
    assert app.steps == [
        ("start", False),
        ("register", True),
        ("deregister", False),
        ("drain", False),
        ("close", False),
    ]


async def end_when_ready(lifecycle: Lifecycle) -> None:
    await lifecycle.ready()


async def test_a_requested_drain_exits_zero() -> None:
    app = FakeApp()
    running = asyncio.ensure_future(run_app(app))
    (await wait_for_ready(app)).drain("enough")
    assert await running == 0


async def test_the_drain_begins_a_notice_after_the_deregistration() -> None:
    loop = asyncio.get_running_loop()
    times: dict[str, float] = {}

    def recording(step: str) -> Callable[[Lifecycle], Awaitable[None]]:
        async def body(_lifecycle: Lifecycle) -> None:
            times[step] = loop.time()

        return body

    app = FakeApp(deregister=recording("deregister"), drain=recording("drain"))
    running = asyncio.ensure_future(run_app(app, notice_s=0.1))
    (await wait_for_ready(app)).drain("enough")
    assert await running == 0
    assert times["drain"] - times["deregister"] >= 0.1


async def test_a_failed_start_is_logged_closed_and_exits_one() -> None:
    async def fail(_lifecycle: Lifecycle) -> None:
        raise OSError("port taken")

    app = FakeApp(start=fail)
    with capture_logs() as logs:
        assert await run_app(app) == 1
    assert app.order == ["start", "close"]
    assert "start_failed" in [line["event"] for line in logs]


async def failed_start(error: Exception) -> dict[str, Any]:
    """The log line of a failed start."""

    async def fail(_lifecycle: Lifecycle) -> None:
        raise error

    with capture_logs() as logs:
        assert await run_app(FakeApp(start=fail)) == 1
    (line,) = [line for line in logs if line["event"] == "start_failed"]
    return dict(line)


@pytest.mark.parametrize(
    ("error", "details"),
    [
        (Conflict("cannot bind", field="port"), {"error": "cannot bind", "field": "port"}),
        (Unavailable("no Consul"), {"error": "no Consul"}),
        (ConfigError(["--a: bad", "--b: worse"]), {"error": "--a: bad; --b: worse"}),
    ],
)
async def test_an_error_that_the_operator_can_fix_is_logged_as_one_message(
    error: Exception, details: dict[str, str]
) -> None:
    line = await failed_start(error)
    assert line == {"event": "start_failed", "service": "kvmesh", "log_level": "error", **details}


@pytest.mark.parametrize(
    "error",
    [
        InternalError("ours"),
        KeyError("x"),
        TimeoutError(),
        FileNotFoundError(2, "is not there", "/x"),
    ],
)
async def test_an_unexpected_error_is_logged_with_its_traceback(error: Exception) -> None:
    assert (await failed_start(error))["exc_info"] is error


async def test_a_failed_registration_is_deregistered() -> None:
    async def fail(_lifecycle: Lifecycle) -> None:
        raise OSError("no consul")

    app = FakeApp(register=fail)
    with capture_logs():
        assert await run_app(app) == 1
    assert app.order == ["start", "register", "deregister", "drain", "close"]


async def test_a_drain_during_the_start_cancels_the_start() -> None:
    async def hang(lifecycle: Lifecycle) -> None:
        lifecycle.drain("signal SIGTERM")
        await asyncio.Event().wait()

    app = FakeApp(start=hang)
    assert await run_app(app) == 0
    assert app.order == ["start", "close"]


@pytest.mark.parametrize("how", ["raises", "returns", "is cancelled"])
async def test_an_essential_task_that_ends_drains_and_fails_the_process(how: str) -> None:
    async def work(_lifecycle: Lifecycle) -> None:
        if how == "raises":
            raise ValueError("broken")
        if how == "is cancelled":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    app = FakeApp(start=spawning(work, name="engine"))
    with capture_logs() as logs:
        assert await run_app(app) == 1
    assert app.order[-1] == "close"
    assert [line["task"] for line in logs if line.get("log_level") == "error"] == ["engine"]
    assert app.lifecycle is not None
    assert app.lifecycle.reason == "task engine ended"


async def test_the_failure_of_another_task_is_only_logged() -> None:
    async def work(_lifecycle: Lifecycle) -> None:
        raise ValueError("broken")

    app = FakeApp(start=spawning(work, name="peer", essential=False))
    with capture_logs() as logs:
        running = asyncio.ensure_future(run_app(app))
        lifecycle = await wait_for_ready(app)
        await asyncio.sleep(0)
        assert not lifecycle.is_draining
        lifecycle.drain("enough")
        assert await running == 0
    assert [line["task"] for line in logs if line.get("log_level") == "error"] == ["peer"]


async def test_tasks_are_cancelled_after_the_drain_and_their_cleanup_awaited() -> None:
    seen: list[str] = []

    async def work(_lifecycle: Lifecycle) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned")

    async def record_drain(_lifecycle: Lifecycle) -> None:
        seen.append("drain")

    async def record_close(_lifecycle: Lifecycle) -> None:
        seen.append("close")

    app = FakeApp(start=spawning(work), drain=record_drain, close=record_close)
    running = asyncio.ensure_future(run_app(app))
    (await wait_for_ready(app)).drain("enough")
    assert await running == 0
    assert seen == ["drain", "cleaned", "close"]


async def test_calls_cancelled_by_the_drain_are_logged() -> None:
    app = FakeApp(["/engine/Generate r-1"])
    with capture_logs() as logs:
        running = asyncio.ensure_future(run_app(app))
        (await wait_for_ready(app)).drain("enough")
        assert await running == 0
    (line,) = [line for line in logs if line["event"] == "calls_cancelled"]
    assert line["names"] == ["/engine/Generate r-1"]


@pytest.mark.parametrize("step", ["deregister", "drain", "close"])
async def test_after_a_failed_shutdown_step_the_next_steps_run(step: str) -> None:
    async def fail(_lifecycle: Lifecycle) -> None:
        raise OSError("gone")

    app = FakeApp((), register=drain_now, **{step: fail})
    with capture_logs() as logs:
        assert await run_app(app) == 1
    assert app.order == ["start", "register", "deregister", "drain", "close"]
    assert [line["task"] for line in logs if line["event"] == "task_failed"] == [step]


@pytest.mark.parametrize("step", ["deregister", "drain", "close"])
async def test_after_a_hanging_shutdown_step_the_next_steps_run(step: str) -> None:
    async def hang(_lifecycle: Lifecycle) -> None:
        await asyncio.Event().wait()

    app = FakeApp((), register=drain_now, **{step: hang})
    with (
        limits(DEREGISTER_TIMEOUT_S=0.01, DRAIN_MARGIN_S=0.01, CLOSE_TIMEOUT_S=0.01),
        capture_logs() as logs,
    ):
        assert await run_app(app, drain_s=0.01) == 1
    assert app.order == ["start", "register", "deregister", "drain", "close"]
    assert [line["step"] for line in logs if line["event"] == "shutdown_step_timed_out"] == [step]


async def test_a_task_that_ignores_its_cancellation_does_not_block_the_exit() -> None:
    stubborn = asyncio.Event()
    exits: list[int] = []

    async def work(_lifecycle: Lifecycle) -> None:
        # Ends: the test sets it.
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue

    app = FakeApp(start=spawning(work, name="stubborn"), register=drain_now)
    with limits(CLOSE_TIMEOUT_S=0.01), capture_logs() as logs:
        await run_app(app, hard_exit=exits.append)
    assert exits == [lifecycle.EXIT_STUCK]
    assert [line["tasks"] for line in logs if "tasks" in line] == [["stubborn"]]
    stubborn.set()
    await asyncio.sleep(0)


async def test_a_service_is_serving_only_while_ready_and_not_disabled() -> None:
    async def begin(lifecycle: Lifecycle) -> None:
        await lifecycle.health.set("kvmesh.a", True)
        await lifecycle.health.set("kvmesh.b", False)

    async def statuses(lifecycle: Lifecycle) -> list[int]:
        return [await read_health(lifecycle, name) for name in ("", "kvmesh.a", "kvmesh.b")]

    app = FakeApp(start=begin)
    running = asyncio.ensure_future(run_app(app))
    lifecycle = await wait_for_ready(app)
    assert await statuses(lifecycle) == [SERVING, SERVING, NOT_SERVING]
    await lifecycle.health.set("kvmesh.b", True)
    assert await statuses(lifecycle) == [SERVING] * 3
    lifecycle.drain("enough")
    assert await running == 0
    await lifecycle.health.set("kvmesh.b", True)
    assert await statuses(lifecycle) == [NOT_SERVING] * 3


async def test_the_ready_line_is_one_json_line_before_the_end_of_file() -> None:
    read_end, write_end = os.pipe()
    app = FakeApp()
    running = asyncio.ensure_future(run_app(app, ready_fd=write_end, name="router"))
    lifecycle = await wait_for_ready(app)
    with os.fdopen(read_end) as reader:
        assert json.loads(reader.read()) == {
            "name": "router",
            "pid": os.getpid(),
            "instance_id": "7",
            "addresses": {"grpc": "127.0.0.1:1"},
        }
    lifecycle.drain("enough")
    assert await running == 0


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (Unavailable("cannot reach Consul"), "cannot reach Consul"),
        (ConfigError(["--a: bad", "--b: bad"]), "--a: bad; --b: bad"),
        (KeyError("block"), "KeyError: 'block'"),
    ],
)
async def test_the_ready_line_of_a_failed_start_is_its_error(failure: Exception, line: str) -> None:
    async def fail(_: Lifecycle) -> None:
        raise failure

    read_end, write_end = os.pipe()
    assert await run_app(FakeApp(start=fail), ready_fd=write_end) == 1
    with os.fdopen(read_end) as reader:
        assert json.loads(reader.read()) == {"error": line}


async def test_a_closed_ready_pipe_is_only_logged() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    app = FakeApp()
    with capture_logs() as logs:
        running = asyncio.ensure_future(run_app(app, ready_fd=write_end))
        (await wait_for_ready(app)).drain("enough")
        assert await running == 0
    assert "ready_line_not_written" in [line["event"] for line in logs]


PROGRAM = textwrap.dedent(
    """
    import asyncio, sys
    from common.runtime.config import ServiceConfig
    from common.service.lifecycle import ServiceInfo, run_service

    class App:
        async def start(self, life):
            return ServiceInfo("7", {"grpc": "127.0.0.1:1"})
        async def register(self): pass
        async def deregister(self): pass
        async def left(self, timeout_s): pass
        async def drain(self, grace_s):
            if "hang" in sys.argv:
                await asyncio.sleep(60)
            return []
        async def close(self): pass

    config = ServiceConfig(ready_fd=int(sys.argv[1]), notice_s=0.0, drain_s=60.0, health_port=0)
    run_service("test", config, App, instance_id="7", warnings=["odd variable"])
    """
)


def launch(*args: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """PROGRAM as a process, and its ready line."""
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(write_end), *args],
        pass_fds=[write_end],
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": os.pathsep.join([str(ROOT / "protos"), str(ROOT)])},
    )
    os.close(write_end)
    with os.fdopen(read_end) as reader:
        line = reader.readline()
    return process, json.loads(line)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_exits_zero(number: signal.Signals) -> None:
    process, ready = launch()
    assert ready["pid"] == process.pid
    assert int(ready["addresses"]["health"].rpartition(":")[2]) > 0
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    events = [json.loads(line) for line in err.splitlines()]
    assert process.returncode == 0
    assert [line["event"] for line in events] == ["config_warning", "ready", "draining", "stopped"]
    assert events[2]["reason"] == f"signal {number.name}"
    assert {line["service"] for line in events} == {"test"}


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_exits_at_once_with_status_128_plus_its_number(
    second: signal.Signals,
) -> None:
    process, _ = launch("hang")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    # Ends: the process ends.
    while "draining" not in process.stderr.readline():
        assert process.poll() is None
    # As the kernel does when a parent with threads dies.
    process.send_signal(signal.SIGTERM)
    # Sleep: a SIGTERM counts again.
    time.sleep(SAME_SIGTERM_S)
    process.send_signal(second)
    assert process.wait(timeout=20) == 128 + second
    assert "second_signal" in process.stderr.read()
    process.stderr.close()

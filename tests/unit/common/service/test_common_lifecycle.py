"""One life: order of start and drain, what ends it, exit status, and that every wait is bounded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
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
from common.service.lifecycle import Lifecycle, Phase, ServiceInfo, run

ROOT = Path(__file__).resolve().parents[4]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def ask_health(lifecycle: Lifecycle, service: str) -> int:
    servicer: Any = (
        lifecycle.health.servicer
    )  # Any: the stubs want a context that Check does not use.
    answer = await servicer.Check(health_pb2.HealthCheckRequest(service=service), None)
    return int(answer.status)


async def nothing(_lifecycle: Lifecycle) -> None:
    """A step that does nothing."""


Body = Callable[[Lifecycle], Awaitable[None]]


class FakeApp:
    """Notes each step with the health and phase seen at that time; steps can be given bodies."""

    def __init__(
        self, cut: Sequence[str] = (), **bodies: Callable[[Lifecycle], Awaitable[None]]
    ) -> None:
        self.steps: list[tuple[str, str, bool]] = []
        self.lifecycle: Lifecycle | None = None
        self.begun = asyncio.Event()
        self._bodies = bodies
        self._cut = cut

    async def _note(self, step: str) -> None:
        assert self.lifecycle is not None
        serving = await ask_health(self.lifecycle, "") == SERVING
        self.steps.append((step, self.lifecycle.phase.value, serving))
        await self._bodies.get(step, nothing)(self.lifecycle)

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        self.lifecycle = lifecycle
        self.begun.set()
        await self._note("start")
        return ServiceInfo("7", {"grpc": "127.0.0.1:1"})

    async def register(self) -> None:
        await self._note("register")

    async def deregister(self) -> None:
        await self._note("deregister")

    async def drain(self, grace_s: float) -> Sequence[str]:
        await self._note("drain")
        return self._cut

    async def close(self) -> None:
        await self._note("close")

    @property
    def order(self) -> list[str]:
        return [step for step, _, _ in self.steps]


async def drain_now(lifecycle: Lifecycle) -> None:
    lifecycle.drain("the test asks")


def spawning(
    work: Callable[[Lifecycle], Any], *, name: str = "work", essential: bool = True
) -> Callable[[Lifecycle], Awaitable[None]]:
    async def body(lifecycle: Lifecycle) -> None:
        lifecycle.spawn(work(lifecycle), name=name, essential=essential)

    return body


async def live(app: FakeApp, **options: Any) -> int:
    options = {"notice_s": 0.0, "drain_s": 0.1, "signals": False, **options}
    return await asyncio.wait_for(run(app, **options), 30)


async def wait_for_ready(app: FakeApp) -> Lifecycle:
    await app.begun.wait()
    assert app.lifecycle is not None
    await asyncio.wait_for(app.lifecycle.ready(), 20)
    return app.lifecycle


@contextmanager
def limits(**values: float) -> Iterator[None]:
    """Shorter limits than production's."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(lifecycle, name, value)
        yield


async def test_a_life_goes_through_its_steps_in_order_with_the_right_health() -> None:
    app = FakeApp(start=spawning(ending_when_ready))
    assert await live(app) == 1
    assert app.steps == [
        ("start", "starting", False),
        ("register", "starting", True),
        ("deregister", "draining", False),
        ("drain", "draining", False),
        ("close", "draining", False),
    ]
    assert app.lifecycle is not None
    assert app.lifecycle.phase is Phase.STOPPED


async def ending_when_ready(lifecycle: Lifecycle) -> None:
    await lifecycle.ready()


async def test_a_drain_that_was_asked_for_exits_zero() -> None:
    app = FakeApp()
    running = asyncio.ensure_future(live(app))
    (await wait_for_ready(app)).drain("enough")
    assert await running == 0


async def test_new_work_is_taken_for_the_notice_after_health_and_registry_said_no() -> None:
    loop = asyncio.get_running_loop()
    times: dict[str, float] = {}

    def noting(step: str) -> Callable[[Lifecycle], Awaitable[None]]:
        async def body(_lifecycle: Lifecycle) -> None:
            times[step] = loop.time()

        return body

    app = FakeApp(deregister=noting("deregister"), drain=noting("drain"))
    running = asyncio.ensure_future(live(app, notice_s=0.1))
    (await wait_for_ready(app)).drain("enough")
    assert await running == 0
    assert times["drain"] - times["deregister"] >= 0.1


async def test_a_failed_start_is_logged_closed_and_exits_one() -> None:
    async def fail(_lifecycle: Lifecycle) -> None:
        raise OSError("port taken")

    app = FakeApp(start=fail)
    with capture_logs() as logs:
        assert await live(app) == 1
    assert app.order == ["start", "close"]
    assert "start failed" in [line["event"] for line in logs]


async def failed_start(error: Exception) -> dict[str, Any]:
    """The line that tells of it."""

    async def fail(_lifecycle: Lifecycle) -> None:
        raise error

    with capture_logs() as logs:
        assert await live(FakeApp(start=fail)) == 1
    (line,) = [line for line in logs if line["event"] == "start failed"]
    return dict(line)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (Conflict("cannot bind", field="port"), {"error": "cannot bind", "field": "port"}),
        (Unavailable("no Consul"), {"error": "no Consul"}),
        (ConfigError(["--a: bad", "--b: worse"]), {"error": "--a: bad; --b: worse"}),
    ],
)
async def test_what_an_operator_can_mend_is_told_in_a_sentence(
    error: Exception, says: dict[str, str]
) -> None:
    line = await failed_start(error)
    assert line == {"event": "start failed", "service": "kvmesh", "log_level": "error", **says}


@pytest.mark.parametrize(
    "error",
    [
        InternalError("ours"),
        KeyError("x"),
        TimeoutError(),
        FileNotFoundError(2, "is not there", "/x"),
    ],
)
async def test_what_nobody_expected_is_told_with_its_traceback(error: Exception) -> None:
    assert (await failed_start(error))["exc_info"] is error


async def test_a_failed_registration_is_undone() -> None:
    async def fail(_lifecycle: Lifecycle) -> None:
        raise OSError("no consul")

    app = FakeApp(register=fail)
    with capture_logs():
        assert await live(app) == 1
    assert app.order == ["start", "register", "deregister", "drain", "close"]


async def test_a_drain_during_the_start_cuts_it_short() -> None:
    async def hang(lifecycle: Lifecycle) -> None:
        lifecycle.drain("signal SIGTERM")
        await asyncio.Event().wait()

    app = FakeApp(start=hang)
    assert await live(app) == 0
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
        assert await live(app) == 1
    assert app.order[-1] == "close"
    assert [line["task"] for line in logs if line.get("log_level") == "error"] == ["engine"]
    assert app.lifecycle is not None
    assert app.lifecycle.why == "task engine ended"


async def test_another_tasks_failure_is_logged_and_life_goes_on() -> None:
    async def work(_lifecycle: Lifecycle) -> None:
        raise ValueError("broken")

    app = FakeApp(start=spawning(work, name="peer", essential=False))
    with capture_logs() as logs:
        running = asyncio.ensure_future(live(app))
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

    async def look(_lifecycle: Lifecycle) -> None:
        seen.append("drain")

    async def closing(_lifecycle: Lifecycle) -> None:
        seen.append("close")

    app = FakeApp(start=spawning(work), drain=look, close=closing)
    running = asyncio.ensure_future(live(app))
    (await wait_for_ready(app)).drain("enough")
    assert await running == 0
    assert seen == ["drain", "cleaned", "close"]


async def test_what_the_drain_cut_is_logged() -> None:
    app = FakeApp(["/engine/Generate r-1"])
    with capture_logs() as logs:
        running = asyncio.ensure_future(live(app))
        (await wait_for_ready(app)).drain("enough")
        assert await running == 0
    (line,) = [line for line in logs if line["event"] == "cut at the end of the drain"]
    assert line["names"] == ["/engine/Generate r-1"]


@pytest.mark.parametrize("step", ["deregister", "drain", "close"])
async def test_a_failing_step_of_the_end_does_not_stop_the_others(step: str) -> None:
    async def fail(_lifecycle: Lifecycle) -> None:
        raise OSError("gone")

    app = FakeApp((), register=drain_now, **{step: fail})
    with capture_logs() as logs:
        assert await live(app) == 1
    assert app.order == ["start", "register", "deregister", "drain", "close"]
    assert [line["task"] for line in logs if line["event"] == "task failed"] == [step]


@pytest.mark.parametrize("step", ["deregister", "drain", "close"])
async def test_a_step_of_the_end_that_hangs_is_cut_and_the_others_still_run(step: str) -> None:
    async def hang(_lifecycle: Lifecycle) -> None:
        await asyncio.Event().wait()

    app = FakeApp((), register=drain_now, **{step: hang})
    with (
        limits(DEREGISTER_TIMEOUT_S=0.01, DRAIN_MARGIN_S=0.01, CLOSE_TIMEOUT_S=0.01),
        capture_logs() as logs,
    ):
        assert await live(app, drain_s=0.01) == 1
    assert app.order == ["start", "register", "deregister", "drain", "close"]
    assert [line["step"] for line in logs if "too long" in line["event"]] == [step]


async def test_a_task_that_will_not_end_does_not_keep_the_process() -> None:
    stubborn = asyncio.Event()
    exits: list[int] = []

    async def work(_lifecycle: Lifecycle) -> None:
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue

    app = FakeApp(start=spawning(work, name="stubborn"), register=drain_now)
    with limits(CLOSE_TIMEOUT_S=0.01), capture_logs() as logs:
        await live(app, hard_exit=exits.append)
    assert exits == [lifecycle.EXIT_STUCK]
    assert [line["tasks"] for line in logs if "tasks" in line] == [["stubborn"]]
    stubborn.set()
    await asyncio.sleep(0)


async def test_a_service_serves_only_when_ready_and_not_set_aside() -> None:
    async def begin(lifecycle: Lifecycle) -> None:
        await lifecycle.health.set("kvmesh.a", True)
        await lifecycle.health.set("kvmesh.b", False)

    async def answers(lifecycle: Lifecycle) -> list[int]:
        return [await ask_health(lifecycle, name) for name in ("", "kvmesh.a", "kvmesh.b")]

    app = FakeApp(start=begin)
    running = asyncio.ensure_future(live(app))
    lifecycle = await wait_for_ready(app)
    assert await answers(lifecycle) == [SERVING, SERVING, NOT_SERVING]
    await lifecycle.health.set("kvmesh.b", True)
    assert await answers(lifecycle) == [SERVING] * 3
    lifecycle.drain("enough")
    assert await running == 0
    await lifecycle.health.set("kvmesh.b", True)
    assert await answers(lifecycle) == [NOT_SERVING] * 3


async def test_the_ready_line_is_one_json_line_and_then_the_end() -> None:
    read_end, write_end = os.pipe()
    app = FakeApp()
    running = asyncio.ensure_future(live(app, ready_fd=write_end, name="router"))
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


async def test_a_launcher_that_has_gone_is_no_reason_to_fail() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    app = FakeApp()
    with capture_logs() as logs:
        running = asyncio.ensure_future(live(app, ready_fd=write_end))
        (await wait_for_ready(app)).drain("enough")
        assert await running == 0
    assert "nobody takes the ready line" in [line["event"] for line in logs]


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
    """The program of above as a process, and its ready line."""
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
    assert [line["event"] for line in events] == ["configuration", "ready", "draining", "stopped"]
    assert events[2]["why"] == f"signal {number.name}"
    assert {line["service"] for line in events} == {"test"}


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_exits_at_once_with_its_own_status(second: signal.Signals) -> None:
    process, _ = launch("hang")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    while "draining" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(second)
    assert process.wait(timeout=20) == 128 + second
    assert "second signal" in process.stderr.read()
    process.stderr.close()

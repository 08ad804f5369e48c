"""`meshctl up` as a process, with fake services that write the ready line and obey SIGTERM."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest

from tests.kit.waiting import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WAIT_S = 20.0

# Written to the working directory, so that `python -m worker_svc` imports it instead of the real
# service.
FAKE = """
import json, os, random, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

def note(file, text):
    with open(file, "a") as out:
        out.write(text + "\\n")

class Api(BaseHTTPRequestHandler):
    def do_GET(self):
        model = Path("model").read_text()
        self.answer(json.dumps({"data": [{"id": model}]}))
        note("got", self.path)

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        chunk = {"choices": [{"delta": {"content": "hello from the mesh"}}]}
        self.answer("data: " + json.dumps(chunk) + "\\n\\ndata: [DONE]\\n\\n")

    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass

def main(kind):
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    name = flags.get("--stable-name", kind)
    mode = Path(name + ".mode").read_text() if Path(name + ".mode").exists() else ""
    note("pids", f"{name} {os.getpid()}")
    ready_fd = int(flags["--ready-fd"])
    def fail(status, error):
        os.write(ready_fd, json.dumps({"error": error}).encode() + b"\\n")
        sys.exit(status)
    if mode == "refuse":
        fail(2, "worker: the configuration cannot be used:\\n  --x: must be y\\n")
    if mode == "fail":
        fail(3, "no such model")
    if mode == "crash":
        print("ImportError: no grpc", flush=True)
        sys.exit(3)
    if mode == "slow":
        for step in range(10):
            print("loading part", step, flush=True)
            time.sleep(0.6)
    # Not an Event: its lock may be held where the signal interrupts.
    ended = []
    def on_term(*_):
        note("ended", name)
        if mode != "stubborn":
            ended.append(True)
    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, lambda *_: note("interrupted", name))
    if mode == "forks":
        child = subprocess.Popen(["sleep", "60"])
        note("pids", f"grandchild {child.pid}")
    addresses = {"grpc": "127.0.0.1:1"}
    if kind == "frontend":
        server = ThreadingHTTPServer(("127.0.0.1", int(flags["--http-port"])), Api)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        addresses["http"] = "http://127.0.0.1:%d" % server.server_address[1]
    if mode == "crashes":
        error = {"event": "task_failed", "level": "error", "exception": "x\\nOSError: no disk"}
        print(json.dumps(error), flush=True)
        threading.Timer(3, lambda: os._exit(3)).start()
    instance = random.SystemRandom().randrange(1, 2**63)
    folder = Path(flags["--registry-path"], flags["--namespace"], "instances")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{instance:016x}.json").write_text(name)
    line = {"name": name, "pid": os.getpid(), "instance_id": str(instance), "addresses": addresses}
    os.write(ready_fd, json.dumps(line).encode() + b"\\n")
    # Bounded: if the supervisor fails its test, this process must still end.
    for _ in range(3000):
        if ended:
            break
        time.sleep(0.02)
"""


class Mesh:
    """A running `meshctl up` in its own folder."""

    def __init__(self, folder: Path, process: asyncio.subprocess.Process) -> None:
        self.folder = folder
        self.process = process
        self.shown: list[str] = []

    async def line(self, *parts: str) -> str:
        """The next line on stdout that has all of `parts`."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while raw := await self.process.stdout.readline():
                self.shown.append(raw.decode())
                if all(part in self.shown[-1] for part in parts):
                    return self.shown[-1]
        raise AssertionError(f"no line with {parts} in {''.join(self.shown)}{await self.errors()}")

    async def end(self) -> int:
        """Waits for the end; returns the exit status."""
        async with asyncio.timeout(WAIT_S):
            assert self.process.stdout is not None
            self.shown.append((await self.process.stdout.read()).decode())
            return await self.process.wait()

    async def errors(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    def pids(self, name: str = "") -> list[int]:
        """The processes started under a name so far; "": under any name."""
        rows = [row.split() for row in self.notes("pids")]
        return [int(pid) for service, pid in rows if name in ("", service)]

    def notes(self, file: str) -> list[str]:
        path = self.folder / file
        return path.read_text().splitlines() if path.exists() else []

    def entries(self) -> list[Path]:
        return list(self.folder.glob(".run/registry/default/instances/*.json"))

    def registered(self) -> list[str]:
        return sorted(path.read_text() for path in self.entries())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "model").write_text("sim")
    for kind in ("frontend", "router", "worker"):
        (tmp_path / f"{kind}_svc.py").write_text(f"import fake\nfake.main({kind!r})\n")
    return tmp_path


@asynccontextmanager
async def meshctl(
    folder: Path, *flags: str, port: int = 0, environ: Mapping[str, str] | None = None
) -> AsyncIterator[Mesh]:
    """Runs `meshctl up` in the folder.

    - environ: more variables.
    """
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "meshctl",
            "up",
            "--indexers",
            "0",
            "--http-port",
            str(port),
            *flags,
        ),
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}",
            **(environ or {}),
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Mesh(folder, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@contextmanager
def watched(pids: list[int]) -> Iterator[list[int]]:
    """Process descriptors: unlike pids, they never refer to other processes."""
    with ExitStack() as stack:
        yield [stack.enter_context(pidfd(pid)) for pid in pids]


@contextmanager
def pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


def all_gone(fds: list[int], within_s: float = WAIT_S) -> bool:
    """Whether every process ended. Without a stop they would run for a minute."""
    deadline = time.monotonic() + within_s
    return all(select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0] for fd in fds)


async def test_a_mesh_starts_answers_a_sample_and_stops(folder: Path) -> None:
    async with meshctl(folder, "--once") as mesh:
        assert await mesh.end() == 0, await mesh.errors()
        shown = "".join(mesh.shown)
    for name in ("frontend-0", "router-0", "worker-0", "worker-1"):
        assert f"{name} " in shown
    assert "hello from the mesh\n" in shown
    # Printed for a mesh that keeps running.
    assert "/v1/chat/completions -H" not in shown
    assert "Ctrl-C" not in shown
    assert "\x1b" not in shown
    assert mesh.notes("ended")[:2] == ["frontend-0", "router-0"]
    assert sorted(mesh.notes("ended")[2:]) == ["worker-0", "worker-1"]
    assert mesh.registered() == []


async def test_a_dead_worker_is_deregistered_and_replaced(folder: Path) -> None:
    async with meshctl(folder) as mesh:
        await mesh.line("mesh", "ready")
        assert mesh.registered() == ["frontend-0", "router-0", "worker-0", "worker-1"]
        (entry,) = (path for path in mesh.entries() if path.read_text() == "worker-1")
        os.kill(mesh.pids("worker-1")[0], signal.SIGKILL)
        died = await mesh.line("worker-1", "died")
        assert not entry.exists()
        assert "killed by SIGKILL" in died
        assert ".run/logs/worker-1.log" in died
        assert "again in 0.2 s" in died
        await mesh.line("worker-1", "ready")
        assert mesh.registered() == ["frontend-0", "router-0", "worker-0", "worker-1"]
        assert len(mesh.pids("worker-1")) == 2
        mesh.process.send_signal(signal.SIGTERM)
        assert await mesh.end() == 0


async def test_a_frontend_that_hangs_is_killed_and_started_again(folder: Path) -> None:
    async with meshctl(folder, "--live-failures-max", "1") as mesh:
        await mesh.line("mesh", "ready")
        await until(lambda: "/live" in mesh.notes("got"), "the frontend was live once")
        os.kill(mesh.pids("frontend-0")[0], signal.SIGSTOP)
        died = await mesh.line("frontend-0", "died")
        assert "killed by SIGKILL (it did not answer 1 liveness checks in a row)" in died
        await mesh.line("frontend-0", "ready")
        mesh.process.send_signal(signal.SIGTERM)
        assert await mesh.end() == 0
        # The other fake services never answer: they were never live.
        assert len(mesh.pids("worker-0")) == len(mesh.pids("router-0")) == 1


async def test_a_service_that_exits_by_itself_with_status_0_has_ended(folder: Path) -> None:
    async with meshctl(folder) as mesh:
        await mesh.line("mesh", "ready")
        os.kill(mesh.pids("worker-0")[0], signal.SIGTERM)
        assert "exit status 0" in await mesh.line("worker-0", "ended")
        await mesh.line("worker-0", "ready")
        mesh.process.send_signal(signal.SIGTERM)
        assert await mesh.end() == 0
        assert await mesh.errors() == ""


async def test_a_crash_after_the_start_shows_the_last_error_of_the_log(folder: Path) -> None:
    (folder / "worker-0.mode").write_text("crashes")
    async with meshctl(folder) as mesh:
        await mesh.line("worker-0", "died", "exit status 3")
        mesh.process.send_signal(signal.SIGTERM)
        await mesh.end()
        assert "  | task_failed: OSError: no disk\n" in await mesh.errors()


async def test_a_slow_start_that_reports_progress_is_not_ended(folder: Path) -> None:
    (folder / "worker-0.mode").write_text("slow")
    async with meshctl(folder, "--ready-s", "3", "--once") as mesh:
        assert await mesh.end() == 0, await mesh.errors()
        assert len(mesh.pids("worker-0")) == 1


async def test_consecutive_deaths_lengthen_the_pause(folder: Path) -> None:
    async with meshctl(folder, "--workers", "1") as mesh:
        pauses = []
        for nth in range(3):
            await mesh.line("worker-0", "ready")
            os.kill(mesh.pids("worker-0")[nth], signal.SIGKILL)
            died = await mesh.line("worker-0", "died")
            pauses.append(float(died.rsplit("again in ", 1)[1].removesuffix(" s\n")))
    assert pauses[0] == 0.2
    assert pauses == sorted(set(pauses))
    assert 0.6 <= pauses[2] <= 0.8


async def test_processes_started_by_a_dead_service_are_killed(folder: Path) -> None:
    (folder / "worker-0.mode").write_text("forks")
    async with meshctl(folder) as mesh:
        await mesh.line("mesh", "ready")
        with watched(mesh.pids("grandchild")) as fds:
            assert fds
            os.kill(mesh.pids("worker-0")[0], signal.SIGKILL)
            await mesh.line("worker-0", "died")
            assert all_gone(fds)


async def test_a_service_that_fails_before_its_report_ends_with_the_tail_of_its_log(
    folder: Path,
) -> None:
    (folder / "worker-1.mode").write_text("crash")
    async with meshctl(folder) as mesh:
        assert await mesh.end() == 1
        errors = await mesh.errors()
    assert "the end of .run/logs/worker-1.log:\n  | ImportError: no grpc\n" in errors


async def test_a_start_that_fails_repeatedly_ends_with_its_reason(folder: Path) -> None:
    (folder / "worker-1.mode").write_text("fail")
    async with meshctl(folder) as mesh:
        assert await mesh.end() == 1
        errors = await mesh.errors()
    assert "worker-1 was started 5 times and was never ready" in errors
    # At the first death and at the end.
    assert errors.count("  | no such model\n") == 2
    assert len(mesh.pids("worker-1")) == 5
    assert "worker-0" in mesh.notes("ended")
    assert mesh.registered() == []


async def test_an_invalid_configuration_ends_the_mesh_at_once(folder: Path) -> None:
    (folder / "worker-1.mode").write_text("refuse")
    async with meshctl(folder) as mesh:
        assert await mesh.end() == 1
        errors = await mesh.errors()
    assert errors == (
        "  | worker: the configuration cannot be used:\n  |   --x: must be y\n"
        "meshctl: worker-1 has an invalid configuration\n"
    )
    assert len(mesh.pids("worker-1")) == 1


async def test_ctrl_c_reaches_the_services_in_order_and_through_the_supervisor_only(
    folder: Path,
) -> None:
    async with meshctl(folder, "--frontends", "2", "--routers", "2") as mesh:
        await mesh.line("stop ")
        # Like a terminal: the signal goes to the whole foreground group.
        os.killpg(mesh.process.pid, signal.SIGINT)
        await mesh.line("mesh", "draining", "SIGINT")
        assert await mesh.end() == 0
    order = [name.partition("-")[0] for name in mesh.notes("ended")]
    assert order == ["frontend"] * 2 + ["router"] * 2 + ["worker"] * 2
    assert mesh.notes("interrupted") == []


async def test_a_second_ctrl_c_kills_at_once(folder: Path) -> None:
    (folder / "frontend-0.mode").write_text("stubborn")
    async with meshctl(folder) as mesh:
        await mesh.line("stop ")
        with watched(mesh.pids()) as fds:
            mesh.process.send_signal(signal.SIGINT)
            await mesh.line("draining")
            mesh.process.send_signal(signal.SIGINT)
            assert await mesh.end() == 128 + signal.SIGINT
            assert all_gone(fds)
    assert set(mesh.notes("ended")) <= {"frontend-0"}


async def test_a_killed_supervisor_leaves_no_child_process(folder: Path) -> None:
    async with meshctl(folder) as mesh:
        await mesh.line("stop ")
        with watched(mesh.pids()) as fds:
            assert len(fds) == 4
            mesh.process.kill()
            assert all_gone(fds)
    # All received SIGTERM, some perhaps twice, and could drain.
    assert {*mesh.notes("ended")} == {"frontend-0", "router-0", "worker-0", "worker-1"}


async def test_a_port_in_use_is_reported_before_any_service_starts(folder: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        async with meshctl(folder, port=port) as mesh:
            assert await mesh.end() == 2
            errors = await mesh.errors()
    assert f"port {port} of 127.0.0.1 is in use" in errors
    assert "--http-port" in errors
    assert mesh.pids() == []


async def test_a_second_mesh_in_the_same_folder_is_refused(folder: Path) -> None:
    async with meshctl(folder) as first:
        await first.line("/v1/chat/completions -H")
        await first.line("stop ", "Ctrl-C drains")
        async with meshctl(folder) as second:
            assert await second.end() == 2
            assert f"meshctl (pid {first.process.pid})" in await second.errors()
        assert len(first.pids()) == 4


async def test_a_mesh_that_does_not_serve_its_model_in_time_is_stopped(folder: Path) -> None:
    (folder / "model").write_text("other")
    async with meshctl(folder, "--ready-s", "3") as mesh:
        assert await mesh.end() == 1
        errors = await mesh.errors()
    assert "not ready within 3 s" in errors
    assert "lists ['other'], not 'sim'" in errors
    assert mesh.registered() == []


def environ_of(pid: int) -> dict[str, str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(entry.split("=", 1) for entry in raw.split("\0") if entry)


async def test_services_receive_their_own_variables_and_no_secrets_of_the_caller(
    folder: Path,
) -> None:
    mesh_wide = {"KVMESH_LOG_LEVEL": "debug", "LANG": "C.UTF-8", "HTTPS_PROXY": "http://p:1"}
    engine = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "HF_HOME": "/models"}
    passed = {"MY_ENGINE_KEY": "k", "OTHER": "o"}
    secrets = {"OPENAI_API_KEY": "sk-1", "ANTHROPIC_API_KEY": "sk-2", "AWS_SECRET_ACCESS_KEY": "s"}
    environ = mesh_wide | engine | passed | secrets
    flags = ["--pass-environ", "MY_ENGINE_*,OTHER"]
    # The command of the user has the whole environment.
    script = "import os; print('command has', os.environ['OPENAI_API_KEY'], flush=True)"
    command = ["--then", sys.executable, "-c", script]
    async with meshctl(folder, *flags, *command, environ=environ) as mesh:
        await mesh.line("command has sk-1")
        for name in ("frontend-0", "router-0", "worker-0", "worker-1"):
            (pid,) = mesh.pids(name)
            expected = mesh_wide | passed | (engine if "worker" in name else {})
            found = environ_of(pid)
            assert {key: found.get(key) for key in environ} == {
                key: expected.get(key) for key in environ
            }
            assert {"PATH", "PYTHONPATH"} <= found.keys()


async def test_a_command_runs_against_the_mesh_and_its_status_is_returned(folder: Path) -> None:
    script = "import os, sys; print('asked', os.environ['OPENAI_BASE_URL']); sys.exit(7)"
    async with meshctl(folder, "--once", "--then", sys.executable, "-c", script) as mesh:
        line = await mesh.line("asked http://127.0.0.1:")
        assert line.endswith("/v1\n")
        assert await mesh.end() == 7


async def test_a_running_command_is_ended_with_the_mesh(folder: Path) -> None:
    script = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"
    async with meshctl(folder, "--then", sys.executable, "-c", script) as mesh:
        line = await mesh.line("pid ")
        # Ends: the output ends; each line has a limit.
        while not line.startswith("pid "):
            line = await mesh.line("pid ")
        with watched([int(line.split()[1])]) as fds:
            mesh.process.send_signal(signal.SIGTERM)
            assert await mesh.end() == 0
            assert all_gone(fds, 0.0)

"""A mesh of real service processes for tests.

    with Mesh(tmp_path, workers=2, worker_flags=["--speedup", "20"]) as mesh:
        httpx.get(f"{mesh.url}/v1/models")

Every process binds free ports and finds the others through a file registry in the given folder.
Leaving the block ends all processes. If the test process itself is killed, the kernel ends them;
for that, a mesh must be started from its main thread.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import grpc
import grpc.aio
import httpx
import pytest

from common.errors import MeshError
from common.rpc.status import mesh_error_from_rpc
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from tests.kit.waiting import WAIT_S, wait_for

ROOT = Path(__file__).parents[2]
PARENT_GUARD = ROOT / "meshctl" / "process" / "parent_guard.py"
START_S = 50.0
LOG_LINES_SHOWN = 40
MODEL = "sim"
# Kinds of process, in start order. The kinds of ROLES run the worker service.
KINDS = ("indexer", "worker", "prefill", "decode", "router", "frontend", "batch")
ROLES = ("prefill", "decode")
# Parts of the `degraded` messages of `/ready` while a mesh is not complete.
_INCOMPLETE = ("no router", "gets no requests", "are not split")


def mesh_error(error: grpc.RpcError) -> MeshError:
    """Returns the error that the server of a blocking call raised."""
    trailing = grpc.aio.Metadata(*error.trailing_metadata())  # type: ignore[arg-type]
    return mesh_error_from_rpc(
        grpc.aio.AioRpcError(error.code(), grpc.aio.Metadata(), trailing, error.details())
    )


class Service:
    """One process.

    service_name: frontend, router, indexer, worker, batch or console. kind: the service, or a
    worker's role.
    module: Python module to run; empty: that of the service. tree: the source that runs.
    """

    def __init__(
        self,
        service_name: str,
        flags: Sequence[str],
        folder: Path,
        name: str,
        *,
        kind: str = "",
        module: str = "",
        tree: Path = ROOT,
    ) -> None:
        self.service_name = service_name
        self.kind = kind or service_name
        self.name = name
        self.tree = tree
        self.log_path = folder / f"{name}.log"
        self.instance_id = 0
        self.addresses: Mapping[str, str] = {}
        self._channel: grpc.Channel | None = None
        self._log: IO[bytes] = self.log_path.open("wb")
        self._ready_fd, write_fd = os.pipe()
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(PARENT_GUARD), str(os.getpid())),
                    *(sys.executable, "-m", module or f"{service_name}_svc"),
                    *(f"--ready-fd={write_fd}", *flags),
                ],
                cwd=tree,
                env=_environment(tree),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[write_fd],
            )
        finally:
            os.close(write_fd)

    @property
    def pid(self) -> int:
        """The process id; the parent guard execs the service, which keeps it."""
        return self.process.pid

    @property
    def address(self) -> str:
        """Address of its gRPC server."""
        return self.addresses["grpc"]

    @property
    def channel(self) -> grpc.Channel:
        """A blocking channel to it."""
        if self._channel is None:
            self._channel = grpc.insecure_channel(self.address)
        return self._channel

    def open_slots(self) -> int:
        """Returns the open slots of this worker."""
        return self.load().open_slots

    def load(self) -> engine_pb2.GetLoadResponse:
        """Returns the load of this worker."""
        stub = engine_pb2_grpc.EngineServiceStub(self.channel)
        return stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=WAIT_S)

    def counters(self) -> dict[str, int]:
        """Returns the counters of this worker."""
        stub = engine_pb2_grpc.EngineServiceStub(self.channel)
        return dict(stub.GetInfo(engine_pb2.GetInfoRequest(), timeout=WAIT_S).counters)

    def bookings(self) -> int:
        """Returns the number of bookings of this router."""
        stub = router_pb2_grpc.RouterServiceStub(self.channel)
        return len(stub.Dump(router_pb2.DumpRequest(), timeout=WAIT_S).bookings)

    def wait_ready(self, timeout_s: float = START_S) -> Service:
        """Waits until it reports ready. Raises AssertionError with its log."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()  # select.select refuses descriptors above 1,023.
        poll.register(self._ready_fd, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
                raise AssertionError(f"{self.name} is not ready in {timeout_s:g} s\n{self.tail()}")
            part = os.read(self._ready_fd, 4096)
            if not part:
                raise AssertionError(f"{self.name} ended before it was ready\n{self.tail()}")
            line += part
        ready_message = json.loads(line)
        if "error" in ready_message:  # its log line may still be in the queue of the log
            error = ready_message["error"]
            raise AssertionError(f"{self.name} ended before it was ready: {error}\n{self.tail()}")
        self.instance_id, self.addresses = (
            int(ready_message["instance_id"]),
            ready_message["addresses"],
        )
        return self

    def metric(self, sample: str) -> float:
        """Returns the value of a sample, named as Prometheus writes it, with its labels."""
        url = f"http://{self.addresses['metrics']}/metrics"
        (line,) = [
            line
            for line in httpx.get(url, timeout=WAIT_S, trust_env=False).text.splitlines()
            if line.startswith(f"{sample} ")
        ]
        return float(line.split()[-1])

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Waits for its end; returns the exit status. Raises AssertionError with its log."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            message = f"{self.name} still runs after {timeout_s:g} s\n{self.tail()}"
            raise AssertionError(message) from None

    def close(self) -> None:
        """Ends the process and closes its log and pipe. Idempotent."""
        if self._channel is not None:
            self._channel.close()
        if self.process.poll() is None:
            self.kill()
        if not self._log.closed:
            self._log.close()
            os.close(self._ready_fd)

    # Any: the fields of log events.
    def events(self, name: str) -> list[dict[str, Any]]:
        """Returns the complete log lines of an event, oldest first."""
        matching = []
        for line in self.log_path.read_text().splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                event = json.loads(line)
                if event.get("event") == name:
                    matching.append(event)
        return matching

    # Any: the fields of the log event.
    def wait_routable(self, timeout_s: float = START_S) -> dict[str, Any]:
        """Waits until its peers send it work; returns the log event."""
        events = wait_for(
            lambda: self.events("routable"), f"{self.name} is routable\n{self.tail()}", timeout_s
        )
        return events[-1]

    def tail(self, lines: int = LOG_LINES_SHOWN) -> str:
        """Returns the end of its log as text."""
        last_lines = self.log_path.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"--- {self.name} (pid {self.pid}, {self.log_path})", *last_lines])


class Mesh:
    """Frontends, routers, indexers and workers. Use as a context manager.

    folder: empty; holds the registry and the logs. workers: count of aggregated workers.
    prefill, decode: counts of workers with these roles. Flags are command-line flags of a service;
    frontends send no canaries without theirs, so that workers count the requests of the test.
    worker_module: Python module to run as a worker; empty: the worker service. trees: the sources
    from which the processes of a kind run, in turn; a kind without runs from this tree. named: the
    processes have stable names, those of their logs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 2,
        prefill: int = 0,
        decode: int = 0,
        routers: int = 1,
        indexers: int = 0,
        frontends: int = 1,
        batches: int = 0,
        worker_flags: Sequence[str] = (),
        frontend_flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
        indexer_flags: Sequence[str] = (),
        batch_flags: Sequence[str] = (),
        worker_module: str = "",
        trees: Mapping[str, Sequence[Path]] | None = None,
        named: bool = False,
    ) -> None:
        self._folder = folder
        self._is_named = named
        counts = (indexers, workers, prefill, decode, routers, frontends, batches)
        self._service_counts = dict(zip(KINDS, counts, strict=True))
        self._flags = {
            "frontend": ["--http-port=0", *frontend_flags],
            "router": list(router_flags),
            "indexer": ["--notice-s=0.3", *indexer_flags],
            "worker": ["--notice-s=0.3", *worker_flags],
            "batch": [
                *("--notice-s=0", "--lease-s=1.5"),
                f"--database-file={folder / 'batches.db'}",
                *batch_flags,
            ],
            "console": [
                *("--http-port=0", "--otlp-port=0", "--notice-s=0", "--interval-s=0.2"),
                f"--login-path={folder / 'console'}",
            ],
        }
        self._modules = {"worker": worker_module}
        self._trees = trees or {}
        self._started: dict[str, int] = {}
        self.services: list[Service] = []
        self.http = httpx.Client(timeout=WAIT_S, trust_env=False)

    def __enter__(self) -> Self:
        try:
            for kind, count in self._service_counts.items():
                for _ in range(count):
                    self.spawn(kind)
            for service in self.services:
                service.wait_ready()
            wait_for(self.is_complete, "the frontend uses the router and all workers")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills every process."""
        self.http.close()
        for service in self.services:
            service.close()

    @property
    def folder(self) -> Path:
        return self._folder

    def spawn(self, kind: str, *flags: str, tree: Path | None = None) -> Service:
        """Starts one more process; call its `wait_ready`. flags: more flags. tree: its source."""
        trees = self._trees.get(kind, [ROOT]) if tree is None else [tree]
        number = self._started[kind] = self._started.get(kind, 0) + 1
        service_name = "worker" if kind in ROLES else kind
        role = [f"--role={kind}"] if kind in ROLES else []
        registry = f"--registry-path={self._folder / 'registry'}"
        name = [f"--stable-name={kind}-{number}"] if self._is_named else []
        source = trees[(number - 1) % len(trees)]
        given = [registry, *self._flags[service_name], *role, *name, *flags]
        has_canaries = any(flag.startswith("--canary-interval-s") for flag in given)
        if kind == "frontend" and source == ROOT and not has_canaries:
            given.append("--canary-interval-s=0")
        service = Service(
            service_name,
            given,
            self._folder,
            f"{kind}-{number}",
            kind=kind,
            module=self._modules.get(service_name, ""),
            tree=source,
        )
        self.services.append(service)
        return service

    def running(self, service_name: str) -> list[Service]:
        """Returns the live processes of a service, oldest first."""
        return [
            s for s in self.services if s.service_name == service_name and s.process.poll() is None
        ]

    def of_kind(self, kind: str) -> list[Service]:
        """Returns the live processes of a kind: of workers those of one role."""
        return [s for s in self.services if s.kind == kind and s.process.poll() is None]

    @property
    def frontend(self) -> Service:
        """The oldest frontend."""
        return self.running("frontend")[0]

    @property
    def router(self) -> Service:
        """The oldest router."""
        return self.running("router")[0]

    @property
    def workers(self) -> list[Service]:
        """The live workers."""
        return self.running("worker")

    @property
    def url(self) -> str:
        """URL of the OpenAI API of the oldest frontend, without /v1."""
        return self.frontend.addresses["http"]

    @property
    def urls(self) -> list[str]:
        """URLs of all frontends, oldest first."""
        return [frontend.addresses["http"] for frontend in self.running("frontend")]

    def model_names(self) -> set[str]:
        """Returns the models that the oldest frontend lists."""
        return {model["id"] for model in self.http.get(f"{self.url}/v1/models").json()["data"]}

    def known_instance_ids(self, service_name: str, url: str = "") -> set[int]:
        """Returns the instance ids of a service in discovery, as the frontend at `url` sees it."""
        instances = self.http.get(f"{url or self.url}/health").json()["instances"]
        return {int(i["id"]) for i in instances if i["service"] == service_name}

    def is_complete(self) -> bool:
        """Returns whether each frontend has a router and sees exactly the live workers."""
        workers = {worker.instance_id for worker in self.workers}
        for url in self.urls:
            ready = self.http.get(f"{url}/ready").json()
            problems = [
                reason
                for reason in ready["degraded"]
                if any(part in reason for part in _INCOMPLETE)
            ]
            if not ready["ready"] or problems or self.known_instance_ids("worker", url) != workers:
                return False
        return True

    def awaiting_worker(self) -> int:
        """Returns how many requests of the oldest frontend wait for a worker."""
        name = "kvmesh_frontend_awaiting_worker_requests "
        lines = self.http.get(f"{self.url}/metrics").text.splitlines()
        return int(float(next(line for line in lines if line.startswith(name)).split()[1]))

    # Any: JSON.
    def post_completion(
        self,
        client_id: str,
        prompt: str | Sequence[int] = "hi",
        *,
        model: str = MODEL,
        max_tokens: int = 2,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> httpx.Response:
        """Sends a completion request. client_id: its x-request-id. fields: more of its body."""
        return self.http.post(
            f"{self.url}/v1/completions",
            json={"model": model, "prompt": prompt, "max_tokens": max_tokens, **fields},
            headers={"x-request-id": client_id, **(headers or {})},
        )

    def request_lines(self, client_id: str) -> list[dict[str, Any]]:
        """Returns the frontend's log lines of requests with this x-request-id."""
        events = self.frontend.events("request")
        return [event for event in events if event.get("client_request_id") == client_id]

    def request_line(self, client_id: str) -> dict[str, Any]:
        """Waits for the log line of a request and returns it."""
        return wait_for(
            lambda: self.request_lines(client_id), f"the line of {client_id} is in the log"
        )[0]

    def logs(self) -> str:
        """Returns the ends of all logs as text."""
        return "\n".join(service.tail() for service in self.services)


def _environment(tree: Path) -> dict[str, str]:
    """Returns this process's environment without KVMESH_* settings, with the import path of a
    tree.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}
    return {**inherited, "PYTHONPATH": f"{tree / 'protos'}{os.pathsep}{tree}"}


# Any: arguments of `Mesh`; a fixture.
def mesh_fixture(**shape: Any) -> Any:
    """Returns a fixture: one mesh for all tests of a module. shape: arguments of `Mesh`."""

    @pytest.fixture(scope="module")
    def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
        with Mesh(tmp_path_factory.mktemp("mesh"), **shape) as running:
            yield running

    return mesh

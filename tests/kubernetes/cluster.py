"""The pods of rendered manifests as processes of this host.

Each pod has an address of the loopback network, so it binds the ports that its manifest states. Its
process gets the environment and the files of its container; the await-registry container runs
before it. A forwarder stands for the service of Consul: connections go to the first server that
accepts them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.contract.consul_agent import consul_binary
from tests.kit.images import ROOT, image_variables
from tests.kit.waiting import wait_for
from tests.kubernetes.manifests import Manifests, Pod
from tests.kubernetes.sockets import Address, connections, owners
from tools.kubernetes.connections import CONSUL

START_S: Final = 90.0
PROBE_S: Final = 2.0
SAMPLE_S: Final = 0.01
_PREFIX: Final = "/run/kvmesh"


@dataclass
class Process:
    """One pod."""

    name: str
    pod: Pod
    address: str
    folder: Path
    environment: Mapping[str, str]
    running: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None
    starts: int = 0

    def start(self, command: list[str], *, waits: bool = False) -> None:
        """Starts a process of the pod; its working folder is empty. waits: for its end."""
        if self.log is None:
            self.log = (self.folder / "log").open("ab")
        working = self.folder / "working"
        working.mkdir(exist_ok=True)
        self.running = subprocess.Popen(
            command,
            env=self.environment,
            cwd=working,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        if waits:
            assert self.running.wait(START_S) == 0, self.tail()

    def stop(self, number: signal.Signals) -> None:
        """Sends a signal, to all of its processes if it is SIGKILL."""
        if self.running is not None and self.running.poll() is None:
            with suppress(ProcessLookupError):
                if number is signal.SIGKILL:
                    os.killpg(self.running.pid, number)
                else:
                    self.running.send_signal(number)

    def tail(self) -> str:
        return f"{self.name}:\n{(self.folder / 'log').read_text(errors='replace')[-3000:]}"

    def is_serving(self, probe: str) -> bool:
        """Returns whether a probe of its container succeeds."""
        spec = self.pod.container[probe]
        if "grpc" not in spec:
            return self._runs(spec["exec"]["command"])
        address = f"{self.address}:{spec['grpc']['port']}"
        request = health_pb2.HealthCheckRequest(service=spec["grpc"].get("service", ""))
        with grpc.insecure_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # The package has no types.
            try:
                response = stub.Check(request, timeout=PROBE_S)
            except grpc.RpcError:
                return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def _runs(self, command: list[str]) -> bool:
        local = [part.replace(_PREFIX, f"{self.folder}{_PREFIX}") for part in command]
        try:
            done = subprocess.run(
                local, env=self.environment, capture_output=True, timeout=PROBE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


@dataclass
class Cluster:
    """All pods of an overlay.

    names: parts of variables, and what replaces them on this host. seen: pairs of a process and the
    address that it has connected to.
    """

    manifests: Manifests
    folder: Path
    names: Mapping[str, str] = field(default_factory=dict)
    seen: set[tuple[str, Address]] = field(default_factory=set)

    def __post_init__(self) -> None:
        number = os.getpid()
        network = f"127.{number >> 8 & 63 | 64}.{number & 255}"
        self.service = f"{network}.250"
        names = [
            (f"{pod.name}-{at}", pod) for pod in self.manifests.pods for at in range(pod.replicas)
        ]
        self.addresses = {name: f"{network}.{n + 1}" for n, (name, _) in enumerate(names)}
        self.processes = {name: self._process(name, pod) for name, pod in names}
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=target.__name__)
            for target in (self._sample, self._forward)
        ]

    def __enter__(self) -> Cluster:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.stop(signal.SIGKILL)
        for process in self.processes.values():
            if process.running is not None:
                process.running.wait(10)
            if process.log is not None:
                process.log.close()
        self._ends.set()
        for thread in self._threads:
            thread.join(10)

    @property
    def consuls(self) -> list[Process]:
        return [p for p in self.processes.values() if p.pod.component == "consul"]

    @property
    def services(self) -> list[Process]:
        return [p for p in self.processes.values() if p.pod.target]

    def of_component(self, component: str) -> list[Process]:
        return [p for p in self.processes.values() if p.pod.component == component]

    def start(self) -> None:
        """Starts the containers that await the registry, then the servers, then the services."""
        for process in self.services:
            (init,) = process.pod.spec["initContainers"]
            process.start([sys.executable, *init["command"][1:]])
        for process in self.consuls:
            self.start_consul(process)
        for process in self.services:
            assert process.running is not None
            assert process.running.wait(START_S) == 0, process.tail()
            self.start_service(process)

    def start_consul(self, process: Process) -> None:
        shell, script = process.pod.container["command"]
        process.start([shell, f"{process.folder}{script}"])

    def start_service(self, process: Process) -> None:
        target = process.pod.target.partition("-")[0]
        process.start([sys.executable, "-m", f"{target}_svc"])

    def await_probes(self, timeout_s: float = START_S) -> float:
        """Waits until all probes of all pods succeed; returns the seconds. Raises AssertionError
        that names the others."""
        begun = time.monotonic()
        waiting = {
            (process.name, probe): process
            for process in self.processes.values()
            for probe in ("startupProbe", "readinessProbe", "livenessProbe")
            if "tcpSocket" not in process.pod.container.get(probe, {"tcpSocket": None})
        }
        while waiting:
            for (name, probe), process in list(waiting.items()):
                if process.is_serving(probe):
                    del waiting[name, probe]
            if time.monotonic() > begun + timeout_s:
                tails = "\n".join(
                    {process.name: process.tail() for process in waiting.values()}.values()
                )
                raise AssertionError(f"not ready: {sorted(waiting)}\n{tails}")
            # Sleep: between two rounds of probes.
            time.sleep(0.1)
        return time.monotonic() - begun

    def written_files(self) -> list[str]:
        """Returns files that processes have written into their working folders."""
        return [
            str(path)
            for process in self.processes.values()
            for path in (process.folder / "working").rglob("*")
        ]

    def _process(self, name: str, pod: Pod) -> Process:
        address = self.addresses[name]
        folder = self.folder / name
        for path, content in pod.files().items():
            file = Path(f"{folder}{path}")
            file.parent.mkdir(parents=True, exist_ok=True)
            # The headers of exports name the service of the console.
            file.write_text(self._local(content.decode(), address, folder))
        fields = {"status.podIP": address, "metadata.name": name}
        fields["metadata.labels['topology.kubernetes.io/zone']"] = "zone-a"
        variables = pod.variables(fields)
        if pod.target:
            variables = image_variables(pod.target) | variables
        (folder / "tmp").mkdir(parents=True)
        if pod.component == "batch":
            (folder / "data").mkdir()
        environment = {
            "PATH": f"{Path(consul_binary()).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'protos'}:{ROOT}",
            "TMPDIR": str(folder / "tmp"),
            "HOME": str(folder / "tmp"),
            **{key: self._local(value, address, folder) for key, value in variables.items()},
        }
        if pod.component == "consul":
            peers = [a for n, a in self.addresses.items() if n.startswith("consul-")]
            # The binary of Debian is older than version 1.11.
            environment |= {
                "CONSUL_PEERS": " ".join(peers),
                "CONSUL_NODE": name,
                "CONSUL_MANAGEMENT_SETTING": "master",
                "CONSUL_DATA": str(folder / "data"),
            }
        return Process(name, pod, address, folder, environment)

    def _local(self, value: str, address: str, folder: Path) -> str:
        """Returns the value of a variable on this host."""
        if value == "0.0.0.0":
            return address
        for name, replacement in self.names.items():
            if name in value:
                return value.replace(name, replacement)
        for prefix in (_PREFIX, "/tmp", "/data"):
            if value.startswith(prefix):
                return f"{folder}{value}"
        return value.replace("//consul:", f"//{self.service}:").replace(
            "//console:", f"//{self.addresses.get('console-0', '')}:"
        )

    def _sample(self) -> None:
        """Records the connections of all processes until the end."""
        known: dict[int, str] = {}
        own = {*self.addresses.values(), self.service}
        while not self._ends.wait(SAMPLE_S):
            found = [(inode, remote) for inode, remote in connections() if remote[0] in own]
            if any(inode and inode not in known for inode, _ in found):
                pids = {
                    process.running.pid: name
                    for name, process in self.processes.items()
                    if process.running is not None
                }
                # Those that this process opens have no name.
                known = dict.fromkeys((inode for inode, _ in found), "") | owners(pids)
            self.seen |= {(known[i], remote) for i, remote in found if known.get(i)}

    def _forward(self) -> None:
        asyncio.run(self._serve_forwarder())

    async def _serve_forwarder(self) -> None:
        server = await asyncio.start_server(self._forward_one, self.service, CONSUL.number)
        async with server:
            await asyncio.to_thread(self._ends.wait)
            server.close()

    async def _forward_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            # Only servers that are ready have an endpoint.
            for process in self.consuls:
                with suppress(OSError):
                    upstream = await asyncio.open_connection(process.address, CONSUL.number)
                    break
            else:
                return
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, upstream[1]))
                group.create_task(_copy(upstream[0], writer))
        except* OSError:
            pass
        finally:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def wait_until_gone(process: Process) -> None:
    running = process.running
    assert running is not None
    wait_for(lambda: running.poll() is not None, f"{process.name} ends")

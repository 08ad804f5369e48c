"""A Ray cluster of several nodes on this host, each with an address of its own (127.0.0.2, ...).

All processes of a node have the variable NODE_VARIABLE, or descend from one that has it: what a
service receives of its environment does not include the variable.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.runtime.free_ports import free_ports
from tests.kit.processes import ROOT
from tests.kit.waiting import wait_for

VENV = ROOT / ".venv-ray"
PYTHON = VENV / "bin" / "python"
RAY = VENV / "bin" / "ray"
NODE_VARIABLE = "KV_TEST_RAY_NODE"
HEAD = "127.0.0.2"
OTHERS = ("127.0.0.3", "127.0.0.4")
START_S = 90.0
STARTS_MAX = 3
END_S = 20.0
CPUS = 16
# The host has none: Ray counts them, and gives processes their numbers.
GPUS = 8


class Cluster:
    """The nodes. folder: of all logs and state; its path is short, because Ray's sockets are in it.

    settings: variables of all processes of Ray.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._folder = folder
        self._settings = settings
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        self.address = f"{HEAD}:{free_ports(1)}"

    def start(self, address: str, *labels: str) -> None:
        """Starts a node, the head first. Raises AssertionError with the output of Ray.

        A machine that is busy for half a minute lets a start fail, so there are up to STARTS_MAX.
        """
        for _ in range(STARTS_MAX):
            failure = self._try_start(address, labels)
            if not failure:
                return
            self.kill(address)
        raise AssertionError(f"ray start of {address} failed {STARTS_MAX} times: {failure}")

    def _try_start(self, address: str, labels: Sequence[str]) -> str:
        """Returns the output of a start that failed; "" if the node runs."""
        place = ["--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false"]
        place.append(f"--temp-dir={self._folder / 'ray'}")
        if address != HEAD:
            place = [f"--address={self.address}"]
        command = [
            *(str(RAY), "start", *place, f"--node-ip-address={address}", f"--num-cpus={CPUS}"),
            *(f"--num-gpus={GPUS}", "--object-store-memory=80000000", "--disable-usage-stats"),
            *("--min-worker-port=0", "--max-worker-port=0"),
            *([f"--labels={','.join(labels)}"] if labels else []),
        ]
        try:
            done = subprocess.run(
                command,
                env=self._environment(address),
                capture_output=True,
                text=True,
                timeout=START_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return str(error)
        return f"{done.stdout}{done.stderr}" if done.returncode else ""

    def drain(self, node_id: str, deadline_s: int) -> None:
        """Asks Ray to drain a node, as an autoscaler does before a preemption."""
        done = subprocess.run(
            [
                *(str(RAY), "drain-node", f"--address={self.address}", f"--node-id={node_id}"),
                *("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test"),
                f"--deadline-remaining-seconds={deadline_s}",
            ],
            env=self._environment(HEAD),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, f"ray drain-node: {done.stdout}{done.stderr}"

    def kill(self, address: str) -> int:
        """Kills all processes of a node at once; returns their number."""
        pids = self.pids(address)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def pids(self, address: str = "") -> list[int]:
        """Returns the live processes of a node, or of all nodes."""
        desired = f"{NODE_VARIABLE}={self._mark}/{address}".encode()
        parents: dict[int, int] = {}
        found: set[int] = set()
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            with contextlib.suppress(OSError, IndexError):
                pid = int(folder.name)
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                if stat[0] == "Z":
                    continue
                parents[pid] = int(stat[1])
                variables = (folder / "environ").read_bytes().split(b"\0")
                if any(
                    text == desired or (not address and text.startswith(desired))
                    for text in variables
                ):
                    found.add(pid)
        grown = True
        # Ends: each round adds a process.
        while grown:
            more = {pid for pid, parent in parents.items() if parent in found} - found
            found |= more
            grown = bool(more)
        return sorted(found)

    def close(self) -> None:
        """Ends all processes."""
        deadline = time.monotonic() + END_S
        while (pids := self.pids()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # Sleep: the kernel ends them.
            time.sleep(0.2)

    def environment(self) -> dict[str, str]:
        """Returns the environment of commands of meshctl."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVMESH_", "RAY_"))}
        path = f"{ROOT / 'protos'}{os.pathsep}{ROOT}"
        return {**inherited, "PYTHONPATH": path, "RAY_ADDRESS": self.address}

    def _environment(self, address: str) -> dict[str, str]:
        own = {NODE_VARIABLE: f"{self._mark}/{address}", "RAY_USAGE_STATS_ENABLED": "0"}
        return {**self.environment(), **own, **self._settings}


class Observer:
    """A process that is connected to the cluster, and reads what the controller reports."""

    def __init__(self, cluster: Cluster, log: Path) -> None:
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [PYTHON, "-m", "tests.cluster.observer", cluster.address],
            cwd=ROOT,
            env=cluster.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    # Any: JSON.
    def ask(self, command: str) -> Any:
        """Returns the answer: of `status` or `nodes`. None without one."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{command}\n".encode())
        process.stdin.flush()
        return json.loads(process.stdout.readline() or b"null")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


@contextlib.contextmanager
def running_cluster(folder: Path, settings: Mapping[str, str]) -> Iterator[Cluster]:
    """A cluster of three nodes for the block. The head and the first other node have the label
    edge=yes."""
    cluster = Cluster(folder, settings)
    try:
        cluster.start(HEAD, "edge=yes")
        cluster.start(OTHERS[0], "edge=yes")
        cluster.start(OTHERS[1])
        yield cluster
    finally:
        cluster.close()
        wait_for(lambda: not cluster.pids(), "all processes of Ray have ended")

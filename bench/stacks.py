"""Serving stacks under load: a mesh of a source tree, or Dynamo with mocker workers.

Both have two workers and a model with a context of CONTEXT tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import ROOT, with_descendants
from bench.trees import environment

MODEL = "bench"
SIM_MODEL_DIR = ROOT / "worker_svc/engines/sim/model"
BLOCK_SIZE = 16
CONTEXT = 262_144
READY_S = 60.0
# The key that the load generator and the checks of a mesh send.
API_KEY_VARIABLE = "API_KEY"
ROLES = {"agg": ("aggregated", "aggregated"), "pd": ("prefill", "decode")}


@contextlib.contextmanager
def mesh(
    sim_flags: Sequence[str],
    frontend_flags: Sequence[str],
    shape: str = "agg",
    selector: str = "kv",
    root: Path = ROOT,
    workers: int | None = None,
    service_flags: Sequence[str] = (),
    registry: Path | None = None,
) -> Iterator[tuple[int, dict[str, int]]]:
    """Yields the HTTP port and the pids of a frontend, a router, an indexer and sim workers.

    - root: the source tree that the services run from.
    - workers: that many aggregated ones; None: the two of the shape.
    - service_flags: of every service.
    - registry: None for one of its own.
    """
    roles = ROLES[shape] if workers is None else ("aggregated",) * workers
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        common = ["--registry-path", str(registry or Path(folder, "registry"))]
        common += ["--log-level", "warning"]
        common += service_flags
        model = ["--model-path", str(_sim_model(Path(folder))), "--model-name", MODEL]
        worker = [*common, *sim_flags, *model, "--notice-s", "0"]
        commands = {
            "indexer": ["indexer_svc", *common, "--notice-s", "0"],
            "router": ["router_svc", *common, "--notice-s", "0", "--selector", selector],
            **{
                f"worker{i}": ["worker_svc", *worker, "--role", role]
                for i, role in enumerate(roles)
            },
            "frontend": [
                *("frontend_svc", *common, "--http-port", "0", "--notice-s", "0", *frontend_flags)
            ],
        }
        running: dict[str, subprocess.Popen[bytes]] = {}
        ready: dict[str, dict[str, Any]] = {}
        try:
            for name, command in commands.items():
                running[name], ready[name] = _start(name, command, Path(folder), root)
            port = int(ready["frontend"]["addresses"]["http"].rsplit(":", 1)[1])
            _await_model(port, len(roles))
            yield port, {name: process.pid for name, process in running.items()}
        finally:
            for process in running.values():
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
            for process in running.values():
                process.wait(20)


def _sim_model(folder: Path) -> Path:
    """A copy of the sim's model, with a context of CONTEXT."""
    copy = folder / "model"
    shutil.copytree(SIM_MODEL_DIR, copy)
    settings = json.loads((copy / "sim.json").read_bytes())
    (copy / "sim.json").write_text(json.dumps({**settings, "context_length": CONTEXT}))
    return copy


@contextlib.contextmanager
def demo_mesh() -> Iterator[int]:
    """Yields the pid of `meshctl up`, the parent of the services of `make run`."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        flags = ["--http-port", "0", "--log-dir", f"{folder}/logs"]
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "meshctl",
                "up",
                *flags,
                "--registry-path",
                f"{folder}/registry",
            ],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment(ROOT),
        )
        assert process.stdout is not None
        try:
            # Ends: meshctl stops a mesh that is not ready in time.
            while b"is served" not in (line := process.stdout.readline()):
                if not line:
                    raise RuntimeError("meshctl up did not start the mesh")
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)


def _start(
    name: str, command: list[str], folder: Path, root: Path
) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    read_fd, write_fd = os.pipe()
    log = (folder / f"{name}.log").open("wb")
    module, *flags = command
    process = subprocess.Popen(
        [sys.executable, "-m", module, *flags, "--ready-fd", str(write_fd)],
        stdout=log,
        stderr=log,
        pass_fds=[write_fd],
        cwd=root,
        env=environment(root),
    )
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        line = json.loads(pipe.readline() or "{}")
    if "addresses" not in line:
        raise RuntimeError(f"{name} did not start: {(folder / f'{name}.log').read_text()[-2000:]}")
    return process, line


def _await_model(port: int, workers: int) -> None:
    deadline = time.monotonic() + READY_S
    headers = {"authorization": f"Bearer {os.environ.get(API_KEY_VARIABLE, '')}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/health", headers=headers)
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=2) as response:
            instances = json.load(response)["instances"]
            if sum(instance["service"] == "worker" for instance in instances) == workers:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the mesh was not ready within {READY_S:g} s")


def await_response(port: int, body: bytes) -> None:
    """Returns once a body gets a response with status 200."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as response:
            response.read()
            return
        time.sleep(0.1)
    raise RuntimeError(f"port {port} served no request within {READY_S:g} s")


# Dynamo needs neither etcd nor NATS with these; all addresses are loopback.
_DYNAMO_ENV = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_HTTP_HOST": "127.0.0.1",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    "DYN_SYSTEM_HOST": "127.0.0.1",
    "DYN_HTTP_RPC_HOST": "127.0.0.1",
    "DYN_LOG": "warn",
    "HF_HUB_OFFLINE": "1",
}
# What Dynamo reads of a model beside its tokenizer; the mocker has no weights.
_MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


@contextlib.contextmanager
def dynamo(
    python: str, mocker_flags: Sequence[str], env: Mapping[str, str], step_ms: float | None = None
) -> Iterator[tuple[int, dict[str, int]]]:
    """Yields the HTTP port and the pids of Dynamo's frontend, with its KV router, and of a mocker
    process with two workers. python: of an environment with ai-dynamo. env: more settings. step_ms:
    of the mocker, if not by its own model, which has 16 ms and more for a prefill; prefill is then
    as fast as that of a paced sim."""
    with (
        tempfile.TemporaryDirectory(prefix="dynamo-bench-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        model_dir = folder / "model"
        shutil.copytree(SIM_MODEL_DIR, model_dir)
        vocab = len(json.loads((model_dir / "tokenizer.json").read_bytes())["model"]["vocab"])
        (model_dir / "config.json").write_text(json.dumps({**_MODEL_CONFIG, "vocab_size": vocab}))
        if step_ms is not None:
            mocker_flags = [*mocker_flags, *_fixed_steps(folder, step_ms)]
        port = _free_port()
        block_size = str(BLOCK_SIZE)
        commands = {
            "frontend": [
                *("dynamo.frontend", "--http-port", str(port), "--router-mode", "kv"),
                *("--kv-cache-block-size", block_size),
            ],
            "mocker": [
                *("dynamo.mocker", "--model-path", str(model_dir), "--model-name", MODEL),
                *("--num-workers", "2", "--block-size", block_size),
                *("--num-gpu-blocks-override", "16384", *mocker_flags),
            ],
        }
        pids = {}
        for process_name, command in commands.items():
            log = stack.enter_context((folder / f"{process_name}.log").open("wb"))
            process = subprocess.Popen(
                [python, "-m", *command],
                stdout=log,
                stderr=log,
                env={**os.environ, **_DYNAMO_ENV, **env, "DYN_FILE_KV": str(folder / "kv")},
            )
            stack.callback(_end, process)
            pids[process_name] = process.pid
        _await_dynamo(port)
        yield port, pids


def _fixed_steps(folder: Path, step_ms: float) -> list[str]:
    """Flags of a mocker with steps of this duration and 10,000 prompt tokens a millisecond."""
    np.savez(
        folder / "steps.npz",
        prefill_isl=np.array([0.0, 1e6]),
        prefill_ttft_ms=np.array([0.0, 100.0]),
        decode_active_kv_tokens=np.array([0.0, 1e6]),
        decode_context_length=np.array([1.0, 1e6]),
        decode_itl=np.full((2, 2), step_ms),
    )
    return ["--planner-profile-data", str(folder / "steps.npz")]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_dynamo(port: int) -> None:
    deadline = time.monotonic() + READY_S
    url = f"http://127.0.0.1:{port}/health"
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as response:
            instances = json.load(response).get("instances", [])
            if sum(instance.get("endpoint") == "generate" for instance in instances) == 2:
                time.sleep(1)  # the model follows its workers
                return
        time.sleep(0.2)
    raise RuntimeError(f"Dynamo was not ready within {READY_S:g} s")


@contextlib.contextmanager
def suspended(pids: Sequence[int]) -> Iterator[None]:
    """Stops processes and their descendants for the time of the block."""
    found = [descendant for pid in pids for descendant in with_descendants(pid)]
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in found:
            os.kill(pid, signal.SIGCONT)

"""vLLM servers as operators start them: by `vllm serve`, from an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.adapters.stock_server import END_S, StockServer
from tests.kit.processes import ROOT

VENV = ROOT / ".venv-vllm"
INSTALL = "vLLM is not installed: make setup-vllm"
MODEL = "tiny"
# The smallest of vLLM on a CPU; the mesh has blocks of 16 tokens.
PAGE_SIZE = 32
BLOCK_SIZE = 16
# Few, so that tests evict some.
PAGES = 400
# Requests that it computes at once.
SLOTS = 16
# On a CPU, in a cache that fits any machine.
CPU_FLAGS = (
    *("--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", str(SLOTS)),
    *("--block-size", str(PAGE_SIZE), "--num-gpu-blocks-override", str(PAGES)),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
    *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"),
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Two servers share the cores.
    "OMP_NUM_THREADS": "1",
    # For /reset_prefix_cache, and for adapters that come and go.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    # No hub, no reports of usage.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def is_installed() -> bool:
    """Whether vLLM's environment has its command."""
    return (VENV / "bin" / "vllm").exists()


def write_model_files(folder: Path) -> None:
    """Writes the model `tiny` and its adapter `pirate`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(VENV / "bin" / "python"), "-m", "tests.vllm.model_files", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=240)


class VllmServer(StockServer):
    """One server with KV events. port: of HTTP; the next two are those of KV events and replay."""

    def __init__(self, model: Path, folder: Path, port: int, *flags: str) -> None:
        self.events_port, self.replay_port = port + 1, port + 2
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }
        command = [
            *("/usr/bin/env", *(f"{name}={value}" for name, value in ENVIRONMENT.items())),
            *(str(VENV / "bin" / "vllm"), "serve", str(model), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--kv-events-config", json.dumps(events), *CPU_FLAGS, *flags),
        ]
        super().__init__(f"http://127.0.0.1:{port}", command, folder / f"vllm-{port}.log")

    @property
    def worker_flags(self) -> tuple[str, ...]:
        """The flags of an adapter for this server."""
        return "--engine=openai", f"--server-urls={self.url}", f"--block-size={BLOCK_SIZE}"

    def generate(self, prompt: Sequence[int], count: int = 1) -> None:
        """Sends a request past the mesh. Raises AssertionError."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "ignore_eos": True}
        self.post("/v1/completions", body | {"temperature": 0})

    @property
    def is_alive(self) -> bool:
        """Whether it was not killed."""
        return self._process is not None

    def metric(self, name: str) -> float:
        """Returns the sum of the samples of that name; 0 if the server has ended."""
        try:
            text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=END_S).text
        except httpx.HTTPError:
            return 0.0
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )

    def running(self) -> int:
        """Returns the number of requests that it has."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return int(sum(self.metric(name) for name in names))

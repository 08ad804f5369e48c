"""The start of SGLang: arguments, environment, process state, the tiny model, model checksum."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import multiprocessing
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from common.errors import Unavailable
from common.runtime.free_ports import free_ports
from worker_svc.engines.sglang.config import SglangConfig
from worker_svc.engines.sglang.continuation import run_scheduler
from worker_svc.engines.sglang.sampling import MinTokens
from worker_svc.engines.sglang.server_args import server_arguments
from worker_svc.kv_events.zmq_reader import KvEventEndpoints

# Bytes of each weight file, at its start and its end, that enter the model checksum.
_SAMPLED_BYTES: Final = 1 << 16

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Launched:
    """A started SGLang. engine: an `sglang.Engine`, which has no types. endpoints: of its KV
    events, None if it reports none. min_tokens_processor: the serialized `MinTokens`.
    """

    engine: Any
    endpoints: KvEventEndpoints | None
    min_tokens_processor: str


def launch_engine(config: SglangConfig) -> Launched:
    """Starts SGLang; call it in a thread: imports take seconds, the start takes up to minutes."""
    with preserve_process_state():
        # Imported here: a worker without SGLang must be able to import this module.
        import torch  # type: ignore[import-not-found]
        from sglang.srt.entrypoints.engine import Engine  # type: ignore[import-not-found] # noqa: TID251
        from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor  # type: ignore[import-not-found] # noqa: TID251

        level = str(config.engine_args.get("log_level", "error")).upper()
        logging.getLogger("sglang").setLevel(level)
        min_tokens_processor = CustomLogitProcessor.to_str.__func__(MinTokens)
        ranks = int(config.engine_args.get("dp_size", 1))
        # Consecutive ports: one for the rendezvous, then two per rank for its events.
        port = free_ports(1 + 2 * ranks)
        endpoints = KvEventEndpoints(port + 1, port + 1 + ranks) if config.kv_events else None
        arguments = server_arguments(
            config.role,
            config.engine_args,
            is_cpu=not torch.cuda.is_available(),
            block_size=config.block_size,
            adapter_arguments=_adapter_arguments(config, port, endpoints),
        )
        _set_environment(config)

        class ContinuingEngine(Engine):  # type: ignore[misc]
            """An engine whose requests may continue output of other workers."""

            run_scheduler_process_func = staticmethod(run_scheduler)

        return Launched(ContinuingEngine(**arguments), endpoints, min_tokens_processor)


def _adapter_arguments(
    config: SglangConfig, port: int, endpoints: KvEventEndpoints | None
) -> dict[str, Any]:
    adapter_arguments: dict[str, Any] = {
        "model_path": str(config.model_dir),
        "skip_tokenizer_init": False,
        "host": config.host,
        "enable_priority_scheduling": True,
        "enable_custom_logit_processor": True,
    }
    if config.context_length is not None:
        adapter_arguments["context_length"] = config.context_length
    if endpoints is not None:
        adapter_arguments["kv_events_config"] = endpoints.config()
    if config.role != "aggregated":
        adapter_arguments["disaggregation_mode"] = config.role
    if config.role == "prefill":
        adapter_arguments["disaggregation_bootstrap_port"] = config.bootstrap_port or port
    return adapter_arguments


def _set_environment(config: SglangConfig) -> None:
    """Sets environment variables that SGLang reads, through SGLang's own API."""
    from sglang.srt.environ import envs  # type: ignore[import-not-found] # noqa: TID251

    if config.engine_args.get("node_rank"):
        # Otherwise the start would only return when the schedulers end.
        _set_variable("SGLANG_BLOCK_NONZERO_RANK_CHILDREN", "0")
    if config.role == "aggregated":
        return
    limit_s = max(1, round(config.handoff_timeout_s))
    envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.set(limit_s)
    envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.set(limit_s)
    # Otherwise SGLang would use another interface.
    _set_variable("SGLANG_HOST_IP", socket.gethostbyname(config.bootstrap_host))


def _set_variable(name: str, value: str) -> None:
    """Sets a variable that is not in SGLang's `envs`."""
    from sglang.srt.environ import EnvStr  # noqa: TID251

    variable = EnvStr("")
    variable.name = name
    variable.set(value)


async def make_tiny_model(folder: Path) -> None:
    """Builds the tiny model in a child process, which has ended on return."""
    if await asyncio.to_thread(folder.exists):
        return
    log.warning("no_model_path", detail="serving random weights: output is noise; set --model-path")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "worker_svc.engines.sglang.make_model", str(folder)
    )
    if await process.wait():
        raise Unavailable("the tiny model could not be built; the log has the reason")


@contextlib.contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restores what SGLang replaces: the root logger's handlers and asyncio's policy."""
    root, policy = logging.getLogger(), asyncio.get_event_loop_policy()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
        for handler in root.handlers[:]:
            if handler not in handlers:
                root.removeHandler(handler)
                handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)


def kill_children() -> None:
    """Kills all child processes of this process. Blocks until they have ended, at most 1 s each."""
    for process in multiprocessing.active_children():
        process.kill()
        process.join(1.0)


def model_checksum(folder: Path) -> str:
    """Returns 16 hex digits of a digest over the configuration and samples of the weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin", ".gguf"):
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(_SAMPLED_BYTES)
                file.seek(max(0, size - _SAMPLED_BYTES))
                tail = file.read()
            digest.update(json.dumps([path.name, size]).encode() + head + tail)
    return digest.hexdigest()[:16]

"""Helpers of an SGLang start: the tiny model, progress, process state, model checksum."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog

from common.errors import Unavailable

# Bytes of each weight file, at its start and its end, that enter the model checksum.
_SAMPLED_BYTES: Final = 1 << 16

log = structlog.get_logger()


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

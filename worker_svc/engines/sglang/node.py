"""A further node of an SGLang engine (`node_rank` above 0): it computes its share of the model. The
worker of node 0 serves, and only that one is registered.

When node 0 stops, the schedulers here lose their connection and end, and so does this process, with
status 1: its supervisor starts it again for the next node 0.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Final

import structlog

from common.errors import InvalidRequest, Unavailable, WorkerLost
from common.service.lifecycle import Lifecycle, ServiceInfo
from worker_svc.engines.sglang.config import SglangConfig
from worker_svc.engines.sglang.launch import (
    Launched,
    kill_children,
    launch_engine,
    make_tiny_model,
)

WATCH_INTERVAL_S: Final = 0.2

log = structlog.get_logger()


class NodeApp:
    """An `App` that runs the schedulers of one node. launch: starts SGLang; it may block."""

    def __init__(
        self, config: SglangConfig, launch: Callable[[SglangConfig], Launched] = launch_engine
    ) -> None:
        self._config = config
        self._launch = launch
        self._processes: Sequence[BaseProcess] = ()

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        """Returns when the schedulers of all nodes are ready. Raises InvalidRequest and Unavailable
        as `SglangEngine.start`."""
        loop, began_at = asyncio.get_running_loop(), time.monotonic()
        # A scheduler that dies sends it to its parent; its end is noticed below.
        loop.add_signal_handler(signal.SIGQUIT, lambda: None)
        if self._config.model_path is None:
            await make_tiny_model(self._config.model_dir)
        try:
            await loop.run_in_executor(None, self._launch, self._config)
        except (AssertionError, TypeError, ValueError) as error:
            text = f"SGLang rejected its arguments: {error}"
            raise InvalidRequest(text, "engine_args") from error
        except Exception as error:
            raise Unavailable(f"SGLang did not start: {error}") from error
        self._processes = multiprocessing.active_children()
        rank = self._config.engine_args["node_rank"]
        log.info("sglang_node_started", node_rank=rank, s=round(time.monotonic() - began_at, 2))
        lifecycle.spawn(self._watch(), name="sglang node")
        return ServiceInfo("0", {})

    async def _watch(self) -> None:
        """Raises WorkerLost once a process of SGLang has ended."""
        while True:
            if not all(process.is_alive() for process in self._processes):
                raise WorkerLost("a process of this node ended", retryable=False)
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def register(self) -> None:
        """Does nothing: the worker of node 0 is registered."""

    async def deregister(self) -> None:
        """Does nothing, as `register`."""

    async def left(self, timeout_s: float) -> None:
        """Returns at once: no peer sends it work."""

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Waits for the end of the schedulers with those of node 0, `grace_s` at most."""
        with suppress(TimeoutError, WorkerLost):
            async with asyncio.timeout(grace_s):
                await self._watch()
        return ()

    async def close(self) -> None:
        """Kills what still runs of SGLang."""
        await asyncio.to_thread(kill_children)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)

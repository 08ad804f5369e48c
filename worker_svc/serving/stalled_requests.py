"""Ends the requests that an engine has lost: samples the watch, probes the engine, ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from common.runtime.tasks import TaskGroup
from worker_svc.serving.request_watch import SAMPLE_S
from worker_svc.serving.runner import Runner

# Time for a probe, or this share of the step limit if that is longer.
PROBE_WAIT_S = 2.0
PROBE_WAIT_LIMITS = 0.5


class StalledRequests:
    """Ends the lost requests of a runner.

    probe: sends a probe to the engine and returns when it has a result; None: no probes. The probe
    decides whether the engine counts as alive. The requests end in any case: either the engine has
    lost them, or it does not respond.
    """

    def __init__(
        self, runner: Runner, probe: Callable[[], Coroutine[Any, Any, None]] | None
    ) -> None:
        self._runner = runner
        self._probe = probe
        self._probing: asyncio.Task[None] | None = None
        self._wait_until = 0.0

    async def run(self) -> None:
        """Runs until it is cancelled."""
        now = asyncio.get_running_loop().time
        async with TaskGroup() as tasks:
            while True:
                await asyncio.sleep(SAMPLE_S)
                if not self._runner.open_requests:
                    continue
                stalled = self._runner.find_stalled(now())
                if not stalled:
                    continue
                await self._wait_for_probe(tasks)
                for key, output_at in stalled.items():
                    await self._runner.end_stalled(key, output_at)

    async def _wait_for_probe(self, tasks: TaskGroup) -> None:
        if self._probe is None:
            return
        now = asyncio.get_running_loop().time()
        if self._probing is None or self._probing.done():
            self._probing = tasks.create_task(self._probe())
            limit_s = self._runner.step_limits.measured_s
            self._wait_until = now + max(PROBE_WAIT_S, PROBE_WAIT_LIMITS * limit_s)
        # A probe without a result proves for further requests too that the engine does not respond.
        await asyncio.wait([self._probing], timeout=max(0.0, self._wait_until - now))

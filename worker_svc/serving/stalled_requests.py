"""Ends the requests that an engine has lost: samples the watch, probes the engine, ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from common.runtime.tasks import TaskGroup
from worker_svc.serving.request_watch import SAMPLE_S
from worker_svc.serving.runner import Runner

# Time for a probe, or this share of the step limit if that is longer.
PROBE_WAIT_S = 2.0
PROBE_WAIT_LIMITS = 0.5

log = structlog.get_logger()


class StalledRequests:
    """Ends the lost requests of a runner.

    probe: sends a probe and returns, when it has a result, whether the engine responds; None: no
    probes. It decides whether the engine counts as alive, and whether the requests that need a
    proof are lost. The others end in any case.
    """

    def __init__(
        self, runner: Runner, probe: Callable[[], Coroutine[Any, Any, bool]] | None
    ) -> None:
        self._runner = runner
        self._probe = probe
        self._probing: asyncio.Task[bool] | None = None
        self._wait_until = 0.0

    async def run(self) -> None:
        """Runs until it is cancelled."""
        now = asyncio.get_running_loop().time
        async with TaskGroup() as tasks:
            while True:
                await asyncio.sleep(SAMPLE_S)
                if not self._runner.open_requests:
                    continue
                try:
                    stalled = self._runner.find_stalled(now())
                except Exception as error:  # the engine's
                    log.warning("engine_loads_failed", error=repr(error))
                    continue
                if not stalled:
                    continue
                needs_proof = any(request.needs_proof for request in stalled)
                responds = await self._wait_for_probe(tasks, needs_proof=needs_proof)
                # Loads of an idle engine may be old: with the probe it has reported new ones.
                is_proved = responds and self._runner.is_engine_idle()
                for request in stalled:
                    if is_proved or not request.needs_proof:
                        await self._runner.end_stalled(request)

    async def _wait_for_probe(self, tasks: TaskGroup, *, needs_proof: bool) -> bool:
        """Returns whether the engine responds to a probe."""
        if self._probe is None:
            return False
        now, probing = asyncio.get_running_loop().time(), self._probing
        is_late = probing is not None and not probing.done() and now >= self._wait_until
        if is_late and not needs_proof:
            return False
        if probing is None or probing.done() or is_late:
            probing = self._probing = tasks.create_task(self._probe())
            limit_s = self._runner.step_limits.measured_s
            self._wait_until = now + max(PROBE_WAIT_S, PROBE_WAIT_LIMITS * limit_s)
        await asyncio.wait([probing], timeout=max(0.0, self._wait_until - now))
        return probing.done() and not probing.cancelled() and probing.result()

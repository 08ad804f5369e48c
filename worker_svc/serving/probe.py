"""The canary: an engine that has said nothing for a while is asked for one token.

What requests bring is the better proof, so it sings only where there is none: no output for
`idle_s` and no step either. A probe goes to the engine itself, past admission, counters and spans
of requests. Being refused for being busy is an answer.

While probes fail they are repeated every RETRY_S. Only an answer ends that, to a probe or to a
request: a step does not, since engines report theirs late, and one that moves may say nothing. A
probe that waits in vain while requests are answered has not failed.

A probe is a task of its own, which the canary waits for and never awaits: an engine that does not
heed a cancellation, or whose `finally` hangs, holds that task only. Of such at most HUNG_MAX are
left behind; no further one is sent before one of them has ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

import structlog

from common.errors import MeshError, Overloaded
from common.request.preprocessed import TokenIds
from worker_svc.engines.contract import (
    EngineContext,
    FinishReason,
    GenerateContext,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
    validate_stream,
)
from worker_svc.serving.runner import Runner

PROBE_RETRY_S = 1.0
HUNG_PROBES_MAX = 4

log = structlog.get_logger()


class Spawn(Protocol):
    """`Life.spawn`: runs work in a task that is cancelled, and awaited, at the end of a life."""

    def __call__(
        self, work: Coroutine[Any, Any, str], /, *, name: str, essential: bool
    ) -> asyncio.Task[str]:
        """Begins."""


class EngineProbe:
    """Watches the runner's engine.

    tell: called with False when the engine is found dead, with True when it lives again.
    spawn: who owns the probes' tasks, also of those left behind.
    idle_s: silence before a probe; timeout_s: how long an answer may take. Counts `canaries` and
    `canaries_failed` among the runner's counters.
    """

    def __init__(
        self,
        runner: Runner,
        set_serving: Callable[[bool], Awaitable[None]],
        spawn: Spawn,
        *,
        idle_s: float,
        timeout_s: float,
    ) -> None:
        self.is_alive = True
        self._runner = runner
        self._set_serving = set_serving
        self._spawn = spawn
        self._idle_s = idle_s
        self._timeout_s = timeout_s
        self._last_steps = -1
        self._last_activity_at = -math.inf
        self._last_probe_at = -math.inf
        self._hung_probes: list[asyncio.Task[str]] = []

    async def run(self) -> None:
        """Watches until cancelled."""
        now = asyncio.get_running_loop().time
        self._last_activity_at = now()
        while True:
            self._update_activity(now())
            if not self.is_alive and self._runner.last_output_at > self._last_probe_at:
                await self._set_alive(True, "it answers a request")
            wait_s = self._next_probe_at() - now()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            reason = await self._probe()
            self._last_probe_at = now()
            await self._set_alive(not reason, reason)

    def _next_probe_at(self) -> float:
        """When the next probe is due."""
        if self.is_alive:
            return max(self._last_activity_at, self._last_probe_at) + self._idle_s
        return self._last_probe_at + min(self._idle_s, PROBE_RETRY_S)

    def _update_activity(self, now: float) -> None:
        """Notes when the engine last gave a sign that it need not be asked."""
        self._last_activity_at = max(self._last_activity_at, self._runner.last_output_at)
        steps = self._read_steps()
        if steps != self._last_steps:
            self._last_steps, self._last_activity_at = steps, now

    def _read_steps(self) -> int:
        try:
            return sum(load.engine_step for load in self._runner.engine.loads())
        except Exception as error:
            # A probe will tell whether the engine lives; without steps there are more of them.
            log.warning("engine_loads_failed", error=repr(error))
            return self._last_steps

    async def _probe(self) -> str:
        """What is wrong with the engine's answer; empty: nothing."""
        self._runner.counters["canaries"] += 1
        reason = await self._find_failure()
        # Steps taken for the probe, or before it timed out, say nothing new.
        self._last_steps = self._read_steps()
        self._runner.counters["canaries_failed"] += bool(reason)
        return reason

    async def _find_failure(self) -> str:
        self._hung_probes = [task for task in self._hung_probes if not task.done()]
        if len(self._hung_probes) >= HUNG_PROBES_MAX:
            return f"{len(self._hung_probes)} probes before this one have not ended yet"
        name = f"canary-{self._runner.counters['canaries']}"
        started_at = asyncio.get_running_loop().time()
        task = self._spawn(self._send_probe(name), name=name, essential=False)
        try:
            await asyncio.wait([task], timeout=self._timeout_s)
        finally:
            # Not awaited: what it then does, and when it ends, is the engine's affair.
            task.cancel()
        if not task.done():
            self._hung_probes.append(task)
            if self._runner.last_output_at > started_at:
                return ""  # It answers requests; whatever became of the probe, it lives.
            return f"no answer within {self._timeout_s:g} s"
        # It was not we who cancelled it: it would not be done yet.
        return "it cancelled its own answer" if task.cancelled() else task.result()

    async def _send_probe(self, request_id: str) -> str:
        """Asks for one token; what is wrong with the answer, empty: nothing."""
        ctx = GenerateContext(EngineContext(request_id))
        try:
            stream = self._runner.engine.generate(probe_request(), ctx)
            async with aclosing(validate_stream(stream, request_id=ctx.id)) as outputs:
                async for output in outputs:
                    if output.finish_reason is FinishReason.ERROR:
                        return output.error or "its answer is an error"
        except Overloaded:
            return ""
        except MeshError as error:
            return error.message
        except Exception as error:
            log.exception("engine_failed", request_id=ctx.id)
            return repr(error)
        return ""

    async def _set_alive(self, is_alive: bool, reason: str) -> None:
        if is_alive == self.is_alive:
            return
        self.is_alive = is_alive
        if is_alive:
            log.info("engine_lives_again", reason=reason or "it answers again")
        else:
            log.error("engine_canary_failed", reason=reason)
        await self._set_serving(is_alive)


def probe_request() -> PreprocessedRequest:
    """The least that can be asked of an engine: one token."""
    return PreprocessedRequest(
        token_ids=TokenIds.of([1]),
        stop_conditions=StopConditions(max_tokens=1, ignore_eos=True),
        sampling_options=SamplingOptions(temperature=0.0),
        is_probe=True,
    )

"""Sends probes to an engine that is idle or failed a request, and reports a failing engine.

A probe is due if for `idle_s` the engine neither sent output nor took a step, and within
PROBE_RETRY_S if a request failed. It goes directly to the engine: admission, request counters and
request spans do not apply. Overloaded counts as a successful response, and so does InvalidRequest,
as at the frontends: an engine that rejects the probe responds.

The verdict is `Runner.engine_failure`. It reaches the frontends with the heartbeats of the Attach
streams, and they exclude the worker.

A failed probe is repeated every PROBE_RETRY_S. Only a response to a probe restores the engine, or
one to a request if no request has failed since the probe. Steps do not: engines report them late,
and an engine that takes steps may still send no output. A probe that times out while the engine
responds to requests has not failed.

A probe runs in a task of its own that is waited for but never awaited: an engine that ignores a
cancellation, or hangs in a `finally`, blocks only that task. After HUNG_PROBES_MAX such tasks no
further probe is sent until one of them ends.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol

import structlog

from common.errors import InternalError, InvalidRequest, MeshError, Overloaded
from common.request.preprocessed import TokenIds
from common.request.token_stream import ENGINE_FAILURE_CHARS_MAX
from worker_svc.engines.contract import (
    FinishReason,
    GenerateContext,
    LLMEngine,
    PreprocessedRequest,
    ProbedEngine,
    SamplingOptions,
    StopConditions,
    validate_stream,
)
from worker_svc.serving.runner import Runner

PROBE_RETRY_S = 1.0
HUNG_PROBES_MAX = 4

log = structlog.get_logger()


class Spawn(Protocol):
    """`Lifecycle.spawn`: runs work in a task that the service cancels and awaits when it ends."""

    def __call__(
        self, work: Coroutine[Any, Any, str], /, *, name: str, essential: bool
    ) -> asyncio.Task[str]:
        """Starts the work."""


@dataclass(eq=False)
class EngineProbe:
    """Probes the runner's engine.

    Counts `canaries` and `canaries_failed` in the runner's counters.
    """

    runner: Runner
    set_serving: Callable[[bool], Awaitable[None]]
    """Called with False when the engine stops responding, with True when it responds again."""

    spawn: Spawn
    """Owns the probe tasks, including hung ones."""

    _: KW_ONLY
    idle_s: float
    """Idle time before a probe."""

    timeout_s: float
    """Limit of one probe, or the measured step limit if that is larger."""

    def __post_init__(self) -> None:
        # Failed requests at the last probe.
        self._failed_requests = 0
        self._last_steps = -1
        self._last_activity_at = -math.inf
        self._last_probe_at = -math.inf
        self._hung_probes: list[asyncio.Task[str]] = []

    @property
    def is_alive(self) -> bool:
        """Whether the engine responded to the last probe, or to a request since then."""
        return not self.runner.engine_failure

    @property
    def _has_failed_request(self) -> bool:
        """Whether a request failed since the last probe."""
        return self.runner.counters["failed"] != self._failed_requests

    async def run(self) -> None:
        now = asyncio.get_running_loop().time
        self._last_activity_at = now()
        while True:
            self._update_activity(now())
            has_output = self.runner.last_output_at > self._last_probe_at
            if not self.is_alive and has_output and not self._has_failed_request:
                await self._set_failure("", "the engine responded to a request")
            wait_s = self._next_probe_at() - now()
            if wait_s > 0:
                await asyncio.sleep(min(wait_s, PROBE_RETRY_S))
                continue
            await self.check_now()

    async def check_now(self) -> bool:
        """Sends a probe at once, whose result counts as that of a due one. Returns whether the
        engine responds."""
        self._failed_requests = self.runner.counters["failed"]
        failure = await self._probe()
        self._last_probe_at = asyncio.get_running_loop().time()
        await self._set_failure(failure, "the engine responded to a probe")
        return not failure

    def _next_probe_at(self) -> float:
        if self.is_alive and not self._has_failed_request:
            return max(self._last_activity_at, self._last_probe_at) + self.idle_s
        return self._last_probe_at + min(self.idle_s, PROBE_RETRY_S)

    def _update_activity(self, now: float) -> None:
        self._last_activity_at = max(self._last_activity_at, self.runner.last_output_at)
        steps = self._read_steps()
        if steps != self._last_steps:
            self._last_steps, self._last_activity_at = steps, now

    def _read_steps(self) -> int:
        try:
            return sum(load.engine_step for load in self.runner.engine.loads())
        except Exception as error:
            # The next probe checks the engine; without step counts there are more probes.
            log.warning("engine_loads_failed", error=repr(error))
            return self._last_steps

    async def _probe(self) -> str:
        """Sends a probe. Returns the failure, "" for none."""
        self.runner.counters["canaries"] += 1
        reason = await self._find_failure()
        # Steps that the probe itself caused are no sign of activity.
        self._last_steps = self._read_steps()
        self.runner.counters["canaries_failed"] += bool(reason)
        return reason

    async def _find_failure(self) -> str:
        self._hung_probes = [task for task in self._hung_probes if not task.done()]
        if len(self._hung_probes) >= HUNG_PROBES_MAX:
            return f"{len(self._hung_probes)} earlier probes have not ended"
        name = f"probe-{self.runner.counters['canaries']}"
        started_at = asyncio.get_running_loop().time()
        timeout_s = max(self.timeout_s, self.runner.step_limits.measured_s)
        task = self.spawn(self._send_probe(name), name=name, essential=False)
        try:
            await asyncio.wait([task], timeout=timeout_s)
        finally:
            # Not awaited: a task that ignores the cancellation must not block the probe loop.
            task.cancel()
        if not task.done():
            self._hung_probes.append(task)
            if self.runner.last_output_at > started_at:
                return ""  # The engine responds to requests.
            return f"no response within {timeout_s:g} s"
        if task.cancelled():  # by the engine, else it would not be done yet
            return "the engine cancelled the task that reads its stream"
        return task.result()

    async def _send_probe(self, request_id: str) -> str:
        """Generates one token. Returns the failure, "" for none."""
        ctx = GenerateContext(request_id)
        try:
            stream = self.runner.engine.generate(probe_request(self.runner.engine), ctx)
            async with aclosing(validate_stream(stream, request_id=ctx.id)) as outputs:
                async for output in outputs:
                    if output.finish_reason is FinishReason.ERROR:
                        return output.error or "the engine reported an error without a message"
        except (Overloaded, InvalidRequest):
            return ""
        except MeshError as error:
            return error.message
        except Exception as error:
            log.exception("engine_failed", request_id=ctx.id)
            return repr(error)
        return ""

    async def _set_failure(self, failure: str, recovery: str) -> None:
        """Sets the verdict. recovery: why the engine works again, if `failure` is ""."""
        was_alive = self.is_alive
        self.runner.engine_failure = failure[:ENGINE_FAILURE_CHARS_MAX]
        if self.is_alive == was_alive:
            return
        if self.is_alive:
            log.info("engine_recovered", reason=recovery)
        else:
            log.error("engine_probe_failed", reason=failure)
        await self.set_serving(self.is_alive)


def probe_request(
    engine: LLMEngine, default: PreprocessedRequest | None = None
) -> PreprocessedRequest:
    """Returns the request of a probe of this engine, marked as a probe: the engine's own, if it has
    one. Raises InternalError if the engine fails to make it.

    default: for other engines; None: a request for one token.
    """
    if isinstance(engine, ProbedEngine):
        try:
            return replace(engine.probe_request(), is_probe=True)
        except Exception as error:
            raise InternalError(f"probe_request of the engine failed: {error!r}") from error
    return default or PreprocessedRequest(
        token_ids=TokenIds.of([1]),
        stop_conditions=StopConditions(max_tokens=1, ignore_eos=True),
        sampling_options=SamplingOptions(temperature=0.0),
        is_probe=True,
    )

"""The loop of a simulated engine.

The scheduler works in engine time. The loop keeps engine time in step with the clock: it completes
the steps that are due, then reports each sequence once with all its new tokens. An idle loop waits
and wakes no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from worker_svc.engines.sim.scheduler import SimScheduler, SimSequence, Step

# Work per loop turn, in tokens of about a microsecond each.
_TICK_WORK_MAX: Final = 2048
# A step costs about as much as two tokens; sixteen prompt tokens as much as one.
_STEP_WORK_UNITS: Final = 2
_PREFILL_TOKENS_PER_WORK_UNIT: Final = 16
# Steps due within this time are completed now: event loops wake up to a millisecond late.
_EARLY_TOLERANCE_S: Final = 1e-4
# Steps of more sequences continue after a first token: a frame of its own for each would cost a
# tenth of the throughput of 64 streams.
_FIRST_TOKENS_MAX: Final = 8
# Turns of the event loop from a wake-up of a stream to the write of its frame.
_TURNS_TO_SEND: Final = 3


class StepLoop:
    """Runs the steps of one engine. clock, sleep: in seconds.

    count: completed steps. prefill_tokens: computed in them. is_frozen: no step completes.
    """

    def __init__(
        self, clock: Callable[[], float], sleep: Callable[[float], Awaitable[object]]
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._wakeup = asyncio.Event()
        self.count = self.prefill_tokens = 0
        self.is_frozen = False

    def wake(self) -> None:
        """Ends the wait of an idle loop: there may be a step to plan, or something to publish."""
        self._wakeup.set()

    async def run(
        self,
        scheduler: SimScheduler,
        *,
        plan: Callable[[], Step | None],
        on_advanced: Callable[[SimSequence], None],
        publish: Callable[[], None],
    ) -> None:
        """Runs until cancelled. plan: starts the next step. on_advanced: called for each sequence
        with new tokens or an end. publish: reports the changes of the cache."""
        clock = self._clock
        due_at = clock()
        step: Step | None = None
        while True:
            if step is None:
                step = plan()
                due_at += step.duration_s if step else 0.0
            if step is None or self.is_frozen:
                publish()  # changes that were made without a step
                self._wakeup.clear()
                await self._wakeup.wait()
                due_at = max(due_at, clock())
                continue
            if (wait_s := due_at - clock()) > 0:
                await self._sleep(wait_s)
            if not self.is_frozen:
                advanced, step, due_at = self._run_due_steps(scheduler, step, due_at, plan)
                for sequence in advanced:
                    on_advanced(sequence)
                # Tokens leave before more is computed: an accelerator would not delay them.
                for _ in range(_TURNS_TO_SEND):
                    await asyncio.sleep(0)
                publish()

    def _run_due_steps(
        self, scheduler: SimScheduler, due: Step, due_at: float, plan: Callable[[], Step | None]
    ) -> tuple[Iterable[SimSequence], Step | None, float]:
        """Completes steps that are due, within bounds and up to a first token. Returns the
        advanced sequences, the step in flight and its end."""
        until = self._clock() + _EARLY_TOLERANCE_S
        advanced: dict[SimSequence, None] = {}  # an ordered set, for reproducible runs
        work = 0
        has_first_token = False
        step: Step | None = due
        while step and due_at <= until and not has_first_token and work < _TICK_WORK_MAX:
            changed = scheduler.complete(step)
            advanced.update(dict.fromkeys(changed))
            if len(changed) <= _FIRST_TOKENS_MAX:
                has_first_token = any(len(sequence.output) == 1 for sequence in changed)
            self.count += 1
            self.prefill_tokens += step.prefill_tokens
            prefill_work = step.prefill_tokens // _PREFILL_TOKENS_PER_WORK_UNIT
            work += _STEP_WORK_UNITS + len(step.entries) + prefill_work
            step = plan()
            due_at += step.duration_s if step else 0.0
        return advanced, step, due_at

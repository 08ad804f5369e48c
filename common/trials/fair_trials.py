"""Trials of many senders: short ones do not wait for long ones, and senders take turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from common.errors import Overloaded
from common.trials.trial import Trial, TrialExceeded
from common.trials.trial_slots import TrialSlots
from common.trials.trials import Trials

# Most inputs take milliseconds. What takes longer is ended, and repeated among other long ones.
SHORT_CPU_S: Final = 0.1
_SHORT_WALL_S: Final = 1.0
_SLOTS: Final = 2
_WAITING_MAX: Final = 256


class FairTrials:
    """An input waits for at most SHORT_CPU_S of processor time of each other sender before its
    own turn; one that takes longer waits for other long ones only."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._short = TrialSlots(_SLOTS, waiting_max=_WAITING_MAX)
        self._long = TrialSlots(_SLOTS, waiting_max=_WAITING_MAX)

    # Any: JSON.
    async def run(self, trial: Trial, sender: str, deadline_s: float) -> Any:
        """Returns the result of the function. deadline_s: of the wait for a slot, on the loop's
        clock. Raises the errors of `Trials.run`, and Overloaded if other inputs take too long."""
        limits = trial.limits
        if limits.cpu_s > SHORT_CPU_S:
            short = replace(limits, cpu_s=SHORT_CPU_S, wall_s=min(_SHORT_WALL_S, limits.wall_s))
            async with self._short.slot(sender, deadline_s):
                try:
                    return await self._trials.run(replace(trial, limits=short))
                except Overloaded:
                    pass
                except TrialExceeded as error:
                    if not error.is_time:
                        raise
        async with self._long.slot(sender, deadline_s):
            return await self._trials.run(trial)

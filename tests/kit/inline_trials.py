"""Trials in a thread of the test's process, for loops in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

from common.trials.child import find_function
from common.trials.trial import Trial, TrialRefused
from common.trials.trials import Trials


class InlineTrials(Trials):
    """Has no limits."""

    def __init__(self) -> None:
        super().__init__(())

    # Any: JSON.
    async def run(self, trial: Trial) -> Any:
        try:
            return await asyncio.to_thread(find_function(trial.function), *trial.arguments)
        except ValueError as error:
            raise TrialRefused(str(error)) from error

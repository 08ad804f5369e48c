"""Checks whether the choices of one response have its form, in a thread and in bounded time."""

from __future__ import annotations

import asyncio
import time

from frontend_svc.generation.form import ResponseForm
from frontend_svc.text.api_format import ChoiceResult

# Processor time of the check of one choice, and time to wait for the checks of all choices.
CPU_S = 2.0
WAIT_S = 10.0


class FormCheck:
    """The checks of one response. form: None: any. wait_s: for all of its choices."""

    def __init__(self, form: ResponseForm | None, wait_s: float = WAIT_S) -> None:
        self._form = form
        self._left_s = wait_s

    async def problem(self, result: ChoiceResult, raw: str) -> str:
        """Returns what a choice lacks; "" if nothing, or if nothing is known in time: the engine
        has enforced the form.

        raw: text of the choice as the model wrote it.
        """
        if self._form is None or self._left_s <= 0:
            return ""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                return await asyncio.to_thread(_problem, self._form, result, raw)
        except TimeoutError:  # The processor is busy.
            return ""
        finally:
            self._left_s -= time.monotonic() - began


def _problem(form: ResponseForm, result: ChoiceResult, raw: str) -> str:
    """Runs a check for CPU_S of this thread at most."""
    end_s = time.thread_time() + CPU_S
    return form.problem(result, raw, lambda: time.thread_time() >= end_s)

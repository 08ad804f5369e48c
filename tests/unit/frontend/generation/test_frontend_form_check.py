"""How long the choices of a response wait for the check of their form."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from common.request.preprocessed import GuidedDecoding
from frontend_svc.generation.form import ResponseForm
from frontend_svc.generation.form_check import FormCheck
from frontend_svc.text.api_format import ChoiceEnd, ChoiceResult

FORM = ResponseForm(GuidedDecoding(json={"type": "integer"}), None)
RESULT = ChoiceResult(ChoiceEnd("stop"), [])
WAIT_S = 0.1


class _SlowForm(ResponseForm):
    """A form whose check waits until the test ends."""

    is_over = threading.Event()

    def problem(self, choice: ChoiceResult, text: str, is_late: Callable[[], bool]) -> str:
        self.is_over.wait(20.0)
        return "late"


async def test_a_choice_without_its_form_is_named() -> None:
    check = FormCheck(FORM)
    assert await check.problem(RESULT, "7") == ""
    assert "does not match" in await check.problem(RESULT, "seven")
    assert await FormCheck(None).problem(RESULT, "seven") == ""


async def test_all_choices_of_a_response_wait_for_one_limit_together() -> None:
    check = FormCheck(_SlowForm(None, None), WAIT_S)
    began = time.monotonic()
    try:
        assert [await check.problem(RESULT, "") for _ in range(20)] == [""] * 20
    finally:
        _SlowForm.is_over.set()
    # Each choice for itself would wait for 2 s together.
    assert WAIT_S <= time.monotonic() - began < 10 * WAIT_S

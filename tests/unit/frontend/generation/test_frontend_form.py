"""The form of a response: which texts have it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from common.request.preprocessed import GuidedDecoding
from frontend_svc.generation.form import ResponseForm
from frontend_svc.text.api_format import ChoiceEnd, ChoiceResult
from frontend_svc.tools.deltas import Content, Delta, Reasoning

SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": ["text/plain", "text/html"]}, "price": {"type": "number"}},
    "required": ["type", "price"],
    "additionalProperties": False,
}
FORM = ResponseForm(GuidedDecoding(json=SCHEMA), None)
GOOD = '{"type": "text/plain", "price": 1.5}'


def problem(
    form: ResponseForm, text: str, *, is_late: bool = False, deltas: Sequence[Delta] = ()
) -> str:
    return form.problem(ChoiceResult(ChoiceEnd("stop"), list(deltas)), text, lambda: is_late)


@pytest.mark.parametrize(
    ("text", "has_form"),
    [
        ('{"type": "text/plain", "price": 1.5}', True),
        ('{\n  "type":"text/html",\n  "price":2}', True),
        ('{"type": "text\\/plain", "price": 1.5}', True),
        ('{"type": "t\\u0065xt/plain", "price": 1.5}', True),
        ('{"type": "text/xml", "price": 1.5}', False),
        ('{"type": "text/plain"}', False),
        ('{"type": "text/plain", "price": 1.5', False),
    ],
)
def test_a_json_text_has_a_form_by_its_values(text: str, *, has_form: bool) -> None:
    found = problem(FORM, text)
    assert (found == "") == has_form, found


def test_a_long_text_has_its_form() -> None:
    """Each byte of a counted string is a new state of the matcher, whose budget must not end."""
    schema = {"type": "string", "maxLength": 60_000}
    form = ResponseForm(GuidedDecoding(json=schema), None)
    assert problem(form, json.dumps("x" * 60_000)) == ""
    assert problem(form, json.dumps("x" * 60_001)) != ""
    assert problem(form, json.dumps("x" * 100) + " " * 100 + "y") != ""


def test_a_response_that_is_not_checked_in_time_is_passed_on() -> None:
    """The engine enforced the form; the check must not make an error of a valid response."""
    assert problem(FORM, '{"type": 1}', is_late=True) == ""
    assert problem(FORM, '{"type": 1}') != ""


def test_a_check_ends_soon_after_its_time() -> None:
    calls = 0

    def is_late() -> bool:
        nonlocal calls
        calls += 1
        return calls > 3

    form = ResponseForm(GuidedDecoding(json={"type": "string", "maxLength": 60_000}), None)
    stop = ChoiceResult(ChoiceEnd("stop"))
    assert form.problem(stop, json.dumps("x" * 60_001), is_late) == ""
    assert calls == 4


@pytest.mark.parametrize(
    "begin", ["<think>The price is {1.5}.</think>", "The prompt opened it.</think>\n\n"]
)
def test_the_form_may_begin_behind_the_reasoning(begin: str) -> None:
    """Some engines apply the constraint only there. What the client receives as content has it."""
    form = ResponseForm(GuidedDecoding(json=SCHEMA), None, "</think>")
    split: list[Delta] = [Reasoning("The price is {1.5}."), Content(GOOD)]
    assert problem(form, begin + GOOD, deltas=split) == ""
    assert problem(form, f"{begin}{GOOD}}}", deltas=split) != ""
    assert problem(form, begin + GOOD, deltas=[Content(begin + GOOD)]) != ""


def test_the_form_may_contain_the_reasoning() -> None:
    form = ResponseForm(GuidedDecoding(regex="<think>[a-z]+</think>\\n[0-9]+"), None, "</think>")
    assert problem(form, "<think>so</think>\n12") == ""
    assert problem(form, "<think>so</think>\nno") != ""

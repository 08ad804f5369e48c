"""The form of a response: which texts have it."""

from __future__ import annotations

import json

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


def problem(form: ResponseForm, *deltas: Delta) -> str:
    return form.problem(ChoiceResult(ChoiceEnd("stop"), list(deltas)), lambda: False)


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
    found = problem(FORM, Content(text[:9]), Content(text[9:]))
    assert (found == "") == has_form, found


def test_a_long_text_has_its_form() -> None:
    """Each byte of a counted string is a new state of the matcher, whose budget must not end."""
    schema = {"type": "string", "maxLength": 60_000}
    form = ResponseForm(GuidedDecoding(json=schema), None)
    assert problem(form, Content(json.dumps("x" * 60_000))) == ""
    assert problem(form, Content(json.dumps("x" * 60_001))) != ""
    assert problem(form, Content(json.dumps("x" * 100) + " " * 100 + "y")) != ""


def test_a_response_that_is_not_checked_in_time_is_passed_on() -> None:
    """The engine enforced the form; the check must not make an error of a valid response."""
    bad = ChoiceResult(ChoiceEnd("stop"), [Content('{"type": 1}')])
    assert FORM.problem(bad, lambda: True) == ""
    assert FORM.problem(bad, lambda: False) != ""


def test_a_check_ends_soon_after_its_time() -> None:
    calls = 0

    def is_late() -> bool:
        nonlocal calls
        calls += 1
        return calls > 3

    form = ResponseForm(GuidedDecoding(json={"type": "string", "maxLength": 60_000}), None)
    whole = ChoiceResult(ChoiceEnd("stop"), [Content(json.dumps("x" * 60_001))])
    assert form.problem(whole, is_late) == ""
    assert calls == 4


@pytest.mark.parametrize(
    "deltas",
    [
        [Reasoning("The price is "), Reasoning("{1.5}."), Content(GOOD)],
        [Content(f"The prompt opened the reasoning.</think>\n\n{GOOD}")],
        [Content(f"<think>{GOOD}</think>"), Content(GOOD)],
    ],
)
def test_the_form_may_begin_behind_the_reasoning(deltas: list[Delta]) -> None:
    """Some engines apply the constraint only there."""
    form = ResponseForm(GuidedDecoding(json=SCHEMA), None, "</think>")
    assert problem(form, *deltas) == ""
    assert problem(form, *deltas, Content("}")) != ""
    assert problem(form, Content(f"{GOOD}</think>"), Content("and more")) != ""


def test_white_space_behind_the_reasoning_may_be_part_of_the_form() -> None:
    form = ResponseForm(GuidedDecoding(regex="\\n\\n[a-z]+"), None, "</think>")
    assert problem(form, Reasoning("so"), Content("abc")) == ""
    assert problem(form, Content("so</think>\n\nabc")) == ""
    assert problem(form, Content("abc")) != ""


def test_the_echo_of_the_prompt_is_no_part_of_the_form() -> None:
    echoed = ChoiceResult(ChoiceEnd("stop"), [Content("How much? "), Content(GOOD)])
    assert FORM.problem(echoed, lambda: False, echo_chars=len("How much? ")) == ""

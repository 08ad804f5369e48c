"""The form of a response: which texts have it."""

from __future__ import annotations

import json

import pytest

from common.request.preprocessed import GuidedDecoding
from frontend_svc.generation.form import ResponseForm
from frontend_svc.text.api_format import ChoiceEnd, ChoiceResult

SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": ["text/plain", "text/html"]}, "price": {"type": "number"}},
    "required": ["type", "price"],
    "additionalProperties": False,
}
FORM = ResponseForm(GuidedDecoding(json=SCHEMA), None)


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
    problem = FORM.problem(ChoiceResult(ChoiceEnd("stop")), text)
    assert (problem == "") == has_form, problem


def test_a_long_text_has_its_form() -> None:
    """Each byte of a counted string is a new state of the matcher, whose budget must not end."""
    schema = {"type": "string", "maxLength": 60_000}
    form = ResponseForm(GuidedDecoding(json=schema), None)
    stop = ChoiceResult(ChoiceEnd("stop"))
    assert form.problem(stop, json.dumps("x" * 60_000)) == ""
    assert form.problem(stop, json.dumps("x" * 60_001)) != ""
    assert form.problem(stop, json.dumps("x" * 100) + " " * 100 + "y") != ""

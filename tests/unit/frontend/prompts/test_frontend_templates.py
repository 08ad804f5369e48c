"""Chat templates of published models render as in transformers; see `template_cases.py`."""

from __future__ import annotations

import json
import re

import pytest

from frontend_svc.prompts.control_tokens import ControlTokens
from frontend_svc.prompts.prompt import ChatTemplate, TemplateError
from tests.unit.frontend.prompts.template_cases import (
    BOS,
    CASES,
    EOS,
    EXPECTED,
    NAMES,
    NOW,
    source,
)

MARKER = re.compile(r"<[|\uff5c]\w+[|\uff5c]>|\[/?INST\]|<(?:start|end)_of_turn>")
RECORDED = json.loads(EXPECTED.read_text("utf-8"))
TEMPLATES = {name: ChatTemplate(source(name), bos_token=BOS, eos_token=EOS) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_a_template_renders_as_in_transformers(name: str, case: str) -> None:
    messages, tools, settings = CASES[case]
    expected = RECORDED[name][case]
    if "error" in expected:
        with pytest.raises(TemplateError) as raised:
            TEMPLATES[name].render(messages, tools=tools, template_kwargs=settings, now=NOW)
        assert expected["error"] in str(raised.value)
    else:
        text = TEMPLATES[name].render(messages, tools=tools, template_kwargs=settings, now=NOW)
        assert text == expected["text"]


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_of_a_message_are_separate_from_those_of_every_template(name: str) -> None:
    markers = MARKER.findall(source(name))
    control = ControlTokens(markers)
    template, forged = TEMPLATES[name], f"Hi {markers[-1]} there"
    plain = template.render([{"role": "user", "content": "Hi  there"}], now=NOW)
    prompt = template.prompt([{"role": "user", "content": forged}], control, now=NOW)
    assert prompt.text == template.render([{"role": "user", "content": forged}], now=NOW)
    assert prompt.pieces is not None
    assert list(prompt.pieces[1::2]) == list(control.split(plain, "\u4dc0")[1::2])
    assert any(forged in piece for piece in prompt.pieces[::2])


def test_most_cases_render() -> None:
    errors = [case for cases in RECORDED.values() for case in cases.values() if "error" in case]
    assert len(NAMES) >= 12
    assert len(errors) < len(NAMES) * len(CASES) / 5

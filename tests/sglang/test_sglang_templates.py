"""The recorded texts of chat templates are those of the installed transformers."""

from __future__ import annotations

import json

from tests.sglang.record_templates import render_all
from tests.unit.frontend.prompts.template_cases import EXPECTED


def test_the_recorded_texts_are_those_of_transformers() -> None:
    assert render_all() == json.loads(EXPECTED.read_text("utf-8"))

"""outlines with its models of vLLM, SGLang and OpenAI."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import outlines
from cells import KEY, MODEL, URL, Weather, expect_equal, run
from outlines.types import Regex

OPENAI = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
MODELS: list[Any] = [
    make(OPENAI, MODEL) for make in (outlines.from_vllm, outlines.from_sglang, outlines.from_openai)
]


def chat() -> None:
    for model in MODELS:
        assert model("Hello", max_tokens=8)


def json_schema() -> None:
    for model in MODELS:
        Weather.model_validate(json.loads(model("Hello", Weather)))
    for model in MODELS[:2]:  # OpenAI has schemas only
        assert model("Hello", Literal["Bern", "Rome"]) in ("Bern", "Rome")
        expect_equal(len(model("Hello", Regex("[a-c]{3}"))), 3)


run("outlines", chat=chat, json_schema=json_schema)

"""instructor: pydantic models out of responses, in its modes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import instructor
import openai
from cells import HELLO, KEY, MODEL, URL, Weather, first_with, run
from instructor import Mode
from instructor.core import InstructorRetryException

OPENAI = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)


def ask(mode: Mode, response_model: Any, prompt: str = "Hello") -> Any:
    client = instructor.from_openai(OPENAI, mode=mode)
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        response_model=response_model,
        max_retries=0,
    )


def tools() -> None:
    assert isinstance(ask(Mode.TOOLS, Weather), Weather)


def tools_streamed() -> None:
    client: Any = instructor.from_openai(OPENAI, mode=Mode.TOOLS)
    parts = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=HELLO, response_model=Weather, max_retries=0
        )
    )
    Weather.model_validate(parts[-1].model_dump())


def parallel_tools() -> None:
    def calls(prompt: str) -> list[Weather]:
        try:
            return list(ask(Mode.PARALLEL_TOOLS, Iterable[Weather], prompt))
        except InstructorRetryException:  # a response without calls, which `auto` allows
            return []

    first_with(calls, lambda found: len(found) > 1)


def json_schema() -> None:
    assert isinstance(ask(Mode.JSON_SCHEMA, Weather), Weather)


run(
    "instructor",
    tools=tools,
    tools_streamed=tools_streamed,
    parallel_tools=parallel_tools,
    json_schema=json_schema,
)

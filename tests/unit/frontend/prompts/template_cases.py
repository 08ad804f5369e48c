"""Conversations for the chat templates of `templates/`, and what transformers renders for them.

The templates are written after the published forms of their families. `templates/expected.json`
has the text of `apply_chat_template`, or the error, by template and case; it is written by

    .venv-sglang/bin/python -m tests.sglang.record_templates
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "templates"
EXPECTED = FOLDER / "expected.json"
NOW = datetime(2025, 3, 9, 12, tzinfo=UTC)
BOS, EOS = "<s>", "</s>"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
# They print the arguments of calls as text; the others expect an object.
TEXT_ARGUMENTS = {"deepseek_v3"}

# Any, here and below: JSON.
Message = dict[str, Any]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather — now & today — of a <city>, with wind.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "array", "items": {"type": "integer"}},
                "place": {"type": "object", "properties": {"lat": {"type": "number"}}},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(text: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def call(number: int, name: str, **arguments: Any) -> Message:
    text = json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": text}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": text}


ONE_CALL = [
    user("Weather in Zürich?"),
    assistant("", tool_calls=[call(1, "get_weather", city="Zürich", days=[1, 2])]),
    result(1, '{"sky": "<clear> & \'blue\'"}'),
]
# By case: messages, tools, template settings.
CASES: dict[str, tuple[list[Message], list[Any] | None, dict[str, Any]]] = {
    "one turn": ([user("  Hello, <b>world</b> & 'all' — 你好 \n")], None, {}),
    "system": ([system("Be brief. "), user("Hi")], None, {}),
    "turns": (
        [system("Be brief."), user("Hi"), assistant(" Hello. \n"), user("And\n\nnow?")],
        None,
        {},
    ),
    "reasoning in a past turn": (
        [user("Hi"), assistant("<think>\nHm.\n</think>\n\nHello."), user("More")],
        None,
        {},
    ),
    "no thinking": ([user("Hi")], None, {"enable_thinking": False, "thinking": True}),
    "tools": ([system("Be brief."), user("Weather?")], [WEATHER, CLOCK], {}),
    "tools without system": ([user("Weather?")], [WEATHER], {}),
    "one call": (ONE_CALL, [WEATHER], {}),
    "turn after a call": ([*ONE_CALL, assistant("Clear."), user("Thanks")], [WEATHER], {}),
    "calls without tools": (ONE_CALL, None, {}),
    "parallel calls": (
        [
            user("Weather?"),
            assistant(
                "I look.",
                tool_calls=[call(1, "get_weather", city="Bern"), call(2, "clock")],
                reasoning_content="Two calls.",
            ),
            result(1, "Rain"),
            result(2, "12:00"),
        ],
        [WEATHER, CLOCK],
        {},
    ),
    "documents": (
        [user("What?")],
        None,
        {"documents": [{"title": "A", "text": "Alpha"}, {"title": "B", "text": "Beta"}]},
    ),
    "roles that do not alternate": ([user("One"), user("Two")], None, {}),
    "result without a call": ([user("Hi"), result(1, "Rain")], None, {}),
    "effort and date": (
        [user("Hi")],
        None,
        {"reasoning_effort": "high", "date_string": "01 Jan 2001"},
    ),
}


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text("utf-8")

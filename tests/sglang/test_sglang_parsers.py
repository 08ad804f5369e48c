"""Our tool call parsers against SGLang's, on the outputs of the unit tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.frontend.tools.outputs import CASES, TYPES

SGLANG_NAMES = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "glm45": "glm45",
    "llama3_json": "llama3",
    "mistral": "mistral",
    "pythonic": "pythonic",
    "deepseek_v3": "deepseekv3",
    "deepseek_v3_1": "deepseekv31",
    "kimi_k2": "kimi_k2",
}
# Where SGLang's result differs: it loses a call or text, or returns arguments as text.
DIFFERENCES = {
    "an end marker inside of an argument": '{"query": "a \\"b',
    "arguments as JSON text, text after a call": '"arguments": "{}"',
    "a parameter without a schema": "<parameter=flag>True",
    "JSON that is no call": '{"answer": 1}',
    "a second block": "[TOOL_CALLS]search{",
    "a second list": "}][TOOL_CALLS]",
    "a list of calls within text": "Text [f()]",
}


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_parser_returns_what_sglang_returns(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    from sglang.srt.entrypoints.openai.protocol import (  # type: ignore[import-not-found]
        Function,
        Tool,
    )
    from sglang.srt.function_call.function_call_parser import (  # type: ignore[import-not-found]
        FunctionCallParser,
    )

    names = {"get_weather", "search", *(called for called, _ in calls)}
    tools = [
        Tool(
            type="function",
            function=Function(
                name=one, parameters={"type": "object", "properties": TYPES.get(one, {})}
            ),
        )
        for one in names
    ]
    parser = FunctionCallParser(tools, SGLANG_NAMES[name])
    normal_text, found = parser.parse_non_stream(text)
    result = (normal_text, [(call.name, json.loads(call.parameters)) for call in found])
    is_different = any(part in text for part in DIFFERENCES.values())
    assert (result == (content, calls)) != is_different

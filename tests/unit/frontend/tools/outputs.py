"""Outputs of models with tool calls, after the published form of each parser."""

from __future__ import annotations

import json
from typing import Any

TYPES: dict[str, dict[str, Any]] = {
    "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "search": {"query": {"type": "string"}},
}
CITY = {"city": "Paris", "days": 3}
SEARCH = {"query": 'a "b" \\ </tool_call> } ] é'}

# Parser -> outputs of its model: text, content, calls.
OUTPUTS: dict[str, list[tuple[str, str, list[tuple[str, Any]]]]] = {
    "hermes": [
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
            "",
            [("get_weather", CITY)],
        ),
        (
            "Let me look.\n<tool_call>\n"
            '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n<tool_call>\n'
            + json.dumps({"name": "search", "arguments": SEARCH})
            + "\n</tool_call>\n",
            "Let me look.\n",
            [("get_weather", CITY), ("search", SEARCH)],
        ),
        (
            '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}</tool_call>',
            "",
            [("get_weather", CITY)],
        ),
        (
            '<tool_call>{"name": "search", "arguments": "{}"}</tool_call> and text',
            " and text",
            [("search", {})],
        ),
        ("no calls < here <tool", "no calls < here <tool", []),
        ("\n\n", "\n\n", []),
        ("<tool_call>not JSON</tool_call> after", "<tool_call>not JSON</tool_call> after", []),
        ('<tool_call>{"name": "get_wea', '<tool_call>{"name": "get_wea', []),
        ('<tool_call>{"name": "n", "arguments": {}}', "", [("n", {})]),
    ],
    "qwen3_coder": [
        (
            "I check.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            "I check.\n",
            [("get_weather", CITY)],
        ),
        (
            "<tool_call>\n<function=search>\n<parameter=query>\n12\nlines\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=other>\n<parameter=flag>True</parameter>\n</function>\n</tool_call>",
            "",
            [("search", {"query": "12\nlines"}), ("other", {"flag": True})],
        ),
    ],
    "glm45": [
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            "",
            [("get_weather", CITY)],
        ),
        ("Hm.<tool_call>now\n</tool_call>", "Hm.", [("now", {})]),
    ],
    "llama3_json": [
        (
            '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
            "",
            [("get_weather", CITY)],
        ),
        (
            '<|python_tag|>{"name": "search", "parameters": {"query": "x; y"}}; '
            '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
            "",
            [("search", {"query": "x; y"}), ("get_weather", CITY)],
        ),
        ("The answer is {1}.", "The answer is {1}.", []),
        ('{"answer": 1}', '{"answer": 1}', []),
        ("<|py", "<|py", []),
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
            '{"name": "search", "arguments": {"query": "[1]"}}]',
            "",
            [("get_weather", CITY), ("search", {"query": "[1]"})],
        ),
        (
            'Ok. [TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]search{"query": "x"}',
            "Ok. ",
            [("get_weather", CITY), ("search", {"query": "x"})],
        ),
        (
            '[TOOL_CALLS] [{"name": "n", "arguments": {}}][TOOL_CALLS] [{"name": "m", "arguments": {}}]',
            "",
            [("n", {}), ("m", {})],
        ),
    ],
    "pythonic": [
        (
            "[get_weather(city='Paris', days=3), search(query=\"[x]\")]",
            "",
            [("get_weather", CITY), ("search", {"query": "[x]"})],
        ),
        ("[f(a=[1, None], b={'c': True})]", "", [("f", {"a": [1, None], "b": {"c": True}})]),
        ("[1, 2]", "[1, 2]", []),
        ("Text [f()]", "Text [f()]", []),
    ],
    "deepseek_v3": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>search'
            '\n```json\n{"query": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            [("get_weather", CITY), ("search", {"query": "x"})],
        ),
    ],
    "deepseek_v3_1": [
        (
            "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "Paris", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "x"}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "I look.",
            [("get_weather", CITY), ("search", {"query": "x"})],
        ),
    ],
    "kimi_k2": [
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.search:1'
            '<|tool_call_argument_begin|>{"query": "x"}<|tool_call_end|><|tool_calls_section_end|>',
            "",
            [("get_weather", CITY), ("search", {"query": "x"})],
        ),
    ],
}
CASES = [(name, *case) for name, cases in OUTPUTS.items() for case in cases]

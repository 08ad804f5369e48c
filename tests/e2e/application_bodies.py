"""Bodies in the shape in which applications send them with their default settings.

The fields, their types and their order are those of recorded requests of the versions that
`make test-clients` runs; the texts are our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.kit.processes import MODEL

# Any, here and below: JSON.
Body = dict[str, Any]
_CMD: Final = {
    "type": "object",
    "properties": {"cmd": {"type": "string", "description": "A command."}},
    "required": ["cmd"],
    "additionalProperties": False,
}
SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
_CODEX_TURN: Final[list[Body]] = [
    {
        "type": "message",
        "id": "msg_00000000-0000-5000-8000-000000000001",
        "role": "developer",
        "content": [{"type": "input_text", "text": "You write code."}],
    },
    {
        "type": "message",
        "id": "msg_00000000-0000-5000-8000-000000000002",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "<environment>linux</environment>"},
            {"type": "input_text", "text": "List the files."},
        ],
    },
]
_CODEX_RESULTS: Final[list[Body]] = [
    {
        "type": "function_call",
        "status": "completed",
        "id": "fc_0",
        "name": "exec_command",
        "arguments": '{"cmd": "ls"}',
        "call_id": "call_1",
    },
    {
        "type": "function_call",
        "status": "completed",
        "id": "fc_1",
        "name": "wait_agent",
        "namespace": "agents_v1",
        "arguments": "{}",
        "call_id": "call_2",
    },
    {
        "type": "function_call_output",
        "id": "fco_00000000-0000-7000-8000-000000000003",
        "call_id": "call_1",
        "output": "Process exited with code 0\na.txt\n",
    },
    {"type": "function_call_output", "call_id": "", "output": "unsupported call"},
]


def _codex(items: list[Body]) -> Body:
    return {
        "model": MODEL,
        "input": items,
        "tools": [
            {
                "type": "function",
                "name": "exec_command",
                "description": "Runs a command.",
                "strict": False,
                "parameters": _CMD,
            },
            {
                "type": "namespace",
                "name": "agents_v1",
                "description": "Other agents.",
                "tools": [
                    {
                        "type": "function",
                        "name": "wait_agent",
                        "description": "Waits.",
                        "strict": False,
                        "parameters": {"type": "object", "properties": {}},
                    }
                ],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "00000000-0000-7000-8000-000000000004",
        "client_metadata": {
            "session_id": "00000000-0000-7000-8000-000000000004",
            "x-codex-turn-metadata": '{"window_number":0,"sandbox":"seccomp"}',
        },
    }


CLAUDE_CODE: Final[Body] = {
    "model": MODEL,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<reminder>Be brief.</reminder>"},
                {"type": "text", "text": "List.", "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"},
        {"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [{"name": "Bash", "description": "Runs a command.", "input_schema": _CMD}],
    "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
    "max_tokens": 32_000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
QWEN_CODE: Final[Body] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You write code."},
        {"role": "user", "content": [{"type": "text", "text": "List the files."}]},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [
        {
            "type": "function",
            "function": {"name": "shell", "description": "Runs.", "parameters": _CMD},
        }
    ],
    "max_tokens": 8000,
}
GUIDELLM: Final[Body] = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_tokens": 16,
    "ignore_eos": True,
    "stop": None,
}
LM_EVAL: Final[Body] = {
    "model": MODEL,
    "prompt": [list(range(300, 330)), list(range(400, 440))],
    "temperature": 0,
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1234,
    "echo": True,
}
_HI: Final = [{"role": "user", "content": "Where?"}]
OUTLINES_VLLM: Final[Body] = {
    "model": MODEL,
    "messages": _HI,
    "structured_outputs": {"json": SCHEMA},
}
OUTLINES_VLLM_REGEX: Final[Body] = {
    "model": MODEL,
    "messages": _HI,
    "structured_outputs": {"regex": "(Bern|Rome)"},
}
OUTLINES_SGLANG: Final[Body] = {"model": MODEL, "messages": _HI, "regex": "(Bern|Rome)"}
OUTLINES_SGLANG_GRAMMAR: Final[Body] = {
    "model": MODEL,
    "messages": _HI,
    "ebnf": 'root ::= "Bern" | "Rome"',
}
LITELLM_PROXY: Final[Body] = {
    "model": MODEL,
    "messages": _HI,
    "max_tokens": 8,
    "litellm_metadata": {"team": None, "tags": ["a"]},
    "litellm_call_id": "00000000-0000-4000-8000-000000000005",
    "use_beam_search": False,
    "add_generation_prompt": True,
}

BODIES: Final[Mapping[str, tuple[str, Body]]] = {
    "codex": ("responses", _codex(_CODEX_TURN)),
    "codex-results": ("responses", _codex([*_CODEX_TURN, *_CODEX_RESULTS])),
    "claude-code": ("messages?beta=true", CLAUDE_CODE),
    "qwen-code": ("chat/completions", QWEN_CODE),
    "guidellm": ("completions", GUIDELLM),
    "guidellm-chat": (
        "chat/completions",
        {**GUIDELLM, "messages": _HI, "max_completion_tokens": 16} | {"prompt": ...},
    ),
    "lm-eval": ("completions", LM_EVAL),
    "outlines-vllm": ("chat/completions", OUTLINES_VLLM),
    "outlines-vllm-regex": ("chat/completions", OUTLINES_VLLM_REGEX),
    "outlines-sglang": ("chat/completions", OUTLINES_SGLANG),
    "outlines-sglang-grammar": ("chat/completions", OUTLINES_SGLANG_GRAMMAR),
    "litellm-proxy": ("chat/completions", LITELLM_PROXY),
}
"""Path and body of each application; a value of `...` is left out."""

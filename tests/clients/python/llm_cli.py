"""The command line `llm`, configured as its manual describes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cells import (
    HELLO,
    MODEL,
    URL,
    WEATHER_SCHEMA,
    Weather,
    chat_text,
    expect_equal,
    first_with,
    run,
)

HOME = tempfile.TemporaryDirectory()
(Path(HOME.name) / "extra-openai-models.yaml").write_text(
    f"- model_id: {MODEL}\n  model_name: {MODEL}\n  api_base: {URL}\n"
    "  supports_tools: true\n  supports_schema: true\n"
)
FUNCTION = "def add(a: int, b: int) -> int:\n    return a + b\n"


def llm(*arguments: str) -> str:
    done = subprocess.run(
        [Path(sys.executable).parent / "llm", *arguments],
        env=os.environ | {"LLM_USER_PATH": HOME.name, "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def chat() -> None:
    expect_equal(llm("-m", MODEL, "--no-stream", "Hello").rstrip("\n"), chat_text(HELLO))


def streaming() -> None:
    expect_equal(llm("-m", MODEL, "Hello").rstrip("\n"), chat_text(HELLO))


def agent() -> None:
    def ask(prompt: str) -> str:
        return llm(
            "-m", MODEL, "--no-stream", "--functions", FUNCTION, "--chain-limit", "60", prompt
        ) and llm("logs", "-n", "1", "--json")

    logged = first_with(ask, lambda text: bool(json.loads(text)[0].get("tool_results")))
    assert json.loads(logged)[0]["response"] is not None


def json_schema() -> None:
    text = llm("-m", MODEL, "--no-stream", "--schema", json.dumps(WEATHER_SCHEMA), "Hello")
    Weather.model_validate_json(text)


run("llm (command line)", chat=chat, streaming=streaming, agent=agent, json_schema=json_schema)

"""Renders the chat templates of the unit tests with transformers; writes the result.

.venv-sglang/bin/python -m tests.sglang.record_templates
"""

from __future__ import annotations

import json
from typing import Any

from tests.unit.frontend.prompts.template_cases import (
    BOS,
    CASES,
    EOS,
    EXPECTED,
    NAMES,
    NOW,
    TEXT_ARGUMENTS,
    source,
)

Rendered = dict[str, dict[str, dict[str, str]]]


def render_all() -> Rendered:
    """By template and case: {"text"} or {"error"}."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]
    from transformers.utils import chat_template_utils  # type: ignore[import-not-found]

    class Now:
        @staticmethod
        def now() -> Any:
            return NOW

    chat_template_utils.datetime = Now
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token=BOS, eos_token=EOS
    )
    rendered: Rendered = {}
    for name in NAMES:
        for case, (messages, tools, settings) in CASES.items():
            arguments: dict[str, Any] = {
                "chat_template": source(name),
                "tools": tools,
                "add_generation_prompt": True,
                "tokenize": False,
                **settings,
            }
            try:
                text = tokenizer.apply_chat_template(_documented(name, messages), **arguments)
                outcome = {"text": text}
            except Exception as error:  # templates raise several kinds
                outcome = {"error": str(error)}
            rendered.setdefault(name, {})[case] = outcome
    return rendered


def _documented(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as transformers documents them: arguments of calls are objects."""
    if name in TEXT_ARGUMENTS:
        return messages
    copies: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in copies:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return copies


if __name__ == "__main__":
    text = json.dumps(render_all(), ensure_ascii=False, indent=1, sort_keys=True)
    EXPECTED.write_text(text + "\n", "utf-8")
    print(f"wrote {EXPECTED}")

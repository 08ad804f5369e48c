"""Reasoning parsers: forms of models, prompts that open or close the reasoning, every split."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from frontend_svc.text.detokenizer import Detokenizer, Vocabulary
from frontend_svc.tools.reasoning import REASONING_FORMATS, ReasoningParser
from worker_svc.engines.sim.config import SIM_MODEL_DIR

# Parser, end of the prompt, text, reasoning, answer.
CASES = [
    ("qwen3", "", "<think>\nHm, 2 < 3.\n</think>\n\nYes.", "Hm, 2 < 3.\n", "Yes."),
    ("qwen3", "", "No reasoning.", "", "No reasoning."),
    ("qwen3", "", "  <thin air", "", "  <thin air"),
    ("qwen3", "<think>\n", "Hm.</think>Yes. <think>", "Hm.", "Yes. <think>"),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("qwen3", "", "<think>cut of", "cut of", ""),
    ("qwen3", "", "<think>cut </thi", "cut </thi", ""),
    ("qwen3", "", "<think></think>Yes.", "", "Yes."),
    ("qwen3", "", "", "", ""),
    ("deepseek_r1", "", "Hm.\n</think>\n\nYes.", "Hm.\n", "Yes."),
    ("deepseek_r1", "<think>\n", "Hm.</think>", "Hm.", ""),
    ("deepseek_r1", "", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek_r1", "</think>", "Yes.", "", "Yes."),
    ("kimi", "", "◁think▷Hm.◁/think▷Yes.", "Hm.", "Yes."),
    (
        "granite",
        "",
        "Here is my thought process: Hm. Here is my response: Yes.",
        "Hm. ",
        "Yes.",
    ),
]


def parse(name: str, prompt_end: str, pieces: list[str]) -> tuple[str, str]:
    reasoning_format = REASONING_FORMATS[name]
    starts_inside = reasoning_format.starts_inside(prompt_end)
    parser = ReasoningParser(reasoning_format, starts_inside=starts_inside)
    parts = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return "".join(one.reasoning for one in parts), "".join(one.answer for one in parts)


@pytest.mark.parametrize(("name", "prompt_end", "text", "reasoning", "answer"), CASES)
def test_reasoning_and_answer_are_separated_at_every_split(
    name: str, prompt_end: str, text: str, reasoning: str, answer: str
) -> None:
    assert parse(name, prompt_end, [text]) == (reasoning, answer)
    assert parse(name, prompt_end, list(text)) == (reasoning, answer)
    for first in range(len(text)):
        for second in range(first, len(text), 5):
            pieces = [text[:first], text[first:second], text[second:]]
            assert parse(name, prompt_end, pieces) == (reasoning, answer)


def test_markers_that_are_special_tokens_have_a_text_for_the_parser() -> None:
    raw = (SIM_MODEL_DIR / "tokenizer.json").read_bytes()
    vocabulary = Vocabulary.from_tokenizer_json(raw)
    tokenizer = Tokenizer.from_buffer(raw)
    ids = tokenizer.encode("a<|im_start|>b<|im_end|>c", add_special_tokens=False).ids
    shown = vocabulary.showing(("<|im_start|>", "<think>"))
    assert "".join(Detokenizer(shown).feed(ids)) == "a<|im_start|>bc"
    assert "".join(Detokenizer(vocabulary).feed(ids)) == "abc"
    assert vocabulary.showing(("<think>",)) is vocabulary

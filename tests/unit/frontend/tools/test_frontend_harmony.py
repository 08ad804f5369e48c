"""Harmony messages of gpt-oss: reasoning, calls and answers at every split."""

from __future__ import annotations

import pytest

from frontend_svc.tools.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from frontend_svc.tools.harmony import HarmonyParser

# Text, reasoning, content, calls. The model's last end marker is an EOS token, without text.
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "<|channel|>analysis<|message|>2 < 3<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "2 < 3",
        "Yes.",
        [],
    ),
    (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris"}',
        "Look.",
        "",
        [("get_weather", '{"city":"Paris"}')],
    ),
    (
        "<|channel|>commentary<|message|>I call two.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.a<|constrain|>json<|message|>{}<|call|><|start|>assistant to=functions.b"
        "<|channel|>commentary json<|message|>{}<|call|>",
        "",
        "I call two.",
        [("a", "{}"), ("b", "{}")],
    ),
    ('{"json": "<|"}', "", '{"json": "<|"}', []),
    ("<|chan", "", "<|chan", []),
    ("<|channel|>analysis<|message|>cut of", "cut of", "", []),
    ("", "", "", []),
]


def fold(deltas: list[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        match delta:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                calls[index] = (calls[index][0], calls[index][1] + text)
    return reasoning, content, calls


def parse(pieces: list[str], *, is_single: bool = False) -> list[Delta]:
    parser = HarmonyParser(is_single=is_single)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    assert parser.calls == len(fold(deltas)[2])
    return deltas


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
def test_messages_are_separated_at_every_split(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert fold(parse([text])) == (reasoning, content, calls)
    assert fold(parse(list(text))) == (reasoning, content, calls)
    for split in range(len(text)):
        assert fold(parse([text[:split], text[split:]])) == (reasoning, content, calls)


def test_a_single_call_ends_the_response() -> None:
    text = CASES[2][0]
    assert fold(parse([text], is_single=True))[2] == [("a", "{}")]
    assert fold(parse(list(text), is_single=True))[2] == [("a", "{}")]

"""How much a tokenizer may expand a text, by its file."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from frontend_svc.prompts.expansion import expansion_max

# The characters that Unicode's forms expand most.
WORST = "\ufdfa\u1f82\u0390\u00df\ufb03\u0130"


# Any: JSON.
def replace(old: str, new: str, kind: str = "String") -> Any:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def sequence(*steps: Any) -> Any:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


@pytest.mark.parametrize(
    ("spec", "factor"),
    [
        ({}, 1),
        ({"normalizer": None, "pre_tokenizer": {"type": "ByteLevel"}}, 4),
        ({"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "ByteLevel"}}, 16),
        (sequence({"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")), 2),
        (sequence(replace("``", '"'), {"type": "NFKD"}, {"type": "Lowercase"}), 18),
        (sequence(*[replace("a", "a" * 10)] * 9), 10**9),
        (sequence(replace(" {2,}", " ", "Regex")), 3),
        (sequence({"type": "NFKD"}, replace("\u0635", "\ufdfa"), {"type": "NFKC"}), 18 * 18),
        (sequence({"type": "New"}), math.inf),
    ],
)
def test_the_factors_of_all_steps_are_multiplied(spec: Any, factor: float) -> None:
    assert expansion_max(spec) == factor


@pytest.mark.parametrize(
    "step",
    [
        normalizers.NFC(),
        normalizers.NFD(),
        normalizers.NFKC(),
        normalizers.NFKD(),
        normalizers.Lowercase(),
        normalizers.BertNormalizer(),
        normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]),
        normalizers.Replace("\u00df", "abc"),
        normalizers.Replace(Regex("\u00df"), "abc"),
        normalizers.Replace(Regex("x*"), "abc"),
        normalizers.Prepend("abc"),
    ],
    ids=repr,
)
def test_no_step_of_the_library_expands_more(step: Any) -> None:
    spec = {"normalizer": json.loads(step.__getstate__())}
    for character in WORST:
        assert len(step.normalize_str(character)) <= expansion_max(spec)


def test_bytes_of_bytes_expand_by_two() -> None:
    once = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    twice = pre_tokenizers.Sequence([once, once])
    for count, step in ((1, once), (2, twice)):
        steps = [{"type": "ByteLevel"}] * count
        spec = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
        pieces = step.pre_tokenize_str("\U0001f600")
        assert sum(len(piece) for piece, _ in pieces) <= expansion_max(spec)

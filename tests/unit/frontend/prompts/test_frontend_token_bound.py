"""Lower bound on the tokens of a text: never above the tokenizer's count, or None."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

import worker_svc
from common.errors import PromptTooLong
from frontend_svc.openai.body.parsing import parse_chat, parse_completion
from frontend_svc.openai.body.preprocessing import check_prompt_length
from frontend_svc.prompts.token_bound import max_bytes_per_token

RAW = (Path(worker_svc.__file__).parent / "engines/sim/model" / "tokenizer.json").read_text("utf-8")
# The worst case of NFC: seven bytes become two.
SHRINKS = "\u1fbe\u0308\u0301"


def byte_level(normalizer: Any = None, *added: AddedToken) -> Tokenizer:
    tokenizer = Tokenizer.from_str(RAW)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    return tokenizer


def fallback() -> Tokenizer:
    """Like Llama's: spaces are ▁, unknown text is bytes; long tokens of ▁."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    pieces = ["▁", "▁▁", "▁▁▁▁", "a", "aa", "é"]
    vocab |= {piece: 256 + place for place, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("a", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


BOUNDED = {
    "byte-level": byte_level(),
    "byte-level, NFC": byte_level(normalizers.NFC()),
    "byte-level, long added token": byte_level(None, AddedToken("日本" * 20)),
    "fallback": fallback(),
}
RUNS = [SHRINKS, " ", "\n", "日本" * 20, "aaaa", "▁▁▁▁", "<|im_start|>", "\u212a"]
texts = st.lists(st.text(max_size=8) | st.sampled_from([one * 4 for one in RUNS]), max_size=12).map(
    "".join
)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_the_bound(name: str) -> None:
    tokenizer = BOUNDED[name]
    most = max_bytes_per_token(tokenizer.to_str())
    assert most is not None

    @settings(max_examples=100, deadline=None)
    @given(text=texts)
    def holds(text: str) -> None:
        assert len(tokenizer.encode(text).ids) * most >= len(text.encode())

    holds()


def test_the_bound_is_the_longest_token() -> None:
    assert max_bytes_per_token(RAW) == max(map(len, json.loads(RAW)["model"]["vocab"]))
    added = byte_level(None, AddedToken("日本" * 20))
    assert max_bytes_per_token(added.to_str()) == 6 * 20
    assert max_bytes_per_token(fallback().to_str()) == len("▁▁▁▁".encode())


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    spec = json.loads(RAW)
    change(spec)
    return json.dumps(spec)


LOSING: dict[str, Callable[[dict[str, Any]], object]] = {
    "a normalizer that strips": lambda s: s.update(normalizer={"type": "Strip"}),
    "a normalizer with a pattern": lambda s: s.update(
        normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}
    ),
    "a normalizer that shortens": lambda s: s.update(
        normalizer={"type": "Replace", "pattern": {"String": "  "}, "content": " "}
    ),
    "one of several normalizers": lambda s: s.update(
        normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}
    ),
    "a split that removes": lambda s: s.update(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed"},
                s["pre_tokenizer"],
            ],
        }
    ),
    "a split by words": lambda s: s.update(pre_tokenizer={"type": "Whitespace"}),
    "no pre-tokenizer and no fallback": lambda s: s.update(pre_tokenizer=None),
    "a byte without a token": lambda s: s["model"]["vocab"].pop("Ġ"),
    "another kind of model": lambda s: s["model"].update(type="WordLevel"),
    "an added token that absorbs spaces": lambda s: s["added_tokens"][0].update(rstrip=True),
    "tokens with a prefix inside words": lambda s: s["model"].update(
        continuing_subword_prefix="##"
    ),
    "an unknown format": lambda s: s.update(model=[]),
}


@pytest.mark.parametrize("name", LOSING)
def test_a_tokenizer_that_may_lose_text_has_no_bound(name: str) -> None:
    assert max_bytes_per_token(changed(LOSING[name])) is None


def test_a_tokenizer_that_loses_text_violates_a_bound() -> None:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert len(tokenizer.encode("a" + " " * 1000).ids) == 1
    assert max_bytes_per_token(tokenizer.to_str()) is None


@pytest.mark.slow
def test_nfc_shrinks_no_text_by_more_than_a_factor_of_four() -> None:
    longest: dict[str, int] = {}  # decomposed -> bytes of its longest character
    for point in (*range(0xD800), *range(0xE000, sys.maxunicode + 1)):
        apart = unicodedata.normalize("NFD", chr(point))
        longest[apart] = max(longest.get(apart, 0), len(chr(point).encode()))
    worst = 0.0
    for apart in longest:
        most = [0] + [-1] * len(apart)  # composed bytes -> bytes of the longest text
        for end in range(1, len(apart) + 1):
            for start in range(end):
                part = longest.get(apart[start:end])
                if part is not None and most[start] >= 0:
                    most[end] = max(most[end], most[start] + part)
        worst = max(worst, most[-1] / len(unicodedata.normalize("NFC", apart).encode()))
    assert worst == len(SHRINKS.encode()) / len(unicodedata.normalize("NFC", SHRINKS).encode())
    assert worst <= 4


def test_a_far_too_long_prompt_is_refused_like_a_tokenized_one() -> None:
    chat = parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}')
    text = parse_completion(b'{"model": "m", "prompt": "hi"}')
    check_prompt_length(chat, 9, 10)
    check_prompt_length(chat, 10**9, 0)  # the context is unknown
    with pytest.raises(PromptTooLong, match="at least 10 tokens") as refused:
        check_prompt_length(chat, 10, 10)
    assert refused.value.field == "messages"
    with pytest.raises(PromptTooLong, match="of the prompt") as refused:
        check_prompt_length(text, 11, 10)
    assert refused.value.field == "prompt"

"""Encodes text to token ids: with fastokens where it equals the Hugging Face tokenizer, else with
the latter.

fastokens needs a thirtieth of the time and releases the GIL. It refuses tokenizers with parts that
it lacks. What it accepts is compared with the Hugging Face tokenizer on CORPUS when a model is
loaded; a model with a difference uses the Hugging Face tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import fastokens
from tokenizers import Tokenizer

# (text, whether to add the special tokens of the tokenizer's post-processor) -> token ids.
Encode: TypeAlias = Callable[[str, bool], list[int]]

# Memory for the ids of text segments that the turns of a conversation repeat.
SEGMENT_CACHE_BYTES = 16 << 20
ADDED_TOKENS_CHECKED = 64
CORPUS = (
    "",
    " ",
    "Hello, world! It's 3.14159 o'clock, isn't it? WE'LL SEE; they've said I'm 'RE.",
    "  leading and trailing   \n\n\n  \t\t mixed \r\n white\u00a0space\u2003and\u3000more\x0b\x0c ",
    'def f(x):\n    """Doc."""\n    return {"a": [1, 2.5e-10, None], \'b\': x ** 2}  # note\n',
    "https://example.org/a?b=c&d=%20e#f ~/path/to/file.txt user@example.org #tag @name",
    "1234567890 12 345 6789 0x1F 1_000_000 \u0661\u0662\u0663 \u00bd \u2460",
    "\u00c4\u00d6\u00dc \u00e4\u00f6\u00fc\u00df e\u0301 \u00e9 \u01c5 \ufb01 \u0130\u0131 \u212a",
    "\u4e2d\u6587\u6c49\u5b57 \u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea \u0e44\u0e17\u0e22",
    "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\U0001f44d\U0001f3fd \u2019s \u201cquoted\u201d",
    "\u200b\u200d\ufeff\u202e\u00ad\u0000\u0001\u001b\u007f\ufffd\U0010ffff",
    "a" * 300 + "!" * 100 + "\n" * 50 + " " * 70,
    "CamelCase snake_case kebab-case SCREAMING mIxEd123abc 'quoted' \"double\" `code`",
)


def build_encoder(tokenizer_json: bytes, reference: Tokenizer) -> tuple[Encode, str]:
    """The encoder of a model, and why it is not fastokens ("": it is). reference: the Hugging Face
    tokenizer of the same file, without truncation and padding."""

    def encode_by_reference(text: str, special_tokens: bool) -> list[int]:
        batch = reference.encode_batch_fast([text], add_special_tokens=special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    try:
        fast = fastokens.Tokenizer.from_json_str(tokenizer_json.decode())
    except Exception as error:  # the library raises several kinds
        return encode_by_reference, str(error)
    fast.no_truncation()
    fast.no_padding()
    fast.enable_segment_cache(SEGMENT_CACHE_BYTES)

    def encode(text: str, special_tokens: bool) -> list[int]:
        ids: list[int] = fast.encode(text, add_special_tokens=special_tokens).ids
        return ids

    for text in _checked_texts(reference):
        for special_tokens in (False, True):
            if encode(text, special_tokens) != encode_by_reference(text, special_tokens):
                return encode_by_reference, f"other token ids for {text[:40]!r}"
    return encode, ""


def _checked_texts(reference: Tokenizer) -> Iterator[str]:
    yield from CORPUS
    added = reference.get_added_tokens_decoder().values()
    for number, token in zip(range(ADDED_TOKENS_CHECKED), added, strict=False):
        other = CORPUS[number % len(CORPUS)]
        yield f"a {token.content}b{token.content} {token.content[:-1]}{other}"

"""Encodes text to token ids: with fastokens where it equals the Hugging Face tokenizer, else with
the latter.

fastokens needs a thirtieth of the time and releases the GIL. It refuses tokenizers with parts that
it lacks. What it accepts is compared with the Hugging Face tokenizer on CORPUS when a model is
loaded; a model with a difference uses the Hugging Face tokenizer.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import fastokens
from tokenizers import AddedToken, Tokenizer

from common.errors import InvalidRequest
from frontend_svc.prompts.control_tokens import ControlTokens, is_control_token

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
    """Returns the encoder of a model, and why it is not fastokens ("": it is). reference: the
    Hugging Face tokenizer of the same file, without truncation and padding."""

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


def find_control_tokens(tokenizer: Tokenizer) -> ControlTokens:
    """Returns the control tokens of a tokenizer."""
    added = tokenizer.get_added_tokens_decoder().values()
    return ControlTokens(
        token.content
        for token in added
        if is_control_token(token.content, is_special=token.special)
    )


class PieceEncoder:
    """Encodes prompts whose text contains control tokens that are not the template's.

    Its tokenizer does not match control tokens in text. It matches a private text for each of them,
    with a random part that clients do not know, in place of the template's. So the ids are those of
    the whole prompt, as if the text were any other. It is built for the first such prompt: most
    frontends never receive one.
    """

    def __init__(self, tokenizer_json: bytes, control_tokens: ControlTokens) -> None:
        self._tokenizer_json = tokenizer_json
        self._contents = control_tokens.contents
        key = secrets.token_hex(8)
        self._private_texts = {
            content: f"\U000f0000{key}.{number}\U000f0001"
            for number, content in enumerate(self._contents)
        }
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        # Id of a private text -> id of its control token.
        self._ids: dict[int, int] = {}

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Returns the token ids of text and control token by turns, from text to text. Takes a
        second the first time, and may run in any thread. Raises InvalidRequest if the tokenizer
        has no other tokens for the text of a control token."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._build()
        text = "".join(
            self._private_texts[piece] if number % 2 else piece
            for number, piece in enumerate(pieces)
        )
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        controls = [token for token in ids if token in self._ids]
        if len(controls) != len(pieces) // 2 or not set(self._ids.values()).isdisjoint(ids):
            text = "Invalid 'messages': this model cannot read its control tokens as text."
            raise InvalidRequest(text, "messages")
        return [self._ids.get(token, token) for token in ids]

    def _build(self) -> Tokenizer:
        spec = json.loads(self._tokenizer_json)
        for token in spec["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self._private_texts
        tokenizer = Tokenizer.from_str(json.dumps(spec))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        flags = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        tokenizer.add_tokens(
            [
                AddedToken(
                    private_text,
                    lstrip=flags[content].lstrip,
                    rstrip=flags[content].rstrip,
                    normalized=False,
                )
                for content, private_text in self._private_texts.items()
            ]
        )
        vocab = tokenizer.get_vocab()
        for content, private_text in self._private_texts.items():
            self._ids[vocab[private_text]] = vocab[content]
        tokenizer.encode_special_tokens = True
        return tokenizer


def _checked_texts(reference: Tokenizer) -> Iterator[str]:
    yield from CORPUS
    added = reference.get_added_tokens_decoder().values()
    for number, token in zip(range(ADDED_TOKENS_CHECKED), added, strict=False):
        other = CORPUS[number % len(CORPUS)]
        yield f"a {token.content}b{token.content} {token.content[:-1]}{other}"

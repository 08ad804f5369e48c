"""Converts token ids to text while they arrive, one piece per token (pure).

Two kinds of tokenizer are decoded from a table built once per model (`Vocabulary`): byte-level
BPE, and byte-fallback (as in SentencePiece: ``▁`` is a space, ``<0xNN>`` is a byte). For any other
kind `Vocabulary` raises UnsupportedTokenizer; `StreamDetokenizer`, which calls the tokenizer,
decodes it.

Invariants of `Detokenizer`:

- ``feed(ids)`` returns exactly one piece per id. A character that spans several tokens is in the
  piece of the token that completes it; the tokens before it have the piece "".
- Byte-level: all pieces and ``finish()`` joined equal ``tokenizer.decode(all ids)``, for every
  sequence, also with invalid UTF-8.
- Byte-fallback: the same, with one exception that no stream can avoid. If any byte of a run of byte
  tokens is invalid, the tokenizer's decoder turns *every* byte of the run into U+FFFD, including
  complete characters. Here the complete characters before the first invalid byte have already been
  sent; every byte after them is one U+FFFD, as in the tokenizer's decoder.
- Unknown ids have no text, as in ``tokenizer.decode``; for the output of a worker (`is_strict`)
  they are an error, since the text would lack what the model has written.
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from common.errors import INVALID_OUTPUT, InternalError

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so this many tokens that end in U+FFFD are not an incomplete
# character: the text is invalid UTF-8, or contains a literal U+FFFD.
WITHHELD_TOKENS_MAX = 8

# As accepted by Rust's u8::from_str_radix, which the tokenizer's decoder calls.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>")


class UnsupportedTokenizer(ValueError):
    """A table cannot decode this tokenizer; the message names the unsupported part."""


@dataclass(frozen=True, slots=True)
class _Decoder:
    """The decoder section of a tokenizer.json, as far as a table supports it."""

    is_byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    strip: str = ""  # character removed from the start of the text, ...
    strip_count: int = 0  # ... at most this many times


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Bytes and texts of all token ids, shared by all requests of a model."""

    is_byte_level: bool
    """Whether the tokenizer is byte-level, else byte-fallback."""

    raw: Mapping[int, bytes]
    """Bytes of each id."""

    texts: Mapping[int, str]
    """Texts of the ids that are complete characters; "" for special tokens. The text of a missing
    id depends on its neighbours, or the id is unknown."""

    special_ids: frozenset[int]

    fallback_bytes: frozenset[int]
    """Ids that are one byte of a byte-fallback tokenizer."""

    strip: str
    """Character removed from the start of a text."""

    strip_count: int
    """How often `strip` is removed at most."""

    @classmethod
    def from_tokenizer_json(cls, raw: str | bytes) -> Vocabulary:
        """Reads the text of a `tokenizer.json`. Raises UnsupportedTokenizer if it is not one, or if
        its decoder is neither byte-level nor byte-fallback."""
        spec = _parse_spec(raw)
        decoder = _read_decoder(spec.get("decoder"))
        try:
            tokens, special_contents = _read_tokens(spec)
            table, fallback_ids = _read_bytes(tokens, decoder)
        except (LookupError, TypeError, AttributeError, UnicodeError) as error:
            raise UnsupportedTokenizer(f"vocab or added_tokens: {error!r}") from error
        special = frozenset(i for i, token in tokens.items() if token in special_contents)
        return cls(
            is_byte_level=decoder.is_byte_level,
            raw=table,
            texts=dict(_complete_texts(table)) | dict.fromkeys(special, ""),
            special_ids=special,
            fallback_bytes=fallback_ids,
            strip=decoder.strip,
            strip_count=decoder.strip_count,
        )

    def showing(self, markers: Container[str]) -> Vocabulary:
        """Returns the vocabulary in which special tokens with these contents have a text."""
        shown = {
            token_id: self.raw[token_id].decode(errors="replace") for token_id in self.special_ids
        }
        shown = {token_id: text for token_id, text in shown.items() if text in markers}
        if not shown:
            return self
        special_ids = self.special_ids.difference(shown)
        return replace(self, texts={**self.texts, **shown}, special_ids=special_ids)


class Detokenizer:
    """Converts the ids of one response to text; see the module for its invariants. is_strict:
    whether an unknown id raises InternalError."""

    def __init__(self, vocabulary: Vocabulary, *, is_strict: bool = False) -> None:
        self._vocabulary = vocabulary
        self._is_strict = is_strict
        self._lookup: Callable[[int], str] = vocabulary.texts.__getitem__
        self._pending = b""  # bytes of an incomplete character
        # Inside a run of byte tokens with an invalid byte (byte-fallback).
        self._in_invalid_run = False
        self._strip_left = vocabulary.strip_count
        self._is_stateless = not self._strip_left  # no token depends on the tokens before it

    def feed(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds, one piece per token, "" if it adds none yet."""
        if not self._is_stateless:
            return self._feed_stateful(token_ids)
        try:  # the common case: one dict lookup per token
            return [*map(self._lookup, token_ids)]
        except KeyError:  # a token that depends on its neighbours, or is unknown
            return self._feed_stateful(token_ids)

    def finish(self) -> str:
        """Returns the rest after the last token: U+FFFD for bytes of an incomplete character."""
        pending, self._pending = self._pending, b""
        self._in_invalid_run = False
        if self._vocabulary.is_byte_level:
            # One U+FFFD per maximal invalid part (WHATWG).
            return pending.decode("utf-8", "replace")
        return REPLACEMENT * len(pending)  # one U+FFFD per byte

    def _feed_stateful(self, token_ids: Sequence[int]) -> list[str]:
        is_byte_level = self._vocabulary.is_byte_level
        join = self._join_byte_level if is_byte_level else self._join_fallback
        pieces = []
        for token_id in token_ids:
            text = self._vocabulary.texts.get(token_id)
            if text is None or self._pending or self._in_invalid_run:
                # A skipped or unknown token does not end the character around it.
                is_special = token_id in self._vocabulary.special_ids
                raw = None if is_special else self._vocabulary.raw.get(token_id)
                if raw is None and not is_special and self._is_strict:
                    raise _unknown_token(token_id)
                text = "" if raw is None else join(token_id, raw)
            pieces.append(text)
        if self._strip_left:
            self._strip_start(pieces)
        self._is_stateless = not (self._pending or self._in_invalid_run or self._strip_left)
        return pieces

    def _join_byte_level(self, _token_id: int, raw: bytes) -> str:
        joined = self._pending + raw
        decoded, consumed = utf_8_decode(joined, "replace", False)
        self._pending = joined[consumed:]
        return decoded

    def _join_fallback(self, token_id: int, raw: bytes) -> str:
        if token_id in self._vocabulary.fallback_bytes:
            return self._append_run_byte(raw)
        return self.finish() + raw.decode()

    def _append_run_byte(self, byte: bytes) -> str:
        if self._in_invalid_run:
            return REPLACEMENT
        joined = self._pending + byte
        try:
            decoded, consumed = utf_8_decode(joined, "strict", False)
        except UnicodeDecodeError:
            self._in_invalid_run = True
            self._pending = b""
            return REPLACEMENT * len(joined)
        self._pending = joined[consumed:]
        return decoded

    def _strip_start(self, pieces: list[str]) -> None:
        character = self._vocabulary.strip
        for index, piece in enumerate(pieces):
            remaining = piece
            while remaining and self._strip_left:
                if remaining[0] == character:
                    remaining = remaining[1:]
                    self._strip_left -= 1
                else:
                    self._strip_left = 0
            pieces[index] = remaining
            if not self._strip_left:
                return


class TokenDecoder(Protocol):
    """The method of `tokenizers.Tokenizer` that StreamDetokenizer calls."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class StreamDetokenizer:
    """The interface of `Detokenizer` for any tokenizer, at about a microsecond per token. Decodes a
    window with and without the new tokens, and returns the difference once it does not end in
    U+FFFD, or after `WITHHELD_TOKENS_MAX` tokens. (`DecodeStream` of `tokenizers` is similar and
    faster, but cannot return withheld text at the end, and withholds without limit.) Exact if the
    text is valid UTF-8 and the decoding of a window does not depend on the text before it.
    skip_special_tokens: whether they have no text. ids_below: larger ids raise InternalError; None:
    they have no text."""

    def __init__(
        self,
        tokenizer: TokenDecoder,
        *,
        skip_special_tokens: bool = True,
        ids_below: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._ids_below = ids_below
        self._skip_special_tokens = skip_special_tokens
        self._prefix_ids: list[int] = []  # the last tokens with returned text
        self._prefix_text = ""
        self._withheld_ids: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds, one piece per token, "" if it adds none yet."""
        if self._ids_below is not None and (largest := max(token_ids)) >= self._ids_below:
            raise _unknown_token(largest)
        return [self._step(token_id) for token_id in token_ids]

    def finish(self) -> str:
        """Returns the rest after the last token."""
        return self._release(self._window_text()) if self._withheld_ids else ""

    def _step(self, token_id: int) -> str:
        self._withheld_ids.append(token_id)
        window = self._window_text()
        incomplete = len(window) <= len(self._prefix_text) or window.endswith(REPLACEMENT)
        if incomplete and len(self._withheld_ids) < WITHHELD_TOKENS_MAX:
            return ""
        return self._release(window)

    def _window_text(self) -> str:
        return self._decode(self._prefix_ids + self._withheld_ids)

    def _release(self, window: str) -> str:
        piece = window[len(self._prefix_text) :]
        if piece:
            # Tokens without text of their own (a lone "▁") need older ones as context.
            context = self._prefix_ids + self._withheld_ids
            withheld_text = self._decode(self._withheld_ids)
            self._prefix_ids = (
                self._withheld_ids if withheld_text else context[-WITHHELD_TOKENS_MAX:]
            )
            self._prefix_text = withheld_text or self._decode(self._prefix_ids)
        self._withheld_ids = []
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)


def _unknown_token(token_id: int) -> InternalError:
    text = f"the worker sent token id {token_id}, which the model's tokenizer does not have"
    return InternalError(text, reason=INVALID_OUTPUT)


def _parse_spec(raw: str | bytes) -> dict[str, Any]:
    # Any: a tokenizer.json is free-form; each function below checks the part it reads.
    try:
        spec = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UnsupportedTokenizer(f"tokenizer.json is not JSON: {error}") from error
    if not isinstance(spec, dict):
        raise UnsupportedTokenizer("tokenizer.json is not a JSON object")
    return spec


def _read_decoder(spec: Any) -> _Decoder:
    steps = _decoder_steps(spec)
    # The steps process tokens until Fuse joins them, so their order matters.
    order = " ".join(str(step.get("type")) for step in steps)
    if re.fullmatch(r"ByteLevel( Fuse)?", order):
        return _Decoder(is_byte_level=True)
    if not re.fullmatch(r"(Replace )*ByteFallback( Fuse( Strip)?)?", order):
        text = f"decoder: {order} is neither ByteLevel nor Replace, ByteFallback, Fuse, Strip"
        raise UnsupportedTokenizer(text)
    replacements = tuple(_read_replacement(step) for step in steps if step["type"] == "Replace")
    strip, strip_count = _read_strip(steps[-1]) if order.endswith("Strip") else ("", 0)
    return _Decoder(False, replacements, strip, strip_count)


def _decoder_steps(spec: Any) -> list[dict[str, Any]]:
    if not isinstance(spec, dict):
        raise UnsupportedTokenizer("decoder: missing")
    steps = spec.get("decoders", []) if spec.get("type") == "Sequence" else [spec]
    if not steps or not all(isinstance(step, dict) for step in steps):
        raise UnsupportedTokenizer("decoder: the sequence is empty or not a list of objects")
    return list(steps)


def _read_replacement(step: dict[str, Any]) -> tuple[str, str]:
    pattern = step.get("pattern")
    old = pattern.get("String") if isinstance(pattern, dict) else None
    new = step.get("content")
    if not isinstance(old, str) or not old or not isinstance(new, str):
        raise UnsupportedTokenizer(
            f"decoder: Replace with a pattern that is not a string: {pattern}"
        )
    return old, new


def _read_strip(step: dict[str, Any]) -> tuple[str, int]:
    content, start, stop = step.get("content"), step.get("start"), step.get("stop")
    if not isinstance(content, str) or len(content) != 1 or not isinstance(start, int):
        raise UnsupportedTokenizer(f"decoder: Strip without a character and a count: {step}")
    if stop != 0:
        raise UnsupportedTokenizer("decoder: Strip at the end of the text cannot be streamed")
    return content, start


def _read_tokens(spec: dict[str, Any]) -> tuple[dict[int, str], frozenset[str]]:
    """Returns id -> content of all tokens, and the special contents."""
    model = spec.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    match vocab:
        case dict():
            tokens = {token_id: content for content, token_id in vocab.items()}
        case list():  # Unigram: [content, score], the id is the index
            tokens = {token_id: entry[0] for token_id, entry in enumerate(vocab)}
        case _:
            raise UnsupportedTokenizer("model.vocab: neither an object nor a list")
    ids = {content: token_id for token_id, content in tokens.items()}
    added: dict[str, int] = {}
    special = set()
    for entry in spec.get("added_tokens") or []:
        content = entry["content"]
        if content not in added:
            # The library assigns the id of a new token and ignores the id in the file.
            next_id = max(len(tokens), max(added.values(), default=-1) + 1)
            added[content] = ids.get(content, next_id)
        if entry.get("special"):
            special.add(content)
    tokens.update((token_id, content) for content, token_id in added.items())
    return tokens, frozenset(special)


def _byte_alphabet() -> dict[int, int]:
    """Returns Byte-level BPE's characters for bytes (GPT-2), as a translation to Latin-1 code
    points. Printable Latin-1 characters are unchanged; the other bytes are U+0100 and up, in
    order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    # Characters outside the alphabet must not become bytes: map them beyond Latin-1.
    outside = dict.fromkeys(others, 0xFFFD)
    return outside | {0x100 + index: byte for index, byte in enumerate(others)}


_TO_LATIN_1 = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:  # outside the alphabet: some added tokens are plain text
        return token.encode()


def _read_bytes(
    tokens: Mapping[int, str], decoder: _Decoder
) -> tuple[dict[int, bytes], frozenset[int]]:
    """Returns id -> bytes, and the ids that are one byte of a byte-fallback tokenizer."""
    if decoder.is_byte_level:
        return {i: _byte_level_bytes(token) for i, token in tokens.items()}, frozenset()
    table: dict[int, bytes] = {}
    fallback_ids = set()
    for token_id, token in tokens.items():
        text = token
        for old, new in decoder.replacements:
            text = text.replace(old, new)
        if match := _BYTE_TOKEN.fullmatch(text):
            table[token_id] = bytes([int(match[1], 16)])
            fallback_ids.add(token_id)
        else:
            table[token_id] = text.encode()
    return table, frozenset(fallback_ids)


def _complete_texts(table: Mapping[int, bytes]) -> Iterator[tuple[int, str]]:
    for token_id, raw in table.items():
        try:
            yield token_id, raw.decode()
        except UnicodeDecodeError:
            continue  # part of a character: see Detokenizer._feed_stateful

"""The parts of a model that its `tokenizer.json` decides, and the trial of such a file.

A card comes from the registry. A library that loads the file may take memory and time without end,
holds the interpreter's lock meanwhile, and may end the process. So a trial loads the file first,
and encodes samples with it, within limits; see `common/trials`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from tokenizers import Tokenizer

from common.errors import InvalidRequest
from common.trials.trial import TrialLimits
from frontend_svc.prompts.encoder import Encode, PieceEncoder, build_encoder, find_control_tokens
from frontend_svc.prompts.expansion import expansion_max, steps
from frontend_svc.prompts.token_bound import max_bytes_per_token
from frontend_svc.text.detokenizer import UnsupportedTokenizer, Vocabulary

PREPARE: Final = f"{__name__}:prepare"
TRIAL: Final = f"{__name__}:try_tokenizer"
# A vocabulary of 200,000 tokens takes 4 s and 500 MB.
# The result names all control tokens: some models have a hundred thousand.
LIMITS: Final = TrialLimits(cpu_s=20.0, wall_s=120.0, memory_bytes=2 << 30, reply_bytes=16 << 20)
# The library holds the interpreter's lock while it reads a file, and the event loop waits; 0.5 s.
READ_S_MAX: Final = 3.0
LOAD_S_MAX: Final = 8.0
TOKEN_ID_MAX: Final = (1 << 24) - 1
EXPANSION_MAX: Final = 1024
_SAMPLE_CHARS: Final = 8192
_SAMPLES_MAX: Final = 32
SAMPLE_S_MAX: Final = 0.25

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a `tokenizer.json` becomes; the texts of the fields are those of `ServedModel`."""

    tokenizer: Tokenizer
    encode_text: Encode
    slow_encoder_reason: str
    """Why the encoder is not fastokens; "": it is."""
    vocabulary: Vocabulary | None
    slow_detokenizer_reason: str
    """Why there is no vocabulary; "": there is."""
    vocab_size: int
    max_bytes_per_token: int | None


@dataclass(frozen=True, slots=True)
class TriedTokenizer:
    """The result of a trial."""

    expansion_max: float
    """See `prompts/expansion.py`."""
    control_tokens: tuple[str, ...]
    """Contents of the control tokens."""


def load_tokenizer(raw: bytes) -> TokenizerParts:
    """Returns the parts of a file that has passed its trial. Raises InvalidRequest."""
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises plain Exception
        raise InvalidRequest(f"tokenizer.json: {error}", "artifacts.tokenizer.json") from error
    # Settings of the file that would silently truncate or pad prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary, reason = None, ""
    try:
        vocabulary = Vocabulary.from_tokenizer_json(raw)
    except UnsupportedTokenizer as error:
        reason = str(error)
    encode_text, difference = build_encoder(raw, tokenizer)
    ids = tokenizer.get_vocab().values() if vocabulary is None else vocabulary.raw
    return TokenizerParts(
        tokenizer,
        encode_text,
        difference,
        vocabulary,
        reason,
        # Not the number of tokens: some files have gaps in their ids.
        vocab_size=max(ids, default=-1) + 1,
        max_bytes_per_token=max_bytes_per_token(raw),
    )


def prepare() -> None:
    """Does nothing: this module is imported then."""


def try_tokenizer(raw: bytes) -> tuple[float, tuple[str, ...]]:
    """Loads a file as `load_tokenizer`, and encodes samples. Returns the fields of
    `TriedTokenizer`. Raises ValueError, which names what is wrong with the file."""
    try:
        spec = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(spec, dict):
        raise ValueError("it is not a JSON object")
    _check_ids(spec)
    if (factor := _expansion_max(spec)) > EXPANSION_MAX:
        text = f"normalizer and pre-tokenizer may expand a text {factor:.3g} times"
        raise ValueError(f"{text}, at most {EXPANSION_MAX} times")
    _timed(lambda: Tokenizer.from_buffer(raw), READ_S_MAX, "to read")
    try:
        parts = _timed(lambda: load_tokenizer(raw), LOAD_S_MAX, "to load")
    except InvalidRequest as error:
        raise ValueError(error.message.removeprefix("tokenizer.json: ")) from error
    for text in _samples(spec):
        begin_s = time.process_time()
        # A panic of the library is no Exception; it fails requests, not this process.
        with contextlib.suppress(BaseException):
            parts.encode_text(text, True)
        if (taken_s := time.process_time() - begin_s) > SAMPLE_S_MAX:
            sample = f"{len(text)} characters as {text[:8]!r}"
            raise ValueError(f"{sample} take {taken_s:.2g} s to encode, at most {SAMPLE_S_MAX} s")
    control = find_control_tokens(parts.tokenizer)
    if control.contents:
        with contextlib.suppress(BaseException):
            PieceEncoder(raw, control).encode(["a", control.contents[0], "b"])
    return factor, control.contents


def _timed(call: Callable[[], R], limit_s: float, purpose: str) -> R:
    begin_s = time.process_time()
    result = call()
    if (taken_s := time.process_time() - begin_s) > limit_s:
        raise ValueError(f"it takes {taken_s:.2g} s {purpose}, at most {limit_s:g} s")
    return result


def _check_ids(spec: Mapping[str, Any]) -> None:
    model = spec.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    ids += [token.get("id", 0) for token in spec.get("added_tokens") or ()]
    largest = max((value for value in ids if isinstance(value, int)), default=0)
    if largest > TOKEN_ID_MAX:
        raise ValueError(f"it has the token id {largest}, at most {TOKEN_ID_MAX}")


def _expansion_max(spec: Mapping[str, Any]) -> float:
    try:
        return expansion_max(spec)
    except (LookupError, TypeError, AttributeError, ValueError):
        return float("inf")


def _samples(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yields long texts of the characters that the file's own patterns name."""
    parts = (
        *steps(spec.get("normalizer"), "normalizers"),
        *steps(spec.get("pre_tokenizer"), "pretokenizers"),
    )
    patterns = ["a", " ", "\n", "1", "!", "\u4e2d"]
    for part in parts:
        match part.get("pattern"):
            case {"String": str(text)} if text:
                patterns.append(text)
            case {"Regex": str(text)}:
                patterns += sorted(set(text))
    for pattern in list(dict.fromkeys(patterns))[:_SAMPLES_MAX]:
        yield pattern * max(1, _SAMPLE_CHARS // len(pattern))

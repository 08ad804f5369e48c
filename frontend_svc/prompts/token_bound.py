"""Lower bound on the tokens of a text, derived from a `tokenizer.json` (pure).

A token stands for at most as many bytes as the longest token of the vocabulary has. So a prompt
that is far too long can be refused before it is tokenized. This holds only if the tokenizer loses
no text: a normalizer may drop text, a split may remove it, one unknown token may replace it, and an
added token may absorb the whitespace around it, all at any length. If the file has such a part, or
one that is unknown here, there is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# NFC shrinks n bytes to at least n/4: the worst case is 7 to 2, U+1FBE U+0308 U+0301 to U+0390.
_NFC_SHRINK_FACTOR = 4
_LOSSLESS_SPLITS = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})
_BYTE_VALUES = 256


def max_bytes_per_token(tokenizer_json: str | bytes) -> int | None:
    """Returns the maximum number of bytes of a text per token; None if unknown. Raises ValueError
    if the text is not JSON."""
    spec = json.loads(tokenizer_json)
    try:
        return _max_bytes_per_token(spec)
    except (LookupError, TypeError, AttributeError):
        return None  # an unknown format


# Any: a tokenizer.json is free-form; an unknown format has no bound.
def _max_bytes_per_token(spec: Mapping[str, Any]) -> int | None:
    model, added = spec["model"], spec.get("added_tokens") or []
    vocab: Mapping[str, int] = model["vocab"]
    shrink_factor = _shrink_factor(spec.get("normalizer"))
    splits = _steps(spec.get("pre_tokenizer"), "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in splits)
    is_lossless = (
        shrink_factor is not None
        and model["type"] == "BPE"
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and all(map(_is_lossless, splits))
        and not any(token["lstrip"] or token["rstrip"] for token in added)
        and (_has_byte_alphabet(vocab) if is_byte_level else _has_byte_fallback(model, vocab))
    )
    if shrink_factor is None or not is_lossless:
        return None
    # Byte-level pieces have a character for each byte.
    longest = max(map(len, vocab) if is_byte_level else (len(piece.encode()) for piece in vocab))
    return shrink_factor * max(longest, *(len(token["content"].encode()) for token in added), 1)


def _steps(spec: Any, list_key: str) -> list[Any]:
    if spec is None:
        return []
    return list(spec[list_key]) if spec["type"] == "Sequence" else [spec]


def _shrink_factor(normalizer: Any) -> int | None:
    """Returns the maximum ratio of the text before to the text after normalization; None if
    unbounded."""
    shrink_factor = 1
    for step in _steps(normalizer, "normalizers"):
        match step:
            case {"type": "NFC"}:
                shrink_factor *= _NFC_SHRINK_FACTOR
            case {"type": "Prepend"}:
                continue
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if len(new.encode()) < len(old.encode()):
                    return None
            case _:
                return None
    return shrink_factor


def _is_lossless(step: Any) -> bool:
    match step:
        case {"type": "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Split", "behavior": str(behavior)}:
            return behavior in _LOSSLESS_SPLITS
    return False


def _has_byte_alphabet(vocab: Mapping[str, int]) -> bool:
    """Returns whether each byte has its own token, written as one character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = range(0x100, 0x100 + _BYTE_VALUES - len(printable))
    return all(chr(point) in vocab for point in (*printable, *others))


def _has_byte_fallback(model: Mapping[str, Any], vocab: Mapping[str, int]) -> bool:
    """Returns whether unknown text becomes one token per byte."""
    return bool(model["byte_fallback"]) and all(
        f"<0x{b:02X}>" in vocab for b in range(_BYTE_VALUES)
    )

"""How few tokens a text can have, from the text of a `tokenizer.json` alone (pure).

A token stands for no more bytes of a text than the longest of the vocabulary has, so that a prompt
which is hopelessly too long need not be tokenized to be refused. That holds only where nothing of a
text is lost on its way to the tokens: what a normalizer drops, a split removes, one unknown token
swallows, or an added token takes in of the blanks around it may be of any length. Where a part of
the file may do so, or is not known here, there is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# NFC makes of n bytes at least n/4: the worst is 7 to 2, U+1FBE U+0308 U+0301 to U+0390.
_NFC_SHRINK_FACTOR = 4
_LOSSLESS_SPLITS = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})
_BYTE_VALUES = 256


def max_bytes_per_token(tokenizer_json: str | bytes) -> int | None:
    """The most bytes of a text that one token stands for; None where that is not known.

    Raises ValueError where it is no JSON.
    """
    spec = json.loads(tokenizer_json)
    try:
        return _max_bytes_per_token(spec)
    except (LookupError, TypeError, AttributeError):
        return None  # of a form that is not known here


# Any: a tokenizer.json is free-form; whatever has another form than is read here has no bound.
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
    """How many times as long a text may be before it; None if there is no bound."""
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
    """Whether a pre-tokenizer keeps all of its text."""
    match step:
        case {"type": "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Split", "behavior": str(behavior)}:
            return behavior in _LOSSLESS_SPLITS
    return False


def _has_byte_alphabet(vocab: Mapping[str, int]) -> bool:
    """Whether each byte has a piece of its own, written as one character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = range(0x100, 0x100 + _BYTE_VALUES - len(printable))
    return all(chr(point) in vocab for point in (*printable, *others))


def _has_byte_fallback(model: Mapping[str, Any], vocab: Mapping[str, int]) -> bool:
    """Whether what is unknown becomes a token for each of its bytes."""
    return bool(model["byte_fallback"]) and all(
        f"<0x{b:02X}>" in vocab for b in range(_BYTE_VALUES)
    )

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
_NFC_SHRINKS_BY = 4
_KEEPING_SPLITS = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})
_BYTES = 256


def bytes_a_token_max(tokenizer_json: str | bytes) -> int | None:
    """The most bytes of a text that one token stands for; None where that is not known.

    Raises ValueError where it is no JSON.
    """
    spec = json.loads(tokenizer_json)
    try:
        return _bytes_max(spec)
    except (LookupError, TypeError, AttributeError):
        return None  # of a form that is not known here


# Any: a tokenizer.json is free-form; whatever has another form than is read here has no bound.
def _bytes_max(spec: Mapping[str, Any]) -> int | None:
    model, added = spec["model"], spec.get("added_tokens") or []
    vocab: Mapping[str, int] = model["vocab"]
    shrinks_by = _shrinks_by(spec.get("normalizer"))
    splits = _steps(spec.get("pre_tokenizer"), "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in splits)
    keeps_all = (
        shrinks_by is not None
        and model["type"] == "BPE"
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and all(map(_keeps, splits))
        and not any(token["lstrip"] or token["rstrip"] for token in added)
        and (_has_alphabet(vocab) if is_byte_level else _has_fallback(model, vocab))
    )
    if shrinks_by is None or not keeps_all:
        return None
    # Byte-level pieces have a character for each byte.
    longest = max(map(len, vocab) if is_byte_level else (len(one.encode()) for one in vocab))
    return shrinks_by * max(longest, *(len(token["content"].encode()) for token in added), 1)


def _steps(spec: Any, parts: str) -> list[Any]:
    if spec is None:
        return []
    return list(spec[parts]) if spec["type"] == "Sequence" else [spec]


def _shrinks_by(normalizer: Any) -> int | None:
    """How many times as long a text may be before it; None if there is no bound."""
    shrinks_by = 1
    for step in _steps(normalizer, "normalizers"):
        match step:
            case {"type": "NFC"}:
                shrinks_by *= _NFC_SHRINKS_BY
            case {"type": "Prepend"}:
                continue
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if len(new.encode()) < len(old.encode()):
                    return None
            case _:
                return None
    return shrinks_by


def _keeps(step: Any) -> bool:
    """Whether a pre-tokenizer keeps all of its text."""
    match step:
        case {"type": "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Split", "behavior": str(behavior)}:
            return behavior in _KEEPING_SPLITS
    return False


def _has_alphabet(vocab: Mapping[str, int]) -> bool:
    """Whether each byte has a piece of its own, written as one character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = range(0x100, 0x100 + _BYTES - len(printable))
    return all(chr(point) in vocab for point in (*printable, *others))


def _has_fallback(model: Mapping[str, Any], vocab: Mapping[str, int]) -> bool:
    """Whether what is unknown becomes a token for each of its bytes."""
    return bool(model["byte_fallback"]) and all(f"<0x{b:02X}>" in vocab for b in range(_BYTES))

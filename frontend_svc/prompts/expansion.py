"""Upper bound of the growth of a text inside of a tokenizer, from a `tokenizer.json` (pure).

A normalizer may replace each character by many, and several of them multiply. Unicode's forms are
idempotent, so a run of them counts once; after a replacement they may expand its result again.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

# Characters of one character: U+FDFA in the forms of compatibility, U+1F82 in the others.
_COMPATIBILITY_FACTOR: Final = 18
_CANONICAL_FACTOR: Final = 4
_UNICODE_FORMS: Final[Mapping[str, int]] = {
    "NFKC": _COMPATIBILITY_FACTOR,
    "NFKD": _COMPATIBILITY_FACTOR,
    **dict.fromkeys(("NFC", "NFD", "Lowercase", "BertNormalizer"), _CANONICAL_FACTOR),
}
_SHRINKING: Final = frozenset({"Strip", "StripAccents", "Nmt"})
# A character has up to four bytes, each of which becomes a character.
_BYTE_FACTOR: Final = 4


# Any: a tokenizer.json is free-form.
def expansion_max(spec: Mapping[str, Any]) -> float:
    """Returns the maximum ratio of characters after to characters before normalizer and
    pre-tokenizer; infinite if they have an unknown part. Raises LookupError, TypeError,
    AttributeError or ValueError for an unknown format."""
    factor, unicode_factor = 1.0, 1
    for step in steps(spec.get("normalizer"), "normalizers"):
        if (form_factor := _UNICODE_FORMS.get(step["type"])) is not None:
            unicode_factor = max(unicode_factor, form_factor)
        elif step["type"] not in _SHRINKING:
            factor *= unicode_factor * max(_normalizer_factor(step), 1)
            unicode_factor = 1
    factor *= unicode_factor
    is_bytes = False
    for step in steps(spec.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "ByteLevel":
            # Characters that stand for bytes have at most two bytes.
            factor *= 2 if is_bytes else _BYTE_FACTOR
            is_bytes = True
    return factor


def steps(part: Any, list_key: str) -> Iterator[Any]:
    """Yields the steps of a part of the file, also of sequences in sequences."""
    match part:
        case None:
            return
        case {"type": "Sequence"}:
            for step in part[list_key]:
                yield from steps(step, list_key)
        case _:
            yield part


def _normalizer_factor(step: Any) -> float:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return len(new) / len(old)
        case {"type": "Replace", "content": str(new)}:
            return 1 + 2 * len(new)  # an expression may match before and after a character
        case {"type": "Prepend", "prepend": str(text)}:
            return 1 + len(text)  # of a text of one character
        case {"type": "ByteLevel"}:
            return _BYTE_FACTOR
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            charsmap = base64.b64decode(encoded)
            trie_bytes = int.from_bytes(charsmap[:4], "little")
            replacements = charsmap[4 + trie_bytes :].split(b"\0")
            return max(len(text.decode(errors="replace")) for text in replacements)
        case {"type": "Precompiled"}:
            return 1
    return math.inf

"""JSON that stays in memory (pure)."""

from __future__ import annotations

import orjson


def compact_json(value: object) -> bytes:
    """Returns the JSON of a value in a buffer of its length, for bytes that are kept: the buffer of
    `orjson.dumps` has up to fifteen times the length. Vectors may be numpy arrays."""
    return bytes(memoryview(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)))

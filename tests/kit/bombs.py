"""Inputs whose compilation, loading, decoding or rendering takes time or memory without end."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from worker_svc.engines.sim.config import SIM_MODEL_DIR

# Any, here and below: JSON.
Json = dict[str, Any]


def _all_of(patterns: list[str]) -> Json:
    return {
        "guided_json": {
            "type": "string",
            "allOf": [{"pattern": f"^{pattern}$"} for pattern in patterns],
        }
    }


def _nested(depth: int) -> Json:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {"guided_json": schema}


CONSTRAINT_BOMBS: Final[Mapping[str, Json]] = {
    "an intersection": _all_of([f"(.*a.{{{number}}})" for number in range(20)]),
    "an intersection of digits": _all_of([f"([0-9]*7[0-9]{{{n}}})" for n in range(24)]),
    "an intersection of words": _all_of([f"(.*(ab|ba).{{{2 * n}}})" for n in range(16)]),
    "a repetition of repetitions": {"guided_regex": "((((a|b){1,90}c){1,90}d){1,90}e){1,90}"},
    "a large repetition": {"guided_regex": "(.*a.{2000}){50}"},
    "a repetition of classes": {"guided_regex": r"(\p{L}{1,500}\p{N}{1,500}){1,500}"},
    "a deep schema": _nested(200),
    "a wide grammar": {
        "guided_grammar": "root ::= "
        + " | ".join(f'"a" r{number}' for number in range(2000))
        + "\n"
        + "\n".join(f'r{number} ::= [a-z]{{1,200}} "{number}"' for number in range(2000))
    },
    "an ambiguous grammar": {"guided_grammar": "root ::= x\n" + 'x ::= x x x x | "a" | "aa" | ""'},
    "masks that take long": {
        "guided_grammar": 'root ::= x\nx ::= x x | "a" | "b" | "ab" | x "a" x | ""'
    },
    "a hidden intersection": {
        "guided_json": {
            "type": "object",
            "properties": {
                "a": {"type": "string"},
                "b": _all_of([f"(.*a.{{{n}}})" for n in range(20)])["guided_json"],
            },
            "required": ["a", "b"],
        }
    },
}
"""Fields of a body."""


def _tokenizer(change: Callable[[Json], None]) -> bytes:
    spec = json.loads((SIM_MODEL_DIR / "tokenizer.json").read_bytes())
    change(spec)
    return json.dumps(spec).encode()


def _replacing(count: int, pattern: Json, content: str) -> Callable[[Json], None]:
    step = {"type": "Replace", "pattern": pattern, "content": content}

    def change(spec: Json) -> None:
        spec["normalizer"] = {"type": "Sequence", "normalizers": [step] * count}

    return change


def _with_id(token_id: int) -> Callable[[Json], None]:
    def change(spec: Json) -> None:
        spec["model"]["vocab"]["a bomb"] = token_id

    return change


def _large_template(spec: Json) -> None:
    token = spec["added_tokens"][0]["content"]
    ids = [spec["added_tokens"][0]["id"]] * 20_000
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}] * 20_000
        + [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": ids, "tokens": [token] * len(ids)}},
    }


def _expanding_decoder(spec: Json) -> None:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 40}
    spec["decoder"] = {"type": "Sequence", "decoders": [step] * 9 + [{"type": "ByteFallback"}]}


def _backtracking(spec: Json) -> None:
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+b|(a|a)*c|\\s"},
        "behavior": "Isolated",
        "invert": False,
    }
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, spec["pre_tokenizer"]]}


def _byte_levels(spec: Json) -> None:
    step = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step] * 24}


TOKENIZER_BOMBS: Final[Mapping[str, Callable[[], bytes]]] = {
    "nine replacements": lambda: _tokenizer(_replacing(9, {"String": "a"}, "a" * 10)),
    "hidden replacements": lambda: _tokenizer(_replacing(9, {"String": "\u03a9"}, "\u03a9" * 10)),
    "replacements of expressions": lambda: _tokenizer(_replacing(6, {"Regex": "."}, "b" * 50)),
    "an id of 32 bits": lambda: _tokenizer(_with_id(2**32 - 1)),
    "an id of 31 bits": lambda: _tokenizer(_with_id(2**31 - 1)),
    "a large post-processor": lambda: _tokenizer(_large_template),
    "an expanding decoder": lambda: _tokenizer(_expanding_decoder),
    "a backtracking expression": lambda: _tokenizer(_backtracking),
    "many byte levels": lambda: _tokenizer(_byte_levels),
    "deep JSON": lambda: b'{"a":' * 200_000,
}
"""Contents of a `tokenizer.json`."""


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def _png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1 << 22), 9)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", pixels)
        + _chunk(b"IEND", b"")
    )


def _jpeg(width: int, height: int) -> bytes:
    frame = struct.pack(">BHHB", 8, height, width, 1) + b"\x01\x11\x00"
    comment = b"\xff\xfe" + struct.pack(">H", 8) + b"a bomb"
    return (
        b"\xff\xd8"
        + comment
        + b"\xff\xff\xc0"
        + struct.pack(">H", 2 + len(frame))
        + frame
        + b"\xff\xd9"
    )


def riff(kind: bytes, data: bytes) -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


MEDIA_BOMBS: Final[Mapping[str, tuple[str, bytes]]] = {
    "a PNG": ("image/png", _png(2**31 - 1, 2**31 - 1)),
    "a wide PNG": ("image/png", _png(2**30, 1)),
    "a JPEG": ("image/jpeg", _jpeg(65_535, 65_535)),
    "a GIF": ("image/gif", b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + bytes(64)),
    "a WebP without loss": ("image/webp", riff(b"VP8L", b"\x2f\xff\xff\xff\x0f" + bytes(64))),
    "an extended WebP": ("image/webp", riff(b"VP8X", bytes(4) + b"\xff" * 6 + bytes(64))),
}
"""Media type and content."""

TEMPLATE_BOMBS: Final[Mapping[str, str]] = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a large text": "{{ 'A' * 3000000000 }}",
    "a growing text": "{% set n = namespace(t='ab') %}{% for i in range(60) %}"
    "{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "replacements of text": "{{ ('a' * 9999) | replace('a', 'a' * 9999)"
    " | replace('a', 'a' * 9999) }}",
}
"""Sources of chat templates, which fail when they are loaded or rendered."""


def image_url(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"

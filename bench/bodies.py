"""Bodies of chat requests for the load generator."""

from __future__ import annotations

import json
import random
import sysconfig
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from bench.stacks import MODEL, SIM_MODEL_DIR

BODIES = 4096
# Of all bodies of a file, so that those of long prompts fit into memory.
PROMPT_TOKENS = BODIES * 2048
SHARED_PREFIXES = 16
# What the chat template adds around one user message.
TEMPLATE_TOKENS = 10
TEXT_CHARS = 4_000_000


def write_bodies(out: Path, *, isl: int, osl: int, shared: int = 0, stream: bool = True) -> None:
    """Writes up to BODIES bodies with `isl` prompt tokens, one JSON a line, all different.

    Prompts are random slices of Python's standard library, cut at token offsets. shared: tokens of
    a prefix that 1 of SHARED_PREFIXES bodies have in common.
    """
    rng = random.Random(1)
    text, offsets = _text()

    def cut(tokens: int) -> str:
        first = rng.randrange(len(offsets) - tokens)
        return text[offsets[first][0] : offsets[first + tokens - 1][1]]

    heads = [cut(shared) if shared else "" for _ in range(SHARED_PREFIXES)]
    with out.open("w") as file:
        for _ in range(min(BODIES, PROMPT_TOKENS // isl)):
            head = heads[rng.randrange(SHARED_PREFIXES)]
            content = head + cut(isl - TEMPLATE_TOKENS - shared)
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": osl,
                "ignore_eos": True,
                "stream": stream,
            }
            file.write(json.dumps(body) + "\n")


@cache
def _text() -> tuple[str, list[tuple[int, int]]]:
    """A long text, and the first and last character of each of its tokens."""
    tokenizer = Tokenizer.from_file(str(SIM_MODEL_DIR / "tokenizer.json"))
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(source.read_text("utf-8", "ignore") for source in sources)[:TEXT_CHARS]
    return text, tokenizer.encode(text).offsets

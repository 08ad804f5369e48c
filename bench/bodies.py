"""Writes OpenAI chat bodies, one JSON a line, each of about ISL prompt tokens and all different."""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer

# What the chat template adds around one user message.
TEMPLATE_TOKENS = 10
TEXT_CHARS = 4_000_000


def write_bodies(
    out: Path,
    tokenizer_json: Path,
    *,
    model: str,
    isl: int,
    osl: int,
    count: int,
    stream: bool,
    shared: int = 0,
    prefixes: int = 1,
    seed: int = 1,
) -> None:
    """Prompts are random slices of Python's standard library, cut at token offsets.

    shared: so many of the tokens are one of `prefixes` common beginnings.
    """
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(source.read_text("utf-8", "ignore") for source in sources)[:TEXT_CHARS]
    offsets = tokenizer.encode(text).offsets
    length = isl - TEMPLATE_TOKENS

    def cut(tokens: int) -> str:
        first = rng.randrange(len(offsets) - tokens)
        return text[offsets[first][0] : offsets[first + tokens - 1][1]]

    heads = [cut(shared) if shared else "" for _ in range(prefixes)]
    with out.open("w") as file:
        for _ in range(count):
            head = heads[rng.randrange(prefixes)]
            content = head + cut(length - shared)
            body = {
                "model": model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": osl,
                "ignore_eos": True,
                "stream": stream,
            }
            file.write(json.dumps(body) + "\n")

"""Builds the model folder of the sim engine: tokenizer, chat template, output words; no weights.

usage: python -m worker_svc.engines.sim.make_model OUT_DIR [--media]

The output is checked in beside its sources; equal sources give equal bytes. With --media the model
also takes images and audio clips: its tokenizer has a placeholder for each, which the chat template
prints.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from worker_svc.engines.model_files import (
    read_words,
    stop_ids,
    write_json,
    write_text,
    write_tokenizer_files,
)

OUTPUT_FILES = ("generation_config.json", "sim.json", "tokenizer.json", "tokenizer_config.json")
CONTEXT_LENGTH = 131_072  # tokens; the first prompt of an agent has up to 30,000
# The limits of `MediaInput`. Images have more tokens than three blocks of the default size.
MEDIA: Final[Mapping[str, Mapping[str, int]]] = {
    "image": {"tokens": 64, "count_max": 8, "bytes_max": 20 << 20},
    "audio": {"tokens": 32, "count_max": 2, "bytes_max": 20 << 20},
}
# What the chat template prints of a message, for models without and with media.
TEXT_CONTENT: Final = " + message['content'] }}"
MEDIA_CONTENT: Final = """ }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{{- part['text'] if part['type'] == 'text' else '<|' + part['type'] + '|>' }}
{%- endfor %}
{%- endif %}"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make_sim_model", description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--media", action="store_true")
    options = parser.parse_args(arguments)
    write_model(options.out_dir, takes_media=options.media)


def write_model(out_dir: Path, *, takes_media: bool = False) -> None:
    """Writes `OUTPUT_FILES` into `out_dir`, which is created if missing."""
    tokenizer = write_tokenizer_files(out_dir, CONTEXT_LENGTH)
    # Any: JSON.
    config: dict[str, Any] = {"media": _add_media(out_dir, tokenizer)} if takes_media else {}
    config |= {
        "context_length": CONTEXT_LENGTH,
        "eos_token_ids": stop_ids(tokenizer),
        "vocab_size": tokenizer.get_vocab_size(),
        "word_ids": word_ids(tokenizer, read_words()),
    }
    # Not indented: one id per line would be mostly line ends.
    write_text(out_dir / "sim.json", json.dumps(config, sort_keys=True))


# Any: JSON.
def _add_media(out_dir: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Adds the placeholders to tokenizer and chat template. Returns the `media` of sim.json."""
    tokenizer.add_special_tokens([f"<|{kind}|>" for kind in MEDIA])
    write_text(out_dir / "tokenizer.json", tokenizer.to_str(pretty=False))
    path = out_dir / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    assert TEXT_CONTENT in config["chat_template"], "the template prints the content of messages"
    config["chat_template"] = config["chat_template"].replace(TEXT_CONTENT, MEDIA_CONTENT)
    write_json(path, config)
    return {
        kind: {"token_id": tokenizer.token_to_id(f"<|{kind}|>"), **limits}
        for kind, limits in MEDIA.items()
    }


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """Returns the ids of tokens that are exactly a space and one of `words`, ascending."""
    encodings = [tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in words]
    return sorted(ids[0] for ids in encodings if len(ids) == 1)


if __name__ == "__main__":
    main()

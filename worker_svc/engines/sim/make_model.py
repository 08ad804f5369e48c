"""Builds the model folder of the sim engine: tokenizer, chat template, output words; no weights.

usage: python -m worker_svc.engines.sim.make_model OUT_DIR

The output is checked in beside its sources; equal sources give equal bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from worker_svc.engines.model_files import read_words, stop_ids, write_text, write_tokenizer_files

OUTPUT_FILES = ("generation_config.json", "sim.json", "tokenizer.json", "tokenizer_config.json")
CONTEXT_LENGTH = 32768  # tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make_sim_model", description=__doc__)
    parser.add_argument("out_dir", type=Path)
    write_model(parser.parse_args(arguments).out_dir)


def write_model(out_dir: Path) -> None:
    """Writes `OUTPUT_FILES` into `out_dir`, which is created if missing."""
    tokenizer = write_tokenizer_files(out_dir, CONTEXT_LENGTH)
    config = {
        "context_length": CONTEXT_LENGTH,
        "eos_token_ids": stop_ids(tokenizer),
        "vocab_size": tokenizer.get_vocab_size(),
        "word_ids": word_ids(tokenizer, read_words()),
    }
    # Not indented: one id per line would be mostly line ends.
    write_text(out_dir / "sim.json", json.dumps(config, sort_keys=True))


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """Returns the ids of tokens that are exactly a space and one of `words`, ascending."""
    encodings = [tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in words]
    return sorted(ids[0] for ids in encodings if len(ids) == 1)


if __name__ == "__main__":
    main()

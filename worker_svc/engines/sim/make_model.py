"""Builds the model folder of the sim engine: tokenizer, chat template, output words; no weights.

usage: python -m worker_svc.engines.sim.make_model OUT_DIR

The tokenizer is a byte-level BPE of at most `VOCAB_SIZE` ids, trained on `model/corpus.txt` and on
the words of `model/words.txt`, weighted so that " word" is one token for nearly all of them. The
output is checked in beside its sources; equal sources give equal bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SOURCE_DIR = Path(__file__).parent / "model"
OUTPUT_FILES = ("generation_config.json", "sim.json", "tokenizer.json", "tokenizer_config.json")

VOCAB_SIZE = 4096
CONTEXT_LENGTH = 32768  # tokens
# Eight occurrences outweigh every accidental pair of letters in the corpus.
WORD_WEIGHT = 8

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

# ChatML; tools and tool calls are written as JSON inside tags.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nYou may call these tools:\\n<tools>\\n' }}
{%- for tool in tools %}
{{- tool | tojson + '\\n' }}
{%- endfor %}
{{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n<tool_call>\\n' + call['function'] | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make_sim_model", description=__doc__)
    parser.add_argument("out_dir", type=Path)
    write_model(parser.parse_args(arguments).out_dir)


def write_model(out_dir: Path) -> None:
    """Writes `OUTPUT_FILES` into `out_dir`, which is created if missing."""
    corpus = (SOURCE_DIR / "corpus.txt").read_text("utf-8")
    words = (SOURCE_DIR / "words.txt").read_text("utf-8").split()
    tokenizer = train(corpus, words)
    files = {"tokenizer.json": tokenizer.to_str(pretty=False) + "\n"}
    for name, value in _tokenizer_configs(tokenizer).items():
        files[name] = json.dumps(value, ensure_ascii=False, sort_keys=True, indent=1) + "\n"
    # Not indented: one id per line would be mostly line ends.
    files["sim.json"] = json.dumps(_sim_config(tokenizer, words), sort_keys=True) + "\n"
    out_dir.mkdir(parents=True, exist_ok=True)
    for name in OUTPUT_FILES:
        (out_dir / name).write_text(files[name], "utf-8", newline="\n")


def train(corpus: str, words: Sequence[str]) -> Tokenizer:
    """Returns a trained byte-level BPE tokenizer; the special tokens have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    word_text = "".join(f" {word}" for word in words)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([corpus] + [word_text] * WORD_WEIGHT, trainer)
    return tokenizer


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """Returns the ids of tokens that are exactly a space and one of `words`, ascending."""
    encodings = [tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in words]
    return sorted(ids[0] for ids in encodings if len(ids) == 1)


def _sim_config(tokenizer: Tokenizer, words: Sequence[str]) -> dict[str, Any]:
    # Any: JSON values of several types.
    return {
        "context_length": CONTEXT_LENGTH,
        "eos_token_ids": _stop_ids(tokenizer),
        "vocab_size": tokenizer.get_vocab_size(),
        "word_ids": word_ids(tokenizer, words),
    }


def _tokenizer_configs(tokenizer: Tokenizer) -> Mapping[str, dict[str, Any]]:
    stop_ids = _stop_ids(tokenizer)
    return {
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": stop_ids,
            "pad_token_id": stop_ids[-1],
        },
        "tokenizer_config.json": {
            "add_bos_token": False,
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": TURN_END,
            "model_max_length": CONTEXT_LENGTH,
            "pad_token": END_OF_TEXT,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }


def _stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the end-of-turn id first, then the end-of-text id."""
    ids = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    return [token_id for token_id in ids if token_id is not None]


if __name__ == "__main__":
    main()

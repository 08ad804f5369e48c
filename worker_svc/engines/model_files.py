"""Tokenizer, chat template and generation defaults that the built models share; no weights.

The tokenizer is a byte-level BPE of at most `VOCAB_SIZE` ids, trained on `corpus.txt` and on the
words of `words.txt`, weighted so that " word" is one token for nearly all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SOURCE_DIR = Path(__file__).parent / "sim" / "model"

VOCAB_SIZE = 4096
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


def read_words() -> list[str]:
    return (SOURCE_DIR / "words.txt").read_text("utf-8").split()


def write_tokenizer_files(folder: Path, context_length: int) -> Tokenizer:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json into `folder`.

    Creates the folder if missing. Returns the tokenizer. Equal sources give equal bytes.
    """
    tokenizer = train((SOURCE_DIR / "corpus.txt").read_text("utf-8"), read_words())
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=False))
    ids = stop_ids(tokenizer)
    generation = {"do_sample": False, "eos_token_id": ids, "pad_token_id": ids[-1]}
    write_json(folder / "generation_config.json", generation)
    config = {
        "add_bos_token": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": context_length,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", config)
    return tokenizer


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, sort_keys=True, indent=1))


def write_text(path: Path, text: str) -> None:
    """Writes the text and a newline, with the same bytes on all systems."""
    path.write_text(text + "\n", "utf-8", newline="\n")


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


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the end-of-turn id first, then the end-of-text id."""
    ids = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    return [token_id for token_id in ids if token_id is not None]

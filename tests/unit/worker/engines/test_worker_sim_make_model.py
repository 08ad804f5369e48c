from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from worker_svc.engines.model_files import SOURCE_DIR
from worker_svc.engines.sim.make_model import CONTEXT_LENGTH, OUTPUT_FILES, main

CORPUS = (SOURCE_DIR / "corpus.txt").read_text("utf-8")
WORDS = (SOURCE_DIR / "words.txt").read_text("utf-8").split()


def load(name: str) -> dict[str, Any]:
    # Any: JSON values of several types.
    loaded: dict[str, Any] = json.loads((SOURCE_DIR / name).read_text("utf-8"))
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SOURCE_DIR / "tokenizer.json"))


def test_building_again_gives_the_checked_in_bytes(tmp_path: Path) -> None:
    main([str(tmp_path / "model")])

    for name in OUTPUT_FILES:
        built = (tmp_path / "model" / name).read_bytes()
        assert built == (SOURCE_DIR / name).read_bytes(), f"{name}: run make_sim_model again"


def test_the_model_is_small() -> None:
    assert sum(path.stat().st_size for path in SOURCE_DIR.iterdir()) < 600_000


def test_every_output_word_is_a_space_and_a_word_of_the_list(tokenizer: Tokenizer) -> None:
    word_ids = load("sim.json")["word_ids"]
    decoded = [tokenizer.decode([token_id]) for token_id in word_ids]

    assert len(word_ids) >= 512
    assert word_ids == sorted(set(word_ids))
    assert {text[0] for text in decoded} == {" "}
    assert {text[1:] for text in decoded} <= set(WORDS)
    assert all(word.isascii() and word.islower() and len(word) >= 2 for word in WORDS)


def test_output_words_survive_detokenizing_and_tokenizing(tokenizer: Tokenizer) -> None:
    word_ids = load("sim.json")["word_ids"]

    assert tokenizer.encode(tokenizer.decode(word_ids)).ids == word_ids


def test_special_tokens_are_the_first_ids_and_the_configs_agree(tokenizer: Tokenizer) -> None:
    end_of_text, turn_end = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>"))
    sim, generation = load("sim.json"), load("generation_config.json")

    assert [tokenizer.id_to_token(i) for i in range(3)] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert sim["eos_token_ids"] == generation["eos_token_id"] == [turn_end, end_of_text]
    assert sim["vocab_size"] == tokenizer.get_vocab_size()
    assert sim["context_length"] == CONTEXT_LENGTH == 131_072
    assert load("tokenizer_config.json")["eos_token"] == "<|im_end|>"


def test_the_corpus_survives_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(CORPUS).ids

    assert tokenizer.decode(ids) == CORPUS
    assert max(ids) < 4096


def test_text_beyond_the_corpus_survives_too(tokenizer: Tokenizer) -> None:
    text = "Zürich\t𒀀𓀀 ᚠᛇᚻ\x00\u200b 🦜 naïve coöperation\r\n"

    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_turn_is_framed_by_single_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("<|im_start|>user\nHello<|im_end|>\n").tokens

    assert tokens[0] == "<|im_start|>"
    assert tokens[-2:] == ["<|im_end|>", "Ċ"]

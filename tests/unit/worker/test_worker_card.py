"""The model card of a folder: missing files, differences of cards, vocabulary size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.errors import InvalidRequest
from common.registry.card import Artifact, ModelCard
from common.runtime.config import ConfigError, read_config
from worker_svc.card import build_card, card_differences, read_vocab_size
from worker_svc.config import WorkerConfig
from worker_svc.engines.contract import EngineConfig
from worker_svc.engines.model_folder import find_missing_files
from worker_svc.engines.sim.config import SIM_MODEL_DIR

CARD = build_card(SIM_MODEL_DIR, EngineConfig("m", context_length=64, kv_cache_block_size=16))


def with_tokenizer(value: Any) -> ModelCard:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return replace(CARD, artifacts={"tokenizer.json": Artifact.of(raw)})


def test_a_missing_model_file_is_rejected_by_its_name(
    tmp_path: Path,
) -> None:
    assert find_missing_files(SIM_MODEL_DIR) == []
    assert find_missing_files(tmp_path) == ["tokenizer.json", "tokenizer_config.json"]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=r"has no tokenizer_config\.json") as refused:
        build_card(tmp_path, EngineConfig("m"))
    assert refused.value.field == "model_path"
    with pytest.raises(ConfigError) as bad:
        read_config(WorkerConfig, "WORKER", {}, ["--model-path", str(tmp_path)])
    assert bad.value.problems == (f"--model-path: {tmp_path} has no tokenizer_config.json",)


def test_max_num_seqs_above_max_num_batched_tokens_is_rejected() -> None:
    flags = ["--max-num-seqs=32", "--max-num-batched-tokens=16"]
    with pytest.raises(ConfigError) as bad:
        read_config(WorkerConfig, "WORKER", {}, flags)
    (problem,) = bad.value.problems
    assert problem == "--max-num-seqs: must be at most --max-num-batched-tokens"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"kv_block_size": 32}, "kv_block_size (--block-size) 32, not 16"),
        ({"context_length": None}, "context_length (--context-length) None, not 64"),
        ({"hash_scheme": "x"}, "hash_scheme x, not "),
        ({"user_data": {"a": 1}}, "user_data {'a': 1}, not {}"),
    ],
)
def test_card_differences_name_the_fields_and_their_flags(
    change: dict[str, Any], difference: str
) -> None:
    assert card_differences(replace(CARD, **change), CARD) == [difference]
    assert card_differences(CARD, CARD) == []


def test_differing_endpoints_and_files_are_named_without_their_content() -> None:
    chat = build_card(SIM_MODEL_DIR, EngineConfig("m", kv_cache_block_size=16), ["chat"])
    other = replace(chat, artifacts=with_tokenizer({}).artifacts, context_length=64)
    found = card_differences(other, CARD)
    assert "model_type (--serve) chat, not chat,completions" in found
    files = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
    assert found[1:] == [f"another {name} (--model-path)" for name in files]


def test_separately_fetched_bytes_make_no_difference() -> None:
    assert card_differences(CARD.without_inline_bytes(), CARD) == []


def test_the_vocabulary_size_follows_from_the_largest_id() -> None:
    tokenizer = Tokenizer.from_file(str(SIM_MODEL_DIR / "tokenizer.json"))
    assert read_vocab_size(CARD) == max(tokenizer.get_vocab().values()) + 1
    gap = {"model": {"vocab": {"a": 0, "b": 90}}, "added_tokens": [{"id": 5, "content": "c"}]}
    assert read_vocab_size(with_tokenizer(gap)) == 91
    added = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 7}]}
    assert read_vocab_size(with_tokenizer(added)) == 8
    assert read_vocab_size(with_tokenizer({"model": {"vocab": [["a", 0.0]]}})) == 1


@pytest.mark.parametrize(
    "raw", [b"", b"[", [], {}, {"model": 1}, {"model": {"vocab": None}}, {"model": {"vocab": {}}}]
)
def test_the_vocabulary_of_an_unusual_tokenizer_is_unknown(raw: Any) -> None:
    assert read_vocab_size(with_tokenizer(raw)) is None


def test_a_separately_fetched_file_leaves_the_vocabulary_unknown() -> None:
    assert read_vocab_size(CARD.without_inline_bytes()) is None
    assert read_vocab_size(replace(CARD, artifacts={})) is None


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_an_engine_changes_texts_of_the_chat_template_only(tmp_path: Path, name: str) -> None:
    tokenizer = (SIM_MODEL_DIR / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(tokenizer)
    settings: dict[str, Any] = {"boi_token": "<image>"}
    template = "{{ '<image>' }}"
    if name == "tokenizer_config.json":
        settings["chat_template"] = template
    else:
        (tmp_path / name).write_text(template)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    texts = {"<image>": r"\n<image>"}
    config = EngineConfig("m", kv_cache_block_size=16, template_texts=texts)
    artifacts = build_card(tmp_path, config).artifacts
    found = json.loads(artifacts["tokenizer_config.json"].inline or b"")
    assert found["boi_token"] == "<image>"
    if name == "tokenizer_config.json":
        assert found["chat_template"] == r"{{ '\n<image>' }}"
    else:
        assert artifacts[name].inline == rb"{{ '\n<image>' }}"
    assert artifacts["tokenizer.json"].inline == tokenizer


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"engine": "echo"}, "dp_size: only of the sim; SGLang has dp_size in --engine-args"),
        ({"role": "decode"}, "dp_size: the sim has ranks as an aggregated worker only"),
    ],
)
def test_ranks_of_another_engine_or_role_are_rejected(
    settings: dict[str, str], problem: str
) -> None:
    assert problem in WorkerConfig(dp_size=2, **settings).problems()  # type: ignore[arg-type]

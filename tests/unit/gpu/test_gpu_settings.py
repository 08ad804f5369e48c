"""Settings, models and judgement of `make gpu-test`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.gpu.__main__ import engine_arguments, parse, problems
from tests.gpu.exactness import first_difference
from tests.gpu.load import Load, write_bodies
from tests.gpu.model import SHAPES, pad_tokenizer, parameter_count
from tests.gpu.servers import flags
from worker_svc.engines.sim.config import SIM_MODEL_DIR


@pytest.mark.parametrize(
    ("shape", "billions"), [("qwen2.5-0.5b", 0.494), ("qwen2.5-1.5b", 1.544), ("qwen2.5-7b", 7.616)]
)
def test_a_shape_has_the_parameters_of_its_model(shape: str, billions: float) -> None:
    assert round(parameter_count(shape) / 1e9, 3) == billions


def test_a_padded_tokenizer_encodes_as_before_and_decodes_every_id() -> None:
    before = json.loads((SIM_MODEL_DIR / "tokenizer.json").read_text("utf-8"))
    vocab_size = SHAPES["qwen2.5-0.5b"].vocab_size
    padded = Tokenizer.from_str(json.dumps(pad_tokenizer(before, vocab_size)))
    text = "The harbour light w5000 turns, and the keeper sleeps."
    ids = Tokenizer.from_str(json.dumps(before)).encode(text).ids
    assert padded.encode(text).ids == ids
    assert padded.get_vocab_size() == vocab_size
    assert padded.decode([vocab_size - 1]) == f" w{vocab_size - 1}"


def test_the_device_chooses_the_size_of_the_run() -> None:
    gpu, cpu = parse([]), parse(["--device", "cpu"])
    assert (gpu.shape, gpu.dtype, gpu.transfer_backend) == ("qwen2.5-1.5b", "bfloat16", "nixl")
    assert (cpu.shape, cpu.dtype, cpu.transfer_backend) == ("tiny", "float32", "mooncake_tcp")
    assert [load.concurrency for load in gpu.loads] == [8, 64]
    assert engine_arguments(gpu)["cuda_graph_max_bs_decode"] == 64
    own = parse(["--engine-args", '{"attention_backend": "triton"}'])
    assert engine_arguments(own)["attention_backend"] == "triton"


def test_an_unknown_part_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--parts", "pair,speed"])
    assert "speed is not one of pair, migration, load" in capsys.readouterr().err


def test_rounding_excuses_a_difference_only_after_a_migration() -> None:
    pair = {"prompts": 3, "equal": 3, "equal_at_once": 2, "complete_at_once": 3}
    migration = {"complete": True, "equal_before_kill": True, "equal": False}
    figures = {"pair": pair, "migration": migration}
    assert problems(figures, parse([])) == []
    assert len(problems(figures, parse(["--dtype", "float32"]))) == 2
    assert len(problems({"pair": pair | {"equal": 2}}, parse([]))) == 1


def test_failed_requests_of_a_load_are_problems() -> None:
    load = {"c8": {"kvmesh": {"errors": 1, "requests": 9}, "ratio_to_bare": {}}}
    assert problems({"load": load}, parse([])) == ["load c8 kvmesh: 1 errors, 9 requests"]


def test_arguments_become_flags() -> None:
    assert flags({"page_size": 16, "sleep_on_idle": True}) == [
        "--page-size",
        "16",
        "--sleep-on-idle",
    ]
    with pytest.raises(ValueError, match="no flag"):
        flags({"enable_lora": False})


def test_the_first_difference_of_two_texts() -> None:
    assert first_difference("abc", "abc") == []
    assert first_difference("abc", "abd") == [2]
    assert first_difference("ab", "abc") == [2]


def test_prompts_of_a_load_are_different(tmp_path: Path) -> None:
    write_bodies(tmp_path / "bodies", Load(1, 1.0, 30, 4))
    lines = (tmp_path / "bodies").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt.split()) for prompt in prompts} == {30}

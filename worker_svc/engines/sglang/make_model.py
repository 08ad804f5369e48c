"""Builds a small model folder for the SGLang engine: real layout, random weights.

usage: python -m worker_svc.engines.sglang.make_model OUT_DIR [--seed 0]

A Qwen2 of 2 layers and width 64 (0.6 million parameters, 2.3 MB) with the sim model's tokenizer and
chat template, so output is random real words. Equal seeds give equal weights. The folder is created
atomically: two workers may build the same one at once.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from worker_svc.engines.model_files import stop_ids, write_json, write_tokenizer_files

TINY_MODEL_DIR: Final = Path(".run/models/tiny")
CONTEXT_LENGTH: Final = 4096  # tokens

_LAYERS: Final = 2
_HIDDEN_SIZE: Final = 64
_ATTENTION_HEADS: Final = 4
_KV_HEADS: Final = 2
_HEAD_DIM: Final = _HIDDEN_SIZE // _ATTENTION_HEADS
_INTERMEDIATE_SIZE: Final = 128
# Large enough for a clear maximum of the logits, so that greedy output is stable.
_INIT_STD: Final = 0.2

Weights = Mapping[str, npt.NDArray[np.float32]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make_tiny_model", description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    write_tiny_model(options.out_dir, options.seed)


def write_tiny_model(out_dir: Path, seed: int = 0) -> None:
    """Writes the model into `out_dir`, creating its parents; no effect if `out_dir` exists."""
    if out_dir.exists():
        return
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent) as scratch:
        folder = Path(scratch) / "model"
        _write(folder, seed)
        with contextlib.suppress(OSError):  # another process created it first
            folder.rename(out_dir)
    assert out_dir.is_dir(), f"{out_dir} could not be written"


def _write(folder: Path, seed: int) -> None:
    # Not a requirement of KVMesh: installed with SGLang.
    from safetensors.numpy import save_file  # type: ignore[import-not-found]

    tokenizer = write_tokenizer_files(folder, CONTEXT_LENGTH)
    # The model's vocabulary equals the tokenizer's, so every generated id can be decoded.
    vocab_size = len(tokenizer.get_vocab(with_added_tokens=False))
    write_json(folder / "config.json", model_config(vocab_size, stop_ids(tokenizer)))
    weights = folder / "model.safetensors"
    save_file(random_weights(vocab_size, seed), weights)
    weights.chmod(0o644)


def model_config(vocab_size: int, eos_token_id: list[int]) -> dict[str, Any]:
    """Returns the content of `config.json`. Any: JSON values."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "eos_token_id": eos_token_id,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN_SIZE,
        "initializer_range": _INIT_STD,
        "intermediate_size": _INTERMEDIATE_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "model_type": "qwen2",
        "num_attention_heads": _ATTENTION_HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
    }


def random_weights(vocab_size: int, seed: int) -> Weights:
    """Returns normally distributed matrices for all names of a Qwen2 checkpoint; norms are 1."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            np.ones(shape, np.float32)
            if name.endswith("norm.weight")
            else rng.normal(0.0, _INIT_STD, shape).astype(np.float32)
        )
        for name, shape in _shapes(vocab_size)
    }


def _shapes(vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (vocab_size, _HIDDEN_SIZE)
    for index in range(_LAYERS):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (_HIDDEN_SIZE,)
        for name, heads in (("q", _ATTENTION_HEADS), ("k", _KV_HEADS), ("v", _KV_HEADS)):
            yield f"{layer}.self_attn.{name}_proj.weight", (heads * _HEAD_DIM, _HIDDEN_SIZE)
            yield f"{layer}.self_attn.{name}_proj.bias", (heads * _HEAD_DIM,)
        yield f"{layer}.self_attn.o_proj.weight", (_HIDDEN_SIZE, _ATTENTION_HEADS * _HEAD_DIM)
        yield f"{layer}.post_attention_layernorm.weight", (_HIDDEN_SIZE,)
        yield f"{layer}.mlp.gate_proj.weight", (_INTERMEDIATE_SIZE, _HIDDEN_SIZE)
        yield f"{layer}.mlp.up_proj.weight", (_INTERMEDIATE_SIZE, _HIDDEN_SIZE)
        yield f"{layer}.mlp.down_proj.weight", (_HIDDEN_SIZE, _INTERMEDIATE_SIZE)
    yield "model.norm.weight", (_HIDDEN_SIZE,)
    yield "lm_head.weight", (vocab_size, _HIDDEN_SIZE)


if __name__ == "__main__":
    main()

"""Builds a small model folder for the SGLang engine: real layout, random weights.

usage: python -m worker_svc.engines.sglang.make_model OUT_DIR [--seed 0]

A Qwen2 of 2 layers and width 64 (0.6 million parameters, 2.3 MB) with the sim model's tokenizer and
chat template, so output is random real words. Equal seeds give equal weights. The folder is created
atomically: two workers may build the same one at once.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from worker_svc.engines.model_files import stop_ids, write_json, write_tokenizer_files

TINY_MODEL_DIR: Final = Path(".run/models/tiny")
CONTEXT_LENGTH: Final = 4096  # tokens

Weights = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen2. vocab_size 0: that of the tokenizer. is_tied: the embedding is also the
    output matrix."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int = 0
    is_tied: bool = False

    @property
    def head_dim(self) -> int:
        """The size of one head."""
        return self.hidden_size // self.heads

    @property
    def init_std(self) -> float:
        """The deviation of the weights. Large enough for a clear maximum of the logits, so that
        greedy output is stable."""
        return 1.6 / math.sqrt(self.hidden_size)


TINY: Final = Shape(hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128)


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


def model_config(
    vocab_size: int,
    eos_token_id: list[int],
    shape: Shape = TINY,
    *,
    context_length: int = CONTEXT_LENGTH,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Returns the content of `config.json`. Any: JSON values."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "eos_token_id": eos_token_id,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": shape.init_std,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": context_length,
        "model_type": "qwen2",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": shape.is_tied,
        "torch_dtype": dtype,
        "vocab_size": vocab_size,
    }


def random_weights(vocab_size: int, seed: int) -> Weights:
    """Returns normally distributed matrices for all names of a Qwen2 checkpoint; norms are 1."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            np.ones(shape, np.float32)
            if name.endswith("norm.weight")
            else rng.normal(0.0, TINY.init_std, shape).astype(np.float32)
        )
        for name, shape in weight_shapes(TINY, vocab_size)
    }


def weight_shapes(shape: Shape, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and sizes of the weights of a Qwen2 checkpoint."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    yield "model.embed_tokens.weight", (vocab_size, hidden)
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            yield f"{layer}.self_attn.{name}_proj.weight", (heads * shape.head_dim, hidden)
            yield f"{layer}.self_attn.{name}_proj.bias", (heads * shape.head_dim,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, shape.heads * shape.head_dim)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not shape.is_tied:
        yield "lm_head.weight", (vocab_size, hidden)


if __name__ == "__main__":
    main()

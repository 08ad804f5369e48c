"""Writes what vLLM serves in the tests: a tiny model of random weights and a LoRA adapter for it.

usage: python -m tests.vllm.model_files OUT_DIR

- tiny: a Qwen2 like that of SGLang's tests, with heads of 32, the least of vLLM on a CPU.
- pirate: an adapter of rank 4 in the form of PEFT, large enough that other tokens follow.

Runs with vLLM's Python, which has safetensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import numpy as np

from worker_svc.engines.model_files import stop_ids, write_json, write_tokenizer_files
from worker_svc.engines.sglang.make_model import CONTEXT_LENGTH, Shape, model_config, weight_shapes

SHAPE: Final = Shape(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=128)
RANK: Final = 4


def main(folder: Path) -> None:
    # Not a requirement of KVMesh: installed with vLLM.
    from safetensors.numpy import save_file  # type: ignore[import-not-found]

    rng = np.random.default_rng(0)
    tokenizer = write_tokenizer_files(folder / "tiny", CONTEXT_LENGTH)
    vocab_size = len(tokenizer.get_vocab(with_added_tokens=False))
    config = model_config(vocab_size, stop_ids(tokenizer), SHAPE)
    write_json(folder / "tiny" / "config.json", config)
    weights = {
        name: np.ones(size, np.float32)
        if name.endswith("norm.weight")
        else rng.normal(0.0, SHAPE.init_std, size).astype(np.float32)
        for name, size in weight_shapes(SHAPE, vocab_size)
    }
    save_file(weights, folder / "tiny" / "model.safetensors")
    (folder / "pirate").mkdir()
    targets = {"q_proj": SHAPE.heads * SHAPE.head_dim, "v_proj": SHAPE.kv_heads * SHAPE.head_dim}
    adapter = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.{part}.weight": rng.normal(
            0.0, 0.5, size
        ).astype(np.float32)
        for layer in range(SHAPE.layers)
        for name, outputs in targets.items()
        for part, size in (("lora_A", (RANK, SHAPE.hidden_size)), ("lora_B", (outputs, RANK)))
    }
    save_file(adapter, folder / "pirate" / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": sorted(targets),
        "bias": "none",
        "base_model_name_or_path": "tiny",
    }
    (folder / "pirate" / "adapter_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

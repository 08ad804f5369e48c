"""A LoRA adapter of the tiny model, with random weights, in the form of PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from worker_svc.engines.sglang.make_model import TINY

RANK, ALPHA = 4, 8
TARGETS = {
    "q_proj": TINY.hidden_size,
    "v_proj": TINY.kv_heads * TINY.head_dim,
    "o_proj": TINY.hidden_size,
}
"""The adapted matrices of each layer, with the size of their output; their input is hidden_size."""


def write_adapter(folder: Path, seed: int) -> None:
    """Writes an adapter into a new folder. Equal seeds give equal weights."""
    from safetensors.numpy import save_file  # type: ignore[import-not-found]

    rng, weights = np.random.default_rng(seed), {}
    for layer in range(TINY.layers):
        for name, size in TARGETS.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, TINY.hidden_size)), ("B", (size, RANK))):
                values = rng.normal(0.0, TINY.init_std, shape).astype(np.float32)
                weights[f"{prefix}.lora_{part}.weight"] = values
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(TARGETS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_merged(model: Path, adapter: Path, folder: Path) -> None:
    """Writes a model whose weights include an adapter's, as the definition of LoRA states: each
    adapted matrix plus alpha / rank times B A."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(model / "model.safetensors")
    parts = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in parts if name.endswith(".lora_A.weight")]:
        matrix = name.removeprefix("base_model.model.").replace(".lora_A", "")
        product = parts[name.replace("lora_A", "lora_B")] @ parts[name]
        weights[matrix] = weights[matrix] + ALPHA / RANK * product
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text((model / "config.json").read_text())

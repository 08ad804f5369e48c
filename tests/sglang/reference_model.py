"""The hidden state of the tiny model, computed from its weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


# Any: numpy arrays.
def reference_state(model: Path, ids: Sequence[int]) -> Any:
    """The last hidden state of the last token, computed from the weights as the
    architecture of Qwen2 is published."""
    from safetensors.numpy import load_file  # type: ignore[import-not-found]

    config = json.loads((model / "config.json").read_text())
    weights = {
        k.removeprefix("model."): v for k, v in load_file(model / "model.safetensors").items()
    }
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, count = config["hidden_size"] // heads, len(ids)
    angles = np.outer(np.arange(count), 10000.0 ** (-np.arange(0, size, 2) / size))
    cos, sin = (np.tile(turn(angles), 2)[:, None] for turn in (np.cos, np.sin))
    mask = np.triu(np.full((count, count), -np.inf), 1)

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights[f"{name}.weight"]

    def project(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def rotate(x: Any) -> Any:
        first, second = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate((-second, first), axis=-1) * sin

    x = weights["embed_tokens.weight"][list(ids)].astype(np.float64)
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            project(y, f"{layer}.self_attn.{part}_proj").reshape(count, -1, size) for part in "qkv"
        )
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (rotate(k), v))
        scores = np.einsum("ihd,jhd->hij", rotate(q), k) / np.sqrt(size) + mask
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v)
        x = x + project(mixed.reshape(count, -1), f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate = project(y, f"{layer}.mlp.gate_proj")
        x = x + project(
            gate / (1 + np.exp(-gate)) * project(y, f"{layer}.mlp.up_proj"),
            f"{layer}.mlp.down_proj",
        )
    return norm(x, "norm")[-1]

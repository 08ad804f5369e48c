"""A tiny classifier of one class for tests: the tiny model with a head that scores its prompt."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from worker_svc.engines.sglang.make_model import TINY, write_tiny_model


def write_classifier(folder: Path, seed: int = 7) -> None:
    """Writes a Qwen2ForSequenceClassification with random weights into a new folder."""
    from safetensors.numpy import load_file, save_file  # type: ignore[import-not-found]

    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    rng = np.random.default_rng(seed)
    weights["score.weight"] = rng.normal(0.0, TINY.init_std, (1, TINY.hidden_size)).astype("f4")
    weights["score.bias"] = np.array([0.25], dtype=np.float32)
    save_file(weights, folder / "model.safetensors")

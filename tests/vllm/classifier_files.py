"""Writes a classifier of one class with the weights of the model `tiny` of `model_files`.

usage: python -m tests.vllm.classifier_files FOLDER

Runs with vLLM's Python, which has safetensors.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from tests.vllm.model_files import SHAPE


def main(folder: Path) -> None:
    # Not a requirement of KVMesh: installed with vLLM.
    from safetensors.numpy import load_file, save_file  # type: ignore[import-not-found]

    shutil.copytree(folder / "tiny", folder / "classifier", dirs_exist_ok=True)
    path = folder / "classifier" / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    path.write_text(json.dumps(config))
    weights = load_file(folder / "tiny" / "model.safetensors")
    del weights["lm_head.weight"]
    # Scores are clearly different, and none is near 0 or 1.
    head = np.random.default_rng(7).normal(0.0, SHAPE.init_std / 4, (1, SHAPE.hidden_size))
    weights["score.weight"] = head.astype(np.float32)
    save_file(weights, folder / "classifier" / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Models with random weights in the shape of a Qwen 2.5, for measurements without a download.

The tokenizer is that of the sim model, padded with unreachable entries to the vocabulary of the
shape, so that every generated id can be decoded and prompts of words have about one token a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from worker_svc.engines.model_files import stop_ids, write_json, write_text, write_tokenizer_files
from worker_svc.engines.sglang.make_model import TINY, Shape, model_config, weight_shapes

CONTEXT_LENGTH: Final = 8192  # tokens
SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "tiny": TINY,
        "qwen2.5-0.5b": Shape(896, 24, 14, 2, 4864, 151_936, is_tied=True),
        "qwen2.5-1.5b": Shape(1536, 28, 12, 2, 8960, 151_936, is_tied=True),
        "qwen2.5-7b": Shape(3584, 28, 28, 4, 18_944, 152_064),
    }
)


def write_model(folder: Path, name: str, device: str, dtype: str, seed: int = 0) -> None:
    """Writes the model of the shape `name` into the folder. device: where weights are drawn; dtype:
    of the file, by torch's name. Equal arguments on equal devices give equal weights."""
    # Installed with SGLang.
    import torch  # type: ignore[import-not-found]
    from safetensors.torch import save_file  # type: ignore[import-not-found]

    shape = SHAPES[name]
    tokenizer = write_tokenizer_files(folder, CONTEXT_LENGTH)
    vocab_size = shape.vocab_size or len(tokenizer.get_vocab(with_added_tokens=False))
    path = folder / "tokenizer.json"
    write_text(path, json.dumps(pad_tokenizer(json.loads(path.read_text("utf-8")), vocab_size)))
    ids = stop_ids(tokenizer)
    config = model_config(vocab_size, ids, shape, context_length=CONTEXT_LENGTH, dtype=dtype)
    write_json(folder / "config.json", config)
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = {}
    for key, size in weight_shapes(shape, vocab_size):
        weight = torch.ones(size, device=device)
        if not key.endswith("norm.weight"):
            weight.normal_(0.0, shape.init_std, generator=generator)
        weights[key] = weight.to(getattr(torch, dtype)).cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# Any: JSON, here and below.
def pad_tokenizer(tokenizer: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Returns a tokenizer.json with `vocab_size` ids. No merge leads to an added id; it decodes to
    a word with its number."""
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    first = 1 + max(vocab.values())
    added = {f"Ġw{number}": number for number in range(first, vocab_size)}
    assert not added.keys() & vocab.keys(), "a token has the name of an added one"
    model = {**tokenizer["model"], "vocab": vocab | added}
    return {**tokenizer, "model": model}


def parameter_count(name: str) -> int:
    """Returns the number of weights of a shape with its own vocabulary."""
    shape = SHAPES[name]
    total = 0
    for _, size in weight_shapes(shape, shape.vocab_size or 1):
        product = 1
        for one in size:
            product *= one
        total += product
    return total

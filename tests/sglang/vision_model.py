"""A tiny Gemma 3 with random weights that takes images of 64 tokens, in the real layout."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from worker_svc.engines.model_files import stop_ids, write_json, write_text, write_tokenizer_files
from worker_svc.engines.sim.make_model import MEDIA_CONTENT, TEXT_CONTENT

IMAGE_TOKENS = 64
START, END, PLACEHOLDER = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
CONTEXT, WIDTH, VISION_WIDTH, HEADS, KV_HEADS, HEAD = 4096, 64, 32, 4, 2, 16
PATCH, SIDE = 7, 56
LAYERS = 2


def write_vision_model(folder: Path) -> None:
    """Writes the model with its tokenizer and the settings of its processor."""
    from safetensors.numpy import save_file  # type: ignore[import-not-found]

    tokenizer = write_tokenizer_files(folder, CONTEXT)
    tokenizer.add_special_tokens([START, END, PLACEHOLDER])
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=False))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    content = MEDIA_CONTENT.replace("'<|' + part['type'] + '|>'", f"'{START}'")
    settings["chat_template"] = settings["chat_template"].replace(TEXT_CONTENT, content)
    names = {"boi_token": START, "eoi_token": END, "image_token": PLACEHOLDER}
    write_json(path, settings | names | {"extra_special_tokens": names})
    processor = {"image_seq_length": IMAGE_TOKENS, "processor_class": "Gemma3Processor"}
    write_json(folder / "processor_config.json", processor)
    pixels = {
        **{"do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 2},
        **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255},
        **{"image_processor_type": "Gemma3ImageProcessor", "size": {"height": SIDE, "width": SIDE}},
    }
    write_json(folder / "preprocessor_config.json", processor | pixels)
    vocabulary = tokenizer.get_vocab_size()
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "dtype": "float32",
        "boi_token_index": tokenizer.token_to_id(START),
        "eoi_token_index": tokenizer.token_to_id(END),
        "image_token_index": tokenizer.token_to_id(PLACEHOLDER),
        "eos_token_id": stop_ids(tokenizer),
        "mm_tokens_per_image": IMAGE_TOKENS,
        "text_config": {
            **{"model_type": "gemma3_text", "vocab_size": vocabulary, "hidden_size": WIDTH},
            **{"intermediate_size": 128, "num_hidden_layers": LAYERS, "head_dim": HEAD},
            **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS},
            **{"max_position_embeddings": CONTEXT, "sliding_window": CONTEXT},
            **{"query_pre_attn_scalar": HEAD, "layer_types": ["full_attention"] * LAYERS},
            **{"eos_token_id": stop_ids(tokenizer), "bos_token_id": 0, "pad_token_id": 0},
        },
        "vision_config": {
            **{"model_type": "siglip_vision_model", "hidden_size": VISION_WIDTH},
            **{"intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2},
            **{"image_size": SIDE, "patch_size": PATCH, "vision_use_head": False},
        },
    }
    write_json(folder / "config.json", config)
    rng = np.random.default_rng(0)
    weights = {name: _weights(rng, name, shape) for name, shape in _shapes(vocabulary)}
    save_file(weights, folder / "model.safetensors")


def _weights(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    """Small embeddings and clear attention: otherwise the output only repeats the last token. Norms
    of the language model are stored as their difference from 1."""
    if len(shape) > 1:
        return rng.normal(0.0, 0.02 if "embed_tokens" in name else 0.2, shape).astype(np.float32)
    value = 1.0 if re.match("vision.*norm.*weight|.*[qk]_norm", name) else 0.0
    return np.full(shape, value, np.float32)


def _shapes(vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    vision, width = "vision_tower.vision_model", VISION_WIDTH
    yield f"{vision}.embeddings.patch_embedding.weight", (width, 3, PATCH, PATCH)
    yield f"{vision}.embeddings.patch_embedding.bias", (width,)
    yield f"{vision}.embeddings.position_embedding.weight", ((SIDE // PATCH) ** 2, width)
    for index in range(LAYERS):
        layer = f"{vision}.encoder.layers.{index}"
        matrices = {f"self_attn.{one}_proj": (width, width) for one in ("q", "k", "v", "out")}
        matrices |= {"mlp.fc1": (64, width), "mlp.fc2": (width, 64)}
        for name, shape in matrices.items():
            yield f"{layer}.{name}.weight", shape
            yield f"{layer}.{name}.bias", shape[:1]
        for name in ("layer_norm1", "layer_norm2"):
            yield from ((f"{layer}.{name}.{one}", (width,)) for one in ("weight", "bias"))
    yield from ((f"{vision}.post_layernorm.{one}", (width,)) for one in ("weight", "bias"))
    yield "multi_modal_projector.mm_input_projection_weight", (width, WIDTH)
    yield "multi_modal_projector.mm_soft_emb_norm.weight", (width,)
    yield "language_model.model.embed_tokens.weight", (vocabulary, WIDTH)
    for index in range(LAYERS):
        layer = f"language_model.model.layers.{index}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{layer}.self_attn.{name}_proj.weight", (heads * HEAD, WIDTH)
        yield f"{layer}.self_attn.o_proj.weight", (WIDTH, HEADS * HEAD)
        for name in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{name}.weight", (HEAD,)
        for name in ("gate_proj", "up_proj"):
            yield f"{layer}.mlp.{name}.weight", (128, WIDTH)
        yield f"{layer}.mlp.down_proj.weight", (WIDTH, 128)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{layer}.{name}_layernorm.weight", (WIDTH,)
    yield "language_model.model.norm.weight", (WIDTH,)

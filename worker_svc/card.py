"""The model card of a folder: what frontends need of it to speak for the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.blocks import SCHEME_ID
from common.card import Artifact, ModelCard, ModelType, model_type_of
from common.errors import InvalidRequest
from worker_svc.engine import EngineConfig

_NEEDED = ("tokenizer.json", "tokenizer_config.json")
_WANTED = ("generation_config.json", "chat_template.jinja", "config.json")


# What a worker of tokens can be asked for.
KINDS = ("chat", "completions")


def model_type_served(kinds: Sequence[str]) -> ModelType:
    """The kinds as a card has them. Raises ValueError for none, or one that is none of KINDS."""
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
    if not kinds:
        raise ValueError(f"name at least one of {', '.join(KINDS)}")
    return model_type_of(kinds)


def card_of(folder: Path, config: EngineConfig, kinds: Sequence[str] = KINDS) -> ModelCard:
    """The card, its artifacts inline. kinds: see `model_type_served`.

    Raises InvalidRequest naming the file that is missing.
    """
    artifacts = {}
    for name in (*_NEEDED, *_WANTED):
        path = folder / name
        if path.is_file():
            artifacts[name] = Artifact.of(path.read_bytes())
        elif name in _NEEDED:
            raise InvalidRequest(f"{folder} has no {name}", "model_path")
    return ModelCard(
        name=config.advertised_name,
        model_type=model_type_served(kinds),
        context_length=config.context_length,
        kv_block_size=config.kv_cache_block_size,
        hash_scheme=str(SCHEME_ID) if config.kv_index != "none" else "",
        eos_token_ids=_eos_token_ids(folder),
        artifacts=artifacts,
    )


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    """From generation_config.json, else config.json, as Hugging Face does."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = _object(path).get("eos_token_id") if path.is_file() else None
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()


# Any: a JSON object of somebody's model.
def _object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path.name} is not a JSON object", "model_path")
    return value

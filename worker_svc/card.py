"""The model card of a folder: what frontends need of it to speak for the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from common.errors import InvalidRequest
from common.kv.hashing import SCHEME_ID
from common.registry.card import Artifact, ModelCard, ModelType, model_type_of
from worker_svc.engines.contract import EngineConfig

_NEEDED = ("tokenizer.json", "tokenizer_config.json")
_WANTED = ("generation_config.json", "chat_template.jinja", "config.json")


# What some fields of a card follow from.
_KNOBS = {
    "model_type": "--serve",
    "context_length": "--context-length",
    "kv_block_size": "--block-size",
}

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


def missing_files(folder: Path) -> list[str]:
    """The files that a card needs and the folder has not."""
    return [name for name in _NEEDED if not (folder / name).is_file()]


def card_of(folder: Path, config: EngineConfig, kinds: Sequence[str] = KINDS) -> ModelCard:
    """The card, its artifacts inline. kinds: see `model_type_served`.

    Raises InvalidRequest naming a file that is missing.
    """
    if missing := missing_files(folder):
        raise InvalidRequest(f"{folder} has no {missing[0]}", "model_path")
    paths = (folder / name for name in (*_NEEDED, *_WANTED))
    artifacts = {path.name: Artifact.of(path.read_bytes()) for path in paths if path.is_file()}
    return ModelCard(
        name=config.advertised_name,
        model_type=model_type_served(kinds),
        context_length=config.context_length,
        kv_block_size=config.kv_cache_block_size,
        hash_scheme=str(SCHEME_ID) if config.kv_index != "none" else "",
        eos_token_ids=_eos_token_ids(folder),
        artifacts=artifacts,
    )


def differences(card: ModelCard, other: ModelCard) -> list[str]:
    """What tells two cards apart, field by field: "kv_block_size (--block-size) 32, not 16"."""
    found = []
    for spec in fields(ModelCard):
        here, there = getattr(card, spec.name), getattr(other, spec.name)
        if spec.name == "artifacts":
            digests = [{name: one.sha256 for name, one in files.items()} for files in (here, there)]
            names = sorted({name for name, _ in digests[0].items() ^ digests[1].items()})
            found += [f"another {name} (--model-path)" for name in names]
        elif here != there:
            knob = f" ({_KNOBS[spec.name]})" if spec.name in _KNOBS else ""
            found.append(f"{spec.name}{knob} {_shown(here)}, not {_shown(there)}")
    return found


# Any: the value of whatever field of a card.
def _shown(value: Any) -> str:
    if isinstance(value, ModelType):
        return ",".join(str(flag.name).lower() for flag in value)
    return str(value)


def vocab_size_of(card: ModelCard) -> int | None:
    """Token ids of the card's tokenizer.json are below this; None: that file does not say."""
    try:
        tokenizer = json.loads(card.artifacts["tokenizer.json"].inline or b"")
        vocab = tokenizer["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        added = [token["id"] for token in tokenizer.get("added_tokens") or ()]
        return int(max((*ids, *added))) + 1
    except (KeyError, TypeError, ValueError):
        return None


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

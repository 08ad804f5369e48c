"""Builds the model card of a model folder: the files and sizes that frontends need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from common.errors import InvalidRequest
from common.kv.hashing import HASH_SCHEME_ID
from common.registry.card import Artifact, ModelCard, ModelType, parse_model_type
from worker_svc.engines.contract import EngineConfig
from worker_svc.engines.model_folder import (
    REQUIRED_FILES,
    find_missing_files,
    read_eos_token_ids,
)

_OPTIONAL_FILES = ("generation_config.json", "chat_template.jinja", "config.json")

# CLI flags that set a field of the card.
_CARD_SETTINGS = {
    "aliases": "--model-aliases",
    "model_type": "--serve",
    "context_length": "--context-length",
    "kv_block_size": "--block-size",
    "tool_call_parser": "--tool-call-parser",
    "control_tokens_in_text": "--control-tokens-in-text",
    "reasoning_parser": "--reasoning-parser",
}

# Kinds of requests that a worker of token ids can serve.
ENDPOINT_KINDS = ("chat", "completions", "embedding", "score")


def served_model_type(kinds: Sequence[str]) -> ModelType:
    """Returns the endpoints as flags. Raises ValueError for an unknown one or an empty list."""
    for kind in kinds:
        if kind not in ENDPOINT_KINDS:
            raise ValueError(f"{kind!r} is not one of {', '.join(ENDPOINT_KINDS)}")
    if not kinds:
        raise ValueError(f"name at least one of {', '.join(ENDPOINT_KINDS)}")
    return parse_model_type(kinds)


def build_card(
    folder: Path,
    config: EngineConfig,
    kinds: Sequence[str] = (),
    *,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    control_tokens_in_text: bool = False,
    aliases: Sequence[str] = (),
) -> ModelCard:
    """Returns the card with its artifacts inline. kinds: requests to serve; empty: the `kinds` of
    the engine.

    Raises InvalidRequest naming a missing file, or a kind that the engine does not serve.
    """
    for kind in kinds:
        if kind not in (offered := (*config.kinds, *config.kinds_on_request)):
            text = f"the engine serves {', '.join(offered)}, but not {kind}"
            raise InvalidRequest(text, "serve")
    is_text = config.model_input == "text"
    if not is_text and (missing := find_missing_files(folder)):
        raise InvalidRequest(f"{folder} has no {missing[0]}", "model_path")
    paths = (folder / name for name in (*REQUIRED_FILES, *_OPTIONAL_FILES))
    artifacts = {
        path.name: Artifact.of(_read_artifact(path, config.template_texts))
        for path in paths
        if not is_text and path.is_file()
    }
    return ModelCard(
        name=config.advertised_name,
        aliases=tuple(sorted(set(aliases) - {config.advertised_name})),
        model_type=served_model_type(kinds or config.kinds),
        model_input=config.model_input,
        context_length=config.context_length,
        kv_block_size=config.kv_cache_block_size,
        hash_scheme=str(HASH_SCHEME_ID) if config.kv_index != "none" else "",
        eos_token_ids=() if is_text else read_eos_token_ids(folder),
        artifacts=artifacts,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        control_tokens_in_text=control_tokens_in_text,
        embedding_size=config.embedding_size,
        shorter_embeddings=config.shorter_embeddings,
        media=config.media,
    )


def _read_artifact(path: Path, template_texts: Mapping[str, str]) -> bytes:
    """Returns the content of a file, with other texts in a chat template."""
    content = path.read_bytes()
    if not template_texts:
        return content
    if path.name == "chat_template.jinja":
        return _replace(content.decode(), template_texts).encode()
    if path.name == "tokenizer_config.json":
        settings = json.loads(content)
        if isinstance(settings.get("chat_template"), str):
            settings["chat_template"] = _replace(settings["chat_template"], template_texts)
            return json.dumps(settings).encode()
    return content


def _replace(text: str, texts: Mapping[str, str]) -> str:
    for old, new in texts.items():
        text = text.replace(old, new)
    return text


def card_differences(card: ModelCard, other: ModelCard) -> list[str]:
    """Returns the differences of two cards by field: "kv_block_size (--block-size) 32, not 16"."""
    found = []
    for spec in fields(ModelCard):
        ours, theirs = getattr(card, spec.name), getattr(other, spec.name)
        if spec.name == "artifacts":
            digests = [
                {name: file.sha256 for name, file in files.items()} for files in (ours, theirs)
            ]
            names = sorted({name for name, _ in digests[0].items() ^ digests[1].items()})
            found += [f"another {name} (--model-path)" for name in names]
        elif ours != theirs:
            setting = f" ({_CARD_SETTINGS[spec.name]})" if spec.name in _CARD_SETTINGS else ""
            found.append(f"{spec.name}{setting} {_format_value(ours)}, not {_format_value(theirs)}")
    return found


# Any: the value of any field of a card.
def _format_value(value: Any) -> str:
    if isinstance(value, ModelType):
        return ",".join(str(flag.name).lower() for flag in value)
    return str(value)


def read_vocab_size(card: ModelCard) -> int | None:
    """Returns the largest id of tokenizer.json plus 1; None if the file does not list them."""
    try:
        tokenizer = json.loads(card.artifacts["tokenizer.json"].inline or b"")
        vocab = tokenizer["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        added = [token["id"] for token in tokenizer.get("added_tokens") or ()]
        return int(max((*ids, *added))) + 1
    except (KeyError, TypeError, ValueError):
        return None

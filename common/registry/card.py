"""The model card: everything a frontend needs to serve a model, and its checksum (pure).

The checksum is the SHA-256 of the card's canonical JSON, which holds every field, and artifacts by
their own digest. Equal checksums therefore mean equal cards, and a store may keep a card under
its checksum without expiry. Aliases and user_data are included: otherwise the card stored first
would silently replace one that differs only there. The bytes of an artifact are not included, so
it makes no difference whether they travel inside the card. Facts about one replica belong in
`Instance.meta`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Flag, auto
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import JsonValue, PlainValidator, TypeAdapter

from common.errors import InvalidRequest
from common.registry.instances import parse_json, slugify
from common.request.media import PART_NAMES, MediaInput

# Limit of a stored card.
CARD_BYTES_MAX = 512 << 20

ModelInput = Literal["tokens", "text"]

# An artifact name becomes a file name in a cache directory.
_ARTIFACT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ModelType(Flag):
    """The request kinds of a model, combined with `|`; in JSON a list of lower-case names."""

    CHAT = auto()
    COMPLETIONS = auto()
    EMBEDDING = auto()
    PREFILL = auto()
    SCORE = auto()


def parse_model_type(names: Iterable[str]) -> ModelType:
    """Returns the flags of lower-case names, combined. Raises ValueError with an unknown name."""
    flags_by_name = {str(flag.name).lower(): flag for flag in ModelType}
    result = ModelType(0)
    for name in names:
        if not isinstance(name, str) or name not in flags_by_name:
            raise ValueError(f"{name!r} is not one of {', '.join(flags_by_name)}")
        result |= flags_by_name[name]
    return result


def _parse_model_type_list(raw: object) -> ModelType:
    if not isinstance(raw, list):
        raise ValueError("must be a list of names")
    return parse_model_type(raw)


def _decode_inline(raw: object) -> bytes | None:
    if raw is None:
        return None
    if not isinstance(raw, str):
        raise ValueError("must be base64 text or null")
    return base64.b64decode(raw, validate=True)


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file of a model. sha256: lower-case hex; size in bytes; inline: the bytes, or None."""

    sha256: str
    size: int
    inline: Annotated[bytes | None, PlainValidator(_decode_inline)] = None

    @staticmethod
    def of(data: bytes, *, inline: bool = True) -> Artifact:
        """Returns the artifact with content `data`; with `inline`, the card carries the bytes."""
        return Artifact(hashlib.sha256(data).hexdigest(), len(data), data if inline else None)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as it is served.

    Raises InvalidRequest with the field of a value that is out of range.
    """

    name: str
    """What clients put into `model` (required)."""

    aliases: tuple[str, ...] = ()
    """Further names."""

    model_type: Annotated[ModelType, PlainValidator(_parse_model_type_list)] = (
        ModelType.CHAT | ModelType.COMPLETIONS
    )
    model_input: ModelInput = "tokens"
    """`tokens`: the frontend renders and tokenizes, for which it needs the artifacts; `text`: the
    request passes through to the engine."""

    context_length: int | None = None
    """In tokens; None: unknown. A 0 is read as None."""

    kv_block_size: int | None = None
    """In tokens; None: unknown."""

    hash_scheme: str = ""
    """Id of the block hash of `common/kv/hashing.py`; "": the model is not indexed."""

    eos_token_ids: tuple[int, ...] = ()
    artifacts: Mapping[str, Artifact] = field(default_factory=dict, hash=False)
    """By file name, for example tokenizer.json, generation_config.json, chat_template.jinja."""

    tool_call_parser: str | None = None
    """Name of the parser; None: no parsing."""

    reasoning_parser: str | None = None
    """Name of the parser; None: no parsing."""

    default_max_tokens: int | None = None
    """For requests without max_tokens; None: the rest of the context."""

    control_tokens_in_text: bool = False
    """Whether control tokens in messages of clients act as such and are not ordinary text."""

    embedding_size: int | None = None
    """Coordinates of a vector; None: unknown, or no embeddings."""

    shorter_embeddings: bool = False
    """Whether the first coordinates of a vector alone are a valid vector ("Matryoshka")."""

    media: Mapping[str, MediaInput] = field(default_factory=dict, hash=False)
    """What the model takes besides text, by kind ("image", "audio")."""

    user_data: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "artifacts", MappingProxyType(dict(self.artifacts)))
        object.__setattr__(self, "user_data", MappingProxyType(dict(self.user_data)))
        object.__setattr__(self, "media", MappingProxyType(dict(self.media)))
        if self.context_length == 0:
            object.__setattr__(self, "context_length", None)
        if not self.name:
            raise InvalidRequest("a card needs a name", "name")
        if not self.model_type:
            raise InvalidRequest("a card needs at least one model_type", "model_type")
        for name in ("context_length", "kv_block_size", "default_max_tokens", "embedding_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be at least 1 or absent, not {value}", name)
        if any(not 0 <= token < 2**32 for token in self.eos_token_ids):
            raise InvalidRequest("eos_token_ids must fit 32 bits", "eos_token_ids")
        if unknown := self.media.keys() - PART_NAMES.keys():
            raise InvalidRequest(f"media: {min(unknown)!r} is not a known kind", "media")
        for name, artifact in self.artifacts.items():
            _validate_artifact(name, artifact)

    @property
    def requires_preprocessing(self) -> bool:
        """Whether the frontend renders and tokenizes (otherwise the request passes through)."""
        return self.model_input == "tokens"

    @property
    def checksum(self) -> str:
        """64 hex digits, computed from `canonical_json` at every call (tens of µs)."""
        return hashlib.sha256(self.canonical_json()).hexdigest()

    def canonical_json(self) -> bytes:
        """Returns the input of the checksum: sorted keys, no blanks, UTF-8, no inline bytes.

        Fields with their default are omitted. So a field added later does not change old
        checksums, and an older reader rejects a card that uses it, by its checksum.
        """
        return _dump_canonical_json(_card_to_json(self.without_inline_bytes()))

    def without_inline_bytes(self, *, larger_than_bytes: int = -1) -> ModelCard:
        """Returns the same card (and checksum) without the bytes of artifacts above
        `larger_than_bytes`."""
        artifacts_without_bytes = {
            name: replace(a, inline=None) if a.size > larger_than_bytes else a
            for name, a in self.artifacts.items()
        }
        return replace(self, artifacts=artifacts_without_bytes)


@dataclass(frozen=True, slots=True)
class _CardEnvelope:
    checksum: str
    card: ModelCard


_CARD_ENVELOPE_ADAPTER: TypeAdapter[_CardEnvelope] = TypeAdapter(_CardEnvelope)


def encode_card(card: ModelCard) -> bytes:
    """Returns `{"card": …, "checksum": …}`, inline artifacts in base64."""
    return _dump_canonical_json({"card": _card_to_json(card), "checksum": card.checksum})


def decode_card(raw: bytes, expected_checksum: str | None = None) -> ModelCard:
    """Returns the card in `raw`, with size and digest of inline artifacts and the checksum
    verified.

    Raises InvalidRequest. Its field is the path that differs, or `checksum` if the content does
    not match the checksum in `raw` or `expected_checksum`.
    """
    envelope = parse_json(_CARD_ENVELOPE_ADAPTER, raw, "model card")
    card = envelope.card
    for name, artifact in card.artifacts.items():
        if artifact.inline is not None:
            verify_artifact(name, artifact, artifact.inline)
    actual_checksum = card.checksum
    for required_checksum in (envelope.checksum, expected_checksum):
        if required_checksum not in (None, actual_checksum):
            raise InvalidRequest(
                f"the card of {card.name!r} has checksum {actual_checksum}, not "
                f"{required_checksum}",
                "checksum",
            )
    return card


def verify_artifact(name: str, artifact: Artifact, data: bytes) -> None:
    """Raises InvalidRequest, with the field that differs, unless `data` matches `artifact`."""
    if len(data) != artifact.size:
        raise InvalidRequest(
            f"artifact {name} has {len(data)} bytes, in the card {artifact.size}",
            f"artifacts.{name}.size",
        )
    digest = hashlib.sha256(data).hexdigest()
    if digest != artifact.sha256:
        raise InvalidRequest(
            f"artifact {name} has sha256 {digest}, in the card {artifact.sha256}",
            f"artifacts.{name}.sha256",
        )


def model_slug(name: str) -> str:
    """Returns a unique store key for `name`: at most 128 characters, never with a leading dot.

    A name that differs from its slug gets eight digits of its SHA-256 appended, so that `Qwen/A`
    and `qwen_a` have different keys.
    """
    slug = slugify(name)
    if slug == name and name and not name.startswith(".") and len(name) <= 128:
        return name
    suffix = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{slug[:100].lstrip('.')}-{suffix}"


def _validate_artifact(name: str, artifact: Artifact) -> None:
    if not _ARTIFACT_NAME.fullmatch(name):
        raise InvalidRequest(f"artifact name {name!r} is not a plain file name", "artifacts")
    if not _SHA256.fullmatch(artifact.sha256):
        raise InvalidRequest(f"sha256 of {name} is not 64 hex digits", f"artifacts.{name}.sha256")
    if artifact.size < 0:
        raise InvalidRequest(f"size of {name} is negative", f"artifacts.{name}.size")


# Any: JSON trees.
def _card_to_json(card: ModelCard) -> dict[str, Any]:
    default = ModelCard(name="-")  # Not a real name, so that the key is always written.
    values = {f.name: getattr(card, f.name) for f in fields(card)}
    raw: dict[str, Any] = {k: v for k, v in values.items() if v != getattr(default, k)}
    if "model_type" in raw:
        raw["model_type"] = sorted(str(flag.name).lower() for flag in card.model_type)
    if "artifacts" in raw:
        raw["artifacts"] = {name: _artifact_to_json(a) for name, a in card.artifacts.items()}
    if "media" in raw:
        raw["media"] = {kind: asdict(media_input) for kind, media_input in card.media.items()}
    if "user_data" in raw:
        raw["user_data"] = dict(card.user_data)
    return raw


def _artifact_to_json(artifact: Artifact) -> dict[str, Any]:
    inline = None if artifact.inline is None else base64.b64encode(artifact.inline).decode()
    return {"sha256": artifact.sha256, "size": artifact.size, "inline": inline}


def _dump_canonical_json(json_object: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(
            json_object, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the card is not JSON: {error}", "user_data") from error

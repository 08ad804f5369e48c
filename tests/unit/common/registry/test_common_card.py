from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.registry.card import (
    Artifact,
    ModelCard,
    ModelType,
    decode_card,
    encode_card,
    model_slug,
    verify_artifact,
)
from common.registry.instances import slugify
from common.request.media import MediaInput

CARD = ModelCard(
    name="Qwen/Qwen3-0.6B",
    aliases=("qwen",),
    model_type=ModelType.CHAT | ModelType.EMBEDDING,
    context_length=40960,
    kv_block_size=16,
    hash_scheme="kvmesh-1",
    eos_token_ids=(151645, 151643),
    artifacts={
        "tokenizer.json": Artifact.of(b'{"model": {}}'),
        "generation_config.json": Artifact.of(b"{}", inline=False),
    },
    tool_call_parser="hermes",
    default_max_tokens=512,
    user_data={"owner": {"team": ["ä", 1.5, None]}},
)


def tampered(change: Callable[[dict[str, Any]], None]) -> bytes:
    raw = json.loads(encode_card(CARD))
    change(raw)
    return json.dumps(raw).encode()


def test_a_card_survives_encoding() -> None:
    again = decode_card(encode_card(CARD), CARD.checksum)
    assert again == CARD
    assert again.artifacts["tokenizer.json"].inline == b'{"model": {}}'


def test_the_checksum_is_the_digest_of_the_canonical_json() -> None:
    assert CARD.checksum == hashlib.sha256(CARD.canonical_json()).hexdigest()
    bare = ModelCard(name="m")
    assert bare.canonical_json() == b'{"name":"m"}'


def test_the_checksum_ignores_order_and_whether_bytes_travel_inline() -> None:
    backwards = dict(reversed(tuple(CARD.artifacts.items())))
    assert dataclasses.replace(CARD, artifacts=backwards).checksum == CARD.checksum
    assert CARD.without_inline_bytes().checksum == CARD.checksum
    assert len(encode_card(CARD.without_inline_bytes())) < len(encode_card(CARD))


def test_only_artifacts_above_a_size_lose_their_inline_bytes() -> None:
    small, large = Artifact.of(b"12345"), Artifact.of(b"123456")
    card = ModelCard(name="m", artifacts={"small": small, "large": large})
    thin = card.without_inline_bytes(larger_than_bytes=5)
    assert thin.artifacts["small"].inline == b"12345"
    assert thin.artifacts["large"].inline is None
    assert thin.checksum == card.checksum


OTHERS: dict[str, Any] = {
    "name": "other",
    "aliases": ("q",),
    "model_type": ModelType.CHAT,
    "model_input": "text",
    "context_length": None,
    "kv_block_size": 32,
    "hash_scheme": "kvmesh-2",
    "eos_token_ids": (1,),
    "artifacts": {"tokenizer.json": Artifact.of(b"other")},
    "tool_call_parser": None,
    "reasoning_parser": "deepseek",
    "default_max_tokens": 511,
    "control_tokens_in_text": True,
    "embedding_size": 8,
    "shorter_embeddings": True,
    "media": {"image": MediaInput(1, 2, 3, 4)},
    "user_data": {},
}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(ModelCard)])
def test_the_checksum_covers_every_field(name: str) -> None:
    other = dataclasses.replace(CARD, **{name: OTHERS[name]})
    assert other.checksum != CARD.checksum
    assert decode_card(encode_card(other)) == other


def test_a_context_length_of_zero_means_unknown() -> None:
    assert ModelCard(name="m", context_length=0) == ModelCard(name="m")


def test_only_a_model_that_takes_tokens_needs_preprocessing() -> None:
    assert ModelCard(name="m").requires_preprocessing
    assert not ModelCard(name="m", model_input="text").requires_preprocessing


def _spoil_content(raw: dict[str, Any]) -> None:
    raw["card"]["artifacts"]["tokenizer.json"]["inline"] = "eyJtb2RlbCI6IFtdfQ=="


def _cut_content(raw: dict[str, Any]) -> None:
    raw["card"]["artifacts"]["tokenizer.json"]["inline"] = "eyJt"


def _rename(raw: dict[str, Any]) -> None:
    raw["card"]["name"] = "mallory"


def _restate(raw: dict[str, Any]) -> None:
    raw["checksum"] = "0" * 64


def _mistype(raw: dict[str, Any]) -> None:
    raw["card"]["kv_block_size"] = "16"


def _forget_name(raw: dict[str, Any]) -> None:
    del raw["card"]["name"]


def _invent_type(raw: dict[str, Any]) -> None:
    raw["card"]["model_type"] = ["chat", "telepathy"]


def _break_base64(raw: dict[str, Any]) -> None:
    raw["card"]["artifacts"]["tokenizer.json"]["inline"] = "%"


def _newer_field(raw: dict[str, Any]) -> None:
    raw["card"]["invented_later"] = 1
    sealed = json.dumps(raw["card"], sort_keys=True, separators=(",", ":")).encode()
    raw["checksum"] = hashlib.sha256(sealed).hexdigest()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (_spoil_content, "artifacts.tokenizer.json.sha256"),
        (_cut_content, "artifacts.tokenizer.json.size"),
        (_rename, "checksum"),
        (_restate, "checksum"),
        (_newer_field, "checksum"),
        (_mistype, "card.kv_block_size"),
        (_forget_name, "card.name"),
        (_invent_type, "card.model_type"),
        (_break_base64, "card.artifacts.tokenizer.json.inline"),
    ],
)
def test_a_damaged_card_is_rejected_with_the_differing_field(
    change: Callable[[dict[str, Any]], None], path: str
) -> None:
    with pytest.raises(InvalidRequest) as rejected:
        decode_card(tampered(change))
    assert rejected.value.field == path


def test_a_valid_card_under_another_key_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="not " + "1" * 64) as rejected:
        decode_card(encode_card(CARD), "1" * 64)
    assert rejected.value.field == "checksum"


def test_an_incomplete_card_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="Invalid JSON"):
        decode_card(encode_card(CARD)[:-20])


@pytest.mark.parametrize(
    ("facts", "path"),
    [
        ({"name": ""}, "name"),
        ({"model_type": ModelType(0)}, "model_type"),
        ({"context_length": -1}, "context_length"),
        ({"kv_block_size": 0}, "kv_block_size"),
        ({"eos_token_ids": (2**32,)}, "eos_token_ids"),
        ({"artifacts": {"../evil": Artifact.of(b"")}}, "artifacts"),
        ({"artifacts": {".hidden": Artifact.of(b"")}}, "artifacts"),
        ({"artifacts": {"a": Artifact("XY", 0)}}, "artifacts.a.sha256"),
        ({"artifacts": {"a": Artifact("0" * 64, -1)}}, "artifacts.a.size"),
    ],
)
def test_an_invalid_card_cannot_be_constructed(facts: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as rejected:
        ModelCard(**({"name": "m"} | facts))
    assert rejected.value.field == path


def test_user_data_that_is_not_json_is_rejected() -> None:
    with pytest.raises(InvalidRequest) as rejected:
        encode_card(ModelCard(name="m", user_data={"a": float("nan")}))
    assert rejected.value.field == "user_data"


def test_fetched_artifacts_are_verified_like_inline_ones() -> None:
    artifact = Artifact.of(b"abc", inline=False)
    verify_artifact("t", artifact, b"abc")
    with pytest.raises(InvalidRequest, match="sha256"):
        verify_artifact("t", artifact, b"abd")
    with pytest.raises(InvalidRequest, match="4 bytes, in the card 3"):
        verify_artifact("t", artifact, b"abcd")


@pytest.mark.parametrize("name", ["llama", "qwen3-0.6b", "a_b"])
def test_a_legal_model_name_is_its_own_slug(name: str) -> None:
    assert model_slug(name) == name


def test_names_with_one_slug_get_different_keys() -> None:
    names = ["a/b", "a b", "A/B", "a_b"]
    assert len({slugify(n) for n in names}) == 1
    assert len({model_slug(n) for n in names}) == 4


@settings(max_examples=100)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=300))
def test_a_model_slug_is_a_safe_key(name: str) -> None:
    slug = model_slug(name)
    assert slug == slugify(slug)
    assert 0 < len(slug) <= 128
    assert not slug.startswith(".")

"""The models that are served: built from cards as workers come, gone with the last worker."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from tokenizers import Tokenizer

from common.blocks import DEFAULT_BLOCK_SIZE, PrefixHasher
from common.card import ModelCard
from common.errors import InvalidRequest, MeshError, Unavailable, UnknownModel
from common.instances import Snapshot
from frontend_svc.core.detokenize import (
    Detokenizer,
    StreamDetokenizer,
    UnsupportedTokenizer,
    Vocabulary,
)
from frontend_svc.core.prompt import ChatTemplate, TemplateError

# So long after its last worker left, a model's clients are told to come again (503, not 404).
GONE_S = 600.0

# Above this many characters, encoding leaves the event loop: it would hold it for > 5 ms.
ENCODE_INLINE_CHARS = 16_384

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request for one model needs. checksum: "" for pass-through models, which need none."""

    card: ModelCard
    checksum: str
    created: int
    tokenizer: Tokenizer
    vocabulary: Vocabulary | None
    template: ChatTemplate | None
    hasher: PrefixHasher

    @property
    def name(self) -> str:
        """As clients say it."""
        return self.card.name

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.tokenizer.get_vocab_size()

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids of a text; off the loop when it is long."""
        if len(text) <= ENCODE_INLINE_CHARS:
            return self._encode(text, special_tokens)
        return await asyncio.to_thread(self._encode, text, special_tokens)

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        batch = self.tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer | StreamDetokenizer:
        """A detokeniser for one answer."""
        if self.vocabulary is None:
            return StreamDetokenizer(self.tokenizer, skip_special_tokens=skip_special_tokens)
        return Detokenizer(self.vocabulary, skip_special_tokens=skip_special_tokens)


def build_model(card: ModelCard, *, created: int, mesh_key: bytes) -> ServedModel:
    """The model a card describes. Raises InvalidRequest naming the artifact that is not usable."""
    config = _json_artifact(card, "tokenizer_config.json")
    raw = _artifact(card, "tokenizer.json")
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises plain Exception
        raise InvalidRequest(f"tokenizer.json: {error}", "artifacts.tokenizer.json") from error
    try:
        vocabulary = Vocabulary.from_tokenizer_json(raw)
    except UnsupportedTokenizer as error:
        log.info("slow_detokeniser", model=card.name, why=str(error))
        vocabulary = None
    return ServedModel(
        card=card,
        checksum=card.checksum,
        created=created,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        template=_template(card, config),
        hasher=PrefixHasher(
            mesh_key=mesh_key,
            model=card.name,
            block_size=card.kv_block_size or DEFAULT_BLOCK_SIZE,
        ),
    )


def _artifact(card: ModelCard, name: str) -> bytes:
    artifact = card.artifacts.get(name)
    if artifact is None or artifact.inline is None:
        raise InvalidRequest(f"the card of {card.name!r} lacks {name}", f"artifacts.{name}")
    return artifact.inline


def _json_artifact(card: ModelCard, name: str) -> Mapping[str, Any]:
    try:
        value = json.loads(_artifact(card, name))
    except ValueError as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", f"artifacts.{name}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is not a JSON object", f"artifacts.{name}")
    return value


def _template(card: ModelCard, config: Mapping[str, Any]) -> ChatTemplate | None:
    source = config.get("chat_template")
    if "chat_template.jinja" in card.artifacts:
        source = _artifact(card, "chat_template.jinja").decode()
    if not source:
        return None
    try:
        return ChatTemplate(
            source, bos_token=_text(config, "bos_token"), eos_token=_text(config, "eos_token")
        )
    except TemplateError as error:
        raise InvalidRequest(
            f"chat_template: {error}", "artifacts.tokenizer_config.json"
        ) from error


def _text(config: Mapping[str, Any], name: str) -> str | None:
    value = config.get(name)
    return value.get("content") if isinstance(value, dict) else value


def no_worker(model: str) -> Unavailable:
    """The error of a request for a model that is known and has no worker now."""
    return Unavailable(f"no worker serves {model!r} at the moment", 1.0, reason="NO_WORKER")


class Models:
    """The serving table, kept by snapshots of the mesh.

    get_card: fetches a card by checksum. now_s: Unix time, for `created`.
    """

    def __init__(
        self,
        get_card: Callable[[str], Any],
        *,
        now_s: Callable[[], float],
        mesh_key: bytes,
    ) -> None:
        self._get_card = get_card
        self._now_s = now_s
        self._mesh_key = mesh_key
        self._served: dict[str, ServedModel] = {}
        self._gone_at: dict[str, float] = {}
        self.not_ready: dict[str, str] = {}

    def get(self, name: str) -> ServedModel:
        """The model of that name. Raises UnknownModel, or Unavailable if it was here just now."""
        model = self._served.get(name)
        if model is not None:
            return model
        if self._now_s() - self._gone_at.get(name, -math.inf) < GONE_S:
            raise no_worker(name)
        raise UnknownModel(name)

    def all(self) -> list[ServedModel]:
        """What is served, in the order it came."""
        return list(self._served.values())

    def names(self) -> frozenset[str]:
        """Names served."""
        return frozenset(self._served)

    async def follow(self, snapshot: Snapshot) -> bool:
        """Makes the table what the snapshot says; whether all of it worked (else: try again)."""
        wanted = {w.model: snapshot.card_checksum(w.model) for w in snapshot.of("worker")}
        for name in list(self._served):
            if wanted.get(name) != self._served[name].checksum:
                del self._served[name]
                self._gone(name)
                log.info("model_removed", model=name)
        self.not_ready = {}
        for name, checksum in wanted.items():
            if name and checksum and name not in self._served:
                await self._add(name, checksum)
        return not self.not_ready

    def _gone(self, name: str) -> None:
        now = self._now_s()
        self._gone_at = {n: at for n, at in self._gone_at.items() if now - at < GONE_S}
        self._gone_at[name] = now

    async def _add(self, name: str, checksum: str) -> None:
        try:
            card = await self._get_card(checksum)
            created = int(self._now_s())
            model = await asyncio.to_thread(
                build_model, card, created=created, mesh_key=self._mesh_key
            )
        except MeshError as error:
            self.not_ready[name] = error.message
            log.error("model_not_ready", model=name, checksum=checksum, why=error.message)
            return
        self._served[name] = model
        log.info("model_added", model=name, checksum=checksum)

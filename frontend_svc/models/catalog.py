"""The models that are served: built from cards as workers come, gone with the last worker.

An adapter that workers have is a model of its own to clients (`core/adapters.py`): its base model
with hashes of its own, for KV that was computed under one is worth nothing to another.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import structlog
from tokenizers import Tokenizer

from common.errors import (
    InvalidRequest,
    MeshError,
    NotFound,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from common.kv.hashing import DEFAULT_BLOCK_SIZE, PrefixHasher
from common.registry.card import ModelCard
from common.registry.instances import Instance, Snapshot
from common.runtime.tasks import TaskGroup
from frontend_svc.core.models.adapters import Adapters, find_adapters, serving
from frontend_svc.core.models.model_watch import (
    MODEL_KEY_PREFIX,
    Action,
    Build,
    Entry,
    LogEvent,
    ModelAdded,
    ModelManager,
    ModelRemoved,
    ModelWatchState,
    Pipeline,
    Table,
    card_missing,
    card_unreadable,
    events_between,
    model_watcher,
    plan_pipelines,
)
from frontend_svc.core.text.detokenizer import (
    Detokenizer,
    StreamDetokenizer,
    UnsupportedTokenizer,
    Vocabulary,
)
from frontend_svc.core.text.prompt import ChatTemplate, TemplateError
from frontend_svc.core.text.token_bound import max_bytes_per_token
from frontend_svc.models.artifacts import ArtifactFetcher, OpenArtifact, grpc_artifact_opener

# So long after its last worker left, a model's clients are told to come again (503, not 404).
RECENTLY_SERVED_S = 600.0
# What was built for the last few of them is kept: a worker that comes back is served at once.
CACHED_BUILDS_MAX = 4

# Above this many characters, encoding leaves the event loop: it would hold it for > 5 ms.
ENCODE_INLINE_CHARS = 16_384

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request for one model needs. checksum: "" for pass-through models, which need none.

    vocab_size: token ids are below this. bytes_a_token_max: see `core/token_bound.py`. adapter: ""
    for the model itself; else all is as in the model, but for name and hashes.
    """

    card: ModelCard
    checksum: str
    created: int
    tokenizer: Tokenizer
    vocabulary: Vocabulary | None
    vocab_size: int
    max_bytes_per_token: int | None
    template: ChatTemplate | None
    hasher: PrefixHasher
    adapter: str = ""

    @property
    def name(self) -> str:
        """As clients say it."""
        return self.adapter or self.card.name

    @property
    def base(self) -> str:
        """The model as workers and routers say it."""
        return self.card.name

    def adapter_model(self, adapter: str, *, created: int, mesh_key: bytes) -> ServedModel:
        """The same under an adapter."""
        hasher = _hasher(self.card, mesh_key, adapter)
        return replace(self, adapter=adapter, created=created, hasher=hasher)

    def token_count_min(self, text: str) -> int:
        """How many tokens a text has at least, without making them."""
        bytes_max = self.max_bytes_per_token
        return 0 if bytes_max is None else -(-len(text.encode()) // bytes_max)

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids of a text; off the loop when it is long."""
        if len(text) <= ENCODE_INLINE_CHARS:
            return self._encode_inline(text, special_tokens)
        return await asyncio.to_thread(self._encode_inline, text, special_tokens)

    def _encode_inline(self, text: str, special_tokens: bool) -> list[int]:
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
    # What a file asks for here would cut prompts short, or fill them up, without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        vocabulary = Vocabulary.from_tokenizer_json(raw)
    except UnsupportedTokenizer as error:
        log.info("slow_detokeniser", model=card.name, why=str(error))
        vocabulary = None
    ids = tokenizer.get_vocab().values() if vocabulary is None else vocabulary.raw
    return ServedModel(
        card=card,
        checksum=card.checksum,
        created=created,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        # Not the number of tokens: there are files with gaps in their ids.
        vocab_size=max(ids, default=-1) + 1,
        max_bytes_per_token=max_bytes_per_token(raw),
        template=_template(card, config),
        hasher=_hasher(card, mesh_key),
    )


def _hasher(card: ModelCard, mesh_key: bytes, adapter: str = "") -> PrefixHasher:
    return PrefixHasher(
        mesh_key=mesh_key,
        model=card.name,
        block_size=card.kv_block_size or DEFAULT_BLOCK_SIZE,
        lora_name=adapter,
    )


def _artifact(card: ModelCard, name: str) -> bytes:
    artifact = card.artifacts.get(name)
    if artifact is None or artifact.inline is None:
        raise InvalidRequest(f"the card of {card.name!r} lacks {name}", f"artifacts.{name}")
    return artifact.inline


def _json_artifact(card: ModelCard, name: str) -> Mapping[str, Any]:
    try:
        value = json.loads(_artifact(card, name))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", f"artifacts.{name}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is not a JSON object", f"artifacts.{name}")
    return value


def _utf8_artifact(card: ModelCard, name: str) -> str:
    try:
        return _artifact(card, name).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8: {error}", f"artifacts.{name}") from error


def _template(card: ModelCard, config: Mapping[str, Any]) -> ChatTemplate | None:
    source = config.get("chat_template")
    if "chat_template.jinja" in card.artifacts:
        source = _utf8_artifact(card, "chat_template.jinja")
    if not source:
        return None
    if not isinstance(source, str):
        raise InvalidRequest(
            f"chat_template must be one template as text, not a {type(source).__name__}",
            "artifacts.tokenizer_config.json",
        )
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
    text = value.get("content") if isinstance(value, dict) else value
    if value is None or isinstance(text, str):
        return text
    raise InvalidRequest(
        f"tokenizer_config.json: {name} must be text, or an object with text as its content, "
        f"not {str(value)[:80]!r}",
        "artifacts.tokenizer_config.json",
    )


def no_worker_error(model: str) -> Unavailable:
    """The error of a request for a model that is known and has no worker now."""
    return Unavailable(f"no worker serves {model!r} at the moment", 1.0, reason="NO_WORKER")


def _wrong_endpoint_error(name: str, table: Table) -> Unsupported:
    return Unsupported("model", f"{name!r} is not served for {table}")


def _loading_error(name: str) -> Unavailable:
    return Unavailable(f"{name!r} is being loaded", 1.0, reason="MODEL_LOADING")


@dataclass(frozen=True, slots=True)
class Engine:
    """One way to serve a model. model: None if the client's JSON passes through as it is."""

    name: str
    pipeline: Pipeline
    created: int
    checksum: str
    card: ModelCard | None
    model: ServedModel | None


class ModelCatalog:
    """The serving table, kept by snapshots of the mesh; `core/model_watch.py` decides.

    Cards are loaded beside the table: one that takes long holds up its own model only.

    get_card: fetches a card by checksum. now_s: Unix time, for `created`. open_artifact: how to ask
    a worker for what a card does not carry; by default over gRPC, without a token.
    """

    def __init__(
        self,
        get_card: Callable[[str], Awaitable[ModelCard]],
        *,
        now_s: Callable[[], float],
        mesh_key: bytes,
        open_artifact: OpenArtifact | None = None,
    ) -> None:
        self._now_s = now_s
        self._mesh_key = mesh_key
        self.artifacts = ArtifactFetcher(
            self._workers_with_card, open_artifact=open_artifact or grpc_artifact_opener()
        )
        self._builder = _EngineBuilder(get_card, self.artifacts, now_s, mesh_key)
        self._table: ModelManager[Engine] = ModelManager()
        self._watch = ModelWatchState(MODEL_KEY_PREFIX, self._table, self._builder)
        self._snapshot = Snapshot()
        self._removed_at: dict[str, float] = {}
        # By model: what was built last, and from what.
        self._build_cache: dict[str, tuple[Entry, Mapping[Table, Engine]]] = {}
        self._adapters: dict[str, ServedModel] = {}
        # Adapter -> model, also of models that are not served yet.
        self._adapter_bases: Mapping[str, str] = {}
        self._hidden: Mapping[tuple[str, str], str] = {}

    @property
    def hidden(self) -> Mapping[tuple[str, str], str]:
        """(adapter, model) of adapters that nobody can ask for -> why."""
        return MappingProxyType(self._hidden)

    @property
    def loading(self) -> frozenset[str]:
        """Models whose cards are being loaded."""
        return self._watch.building

    @property
    def not_ready(self) -> Mapping[str, str]:
        """Models that workers offer and that are not served -> why."""
        return MappingProxyType(self._watch.not_ready)

    def get_for(self, name: str, table: Table) -> ServedModel:
        """`get`, for one kind of request: Unsupported too if its card does not offer that kind.

        An adapter is served for what its model is served for.
        """
        model = self.get(name)
        if self._table.engine(model.base if model.adapter else name, table) is None:
            raise _wrong_endpoint_error(name, table)
        return model

    def get(self, name: str) -> ServedModel:
        """The model or adapter of that name, to be given token ids.

        Raises UnknownModel, Unavailable if it was here just now or is being loaded, Unsupported if
        it is served by pass-through workers only.
        """
        engines = self._table.engines(name)
        if not engines:
            adapter_model = self._adapters.get(name)
            if adapter_model is None:
                raise self._missing_model_error(name)
            return adapter_model
        for engine in engines.values():
            if engine.model is not None:
                return engine.model
        raise Unsupported("model", f"{name!r} is served by pass-through workers only")

    def engine(self, name: str, table: Table) -> Engine:
        """The engine of a name for one kind of request.

        Raises UnknownModel, Unavailable if it was here just now or is being loaded, Unsupported if
        it is served for the other kind only.
        """
        engine = self._table.engine(name, table)
        if engine is not None:
            return engine
        if self._table.has_model_any(name):
            raise _wrong_endpoint_error(name, table)
        raise self._missing_model_error(name)

    def all(self) -> list[ServedModel]:
        """What is served by token ids, in the order it came; adapters come last."""
        return [*self._tokenized_models().values(), *self._adapters.values()]

    def pass_through(self) -> list[Engine]:
        """What pass-through workers serve; one engine a name."""
        return [engine for engine in self._first_engines() if engine.model is None]

    def names(self) -> frozenset[str]:
        """Names that are served, by token ids or passed through, those of adapters too."""
        return frozenset(self._table.names()) | self._adapters.keys()

    def workers(self, name: str) -> tuple[Instance, ...]:
        """The workers that serve a model, or an adapter, of that name."""
        adapter_model = self._adapters.get(name)
        if adapter_model is None:
            return self._snapshot.serving(name)
        return serving(self._snapshot.serving(adapter_model.base), name)

    async def follow(self, snapshot: Snapshot) -> bool:
        """Makes the table what the snapshot says; whether all of it worked (else: try again).

        The table is right at once, but for models whose cards have to be loaded, which this waits
        for; it may be called again meanwhile.
        """
        events = list(events_between(self._snapshot, snapshot))
        self._snapshot = snapshot
        pending = tuple(self._watch.not_ready)
        builds: list[Build] = []
        for action in model_watcher(self._watch, events):
            self._execute(action, builds)
        for action in self._watch.retry(pending):
            self._execute(action, builds)
        self._evict_builds()
        self._follow_adapters()
        try:
            async with TaskGroup() as tasks:
                for build in builds:
                    tasks.create_task(self._run_build(build))
        except BaseException as error:
            # Else models whose build did not begin would count as being built for ever.
            for build in builds:
                self._watch.build_failed(build, MeshError(f"building was cut short: {error!r}"))
            raise
        return not self._watch.not_ready

    def _workers_with_card(self, checksum: str) -> list[Instance]:
        workers = self._snapshot.of("worker")
        return [worker for worker in workers if worker.card_checksum == checksum]

    def _missing_model_error(self, name: str) -> MeshError:
        if self._watch.is_pending(self._adapter_bases.get(name, name)):
            return _loading_error(name)
        if self._now_s() - self._removed_at.get(name, -math.inf) < RECENTLY_SERVED_S:
            return no_worker_error(name)
        return UnknownModel(name)

    def _record_removal(self, name: str) -> None:
        now = self._now_s()
        self._removed_at = {
            n: at for n, at in self._removed_at.items() if now - at < RECENTLY_SERVED_S
        }
        self._removed_at[name] = now

    def _evict_builds(self) -> None:
        """But for those of models that are served, and of the last that have just left."""
        cutoff_s = self._now_s() - RECENTLY_SERVED_S
        removed_at = {
            n: self._removed_at.get(n, -math.inf)
            for n in self._build_cache.keys() - self._table.names()
        }
        recent = sorted(
            (name for name in removed_at if removed_at[name] > cutoff_s),
            key=lambda name: removed_at[name],
        )
        for name in removed_at.keys() - recent[-CACHED_BUILDS_MAX:]:
            del self._build_cache[name]

    def _first_engines(self) -> Iterator[Engine]:
        for name in self._table.names():
            yield next(iter(self._table.engines(name).values()))

    def _tokenized_models(self) -> dict[str, ServedModel]:
        return {one.name: one.model for one in self._first_engines() if one.model is not None}

    def _follow_adapters(self) -> None:
        """After a change of the table, or of what workers have."""
        passed_through = {engine.name for engine in self.pass_through()}
        found = find_adapters(self._snapshot.of("worker"), passed_through)
        self._adapter_bases = found.models
        models, previous = self._tokenized_models(), self._adapters
        self._adapters = {
            adapter: self._get_or_make_adapter_model(adapter, models[model])
            for adapter, model in found.models.items()
            if model in models
        }
        for adapter in sorted(previous.keys() - self._adapters.keys()):
            self._record_removal(adapter)
            log.info("adapter_removed", model=adapter, base=previous[adapter].base)
        for adapter, adapter_model in self._adapters.items():
            if adapter not in previous or previous[adapter].base != adapter_model.base:
                log.info("adapter_added", model=adapter, base=adapter_model.base)
        self._log_hidden_adapters(found)

    def _get_or_make_adapter_model(self, adapter: str, model: ServedModel) -> ServedModel:
        existing = self._adapters.get(adapter)
        if existing is not None and existing.card is model.card:
            return existing
        created = int(self._now_s())
        return model.adapter_model(adapter, created=created, mesh_key=self._mesh_key)

    def _log_hidden_adapters(self, found: Adapters) -> None:
        for (adapter, model), why in found.hidden.items():
            if self._hidden.get((adapter, model)) != why:
                log.error("adapter_hidden", adapter=adapter, model=model, why=why)
        self._hidden = found.hidden

    def _execute(self, action: Action, builds: list[Build]) -> None:
        match action:
            case Build():
                cached = self._build_cache.get(action.entry.model.name)
                if cached is None or cached[0] != action.entry:
                    builds.append(action)
                else:
                    for next_action in self._watch.build_succeeded(action, cached[1]):
                        self._execute(next_action, builds)
            case ModelAdded(name, tables):
                log.info("model_added", model=name, tables=tables)
            case ModelRemoved(name):
                self._record_removal(name)
                log.info("model_removed", model=name)
            case LogEvent(level, event, fields):
                getattr(log, level)(event, **fields)

    async def _run_build(self, build: Build) -> None:
        """Until nothing follows of it: what it was built from may have changed meanwhile."""
        builds = [build]
        while builds:
            for action in await self._build_once(builds.pop()):
                self._execute(action, builds)
            self._follow_adapters()

    async def _build_once(self, build: Build) -> list[Action]:
        try:
            engines = await self._builder.engines(build.entry)
            if any(engine.model is not None for engine in engines.values()):
                self._build_cache[build.entry.model.name] = build.entry, engines
            return self._watch.build_succeeded(build, engines)
        except MeshError as error:
            return self._watch.build_failed(build, error)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit) as error:
            # As in `follow`; this one may be of a build that followed another.
            self._watch.build_failed(build, MeshError(f"building was cut short: {error!r}"))
            raise
        except BaseException as error:  # a panic of the tokenizer library is no Exception
            return self._reject_card(build, error)

    def _reject_card(self, build: Build, error: BaseException) -> list[Action]:
        """A card that trips us up is its own model's trouble: all others go on."""
        rejection = InvalidRequest(f"the card cannot be used: {error!r}", "card")
        name = build.entry.model.name
        if self._watch.not_ready.get(name) != rejection.message:  # else it is a retry's, and told
            log.error("model_build_failed", model=name, exc_info=error)
        return self._watch.build_failed(build, rejection)


class _EngineBuilder:
    """Loads cards, several at once, and makes engines of them, one after the other."""

    def __init__(
        self,
        get_card: Callable[[str], Awaitable[ModelCard]],
        artifacts: ArtifactFetcher,
        now_s: Callable[[], float],
        mesh_key: bytes,
    ) -> None:
        self._get_card = get_card
        self._artifacts = artifacts
        self._now_s = now_s
        self._mesh_key = mesh_key
        # Each takes a whole core for a while, and a thread that others wait for.
        self._build_lock = asyncio.Lock()

    async def engines(self, entry: Entry) -> dict[Table, Engine]:
        """One engine a table, all of the same immutable model; each answer has a detokeniser."""
        card, why = await self._card(entry)
        pipelines = plan_pipelines(entry, card, why)
        created = int(self._now_s())
        model = None
        if card is not None and not all(p.is_pass_through for p in pipelines):
            async with self._build_lock:
                model = await asyncio.to_thread(
                    build_model, card, created=created, mesh_key=self._mesh_key
                )
        name = entry.model.name
        return {p.table: Engine(name, p, created, entry.checksum, card, model) for p in pipelines}

    async def _card(self, entry: Entry) -> tuple[ModelCard | None, str]:
        """The card, or None and why: pass-through workers can do without."""
        if not entry.checksum:
            return None, ""
        try:
            card = await self._get_card(entry.checksum)
            if entry.model.requires_preprocessing():
                card = await self._artifacts.complete_card(card)
        except MeshError as error:
            missing = isinstance(error, NotFound)
            card_error = card_missing(entry) if missing else card_unreadable(entry, error)
            if entry.model.requires_preprocessing():
                raise card_error from error
            log.info("model_without_card", model=entry.model.name, why=card_error.message)
            return None, card_error.message
        log.debug("card_loaded", model=entry.model.name, card=card.name)
        return card, ""

"""The models in service: built from cards as workers join, removed with the last worker.

For clients, an adapter of workers is a model of its own (`models/adapters.py`): its base model
with separate hashes, since KV computed under one adapter is invalid for another.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from common.errors import (
    InvalidRequest,
    MeshError,
    NotFound,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from common.registry.card import ModelCard
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.runtime.tasks import TaskGroup
from common.trials.trials import Trials
from frontend_svc.models.adapters import find_adapters, holders, serving
from frontend_svc.models.aliases import find_aliases
from frontend_svc.models.artifacts import ArtifactFetcher, OpenArtifact, grpc_artifact_opener
from frontend_svc.models.engine_options import EngineTraits, ModelEngines
from frontend_svc.models.model_waits import ModelWaits
from frontend_svc.models.model_watch import (
    Action,
    Build,
    Built,
    LogEvent,
    ModelAdded,
    ModelEntry,
    ModelRemoved,
    ModelWatch,
    Table,
    card_missing,
    card_unreadable,
    is_pass_through,
    plan_tables,
)
from frontend_svc.models.served_model import ServedModel, build_model
from frontend_svc.models.tokenizer_files import PREPARE
from frontend_svc.models.tokenizer_trials import TokenizerTrials
from frontend_svc.models.variants import Aliases as WeightedAliases
from frontend_svc.models.variants import VariantChoice

NO_WORKER = "NO_WORKER"
MODEL_REFUSED = "MODEL_REFUSED"
NOT_REGISTERED = "no worker is registered"
# For this long after its last worker left, a model gets 503 instead of 404.
RECENTLY_SERVED_S = 600.0
# The builds of this many such models are kept: a returning worker is served at once.
CACHED_BUILDS_MAX = 4
# An unusable card is built again after this time: it may have failed for a busy processor.
REFUSED_S = 30.0
REFUSALS_MAX = 256

log = structlog.get_logger()


def no_worker_error(model: str) -> Unavailable:
    """Returns the error for a model that was served recently and has no worker now."""
    return Unavailable(f"no worker serves {model!r} at the moment", 1.0, reason=NO_WORKER)


def _wrong_endpoint_error(name: str, table: Table) -> Unsupported:
    return Unsupported("model", f"{name!r} is not served for {table}")


@dataclass(frozen=True, slots=True)
class Engine:
    """A model in one table. model: None if the client's JSON passes through unchanged."""

    name: str
    created: int
    checksum: str
    card: ModelCard | None
    model: ServedModel | None


class ModelCatalog:
    """The serving table, updated with each change of the registry; `models/model_watch.py` decides.
    Cards are loaded concurrently: a slow one delays only its own model.

    get_card: returns a card by checksum.
    now_s: Unix time, for `created`.
    open_artifact: fetches artifacts that a card does not carry from a worker; by default over
    gRPC, without a token.
    trials: load the tokenizers of cards first; by default of its own.
    configured: names that are Unavailable, and not unknown, while no worker is registered.
    """

    def __init__(
        self,
        get_card: Callable[[str], Awaitable[ModelCard]],
        *,
        now_s: Callable[[], float],
        mesh_key: bytes,
        open_artifact: OpenArtifact | None = None,
        trials: Trials | None = None,
        configured: Iterable[str] = (),
    ) -> None:
        self._get_card = get_card
        self._now_s = now_s
        self._mesh_key = mesh_key
        self.artifacts = ArtifactFetcher(
            self._workers_with_card, open_artifact=open_artifact or grpc_artifact_opener()
        )
        self._tokenizers = TokenizerTrials(trials or Trials((PREPARE,)))
        # A build takes a whole core and a thread that other calls need.
        self._build_lock = asyncio.Lock()
        self._watch: ModelWatch[Engine] = ModelWatch()
        # To be started by `load`.
        self._new_builds: list[Build] = []
        self._snapshot = Snapshot()
        self._removed_at: dict[str, float] = {}
        # Adapter -> model, of adapters removed recently.
        self._removed_bases: dict[str, str] = {}
        # By checksum: the error of a card, and the time at which it is built again.
        self._refusals: dict[str, tuple[InvalidRequest, float]] = {}
        # By model: what was built last.
        self._build_cache: dict[str, Built[Engine]] = {}
        self._adapters: dict[str, ServedModel] = {}
        # Adapter -> ids of the workers that hold it.
        self._adapter_workers: Mapping[str, frozenset[int]] = {}
        # Adapter -> model, including models that are not served yet.
        self._adapter_bases: Mapping[str, str] = {}
        self._aliases: Mapping[str, str] = {}
        self._weighted_aliases: WeightedAliases = {}
        # By model; of the present snapshot.
        self._engines: dict[str, ModelEngines] = {}
        self._pass_through: Sequence[Engine] = ()
        self._configured = frozenset(configured)
        self._request_names = self._configured
        # Requests for configured models that are not served.
        self.waits = ModelWaits()
        # What a request for such a model depends on, as of the last change.
        self._awaited_state: object = None
        # (adapter, model) of adapters that cannot be requested -> reason.
        self.hidden: Mapping[tuple[str, str], str] = {}

    @property
    def loading(self) -> frozenset[str]:
        return frozenset(self._watch.building)

    @property
    def not_ready(self) -> Mapping[str, str]:
        """Models that workers offer and that are not served -> reason."""
        return self._watch.not_ready

    def reason_unserved(self, worker: Instance) -> str:
        """Returns why requests for the model of a worker are not sent to it; "" if they are."""
        if not worker.model:
            return ""
        served = self._watch.served.get(worker.model)
        if served is None:
            return self._watch.not_ready.get(worker.model, "its card is loading")
        if served.entry.checksum != worker.card_checksum:
            return f"model {worker.model!r} is served by another card"
        return ""

    @property
    def absent(self) -> Mapping[str, str]:
        """Configured models that no worker offers -> reason."""
        offered = self.names() | self.loading | self.not_ready.keys()
        missing = (n for n in sorted(self._configured) if self.resolve(n) not in offered)
        return dict.fromkeys(missing, NOT_REGISTERED)

    @property
    def unserved(self) -> Iterable[str]:
        """Configured models that no worker offers, or whose card is not usable or not found."""
        not_ready = (n for n in self._configured if self.resolve(n) in self.not_ready)
        return {*self.absent, *not_ready}

    @property
    def awaiting(self) -> Mapping[str, int]:
        """Requests that wait for a model of which there is no card; 0 for other configured
        models."""
        return {**dict.fromkeys(self._configured, 0), **self.waits.counts()}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Alias -> model, of models that are served or were served recently."""
        return self._aliases

    @property
    def weighted_aliases(self) -> WeightedAliases:
        """The configured aliases, whose requests several models share."""
        return self._weighted_aliases

    def check_choice(self, choice: VariantChoice) -> None:
        """Raises Unavailable if no worker has ever served the model of a request to an alias."""
        if not self.is_served(choice.model) and self.is_unknown(choice.model):
            text = f"no worker serves {choice.model!r}, which is to serve this request to"
            raise Unavailable(f"{text} {choice.alias!r}", 1.0, reason=NO_WORKER)

    def use_aliases(self, aliases: WeightedAliases) -> None:
        self._weighted_aliases = aliases
        self._follow_aliases()

    def is_served(self, name: str) -> bool:
        """Returns whether workers serve a model, an adapter or an alias of workers now."""
        name = self.resolve(name)
        return name in self._watch.served or name in self._adapters

    def is_unknown(self, name: str) -> bool:
        """Returns whether a request for a model that is not served is a 404."""
        return isinstance(self._missing_model_error(self.resolve(name)), UnknownModel)

    def resolve(self, name: str) -> str:
        """Returns the name of the model that an alias stands for; any other name itself."""
        return self._aliases.get(name, name)

    def served_as(self, name: str) -> str:
        """Returns the model whose workers serve a name: that of an alias, the base of an adapter;
        any other name itself."""
        model = self.resolve(name)
        return self._adapter_bases.get(model, model)

    def is_configured(self, name: str) -> bool:
        """Returns whether the configuration names a model or its alias."""
        return name in self._configured or self.resolve(name) in self._configured

    def may_appear(self, name: str) -> bool:
        """Returns whether a configured model that is not served may be served later. False if its
        card cannot be used."""
        return self.is_configured(name) and self.served_as(name) not in self._watch.refused

    def refused_options(self, name: str) -> frozenset[str]:
        """Returns the options that all workers of a model or an adapter refuse."""
        return self._engines_of(name).refused_options

    def engine_traits(self, name: str, worker_id: int) -> EngineTraits:
        """Returns what decides whether a worker of a model or an adapter can continue a response
        that another one has begun; see `ModelEngines.traits_of`."""
        return self._engines_of(name).traits_of(worker_id)

    def _engines_of(self, name: str) -> ModelEngines:
        found = self._engines.get(name)
        if found is None:
            found = self._engines[name] = ModelEngines.of(self.workers(name))
        return found

    def get_for(self, name: str, table: Table) -> ServedModel:
        """`get` for one kind of request; an adapter has the tables of its model. Also returns a
        model that was served recently and has no worker: its requests may wait for one. Raises the
        errors of `get`, and Unsupported if the card does not offer that kind."""
        name = self.resolve(name)
        try:
            model = self.get(name)
        except Unavailable as error:
            return self._departed_model(name, table, error)
        if table not in self._watch.served[model.base if model.adapter else name].engines:
            raise _wrong_endpoint_error(name, table)
        return model

    def _departed_model(self, name: str, table: Table, error: Unavailable) -> ServedModel:
        """Raises `error` if the model is being loaded, or its build is not kept."""
        base = name if name in self._build_cache else self._removed_bases.get(name, name)
        built = self._watch.served.get(base) or self._build_cache.get(base)
        if error.reason != NO_WORKER or built is None:
            raise error
        if table not in built.engines:
            raise _wrong_endpoint_error(name, table)
        model = built.engines[table].model
        if model is None:
            raise error
        if base == name:
            return model
        return model.adapter_model(name, created=int(self._now_s()), mesh_key=self._mesh_key)

    def get(self, name: str) -> ServedModel:
        """Returns the tokenized model or adapter of that name or alias. Raises UnknownModel,
        Unavailable if it was served recently or is being loaded, Unsupported if only
        pass-through workers serve it."""
        name = self.resolve(name)
        served = self._watch.served.get(name)
        if served is None:
            adapter_model = self._adapters.get(name)
            if adapter_model is None:
                raise self._missing_model_error(name)
            return adapter_model
        for engine in served.engines.values():
            if engine.model is not None:
                return engine.model
        raise Unsupported("model", f"{name!r} is served by pass-through workers only")

    def engine(self, name: str, table: Table) -> Engine:
        """Returns the engine of a name for one kind of request. Raises UnknownModel, Unavailable
        if it was served recently or is being loaded, Unsupported if it is served for the other
        kind only."""
        served = self._watch.served.get(name)
        if served is None:
            raise self._missing_model_error(name)
        if table not in served.engines:
            raise _wrong_endpoint_error(name, table)
        return served.engines[table]

    def all(self) -> list[ServedModel]:
        """Returns the tokenized models in order of addition, then adapters."""
        return [*self._tokenized_models().values(), *self._adapters.values()]

    @property
    def pass_through(self) -> Sequence[Engine]:
        """Returns the pass-through models; one engine per name."""
        return self._pass_through

    def names(self) -> frozenset[str]:
        return frozenset(self._watch.served) | self._adapters.keys()

    def request_names(self) -> frozenset[str]:
        """`names`, aliases of workers and of the configuration, and configured models."""
        return self._request_names

    def workers(self, name: str) -> tuple[Instance, ...]:
        adapter_model = self._adapters.get(name)
        if adapter_model is None:
            return self._snapshot.serving(name)
        return serving(self._snapshot.serving(adapter_model.base), name)

    def on_snapshot(self, snapshot: Snapshot, changes: SnapshotDiff) -> None:
        """Updates the table at once, except for models with cards to load: see `load`.

        changes: since the snapshot of the call before.
        """
        self._snapshot = snapshot
        self._engines.clear()
        for action in self._watch.follow(changes):
            self._execute(action, self._new_builds)
        self._evict_builds()
        self._follow_adapters()

    async def load(self) -> bool:
        """Builds the models that are offered and not served; returns False if some model needs
        another attempt. Concurrent calls are allowed: each builds other models."""
        builds, self._new_builds = self._new_builds, []
        for action in self._watch.retry():
            self._execute(action, builds)
        self._follow_adapters()
        try:
            async with TaskGroup() as tasks:
                for build in builds:
                    tasks.create_task(self._run_build(build))
        except BaseException as error:
            # Otherwise models without a started build would count as being built for ever.
            for build in builds:
                self._watch.build_failed(build, MeshError(f"the build was interrupted: {error!r}"))
            raise
        return not self._watch.not_ready

    def _workers_with_card(self, checksum: str) -> list[Instance]:
        workers = self._snapshot.of("worker")
        return [worker for worker in workers if worker.card_checksum == checksum]

    def _missing_model_error(self, name: str) -> MeshError:
        base = self._adapter_bases.get(name, name)
        if self._watch.is_pending(base):
            if base in self._watch.refused:
                message = f"{name!r} is not served: {self._watch.not_ready[base]}"
                return Unavailable(message, 1.0, reason=MODEL_REFUSED)
            return Unavailable(f"{name!r} is being loaded", 1.0, reason="MODEL_LOADING")
        if self._now_s() - self._removed_at.get(name, -math.inf) < RECENTLY_SERVED_S:
            return no_worker_error(name)
        if self.is_configured(name):
            return Unavailable(f"{NOT_REGISTERED} for model {name!r}", 1.0, reason=NO_WORKER)
        return UnknownModel(name)

    def _record_removal(self, name: str) -> None:
        now = self._now_s()
        self._removed_at = {
            n: at for n, at in self._removed_at.items() if now - at < RECENTLY_SERVED_S
        }
        self._removed_at[name] = now
        self._removed_bases = {
            n: b for n, b in self._removed_bases.items() if n in self._removed_at
        }

    def _evict_builds(self) -> None:
        """Keeps the builds of served models and of the last few that left recently."""
        cutoff_s = self._now_s() - RECENTLY_SERVED_S
        unserved = self._build_cache.keys() - self._watch.served.keys()
        removed_at = {name: self._removed_at.get(name, -math.inf) for name in unserved}
        recent = sorted(unserved, key=removed_at.__getitem__)[-CACHED_BUILDS_MAX:]
        for name in unserved:
            if name not in recent or removed_at[name] <= cutoff_s:
                del self._build_cache[name]

    def served(self) -> Iterator[tuple[Table, Engine]]:
        """Yields the engine of each served model in its first table; adapters have none."""
        for name in self._watch.names():
            yield next(iter(self._watch.served[name].engines.items()))

    def _first_engines(self) -> Iterator[Engine]:
        return (engine for _, engine in self.served())

    def _tokenized_models(self) -> dict[str, ServedModel]:
        return {
            engine.name: engine.model
            for engine in self._first_engines()
            if engine.model is not None
        }

    def _follow_adapters(self) -> None:
        self._pass_through = [engine for engine in self._first_engines() if engine.model is None]
        pass_through_names = {engine.name for engine in self._pass_through}
        workers = self._snapshot.of("worker")
        found = find_adapters(workers, pass_through_names)
        held_before, self._adapter_workers = self._adapter_workers, holders(workers)
        self._adapter_bases = found.models
        models, previous = self._tokenized_models(), self._adapters
        self._adapters = {
            adapter: self._get_or_make_adapter_model(adapter, models[model])
            for adapter, model in found.models.items()
            if model in models
        }
        for adapter in sorted(previous.keys() - self._adapters.keys()):
            dropped = held_before.get(adapter, frozenset()) - self._adapter_workers.get(
                adapter, set()
            )
            # What a live worker has unloaded is not expected to return.
            if dropped.isdisjoint(self._snapshot.instances):
                self._record_removal(adapter)
                self._removed_bases[adapter] = previous[adapter].base
            log.info("adapter_removed", model=adapter, base=previous[adapter].base)
        for adapter, adapter_model in self._adapters.items():
            if adapter not in previous or previous[adapter].base != adapter_model.base:
                log.info("adapter_added", model=adapter, base=adapter_model.base)
        for (adapter, model), reason in found.hidden.items():
            if self.hidden.get((adapter, model)) != reason:
                log.error("adapter_hidden", adapter=adapter, model=model, reason=reason)
        self.hidden = found.hidden
        self._follow_aliases()

    def _follow_aliases(self) -> None:
        engines = [
            engine for built in self._build_cache.values() for engine in built.engines.values()
        ]
        cards = {engine.card.name: engine.card for engine in engines if engine.card is not None}
        names = self.names()
        self._aliases = find_aliases(cards.values(), names | self._watch.not_ready.keys())
        self._request_names = (
            names | self._aliases.keys() | self._configured | self._weighted_aliases.keys()
        )
        awaited_state = names, self._aliases, frozenset(self._watch.refused)
        if awaited_state != self._awaited_state:
            self._awaited_state = awaited_state
            self.waits.wake()

    def _get_or_make_adapter_model(self, adapter: str, model: ServedModel) -> ServedModel:
        existing = self._adapters.get(adapter)
        if existing is not None and existing.card is model.card:
            return existing
        created = int(self._now_s())
        return model.adapter_model(adapter, created=created, mesh_key=self._mesh_key)

    def _execute(self, action: Action, builds: list[Build]) -> None:
        match action:
            case Build():
                cached = self._build_cache.get(action.entry.name)
                if cached is None or cached.entry != action.entry:
                    builds.append(action)
                else:
                    for next_action in self._watch.build_succeeded(action, cached.engines):
                        self._execute(next_action, builds)
            case ModelAdded(name, tables):
                log.info("model_added", model=name, tables=tables)
            case ModelRemoved(name):
                self._record_removal(name)
                log.info("model_removed", model=name)
            case LogEvent(level, event, fields):
                getattr(log, level)(event, **fields)

    async def _run_build(self, build: Build) -> None:
        """Builds, and builds again while the entries have changed during the build."""
        builds = [build]
        while builds:
            for action in await self._build_once(builds.pop()):
                self._execute(action, builds)
            self._follow_adapters()

    async def _build_once(self, build: Build) -> list[Action]:
        try:
            engines = await self._build_engines(build.entry)
            if any(engine.model is not None for engine in engines.values()):
                self._build_cache[build.entry.name] = Built(build.entry, engines)
            return self._watch.build_succeeded(build, engines)
        except MeshError as error:
            return self._watch.build_failed(build, error)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit) as error:
            # As in `load`, which does not have builds that followed another one.
            self._watch.build_failed(build, MeshError(f"the build was interrupted: {error!r}"))
            raise
        except BaseException as error:  # A panic of the tokenizer library is not an Exception.
            rejection = InvalidRequest(f"the card cannot be used: {error!r}", "card")
            name = build.entry.name
            if self._watch.not_ready.get(name) != rejection.message:  # A retry repeats it.
                log.error("model_build_failed", model=name, exc_info=error)
            return self._watch.build_failed(build, rejection)

    async def _build_engines(self, entry: ModelEntry) -> dict[Table, Engine]:
        """Returns one engine per table, all with the same immutable model."""
        card, no_card_reason = await self._card(entry)
        tables = plan_tables(entry, card, no_card_reason)
        created = int(self._now_s())
        model = None
        if card is not None and not is_pass_through(entry, card):
            model = await self._build_model(card, created)
        name = entry.name
        return {table: Engine(name, created, entry.checksum, card, model) for table in tables}

    async def _build_model(self, card: ModelCard, created: int) -> ServedModel:
        """Raises InvalidRequest for an unusable card, also for REFUSED_S after it was refused: a
        build up to its limits takes a processor."""
        refusal, until_s = self._refusals.get(card.checksum, (None, 0.0))
        if refusal is not None and self._now_s() < until_s:
            raise refusal.copy()
        try:
            tried = await self._tokenizers.check(card)
            async with self._build_lock:
                return await asyncio.to_thread(
                    build_model,
                    card,
                    created=created,
                    mesh_key=self._mesh_key,
                    tried=tried,
                )
        except InvalidRequest as error:
            self._refusals[card.checksum] = error.copy(), self._now_s() + REFUSED_S
            if len(self._refusals) > REFUSALS_MAX:
                del self._refusals[next(iter(self._refusals))]
            raise

    async def _card(self, entry: ModelEntry) -> tuple[ModelCard | None, str]:
        """Returns the card, or None and the reason: pass-through workers do not need one."""
        if not entry.checksum:
            return None, ""
        try:
            card = await self._get_card(entry.checksum)
            if entry.requires_preprocessing():
                card = await self.artifacts.complete_card(card)
        except MeshError as error:
            missing = isinstance(error, NotFound)
            card_error = card_missing(entry) if missing else card_unreadable(entry, error)
            if entry.requires_preprocessing():
                raise card_error from error
            log.info("model_without_card", model=entry.name, reason=card_error.message)
            return None, card_error.message
        log.debug("card_loaded", model=entry.name, card=card.name)
        return card, ""

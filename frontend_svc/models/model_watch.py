"""Which models are served, decided from workers that join, change and leave (pure).

The catalog passes each change of the registry to `ModelWatch.follow` and executes the actions that
it returns. For a Build it loads the card, builds the engines, and reports the result.

The entry of a model that cannot be built stays, since it is the registration of another process:
`retry` builds the model again.

Invariants: a model is served only while an entry with the card it was built from exists; it is in
all of its tables or in none; at most one Build per model is in progress.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, Literal, TypeVar, get_args

from common.errors import InvalidRequest, MeshError, NotFound
from common.registry.card import ModelCard, ModelType
from common.registry.instances import Instance, SnapshotDiff

E = TypeVar("E")

# Key of Instance.meta.
MODEL_TYPE_KEY: Final = "model_type"

Table = Literal["chat", "completions", "embeddings", "scores"]
TABLES: tuple[Table, ...] = get_args(Table)
LogLevel = Literal["debug", "info", "error"]


class EntryType(StrEnum):
    """Input of a worker: token ids (Backend), or the API's own JSON of one kind."""

    BACKEND = "Backend"
    CHAT = "Chat"
    COMPLETION = "Completion"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """The model of a worker, as registered."""

    name: str
    """What clients put into `model`."""
    model_type: EntryType
    """Absent from `Instance.meta`: Backend. A card with text input makes Backend pass through."""
    checksum: str
    """Of the card; "" = no card."""

    @staticmethod
    def of(instance: Instance) -> ModelEntry:
        """Returns the entry of `instance`. Raises InvalidRequest for an unknown model_type."""
        reported_type = instance.meta.get(MODEL_TYPE_KEY, EntryType.BACKEND)
        try:
            model_type = EntryType(reported_type)
        except ValueError as error:
            known = ", ".join(EntryType)
            text = f"model_type {reported_type!r} is not one of {known}"
            raise InvalidRequest(text, f"meta.{MODEL_TYPE_KEY}") from error
        return ModelEntry(instance.model, model_type, instance.card_checksum)

    def requires_preprocessing(self) -> bool:
        """Returns whether the frontend renders and tokenizes requests for the model."""
        return self.model_type is EntryType.BACKEND


def registration_key(instance: Instance) -> str:
    """Returns the name of a worker's registration in log events."""
    return f"models/{instance.key}"


def card_key(entry: ModelEntry) -> str:
    return f"cards/{entry.checksum}"


def card_missing(entry: ModelEntry) -> NotFound:
    """Returns the error if the store has no such card."""
    return NotFound(
        f"missing model deployment card of {entry.name!r}: there is no {card_key(entry)}",
        field="card_checksum",
    )


def card_unreadable(entry: ModelEntry, cause: Exception) -> MeshError:
    """Returns the error if the store fails or the card is damaged."""
    reason = cause.message if isinstance(cause, MeshError) else f"{type(cause).__name__}: {cause}"
    return MeshError(f"cannot load the card {card_key(entry)} of {entry.name!r}: {reason}")


@dataclass(frozen=True, slots=True)
class Build:
    """To do: load the card, build an engine for each table of `plan_tables`, then call
    `build_succeeded` or `build_failed`."""

    key: str
    """Of the registration, see `registration_key`."""
    entry: ModelEntry


@dataclass(frozen=True, slots=True)
class ModelAdded:
    """A model is served from now on."""

    name: str
    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """A model is no longer served."""

    name: str


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A log line to write."""

    level: LogLevel
    event: str
    fields: Mapping[str, object]


Action = Build | ModelAdded | ModelRemoved | LogEvent


def plan_tables(
    entry: ModelEntry, card: ModelCard | None, no_card_reason: str = ""
) -> tuple[Table, ...]:
    """Returns the tables of an entry.

    no_card_reason: why `card` is None.
    Raises InvalidRequest for a Backend without a card, and for a card of no known kind.
    """
    match entry.model_type:
        case EntryType.CHAT:
            return ("chat",)
        case EntryType.COMPLETION:
            return ("completions",)
        case EntryType.BACKEND:
            if card is None:
                reason = no_card_reason or "the worker has no card_checksum"
                raise InvalidRequest(f"missing model deployment card: {reason}", "card_checksum")
    table_by_type: dict[ModelType, Table]
    table_by_type = {ModelType.CHAT: "chat", ModelType.COMPLETIONS: "completions"}
    if card.requires_preprocessing:  # embeddings and scores need token ids
        table_by_type |= {ModelType.EMBEDDING: "embeddings", ModelType.SCORE: "scores"}
    tables = tuple(table for flag, table in table_by_type.items() if flag in card.model_type)
    if not tables:
        text = f"the card of {card.name!r} offers neither chat, completions, embeddings nor scores"
        raise InvalidRequest(text, "model_type")
    return tables


def is_pass_through(entry: ModelEntry, card: ModelCard | None) -> bool:
    """Returns whether workers receive the client's JSON unchanged."""
    return card is None or not (entry.requires_preprocessing() and card.requires_preprocessing)


@dataclass(frozen=True, slots=True)
class Built(Generic[E]):
    """What was built from an entry: an engine for each table of the model."""

    entry: ModelEntry
    engines: Mapping[Table, E]


class ModelWatch(Generic[E]):
    """The models that workers offer, and those that are served. E: what the catalog builds."""

    def __init__(self) -> None:
        self.served: dict[str, Built[E]] = {}
        self.building: dict[str, Build] = {}
        # Model -> why it is offered and not served.
        self.not_ready: dict[str, str] = {}
        # Those of `not_ready` whose registration or card cannot be used.
        self.refused: set[str] = set()
        # By key of the registration, oldest first.
        self._entries: dict[str, ModelEntry] = {}

    def names(self) -> tuple[str, ...]:
        """Returns the served models in order of addition, those with chat first."""

        def first_table(name: str) -> int:
            return min(map(TABLES.index, self.served[name].engines))

        return tuple(sorted(self.served, key=first_table))

    def is_pending(self, name: str) -> bool:
        """Returns whether workers offer a model that is not served: its Build is in progress or
        failed. False for a model that is served, even if some worker's card for it is rejected."""
        if name not in self.building and name not in self.not_ready:
            return False
        return any(entry.name == name for entry in self._entries.values())

    def follow(self, changes: SnapshotDiff) -> Iterator[Action]:
        """Yields what to do after a change of the registry: first for the workers that left, so
        that a name is free before its reuse. An invalid registration is logged and ignored.

        The result of a Build may be reported before the next action is read.
        """
        for instance in changes.left:
            if _is_model_worker(instance):
                yield from self._remove_entry(registration_key(instance))
        for instance in (*changes.changed, *changes.joined):
            key = registration_key(instance)
            if _is_model_worker(instance):
                yield from self._set_entry(key, instance)
            elif key in self._entries:
                yield from self._remove_entry(key)

    def _set_entry(self, key: str, instance: Instance) -> list[Action]:
        """Adds or replaces an entry; a new model gets a Build."""
        try:
            entry = ModelEntry.of(instance)
        except InvalidRequest as error:
            text = f"invalid model entry {key}: {error.message}"
            fields = {"key": key, "value": instance.to_json().decode(), "error": text}
            return [LogEvent("error", "model_event_rejected", fields)]
        before = self._entries.get(key)
        self._entries[key] = entry
        actions: list[Action] = []
        if before is not None and before != entry:
            actions = self._reconcile(before.name)
        name = entry.name
        if builds := self._build_if_new(name):
            return actions + builds
        served = self.served.get(name)
        if served is not None and served.entry.checksum != entry.checksum:
            fields = {"model": name, "key": key, "checksum": entry.checksum}
            return [*actions, LogEvent("error", "model_card_rejected", fields)]
        return [*actions, LogEvent("debug", "model_already_known", {"model": name, "key": key})]

    def _remove_entry(self, key: str) -> list[Action]:
        """Removes an entry; with the last one of its card, the model leaves all tables."""
        entry = self._entries.pop(key, None)
        if entry is None:
            fields = {"key": key, "error": f"there is no model entry {key}"}
            return [LogEvent("error", "model_event_rejected", fields)]
        return self._reconcile(entry.name)

    def build_succeeded(self, build: Build, engines: Mapping[Table, E]) -> list[Action]:
        """Adds a built model to all of its tables."""
        name = build.entry.name
        if self.building.get(name) is not build:
            return [LogEvent("info", "model_build_outdated", {"model": name, "key": build.key})]
        del self.building[name]
        if build.entry not in self._entries.values():
            return self._build_if_new(name)
        self.served[name] = Built(build.entry, engines)
        self._forget_failure(name)
        return [ModelAdded(name, tuple(engines))]

    def build_failed(self, build: Build, error: MeshError) -> list[Action]:
        """Records why a model is not served; a repeated reason is not logged."""
        name = build.entry.name
        if self.building.get(name) is not build:
            return []
        del self.building[name]
        if build.entry not in self._entries.values():
            return self._build_if_new(name)
        is_new_reason = self.not_ready.get(name) != error.message
        self.not_ready[name] = error.message
        if isinstance(error, InvalidRequest):
            self.refused.add(name)
        else:
            self.refused.discard(name)
        fields = {"model": name, "key": build.key, "reason": error.message}
        return [LogEvent("error", "model_not_ready", fields)] if is_new_reason else []

    def retry(self) -> list[Action]:
        """Returns Builds for models that are not ready and not being built."""
        return [action for name in tuple(self.not_ready) for action in self._build_if_new(name)]

    def _forget_failure(self, name: str) -> None:
        self.not_ready.pop(name, None)
        self.refused.discard(name)

    def _build_if_new(self, name: str) -> list[Action]:
        """Returns a Build from the oldest entry of the model, unless it is served or being
        built."""
        oldest = next((item for item in self._entries.items() if item[1].name == name), None)
        if oldest is None:
            self._forget_failure(name)
            return []
        if name in self.served or name in self.building:
            return []
        build = self.building[name] = Build(*oldest)
        return [build]

    def _reconcile(self, name: str) -> list[Action]:
        """Removes a model if no entry has its served card, and builds from another entry."""
        served = self.served.get(name)
        actions: list[Action] = []
        if served is not None and served.entry not in self._entries.values():
            del self.served[name]
            actions.append(ModelRemoved(name))
        return actions + self._build_if_new(name)


def _is_model_worker(instance: Instance) -> bool:
    return instance.service == "worker" and bool(instance.model)

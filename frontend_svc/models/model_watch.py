"""Which models are served, derived from workers joining and leaving: events in, actions out (pure).

Names of the discovery document (S0), and what stands for them:

| document                        | here                                                         |
|---------------------------------|--------------------------------------------------------------|
| value under a key: a ModelEntry | an `Instance`; `Entry.of` has its ModelEntry and checksum    |
| `model_type` of the entry       | `Instance.meta["model_type"]`, absent = Backend; a card with |
|                                 | text input makes Backend pass through, as in later releases  |
| card under slug(name), load_mdc | under its checksum: `card_key`, `card_missing`,              |
|                                 | `card_unreadable`; the catalog reads it                      |
| undecodable values              | the registry logs them as `registry_entry_unreadable`        |
| `drt`, discovery client         | a port that loads and builds, or None; the catalog calls it  |
| handle_put, one call            | returns a Build; then `build_succeeded` or `build_failed`    |
| add_…_model, remove_…_model     | `ModelManager.add`, `remove` with the table as an argument   |
| client of the entry's endpoint  | the router places requests on the workers of a namespace     |
| router mode Random              | the router's `selector`, also per request                    |
| engine of a table               | what the port builds: E                                      |
| "delete the offending key"      | never: it is another process's registration. The entry stays |
|                                 | and `retry` builds again at each reconciliation              |

Invariants: a name is in the tables only while an entry with the card it was built from exists; it
is in all of its tables or in none; at most one Build per name is in progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Literal, TypeVar

from common.errors import Conflict, InvalidRequest, MeshError, NotFound
from common.registry.card import ModelCard, ModelType
from common.registry.instances import (
    EndpointId,
    Instance,
    Snapshot,
    diff_snapshots,
)

E = TypeVar("E")

# A key is this prefix and the instance's network name.
MODEL_KEY_PREFIX = "models/"
CARD_BUCKET = "cards"
# Key of Instance.meta.
MODEL_TYPE_KEY = "model_type"

Table = Literal["chat", "completions", "embeddings"]
LogLevel = Literal["debug", "info", "error"]


class EntryType(StrEnum):
    """Input of a worker: token ids (Backend), or the API's own JSON of one kind."""

    BACKEND = "Backend"
    CHAT = "Chat"
    COMPLETION = "Completion"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A worker's description of its model. name: what clients put into `model`."""

    name: str
    endpoint: EndpointId
    model_type: EntryType

    def requires_preprocessing(self) -> bool:
        """Whether the frontend renders and tokenizes requests for it."""
        return self.model_type is EntryType.BACKEND


@dataclass(frozen=True, slots=True)
class Entry:
    """A ModelEntry and the card it is served under; checksum: "" = no card."""

    model: ModelEntry
    checksum: str

    @staticmethod
    def of(instance: Instance) -> Entry:
        """The entry of `instance`. Raises InvalidRequest for an unknown model_type."""
        reported_type = instance.meta.get(MODEL_TYPE_KEY, EntryType.BACKEND)
        try:
            model_type = EntryType(reported_type)
        except ValueError as error:
            known = ", ".join(EntryType)
            text = f"model_type {reported_type!r} is not one of {known}"
            raise InvalidRequest(text, f"meta.{MODEL_TYPE_KEY}") from error
        model = ModelEntry(instance.model, instance.endpoint, model_type)
        return Entry(model, instance.card_checksum)


def load_entry(key: str, values: Sequence[Instance]) -> Entry:
    """The entry under `key`, from the first of several values. Raises NotFound if there is none,
    InvalidRequest if it is invalid; both name the key."""
    if not values:
        raise NotFound(f"there is no model entry {key}", field="key")
    try:
        return Entry.of(values[0])
    except InvalidRequest as error:
        raise InvalidRequest(f"invalid model entry {key}: {error.message}", error.field) from error


def card_key(entry: Entry) -> str:
    return f"{CARD_BUCKET}/{entry.checksum}"


def card_missing(entry: Entry) -> NotFound:
    """The error if the store has no such card."""
    return NotFound(
        f"missing model deployment card of {entry.model.name!r}: there is no {card_key(entry)}",
        field="card_checksum",
    )


def card_unreadable(entry: Entry, cause: Exception) -> MeshError:
    """The error if the store fails or the card is damaged."""
    reason = cause.message if isinstance(cause, MeshError) else f"{type(cause).__name__}: {cause}"
    return MeshError(f"cannot load the card {card_key(entry)} of {entry.model.name!r}: {reason}")


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A registration and its key."""

    key: str
    value: Instance


@dataclass(frozen=True, slots=True)
class Put:
    """A worker joined, or changed its registration."""

    kv: KeyValue


@dataclass(frozen=True, slots=True)
class Delete:
    """A worker left."""

    key: str


WatchEvent = Put | Delete


def events_between(
    old: Snapshot, new: Snapshot, prefix: str = MODEL_KEY_PREFIX
) -> Iterator[WatchEvent]:
    """Events of workers with a model, departures first, so that names are free before reuse."""
    changes = diff_snapshots(old, new)
    for removed in changes.left:
        if _is_model_worker(removed):
            yield Delete(prefix + removed.network_name)
    for instance in (*changes.changed, *changes.joined):
        if _is_model_worker(instance):
            yield Put(KeyValue(prefix + instance.network_name, instance))
        elif instance.id in old.instances and _is_model_worker(old.instances[instance.id]):
            yield Delete(prefix + instance.network_name)


@dataclass(frozen=True, slots=True)
class Build:
    """To do: load the card, build an engine for each table of `plan_tables`, then call
    `build_succeeded` or `build_failed`."""

    key: str
    entry: Entry


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
    entry: Entry, card: ModelCard | None, no_card_reason: str = ""
) -> tuple[Table, ...]:
    """The tables of an entry. no_card_reason: why `card` is None. Raises InvalidRequest for a
    Backend without a card, and for a card of no known kind."""
    match entry.model.model_type:
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
    if card.requires_preprocessing:  # embeddings need token ids
        table_by_type[ModelType.EMBEDDING] = "embeddings"
    tables = tuple(table for flag, table in table_by_type.items() if flag in card.model_type)
    if not tables:
        text = f"the card of {card.name!r} offers neither chat nor completions nor embeddings"
        raise InvalidRequest(text, "model_type")
    return tables


def is_pass_through(entry: Entry, card: ModelCard | None) -> bool:
    """Whether workers receive the client's JSON unchanged."""
    return card is None or not (
        entry.model.requires_preprocessing() and card.requires_preprocessing
    )


class ModelManager(Generic[E]):
    """The serving table: model name -> engine, by kind of request."""

    def __init__(self) -> None:
        self._tables: dict[Table, dict[str, E]] = {"chat": {}, "completions": {}, "embeddings": {}}
        # The same by model: each request reads it.
        self._engines: dict[str, dict[Table, E]] = {}

    def has_model_any(self, name: str) -> bool:
        return name in self._engines

    def add(self, table: Table, name: str, engine: E) -> None:
        """Raises Conflict if the name is taken."""
        if name in self._tables[table]:
            raise Conflict(f"the model {name!r} is in the table of {table} already", field="model")
        self._tables[table][name] = engine
        self._group()

    def remove(self, table: Table, name: str) -> None:
        """Raises NotFound, which the caller may ignore, if the name is not in the table."""
        if self._tables[table].pop(name, None) is None:
            raise NotFound(f"the model {name!r} is not in the table of {table}", field="model")
        self._group()

    def _group(self) -> None:
        self._engines = {}
        for table, engines in self._tables.items():
            for name, engine in engines.items():
                self._engines.setdefault(name, {})[table] = engine

    def engine(self, name: str, table: Table) -> E | None:
        return self._tables[table].get(name)

    def engines(self, name: str) -> Mapping[Table, E]:
        return self._engines.get(name, {})

    def names(self) -> tuple[str, ...]:
        """Names in any table, in order of addition (those with chat first)."""
        return tuple(self._engines)


@dataclass(slots=True)
class ModelWatchState(Generic[E]):
    """State of the watcher. prefix: of all keys; drt: the port that loads and builds, or None.
    not_ready: model -> why it is offered and not served. Only the presence of `drt` matters here;
    the catalog calls it."""

    prefix: str
    manager: ModelManager[E]
    drt: object | None
    not_ready: dict[str, str] = field(default_factory=dict)
    _entries: dict[str, Entry] = field(default_factory=dict)
    _served: dict[str, Entry] = field(default_factory=dict)
    building: dict[str, Build] = field(default_factory=dict)

    def is_pending(self, name: str) -> bool:
        """Whether workers offer a model that is not served: its Build is in progress or failed.
        False for a model that is served, even if some worker's card for it is rejected."""
        if name not in self.building and name not in self.not_ready:
            return False
        return any(entry.model.name == name for entry in self._entries.values())

    def handle_put(self, kv: KeyValue) -> list[Action]:
        """Add or replace an entry; a new name gets a Build. Raises the errors of `load_entry`."""
        entry = load_entry(kv.key, [kv.value])
        instance_name = self.instance_name(kv.key)
        before = self._entries.get(instance_name)
        self._entries[instance_name] = entry
        actions: list[Action] = []
        if before is not None and before != entry:
            actions = self._reconcile(before.model.name)
        name = entry.model.name
        if builds := self._build_if_new(name):
            return actions + builds
        if self._served.get(name, entry).checksum != entry.checksum:
            fields = {"model": name, "key": kv.key, "checksum": entry.checksum}
            return [*actions, LogEvent("error", "model_card_rejected", fields)]
        return [*actions, LogEvent("debug", "model_already_known", {"model": name, "key": kv.key})]

    def handle_delete(self, key: str) -> list[Action]:
        """Remove an entry; with the last one of its card, the model leaves all tables. Raises
        NotFound for a key that was never put."""
        entry = self._entries.pop(self.instance_name(key), None)
        if entry is None:
            raise NotFound(f"there is no model entry {key}", field="key")
        return self._reconcile(entry.model.name)

    def build_succeeded(self, build: Build, engines: Mapping[Table, E]) -> list[Action]:
        """Add a built model to all of its tables, or to none if one of them has the name."""
        name = build.entry.model.name
        if self.building.get(name) is not build:
            return [LogEvent("info", "model_build_outdated", {"model": name, "key": build.key})]
        del self.building[name]
        if build.entry not in self._entries.values():
            return self._build_if_new(name)
        try:
            self._register(name, engines)
        except Conflict as error:
            return self._not_ready(build, error.message)
        self._served[name] = build.entry
        self.not_ready.pop(name, None)
        return [ModelAdded(name, tuple(engines))]

    def build_failed(self, build: Build, error: MeshError) -> list[Action]:
        """Record a failed Build: the entry stays, and `retry` builds again."""
        name = build.entry.model.name
        if self.building.get(name) is not build:
            return []
        del self.building[name]
        if build.entry not in self._entries.values():
            return self._build_if_new(name)
        return self._not_ready(build, error.message)

    def retry(self, names: Iterable[str]) -> list[Action]:
        """Builds for those of `names` that are offered, not served and not being built."""
        return [action for name in names for action in self._build_if_new(name)]

    def instance_name(self, key: str) -> str:
        """The key without its prefix, removed once: the rest may begin with the same text."""
        return key.removeprefix(self.prefix)

    def _build_if_new(self, name: str) -> list[Action]:
        """A Build from the oldest entry of the name, unless it is served or being built."""
        oldest_entry = next((i for i in self._entries.items() if i[1].model.name == name), None)
        if oldest_entry is None:
            self.not_ready.pop(name, None)
            return []
        if self.manager.has_model_any(name) or name in self.building:
            return []
        build = Build(self.prefix + oldest_entry[0], oldest_entry[1])
        self.building[name] = build
        if self.drt is None:
            error = MeshError("there is no discovery client to load cards with")
            return self.build_failed(build, error)
        return [build]

    def _reconcile(self, name: str) -> list[Action]:
        """Remove `name` if no entry has its served card, and build from another entry."""
        served = self._served.get(name)
        actions: list[Action] = []
        if served is not None and served not in self._entries.values():
            for table in self.manager.engines(name):
                self.manager.remove(table, name)
            del self._served[name]
            actions.append(ModelRemoved(name))
        return actions + self._build_if_new(name)

    def _register(self, name: str, engines: Mapping[Table, E]) -> None:
        added_tables: list[Table] = []
        try:
            for table, engine in engines.items():
                self.manager.add(table, name, engine)
                added_tables.append(table)
        except Conflict:
            for table in added_tables:
                self.manager.remove(table, name)
            raise

    def _not_ready(self, build: Build, reason: str) -> list[Action]:
        """Record why a model is not served; a repeated reason is not logged."""
        name = build.entry.model.name
        is_new_reason = self.not_ready.get(name) != reason
        self.not_ready[name] = reason
        fields = {"model": name, "key": build.key, "reason": reason}
        return [LogEvent("error", "model_not_ready", fields)] if is_new_reason else []


def model_watcher(state: ModelWatchState[E], events: Iterable[WatchEvent]) -> Iterator[Action]:
    """The actions of each event, until the events end. An invalid event is logged and skipped.
    Lazy: the result of a Build may be reported before the next event is read."""
    for event in events:
        try:
            match event:
                case Put(kv):
                    actions = state.handle_put(kv)
                case Delete(key):
                    actions = state.handle_delete(key)
        except MeshError as error:
            fields = (
                {"key": event.key}
                if isinstance(event, Delete)
                else {"key": event.kv.key, "value": event.kv.value.to_json().decode()}
            )
            yield LogEvent("error", "model_event_rejected", fields | {"error": error.message})
        else:
            yield from actions


def _is_model_worker(instance: Instance) -> bool:
    return instance.service == "worker" and bool(instance.model)

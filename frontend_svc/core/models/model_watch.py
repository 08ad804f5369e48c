"""Which models are served, from the comings and goings of workers: events in, actions out (pure).

What the discovery document (S0) calls by other names, or does over a wire we do not have:

| document                        | here |
|---------------------------------|------|
| value under a key: a ModelEntry | an `Instance` as JSON; `Entry.of` has its ModelEntry and card |
| `model_type` of the entry       | `Instance.meta["model_type"]`, absent = Backend; a card whose |
|                                 | input is text makes Backend pass through, as later releases do |
| card under slug(name), load_mdc | under its checksum: `card_key`, `card_missing`, |
|                                 | `card_unreadable`; the shell does the reading |
| key read by load_entry          | the registry's snapshot has the values: `load_entry` |
| `drt`, discovery client         | a port that loads and builds, or None; only the shell calls it |
| handle_put, one call            | answers with a Build; then `build_succeeded` or `build_failed`
is called |
| client of the entry's endpoint  | named in Build; placement is the router service's, for all |
| router mode Random              | the router's `selector`, also per request |
| engine of a table               | whatever the port builds: E |
| "delete the offending key"      | never: it is another's registration. The entry stays, and |
|                                 | `retry`, at each reconcile, builds again |

Invariants: a name is in the tables only while an entry with the very card it was built from is
there; it is in all of its tables or in none; at most one Build of a name is under way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Literal, TypeVar

from pydantic import TypeAdapter

from common.errors import Conflict, InvalidRequest, MeshError, NotFound
from common.registry.card import ModelCard, ModelType
from common.registry.instances import (
    ENDPOINT_NAME,
    EndpointId,
    Instance,
    Snapshot,
    diff_snapshots,
    parse_json,
)
from frontend_svc.core.openai.schema import ChatRequest, CompletionRequest
from frontend_svc.core.openai.sse import ChunkKind

E = TypeVar("E")

# Keys of the watched entries are this and the instance's network name.
MODEL_KEY_PREFIX = "models/"
CARD_BUCKET = "cards"
# Key of Instance.meta.
MODEL_TYPE_KEY = "model_type"
NOT_UTF8 = "<not UTF-8>"

Table = Literal["chat", "completions"]
Stage = Literal["frontend", "preprocessor", "backend", "router"]
LogLevel = Literal["debug", "info", "error"]


class EntryType(StrEnum):
    """What a worker takes: token ids (Backend), or the API's own JSON of one kind."""

    BACKEND = "Backend"
    CHAT = "Chat"
    COMPLETION = "Completion"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """What a worker says of the model it serves. name: what clients put into `model`."""

    name: str
    endpoint: EndpointId
    model_type: EntryType

    def requires_preprocessing(self) -> bool:
        """Whether the frontend renders and tokenizes for it."""
        return self.model_type is EntryType.BACKEND

    def to_json(self) -> bytes:
        """A JSON object of the three fields; `from_json` reads an equal value back."""
        endpoint = {n: getattr(self.endpoint, n) for n in ("namespace", "component", "name")}
        raw = {"name": self.name, "endpoint": endpoint, "model_type": self.model_type}
        return json.dumps(raw, separators=(",", ":")).encode()

    @staticmethod
    def from_json(raw: bytes | str) -> ModelEntry:
        """The entry in `raw`. Raises InvalidRequest, naming what is missing or unknown."""
        return parse_json(_MODEL_ENTRY, raw, "model entry")


_MODEL_ENTRY: TypeAdapter[ModelEntry] = TypeAdapter(ModelEntry)


@dataclass(frozen=True, slots=True)
class Entry:
    """A ModelEntry and the card it is served under; checksum: "" = no card."""

    model: ModelEntry
    checksum: str

    @staticmethod
    def of(instance: Instance) -> Entry:
        """What `instance` serves. Raises InvalidRequest for a model_type that is none."""
        reported_type = instance.meta.get(MODEL_TYPE_KEY, EntryType.BACKEND)
        try:
            model_type = EntryType(reported_type)
        except ValueError as error:
            known = ", ".join(EntryType)
            raise InvalidRequest(
                f"model_type {reported_type!r} is none of {known}", f"meta.{MODEL_TYPE_KEY}"
            ) from error
        endpoint = EndpointId(instance.namespace, instance.service, ENDPOINT_NAME)
        return Entry(ModelEntry(instance.model, endpoint, model_type), instance.card_checksum)


def load_entry(key: str, values: Sequence[bytes]) -> Entry:
    """The entry under `key`, the first if there are several.

    Raises NotFound naming the key if there is none, InvalidRequest with key and text if it cannot
    be read.
    """
    if not values:
        raise NotFound(f"there is no model entry {key}", field="key")
    try:
        return Entry.of(Instance.from_json(values[0]))
    except InvalidRequest as error:
        raise InvalidRequest(
            f"cannot read model entry {key}: {error.message}; it is "
            f"{_decode_or_placeholder(values[0])}",
            error.field,
        ) from error


def card_key(entry: Entry) -> str:
    """Where the card of an entry is kept."""
    return f"{CARD_BUCKET}/{entry.checksum}"


def card_missing(entry: Entry) -> NotFound:
    """The error when nobody stored the card."""
    return NotFound(
        f"missing model deployment card of {entry.model.name!r}: there is no {card_key(entry)}",
        field="card_checksum",
    )


def card_unreadable(entry: Entry, cause: Exception) -> MeshError:
    """The error when the store failed, or what it holds is damaged."""
    reason = cause.message if isinstance(cause, MeshError) else f"{type(cause).__name__}: {cause}"
    return MeshError(f"cannot load the card {card_key(entry)} of {entry.model.name!r}: {reason}")


@dataclass(frozen=True, slots=True)
class KeyValue:
    """What is stored: a key and bytes."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Put:
    """A worker came, or says something else of itself."""

    kv: KeyValue


@dataclass(frozen=True, slots=True)
class Delete:
    """A worker is gone."""

    key: str


WatchEvent = Put | Delete


def events_between(
    old: Snapshot, new: Snapshot, prefix: str = MODEL_KEY_PREFIX
) -> Iterator[WatchEvent]:
    """The events of workers with a model, departures first: a name is free before it is taken."""
    changes = diff_snapshots(old, new)
    for removed in changes.left:
        if _is_model_worker(removed):
            yield Delete(prefix + removed.network_name)
    for instance in (*changes.changed, *changes.joined):
        if _is_model_worker(instance):
            yield Put(KeyValue(prefix + instance.network_name, instance.to_json()))
        elif instance.id in old.instances and _is_model_worker(old.instances[instance.id]):
            yield Delete(prefix + instance.network_name)


@dataclass(frozen=True, slots=True)
class Build:
    """To do: load the card, `plan_pipelines` the pipelines, build them, and report by
    `build_succeeded` or `build_failed`."""

    key: str
    entry: Entry

    @property
    def endpoint(self) -> EndpointId:
        """Whose instances serve it."""
        return self.entry.model.endpoint


@dataclass(frozen=True, slots=True)
class ModelAdded:
    """A model is served now."""

    name: str
    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """A model is served no more."""

    name: str


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Something for the log."""

    level: LogLevel
    event: str
    fields: Mapping[str, object]


Action = Build | ModelAdded | ModelRemoved | LogEvent


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The way of a request through one engine. stages: in the order a request passes them.

    request, chunk: what the client sends and gets. order: the field of `attach.LegRequest` that
    carries
    it to the worker; answer: the call of `attach.LegSink` that brings back what came of it.
    """

    table: Table
    stages: tuple[Stage, ...]
    request: type[ChatRequest] | type[CompletionRequest]
    chunk: ChunkKind
    order: Literal["request", "chat_json", "completion_json"]
    response: Literal["tokens", "chunk"]

    @property
    def response_stages(self) -> tuple[Stage, ...]:
        """The order in which the answer passes them."""
        return self.stages[::-1]

    @property
    def is_pass_through(self) -> bool:
        """Whether the engine gets the client's JSON as it is."""
        return self.order != "request"


def plan_pipelines(
    entry: Entry, card: ModelCard | None, no_card_reason: str = ""
) -> tuple[Pipeline, ...]:
    """The pipelines of an entry, one per table.

    Raises InvalidRequest for token ids without a card, and for a card of neither kind.
    """
    match entry.model.model_type:
        case EntryType.CHAT:
            return (_pipeline("chat", tokens=False),)
        case EntryType.COMPLETION:
            return (_pipeline("completions", tokens=False),)
        case EntryType.BACKEND:
            if card is None:
                reason = no_card_reason or "the worker names none"
                raise InvalidRequest(f"missing model deployment card: {reason}", "card_checksum")
    wanted: dict[ModelType, Table] = {
        ModelType.CHAT: "chat",
        ModelType.COMPLETIONS: "completions",
    }
    tables = [table for flag, table in wanted.items() if flag in card.model_type]
    if not tables:
        raise InvalidRequest(
            f"the card of {card.name!r} offers neither chat nor completions", "model_type"
        )
    return tuple(_pipeline(table, tokens=card.requires_preprocessing) for table in tables)


class ModelManager(Generic[E]):
    """The serving table: model name -> engine, for chat and for completions."""

    def __init__(self) -> None:
        self._tables: dict[Table, dict[str, E]] = {"chat": {}, "completions": {}}

    def has_model_any(self, name: str) -> bool:
        """Whether the name is served in any form."""
        return any(name in table for table in self._tables.values())

    def add_chat_completions_model(self, name: str, engine: E) -> None:
        """Raises Conflict if the name is taken."""
        self._add("chat", name, engine)

    def add_completions_model(self, name: str, engine: E) -> None:
        """Raises Conflict if the name is taken."""
        self._add("completions", name, engine)

    def remove_chat_completions_model(self, name: str) -> None:
        """Raises NotFound, which may be ignored, if it is not there."""
        self._remove("chat", name)

    def remove_completions_model(self, name: str) -> None:
        """Raises NotFound, which may be ignored, if it is not there."""
        self._remove("completions", name)

    def engine(self, name: str, table: Table) -> E | None:
        """The engine of a name for one kind of request, None if there is none."""
        return self._tables[table].get(name)

    def engines(self, name: str) -> dict[Table, E]:
        """All engines of a name."""
        return {t: engines[name] for t, engines in self._tables.items() if name in engines}

    def names(self) -> tuple[str, ...]:
        """Names served in any form, in the order they came (those with chat first)."""
        return tuple(self._tables["chat"] | self._tables["completions"])

    def _add(self, table: Table, name: str, engine: E) -> None:
        if name in self._tables[table]:
            raise Conflict(f"the model {name!r} is in the table of {table} already", field="model")
        self._tables[table][name] = engine

    def _remove(self, table: Table, name: str) -> None:
        if self._tables[table].pop(name, None) is None:
            raise NotFound(f"the model {name!r} is not in the table of {table}", field="model")


@dataclass(slots=True)
class ModelWatchState(Generic[E]):
    """The watcher's memory. prefix: of all keys; drt: what loads cards and builds, None if nothing.

    not_ready: model -> why it is wanted and not served. Whether there is a drt is all that is asked
    of it here: the shell that executes a Build calls it.
    """

    prefix: str
    manager: ModelManager[E]
    drt: object | None
    not_ready: dict[str, str] = field(default_factory=dict)
    _entries: dict[str, Entry] = field(default_factory=dict)
    _served: dict[str, Entry] = field(default_factory=dict)
    _building: dict[str, Build] = field(default_factory=dict)

    @property
    def building(self) -> frozenset[str]:
        """Models whose Build is under way."""
        return frozenset(self._building)

    def is_pending(self, name: str) -> bool:
        """Whether workers offer a model that is not served yet: its Build is under way or failed.

        One whose card is refused beside a served one is served, so it is not awaited.
        """
        if name not in self._building and name not in self.not_ready:
            return False
        return any(entry.model.name == name for entry in self._entries.values())

    def handle_put(self, kv: KeyValue) -> list[Action]:
        """Take an entry in; a name that is new asks to be built. Raises what `load_entry` does."""
        entry = load_entry(kv.key, [kv.value])
        instance_name = self.instance_name(kv.key)
        before = self._entries.get(instance_name)
        self._entries[instance_name] = entry
        actions: list[Action] = []
        if before is not None and before != entry:
            actions = self._reconcile(before.model.name)
        name = entry.model.name
        if wanted := self._build_if_new(name):
            return actions + wanted
        if self._served.get(name, entry).checksum != entry.checksum:
            fields = {"model": name, "key": kv.key, "checksum": entry.checksum}
            return [*actions, LogEvent("error", "model_card_refused", fields)]
        return [*actions, LogEvent("debug", "model_known_already", {"model": name, "key": kv.key})]

    def handle_delete(self, key: str) -> list[Action]:
        """Let an entry go; with the last one of its card its model is Removed, from all tables.

        Raises NotFound for a key that was never put.
        """
        entry = self._entries.pop(self.instance_name(key), None)
        if entry is None:
            raise NotFound(f"there is no model entry {key}", field="key")
        return self._reconcile(entry.model.name)

    def build_succeeded(self, build: Build, engines: Mapping[Table, E]) -> list[Action]:
        """A Build succeeded: into all tables, or, if one of them is taken, into none."""
        name = build.entry.model.name
        if self._building.get(name) is not build:
            return [LogEvent("info", "model_build_outdated", {"model": name, "key": build.key})]
        del self._building[name]
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
        """A Build failed: nothing is added, the entry is kept, `retry` asks again."""
        name = build.entry.model.name
        if self._building.get(name) is not build:
            return []
        del self._building[name]
        if build.entry not in self._entries.values():
            return self._build_if_new(name)
        return self._not_ready(build, error.message)

    def retry(self, names: Iterable[str]) -> list[Action]:
        """Ask again for those of `names` that are wanted, not served and not being built."""
        return [action for name in names for action in self._build_if_new(name)]

    def instance_name(self, key: str) -> str:
        """The key without its prefix, taken off once: what follows may begin like it."""
        return key.removeprefix(self.prefix)

    def _build_if_new(self, name: str) -> list[Action]:
        """Build from the oldest entry of that name, unless it is served or on its way."""
        oldest_entry = next((i for i in self._entries.items() if i[1].model.name == name), None)
        if oldest_entry is None:
            self.not_ready.pop(name, None)
            return []
        if self.manager.has_model_any(name) or name in self._building:
            return []
        build = Build(self.prefix + oldest_entry[0], oldest_entry[1])
        self._building[name] = build
        if self.drt is None:
            return self.build_failed(
                build, MeshError("there is no discovery client to load cards with")
            )
        return [build]

    def _reconcile(self, name: str) -> list[Action]:
        """After an entry of `name` went: is what is served still wanted, is something else?"""
        served = self._served.get(name)
        actions: list[Action] = []
        if served is not None and served not in self._entries.values():
            self._unregister(name)
            del self._served[name]
            actions.append(ModelRemoved(name))
        return actions + self._build_if_new(name)

    def _register(self, name: str, engines: Mapping[Table, E]) -> None:
        added_tables: list[Table] = []
        try:
            for table, engine in engines.items():
                if table == "chat":
                    self.manager.add_chat_completions_model(name, engine)
                else:
                    self.manager.add_completions_model(name, engine)
                added_tables.append(table)
        except Conflict:
            for table in added_tables:
                self._remove_from_table(name, table)
            raise

    def _unregister(self, name: str) -> None:
        """From both tables; not being in one of them is no error."""
        for table in ("chat", "completions"):
            try:
                self._remove_from_table(name, table)
            except NotFound:
                continue

    def _remove_from_table(self, name: str, table: Table) -> None:
        if table == "chat":
            self.manager.remove_chat_completions_model(name)
        else:
            self.manager.remove_completions_model(name)

    def _not_ready(self, build: Build, reason: str) -> list[Action]:
        """Said when it is news: a retry that fails as before is not."""
        name = build.entry.model.name
        is_new_reason = self.not_ready.get(name) != reason
        self.not_ready[name] = reason
        note = LogEvent(
            "error", "model_not_ready", {"model": name, "key": build.key, "why": reason}
        )
        return [note] if is_new_reason else []


def model_watcher(state: ModelWatchState[E], events: Iterable[WatchEvent]) -> Iterator[Action]:
    """What to do upon each event, until there are no more. A bad one is noted and the rest goes on.

    Lazy: the outcome of a Build may be reported before the next event is looked at.
    """
    for event in events:
        try:
            match event:
                case Put(kv):
                    actions = state.handle_put(kv)
                case Delete(key):
                    actions = state.handle_delete(key)
        except MeshError as error:
            yield LogEvent("error", "model_event_refused", _refusal_fields(event, error))
        else:
            yield from actions


def _refusal_fields(event: WatchEvent, error: MeshError) -> dict[str, object]:
    if isinstance(event, Delete):
        return {"key": event.key, "error": error.message}
    return {
        "key": event.kv.key,
        "value": _decode_or_placeholder(event.kv.value),
        "error": error.message,
    }


def _pipeline(table: Table, *, tokens: bool) -> Pipeline:
    is_chat = table == "chat"
    return Pipeline(
        table=table,
        stages=_TOKEN_STAGES if tokens else _PASS_THROUGH_STAGES,
        request=ChatRequest if is_chat else CompletionRequest,
        chunk=ChunkKind.CHAT if is_chat else ChunkKind.COMPLETION,
        order="request" if tokens else "chat_json" if is_chat else "completion_json",
        response="tokens" if tokens else "chunk",
    )


_TOKEN_STAGES: tuple[Stage, ...] = ("frontend", "preprocessor", "backend", "router")
_PASS_THROUGH_STAGES: tuple[Stage, ...] = ("frontend", "router")


def _is_model_worker(instance: Instance) -> bool:
    return instance.service == "worker" and bool(instance.model)


def _decode_or_placeholder(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return NOT_UTF8

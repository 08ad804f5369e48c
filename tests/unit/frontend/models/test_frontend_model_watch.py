"""The model watcher: the pure state machine, and the catalog that executes its actions."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from common.errors import (
    InvalidRequest,
    MeshError,
    NotFound,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from common.registry.card import Artifact, ModelCard, ModelType
from common.registry.instances import (
    EndpointId,
    Instance,
    Snapshot,
    SnapshotDiff,
    diff_snapshots,
)
from common.registry.registry import MemoryRegistry
from common.runtime.config import ConfigError, read_config
from frontend_svc.models.catalog import RECENTLY_SERVED_S, ModelCatalog
from frontend_svc.models.model_watch import (
    MODEL_TYPE_KEY,
    Action,
    Build,
    EntryType,
    LogEvent,
    ModelAdded,
    ModelEntry,
    ModelRemoved,
    ModelWatch,
    Table,
    card_key,
    card_missing,
    card_unreadable,
    is_pass_through,
    plan_tables,
    registration_key,
)
from router_svc.config import RouterConfig
from tests.kit.catalogs import follow_and_load
from worker_svc.engines.sim.config import SIM_MODEL_DIR

BOTH: tuple[Table, ...] = ("chat", "completions")


def worker(n: int, model: str = "m", checksum: str = "c1", **meta: str) -> Instance:
    return Instance(
        n, "ns", "worker", "", "127.0.0.1:1", model=model, card_checksum=checksum, meta=meta
    )


def joined(*instances: Instance) -> SnapshotDiff:
    return SnapshotDiff(joined=instances)


def changed(*instances: Instance) -> SnapshotDiff:
    return SnapshotDiff(changed=instances)


def left(*instances: Instance) -> SnapshotDiff:
    return SnapshotDiff(left=instances)


def entry(model_type: EntryType = EntryType.BACKEND, checksum: str = "c1") -> ModelEntry:
    return ModelEntry("m", model_type, checksum)


class Shell:
    """Executes the actions of the state machine, with strings as engines.

    faults: errors of builds by model. tables: the tables of every model.
    """

    def __init__(self, tables: tuple[Table, ...] = BOTH) -> None:
        self.watch: ModelWatch[str] = ModelWatch()
        self.tables = tables
        self.faults: dict[str, MeshError] = {}
        self.done: list[Action] = []
        self.builds = 0

    def feed(self, changes: SnapshotDiff) -> list[Action]:
        """The actions of a change of the registry."""
        return self._run(self.watch.follow(changes))

    def retry(self) -> list[Action]:
        return self._run(iter(self.watch.retry()))

    def names(self) -> tuple[str, ...]:
        return self.watch.names()

    def engines(self, name: str) -> Mapping[Table, str]:
        served = self.watch.served.get(name)
        return {} if served is None else served.engines

    def _run(self, actions: Iterator[Action]) -> list[Action]:
        before = len(self.done)
        for action in actions:
            self._execute(action)
        return self.done[before:]

    def _execute(self, action: Action) -> None:
        self.done.append(action)
        if isinstance(action, Build):
            for following in self._build(action):
                self._execute(following)

    def _build(self, build: Build) -> list[Action]:
        self.builds += 1
        name = build.entry.name
        if name in self.faults:
            return self.watch.build_failed(build, self.faults[name])
        engines = {t: f"{name}.{t}.{build.entry.checksum}.{self.builds}" for t in self.tables}
        return self.watch.build_succeeded(build, engines)


def started_build(watch: ModelWatch[str], instance: Instance) -> Build:
    """The Build of a worker that joins with a new model; its result is not reported yet."""
    (build,) = watch.follow(joined(instance))
    assert isinstance(build, Build)
    return build


def notes(actions: list[Action]) -> list[tuple[str, str]]:
    return [(a.level, a.event) for a in actions if isinstance(a, LogEvent)]


# Entries and cards.


@pytest.mark.row("S0-04")
def test_an_unknown_model_type_is_an_error_of_that_entry_only() -> None:
    assert [t.value for t in EntryType] == ["Backend", "Chat", "Completion"]
    shell = Shell()
    done = shell.feed(joined(worker(1, "new", model_type="Realtime"), worker(2, "m")))
    assert notes(done) == [("error", "model_event_rejected")]
    assert shell.names() == ("m",)


@pytest.mark.row("S0-05")
def test_only_backend_entries_are_preprocessed() -> None:
    expected = {EntryType.BACKEND: True, EntryType.CHAT: False, EntryType.COMPLETION: False}
    assert {t: entry(t).requires_preprocessing() for t in EntryType} == expected


@pytest.mark.row("S0-02", "S0-03")
def test_an_entry_has_the_model_and_card_of_its_instance_which_has_the_endpoint() -> None:
    instance = worker(1, "Qwen/A", "c7")
    assert ModelEntry.of(instance) == ModelEntry("Qwen/A", EntryType.BACKEND, "c7")
    assert instance.endpoint == EndpointId("ns", "worker", "serve")
    assert ModelEntry.of(worker(1, model_type="Chat")).model_type is EntryType.CHAT
    with pytest.raises(InvalidRequest) as rejected:
        ModelEntry.of(worker(1, model_type="Realtime"))
    assert rejected.value.field == f"meta.{MODEL_TYPE_KEY}"


def test_an_entry_that_is_not_there_is_an_error_that_names_the_key() -> None:
    (note,) = Shell().feed(left(worker(1)))
    assert isinstance(note, LogEvent)
    assert note.fields["error"] == "there is no model entry models/ns.worker.serve-1"


@pytest.mark.row("S0-18")
def test_a_model_is_built_from_the_first_of_several_entries() -> None:
    first, second = worker(2, checksum="first"), worker(1, checksum="second")
    (build, *_) = Shell().feed(joined(first, second))
    assert build == Build(registration_key(first), entry(checksum="first"))


def test_an_invalid_entry_is_an_error_that_names_the_key() -> None:
    (note,) = Shell().feed(joined(worker(1, model_type="Realtime")))
    assert isinstance(note, LogEvent)
    assert "invalid model entry models/ns.worker.serve-1: " in str(note.fields["error"])


@pytest.mark.row("S0-06", "S0-07", "S0-08")
def test_a_missing_card_and_a_failed_store_are_different_errors_that_name_the_key() -> None:
    assert card_key(entry(checksum="c7")) == "cards/c7"
    missing = card_missing(entry(checksum="c7"))
    assert "'m'" in missing.message
    assert "cards/c7" in missing.message
    build_failed = card_unreadable(entry(checksum="c7"), Unavailable("no leader"))
    assert "cards/c7" in build_failed.message
    assert "no leader" in build_failed.message
    assert build_failed.message != missing.message
    assert not isinstance(build_failed, NotFound)
    assert "ValueError: x" in card_unreadable(entry(), ValueError("x")).message


# The served models.


@pytest.mark.row("S0-23")
def test_a_model_is_served_from_its_build_on_and_removing_an_absent_one_is_no_failure() -> None:
    shell = Shell()
    assert shell.names() == ()
    shell.feed(joined(worker(1)))
    shell.tables = ("completions",)
    shell.feed(joined(worker(2, "n")))
    assert shell.engines("m") == {"chat": "m.chat.c1.1", "completions": "m.completions.c1.1"}
    assert tuple(shell.engines("n")) == ("completions",)
    assert shell.names() == ("m", "n")
    shell.feed(left(worker(1)))
    assert notes(shell.feed(left(worker(1)))) == [("error", "model_event_rejected")]
    assert shell.names() == ("n",)


def test_models_are_listed_in_order_of_addition_with_those_with_chat_first() -> None:
    shell = Shell()
    added: tuple[tuple[Table, ...], ...] = (("completions",), ("chat",), BOTH, ("embeddings",))
    for n, tables in enumerate(added, 1):
        shell.tables = tables
        shell.feed(joined(worker(n, f"m{n}")))
    assert shell.names() == ("m2", "m3", "m1", "m4")


# The changes.


@pytest.mark.row("S0-22", "S0-24")
def test_the_actions_end_with_their_change_and_the_state_is_kept() -> None:
    shell = Shell()
    assert list(shell.watch.follow(SnapshotDiff())) == []
    shell.feed(joined(worker(1)))
    assert shell.names() == ("m",)
    shell.feed(left(worker(1)))
    assert shell.names() == ()


@pytest.mark.row("S0-25")
def test_a_worker_that_joins_or_changes_sets_its_entry_and_one_that_leaves_removes_it() -> None:
    shell = Shell()
    shell.feed(joined(worker(1, "old")))
    shell.feed(changed(worker(1, "new")))
    assert shell.names() == ("new",)
    # Only the identity of a worker that leaves is read.
    shell.feed(left(worker(1, "other", "c2")))
    assert shell.names() == ()


@pytest.mark.row("S0-26")
def test_an_invalid_entry_is_logged_once_and_the_next_event_works() -> None:
    shell = Shell()
    bad = worker(1, "bad", model_type="Realtime")
    done = shell.feed(joined(bad, worker(2)))
    (note,) = (a for a in done if isinstance(a, LogEvent))
    assert (note.level, note.event) == ("error", "model_event_rejected")
    assert note.fields["key"] == registration_key(bad)
    assert note.fields["value"] == bad.to_json().decode()
    assert "Realtime" in str(note.fields["error"])
    assert done[-1] == ModelAdded("m", ("chat", "completions"))


@pytest.mark.row("S0-27")
def test_a_second_worker_of_a_model_does_not_rebuild_its_pipelines() -> None:
    shell = Shell()
    shell.feed(joined(worker(1)))
    before = shell.engines("m")
    done = shell.feed(joined(worker(2)))
    assert notes(done) == [("debug", "model_already_known")]
    assert {t: id(e) for t, e in shell.engines("m").items()} == {
        t: id(e) for t, e in before.items()
    }
    assert shell.builds == 1


@pytest.mark.row("S0-28", "S0-46")
def test_a_failed_build_is_logged_once_keeps_its_entry_and_is_retried() -> None:
    shell = Shell()
    shell.faults["m"] = Unavailable("the store is away")
    done = shell.feed(joined(worker(1), worker(2, "n")))
    assert notes(done) == [("error", "model_not_ready")]
    assert shell.names() == ("n",)
    assert shell.watch.not_ready == {"m": "the store is away"}
    # The same reason again: retried, but not logged again.
    assert notes(shell.retry()) == []
    assert shell.builds == 3
    shell.faults["m"] = Unavailable("something else")
    assert notes(shell.retry()) == [("error", "model_not_ready")]
    del shell.faults["m"]
    assert shell.retry()[-1] == ModelAdded("m", ("chat", "completions"))
    assert shell.watch.not_ready == {}
    assert shell.retry() == []


@pytest.mark.row("S0-28")
def test_a_new_name_is_built_and_added() -> None:
    shell = Shell()
    assert shell.feed(joined(worker(1))) == [
        Build(registration_key(worker(1)), entry()),
        ModelAdded("m", ("chat", "completions")),
    ]


@pytest.mark.row("S0-29", "S0-33")
def test_a_departure_returns_the_removed_name_and_that_of_an_unknown_worker_is_an_error() -> None:
    shell = Shell()
    shell.feed(joined(worker(1, "Qwen/A")))
    done = shell.feed(left(worker(9, "unknown"), worker(1, "Qwen/A")))
    assert notes(done) == [("error", "model_event_rejected")]
    assert done[-1] == ModelRemoved("Qwen/A")
    assert shell.feed(joined(worker(2, "B")))[-1] == ModelAdded("B", BOTH)


@pytest.mark.row("S0-30")
def test_a_model_is_removed_with_its_last_instance_only() -> None:
    shell = Shell()
    workers = [worker(n, "Name/That.No-Key:Has") for n in (1, 2, 3)]
    shell.feed(joined(*workers))
    before = shell.engines("Name/That.No-Key:Has")
    assert shell.feed(left(workers[0], workers[2])) == []
    assert shell.engines("Name/That.No-Key:Has") == before != {}
    assert shell.feed(left(workers[1])) == [ModelRemoved("Name/That.No-Key:Has")]
    assert shell.names() == ()


@pytest.mark.row("S0-31")
def test_entries_whose_keys_repeat_the_prefix_are_different() -> None:
    once = replace(worker(1, "m"), namespace="models")
    twice = replace(worker(1, "n"), namespace="models.models")
    assert registration_key(twice) == "models/models.models.worker.serve-1"
    shell = Shell()
    shell.feed(joined(once, twice))
    assert shell.feed(left(twice)) == [ModelRemoved("n")]
    assert shell.names() == ("m",)


@pytest.mark.row("S0-32")
@pytest.mark.parametrize("tables", [("chat",), ("completions",), ("chat", "completions")])
def test_a_departure_removes_the_model_from_every_table(tables: tuple[Table, ...]) -> None:
    shell = Shell(tables)
    shell.feed(joined(worker(1)))
    assert tuple(shell.engines("m")) == tables
    assert shell.feed(left(worker(1))) == [ModelRemoved("m")]
    assert not shell.engines("m")


def test_a_worker_with_another_card_is_logged_and_served_once_it_is_the_only_one() -> None:
    shell = Shell()
    first, other = worker(1, checksum="c1"), worker(2, checksum="c2")
    shell.feed(joined(first))
    assert notes(shell.feed(joined(other))) == [("error", "model_card_rejected")]
    assert shell.feed(left(first)) == [
        ModelRemoved("m"),
        Build(registration_key(other), entry(checksum="c2")),
        ModelAdded("m", ("chat", "completions")),
    ]


def test_a_worker_that_changes_its_model_is_removed_from_the_old_one() -> None:
    shell = Shell()
    shell.feed(joined(worker(1, "old")))
    done = shell.feed(changed(worker(1, "new")))
    assert [a for a in done if not isinstance(a, Build)] == [
        ModelRemoved("old"),
        ModelAdded("new", ("chat", "completions")),
    ]
    assert shell.names() == ("new",)


def test_a_model_whose_workers_left_during_its_build_is_not_added() -> None:
    shell = Shell()
    build = started_build(shell.watch, worker(1))
    assert shell.feed(left(worker(1))) == []
    assert shell.watch.build_succeeded(build, {"chat": "late"}) == []
    assert shell.names() == ()
    assert shell.retry() == []


def test_an_entry_added_during_a_build_is_built_after_that_build_fails() -> None:
    shell = Shell()
    build = started_build(shell.watch, worker(1))
    other = worker(2, checksum="c2")
    shell.feed(joined(other))
    shell.feed(left(worker(1)))
    assert shell.watch.build_failed(build, Unavailable("away")) == [
        Build(registration_key(other), entry(checksum="c2"))
    ]
    # The result of the first build is ignored.
    assert shell.watch.build_failed(build, Unavailable("away")) == []
    assert notes(shell.watch.build_succeeded(build, {"chat": "late"})) == [
        ("info", "model_build_outdated")
    ]
    assert shell.names() == ()


# Tables of an entry.


@pytest.mark.row("S0-37")
def test_a_backend_entry_without_a_card_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="missing model deployment card") as rejected:
        plan_tables(entry(checksum=""), None)
    assert rejected.value.field == "card_checksum"
    with pytest.raises(InvalidRequest, match="the model is removed"):
        plan_tables(entry(), None, "the model is removed")


@pytest.mark.row("S0-39")
def test_a_backend_entry_gets_two_tables_and_is_preprocessed() -> None:
    card = ModelCard(name="m")
    assert plan_tables(entry(), card) == ("chat", "completions")
    assert not is_pass_through(entry(), card)
    assert is_pass_through(entry(), ModelCard(name="m", model_input="text"))


@pytest.mark.row("S0-42", "S0-43", "S0-36")
@pytest.mark.parametrize(
    ("model_type", "table"), [(EntryType.CHAT, "chat"), (EntryType.COMPLETION, "completions")]
)
def test_pass_through_workers_need_no_card_and_serve_one_table(
    model_type: EntryType, table: Table
) -> None:
    for card in (None, ModelCard(name="m")):
        assert plan_tables(entry(model_type), card) == (table,)
        assert is_pass_through(entry(model_type), card)


def test_the_model_type_of_a_card_selects_the_tables() -> None:
    completions = ModelCard(name="m", model_type=ModelType.COMPLETIONS)
    assert plan_tables(entry(), completions) == ("completions",)
    with pytest.raises(InvalidRequest, match="neither") as rejected:
        plan_tables(entry(), ModelCard(name="m", model_type=ModelType.PREFILL))
    assert rejected.value.field == "model_type"


def test_embeddings_and_scores_need_token_ids() -> None:
    every = ModelType.CHAT | ModelType.EMBEDDING | ModelType.SCORE
    card = ModelCard(name="m", model_type=every)
    assert plan_tables(entry(), card) == ("chat", "embeddings", "scores")
    text = ModelCard(name="m", model_type=every, model_input="text")
    assert plan_tables(entry(), text) == ("chat",)


@pytest.mark.row("S0-41")
@pytest.mark.parametrize("name", ["random", "round_robin", "least_loaded"])
def test_the_placement_policy_is_configured(name: str) -> None:
    config, _ = read_config(RouterConfig, "ROUTER", {"KVMESH_ROUTER_SELECTOR": name}, [])
    assert config.selector == name
    with pytest.raises(ConfigError, match="no_such_policy"):
        read_config(RouterConfig, "ROUTER", {}, ["--selector", "no_such_policy"])


@pytest.mark.row("S0-45")
@pytest.mark.parametrize("outcome", ["built", "failed"])
def test_a_model_is_in_all_of_its_tables_or_in_none(outcome: str) -> None:
    shell = Shell()
    build = started_build(shell.watch, worker(1))
    assert shell.engines("m") == {}
    if outcome == "built":
        engines: dict[Table, str] = {"chat": "new", "completions": "new"}
        assert shell.watch.build_succeeded(build, engines) == [ModelAdded("m", BOTH)]
        assert shell.engines("m") == engines
    else:
        done = shell.watch.build_failed(build, Unavailable("no second engine"))
        assert notes(done) == [("error", "model_not_ready")]
        assert shell.engines("m") == {}
        assert shell.watch.not_ready == {"m": "no second engine"}


# From snapshots to actions.


def snapshot(*instances: Instance, revision: int = 1) -> Snapshot:
    return Snapshot(revision, {i.id: i for i in instances})


def test_departures_come_first_and_only_workers_with_a_model_have_actions() -> None:
    router = Instance(9, "ns", "router", "", "127.0.0.1:1")
    gone, kept, idle = worker(1, "a"), worker(2), worker(3, "", "")
    slow = replace(kept, taints=frozenset({"slow"}))
    come = worker(4, "c")
    shell, before = Shell(), snapshot(gone, kept, router)
    shell.feed(diff_snapshots(Snapshot(), before))
    assert shell.feed(diff_snapshots(before, snapshot(slow, come, idle))) == [
        ModelRemoved("a"),
        LogEvent("debug", "model_already_known", {"model": "m", "key": registration_key(kept)}),
        Build(registration_key(come), ModelEntry.of(come)),
        ModelAdded("c", BOTH),
    ]
    stopped = replace(kept, model="", card_checksum="")
    assert shell.feed(changed(stopped)) == [ModelRemoved("m")]


@st.composite
def histories(draw: st.DrawFn) -> list[dict[int, tuple[str, str]]]:
    step = st.dictionaries(
        st.integers(1, 4),
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["c1", "c2"])),
        max_size=4,
    )
    return draw(st.lists(step, max_size=6))


@given(histories(), st.sets(st.integers(0, 5)))
@settings(max_examples=60, deadline=None)
def test_after_any_history_the_table_matches_the_last_snapshot(
    history: list[dict[int, tuple[str, str]]], faulty_steps: set[int]
) -> None:
    shell, seen = Shell(), Snapshot()
    for n, step in enumerate(history):
        following = snapshot(*(worker(i, m, c) for i, (m, c) in sorted(step.items())))
        shell.faults = {"a": Unavailable("away")} if n in faulty_steps else {}
        shell.feed(diff_snapshots(seen, following))
        shell.retry()
        seen = following
        offered = {w.model for w in following.of("worker")}
        assert offered - {*shell.faults} <= set(shell.names()) <= offered
        assert set(shell.watch.not_ready) == offered - set(shell.names())
        for name in shell.names():
            cards = {engine.split(".")[2] for engine in shell.engines(name).values()}
            assert len(cards) == 1
            assert cards <= {w.card_checksum for w in following.serving(name)}
            assert len(shell.engines(name)) == 2


# The serving table of a frontend.


def sim_card(**facts: object) -> ModelCard:
    artifacts = {
        name: Artifact.of((SIM_MODEL_DIR / name).read_bytes())
        for name in ("tokenizer.json", "tokenizer_config.json")
    }
    return ModelCard(name="m", artifacts=artifacts, **facts)  # type: ignore[arg-type]


@dataclass
class Cards:
    """A card store that counts reads and raises `error` if set."""

    cards: dict[str, ModelCard]
    error: MeshError | None = None
    reads: int = 0

    async def get(self, checksum: str) -> ModelCard:
        self.reads += 1
        if self.error is not None:
            raise self.error
        if checksum not in self.cards:
            raise NotFound(f"there is no model card cards/{checksum}")
        return self.cards[checksum]


@dataclass
class Clock:
    now: float = 1_000.0

    def __call__(self) -> float:
        return self.now


def models(*cards: ModelCard) -> tuple[ModelCatalog, Cards, Clock]:
    store, clock = Cards({card.checksum: card for card in cards}), Clock()
    return ModelCatalog(store.get, now_s=clock, mesh_key=b""), store, clock


@pytest.mark.row("S0-38", "S0-39", "S0-40")
async def test_the_tokenizer_works_after_the_card_is_deleted_and_responses_share_no_state() -> None:
    card = sim_card()
    table, store, _ = models(card)
    assert await follow_and_load(table, snapshot(worker(1, "m", card.checksum)))
    store.cards.clear()
    del card
    gc.collect()
    chat, completions = table.engine("m", "chat"), table.engine("m", "completions")
    assert chat is not completions
    for engine in (chat, completions):
        model = engine.model
        assert model is not None
        # Forward: text to ids. Backward: ids to text, by a detokeniser of its own.
        ids = await model.encode("hello world", special_tokens=False)
        one, other = model.detokenizer(), model.detokenizer()
        assert one is not other
        assert "".join([*one.feed(ids), one.finish() or ""]).strip() == "hello world"


@pytest.mark.row("S0-06", "S0-09", "S0-20", "S0-36")
async def test_a_card_is_read_once_by_its_checksum_and_not_modified() -> None:
    card = sim_card()
    table, store, _ = models(card)
    before = card.canonical_json()
    one, two = (worker(n, "m", card.checksum) for n in (1, 2))
    with capture_logs() as logs:
        await follow_and_load(table, snapshot(one))
    assert {"event": "card_loaded", "log_level": "debug", "model": "m", "card": "m"} in logs
    await follow_and_load(table, snapshot(one, two))
    assert store.reads == 1
    assert card.canonical_json() == before
    assert table.get("m").card is card


@pytest.mark.row("S0-07", "S0-08", "S0-37", "S0-46")
async def test_a_model_is_not_ready_with_a_reason_until_its_card_is_stored() -> None:
    card = sim_card()
    table, store, _ = models()
    here = snapshot(worker(1, "m", card.checksum))
    assert not await follow_and_load(table, here)
    assert store.reads == 1
    assert f"there is no cards/{card.checksum}" in table.not_ready["m"]
    assert "missing model deployment card" in table.not_ready["m"]
    assert table.names() == frozenset()
    store.error = Unavailable("no leader")
    assert not await follow_and_load(table, here)
    assert "no leader" in table.not_ready["m"]
    assert f"cards/{card.checksum}" in table.not_ready["m"]
    store.error = None
    store.cards[card.checksum] = card
    assert await follow_and_load(table, here)
    assert table.names() == {"m"}
    assert not table.not_ready


async def test_an_unusable_card_is_reported_and_other_models_are_served() -> None:
    good, bad = sim_card(), ModelCard(name="bad")
    table, _, _ = models(good, bad)
    here = snapshot(worker(1, "bad", bad.checksum), worker(2, "m", good.checksum))
    assert not await follow_and_load(table, here)
    assert table.names() == {"m"}
    assert "tokenizer_config.json" in table.not_ready["bad"]


@pytest.mark.row("S0-36", "S0-42", "S0-43")
async def test_pass_through_workers_are_served_with_or_without_a_card() -> None:
    table, _, _ = models()
    here = snapshot(
        worker(1, "talk", "", model_type="Chat"),
        worker(2, "text", "lost", model_type="Completion"),
    )
    with capture_logs() as logs:
        assert await follow_and_load(table, here)
    level_by_event = {line["event"]: line["log_level"] for line in logs}
    assert level_by_event["model_without_card"] == "info"
    assert level_by_event["model_added"] == "info"
    assert [e.name for e in table.pass_through] == ["talk", "text"]
    assert table.engine("talk", "chat").model is None
    assert table.engine("text", "completions").model is None
    for name, other in (("talk", "completions"), ("text", "chat")):
        with pytest.raises(Unsupported, match=other):
            table.engine(name, other)  # type: ignore[arg-type]
        with pytest.raises(Unsupported, match="pass-through"):
            table.get(name)
    assert table.all() == []


async def test_a_text_card_passes_both_kinds_through() -> None:
    card = ModelCard(name="m", model_input="text")
    table, _, _ = models(card)
    assert await follow_and_load(table, snapshot(worker(1, "m", card.checksum)))
    assert table.engine("m", "chat").model is None
    assert table.engine("m", "completions").model is None
    assert [e.card for e in table.pass_through] == [card]


async def test_a_model_without_workers_is_unavailable_at_first_and_later_unknown() -> None:
    card = sim_card()
    table, _, clock = models(card)
    with pytest.raises(UnknownModel):
        table.get("m")
    await follow_and_load(table, snapshot(worker(1, "m", card.checksum)))
    await follow_and_load(table, snapshot())
    for get in (table.get, lambda name: table.engine(name, "chat")):
        with pytest.raises(Unavailable):
            get("m")
    clock.now += RECENTLY_SERVED_S
    with pytest.raises(UnknownModel):
        table.get("m")


@pytest.mark.row("S0-35")
async def test_without_a_registry_nothing_is_built_and_the_reason_is_recorded() -> None:
    registry = MemoryRegistry()
    await registry.close()
    table = ModelCatalog(registry.get_card, now_s=Clock(), mesh_key=b"")
    assert not await follow_and_load(table, snapshot(worker(1)))
    assert "the registry is closed" in table.not_ready["m"]
    assert table.names() == frozenset()


async def test_a_cancelled_build_can_be_retried() -> None:
    card = sim_card()
    reading = asyncio.Event()

    class Slow(Cards):
        async def get(self, checksum: str) -> ModelCard:
            self.reads += 1
            if self.reads == 1:
                reading.set()
                await asyncio.Event().wait()
            return card

    table = ModelCatalog(Slow({}).get, now_s=Clock(), mesh_key=b"")
    here = snapshot(worker(1, "m", card.checksum))
    task = asyncio.create_task(follow_and_load(table, here))
    await reading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "interrupted" in table.not_ready["m"]
    assert await follow_and_load(table, here)
    assert table.names() == {"m"}

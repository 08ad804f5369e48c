"""The model catalog: adapters, slow cards, unusable cards, and cached builds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pytest
from structlog.testing import capture_logs

from common.errors import (
    InvalidRequest,
    MeshError,
    NotFound,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from common.kv.hashing import PrefixHasher
from common.registry.card import Artifact, ModelCard, ModelType
from common.registry.instances import (
    CONTINUES_PENALTIES_META_KEY,
    ENGINE_META_KEY,
    Instance,
    Snapshot,
    diff_snapshots,
)
from frontend_svc.models import catalog
from frontend_svc.models.catalog import (
    CACHED_BUILDS_MAX,
    RECENTLY_SERVED_S,
    REFUSED_S,
    ModelCatalog,
)
from frontend_svc.models.engine_options import EngineTraits
from frontend_svc.models.model_watch import Table as Kind
from kvmesh.engine.v1 import engine_pb2
from tests.kit.catalogs import follow_and_load
from tests.kit.inline_trials import InlineTrials
from tests.sim.loop import run_virtually
from worker_svc.engines.sim.config import SIM_MODEL_DIR

FILES = ("tokenizer.json", "tokenizer_config.json")
KEY = b"secret"
PROMPT = np.arange(1, 200, dtype=np.uint32)
Chunks: TypeAlias = AsyncIterator[engine_pb2.GetArtifactResponse]


def card(name: str, *, inline: bool = True) -> ModelCard:
    artifacts = {
        one: Artifact.of((SIM_MODEL_DIR / one).read_bytes(), inline=inline) for one in FILES
    }
    return ModelCard(name=name, artifacts=artifacts, kv_block_size=16)


def worker(number: int, of: ModelCard, *loras: str, **meta: str) -> Instance:
    return Instance(
        number,
        "ns",
        "worker",
        "",
        f"127.0.0.1:{number}",
        model=of.name,
        card_checksum=of.checksum,
        loras=frozenset(loras),
        meta=meta,
    )


def snapshot(*instances: Instance) -> Snapshot:
    return Snapshot(1, {one.id: one for one in instances})


class Table:
    """A catalog with cards, a clock, and workers that send artifacts.

    holding: workers (by id) that do not send anything yet.
    """

    def __init__(self, *cards: ModelCard) -> None:
        self.now = 1_000.0
        self.cards = {one.checksum: one for one in cards}
        self.fetched: list[str] = []
        self.holding: dict[int, asyncio.Event] = {}
        self.models = ModelCatalog(
            self.get,
            now_s=lambda: self.now,
            mesh_key=KEY,
            open_artifact=self.opened,
            trials=InlineTrials(),
        )

    async def get(self, checksum: str) -> ModelCard:
        if checksum not in self.cards:
            raise NotFound(f"no card {checksum}")
        self.fetched.append(self.cards[checksum].name)
        return self.cards[checksum]

    @asynccontextmanager
    async def opened(self, worker: Instance, name: str, offset: int) -> AsyncIterator[Chunks]:
        async def chunks() -> Chunks:
            if worker.id in self.holding:
                await self.holding[worker.id].wait()
            data = (SIM_MODEL_DIR / name).read_bytes()
            one = Artifact.of(data)
            yield engine_pb2.GetArtifactResponse(
                data=data[offset:], sha256=one.sha256, size=one.size
            )

        yield chunks()


A, B = card("a"), card("b")


async def test_an_adapter_is_a_model_that_differs_from_its_base_only_in_name_and_hashes() -> None:
    table = Table(A)
    await follow_and_load(table.models, snapshot(worker(1, A), worker(2, A, "french", "german")))
    models = table.models
    assert models.names() == {"a", "french", "german"}
    assert [one.name for one in models.all()] == ["a", "french", "german"]
    base, french, german = models.all()
    assert models.get("french") is french
    assert (base.base, french.base) == ("a", "a")
    assert (base.adapter, french.adapter) == ("", "french")
    assert (french.tokenizer, french.template, french.card, french.checksum) == (
        *(base.tokenizer, base.template, base.card, base.checksum),
    )
    hashes = [set(one.hasher.prefix_hashes(PROMPT).tolist()) for one in (base, french, german)]
    assert len(set.union(*hashes)) == 3 * (len(PROMPT) // 16), "no block has two names in common"
    expected = PrefixHasher(mesh_key=KEY, model="a", block_size=16, lora_name="french")
    assert hashes[1] == set(expected.prefix_hashes(PROMPT).tolist()), "as workers publish them"
    assert [w.id for w in models.workers("a")] == [1, 2]
    assert [w.id for w in models.workers("french")] == [2]
    assert [models.served_as(name) for name in ("a", "french", "x")] == ["a", "a", "x"]


async def test_the_traits_of_a_worker_are_those_of_the_latest_snapshot() -> None:
    models = Table(A).models
    stated = {ENGINE_META_KEY: "vllm", CONTINUES_PENALTIES_META_KEY: "1"}
    first = replace(worker(1, A, "french"), meta=stated)
    own, peer = EngineTraits("vllm", counts_output=True), EngineTraits("vllm")
    assert models.engine_traits("a", 1) == EngineTraits(), "no worker states any"
    await follow_and_load(models, snapshot(first))
    assert [models.engine_traits("a", one) for one in (1, 2)] == [own, peer], "the only one"
    other = replace(worker(2, A), meta={ENGINE_META_KEY: "sglang"})
    await follow_and_load(models, snapshot(first, other, worker(3, A)))
    found = [models.engine_traits("a", one) for one in (1, 2, 3, 4)]
    assert found == [own, EngineTraits("sglang"), EngineTraits(), EngineTraits(None)]
    assert models.engine_traits("french", 4) == peer, "only the first worker has it"


async def test_a_removed_adapter_is_unavailable_at_first_and_later_unknown() -> None:
    table = Table(A)
    models = table.models
    with pytest.raises(UnknownModel):
        models.get("french")
    await follow_and_load(models, snapshot(worker(1, A), worker(2, A, "french")))
    first = models.get("french")
    await follow_and_load(models, snapshot(worker(1, A), worker(3, A, "french")))
    assert models.get("french") is first, "another worker's is the same"
    await follow_and_load(models, snapshot(worker(1, A)))
    assert models.names() == {"a"}
    with pytest.raises(Unavailable) as gone:
        models.get("french")
    assert gone.value.retry_after_s is not None
    assert "french" in gone.value.message
    table.now += RECENTLY_SERVED_S
    with pytest.raises(UnknownModel) as unknown:
        models.get("french")
    assert "french" in unknown.value.message


async def test_an_adapter_is_added_and_removed_while_its_workers_stay() -> None:
    table = Table(A)
    models = table.models
    await follow_and_load(models, snapshot(worker(1, A)))
    with capture_logs() as logs:
        await follow_and_load(models, snapshot(worker(1, A, "french")))
        assert models.get("french").base == "a"
        await follow_and_load(models, snapshot(worker(1, A)))
    events = [(line["event"], line["model"]) for line in logs]
    assert ("adapter_added", "french") in events
    assert ("adapter_removed", "french") in events


async def test_an_adapter_leaves_with_its_base_model() -> None:
    table = Table(A)
    await follow_and_load(table.models, snapshot(worker(1, A, "french")))
    await follow_and_load(table.models, snapshot())
    for name in ("a", "french"):
        with pytest.raises(Unavailable):
            table.models.get(name)
    assert table.models.names() == frozenset()


async def test_an_adapter_with_the_name_of_a_model_is_hidden_and_logged_once() -> None:
    table = Table(A, B)
    here = snapshot(worker(1, A, "b", "french"), worker(2, B))
    with capture_logs() as logs:
        await follow_and_load(table.models, here)
        await follow_and_load(table.models, here)
    assert table.models.get("b").adapter == ""
    assert table.models.get("french").base == "a"
    assert table.models.hidden == {("b", "a"): "a model has the same name"}
    assert [line["adapter"] for line in logs if line["event"] == "adapter_hidden"] == ["b"]
    await follow_and_load(table.models, snapshot(worker(1, A, "b", "french")))
    assert table.models.hidden == {}
    assert table.models.get("b").base == "a", "no model has the name any more"


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
async def test_of_two_models_with_one_adapter_name_the_first_by_name_has_it(
    order: tuple[int, int],
) -> None:
    table = Table(A, B)
    both = {1: worker(1, A, "french"), 2: worker(2, B, "french")}
    models = table.models
    await follow_and_load(models, snapshot(both[order[0]]))
    await follow_and_load(models, snapshot(*(both[n] for n in order)))
    assert models.get("french").base == "a"
    assert models.hidden == {("french", "b"): "model 'a' has an adapter of the same name"}
    with capture_logs() as logs:
        await follow_and_load(models, snapshot(both[2]))
    assert models.get("french").base == "b"
    assert models.hidden == {}
    added = {"event": "adapter_added", "model": "french", "base": "b", "log_level": "info"}
    assert added in logs


async def test_a_pass_through_model_has_no_adapters() -> None:
    table = Table()
    chatty = ModelCard(name="chatty")
    await follow_and_load(
        table.models,
        snapshot(replace(worker(1, chatty, "french", model_type="Chat"), card_checksum="")),
    )
    assert table.models.names() == {"chatty"}
    assert ("french", "chatty") in table.models.hidden
    with pytest.raises(MeshError):
        table.models.get("french")


def test_a_slow_card_delays_only_its_own_model() -> None:
    async def main() -> None:
        slow = card("slow", inline=False)
        table = Table(slow, A, B)
        models = table.models
        table.holding[1] = asyncio.Event()
        lingering = worker(1, slow, "french")
        first = asyncio.create_task(follow_and_load(models, snapshot(lingering, worker(2, A))))
        await asyncio.sleep(1.0)
        assert models.names() == {"a"}
        assert await follow_and_load(
            models, snapshot(lingering, worker(2, A), worker(3, B, "german"))
        )
        assert models.names() == {"a", "b", "german"}
        await follow_and_load(models, snapshot(lingering, worker(3, B)))
        assert models.names() == {"b"}
        assert not first.done()
        table.holding.pop(1).set()
        assert await first
        assert models.names() == {"slow", "french", "b"}

    run_virtually(main())


def test_a_card_from_a_silent_worker_is_reported_and_retried() -> None:
    async def main() -> None:
        slow = card("slow", inline=False)
        table = Table(slow)
        models = table.models
        table.holding[1] = asyncio.Event()
        here = snapshot(worker(1, slow))
        assert not await follow_and_load(models, here)
        assert "tokenizer.json stalled" in models.not_ready["slow"]
        del table.holding[1]
        assert await follow_and_load(models, here)
        assert models.names() == {"slow"}

    run_virtually(main())


def test_a_model_is_not_served_if_its_workers_left_before_its_card_arrived() -> None:
    async def main() -> None:
        slow = card("slow", inline=False)
        table = Table(slow)
        models = table.models
        table.holding[1] = asyncio.Event()
        first = asyncio.create_task(follow_and_load(models, snapshot(worker(1, slow, "french"))))
        await asyncio.sleep(1.0)
        assert await follow_and_load(models, snapshot())
        table.holding.pop(1).set()
        await first
        assert models.names() == frozenset()
        assert models.not_ready == {}

    run_virtually(main())


def damaged(name: str, **files: bytes) -> ModelCard:
    """A card with replaced files; `__` in a file name stands for a dot."""
    bad = {one.replace("__", "."): Artifact.of(data) for one, data in files.items()}
    good = card(name)
    return replace(good, artifacts={**good.artifacts, **bad})


def tokenizer_that_panics() -> bytes:
    """A card that makes the library panic, which is not an Exception."""
    raw = json.loads((SIM_MODEL_DIR / "tokenizer.json").read_bytes())
    raw["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    return json.dumps(raw).encode()


def tokens_config(**fields: object) -> bytes:
    return json.dumps({"chat_template": "{{ bos_token }}", **fields}).encode()


SEVERAL_TEMPLATES = json.dumps({"chat_template": [{"name": "default", "template": "x"}]}).encode()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer_config__json": SEVERAL_TEMPLATES}, "chat_template must be one template"),
        ({"chat_template__jinja": b"\xff\xfe"}, "chat_template.jinja is not UTF-8"),
        ({"tokenizer_config__json": b"[" * 200_000}, "tokenizer_config.json is not JSON"),
        ({"tokenizer_config__json": tokens_config(bos_token=["<s>"])}, "json: bos_token must be"),
        ({"tokenizer_config__json": tokens_config(eos_token={"id": 2})}, "json: eos_token must be"),
        pytest.param(  # slow: the library prints where it panicked
            {"tokenizer__json": tokenizer_that_panics()}, "PanicException", marks=pytest.mark.slow
        ),
    ],
    ids=["several templates", "not UTF-8", "too deep", "bos no text", "eos no text", "panic"],
)
async def test_an_unreadable_card_affects_only_its_own_model(
    files: dict[str, bytes], reason: str
) -> None:
    bad = damaged("bad", **files)
    table = Table(bad, A)
    assert not await follow_and_load(table.models, snapshot(worker(1, bad), worker(2, A)))
    assert table.models.names() == {"a"}
    assert reason in table.models.not_ready["bad"]
    assert table.models.loading == frozenset()


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "lstrip": False}, None])
async def test_a_bos_token_is_text_an_object_with_text_or_absent(bos: object) -> None:
    config = tokens_config(bos_token=bos, eos_token=None)
    good = damaged("good", tokenizer_config__json=config)
    table = Table(good)
    assert await follow_and_load(table.models, snapshot(worker(1, good)))
    template = table.models.get("good").template
    assert template is not None
    now = datetime(2026, 1, 1, tzinfo=UTC)
    prompt = await template.prompt(
        [], tools=None, template_kwargs={}, add_generation_prompt=False, now=now
    )
    assert prompt.text == ("" if bos is None else "<s>")


async def test_truncation_and_padding_settings_of_the_tokenizer_file_are_ignored() -> None:
    raw = json.loads((SIM_MODEL_DIR / "tokenizer.json").read_bytes())
    cut = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    pad = {"pad_id": 0, "pad_type_id": 0, "pad_token": "x", "pad_to_multiple_of": None}
    raw |= {"truncation": cut, "padding": {**pad, "strategy": {"Fixed": 64}, "direction": "Left"}}
    odd = damaged("odd", tokenizer__json=json.dumps(raw).encode())
    table = Table(odd, A)
    assert await follow_and_load(table.models, snapshot(worker(1, odd), worker(2, A)))
    for text in ("a", "one two three four five six seven"):
        expected = await table.models.get("a").encode(text, special_tokens=True)
        assert await table.models.get("odd").encode(text, special_tokens=True) == expected


@pytest.mark.parametrize("decoder", ["ByteLevel", "WordPiece"], ids=["by table", "by library"])
async def test_ids_above_a_gap_in_the_vocabulary_are_valid(decoder: str) -> None:
    raw = json.loads((SIM_MODEL_DIR / "tokenizer.json").read_bytes())
    last = max(raw["model"]["vocab"].values())
    raw["model"]["vocab"] |= {"beyond": last + 100}
    raw["decoder"] |= {"type": decoder, "prefix": "##", "cleanup": False}
    gapped = damaged("gapped", tokenizer__json=json.dumps(raw).encode())
    table = Table(gapped)
    assert await follow_and_load(table.models, snapshot(worker(1, gapped)))
    model = table.models.get("gapped")
    assert (model.vocabulary is None) == (decoder == "WordPiece")
    assert model.tokenizer.token_to_id("beyond") == last + 100
    assert model.vocab_size == last + 101


async def test_any_error_of_a_build_is_logged_once_and_the_build_is_retried() -> None:
    table = Table(A, B)
    read, faults = table.get, [ZeroDivisionError("oh")] * 2

    async def get(checksum: str) -> ModelCard:
        if checksum == A.checksum and faults:
            raise faults.pop()
        return await read(checksum)

    models = ModelCatalog(get, now_s=lambda: 0.0, mesh_key=KEY)
    here = snapshot(worker(1, A), worker(2, B))
    with capture_logs() as logs:
        for _ in range(2):
            assert not await follow_and_load(models, here)
            assert models.names() == {"b"}
            assert "ZeroDivisionError" in models.not_ready["a"]
        assert await follow_and_load(models, here)
    assert models.names() == {"a", "b"}
    assert [line["model"] for line in logs if line["event"] == "model_build_failed"] == ["a"]


@pytest.mark.parametrize(
    ("offered", "open_for", "closed_for"),
    [
        (ModelType.COMPLETIONS, "completions", "chat"),
        (ModelType.CHAT, "chat", "completions"),
    ],
)
async def test_a_kind_that_the_card_does_not_offer_is_unsupported_for_model_and_adapters(
    offered: ModelType, open_for: Kind, closed_for: Kind
) -> None:
    one = replace(A, model_type=offered)
    table = Table(one)
    await follow_and_load(table.models, snapshot(worker(1, one, "french")))
    for name in ("a", "french"):
        assert table.models.get_for(name, open_for).name == name
        with pytest.raises(Unsupported, match=f"'{name}' is not served for {closed_for}"):
            table.models.get_for(name, closed_for)
    with pytest.raises(UnknownModel):
        table.models.get_for("b", open_for)


def test_a_model_being_loaded_and_its_adapters_are_unavailable_with_retry() -> None:
    async def main() -> None:
        slow = card("slow", inline=False)
        table = Table(slow)
        models = table.models
        table.holding[1] = asyncio.Event()
        here = snapshot(worker(1, slow, "french"))
        first = asyncio.create_task(follow_and_load(models, here))

        def assert_loading() -> None:
            for name in ("slow", "french"):
                for get in (models.get, lambda one: models.engine(one, "chat")):
                    with pytest.raises(Unavailable, match=name) as raised:
                        get(name)
                    assert raised.value.reason == "MODEL_LOADING"
                    assert raised.value.retry_after_s == 1.0
            with pytest.raises(UnknownModel):
                models.get("german")

        await asyncio.sleep(1.0)
        assert models.loading == {"slow"}
        assert_loading()
        assert not await first, "its worker is silent"
        assert models.loading == frozenset()
        assert_loading()
        del table.holding[1]
        assert await follow_and_load(models, here)
        assert models.get("french").base == "slow"

    run_virtually(main())


def test_a_model_whose_workers_left_during_loading_is_unknown() -> None:
    async def main() -> None:
        slow = card("slow", inline=False)
        table = Table(slow)
        models = table.models
        table.holding[1] = asyncio.Event()
        first = asyncio.create_task(follow_and_load(models, snapshot(worker(1, slow, "french"))))
        await asyncio.sleep(1.0)
        await follow_and_load(models, snapshot())
        assert models.loading == {"slow"}
        for name in ("slow", "french"):
            with pytest.raises(UnknownModel):
                models.get(name)
        table.holding.pop(1).set()
        await first

    run_virtually(main())


async def at_once(models: ModelCatalog, to: Snapshot) -> None:
    """Follow a snapshot that needs no card: the call never suspends."""
    following = follow_and_load(models, to)
    with pytest.raises(StopIteration) as done:
        following.send(None)
    assert done.value.value is True


async def test_a_model_whose_worker_returns_is_served_at_once_without_a_build() -> None:
    table = Table(A)
    models = table.models
    await follow_and_load(models, snapshot(worker(1, A, "french")))
    before = models.get("a")
    await at_once(models, snapshot())
    with pytest.raises(Unavailable, match="no worker serves 'a'"):
        models.get("a")
    table.now += RECENTLY_SERVED_S - 1.0
    await at_once(models, snapshot(worker(2, A, "french")))
    assert models.get("a") is before
    assert models.engine("a", "chat").model is before
    assert models.get("french").tokenizer is before.tokenizer
    assert (models.loading, table.fetched) == (frozenset(), ["a"])
    await at_once(models, snapshot(worker(3, A)))
    assert models.get("a") is before, "also when a worker joins as the last one leaves"


async def test_one_load_builds_the_models_of_all_changes_before_it() -> None:
    table = Table(A, B)
    models = table.models
    steps = [snapshot(), snapshot(worker(1, A)), snapshot(worker(1, A), worker(2, B))]
    for before, after in pairwise(steps):
        models.on_snapshot(after, diff_snapshots(before, after))
    assert models.loading == {"a", "b"}
    assert await models.load()
    assert models.names() == {"a", "b"}
    assert await models.load()
    assert sorted(table.fetched) == ["a", "b"]


async def test_a_model_that_returns_with_another_card_is_built_from_it() -> None:
    other = replace(A, context_length=77)
    table = Table(A, other)
    models = table.models
    for card_, length in ((A, A.context_length), (other, 77), (A, A.context_length)):
        await follow_and_load(models, snapshot(worker(1, card_)))
        assert models.get("a").card.context_length == length
        await follow_and_load(models, snapshot())
    assert table.fetched == ["a"] * 3, "only the last build of each model is kept"


@pytest.mark.slow
async def test_builds_of_recently_removed_models_are_kept_for_a_limited_time() -> None:
    cards = [card(f"m{n}") for n in range(CACHED_BUILDS_MAX + 1)]
    table = Table(*cards, B)
    models, workers = table.models, [worker(n, one) for n, one in enumerate(cards, 1)]
    lasting = worker(50, B)
    await follow_and_load(models, snapshot(lasting, *workers))
    for n in range(len(workers)):  # m0 is removed first
        table.now += 1.0
        await follow_and_load(models, snapshot(lasting, *workers[n + 1 :]))
    table.fetched.clear()
    await follow_and_load(models, snapshot(lasting, *workers))
    assert table.fetched == ["m0"]
    await follow_and_load(models, snapshot(lasting))
    table.now += RECENTLY_SERVED_S
    await follow_and_load(models, snapshot(lasting, worker(51, B)))
    table.fetched.clear()
    await follow_and_load(models, snapshot(*workers))
    assert sorted(table.fetched) == sorted(one.name for one in cards)


async def test_a_model_without_a_card_reads_the_store_each_time_it_joins() -> None:
    chatty = ModelCard(name="chatty")
    table = Table()
    models = table.models
    joined = snapshot(worker(1, chatty, model_type="Chat"))
    for found in (None, chatty):
        await follow_and_load(models, joined)
        assert models.engine("chatty", "chat").card is found
        await follow_and_load(models, snapshot())
        table.cards[chatty.checksum] = chatty


def test_an_unusable_card_is_built_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        builds: list[float] = []
        table = Table(A)

        def refuse(*_: object, **__: object) -> None:
            builds.append(table.now)
            raise InvalidRequest("its template has no end", "artifacts")

        with monkeypatch.context() as patch:
            patch.setattr(catalog, "build_model", refuse)
            for _ in range(3):
                assert not await follow_and_load(table.models, snapshot(worker(1, A)))
            assert table.models.not_ready["a"] == "its template has no end"
            assert len(builds) == 1
        table.now += REFUSED_S
        assert await follow_and_load(table.models, snapshot(worker(1, A)))
        assert table.models.names() == {"a"}

    run_virtually(body())


async def test_a_wait_ends_only_if_the_served_models_change() -> None:
    table = Table(A, B)
    models = table.models
    await follow_and_load(models, snapshot(worker(1, A)))
    until_s = asyncio.get_running_loop().time() + 60
    wait = asyncio.create_task(models.waits.next_change("b", until_s, lambda _: nullcontext()))
    await asyncio.sleep(0)
    for here in (snapshot(worker(1, A), worker(2, A)), snapshot(worker(2, A))):
        await follow_and_load(models, here)
        await asyncio.sleep(0)
        assert not wait.done()
    await follow_and_load(models, snapshot(worker(2, A), worker(3, B)))
    await wait

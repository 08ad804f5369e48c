"""A running frontend follows the registry: models appear, fail to load, return and leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.registry.file import FileRegistry
from common.registry.instances import Instance
from common.registry.registry import MemoryRegistry, MemoryStore
from common.runtime.build import build_name
from tests.kit.apps import living
from tests.kit.engines import RecordingEngine
from tests.kit.local_mesh import NS, local_mesh, pass_through, registration
from tests.kit.waiting import until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig

INSTANCE_ID = 0x694D967CA5EFD804
UNKNOWN_TYPE = {"model_type": "Realtime"}
NOT_STORED = "c" * 64
# Any: fields of log events.
Logs = list[Any]


@pytest.fixture
def logs() -> Iterator[Logs]:
    """The log events of all services."""
    with capture_logs() as captured:
        yield captured


def of(logs: Logs, event: str) -> Logs:
    return [line for line in logs if line["event"] == event]


async def logged(logs: Logs, event: str, count: int = 1) -> Logs:
    """Waits for `count` log lines of an event and returns them."""

    async def is_logged() -> bool:
        return len(of(logs, event)) >= count

    await until(is_logged, f"{count} lines {event}")
    return of(logs, event)


# The entry and its key.


@pytest.mark.row("S0-01", "S0-02")
async def test_the_entry_of_a_worker_is_json_and_names_the_model_that_clients_request(
    tmp_path: Path,
) -> None:
    def connect() -> FileRegistry:
        return FileRegistry(tmp_path / "registry")

    async with (
        local_mesh(connect) as bed,
        bed.router(),
        bed.worker(RecordingEngine(), model_name="Qwen/A") as app,
    ):
        registry = connect()
        (entry,) = (await registry.snapshot(NS)).of("worker")
        (file,) = (tmp_path / "registry" / NS / "instances").glob(f"*{app.instance_id:016x}*")
        written = json.loads(file.read_text())["instance"]
        await registry.close()
        assert Instance.from_json(json.dumps(written)) == Instance.from_json(entry.to_json())
        assert entry == Instance.from_json(entry.to_json())
        assert entry != replace(entry, model="B")
        assert (written["model"], written["namespace"], written["service"]) == (
            *("Qwen/A", NS),
            "worker",
        )
        assert (await bed.models()) == ["Qwen/A"]
        assert (await bed.complete(model="Qwen/A")).status_code == 200


async def test_health_states_whether_compiled_modules_run() -> None:
    async with local_mesh() as bed:
        assert (await bed.health())["build"] == build_name()


async def check_key(logs: Logs, namespace: str, number: int, key: str) -> None:
    entry = replace(registration(number, meta=UNKNOWN_TYPE), namespace=namespace)
    async with local_mesh(namespace=namespace) as bed, bed.joined(entry):
        (line,) = await logged(logs, "model_event_rejected")
        assert line["key"] == key
        assert await bed.models() == []


async def test_a_rejected_entry_is_named_by_namespace_service_endpoint_and_id(logs: Logs) -> None:
    await check_key(logs, "ns", INSTANCE_ID, "models/ns.worker.serve-694d967ca5efd804")


@pytest.mark.parametrize(
    ("namespace", "number", "key"),
    [
        ("My.Ns-1_a", 1, "models/my.ns-1_a.worker.serve-1"),
        ("a-b.c_d.0", 2**63 - 1, "models/a-b.c_d.0.worker.serve-7fffffffffffffff"),
    ],
)
async def test_the_key_is_in_lower_case_with_the_id_in_hex(
    logs: Logs, namespace: str, number: int, key: str
) -> None:
    await check_key(logs, namespace, number, key)


async def test_keys_differ_between_instances_but_not_between_registrations(logs: Logs) -> None:
    async with local_mesh() as bed:
        numbers = (1, 2, 1)
        for number in numbers:
            before = len(of(logs, "model_event_rejected"))
            async with bed.joined(registration(number, meta=UNKNOWN_TYPE)):
                await logged(logs, "model_event_rejected", before + 1)
            # The departure of an entry that was rejected is rejected too.
            await logged(logs, "model_event_rejected", before + 2)
        assert await bed.models() == []
        keys = [line["key"] for line in of(logs, "model_event_rejected")]
        expected = [f"models/{NS}.worker.serve-{number}" for number in numbers]
        assert keys == [key for key in expected for _ in ("joins", "leaves")]


@pytest.mark.row("S0-04", "S0-26", "S0-28")
async def test_an_unknown_model_type_is_an_error_of_that_entry_only(logs: Logs) -> None:
    entry = registration(9, "bad", meta=UNKNOWN_TYPE)
    async with local_mesh() as bed, bed.joined(entry):
        (line,) = await logged(logs, "model_event_rejected")
        assert (line["log_level"], line["value"]) == ("error", entry.to_json().decode())
        assert "Realtime" in line["error"]
        async with bed.worker(RecordingEngine()):
            assert await bed.models() == ["m"]
            assert [line["model"] for line in of(logs, "model_added")] == ["m"]


@pytest.mark.row("S0-19", "S0-26")
@pytest.mark.parametrize(
    ("raw", "shown"), [(b"{not json", "{not json"), (b"\xff\xfe", "<not UTF-8>")]
)
async def test_an_unreadable_entry_is_logged_with_its_text_and_the_next_is_served(
    logs: Logs, tmp_path: Path, raw: bytes, shown: str
) -> None:
    def connect() -> FileRegistry:
        return FileRegistry(tmp_path / "registry", poll_interval_s=0.01)

    # It never checks its entry.
    owner = FileRegistry(tmp_path / "registry", poll_interval_s=1000.0)
    await owner.register(registration(9))
    (file,) = (tmp_path / "registry" / NS / "instances").glob(f"*{9:016x}*")
    file.write_bytes(raw)  # In place, so that the lock stays on the file.
    async with local_mesh(connect) as bed:
        lines = await logged(logs, "registry_entry_unreadable")
        assert (lines[0]["path"], lines[0]["value"]) == (file.name, shown)
        async with bed.worker(RecordingEngine()):
            assert await bed.models() == ["m"]
    await owner.close()


# Cards.


@pytest.mark.row("S0-07", "S0-46", "S0-28")
async def test_an_entry_without_a_stored_card_is_kept_and_served_once_it_is_stored(
    logs: Logs,
) -> None:
    store = MemoryStore()

    def connect() -> MemoryRegistry:
        return MemoryRegistry(store)

    # A worker whose card is taken from the store.
    async with local_mesh(connect) as bed, bed.worker(RecordingEngine()) as app:
        checksum = app._instance().card_checksum
        card = store.cards.pop(checksum)
        async with local_mesh(connect) as other:

            async def has_reason() -> bool:
                reason: str = (await other.health())["models_not_ready"].get("m", "")
                return "missing model deployment card" in reason and (f"cards/{checksum}" in reason)

            await until(has_reason, "the missing card and its key are named")
            assert await other.models() == []
            (line,) = of(logs, "model_not_ready")
            assert line["log_level"] == "error"
            registry = connect()
            assert app.instance_id in (await registry.snapshot(NS)).instances
            store.cards[checksum] = card
            await other.serves("m")
            assert (await other.health())["models_not_ready"] == {}


@pytest.mark.row("S0-08")
async def test_a_store_that_fails_is_another_error_with_key_and_cause(tmp_path: Path) -> None:
    def connect() -> FileRegistry:
        return FileRegistry(tmp_path / "registry")

    cards = tmp_path / "registry" / "cards"
    cards.mkdir(parents=True)
    (cards / f"{NOT_STORED}.json").mkdir()  # Reading it fails.
    async with local_mesh(connect) as bed, bed.joined(registration(9, checksum=NOT_STORED)):

        async def has_reason() -> bool:
            reason: str = (await bed.health())["models_not_ready"].get("m", "")
            return f"cannot load the card cards/{NOT_STORED} of 'm': " in reason and (
                "not a regular file" in reason
            )

        await until(has_reason, "the failure and its cause are shown")


@pytest.mark.row("S0-37")
async def test_a_backend_entry_without_a_card_is_an_error_and_not_served() -> None:
    async with local_mesh() as bed, bed.joined(registration(9)):

        async def has_reason() -> bool:
            reason: str = (await bed.health())["models_not_ready"].get("m", "")
            return "missing model deployment card" in reason

        await until(has_reason, "the missing card is an error")
        assert await bed.models() == []


@pytest.mark.row("S0-06", "S0-20", "S0-36")
async def test_the_card_that_an_entry_names_is_loaded_once_for_all_its_workers(
    logs: Logs,
) -> None:
    async with local_mesh() as bed, bed.worker(RecordingEngine()):
        assert [line["card"] for line in of(logs, "card_loaded")] == ["m"]
        async with bed.worker(RecordingEngine()):
            await logged(logs, "model_already_known")
            assert len(of(logs, "card_loaded")) == 1


@pytest.mark.row("S0-38")
async def test_the_tokenizer_works_after_its_card_is_removed_from_the_store() -> None:
    store = MemoryStore()
    engine = RecordingEngine()
    async with local_mesh(lambda: MemoryRegistry(store)) as bed, bed.router(), bed.worker(engine):
        store.cards.clear()
        response = await bed.complete(prompt="hello world")
        assert response.status_code == 200
        assert len(engine.requests[0].token_ids) > 1
        assert response.json()["choices"][0]["text"]


# The table.


@pytest.mark.row("S0-27")
async def test_a_second_worker_joins_the_model_without_a_new_build(logs: Logs) -> None:
    engines = RecordingEngine(), RecordingEngine()
    async with local_mesh() as bed, bed.router(), bed.worker(engines[0]):
        before = (await bed.http.get("/v1/models/m")).json()
        model = bed.frontend._models.get("m")
        async with bed.worker(engines[1]) as second:
            (line,) = await logged(logs, "model_already_known")
            assert line["log_level"] == "debug"
            assert bed.frontend._models.get("m") is model
            assert (await bed.http.get("/v1/models/m")).json() == before
            assert len(of(logs, "model_added")) == 1
            await routable(bed.frontend, 2)
            pin = {"backend_instance_id": str(second.instance_id)}
            assert (await bed.complete(nvext=pin)).status_code == 200
            assert (len(engines[0].requests), len(engines[1].requests)) == (0, 1)


async def routable(frontend: Any, count: int) -> None:
    async def are_known() -> bool:
        return len(frontend._models.workers("m")) == count

    await until(are_known, f"{count} workers are known")


@pytest.mark.row("S0-30")
async def test_a_model_is_served_until_its_last_instance_leaves(logs: Logs) -> None:
    name = "Name/That.No-Key:Has"
    async with local_mesh() as bed, bed.router():
        async with bed.worker(RecordingEngine(), model_name=name):
            async with bed.worker(RecordingEngine(), model_name=name):
                await eventually_workers(bed, name, 2)
            await eventually_workers(bed, name, 1)
            assert (await bed.complete(model=name)).status_code == 200
            assert not of(logs, "model_removed"), "also not for a moment"
        await bed.no_longer_serves(name)
        assert [line["model"] for line in of(logs, "model_removed")] == [name]


async def eventually_workers(bed: Any, name: str, count: int) -> None:
    async def has_count() -> bool:
        return len(bed.frontend._models.workers(name)) == count

    await until(has_count, f"{count} workers serve {name}")


@pytest.mark.row("S0-29", "S0-32", "S0-33")
async def test_a_model_that_leaves_is_removed_from_both_endpoints_and_logged(logs: Logs) -> None:
    # A request for a model without workers does not wait for one.
    async with local_mesh(worker_wait_s=0.0) as bed, bed.router():
        async with bed.worker(RecordingEngine()):
            assert (await bed.chat()).status_code == (await bed.complete()).status_code == 200
        (line,) = await logged(logs, "model_removed")
        assert line["model"] == "m"
        for response in (await bed.chat(), await bed.complete()):
            assert (response.status_code, "retry-after" in response.headers) == (503, True)
        async with bed.echo() as app:
            async with bed.joined(pass_through(app, "talk", "Chat")):
                await bed.serves("talk")
            # In one table only: its absence from the other one is no error.
            lines = await logged(logs, "model_removed", 2)
            assert lines[1]["model"] == "talk"
            assert not of(logs, "model_event_rejected")


@pytest.mark.row("S0-34")
async def test_requests_go_to_the_workers_of_the_endpoint_only() -> None:
    engines = RecordingEngine(), RecordingEngine()
    async with local_mesh() as bed, bed.router(), bed.worker(engines[0]):
        elsewhere = WorkerApp(
            WorkerConfig(registry="memory", namespace="elsewhere", canary_idle_s=0.0),
            registry=bed.connect(),
            engine=engines[1],
        )
        async with living(elsewhere):
            for _ in range(6):
                assert (await bed.complete()).status_code == 200
        assert (len(engines[0].requests), len(engines[1].requests)) == (6, 0)


@pytest.mark.row("S0-05", "S0-39", "S0-40")
async def test_a_tokenized_model_has_two_endpoints_that_tokenize_and_detokenize() -> None:
    engine = RecordingEngine()
    async with local_mesh() as bed, bed.router(), bed.worker(engine):
        chat, completion = await asyncio.gather(bed.chat("hello"), bed.complete(prompt="hello"))
        texts = (
            chat.json()["choices"][0]["message"]["content"],
            completion.json()["choices"][0]["text"],
        )
        assert texts[0] == texts[1] != ""
        n_tokens = sorted(len(request.token_ids) for request in engine.requests)
        assert 0 < n_tokens[0] < n_tokens[1], "the chat template adds tokens"


def json_of(lines: str) -> Iterator[Any]:
    for line in lines.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.row("S0-05", "S0-36", "S0-42", "S0-43", "S0-44")
async def test_pass_through_workers_need_no_card_and_serve_one_kind_of_request(
    logs: Logs,
) -> None:
    async with local_mesh() as bed, bed.router(), bed.echo() as one, bed.echo() as other:
        talk = replace(pass_through(one, "talk", "Chat"), card_checksum=NOT_STORED)
        async with bed.joined(talk), bed.joined(pass_through(other, "text", "Completion")):
            await bed.serves("talk", "text")
            (line,) = of(logs, "model_without_card")
            assert (line["log_level"], line["model"]) == ("info", "talk")
            chunks = await streamed(bed, "talk", "text")
            assert chunks == {"chat.completion.chunk": "one two", "text_completion": "one two"}
            for refused in (await bed.complete(model="talk"), await bed.chat(model="text")):
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


async def streamed(bed: Any, chat_model: str, text_model: str) -> dict[str, str]:
    """The text of a chat and of a completion by the kind of their chunks."""
    responses = (
        await bed.chat("one two", model=chat_model, stream=True),
        await bed.complete(prompt="one two", model=text_model, stream=True),
    )
    texts: dict[str, str] = {}
    for response in responses:
        for part in json_of(response.text):
            for choice in part["choices"]:
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                texts[part["object"]] = texts.get(part["object"], "") + text
    return texts


@pytest.mark.row("S0-41")
@pytest.mark.parametrize("selector", ["round_robin", "random"])
async def test_the_placement_policy_is_configured(selector: str) -> None:
    engines = RecordingEngine(), RecordingEngine()
    async with (
        local_mesh() as bed,
        bed.router(selector=selector),
        bed.worker(engines[0]),
        bed.worker(engines[1]),
    ):
        await routable(bed.frontend, 2)
        counts = []
        for _ in range(12):
            assert (await bed.complete()).status_code == 200
            counts.append(len(engines[0].requests))
        chosen = [after - before for before, after in pairwise([0, *counts])]
        alternates = all(one != next_one for one, next_one in pairwise(chosen))
        assert alternates is (selector == "round_robin")

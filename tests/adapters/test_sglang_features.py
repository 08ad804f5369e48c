"""What works with stock SGLang servers, each through a mesh or by the contract kit."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.adapters.conftest import FEW_SLOTS
from tests.adapters.servers_mesh import PATIENT_S, Json, ServersMesh, Stream
from tests.adapters.stock_server import SglangServer
from tests.adapters.token_servers import (
    check_decisions,
    check_invalid_fields,
    check_replay,
    check_salts,
    prompt_of,
)
from tests.kit.contract_kit import check_server
from tests.kit.waiting import wait_for

TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.cell("sglang", "contract kit", "cache flush")
@pytest.mark.parametrize("at", [0, 1])
def test_the_contract_kit_passes(sglang_servers: list[SglangServer], at: int) -> None:
    check_server(sglang_servers[at].url)


@pytest.mark.cell("sglang", "routing by KV events", "token ids in and out", "several servers")
def test_a_second_turn_hits_the_cache_of_its_server(sglang_mesh: ServersMesh) -> None:
    for seed in range(4):
        prompt = prompt_of(seed)
        first = sglang_mesh.complete(prompt)["nvext"]
        turn = [*prompt, *first["completion_token_ids"], *range(50, 70)]

        def is_hit(turn: list[int] = turn, worker: str = str(first["worker_id"])) -> bool:
            chosen, blocks = sglang_mesh.overlap(turn)
            return blocks >= 10 and chosen == worker

        wait_for(is_hit, "the router has the events of the first turn")
        second = sglang_mesh.complete(turn)
        assert second["nvext"]["worker_id"] == first["worker_id"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 160


@pytest.mark.cell("sglang", "chats, completions, streams", "chat templates, tokenizing", "usage")
@pytest.mark.cell("sglang", "stop strings", "log probabilities")
def test_chats_have_stop_strings_and_log_probabilities(sglang_mesh: ServersMesh) -> None:
    whole = sglang_mesh.chat()
    text = whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == 12
    stop = text[len(text) // 2 :][:5]
    cut = sglang_mesh.chat(stop=[stop])["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == text[: text.index(stop)]
    found = sglang_mesh.chat(logprobs=True, top_logprobs=2)
    entries = found["choices"][0]["logprobs"]["content"]
    assert len(entries) == found["usage"]["completion_tokens"]
    assert all(len(one["top_logprobs"]) == 2 for one in entries)
    assert "".join(one["token"] for one in entries) == text
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}]}
    stream = Stream(
        sglang_mesh, "/v1/chat/completions", body | {"max_tokens": 12, "temperature": 0}
    )
    stream.join()
    assert stream.text == text


@pytest.mark.cell("sglang", "JSON schemas, regular expressions")
def test_constraints_shape_the_output(sglang_mesh: ServersMesh) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": TOOL}}
    choice = sglang_mesh.chat(response_format=form, max_tokens=60)["choices"][0]
    assert json.loads(choice["message"]["content"])["city"] in ("Oslo", "Rome")
    choice = sglang_mesh.chat(guided_regex="[A-Z]{2}-[0-9]{4}", max_tokens=60)["choices"][0]
    assert re.fullmatch("[A-Z]{2}-[0-9]{4}", choice["message"]["content"])


@pytest.mark.cell("sglang", "tools")
def test_forced_calls_of_tools_have_valid_arguments_in_one_piece_and_in_a_stream(
    sglang_mesh: ServersMesh, tiny: Path
) -> None:
    function = {"name": "weather", "parameters": TOOL}
    # Random weights do not end white space, which SGLang permits in the arguments of calls.
    bias = dict.fromkeys(white_space(tiny), -100)
    body: Json = {"tools": [{"type": "function", "function": function}], "logit_bias": bias}
    body |= {"parallel_tool_calls": False, "max_tokens": 100}
    plain = sglang_mesh.chat(max_tokens=1)["usage"]["prompt_tokens"]
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        found = sglang_mesh.chat(tool_choice=choice, **body)
        assert found["usage"]["prompt_tokens"] > plain + 20, "the prompt has the tool"
        (call,) = found["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    messages = [{"role": "user", "content": "Hello there"}]
    fields = {"model": "tiny", "messages": messages, "temperature": 0, "tool_choice": "required"}
    events = Stream(sglang_mesh, "/v1/chat/completions", body | fields).join()
    choices = [one["choices"][0] for one in events if one.get("choices")]
    assert choices[-1]["finish_reason"] == "tool_calls"
    calls = [one["delta"]["tool_calls"] for one in choices if one["delta"].get("tool_calls")]
    parts = [one["function"] for (one,) in calls]
    assert "".join(one.get("name") or "" for one in parts) == "weather"
    arguments = json.loads("".join(one.get("arguments") or "" for one in parts))
    assert arguments["city"] in ("Oslo", "Rome")


def white_space(model: Path) -> list[str]:
    """Returns the ids of the tokens of a model that are only white space."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    # As the byte-level alphabet writes them: space, line feed, tab, carriage return.
    return [str(one) for text, one in vocabulary.items() if set(text) <= set("ĠĊĉč")]


@pytest.mark.cell("sglang", "`min_tokens`, stop ids")
def test_stop_ids_end_a_response_after_its_least_length(sglang_mesh: ServersMesh) -> None:
    prompt = prompt_of(20)
    ids = sglang_mesh.complete(prompt, 8, ignore_eos=False)["nvext"]["completion_token_ids"]
    at = next(n for n, one in enumerate(ids) if n >= 2 and one not in ids[:n])
    fields: dict[str, Any] = {"ignore_eos": False, "stop_token_ids": [ids[at]]}
    cut = sglang_mesh.complete(prompt, 8, **fields)
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] in (at, at + 1)
    long = sglang_mesh.complete(prompt, 8, min_tokens=at + 3, **fields)
    assert long["usage"]["completion_tokens"] >= at + 3


@pytest.mark.cell("sglang", "seeds")
def test_a_seed_is_refused_by_name_without_deterministic_inference(
    sglang_mesh: ServersMesh,
) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "seed": 1, "temperature": 1}
    assert "seed" in sglang_mesh.post("/v1/completions", body, 400)["error"]["message"]


@pytest.mark.cell("sglang", "invalid fields")
def test_invalid_fields_are_refused_by_name_and_no_server_counts_as_failing(
    sglang_mesh: ServersMesh, sglang_servers: list[SglangServer]
) -> None:
    check_invalid_fields(sglang_mesh, sglang_servers)


@pytest.mark.cell("sglang", "priorities")
def test_a_request_of_higher_priority_passes_a_waiting_one(
    sglang_mesh: ServersMesh, sglang_servers: list[SglangServer]
) -> None:
    server = sglang_servers[1]
    body = at_server(sglang_mesh, server)
    ends: list[str] = []

    def request(name: str, seed: int, priority: int) -> threading.Thread:
        def run() -> None:
            fields = {"prompt": prompt_of(seed, 40), "max_tokens": 8, "priority": priority}
            sglang_mesh.post("/v1/completions", body | fields)
            ends.append(name)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    long = occupy(sglang_mesh, server, seed=30)
    threads = [request("low", 40, 3)]
    wait_for(lambda: server.running() == FEW_SLOTS + 1, "one waits", PATIENT_S)
    threads.append(request("high", 41, -3))
    wait_for(lambda: server.running() == FEW_SLOTS + 2 or ends, "both wait", PATIENT_S)
    for stream in long:
        stream.close()
    for thread in threads:
        thread.join(PATIENT_S)
    assert ends == ["high", "low"]


@pytest.mark.cell("sglang", "cache salt")
def test_a_cache_salt_separates_blocks_at_the_server_and_in_the_index(
    sglang_mesh: ServersMesh, sglang_servers: list[SglangServer]
) -> None:
    check_salts(sglang_mesh, sglang_servers[0])


@pytest.mark.cell("sglang", "approximate entries without events")
def test_decisions_stand_in_for_the_events_that_a_mesh_does_not_read(
    sglang_servers: list[SglangServer], tmp_path: Path
) -> None:
    check_decisions(tmp_path, sglang_servers)


@pytest.mark.cell("sglang", "replay of missed KV events")
def test_events_missed_while_the_connection_was_cut_are_replayed(
    sglang_servers: list[SglangServer], tmp_path: Path
) -> None:
    check_replay(tmp_path, sglang_servers[0])


@pytest.mark.cell("sglang", "load")
def test_requests_past_the_mesh_are_load_of_their_server(
    sglang_servers: list[SglangServer], tmp_path: Path
) -> None:
    server = sglang_servers[0]
    with ServersMesh(tmp_path, [server]) as mesh:
        (worker,) = mesh.workers
        thread = threading.Thread(target=server.generate, args=(prompt_of(72), 400))
        thread.start()
        wait_for(lambda: worker.load().loads[0].running == 1, "others' requests are load")
        thread.join()


@pytest.mark.cell("sglang", "cancellation")
def test_a_client_that_disconnects_frees_its_slot_and_its_place_in_the_queue(
    sglang_mesh: ServersMesh, sglang_servers: list[SglangServer]
) -> None:
    server = sglang_servers[1]
    kept, *closed = occupy(sglang_mesh, server, seed=80)
    body = at_server(sglang_mesh, server) | {"prompt": prompt_of(84, 40), "max_tokens": 8}
    with sent(sglang_mesh, body):
        wait_for(lambda: server.running() == FEW_SLOTS + 1, "one waits", PATIENT_S)
    wait_for(lambda: server.running() == FEW_SLOTS, "it has left the queue", PATIENT_S)
    assert all(one.is_open for one in (kept, *closed)), "no slot was free"
    for stream in closed:
        stream.close()
    wait_for(lambda: server.running() == 1, "the server aborted what was closed", PATIENT_S)
    assert kept.is_open, "those closed have the same length"
    kept.close()
    wait_for(lambda: server.running() == 0, "the last one too", PATIENT_S)


def at_server(mesh: ServersMesh, server: SglangServer) -> Json:
    """Returns a part of the body of a completion at one server."""
    nvext = {"backend_instance_id": mesh.worker_of(server)}
    return {"model": mesh.model, "ignore_eos": True, "nvext": nvext}


def occupy(mesh: ServersMesh, server: SglangServer, seed: int) -> list[Stream]:
    """Returns begun long streams in all slots of the second server."""
    body = at_server(mesh, server) | {"max_tokens": 1900}
    prompts = [prompt_of(seed + at, 40) for at in range(FEW_SLOTS)]
    streams = [Stream(mesh, "/v1/completions", body | {"prompt": one}) for one in prompts]
    for stream in streams:
        stream.wait_begun()
    wait_for(lambda: server.running() == FEW_SLOTS, "all slots are taken", PATIENT_S)
    return streams


@contextmanager
def sent(mesh: ServersMesh, body: Json) -> Iterator[None]:
    """Has sent a completion, whose client disconnects at the end."""
    host = urlsplit(mesh.url)
    headers = {"content-type": "application/json"}
    with closing(HTTPConnection(host.hostname or "", host.port, timeout=PATIENT_S)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        yield

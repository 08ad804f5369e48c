"""Stock vLLM servers behind the mesh. The last tests kill one of them."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvmesh.engine.v1 import admin_pb2, admin_pb2_grpc
from tests.kit.contract_kit import check_server
from tests.kit.model_server import ModelServer
from tests.kit.processes import Mesh, Service
from tests.kit.waiting import wait_for
from tests.vllm.conftest import ADMIN_TOKEN, ServersMesh
from tests.vllm.vllm_server import BLOCK_SIZE, MODEL, VllmServer

# For long responses on a busy machine.
PATIENT_S = 200.0
FIELDS = {"extra_fields": ["worker_id", "kv_hit", "completion_token_ids"]}
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


# Any, here and below: JSON.
def post(mesh: Mesh, path: str, **body: Any) -> Any:
    """Returns a greedy response."""
    body = {"model": MODEL, "temperature": 0} | body
    response = mesh.http.post(f"{mesh.url}/v1/{path}", json=body, timeout=PATIENT_S)
    assert response.status_code == 200, response.text
    return response.json()


def complete(mesh: Mesh, prompt: list[int], count: int = 8, **fields: Any) -> Any:
    body = {"max_tokens": count, "ignore_eos": True, "nvext": FIELDS} | fields
    return post(mesh, "completions", prompt=prompt, **body)


def chat(mesh: Mesh, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "Hello there"}]
    return post(mesh, "chat/completions", **{"messages": messages, "max_tokens": 12} | fields)


def tokens_of(mesh: Mesh, prompt: list[int], count: int = 8, **fields: Any) -> list[int]:
    found: list[int] = complete(mesh, prompt, count, **fields)["nvext"]["completion_token_ids"]
    return found


def call(worker: Service, operation: str, **fields: str) -> Any:
    """Calls a worker's AdminService."""
    stub = admin_pb2_grpc.AdminServiceStub(worker.channel)
    request = getattr(admin_pb2, f"{operation}Request")(**fields)
    metadata = (("authorization", f"Bearer {ADMIN_TOKEN}"),)
    return getattr(stub, operation)(request, timeout=PATIENT_S, metadata=metadata)


@pytest.mark.cell("vllm", "contract kit")
def test_the_contract_kit_passes(servers: list[VllmServer]) -> None:
    check_server(servers[0].url, f"block_size={BLOCK_SIZE}")


@pytest.mark.cell("vllm", "token ids in and out", "usage")
def test_token_ids_go_in_and_out(mesh: Mesh, servers: list[VllmServer]) -> None:
    prompt = [100 + at * 31 % 3000 for at in range(40)]
    found = complete(mesh, prompt, 20)
    tokens = found["nvext"]["completion_token_ids"]
    assert len(tokens) == found["usage"]["completion_tokens"] == 20
    assert found["usage"]["prompt_tokens"] == len(prompt)
    assert found["choices"][0]["finish_reason"] == "length"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "temperature": 0}
    response = mesh.http.post(
        f"{servers[0].url}/v1/completions",
        json=body | {"ignore_eos": True, "return_token_ids": True},
        timeout=PATIENT_S,
    )
    assert response.json()["choices"][0]["token_ids"] == tokens, "as from the server itself"


@pytest.mark.cell("vllm", "routing by KV events")
def test_a_second_turn_hits_the_cache_of_its_server(mesh: Mesh) -> None:
    for seed in range(4):
        prompt = [100 + (seed * 977 + at * 31) % 3000 for at in range(160)]
        first = complete(mesh, prompt)["nvext"]
        turn = [*prompt, *first["completion_token_ids"], *range(50, 70)]

        def is_hit(turn: list[int] = turn, worker: str = first["worker_id"]) -> bool:
            body = {"annotations": ["query_instance_id"]}
            found = complete(mesh, turn, nvext=body)["nvext"]
            is_deep = found["kv_hit"]["overlap_blocks"] >= 160 // BLOCK_SIZE
            return is_deep and bool(found["worker_id"] == worker)

        wait_for(is_hit, "the router has the events of the first turn")
        second = complete(mesh, turn)
        assert second["nvext"]["worker_id"] == first["worker_id"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 160


@pytest.mark.cell(
    "vllm",
    "chats, completions, streams",
    "chat templates, tokenizing",
    "stop strings",
    "log probabilities",
)
def test_chats_have_stop_strings_and_log_probabilities(mesh: Mesh) -> None:
    text = chat(mesh)["choices"][0]["message"]["content"]
    # A word: other tokens may be parts of characters.
    stop = next(one for one in text.split()[1:] if one.isascii())
    cut = chat(mesh, stop=[stop])["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == text[: text.index(stop)]
    found = chat(mesh, logprobs=True, top_logprobs=2)
    entries = found["choices"][0]["logprobs"]["content"]
    assert len(entries) == found["usage"]["completion_tokens"]
    assert all(len(one["top_logprobs"]) == 2 for one in entries)
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in entries), "greedy"
    content = b"".join(bytes(one["bytes"]) for one in entries)
    assert content.decode(errors="replace") == text


@pytest.mark.cell("vllm", "`min_tokens`, stop ids", "seeds")
def test_stop_ids_least_lengths_and_seeds_are_those_of_the_request(mesh: Mesh) -> None:
    prompt = [300 + at for at in range(24)]
    tokens = tokens_of(mesh, prompt, 12)
    stop = next(one for one in tokens[3:] if tokens.index(one) >= 3)
    end = tokens.index(stop)
    ends = {"stop_token_ids": [stop], "ignore_eos": False}
    found = complete(mesh, prompt, 12, **ends)
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["nvext"]["completion_token_ids"] == tokens[:end], "a stop token is not output"
    longer = tokens_of(mesh, prompt, 12, **ends, min_tokens=end + 2)
    assert len(longer) >= end + 2
    seeded = [tokens_of(mesh, prompt, 12, temperature=1.0, seed=one) for one in (7, 7, 8)]
    assert seeded[0] == seeded[1] != seeded[2]


@pytest.mark.cell("vllm", "JSON schemas, regular expressions")
def test_json_schemas_expressions_and_choices_bind_the_output(mesh: Mesh) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
    choice = chat(mesh, response_format=form, max_tokens=300)["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), CITY)

    def text(**fields: Any) -> str:
        found: str = chat(mesh, max_tokens=100, **fields)["choices"][0]["message"]["content"]
        return found

    assert re.fullmatch("[A-Z]{2}-[0-9]{4}", text(guided_regex="[A-Z]{2}-[0-9]{4}"))
    assert text(guided_choice=["yes (1)", "no. 2"]) in ("yes (1)", "no. 2")
    assert text(guided_grammar='root ::= "a" ("b" | "c") "d"') in ("abd", "acd")


@pytest.mark.cell("vllm", "tools")
def test_a_forced_tool_call_has_valid_arguments(mesh: Mesh) -> None:
    # Random weights do not end a list of calls.
    one_call = {"parallel_tool_calls": False, "max_tokens": 300}
    result = chat(mesh, tools=[TOOL], tool_choice="required", **one_call)["choices"][0]
    assert result["finish_reason"] == "tool_calls"
    (call,) = result["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)


@pytest.mark.cell("vllm", "LoRA adapters: use, load, unload")
def test_an_adapter_is_a_model_from_its_load_to_its_unload(mesh: Mesh, folder: Path) -> None:
    prompt = [700 + at for at in range(64)]
    base = tokens_of(mesh, prompt)
    for worker in mesh.workers:
        call(worker, "LoadLora", name="pirate", uri=f"file://{folder / 'pirate'}")
    wait_for(lambda: "pirate" in mesh.model_names(), "the adapter is a model")
    found = complete(mesh, prompt, model="pirate")["nvext"]
    assert found["completion_token_ids"] != base

    def is_hit() -> bool:
        body = {"annotations": ["query_instance_id"]}
        place = complete(mesh, prompt, model="pirate", nvext=body)["nvext"]
        return bool(place["kv_hit"]["overlap_blocks"] >= len(prompt) // BLOCK_SIZE)

    wait_for(is_hit, "the index has the blocks of the adapter")
    assert tokens_of(mesh, prompt, model="pirate") == found["completion_token_ids"]
    assert tokens_of(mesh, prompt) == base
    for worker in mesh.workers:
        call(worker, "UnloadLora", name="pirate")
    wait_for(lambda: "pirate" not in mesh.model_names(), "the adapter left")


@pytest.mark.cell("vllm", "cache flush")
def test_a_flush_empties_the_cache_and_the_index(mesh: Mesh) -> None:
    prompt = [900 + at for at in range(64)]
    complete(mesh, prompt)

    def blocks() -> int:
        body = {"annotations": ["query_instance_id"]}
        return int(complete(mesh, prompt, nvext=body)["nvext"]["kv_hit"]["overlap_blocks"])

    wait_for(lambda: blocks() == 4, "the index has the blocks")
    for worker in mesh.workers:
        call(worker, "FlushCache")
    wait_for(lambda: blocks() == 0, "the index has none")
    assert complete(mesh, prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.cell("vllm", "load", "cancellation")
def test_load_is_the_servers_and_a_client_that_leaves_frees_it(
    mesh: Mesh, servers: list[VllmServer]
) -> None:
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}
    url = f"{mesh.url}/v1/completions"
    with mesh.http.stream("POST", url, json=body | {"stream": True}, timeout=PATIENT_S) as stream:
        # Kept: its end would close the response.
        lines = stream.iter_lines()
        assert next(lines)
        wait_for(lambda: sum(one.running() for one in servers) == 1, "a server reports it")
        wait_for(
            lambda: sum(rank.running for one in mesh.workers for rank in one.load().loads) == 1,
            "the adapter reports it",
        )
    wait_for(lambda: sum(one.running() for one in servers) == 0, "the server has freed it")
    assert sum(one.open_slots() for one in mesh.workers) == 0


def read_stream(mesh: Mesh, found: dict[str, Any], **body: Any) -> None:
    """Reads a greedy stream into `found`: "nvext" of its end, or its "error"."""
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "stream": True} | body
    url = f"{mesh.url}/v1/completions"
    with mesh.http.stream("POST", url, json=body, timeout=PATIENT_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                found.update({name: event[name] for name in ("nvext", "error") if name in event})
                found["events"] = found.get("events", 0) + 1


@pytest.mark.cell("vllm", "migration of a started stream")
def test_streams_continue_exactly_when_their_server_is_killed(
    mesh: Mesh, servers: list[VllmServer]
) -> None:
    count, streams = 300, 4
    prompts = [[200 + (at * 13 + n * 7) % 3000 for n in range(64)] for at in range(streams)]
    whole = [tokens_of(mesh, one, count) for one in prompts]
    found: list[dict[str, Any]] = [{} for _ in prompts]
    threads = [
        threading.Thread(
            target=read_stream,
            args=(mesh, found[at]),
            kwargs={"prompt": prompts[at], "max_tokens": count, "nvext": FIELDS},
        )
        for at in range(streams)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum(one.running() for one in servers) >= streams, "all run")
    loser = max(servers, key=VllmServer.running)
    moved = loser.running()
    loser.kill()
    for thread in threads:
        thread.join(PATIENT_S)
    assert moved >= 1
    assert [one.get("nvext", {}).get("completion_token_ids") for one in found] == whole
    for _ in range(8):
        complete(mesh, [9, 9, 9], 2)


def test_no_stream_of_vllm_continues_on_another_engine(
    folder: Path, servers: list[VllmServer], tmp_path: Path
) -> None:
    """The other engine is a stand-in of SGLang that serves the same model."""
    (server,) = (one for one in servers if one.is_alive)
    prompt = list(range(200, 264))
    with ModelServer("sglang", step_s=0.01) as other:
        shared = [f"--model-path={folder / 'tiny'}", f"--model-name={MODEL}"]
        # That of the stand-in, less what SGLang reserves.
        shared += ["--context-length=2042"]
        flags = [[*server.worker_flags, *shared]]
        with ServersMesh(tmp_path, flags, frontend_flags=["--worker-wait-s=1"]) as mesh:
            found: dict[str, Any] = {}
            body = {"prompt": prompt, "max_tokens": 1500}
            thread = threading.Thread(target=read_stream, args=(mesh, found), kwargs=body)
            thread.start()
            wait_for(lambda: found.get("events", 0) > 3, "it has tokens of vLLM")
            worker = mesh.spawn("worker", "--engine=openai", f"--server-urls={other.url}", *shared)
            worker.wait_ready()
            wait_for(mesh.is_complete, "the stand-in serves the same model")
            server.kill()
            thread.join(PATIENT_S)
            assert "its engine (sglang, not vllm" in json.dumps(found["error"])
            assert all(len(one["input_ids"]) <= 8 for one in other.bodies), "probes only"
            # A new request runs there.
            complete(mesh, prompt, 4)
            assert other.bodies[-1]["input_ids"] == prompt

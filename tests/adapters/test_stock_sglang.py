"""Stock SGLang servers behind the mesh. The last test kills one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.adapters.stock_server import StockServer
from tests.kit.processes import ROOT, Mesh
from tests.kit.waiting import wait_for

# For long responses on a busy machine.
PATIENT_S = 200.0
FIELDS = {"extra_fields": ["worker_id", "kv_hit", "completion_token_ids"]}


def complete(mesh: Mesh, prompt: list[int], count: int = 8, **fields: Any) -> dict[str, Any]:
    """Returns a greedy response."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0}
    body |= {"ignore_eos": True, "nvext": FIELDS} | fields
    response = mesh.http.post(f"{mesh.url}/v1/completions", json=body, timeout=PATIENT_S)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("at", [0, 1])
def test_the_contract_kit_passes(servers: list[StockServer], at: int) -> None:
    command = [sys.executable, "-m", "worker_svc.conformance"]
    command += ["worker_svc.engines.openai.engine:ServerEngine", f"--arg=url={servers[at].url}"]
    # A step may be slow on a busy machine.
    done = subprocess.run(
        [*command, "--stop-s=30"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("25 pass, 0 fail, 0 skip")


def test_a_second_turn_hits_the_cache_of_its_server(mesh: Mesh) -> None:
    for seed in range(4):
        prompt = [100 + (seed * 977 + at * 31) % 3000 for at in range(160)]
        first = complete(mesh, prompt)["nvext"]
        turn = [*prompt, *first["completion_token_ids"], *range(50, 70)]

        def is_hit(turn: list[int] = turn, worker: str = first["worker_id"]) -> bool:
            body = {"annotations": ["query_instance_id"]}
            found = complete(mesh, turn, nvext=body)["nvext"]
            is_deep = found["kv_hit"]["overlap_blocks"] >= 10
            return is_deep and bool(found["worker_id"] == worker)

        wait_for(is_hit, "the router has the events of the first turn")
        second = complete(mesh, turn)
        assert second["nvext"]["worker_id"] == first["worker_id"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 160


def test_chats_have_stop_strings_and_log_probabilities(mesh: Mesh) -> None:
    messages = [{"role": "user", "content": "Hello there"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}

    def post(**fields: Any) -> Any:
        response = mesh.http.post(f"{mesh.url}/v1/chat/completions", json=body | fields)
        assert response.status_code == 200, response.text
        return response.json()

    text = post()["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:5]
    cut = post(stop=[stop])["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == text[: text.index(stop)]
    found = post(logprobs=True, top_logprobs=2)
    entries = found["choices"][0]["logprobs"]["content"]
    assert len(entries) == found["usage"]["completion_tokens"]
    assert all(len(one["top_logprobs"]) == 2 for one in entries)
    assert "".join(one["token"] for one in entries) == text


def test_streams_continue_exactly_when_their_server_is_killed(
    mesh: Mesh, servers: list[StockServer]
) -> None:
    count, streams = 300, 4
    prompts = [[200 + (at * 13 + n * 7) % 3000 for n in range(64)] for at in range(streams)]
    whole = [complete(mesh, one, count)["nvext"]["completion_token_ids"] for one in prompts]
    found: list[dict[str, Any]] = [{} for _ in prompts]

    def read(at: int) -> None:
        body = {"model": "tiny", "prompt": prompts[at], "max_tokens": count, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "nvext": FIELDS}
        url = f"{mesh.url}/v1/completions"
        with mesh.http.stream("POST", url, json=body, timeout=PATIENT_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and "nvext" in line:
                    found[at] = json.loads(line[6:])["nvext"]

    threads = [threading.Thread(target=read, args=(at,)) for at in range(streams)]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum(one.running() for one in servers) >= streams, "all run")
    loser = max(servers, key=StockServer.running)
    moved = loser.running()
    loser.kill()
    for thread in threads:
        thread.join(200)
    assert moved >= 1
    assert [one.get("completion_token_ids") for one in found] == whole
    for _ in range(8):
        complete(mesh, [9, 9, 9], 2)

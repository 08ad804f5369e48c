"""The audit log and the request trace of a running frontend."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.types.v1 import request_pb2
from replay.trace import load_trace
from tests.kit.processes import MODEL, ROOT, Mesh
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

BLOCK = 16
CHAT = {"messages": [{"role": "user", "content": "Tell me of a city."}], "max_tokens": 6}

# Any: JSON.
Json = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def mesh(folder: Path) -> Iterator[Mesh]:
    files = [f"--audit-log={folder}/audit.jsonl", f"--request-trace={folder}/trace.jsonl"]
    flags = ["--speedup=2", "--loras=french"]
    with Mesh(folder, workers=1, frontends=0, worker_flags=flags) as mesh:
        mesh.spawn("frontend", *files).wait_ready()
        wait_for(mesh.is_complete, "the frontend uses the router and the worker")
        yield mesh


def records(file: Path, client_id: str) -> list[Json]:
    lines = file.read_text().splitlines(keepends=True)
    values = [json.loads(line) for line in lines if line.endswith("\n")]
    return [one for one in values if one.get("x_request_id") == client_id]


def audit(folder: Path, client_id: str) -> Json:
    file = folder / "audit.jsonl"
    (record,) = wait_for(lambda: records(file, client_id), f"{client_id} has a record")
    value: Json = record
    return value


def trace(folder: Path, client_id: str, count: int = 1) -> list[Json]:
    file = folder / "trace.jsonl"
    wait_for(lambda: len(records(file, client_id)) >= count, f"{client_id} has {count} lines")
    return records(file, client_id)


def post(mesh: Mesh, path: str, client_id: str, body: Json | bytes) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps({"model": MODEL, **body}).encode()
    url, headers = f"{mesh.url}/v1/{path}", {"x-request-id": client_id}
    return mesh.http.post(url, content=content, headers=headers).content


def disconnect(mesh: Mesh, client_id: str) -> None:
    """A stream whose client leaves after its first event."""
    host, _, port = mesh.url.removeprefix("http://").partition(":")
    fields = {"prompt": list(range(300, 340)), "max_tokens": 2000, "ignore_eos": True}
    body = json.dumps({"model": MODEL, "stream": True, **fields}).encode()
    with socket.create_connection((host, int(port)), WAIT_S) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: {client_id}\r\n"
        client.sendall(head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        received, deadline = b"", time.monotonic() + WAIT_S
        while received.count(b"data: ") < 3:
            part = client.recv(4096)
            assert part, f"the response ended: {received!r}"
            assert time.monotonic() < deadline, f"no three events in {WAIT_S:g} s: {received!r}"
            received += part
    mesh.request_line(client_id)


def test_a_response_is_recorded_with_its_request(mesh: Mesh, folder: Path) -> None:
    body = json.dumps({"model": MODEL, **CHAT}, indent=2).encode()
    response = json.loads(post(mesh, "chat/completions", "whole", body))
    record = audit(folder, "whole")
    assert record["request"] == json.loads(body)
    assert record["response"] == response
    line = mesh.request_line("whole")
    assert record["request_id"] == line["request_id"]
    expected = {
        "schema": "kvmesh.audit.v1",
        "endpoint": "chat_completions",
        "model": MODEL,
        "stream": False,
        "status": 200,
        "complete": True,
    }
    assert expected.items() <= record.items()
    assert record["total_ms"] == line["total_ms"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", CHAT),
        ("messages", CHAT),
        ("responses", {"input": "Tell me of a city.", "max_output_tokens": 16}),
        ("completions", {"prompt": "Tell me", "max_tokens": 5, "n": 2, "logprobs": 1}),
    ],
)
def test_a_stream_is_recorded_as_one_response(
    mesh: Mesh, folder: Path, path: str, body: Json
) -> None:
    whole_id, stream_id = f"{path}-whole", f"{path}-stream"
    post(mesh, path, whole_id, body)
    post(mesh, path, stream_id, body | {"stream": True})
    whole, streamed = audit(folder, whole_id), audit(folder, stream_id)
    assert (streamed["complete"], streamed["stream"]) == (True, True)
    response = streamed["response"]
    if "choices" in whole["response"]:
        assert response["choices"] == whole["response"]["choices"]
        counts = ("prompt_tokens", "completion_tokens")
        assert [response["usage"][one] for one in counts] == [
            whole["response"]["usage"][one] for one in counts
        ]
    else:
        (part,) = whole["response"].get("content") or whole["response"]["output"][0]["content"]
        assert response["choices"][0]["message"]["content"] == part["text"]


def test_refused_and_failed_requests_are_recorded(mesh: Mesh, folder: Path) -> None:
    refused = json.loads(post(mesh, "completions", "refused", {"prompt": "x", "max_tokens": -1}))
    record = audit(folder, "refused")
    assert (record["status"], record["response"]) == (400, refused)
    assert (record["failure"], record["error"]) == ("INVALID_VALUE", refused["error"]["message"])
    post(mesh, "completions", "broken", b'{"model": "sim",\n "prompt": ')
    assert audit(folder, "broken")["request"] == '{"model": "sim",\n "prompt": '
    assert not records(folder / "trace.jsonl", "refused")


def test_a_disconnect_is_recorded_with_what_was_generated(mesh: Mesh, folder: Path) -> None:
    disconnect(mesh, "left")
    record = audit(folder, "left")
    assert (record["complete"], record["failure"]) == (False, "REQUEST_CANCELLED")
    assert record["response"]["choices"][0]["text"]
    (row,) = trace(folder, "left")
    assert row["failure"] == "REQUEST_CANCELLED"
    assert 1 <= row["output_length"] < 2000


def test_the_trace_has_lengths_and_the_blocks_of_shared_prefixes(mesh: Mesh, folder: Path) -> None:
    shared = [400 + number for number in range(3 * BLOCK)]
    prompts = {
        "first": [*shared, *range(500, 540)],
        "second": [*shared, *range(600, 610)],
        "adapter": shared,
    }
    for name, prompt in prompts.items():
        model = "french" if name == "adapter" else MODEL
        fields = {"model": model, "prompt": prompt, "max_tokens": 7, "ignore_eos": True}
        post(mesh, "completions", name, fields)
    first, second, adapter = (trace(folder, name)[0] for name in prompts)
    assert (first["input_length"], first["output_length"]) == (3 * BLOCK + 40, 7)
    assert (len(first["hash_ids"]), len(second["hash_ids"])) == (5, 3)
    assert first["hash_ids"][:3] == second["hash_ids"]
    assert not set(adapter["hash_ids"]) & set(first["hash_ids"])
    assert first["timestamp"] <= second["timestamp"] <= adapter["timestamp"]
    assert second["cached_tokens"] == 3 * BLOCK
    line = mesh.request_line("first")
    assert first["block_size"] == BLOCK
    assert (first["request_id"], first["workers"]) == (line["request_id"], line["workers"])
    assert first["ttft_ms"] <= first["total_ms"]


def test_each_choice_is_a_line_of_the_trace(mesh: Mesh, folder: Path) -> None:
    body = {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 3, "ignore_eos": True}
    post(mesh, "completions", "choices", body)
    rows = trace(folder, "choices", 4)
    assert [one["input_length"] for one in rows] == [3, 3, 2, 2]
    suffixes = [one["request_id"][32:] for one in rows]
    assert suffixes == ["", "-1", "-2", "-3"]


@pytest.mark.row("S2-79")
def test_a_probe_of_a_worker_has_no_record(mesh: Mesh, folder: Path) -> None:
    stub = engine_pb2_grpc.EngineServiceStub(mesh.workers[0].channel)
    message = engine_pb2.GenerateRequest(
        request=request_pb2.PreprocessedRequest(token_ids=[1], is_probe=True)
    )
    before = [(folder / name).read_bytes() for name in ("audit.jsonl", "trace.jsonl")]
    assert list(stub.Generate(message, timeout=WAIT_S))
    post(mesh, "completions", "after-probe", {"prompt": "x", "max_tokens": 1})
    audit(folder, "after-probe")
    trace(folder, "after-probe")
    for name, earlier in zip(("audit.jsonl", "trace.jsonl"), before, strict=True):
        assert len((folder / name).read_bytes()[len(earlier) :].splitlines()) == 1


def test_the_metrics_count_the_records(mesh: Mesh, folder: Path) -> None:
    post(mesh, "tokenize", "counted", {"prompt": "x"})
    audit(folder, "counted")
    text = mesh.http.get(f"{mesh.url}/metrics").text
    for file in ("audit", "request_trace"):
        assert f'kvmesh_frontend_records_dropped_total{{file="{file}"}} 0.0' in text
    written = len((folder / "audit.jsonl").read_text().splitlines())
    assert f'kvmesh_frontend_records_written_total{{file="audit"}} {written}.0' in text


def test_replay_reads_the_trace_of_a_mesh(mesh: Mesh, folder: Path) -> None:
    for number in range(4):
        body = {"prompt": list(range(700, 740 + number)), "max_tokens": 4}
        post(mesh, "completions", f"replayed-{number}", body)
    (last,) = trace(folder, "replayed-3")
    requests = load_trace(folder / "trace.jsonl")
    assert requests[-1].input_tokens == last["input_length"]
    assert requests[-1].hash_ids == tuple(last["hash_ids"])
    assert len(requests) == len((folder / "trace.jsonl").read_text().splitlines())
    command = [sys.executable, "-m", "replay", str(folder / "trace.jsonl"), "--workers=2"]
    done = subprocess.run(
        [*command, f"--block-size={BLOCK}", "--blocks=1000", "--json"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'protos'}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr


def test_texts_can_be_left_out_and_a_stop_writes_what_is_queued(mesh: Mesh, folder: Path) -> None:
    for content, names in (("none", set()), ("request", {"request"})):
        file = folder / f"audit-{content}.jsonl"
        frontend = mesh.spawn("frontend", f"--audit-log={file}", f"--audit-content={content}")
        frontend.wait_ready()
        wait_for(mesh.is_complete, "the frontend uses the router and the worker")
        url = f"{frontend.addresses['http']}/v1/chat/completions"
        headers = {"x-request-id": "texts"}
        for stream in (False, True):
            body = {"model": MODEL, **CHAT, "stream": stream}
            assert mesh.http.post(url, json=body, headers=headers).status_code == 200
        frontend.send(signal.SIGTERM)
        assert frontend.wait() == 0
        found = records(file, "texts")
        assert [one["stream"] for one in found] == [False, True]
        assert all({"request", "response"} & one.keys() == names for one in found)


def test_a_file_that_cannot_be_opened_stops_the_start(mesh: Mesh, folder: Path) -> None:
    frontend = mesh.spawn("frontend", f"--audit-log={folder}/absent/audit.jsonl")
    assert frontend.wait() != 0
    assert "--audit-log" in frontend.tail()
    mesh.services.remove(frontend)
    frontend.close()

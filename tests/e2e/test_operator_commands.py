"""The commands of `meshctl` that observe a running mesh, by names and ids."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

# Any: JSON.
from typing import Any

import pytest
from click.testing import CliRunner

from meshctl.cli import application, run_command
from meshctl.commands.demo import SpanReceiver
from tests.kit.jaeger import jaeger
from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

# Several KV blocks long.
PROMPT = "The five boxing wizards jump quickly over the lazy dog. " * 20


@pytest.fixture(scope="module")
def mesh(
    tmp_path_factory: pytest.TempPathFactory, spans: tuple[SpanReceiver, str]
) -> Iterator[Mesh]:
    traced = [f"--otlp-endpoint={spans[1]}", "--trace-sample-ratio=1"]
    with Mesh(
        tmp_path_factory.mktemp("mesh"),
        workers=0,
        prefill=1,
        decode=2,
        routers=2,
        worker_flags=["--speedup=20", *traced],
        router_flags=traced,
        frontend_flags=traced,
        named=True,
    ) as mesh:
        yield mesh


class Commands:
    """Commands on a mesh, in this process."""

    def __init__(self, mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
        self.mesh = mesh
        self._capsys = capsys

    def run(
        self, *words: str, status: int = 0, environ: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[str, str]:
        """The output of a command, and its errors."""
        variables = {"KVMESH_REGISTRY_PATH": str(self.mesh.folder / "registry"), **environ}
        argv = [*words]
        if words[0] in ("explain", "trace", "logs"):
            argv.append(f"--log-dir={self.mesh.folder}")
        self._capsys.readouterr()
        found = run_command(argv, variables)
        shown = self._capsys.readouterr()
        assert found == status, shown
        return shown.out, shown.err

    def json(self, *words: str, **environ: str) -> Any:
        return json.loads(self.run(*words, "--json", environ=environ)[0])


@pytest.fixture
def commands(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(mesh, capsys)


def request(mesh: Mesh, client_id: str, max_tokens: int = 4) -> dict[str, Any]:
    """The log line of a request that has ended."""
    response = mesh.post_completion(client_id, PROMPT, max_tokens=max_tokens)
    assert response.status_code == 200, response.text
    return mesh.request_line(client_id)


def test_status_shows_one_member_by_its_name_its_id_or_its_key(commands: Commands) -> None:
    rows = commands.json("status")
    names = ["frontend-1", "router-1", "router-2", "prefill-1", "decode-1", "decode-2"]
    assert [row["name"] for row in rows] == names
    assert {row["routable"] for row in rows} == {True}
    row = rows[1]
    for member in (row["name"], row["id"], row["key"]):
        assert commands.json("status", member) == [row]
    _, error = commands.run("status", "router-3", status=1)
    assert "'router-3'" in error
    assert "did you mean router-" in error


def test_status_names_the_peer_that_has_not_acknowledged_a_member(
    commands: Commands, mesh: Mesh
) -> None:
    mesh.frontend.send(signal.SIGSTOP)
    worker = mesh.spawn("decode", "--routable-limit-s=60")
    try:
        worker.wait_ready()

        def missing() -> list[dict[str, Any]]:
            rows = json.loads(commands.run("status", worker.name, "--json", status=1)[0])
            assert rows[0]["routable"] is False
            found: list[dict[str, Any]] = rows[0].get("missing", [])
            return [peer for peer in found if peer["service"] == "frontend"]

        (peer,) = wait_for(missing, "the worker waits for the frontend")
        assert (peer["name"], peer["id"]) == ("frontend-1", str(mesh.frontend.instance_id))
        out, _ = commands.run("status", status=1)
        assert "decode-3: waits for frontend frontend-1: " in out
    finally:
        mesh.frontend.send(signal.SIGCONT)
        worker.wait_routable()
        worker.send(signal.SIGTERM)
        worker.wait()


def test_chat_streams_a_response_and_shows_worker_and_speed(commands: Commands) -> None:
    out, err = commands.run("chat", MODEL, "--prompt", PROMPT, "--max-tokens", "8")
    assert len(out.split()) > 2
    assert "prefill-1 -> decode-" in err
    assert "8 tokens, first token after " in err
    assert " tokens/s, length, chatcmpl-" in err
    answer = commands.json("chat", "--prompt", PROMPT, "--max-tokens", "8")
    assert answer["model"] == MODEL
    assert answer["text"] == out.removesuffix("\n")
    assert answer["workers"]["prefill"] == "prefill-1"
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["ttft_ms"] > 0


def test_a_chat_of_several_lines_is_one_conversation(mesh: Mesh) -> None:
    registry = f"--registry-path={mesh.folder / 'registry'}"
    done = subprocess.run(
        [sys.executable, "-m", "meshctl", "chat", "--max-tokens=4", registry],
        input="One\nTwo\n",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stderr.count("first token after") == 2
    prompts = [line["prompt_tokens"] for line in mesh.frontend.events("request")[-2:]]
    assert prompts[1] > prompts[0]


def test_a_chat_with_an_unknown_model_is_an_error(commands: Commands) -> None:
    out, err = commands.run("chat", "nothing", "--prompt", "Hi", status=1)
    assert out == ""
    assert "meshctl chat: status 404" in err


@pytest.mark.parametrize("kind", ["request_id", "client_request_id", "response"])
def test_a_decision_is_explained_by_each_id_of_its_request(
    commands: Commands, mesh: Mesh, kind: str
) -> None:
    line = request(mesh, f"client-{kind}")
    id_ = f"cmpl-{line['request_id']}" if kind == "response" else line[kind]
    explained = commands.json("explain", id_)
    assert explained["request_id"] in (line["request_id"], id_)
    assert explained["router"]["name"] in ("router-1", "router-2")
    assert explained["decision"]["reasons"] == line["routing"]
    names = [(c["leg"], c["name"]) for c in explained["candidates"]]
    assert ("prefill", "prefill-1") in names
    assert {name for leg, name in names if leg == "decode"} == {"decode-1", "decode-2"}
    out, _ = commands.run("explain", id_)
    assert f"request {explained['request_id']}: prefill-1 -> decode-" in out
    rows = [text.split() for text in out.splitlines() if text.startswith("*")]
    assert [row[1] for row in rows] == ["prefill", "decode"]
    assert [row[3] for row in rows] == line["workers"]


def test_an_unknown_request_is_not_explained(commands: Commands) -> None:
    _, err = commands.run("explain", "unknown-1", status=1)
    assert "no decision for the request 'unknown-1' among the last 4096 of 2 router(s)" in err


def test_a_trace_of_jaeger_shows_the_link_of_decode_to_prefill(
    commands: Commands, mesh: Mesh, spans: tuple[SpanReceiver, str]
) -> None:
    line = request(mesh, "traced")

    def engine_spans() -> int:
        found = [s for s in spans[0].received if s.span.trace_id.hex() == line["trace_id"]]
        names = [s.span.name for s in found]
        is_routed = "kv_router.schedule" in names
        return names.count("engine.generate") == 2 and "http-request" in names and is_routed

    wait_for(engine_spans, "the spans of the request arrive")
    with jaeger(lambda: tuple(spans[0].received)) as url:
        trace = commands.json("trace", "traced", "--jaeger-url", url)
        by_trace_id = commands.json("trace", line["trace_id"], JAEGER_QUERY_URL=url)
        out, _ = commands.run("trace", line["request_id"], "--jaeger-url", url)
    assert trace == by_trace_id
    assert trace["source"] == "Jaeger"
    of_role = {
        span["attributes"].get("disagg_role"): span
        for span in trace["spans"]
        if span["name"] == "engine.generate"
    }
    assert of_role["decode"]["links"] == [of_role["prefill"]["span_id"]]
    (decode,) = [text for text in out.splitlines() if "linked to" in text]
    assert "worker engine.generate" in decode
    assert "linked to prefill engine.generate of prefill-1" in decode


def test_a_trace_without_jaeger_has_the_stages_of_the_request(
    commands: Commands, mesh: Mesh
) -> None:
    line = request(mesh, "staged", max_tokens=8)
    trace = commands.json("trace", "staged")
    assert trace["source"] == "recent requests of frontend-1"
    stages = {span["name"]: span for span in trace["spans"][1:]}
    assert list(stages) == ["tokenize", "wait for a worker", "prefill", "handoff", "output"]
    ends = [span["start_ms"] + span["ms"] for span in trace["spans"]]
    assert ends[0] == pytest.approx(line["total_ms"], abs=0.2)
    assert ends[-2] == pytest.approx(line["ttft_ms"], abs=0.2)
    assert stages["output"]["links"] == [stages["prefill"]["span_id"]]
    out, _ = commands.run("trace", line["request_id"])
    assert "prefill-1, prefill" in out
    assert "linked to prefill prefill of prefill-1" in out
    _, err = commands.run("trace", "unknown-1", status=1)
    assert "no frontend has the request 'unknown-1'" in err


def test_a_trace_is_found_in_the_records_of_a_frontend(
    commands: Commands, mesh: Mesh, tmp_path: Path
) -> None:
    records = tmp_path / "trace.jsonl"
    frontend = mesh.spawn("frontend", f"--request-trace={records}")
    try:
        frontend.wait_ready()
        url = frontend.addresses["http"]
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
        headers = {"x-request-id": "recorded"}

        def is_served() -> bool:
            return mesh.http.post(f"{url}/v1/completions", json=body, headers=headers).is_success

        wait_for(is_served, "the frontend serves")
        wait_for(lambda: records.exists() and records.read_text(), "the record is written")
    finally:
        frontend.send(signal.SIGTERM)
        frontend.wait()
    frontend.log_path.write_text("")
    trace = commands.json("trace", "recorded", KVMESH_FRONTEND_REQUEST_TRACE=str(records))
    assert trace["source"] == str(records)
    assert trace["spans"][0]["ms"] > 0


def test_logs_are_merged_filtered_and_readable(commands: Commands, mesh: Mesh) -> None:
    line = request(mesh, "logged")
    rows = commands.run("logs", "--request", "logged")[0].splitlines()
    assert len(rows) == 1
    assert rows[0].split()[1:4] == ["info", "frontend-1", "request"]
    assert f"request_id={line['request_id']}" in rows[0]
    assert f"{line['workers'][0]} (prefill-1)" in rows[0]
    ready = [text for text in commands.run("logs")[0].splitlines() if "  ready addresses=" in text]
    assert {text.split()[2] for text in ready} >= {"router-1", "router-2", "decode-2"}
    assert ready == sorted(ready)
    router = mesh.running("router")[1]
    by_id, _ = commands.run("logs", str(router.instance_id))
    assert by_id == commands.run("logs", "router-2")[0]
    assert commands.run("logs", "--level=error")[0] == ""
    assert len(commands.run("logs", "--lines=2")[0].splitlines()) == 2
    lines = [
        json.loads(text) for text in commands.run("logs", "router-2", "--json")[0].splitlines()
    ]
    assert {fields["name"] for fields in lines} == {"router-2"}
    _, err = commands.run("logs", "router-9", status=1)
    assert "no log of 'router-9'" in err


def test_logs_follow_until_ctrl_c(mesh: Mesh, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshctl", "logs", "frontend-1", "-f", "--lines=0"]
    out = tmp_path / "out"
    with out.open("wb") as file:
        follower = subprocess.Popen(
            [*command, f"--log-dir={mesh.folder}"],
            stdout=file,
            env={"PYTHONPATH": ":".join(sys.path)},
        )
    try:

        def is_shown() -> bool:
            # It may start after the first requests, whose lines it does not show.
            request(mesh, "followed")
            return "client_request_id=followed" in out.read_text()

        wait_for(is_shown, "the line of a new request is shown")
        follower.send_signal(signal.SIGINT)
        assert follower.wait(WAIT_S) == 0
    finally:
        follower.kill()
        follower.wait()


def test_top_shows_load_and_traffic(commands: Commands, mesh: Mesh) -> None:
    request(mesh, "topped")
    shown = commands.json("top", "--once")
    members = {member["name"]: member for member in shown["members"]}
    assert members["prefill-1"]["kv"] is not None
    frontend = members["frontend-1"]
    assert frontend["ttft_p99_ms"] >= frontend["ttft_p50_ms"] > 0
    assert frontend["running"] == 0
    assert shown["total"]["requests_per_s"] is not None
    assert shown["problems"] == []
    out, _ = commands.run("top", "--once")
    assert out.splitlines()[0].split()[:4] == ["NAME", "SERVICE", "MODEL", "HEALTH"]
    assert any(text.startswith("decode-2") for text in out.splitlines())


def test_top_reads_metrics_of_a_port_of_their_own(commands: Commands, mesh: Mesh) -> None:
    frontend = mesh.spawn("frontend", "--metrics-port=0", "--metrics-path=/m")
    try:
        frontend.wait_ready()
        shown = commands.json("top", "--once")
        assert shown["problems"] == []
        members = {member["name"]: member for member in shown["members"]}
        assert members[frontend.name]["running"] == 0
    finally:
        frontend.send(signal.SIGTERM)
        frontend.wait()


def test_a_shell_completes_the_names_of_members(mesh: Mesh) -> None:
    result = CliRunner().invoke(
        application,
        prog_name="meshctl",
        obj={"KVMESH_REGISTRY_PATH": str(mesh.folder / "registry")},
        env={
            "_MESHCTL_COMPLETE": "bash_complete",
            "COMP_WORDS": "meshctl status router-",
            "COMP_CWORD": "2",
        },
    )
    assert result.output.split() == ["plain,router-1", "plain,router-2"]


def test_names_stand_beside_ids_in_logs_spans_and_metrics(
    mesh: Mesh, spans: tuple[SpanReceiver, str]
) -> None:
    for service in mesh.services:
        if service.process.poll() is not None:
            continue
        (ready,) = service.events("ready")
        assert (ready["name"], ready["instance"]) == (service.name, str(service.instance_id))
    instance_id = f'instance_id="{mesh.frontend.instance_id}"'
    labels = f'{instance_id},model="",role="frontend",service="frontend"'
    metrics = mesh.http.get(f"{mesh.url}/metrics").text
    assert f'kvmesh_instance_info{{{labels},stable_name="frontend-1"}} 1.0' in metrics
    request(mesh, "named")
    names = {"frontend-1", "prefill-1"}
    wait_for(lambda: names <= {s.stable_name for s in spans[0].received}, "spans have the names")

"""Traces of requests at real OTLP receivers, and what is kept of requests without a trace."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator, Sequence
from functools import partial

# Any: JSON.
from typing import Any

import pytest

from meshctl.cli import run_command
from meshctl.commands.demo import ReceivedSpan, SpanReceiver
from tests.e2e.extensions import ORACLE, unique_prompt
from tests.kit.processes import MODEL, Mesh, Service
from tests.kit.waiting import wait_for

pytestmark = pytest.mark.slow

# So many that a worker which is stopped at the first one drains before the last one.
TOKENS = 700
UNSAMPLED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"}
DECISION = ["kv_router.compute_block_hashes", "kv_router.find_matches", "kv_router.schedule"]
LEG = "engine.generate"


@pytest.fixture(scope="module")
def dead() -> Iterator[str]:
    """An endpoint that refuses connections."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def mesh(
    tmp_path_factory: pytest.TempPathFactory, spans: tuple[SpanReceiver, str], dead: str
) -> Iterator[Mesh]:
    traced = [f"--otlp-endpoint={dead},{spans[1]}", "--trace-sample-ratio=1"]
    with Mesh(
        tmp_path_factory.mktemp("mesh"),
        workers=0,
        prefill=1,
        decode=2,
        frontends=2,
        worker_flags=["--speedup=1", "--drain-s=0.3", "--metrics-port=0", *traced],
        router_flags=traced,
        frontend_flags=["--trust-traceparent", *traced],
        named=True,
    ) as mesh:
        yield mesh


class Commands:
    """Commands on the mesh, in this process."""

    def __init__(self, mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
        self._variables = {"KVMESH_REGISTRY_PATH": str(mesh.folder / "registry")}
        self._capsys = capsys

    def run(self, *words: str) -> str:
        self._capsys.readouterr()
        status = run_command(words, self._variables)
        shown = self._capsys.readouterr()
        assert status == 0, shown
        return shown.out

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json"))


@pytest.fixture
def commands(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(mesh, capsys)


def of_trace(spans: SpanReceiver, trace_id: str) -> list[ReceivedSpan]:
    return [span for span in spans.received if span.span.trace_id.hex() == trace_id]


def names(spans: Sequence[ReceivedSpan]) -> list[str]:
    return sorted(span.span.name for span in spans)


def stream_and_drain(mesh: Mesh, client_id: str, prompt: list[int]) -> tuple[str, Service]:
    """The text of a response, and its decode worker, which is stopped at the first chunk."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
    text, stopped = "", None
    url, headers = f"{mesh.url}/v1/completions", {"x-request-id": client_id}
    with mesh.http.stream("POST", url, json=body | {"stream": True}, headers=headers) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if stopped is None:
                (stopped,) = [worker for worker in mesh.of_kind("decode") if worker.open_slots()]
                stopped.send(signal.SIGTERM)
    assert stopped is not None
    return text, stopped


def test_the_trace_of_a_split_and_migrated_request_is_a_tree_with_links(
    mesh: Mesh, spans: tuple[SpanReceiver, str], commands: Commands
) -> None:
    mesh.spawn("decode").wait_ready()  # In place of the one that is stopped.
    wait_for(mesh.is_complete, "the frontends see the new worker")
    prompt = unique_prompt()
    text, stopped = stream_and_drain(mesh, "migrated", prompt)
    assert text == ORACLE.completion(prompt, TOKENS, ignore_eos=True).text
    assert stopped.wait() == 0
    trace_id = mesh.request_line("migrated")["trace_id"]
    expected = sorted(["http-request", *DECISION * 2, *[LEG] * 4])
    wait_for(lambda: names(of_trace(spans[0], trace_id)) == expected, "all spans arrive")
    found = of_trace(spans[0], trace_id)

    (root,) = [span for span in found if span.span.name == "http-request"]
    assert (root.service, root.stable_name) == ("frontend", "frontend-1")
    assert root.span.parent_span_id == b""
    assert {span.span.parent_span_id for span in found if span is not root} == {root.span.span_id}
    workers = [root.attribute("x_request_id"), root.attribute("attempts")]
    assert workers == ["migrated", "2"]
    assert root.attribute("migrations") == "1"
    assert root.attribute("gen_ai.usage.output_tokens") == str(TOKENS)

    legs = sorted(
        (span for span in found if span.span.name == LEG),
        key=lambda span: (span.attribute("attempt"), span.attribute("disagg_role") == "decode"),
    )
    (survivor,) = [w for w in mesh.of_kind("decode") if w.name == legs[3].stable_name]
    assert [
        (leg.attribute("attempt"), leg.attribute("disagg_role"), leg.stable_name) for leg in legs
    ] == [
        ("0", "prefill", "prefill-1"),
        ("0", "decode", stopped.name),
        ("1", "prefill", "prefill-1"),
        ("1", "decode", survivor.name),
    ]
    # Decode is linked to its prefill, and the new attempt to what failed before it.
    ids = [leg.span.span_id for leg in legs]
    assert [[link.span_id for link in leg.span.links] for leg in legs] == [
        [],
        [ids[0]],
        [ids[1]],
        [ids[2]],
    ]
    assert {link.trace_id.hex() for leg in legs for link in leg.span.links} == {trace_id}
    assert legs[3].attribute("finish_reason") == "length"
    # The prompt of the new attempt has the tokens that the client already has. The worker may have
    # generated more than arrived.
    sent, rest = (int(leg.attribute("gen_ai.usage.output_tokens")) for leg in (legs[1], legs[3]))
    received = int(legs[3].attribute("input_tokens")) - len(prompt)
    assert received + rest == TOKENS
    assert sent >= received

    placed = [span for span in found if span.span.name == DECISION[-1]]
    assert {span.service for span in placed} == {"router"}
    decode_ids = [span.attribute("worker_id") for span in placed]
    assert sorted(decode_ids) == sorted(str(w.instance_id) for w in (stopped, survivor))
    (prefill,) = mesh.of_kind("prefill")
    assert {span.attribute("prefill_worker_id") for span in placed} == {str(prefill.instance_id)}

    (record,) = commands.json("requests", "--limit=1")["requests"]
    assert (record["request_id"], record["trace_id"]) == (root.attribute("request_id"), trace_id)
    assert (record["attempts"], record["migrations"]) == (2, 1)
    assert [worker["name"] for worker in record["workers"]][2:] == ["prefill-1", survivor.name]


def test_an_unsampled_request_shows_its_timing_and_why_this_worker(
    mesh: Mesh, spans: tuple[SpanReceiver, str], commands: Commands
) -> None:
    prompt = unique_prompt()
    for client_id in ("warm", "unsampled"):
        response = mesh.post_completion(client_id, prompt, max_tokens=4, headers=UNSAMPLED)
        assert response.status_code == 200
    assert "trace_id" not in mesh.request_line("unsampled")
    (record,) = commands.json("requests", "--limit=1")["requests"]
    assert (record["client_request_id"], record["trace_id"]) == ("unsampled", "")
    assert (record["prompt_tokens"], record["output_tokens"]) == (len(prompt), 4)
    # The last block is computed again, for the logits of the last token.
    assert record["cached_tokens"] > 0
    assert "predicted_cached_tokens" in record
    points = ("tokenized_ms", "routed_ms", "prefilled_ms", "first_token_ms", "last_token_ms")
    times = [record[name] for name in points]
    assert times == sorted(times)
    assert record["router_name"] == "router-1"
    assert [worker["role"] for worker in record["workers"]] == ["prefill", "decode"]
    assert record["reasons"]

    explained = commands.json("explain", "unsampled")
    assert explained["request_id"] == record["request_id"]
    assert explained["decision"]["reasons"] == record["reasons"]
    trace = commands.json("trace", f"cmpl-{record['request_id']}")
    assert trace["source"] == "recent requests of frontend-1"
    assert [span["name"] for span in trace["spans"][1:]] == [
        *("tokenize", "wait for a worker", "prefill", "handoff", "output"),
    ]
    assert not of_trace(spans[0], "a" * 32)


def test_the_requests_of_all_frontends_are_joined_and_filtered(
    mesh: Mesh, commands: Commands
) -> None:
    for url, client_id in zip(mesh.urls, ("first", "second"), strict=True):
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
        mesh.http.post(f"{url}/v1/completions", json=body, headers={"x-request-id": client_id})
    assert mesh.post_completion("refused", model="unknown").status_code == 404
    found = commands.json("requests", "--limit=3")
    assert found["problems"] == []
    assert [
        (record["client_request_id"], record["frontend"]["name"]) for record in found["requests"]
    ] == [("refused", "frontend-1"), ("second", "frontend-2"), ("first", "frontend-1")]
    (refused, *_) = commands.json("requests", "--failed")["requests"]
    assert (refused["status"], refused["model"], refused["workers"]) == (404, "unknown", [])
    assert refused["failure"]
    of_model = commands.json("requests", "--model=unknown")["requests"]
    assert {record["model"] for record in of_model} == {"unknown"}
    header, *rows = commands.run("requests", "--limit=2").splitlines()
    assert header.split()[:4] == ["RECEIVED", "REQUEST", "MODEL", "TENANT"]
    assert "404" in rows[0]
    assert "prefill-1 -> decode-" in rows[1]


def test_a_dead_endpoint_loses_its_own_spans_and_they_are_counted(
    mesh: Mesh, spans: tuple[SpanReceiver, str], dead: str
) -> None:
    sent = mesh.post_completion("counted")
    assert sent.status_code == 200

    def count(service: Service, result: str, endpoint: str) -> float:
        sample = f'kvmesh_spans_{result}_total{{endpoint="{endpoint}"}}'
        if service.service_name != "frontend":
            return service.metric(sample)
        (line,) = [
            line
            for line in mesh.http.get(f"{mesh.url}/metrics").text.splitlines()
            if line.startswith(sample)
        ]
        return float(line.split()[-1])

    def has_counted(service: Service) -> bool:
        return bool(count(service, "dropped", dead) and count(service, "exported", spans[1]))

    for service in (mesh.frontend, mesh.of_kind("prefill")[0]):
        wait_for(
            partial(has_counted, service),
            f"{service.name} has exported its spans to one endpoint and lost those of the other",
        )
        assert count(service, "exported", dead) == 0
        assert count(service, "dropped", spans[1]) == 0

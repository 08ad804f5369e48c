"""`nvext` holds after a worker died in the middle of a response: the request continues within its
limits, or ends with an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest

from meshctl.commands.demo import SpanReceiver
from tests.e2e.extensions import NUMBERS, ORACLE, Json, explain, unique_prompt, worker_spans
from tests.kit.processes import MODEL, Mesh, Service, mesh_fixture

pytestmark = pytest.mark.slow

TOKENS = 150


mesh = mesh_fixture(workers=4, worker_flags=["--speedup=1"])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("pairs")
    with Mesh(folder, workers=0, prefill=1, decode=4, worker_flags=["--speedup=1"]) as mesh:
        yield mesh


@dataclass
class Reply:
    """A stream whose worker was killed at the first chunk. workers: those that received it."""

    killed: str
    text: str
    last: Json
    workers: list[str]


def stream_and_kill(mesh: Mesh, prompt: list[int], kind: str, **nvext: object) -> Reply:
    name = f"migrated-{next(NUMBERS)}"
    body: Json = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"stream": True, "nvext": nvext}
    reply = Reply("", "", {}, [])
    headers = {"x-request-id": name}
    url = f"{mesh.url}/v1/completions"
    with mesh.http.stream("POST", url, json=body, headers=headers) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            reply.last = json.loads(line.removeprefix("data: "))
            reply.text += "" if "error" in reply.last else reply.last["choices"][0]["text"]
            if not reply.killed:
                (busy,) = [worker for worker in mesh.of_kind(kind) if worker.open_slots()]
                busy.kill()
                reply.killed = str(busy.instance_id)
    reply.workers = mesh.request_line(name)["workers"]
    return reply


def ids(workers: list[Service]) -> list[str]:
    return [str(worker.instance_id) for worker in workers]


@pytest.mark.row("S2-14", "S2-45", "S2-86")
def test_a_response_continues_on_an_allowed_worker_with_its_cost_and_extra_fields(
    mesh: Mesh,
) -> None:
    prompt, allowed = unique_prompt(), ids(mesh.workers)[:2]
    reply = stream_and_kill(
        mesh,
        prompt,
        "worker",
        allowed_worker_ids=allowed,
        router_config_override={"prefill_load_scale": 0},
        extra_fields=["worker_id", "completion_token_ids", "timing"],
    )
    (other,) = {*allowed} - {reply.killed}
    assert reply.workers == [reply.killed, other]
    assert reply.text == ORACLE.completion(prompt, TOKENS, ignore_eos=True).text
    nvext = reply.last["nvext"]
    assert nvext["worker_id"] == {"decode_worker_id": other, "decode_dp_rank": 0}
    assert nvext["completion_token_ids"] == ORACLE.tokens(prompt, TOKENS)
    assert nvext["timing"]["ttft_ms"] < nvext["timing"]["total_time_ms"]
    # Of the second attempt.
    decision = explain(mesh, reply.last["id"])
    assert str(decision.decision.worker.worker_id) == other
    assert {row.terms["prefill"] for row in decision.candidates if row.terms} == {0}


@pytest.mark.row("S2-21", "S2-22", "S2-23", "S2-25", "S2-47")
def test_the_span_of_a_retry_links_to_that_of_the_attempt_before(
    start: Callable[..., AbstractContextManager[Mesh]], spans: tuple[SpanReceiver, str]
) -> None:
    traced = [f"--otlp-endpoint={spans[1]}", "--trace-sample-ratio=1"]
    flags = ["--speedup=1", *traced]
    with start(workers=2, worker_flags=flags, frontend_flags=traced) as mesh:
        prompt = unique_prompt()
        reply = stream_and_kill(mesh, prompt, "worker")
        assert reply.text == ORACLE.completion(prompt, TOKENS, ignore_eos=True).text
        # The span of the killed worker is lost; the frontend chose its id.
        (span,) = worker_spans(spans, reply.last["id"])
        assert span.attribute("attempt") == "1"
        (link,) = span.span.links
        assert link.trace_id == span.span.trace_id
        assert len(link.span_id) == 8
        assert link.span_id not in (span.span.span_id, span.span.parent_span_id)
        assert span.attribute("migration_span_id") == link.span_id.hex()


@pytest.mark.row("S2-05", "S2-14")
@pytest.mark.parametrize("field", ["backend_instance_id", "allowed_worker_ids"])
def test_without_another_worker_of_its_ids_the_response_ends_with_the_field(
    mesh: Mesh, field: str
) -> None:
    worker = ids(mesh.workers)[0]
    value = [worker] if field == "allowed_worker_ids" else worker
    reply = stream_and_kill(mesh, unique_prompt(), "worker", **{field: value})
    assert reply.killed == worker
    assert reply.last["error"]["param"] == f"nvext.{field}"
    assert reply.last["error"]["code"] == "unavailable"


@pytest.mark.row("S2-14")
def test_a_pair_continues_with_an_allowed_decode_worker(pairs: Mesh) -> None:
    prompt, (prefill,) = unique_prompt(), ids(pairs.of_kind("prefill"))
    decode = ids(pairs.of_kind("decode"))[:2]
    reply = stream_and_kill(
        pairs,
        prompt,
        "decode",
        allowed_worker_ids=[prefill, *decode],
        extra_fields=["worker_id", "completion_token_ids"],
    )
    (other,) = {*decode} - {reply.killed}
    assert reply.workers == [prefill, reply.killed, prefill, other]
    assert reply.text == ORACLE.completion(prompt, TOKENS, ignore_eos=True).text
    assert reply.last["nvext"] == {
        "worker_id": {
            "prefill_worker_id": prefill,
            "prefill_dp_rank": 0,
            "decode_worker_id": other,
            "decode_dp_rank": 0,
        },
        "completion_token_ids": ORACLE.tokens(prompt, TOKENS),
    }


@pytest.mark.row("S2-07")
def test_a_pair_whose_pinned_decode_worker_dies_ends_with_the_field(pairs: Mesh) -> None:
    decode = ids(pairs.of_kind("decode"))[0]
    reply = stream_and_kill(pairs, unique_prompt(), "decode", decode_worker_id=decode)
    assert reply.killed == decode
    assert reply.last["error"]["param"] == "nvext.decode_worker_id"

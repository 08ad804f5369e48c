"""`nvext.extra_fields` and `nvext.annotations`: what a response has, and requests for a placement
only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import grpc
import pytest

from meshctl.commands.demo import SpanReceiver
from tests.e2e.extensions import (
    BLOCK,
    ORACLE,
    Json,
    chat_body,
    complete,
    explain,
    ids,
    post,
    refusal,
    request_span,
    stream,
    unique_prompt,
    worker_spans,
)
from tests.kit.processes import MODEL, Mesh
from tests.kit.sdk import open_sdk_client
from tests.kit.waiting import wait_for

pytestmark = pytest.mark.slow

TIMES = ("prefill_wait_time_ms", "prefill_time_ms", "ttft_ms", "total_time_ms")
ALL_FIELDS = ["worker_id", "timing", "kv_hit", "token_ids", "completion_token_ids"]
MARKS = ["request_id", "formatted_prompt", "token_ids", "llm_metrics", "user:7"]


@pytest.fixture(scope="module")
def mesh(
    tmp_path_factory: pytest.TempPathFactory, spans: tuple[SpanReceiver, str]
) -> Iterator[Mesh]:
    traced = [f"--otlp-endpoint={spans[1]}", "--trace-sample-ratio=1"]
    with Mesh(
        tmp_path_factory.mktemp("mesh"),
        workers=2,
        indexers=1,
        worker_flags=["--speedup=20", *traced],
        frontend_flags=traced,
    ) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh of prefill and decode workers."""
    folder = tmp_path_factory.mktemp("pairs")
    with Mesh(folder, workers=0, prefill=2, decode=2, worker_flags=["--speedup=20"]) as mesh:
        yield mesh


def accepted(mesh: Mesh) -> int:
    return sum(worker.counters().get("accepted", 0) for worker in mesh.workers)


# -- extra fields -------------------------------------------------------------------------------


@pytest.mark.row("S2-54", "S2-80")
def test_extra_fields_report_worker_times_cache_and_token_ids(mesh: Mesh) -> None:
    prompt = unique_prompt(4)
    before_ms = time.time() * 1000
    request: Json = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    request["nvext"] = {"extra_fields": ALL_FIELDS}
    response = post(mesh, "completions", request, "timed")
    nvext, line = response["nvext"], mesh.request_line("timed")
    assert list(nvext) == ALL_FIELDS
    assert nvext["worker_id"] == {"decode_worker_id": line["workers"][0], "decode_dp_rank": 0}
    timing = nvext["timing"]
    assert set(timing) == {"request_received_ms", *TIMES, "kv_hit_rate"}
    assert before_ms - 1 <= timing["request_received_ms"] <= time.time() * 1000 + 1
    parts = timing["prefill_wait_time_ms"] + timing["prefill_time_ms"]
    assert 0 < timing["prefill_wait_time_ms"] < parts
    assert parts == pytest.approx(timing["ttft_ms"], abs=20)
    assert timing["ttft_ms"] < timing["total_time_ms"]
    for name in TIMES[:2]:
        assert line[name] == pytest.approx(timing[name], abs=0.1)
    assert (nvext["token_ids"], timing["kv_hit_rate"]) == (prompt, 0)
    assert nvext["completion_token_ids"] == ORACLE.tokens(prompt, 8)
    hit = {"block_size": BLOCK, "prompt_blocks": 4}
    assert nvext["kv_hit"] == hit | {
        "overlap_blocks": 0,
        "predicted_cached_tokens": 0,
        "cached_tokens": 0,
    }

    def with_hit() -> Json | None:
        later: Json = post(mesh, "completions", request)["nvext"]
        return later if later["kv_hit"]["overlap_blocks"] else None

    later = wait_for(with_hit, "the router knows the blocks")
    assert later is not None
    assert later["kv_hit"] == hit | {
        "overlap_blocks": 4,
        "predicted_cached_tokens": 3 * BLOCK,
        "cached_tokens": 3 * BLOCK,
    }
    assert later["timing"]["kv_hit_rate"] == 1


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_has_the_extra_fields_beside_the_finish_reason(
    mesh: Mesh, path: str, *, include_usage: bool
) -> None:
    body = chat_body(kvmesh={"extra_fields": ALL_FIELDS})
    if path == "completions":
        del body["messages"]
        body["prompt"] = unique_prompt()
    whole = post(mesh, path, body)["nvext"]
    options: Json = {"stream_options": {"include_usage": True}} if include_usage else {}
    _, chunks = stream(mesh, path, body | options)
    (chunk,) = [chunk for chunk in chunks if "nvext" in chunk]
    assert chunk["choices"][0]["finish_reason"] == "length"
    assert list(chunk["nvext"]) == ALL_FIELDS
    for name in ("token_ids", "completion_token_ids"):
        assert chunk["nvext"][name] == whole[name]
    assert chunk["nvext"]["timing"].keys() == whole["timing"].keys()
    assert list(post(mesh, path, body | {"kvmesh": {"extra_fields": ["timing"]}})["nvext"]) == [
        "timing"
    ]
    assert "nvext" not in post(mesh, path, body | {"kvmesh": None})


def test_the_responses_api_has_the_extra_fields_too(mesh: Mesh) -> None:
    body: Json = {"model": MODEL, "input": "Hi", "nvext": {"extra_fields": ["worker_id"]}}
    whole = post(mesh, "responses", body)
    assert whole["nvext"]["worker_id"]["decode_worker_id"] in ids(mesh)
    url = f"{mesh.url}/v1/responses"
    with mesh.http.stream("POST", url, json=body | {"stream": True}) as response:
        data = [line for line in response.iter_lines() if line.startswith("data: ")]
    last = json.loads(data[-1].removeprefix("data: "))
    assert last["response"]["nvext"]["worker_id"]["decode_worker_id"] in ids(mesh)


def test_completion_token_ids_end_with_the_stop_string(mesh: Mesh) -> None:
    prompt = unique_prompt()
    tokens = ORACLE.tokens(prompt, 6)
    response = post(
        mesh,
        "completions",
        {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 40,
            "stop": [ORACLE.decode(tokens[3:4])],
            "nvext": {"extra_fields": ["completion_token_ids"]},
        },
    )
    count = response["usage"]["completion_tokens"]
    assert count < 40
    assert response["nvext"] == {"completion_token_ids": tokens[:count]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nvext": {"extra_fields": ["routed_experts"]}}, "nvext.extra_fields[0]"),
        ({"nvext": {"extra_fields": ["timing"]}, "n": 2}, "nvext.extra_fields"),
        ({"nvext": {"annotations": ["llm_metrics"]}, "n": 2}, "nvext.annotations"),
        ({"nvext": {"annotations": ["query_instance_id"]}, "n": 2}, "nvext.annotations"),
        # The prompt is a list of token ids.
        ({"nvext": {"annotations": ["formatted_prompt"]}}, "nvext.annotations"),
        ({"nvext": {"annotations": [""]}}, "nvext.annotations[0]"),
        ({"kvmesh": {"annotations": ["request_id"]}, "n": 2}, "kvmesh.annotations"),
    ],
)
def test_an_extension_that_cannot_apply_is_refused(mesh: Mesh, fields: Json, param: str) -> None:
    assert refusal(mesh, **fields)["param"] == param


# -- annotations --------------------------------------------------------------------------------


def test_annotations_are_comments_of_a_stream_and_values_of_a_whole_response(mesh: Mesh) -> None:
    body = chat_body(nvext={"annotations": MARKS})
    whole = post(mesh, "chat/completions", body)
    values = whole["nvext"]["annotations"]
    assert list(values) == MARKS[:4]
    assert body["messages"][0]["content"] in values["formatted_prompt"]
    assert values["formatted_prompt"].startswith("<|im_start|>")
    prompt = ORACLE.encode(values["formatted_prompt"], special_tokens=False)
    assert values["token_ids"] == prompt
    assert whole["id"] == f"chatcmpl-{values['request_id']}"
    usage = whole["usage"]
    assert values["llm_metrics"] == {
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }
    comments, chunks = stream(mesh, "chat/completions", body)
    named = {name: json.loads(value) for name, _, value in (one.partition(" ") for one in comments)}
    assert list(named) == MARKS[:4]
    assert chunks[0]["id"] == f"chatcmpl-{named['request_id']}"
    for name in ("formatted_prompt", "token_ids"):
        assert named[name] == values[name]
    assert named["llm_metrics"]["output_tokens"] == 8
    assert not any("nvext" in chunk for chunk in chunks)


async def test_a_client_that_reads_no_comments_sees_an_ordinary_stream(mesh: Mesh) -> None:
    extra = {"nvext": {"annotations": MARKS, "extra_fields": ALL_FIELDS}, "ignore_eos": True}
    messages: Any = [{"role": "user", "content": "Hi"}]
    async with open_sdk_client(mesh) as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=8, stream=True, extra_body=extra
            )
        ]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].model_extra is not None
    assert list(chunks[-1].model_extra["nvext"]) == ALL_FIELDS


@pytest.mark.row("S2-43")
def test_annotations_are_in_the_log_line_and_in_the_spans_of_frontend_and_worker(
    mesh: Mesh, spans: tuple[SpanReceiver, str]
) -> None:
    response = mesh.post_completion("marked", "hi", nvext={"annotations": ["user:7", "a:b:c"]})
    assert response.status_code == 200, response.text
    assert mesh.request_line("marked")["annotations"] == ["user:7", "a:b:c"]
    (worker_span,) = worker_spans(spans, response.json()["id"])
    for span in (request_span(spans, "marked"), worker_span):
        for mark in ("user:7", "a:b:c"):
            assert f'"{mark}"' in span.attribute("annotations")
    assert mesh.post_completion("plain", "hi", nvext={"annotations": []}).status_code == 200
    assert "annotations" not in mesh.request_line("plain")


# -- only the placement -------------------------------------------------------------------------


@pytest.mark.row("S2-58", "S2-59", "S2-60", "S2-61")
@pytest.mark.parametrize("mark", ["query_instance_id", "query_instance_id:"])
def test_a_query_returns_the_placement_and_runs_and_books_nothing(mesh: Mesh, mark: str) -> None:
    before = accepted(mesh)
    body = chat_body(nvext={"annotations": [mark]})
    for _ in range(5):
        response = post(mesh, "chat/completions", body)
        nvext = response["nvext"]
        assert set(nvext) == {"worker_id", "kv_hit", "token_ids"}
        assert nvext["worker_id"]["decode_worker_id"] in ids(mesh)
        assert response["choices"][0]["message"]["content"] in (None, "")
        assert response["usage"]["completion_tokens"] == 0
        assert len(nvext["token_ids"]) == response["usage"]["prompt_tokens"]
        assert mesh.router.bookings() == 0
    _, chunks = stream(mesh, "chat/completions", body)
    assert set(chunks[-1]["nvext"]) == set(nvext)
    with pytest.raises(grpc.RpcError) as unknown:
        explain(mesh, response["id"])
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert accepted(mesh) == before
    # A placement has no form.
    formed = body | {"response_format": {"type": "json_object"}, "ignore_eos": False}
    assert set(post(mesh, "chat/completions", formed)["nvext"]) == set(nvext)
    # A client may send the ids in place of the messages, and does not receive them then.
    token_data = {"nvext": {"token_data": nvext["token_ids"], "annotations": [mark]}}
    assert set(post(mesh, "chat/completions", body | token_data)["nvext"]) == {
        "worker_id",
        "kv_hit",
    }


@pytest.mark.row("S2-58", "S2-59", "S2-60", "S2-61")
def test_only_the_exact_name_of_an_annotation_counts(mesh: Mesh) -> None:
    before = accepted(mesh)
    other_names = ["query_instance_idx:1", "query_instance", "a:query_instance_id"]
    assert complete(mesh, annotations=other_names)[0]["usage"]["completion_tokens"] == 2
    assert accepted(mesh) == before + 1
    # The value is all after the first colon; the first annotation with the name counts.
    with_value = ["query_instance_id:a:b", "query_instance_id:"]
    error = refusal(mesh, nvext={"annotations": with_value})
    assert error["param"] == "nvext.annotations"
    assert "'a:b'" in error["message"]
    response = mesh.post_completion("first", "hi", nvext={"annotations": with_value[::-1]})
    assert response.json()["usage"]["completion_tokens"] == 0
    assert accepted(mesh) == before + 1


# -- prefill and decode -------------------------------------------------------------------------


def test_a_request_with_the_ids_of_a_query_runs_on_that_pair(pairs: Mesh) -> None:
    for number in range(6):
        query = {"annotations": ["query_instance_id"]}
        placement = post(pairs, "chat/completions", chat_body(nvext=query))["nvext"]["worker_id"]
        assert set(placement) == {
            *("prefill_worker_id", "prefill_dp_rank", "decode_worker_id", "decode_dp_rank")
        }
        assert pairs.router.bookings() == 0
        pins = {
            "prefill_worker_id": placement["prefill_worker_id"],
            "prefill_dp_rank": placement["prefill_dp_rank"],
            "decode_worker_id": placement["decode_worker_id"],
            "dp_rank": placement["decode_dp_rank"],
        }
        body = chat_body(nvext=pins | {"extra_fields": ["worker_id", "timing"]})
        nvext = post(pairs, "chat/completions", body, f"pair-{number}")["nvext"]
        assert nvext["worker_id"] == placement
        assert pairs.request_line(f"pair-{number}")["workers"] == [
            placement["prefill_worker_id"],
            placement["decode_worker_id"],
        ]
        timing = nvext["timing"]
        assert timing["prefill_time_ms"] > 0
        assert timing["prefill_wait_time_ms"] + timing["prefill_time_ms"] <= timing["ttft_ms"] + 20


@pytest.mark.row("S2-08", "S2-09")
@pytest.mark.parametrize("field", ["dp_rank", "prefill_dp_rank"])
def test_a_rank_that_no_worker_of_the_leg_has_is_refused_by_its_name(
    pairs: Mesh, field: str
) -> None:
    body: Json = chat_body(nvext={field: 0})
    assert post(pairs, "chat/completions", body)["usage"]["completion_tokens"] > 0
    error = refusal(pairs, nvext={field: 1})
    assert error["param"] == f"nvext.{field}"
    assert "data-parallel rank 1" in error["message"]


@pytest.mark.row("S2-14")
def test_both_workers_of_a_pair_are_allowed_ones(pairs: Mesh) -> None:
    (prefill, _), (decode, other) = (
        [str(worker.instance_id) for worker in pairs.of_kind(kind)]
        for kind in ("prefill", "decode")
    )
    for _ in range(5):
        nvext: Json = {"allowed_worker_ids": [prefill, decode], "extra_fields": ["worker_id"]}
        found = post(pairs, "chat/completions", chat_body(nvext=nvext))["nvext"]["worker_id"]
        assert (found["prefill_worker_id"], found["decode_worker_id"]) == (prefill, decode)
    nvext = {"allowed_worker_ids": [prefill], "prefill_worker_id": prefill}
    response = pairs.http.post(f"{pairs.url}/v1/chat/completions", json=chat_body(nvext=nvext))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (503, "nvext.allowed_worker_ids")
    # Without a prefill worker among them, a decode worker serves the whole request.
    nvext = {"allowed_worker_ids": [other], "extra_fields": ["worker_id"]}
    found = post(pairs, "chat/completions", chat_body(nvext=nvext))["nvext"]["worker_id"]
    assert found == {"decode_worker_id": other, "decode_dp_rank": 0}


@pytest.mark.row("S2-26", "S2-27", "S2-46", "S2-90")
def test_the_span_of_decode_has_the_cache_hit_of_its_prefill(
    start: Callable[..., AbstractContextManager[Mesh]], spans: tuple[SpanReceiver, str]
) -> None:
    traced = [f"--otlp-endpoint={spans[1]}", "--trace-sample-ratio=1"]
    flags = ["--speedup=20", "--handoff=completed", *traced]
    with start(workers=0, prefill=1, decode=1, worker_flags=flags, frontend_flags=traced) as mesh:
        body: Json = {"model": MODEL, "prompt": unique_prompt(4), "max_tokens": 8}
        for cached in (0, 3 * BLOCK):
            response = post(mesh, "completions", body)
            usage = response["usage"]["prompt_tokens_details"]
            assert usage["cached_tokens"] == cached
            wait_for(lambda: len(worker_spans(spans, response["id"])) == 2, "both spans")  # noqa: B023
            hits = {
                span.attribute("disagg_role"): span.attribute(
                    "gen_ai.usage.cache_read.input_tokens"
                )
                for span in worker_spans(spans, response["id"])
            }
            assert hits == {"prefill": str(cached), "decode": str(cached)}


@pytest.mark.row("S2-45")
def test_settings_of_the_cost_apply_to_the_prefill_of_a_pair(pairs: Mesh) -> None:
    body = chat_body(nvext={"router_config_override": {"prefill_load_scale": 0}})
    rows = explain(pairs, post(pairs, "chat/completions", body)["id"]).candidates
    assert {row.leg for row in rows} == {"prefill", "decode"}
    assert {row.terms["prefill"] for row in rows if row.leg == "prefill"} == {0}
    rows = explain(pairs, post(pairs, "chat/completions", chat_body())["id"]).candidates
    assert all(row.terms["prefill"] > 0 for row in rows if row.leg == "prefill")

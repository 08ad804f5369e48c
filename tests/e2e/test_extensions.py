"""`nvext`, also named `kvmesh`: each field changes a request as `docs/extensions.md` states."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshctl.commands.demo import SpanReceiver
from tests.e2e.extensions import (
    BLOCK,
    NUMBERS,
    ORACLE,
    Json,
    complete,
    explain,
    ids,
    refusal,
    request_span,
    terms,
    unique_prompt,
)
from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mesh(
    tmp_path_factory: pytest.TempPathFactory, spans: tuple[SpanReceiver, str]
) -> Iterator[Mesh]:
    traced = [f"--otlp-endpoint={spans[1]}", "--trace-sample-ratio=1"]
    with Mesh(
        tmp_path_factory.mktemp("mesh"),
        workers=3,
        indexers=1,
        worker_flags=["--speedup=20", *traced],
        router_flags=traced,
        frontend_flags=traced,
    ) as mesh:
        yield mesh


# -- the object and its names -------------------------------------------------------------------


def test_kvmesh_is_another_name_of_nvext(mesh: Mesh) -> None:
    for worker in ids(mesh):
        for alias in ("nvext", "kvmesh"):
            assert complete(mesh, alias=alias, backend_instance_id=worker)[1] == worker
    responses = mesh.http.post(
        f"{mesh.url}/v1/responses",
        json={"model": MODEL, "input": "Hi", "kvmesh": {"backend_instance_id": ids(mesh)[0]}},
        headers={"x-request-id": "responses-alias"},
    )
    assert responses.status_code == 200, responses.text
    assert mesh.request_line("responses-alias")["workers"] == ids(mesh)[:1]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_body_with_both_names_is_refused_with_both(mesh: Mesh, path: str) -> None:
    prompt = {"input": "Hi", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    field = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}[path]
    body = {"model": MODEL, field: prompt[field], "nvext": {}, "kvmesh": {}}
    response = mesh.http.post(f"{mesh.url}/v1/{path}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "kvmesh")
    assert "'nvext'" in error["message"]
    assert "'kvmesh'" in error["message"]


def test_errors_use_the_name_in_the_body(mesh: Mesh) -> None:
    assert refusal(mesh, kvmesh={"nonsense": 1})["param"] == "kvmesh.nonsense"
    name = f"gone-{next(NUMBERS)}"
    response = mesh.post_completion(name, "hi", kvmesh={"backend_instance_id": 12})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (503, "kvmesh.backend_instance_id")
    assert mesh.request_line(name)["param"] == "kvmesh.backend_instance_id"


# -- placement ----------------------------------------------------------------------------------


@pytest.mark.row("S2-14")
def test_only_allowed_workers_serve_a_request(mesh: Mesh) -> None:
    one, two, three = ids(mesh)
    for worker in (one, two, three):
        assert complete(mesh, allowed_worker_ids=[worker])[1] == worker
    for _ in range(8):
        body, worker = complete(mesh, allowed_worker_ids=[one, int(three)])
        assert worker != two
        (row,) = [c for c in explain(mesh, body["id"]).candidates if c.excluded_reason]
        assert (row.worker.worker_id, row.excluded_reason) == (
            int(two),
            "not in allowed_worker_ids",
        )
    for absent in ([], [12]):
        error = refusal(mesh, 503, nvext={"allowed_worker_ids": absent})
        assert error["param"] == "nvext.allowed_worker_ids"


@pytest.mark.row("S2-45", "S2-86", "S1-42")
def test_settings_of_the_cost_apply_to_one_request(mesh: Mesh) -> None:
    prompt = unique_prompt(32)
    _, holder = complete(mesh, prompt, backend_instance_id=ids(mesh)[0])
    wait_for(
        lambda: terms(mesh, complete(mesh, prompt)[0]["id"], holder)["overlap_credit"] > 0,
        "the router knows the cached blocks",
    )

    def of_holder(**override: Any) -> dict[str, float]:
        wait_for(lambda: not mesh.router.bookings(), "no worker has booked load")
        body, _ = complete(mesh, prompt, router_config_override=override)
        return terms(mesh, body["id"], holder)

    plain = of_holder()
    assert of_holder(overlap_score_credit=0)["overlap_credit"] == 0
    assert of_holder(overlap_score_credit=0.5)["overlap_credit"] == plain["overlap_credit"] / 2
    no_credit = of_holder(overlap_score_credit=0)["prefill"]
    # The measured speed of the worker changes between requests.
    assert of_holder(overlap_score_credit=0, prefill_load_scale=3)["prefill"] > 2 * no_credit
    assert of_holder(overlap_score_weight=0)["prefill"] == 0
    assert of_holder(overlap_score_weight=0)["overlap_credit"] == 0
    hot = {"router_temperature": 100.0}
    served = {complete(mesh, prompt, router_config_override=hot)[1] for _ in range(30)}
    assert len(served) > 1
    assert {complete(mesh, prompt)[1] for _ in range(5)} <= served


@pytest.mark.row("S2-45", "S2-86")
def test_settings_of_the_booked_load_apply_to_one_request(mesh: Mesh) -> None:
    worker = ids(mesh)[0]
    body, _ = complete(mesh, backend_instance_id=worker)
    assert explain(mesh, body["id"]).decision.charged_prefill_tokens == 4 * BLOCK
    override = {"track_prefill_tokens": False}
    body, _ = complete(mesh, backend_instance_id=worker, router_config_override=override)
    assert explain(mesh, body["id"]).decision.charged_prefill_tokens == 0
    prompt = unique_prompt(16)
    running: Json = {"model": MODEL, "prompt": prompt, "max_tokens": 4000, "stream": True}
    running |= {"ignore_eos": True, "nvext": {"backend_instance_id": worker}}
    with mesh.http.stream("POST", f"{mesh.url}/v1/completions", json=running) as response:
        next(response.iter_lines())

        def blocks(*, reuse: bool) -> float:
            override = {"assume_kv_reuse": reuse}
            body, _ = complete(mesh, prompt, router_config_override=override)
            return terms(mesh, body["id"], worker)["decode"]

        wait_for(lambda: blocks(reuse=True) < blocks(reuse=False), "cached blocks count once")


@pytest.mark.parametrize(
    ("override", "param"),
    [
        ({"overlap_score_credit": -1}, "overlap_score_credit"),
        ({"router_temperature": "hot"}, "router_temperature"),
        ({"shared_cache_multiplier": 0.5}, "shared_cache_multiplier"),
        ({"overlap_score_weight": 1, "prefill_load_scale": 2}, "overlap_score_weight"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_an_invalid_setting_of_the_cost_is_refused(mesh: Mesh, override: Json, param: str) -> None:
    error = refusal(mesh, nvext={"router_config_override": override})
    assert error["param"] == f"nvext.router_config_override.{param}"


@pytest.mark.row("S2-01", "S2-02", "S2-03", "S2-50")
def test_latency_targets_are_empty_by_default_and_refused_by_name(mesh: Mesh) -> None:
    for targets in (None, {}, {"ttft_target": None, "itl_target": None}, {"ttft_target": 6e7}):
        complete(mesh, router=targets)
    for name in ("ttft_target", "itl_target"):
        for value, code in (
            *(("5", "invalid_type"), (-1, "invalid_value"), (0, "invalid_value")),
            (86_400_001, "invalid_value"),
        ):
            error = refusal(mesh, nvext={"router": {name: value}})
            assert (error["param"], error["code"]) == (f"nvext.router.{name}", code)


@pytest.mark.row("S2-63")
def test_fields_of_the_body_add_to_the_hints_of_nvext_or_create_them(mesh: Mesh) -> None:
    prompt = unique_prompt(4)

    def cached(**fields: Any) -> int:
        response = mesh.post_completion(f"salted-{next(NUMBERS)}", prompt, **fields)
        assert response.status_code == 200, response.text
        count: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    for worker in ids(mesh):
        assert cached(nvext={"backend_instance_id": worker}) == 0
    # All workers have the prompt, without a salt.
    assert cached(cache_salt="a", priority=-1) == 0
    assert cached() == 3 * BLOCK
    pin = {"backend_instance_id": ids(mesh)[1]}
    name = f"pinned-{next(NUMBERS)}"
    response = mesh.post_completion(name, prompt, nvext=pin, cache_salt="b", priority=-1)
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert mesh.request_line(name)["workers"] == ids(mesh)[1:2]
    assert cached(nvext=pin, cache_salt="b") == 3 * BLOCK


# -- records ------------------------------------------------------------------------------------


@pytest.mark.row("S2-51", "S2-84")
def test_the_agent_context_is_in_the_log_line_and_the_span(
    mesh: Mesh, spans: tuple[SpanReceiver, str]
) -> None:
    context = {
        "session_type_id": "coding",
        "session_id": "s-1",
        "trajectory_id": "t-2",
        "parent_trajectory_id": "t-1",
    }
    for part in (context, {"session_id": "s-1"}):
        name = f"agent-{len(part)}"
        response = mesh.post_completion(name, "hi", nvext={"agent_context": part})
        assert response.status_code == 200, response.text
        assert mesh.request_line(name)["agent_context"] == part
        span = request_span(spans, name)
        seen = {key: span.attribute(f"agent_context.{key}") for key in context}
        assert seen == {key: part.get(key, "") for key in context}
    error = refusal(mesh, nvext={"agent_context": {"session_id": ""}})
    assert error["param"] == "nvext.agent_context.session_id"


@pytest.mark.row("S2-53")
def test_the_clients_time_gives_the_delay_to_the_frontend(
    mesh: Mesh, spans: tuple[SpanReceiver, str]
) -> None:
    sent_ms = time.time() * 1000 - 5000.5
    response = mesh.post_completion("delayed", "hi", nvext={"request_timestamp_ms": sent_ms})
    assert response.status_code == 200, response.text
    delay_ms = mesh.request_line("delayed")["client_delay_ms"]
    assert 5000 <= delay_ms < 5000 + WAIT_S * 1000
    assert float(request_span(spans, "delayed").attribute("client_delay_ms")) == delay_ms
    error = refusal(mesh, nvext={"request_timestamp_ms": -1})
    assert error["param"] == "nvext.request_timestamp_ms"


# -- defaults of a model -------------------------------------------------------------------------


def test_a_request_template_fills_fields_that_the_client_leaves_out(
    mesh: Mesh, tmp_path: Path
) -> None:
    template = {"model": MODEL, "temperature": 0, "max_completion_tokens": 5}
    file = tmp_path / "template.json"
    file.write_text(json.dumps(template))
    frontend = mesh.spawn("frontend", f"--request-template={file}").wait_ready()
    url = frontend.addresses["http"]
    wait_for(lambda: mesh.http.get(f"{url}/ready").status_code == 200, "the frontend is ready")
    prompt = unique_prompt()

    def text(url: str, **fields: Any) -> tuple[str, int]:
        body = {"model": MODEL, "prompt": prompt, "ignore_eos": True, **fields}
        response = mesh.http.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        value = response.json()
        return value["choices"][0]["text"], value["usage"]["completion_tokens"]

    # A seed has no effect at temperature 0.
    assert text(url, seed=1) == (ORACLE.completion(prompt, 5, ignore_eos=True).text, 5)
    assert text(url, seed=1, temperature=1) == text(mesh.url, seed=1, max_tokens=5)
    assert text(url, seed=1, temperature=1) != text(url, seed=1)
    assert text(url, max_tokens=3)[1] == 3
    chat: Json = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    for path, body, count in (
        ("chat/completions", chat, "completion_tokens"),
        ("responses", {"model": MODEL, "input": "Hi"}, "output_tokens"),
    ):
        response = mesh.http.post(f"{url}/v1/{path}", json=body).json()
        assert response["usage"][count] <= 5
    frontend.kill()


# -- arguments of engines -----------------------------------------------------------------------


def test_extra_args_are_refused_by_name_if_no_engine_declares_them(mesh: Mesh) -> None:
    error = refusal(mesh, nvext={"extra_args": {"reverse": True}})
    assert (error["param"], error["code"]) == ("nvext.extra_args", "unsupported_parameter")
    complete(mesh, extra_args=None)


@pytest.mark.row("S2-49")
def test_extra_args_reach_an_engine_that_declares_them(
    start: Callable[..., AbstractContextManager[Mesh]],
) -> None:
    prompt = ORACLE.encode("Hello you there", special_tokens=False)

    def text(mesh: Mesh, **fields: Any) -> str:
        response: httpx.Response = mesh.post_completion(
            "echo", prompt, max_tokens=len(prompt), **fields
        )
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    engine = "--engine=tests.e2e.extra_args_engine:make"
    with start(workers=1, worker_flags=[engine]) as mesh:
        assert text(mesh) == ORACLE.decode(prompt)
        assert text(mesh, nvext={"extra_args": {"reverse": True}}) == ORACLE.decode(prompt[::-1])

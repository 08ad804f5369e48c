"""Requests in the shape of applications with their default settings are served by the mesh."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.application_bodies import BODIES, CLAUDE_CODE, GUIDELLM, LM_EVAL, SCHEMA
from tests.kit.processes import MODEL, Mesh, mesh_fixture

pytestmark = pytest.mark.slow

mesh = mesh_fixture(workers=1, worker_flags=["--speedup=0"])


# Any, here and below: JSON.
def send(mesh: Mesh, name: str, **changes: Any) -> httpx.Response:
    path, body = BODIES[name]
    body = {key: value for key, value in (body | changes).items() if value is not ...}
    return mesh.http.post(f"{mesh.url}/v1/{path}", json=body)


def chunks(response: httpx.Response) -> list[Any]:
    """The JSON of the events of a stream."""
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_an_application_is_served(mesh: Mesh, name: str) -> None:
    response = send(mesh, name)
    assert response.status_code == 200, response.text
    if BODIES[name][1].get("stream"):
        assert not [chunk for chunk in chunks(response) if chunk.get("error")]


def test_codex_learns_which_tool_is_left_out(mesh: Mesh) -> None:
    response = send(mesh, "codex")
    assert response.headers["x-kvmesh-omitted-tools"] == "web_search"
    created = chunks(response)[0]["response"]
    assert [tool["type"] for tool in created["tools"]] == ["function", "namespace"]
    alone = send(mesh, "codex", tools=[{"type": "web_search"}])
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "tools[0].type")
    assert "x-kvmesh-omitted-tools" not in send(mesh, "qwen-code").headers


@pytest.mark.parametrize("kind", ["web_search_\r\nx-injected: yes", "web_search_" + "a" * 100])
@pytest.mark.parametrize("name", ["codex", "claude-code"])
def test_the_type_of_a_tool_that_is_left_out_fits_in_a_header(
    mesh: Mesh, name: str, kind: str
) -> None:
    tools = [*BODIES[name][1]["tools"], {"type": kind, "name": "search"}]
    response = send(mesh, name, tools=tools)
    assert "x-injected" not in response.headers
    assert response.status_code == 400
    assert f"tools[{len(tools) - 1}].type" in response.text


def test_a_call_of_a_function_in_a_namespace_names_both(mesh: Mesh) -> None:
    agents = BODIES["codex"][1]["tools"][1]
    response = send(mesh, "codex", tools=[agents], tool_choice="required", stream=False)
    calls = [item for item in response.json()["output"] if item["type"] == "function_call"]
    assert calls
    assert {(call["namespace"], call["name"]) for call in calls} == {("agents_v1", "wait_agent")}


@pytest.mark.parametrize("name", ["guidellm", "guidellm-chat"])
def test_every_chunk_of_a_load_generator_has_the_counts_up_to_it(mesh: Mesh, name: str) -> None:
    *with_choices, last = chunks(send(mesh, name))
    counts = [chunk["usage"]["completion_tokens"] for chunk in with_choices]
    texts = [
        chunk["choices"][0].get("text") or chunk["choices"][0].get("delta", {}).get("content")
        for chunk in with_choices
    ]
    assert counts == sorted(counts)
    assert [count for count, text in zip(counts, texts, strict=True) if text] == list(range(1, 17))
    prompt = last["usage"]["prompt_tokens"]
    for chunk in with_choices:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == prompt
        assert usage["total_tokens"] == prompt + usage["completion_tokens"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 16


def test_the_counts_of_each_choice_are_its_own(mesh: Mesh) -> None:
    *with_choices, last = chunks(send(mesh, "guidellm", n=3, logprobs=0))
    for index in range(3):
        own = [chunk for chunk in with_choices if chunk["choices"][0]["index"] == index]
        assert own[-1]["usage"]["completion_tokens"] == 16
    assert last["usage"]["completion_tokens"] == 48
    plain = chunks(send(mesh, "guidellm", stream_options={"include_usage": True}))
    assert {json.dumps(chunk["usage"]) for chunk in plain[:-1]} == {"null"}


def test_an_evaluation_harness_gets_the_probabilities_of_its_continuations(mesh: Mesh) -> None:
    choices = send(mesh, "lm-eval").json()["choices"]
    for prompt, choice in zip(LM_EVAL["prompt"], choices, strict=True):
        arrays = choice["logprobs"]
        assert len(arrays["token_logprobs"]) == len(prompt) + 1
        assert (arrays["token_logprobs"][0], arrays["top_logprobs"][0]) == (None, None)
        values, tops = arrays["token_logprobs"][1:], arrays["top_logprobs"][1:]
        for value, top in zip(values, tops, strict=True):
            assert value <= max(top.values()) <= 0


def test_constraints_of_outlines_hold(mesh: Mesh) -> None:
    def content(name: str) -> str:
        text: str = send(mesh, name).json()["choices"][0]["message"]["content"]
        return text

    jsonschema.validate(json.loads(content("outlines-vllm")), SCHEMA)
    for name in ("outlines-vllm-regex", "outlines-sglang", "outlines-sglang-grammar"):
        assert content(name) in ("Bern", "Rome")


def test_an_agent_reads_the_numbers_of_a_context_that_is_exceeded(mesh: Mesh) -> None:
    context = mesh.http.get(f"{mesh.url}/v1/models").json()["data"][0]["max_model_len"]
    assert context == 131_072
    prompt = {name: CLAUDE_CODE[name] for name in ("model", "messages", "system", "tools")}
    counted = mesh.http.post(f"{mesh.url}/v1/messages/count_tokens", json=prompt)
    count = counted.json()["input_tokens"]
    response = send(mesh, "claude-code", max_tokens=context)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    text = f"exceed context limit: {count} + {context} > {context}"
    assert text in error["message"]
    assert send(mesh, "claude-code", max_tokens=context - count).status_code == 200
    long = [{"role": "user", "content": "able about " * context}]
    response = send(mesh, "claude-code", messages=long)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("prompt is too long: ")
    response = send(mesh, "qwen-code", max_tokens=context)
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"This model's maximum context length is {context} tokens.")


def test_the_context_of_the_sim_can_be_set(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("small")
    with Mesh(folder, workers=1, worker_flags=["--context-length=4096"]) as small:
        assert send(small, "claude-code").status_code == 400
        assert send(small, "claude-code", max_tokens=1000).status_code == 200


def test_an_option_that_would_change_the_response_is_still_refused_by_name(mesh: Mesh) -> None:
    for name, value in (
        ("use_beam_search", True),
        ("continue_final_message", True),
        ("truncate_prompt_tokens", 4),
        ("documents", [{"text": "a"}]),
        ("session", "a"),
    ):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], name: value}
        response = mesh.http.post(f"{mesh.url}/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_a_load_generator_without_usage_gets_none(mesh: Mesh) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert not [c for c in chunks(send(mesh, "guidellm", stream_options=options)) if "usage" in c]
    assert GUIDELLM["stream_options"]["include_usage"]

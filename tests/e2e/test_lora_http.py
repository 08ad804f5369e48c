"""Adapters over HTTP: named like models, placed on workers that have them, with KV of their own.

One worker of the model has no adapter, one has two; another model has one of the same name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.kit.processes import MODEL, Mesh, Service
from tests.kit.sdk import open_sdk_client
from tests.kit.waiting import wait_for
from worker_svc.engines.sim.config import SIM_MODEL_DIR, load_sim_model
from worker_svc.engines.sim.token_oracle import TokenOracle

SPEEDUP_FLAG = "--speedup=20"
OTHER_MODEL = "zebra"
BLOCK_SIZE = 16
ADAPTERS = ("french", "german")
UNIQUE_NUMBERS = count(1)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    flags = ["--worker-wait-s=0.5"]
    worker_flags = [SPEEDUP_FLAG, "--context-length=32768"]
    with Mesh(
        folder, workers=1, indexers=1, worker_flags=worker_flags, frontend_flags=flags
    ) as mesh:
        mesh.spawn("worker", "--loras=french,german").wait_ready()
        other = [f"--model-name={OTHER_MODEL}", f"--loras=french,{MODEL},swahili"]
        mesh.spawn("worker", *other).wait_ready()
        wait_for(mesh.is_complete, "the frontend sees all workers")
        wait_for(
            lambda: {MODEL, OTHER_MODEL, *ADAPTERS, "swahili"} == listed_models(mesh).keys(),
            "all models are listed",
        )
        yield mesh


def listed_models(mesh: Mesh) -> dict[str, dict[str, Any]]:
    models = mesh.http.get(f"{mesh.url}/v1/models").json()["data"]
    return {one["id"]: one for one in models}


def expected_text(adapter: str, prompt: list[int], length: int = 12) -> str:
    """Returns the text that an adapter generates."""
    model = load_sim_model(SIM_MODEL_DIR)
    token_oracle = TokenOracle(model.word_ids, model.eos_ids[0])
    tokens = token_oracle.continue_tokens(prompt, length, ignore_eos=True, lora_name=adapter)
    text: str = Tokenizer.from_file(str(SIM_MODEL_DIR / "tokenizer.json")).decode(tokens)
    return text


def worker_with_adapters(mesh: Mesh) -> Service:
    """Returns the worker of MODEL with adapters."""
    return mesh.workers[1]


def unique_prompt(tokens: int) -> list[int]:
    """Returns a prompt that shares no block with any other."""
    number = next(UNIQUE_NUMBERS)
    return [300 + (number * 7919 + place * place) % 2000 for place in range(tokens)]


def post_completion(
    mesh: Mesh, model: str, prompt: str | list[int], client_id: str = "", **headers: str
) -> httpx.Response:
    client_id = client_id or f"r{next(UNIQUE_NUMBERS)}"
    return mesh.post_completion(client_id, prompt, model=model, headers=headers)


def cached_tokens(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    tokens: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_each_adapter_is_listed_as_a_model_with_its_base(mesh: Mesh) -> None:
    models = listed_models(mesh)
    for adapter in ADAPTERS:
        assert models[adapter]["root"] == models[adapter]["parent"] == MODEL
        assert mesh.http.get(f"{mesh.url}/v1/models/{adapter}").json() == models[adapter]
    assert models["swahili"]["parent"] == OTHER_MODEL
    assert "parent" not in models[MODEL]
    health = mesh.http.get(f"{mesh.url}/health").json()
    assert set(health["models"]) == models.keys()
    assert mesh.http.get(f"{mesh.url}/ready").json()["ready"]


def test_a_response_is_generated_by_the_adapter_and_carries_its_name(mesh: Mesh) -> None:
    prompt = unique_prompt(3 * BLOCK_SIZE)
    texts = {}
    for name, adapter in ((MODEL, ""), ("french", "french"), ("german", "german")):
        body = {"model": name, "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
        response = mesh.http.post(f"{mesh.url}/v1/completions", json=body).json()
        assert response["model"] == name
        texts[name] = response["choices"][0]["text"]
        assert texts[name] == expected_text(adapter, prompt), name
    assert len(set(texts.values())) == 3


async def test_the_sdk_uses_an_adapter_like_a_model(mesh: Mesh) -> None:
    async with open_sdk_client(mesh) as client:
        assert "french" in {model.id async for model in client.models.list()}
        messages: Any = [{"role": "user", "content": "Bonjour"}]
        whole = await client.chat.completions.create(
            model="french", messages=messages, max_tokens=12
        )
        assert whole.model == "french"
        stream = await client.chat.completions.create(
            model="french", messages=messages, max_tokens=12, stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert {chunk.model for chunk in chunks} == {"french"}
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert streamed == whole.choices[0].message.content != ""


@pytest.mark.row("S2-11")
def test_the_same_prompt_under_base_and_adapters_never_shares_cached_blocks(mesh: Mesh) -> None:
    prompt, full = unique_prompt(20 * BLOCK_SIZE), 20 * BLOCK_SIZE - BLOCK_SIZE
    pin_headers = {"x-kvmesh-backend-instance-id": str(worker_with_adapters(mesh).instance_id)}
    for model in (MODEL, *ADAPTERS):
        assert cached_tokens(post_completion(mesh, model, prompt, **pin_headers)) == 0, (
            f"{model} has not seen the prompt"
        )
        assert (
            full <= cached_tokens(post_completion(mesh, model, prompt, **pin_headers)) < len(prompt)
        )
    for model in (MODEL, *ADAPTERS):
        # The router predicts what the engine reports.
        def is_prediction_exact(model: str = model) -> bool:
            name = f"again-{next(UNIQUE_NUMBERS)}"
            found = cached_tokens(post_completion(mesh, model, prompt, name, **pin_headers))
            assert found >= full
            return bool(mesh.request_line(name)["predicted_cached_tokens"] == found)

        wait_for(is_prediction_exact, f"the index has the blocks of {model}")


@pytest.mark.row("S2-11", "S1-68")
def test_blocks_of_an_adapter_are_predicted_for_that_adapter_only(mesh: Mesh) -> None:
    prompt = unique_prompt(10 * BLOCK_SIZE)
    post_completion(mesh, "french", prompt)

    def is_predicted() -> bool:
        name = f"known-{next(UNIQUE_NUMBERS)}"
        post_completion(mesh, "french", prompt, name)
        return bool(mesh.request_line(name)["predicted_cached_tokens"])

    wait_for(is_predicted, "the index has the blocks")
    for model in (MODEL, "german"):
        name = f"unknown-{next(UNIQUE_NUMBERS)}"
        assert cached_tokens(post_completion(mesh, model, prompt, name)) == 0
        assert mesh.request_line(name)["predicted_cached_tokens"] == 0


@pytest.mark.row("S2-11")
def test_only_workers_with_the_adapter_get_its_requests(mesh: Mesh) -> None:
    adapter_workers = str(worker_with_adapters(mesh).instance_id)
    for number in range(12):
        name = f"placed-{number}"
        assert (
            post_completion(
                mesh, ADAPTERS[number % 2], unique_prompt(5 * BLOCK_SIZE), name
            ).status_code
            == 200
        )
        line = mesh.request_line(name)
        assert line["workers"] == [adapter_workers]
        assert (line["model"], line["base_model"]) == (ADAPTERS[number % 2], MODEL)
    name = "base"
    assert post_completion(mesh, MODEL, unique_prompt(BLOCK_SIZE), name).status_code == 200
    assert "base_model" not in mesh.request_line(name)


def test_a_pin_to_a_worker_without_the_adapter_is_refused(
    mesh: Mesh,
) -> None:
    pin = {"x-kvmesh-backend-instance-id": str(mesh.workers[0].instance_id)}
    response = post_completion(mesh, "french", unique_prompt(BLOCK_SIZE), **pin)
    assert response.status_code == 503
    assert "'french'" in response.json()["error"]["message"]


def test_the_adapters_requests_are_counted_under_its_name(mesh: Mesh) -> None:
    post_completion(mesh, "german", unique_prompt(BLOCK_SIZE))
    post_completion(mesh, "no-such-adapter", unique_prompt(BLOCK_SIZE))
    metrics = mesh.http.get(f"{mesh.url}/metrics").text.splitlines()
    began = [line for line in metrics if line.startswith("kvmesh_frontend_requests_started_total")]
    assert any('model="german"' in line for line in began)
    assert any('model="other"' in line for line in began)
    assert not any("no-such-adapter" in line for line in metrics)
    workers = [line for line in metrics if line.startswith("kvmesh_frontend_model_workers{")]
    assert sorted(workers) == [
        f'kvmesh_frontend_model_workers{{model="{MODEL}"}} 2.0',
        f'kvmesh_frontend_model_workers{{model="{OTHER_MODEL}"}} 1.0',
    ]


def test_a_name_conflict_is_resolved_by_model_name_and_reported(mesh: Mesh) -> None:
    # Two models have "french": it belongs to the model with the name that sorts first.
    assert listed_models(mesh)["french"]["parent"] == MODEL < OTHER_MODEL
    # One adapter has the name of a model: the name belongs to the model.
    assert "parent" not in listed_models(mesh)[MODEL]
    degraded = mesh.http.get(f"{mesh.url}/health").json()["degraded"]
    assert [line for line in degraded if "french" in line and OTHER_MODEL in line and MODEL in line]
    assert [line for line in degraded if f"'{MODEL}' of {OTHER_MODEL}" in line]
    hidden = {(e["adapter"], e["model"]) for e in mesh.frontend.events("adapter_hidden")}
    assert hidden == {("french", OTHER_MODEL), (MODEL, OTHER_MODEL)}


def test_a_long_prompt_and_an_unknown_name_are_refused_as_for_models(mesh: Mesh) -> None:
    response = post_completion(mesh, "french", "able about " * 20_000)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    unknown = post_completion(mesh, "klingon", "hi")
    assert unknown.status_code == 404
    error = unknown.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.slow
def test_a_pair_serves_an_adapter_only_if_both_workers_have_it(tmp_path: Path) -> None:
    flags = [SPEEDUP_FLAG, "--local-prefill=false"]
    with Mesh(tmp_path, workers=0, prefill=1, decode=1, worker_flags=flags) as mesh:
        adapter_workers = [
            mesh.spawn("prefill", "--loras=french").wait_ready(),
            mesh.spawn("decode", "--loras=french,german").wait_ready(),
        ]
        wait_for(lambda: "french" in listed_models(mesh), "a pair has the adapter")
        prompt = unique_prompt(3 * BLOCK_SIZE)
        body = {"model": "french", "prompt": prompt, "max_tokens": 12, "ignore_eos": True}

        def successful_response() -> httpx.Response | None:
            # The router may see the workers a moment later than the frontend.
            headers = {"x-request-id": "pair"}
            response = mesh.http.post(f"{mesh.url}/v1/completions", json=body, headers=headers)
            return response if response.status_code == 200 else None

        response = wait_for(successful_response, "the router sees the workers")
        assert response is not None
        assert response.json()["choices"][0]["text"] == expected_text("french", prompt)
        (line,) = wait_for(
            lambda: [line for line in mesh.request_lines("pair") if line["status"] == 200],
            "its line is in the log",
        )
        assert line["workers"] == [str(one.instance_id) for one in adapter_workers]
        health = mesh.http.get(f"{mesh.url}/health").json()
        assert health["models_not_ready"]["german"] == "no prefill worker"
        assert "german" not in listed_models(mesh)
        assert post_completion(mesh, "german", prompt).status_code == 503


@pytest.mark.slow
def test_a_started_response_of_an_adapter_migrates_to_another_worker_with_it(
    tmp_path: Path,
) -> None:
    with Mesh(tmp_path, workers=1, worker_flags=["--step-ms=20"]) as mesh:
        adapter_workers = [mesh.spawn("worker", "--loras=french").wait_ready() for _ in range(2)]
        wait_for(mesh.is_complete, "the frontend sees the workers")
        wait_for(lambda: "french" in listed_models(mesh), "the adapter is listed")
        tokens, prompt = 200, unique_prompt(3 * BLOCK_SIZE)
        body = {"model": "french", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        pieces = []
        with mesh.http.stream(
            "POST",
            f"{mesh.url}/v1/completions",
            json=body | {"stream": True},
            headers={"x-request-id": "moved"},
        ) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                pieces += [c["text"] for c in json.loads(line[6:])["choices"]]
                if len(pieces) == 5:
                    (one,) = [worker for worker in adapter_workers if worker.open_slots()]
                    one.kill()
        assert "".join(pieces) == expected_text("french", prompt, tokens)
        end = mesh.request_line("moved")
        assert (end["status"], end["attempts"]) == (200, 2)
        assert set(end["workers"]) == {str(one.instance_id) for one in adapter_workers}


# The last test, because it removes the adapters.
def test_an_adapter_without_workers_is_a_503_with_retry_headers_until_it_is_back(
    mesh: Mesh,
) -> None:
    gone = worker_with_adapters(mesh)
    gone.kill()
    wait_for(mesh.is_complete, "the frontend sees that the worker has left")
    wait_for(lambda: "german" not in listed_models(mesh), "its adapters are not listed")
    response = post_completion(mesh, "german", "hi")
    assert response.status_code == 503
    assert "german" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) >= 1
    assert response.headers["x-should-retry"] == "true"
    assert mesh.http.get(f"{mesh.url}/v1/models/german").status_code == 503
    assert post_completion(mesh, MODEL, "hi").status_code == 200
    # The other model's adapter of the same name takes over.
    wait_for(
        lambda: listed_models(mesh).get("french", {}).get("parent") == OTHER_MODEL,
        "french is the other model's adapter",
    )
    back = mesh.spawn("worker", "--loras=german").wait_ready()
    wait_for(
        lambda: listed_models(mesh).get("german", {}).get("parent") == MODEL,
        "it is listed again",
    )
    name = "back"

    def serves() -> bool:
        # The router may see the worker a moment later than the frontend.
        return post_completion(mesh, "german", "hi", name).status_code == 200

    wait_for(serves, "the router sees the worker")
    (line,) = wait_for(
        lambda: [line for line in mesh.request_lines(name) if line["status"] == 200],
        "its line is in the log",
    )
    assert line["workers"] == [str(back.instance_id)]

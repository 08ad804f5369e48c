"""What a body becomes: `/v1/internal/preprocess`, and a worker that serves its result."""

from __future__ import annotations

from typing import Any

import grpc
import orjson
import pytest

from common.kv.hashing import compute_block_hash_for_seq, compute_seq_hashes
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.types.v1 import request_pb2
from tests.kit.oracle import Oracle
from tests.kit.processes import MODEL, Mesh, mesh_error, mesh_fixture
from tests.kit.waiting import WAIT_S

pytestmark = pytest.mark.slow

ORACLE = Oracle()
CHAT, COMPLETIONS, RESPONSES = "chat/completions", "completions", "responses"
MESSAGES = [{"role": "user", "content": "Tell me of a city."}]
PROMPT = [301, 302, 303]

# Any: JSON.
Json = dict[str, Any]


mesh = mesh_fixture(
    workers=1, worker_flags=["--speedup=0", "--loras=french", "--model-aliases=other"]
)


def preprocess(mesh: Mesh, **body: Any) -> list[Json]:
    url = f"{mesh.url}/v1/internal/preprocess"
    response = mesh.http.post(url, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    requests: list[Json] = response.json()["requests"]
    return requests


def post(mesh: Mesh, path: str, **body: Any) -> Json:
    response = mesh.http.post(f"{mesh.url}/v1/{path}", json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    value: Json = response.json()
    return value


def generate(mesh: Mesh, request: Json) -> list[int]:
    """The tokens with which a worker responds to the JSON form."""
    stub = engine_pb2_grpc.EngineServiceStub(mesh.workers[0].channel)
    message = engine_pb2.GenerateRequest(request_json=orjson.dumps(request).decode())
    parts = list(stub.Generate(message, timeout=WAIT_S))
    assert parts[-1].finish_reason != request_pb2.FINISH_REASON_UNSPECIFIED
    return [token for part in parts for token in part.token_ids]


# Each value changes the output, or it would end elsewhere.
FIELDS: dict[str, Json] = {
    "plain": {},
    "sampled": {"temperature": 1.0, "seed": 9, "top_k": 40, "top_p": 0.9},
    "penalized": {"frequency_penalty": 1.5, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    "biased": {"logit_bias": {"400": 100}},
    "constrained": {"guided_regex": "[a-d]{3}"},
    "stopped": {"stop_token_ids": [ORACLE.tokens(PROMPT, 5)[4]], "min_tokens": 2},
    "salted": {"cache_salt": "s", "priority": 3},
    "adapter": {"model": "french"},
    "alias": {"model": "other"},
}


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_worker_returns_the_tokens_of_the_http_response_for_the_json(
    mesh: Mesh, name: str
) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 12, **FIELDS[name]}
    (request,) = preprocess(mesh, **fields)
    tokens = generate(mesh, request)
    shown = {"logprobs": 0, "return_tokens_as_token_ids": True}
    (choice,) = post(mesh, COMPLETIONS, **fields, **shown)["choices"]
    assert [f"token_id:{one}" for one in tokens] == choice["logprobs"]["tokens"]
    assert bool(tokens) == bool(choice["text"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 9, "ignore_eos": True}),
        (RESPONSES, {"input": "Tell me of a city.", "max_output_tokens": 16}),
    ],
)
def test_the_prompt_of_each_api_is_preprocessed_as_for_generation(
    mesh: Mesh, path: str, body: Json
) -> None:
    (request,) = preprocess(mesh, **body)
    response = post(mesh, path, **body)
    text = ORACLE.decode(generate(mesh, request))
    if path == CHAT:
        assert text == response["choices"][0]["message"]["content"]
        assert len(request["token_ids"]) == response["usage"]["prompt_tokens"]
    else:
        assert text == response["output"][0]["content"][0]["text"]
        assert len(request["token_ids"]) == response["usage"]["input_tokens"]


@pytest.mark.row("S2-56", "S2-62")
def test_a_request_has_the_five_fields_and_the_defaults_of_the_others(mesh: Mesh) -> None:
    (request,) = preprocess(mesh, prompt=PROMPT, max_tokens=4, temperature=0.5)
    card_sum = request.pop("mdc_sum")
    assert len(card_sum) == 64
    eos = request.pop("eos_token_ids")
    assert request == {
        "model": MODEL,
        "token_ids": PROMPT,
        "stop_conditions": request["stop_conditions"] | {"max_tokens": 4},
        "sampling_options": request["sampling_options"] | {"temperature": 0.5},
        "output_options": request["output_options"],
        "annotations": [],
        "router_config_override": None,
    }
    assert request["stop_conditions"]["stop_token_ids_hidden"] == eos != []
    assert generate(mesh, {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 4}})


@pytest.mark.row("S2-73", "S2-74", "S2-75", "S2-76")
def test_only_the_key_of_a_probe_makes_the_json_of_a_request_one(mesh: Mesh) -> None:
    (request,) = preprocess(mesh, prompt=PROMPT, max_tokens=4, ignore_eos=True)
    assert "_HEALTH_CHECK" not in request
    assert len(generate(mesh, request)) == 4
    # A probe has one token, whatever it asks for.
    assert len(generate(mesh, request | {"_HEALTH_CHECK": True})) == 1
    assert len(generate(mesh, {"token_ids": [1], "_HEALTH_CHECK": True})) == 1


@pytest.mark.row("S2-04", "S2-33", "S2-34", "S2-57", "S2-91")
def test_the_json_of_a_request_needs_token_ids_only_and_may_have_more_than_is_known(
    mesh: Mesh,
) -> None:
    stop = {"max_tokens": 4, "ignore_eos": True}
    least: Json = {"token_ids": PROMPT, "stop_conditions": stop}
    tokens = generate(mesh, least)
    assert len(tokens) == 4
    more: Json
    for more in (
        {"routing": {}},
        {"model": ""},
        {"model": MODEL},
        {"new": [1], "routing": {"x": 1}},
    ):
        assert generate(mesh, least | more) == tokens, more
    for wrong, field in (
        ({"stop_conditions": stop}, "token_ids"),
        (least | {"token_ids": [5, 2**32]}, "token_ids[1]"),
        (least | {"model": "another"}, "model"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            generate(mesh, wrong)
        assert mesh_error(refused.value).field == field


@pytest.mark.row("S1-31", "S1-36", "S1-38")
@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (MODEL, [16863443419780771464, 2287610619914608821]),
        ("french", compute_block_hash_for_seq(range(1, 33), 16, lora_name="french")),
    ],
)
def test_the_hashes_of_a_prompt_are_those_of_other_routers(
    mesh: Mesh, model: str, blocks: list[int]
) -> None:
    body = {"model": model, "prompt": [[*range(1, 33), 7], [1, 2]]}
    response = mesh.http.post(f"{mesh.url}/v1/internal/preprocess", json=body)
    prompt, short = response.json()["hashes"]
    assert prompt == {
        "block_size": 16,
        "block_hashes": blocks,
        "sequence_hashes": compute_seq_hashes(blocks),
    }
    assert short == {"block_size": 16, "block_hashes": [], "sequence_hashes": []}


def test_each_prompt_of_a_list_is_a_request(mesh: Mesh) -> None:
    requests = preprocess(mesh, prompt=[[5, 6], [7]], n=3, seed=1)
    assert [one["token_ids"] for one in requests] == [[5, 6], [7]]


def test_what_only_frontends_and_routers_use_is_left_out(mesh: Mesh) -> None:
    nvext = {
        "router_config_override": {"router_temperature": 0.5},
        "agent_context": {"session_id": "s"},
        "allowed_worker_ids": [7],
    }
    (request,) = preprocess(mesh, prompt=PROMPT, nvext=nvext)
    assert request["router_config_override"] is None
    assert not {"agent_context", "routing"} & request.keys()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
        ({"messages": MESSAGES, "prompt": "x"}, 400, "prompt"),
        ({}, 400, "prompt"),
        ({"prompt": "x", "model": "absent"}, 404, "model"),
        ({"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ],
)
def test_a_body_that_generation_refuses_is_refused(
    mesh: Mesh, body: Json, status: int, param: str
) -> None:
    url = f"{mesh.url}/v1/internal/preprocess"
    response = mesh.http.post(url, json={"model": MODEL, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_no_worker_is_asked(mesh: Mesh) -> None:
    worker, before = mesh.workers[0], mesh.workers[0].counters()
    headers = {"x-request-id": "preprocessed"}
    body = {"model": MODEL, "prompt": PROMPT}
    assert mesh.http.post(f"{mesh.url}/v1/internal/preprocess", json=body, headers=headers)
    line = mesh.request_line("preprocessed")
    assert (line["endpoint"], line["status"], "workers" in line) == ("preprocess", 200, False)
    requests = {name: count for name, count in worker.counters().items() if "request" in name}
    assert requests == {name: before[name] for name in requests}

"""The parameters of generation at the door: each has its effect, or is refused by its name."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.kit.oracle import Oracle
from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import wait_for
from worker_svc.engines.sim.config import SIM_MODEL_DIR, load_sim_model

pytestmark = pytest.mark.slow

ORACLE = Oracle()
WORDS = load_sim_model(SIM_MODEL_DIR).word_ids
PROMPT = [5, 6, 7]
BLOCK_SIZE = 16
THINKER_TEMPLATE = (
    "{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}. {% endif %}"
    "{% if enable_thinking is defined %}Thinking: {{ enable_thinking }}. {% endif %}"
    "{{ messages[0]['content'] }}"
)

# Any, here and below: bodies and JSON.
Json = dict[str, Any]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    thinker = write_model(folder / "thinker", THINKER_TEMPLATE)
    with Mesh(folder, workers=2, indexers=1, batches=1, worker_flags=["--speedup=20"]) as mesh:
        others = [
            mesh.spawn("worker", "--engine=echo", "--model-name=echo"),
            mesh.spawn(
                "worker",
                "--model-name=thinker",
                f"--model-path={thinker}",
                "--model-aliases=gpt-5,a",
            ),
            mesh.spawn("worker", "--model-name=ranker", "--serve=score"),
            mesh.spawn("worker", "--model-name=narrow", "--max-num-seqs=1", "--step-ms=100"),
        ]
        for worker in others:
            worker.wait_ready()
        wait_for(mesh.is_complete, "the frontend sees all workers")
        wait_for(lambda: len(mesh.model_names()) == 7, "all models are served")
        yield mesh


def write_model(folder: Path, template: str) -> Path:
    """Writes the sim's model with another chat template."""
    shutil.copytree(SIM_MODEL_DIR, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


def post(mesh: Mesh, path: str, body: Mapping[str, Any]) -> httpx.Response:
    return mesh.http.post(f"{mesh.url}/v1/{path}", json=body)


def complete(mesh: Mesh, max_tokens: int = 8, **fields: Any) -> Json:
    """The response to a prompt of token ids."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, **fields}
    response = post(mesh, "completions", body)
    assert response.status_code == 200, response.text
    value: Json = response.json()
    return value


def words_of(mesh: Mesh, **fields: Any) -> list[str]:
    """The words of a response that no EOS ends."""
    text: str = complete(mesh, ignore_eos=True, **fields)["choices"][0]["text"]
    return text.split()


def streamed(mesh: Mesh, **fields: Any) -> tuple[str, str]:
    """Text and finish reason of a streamed response."""
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, **fields}
    with mesh.http.stream("POST", f"{mesh.url}/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    choices = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
    reasons = [one["finish_reason"] for one in choices if one["finish_reason"]]
    return "".join(one["text"] for one in choices), reasons[0]


def refusal(mesh: Mesh, **fields: Any) -> Json:
    """The error of a completion, which no worker received."""
    before = accepted_requests(mesh)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, **fields}
    response = post(mesh, "completions", body)
    assert response.status_code == 400, response.text
    assert accepted_requests(mesh) == before
    error: Json = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def accepted_requests(mesh: Mesh) -> list[tuple[int, int]]:
    counters = [worker.counters() for worker in mesh.workers]
    return [(one.get("accepted", 0), one.get("rejected", 0)) for one in counters]


def text_of(token: int) -> str:
    return ORACLE.decode([token])


@pytest.mark.row("S2-39", "S2-82")
def test_a_logit_bias_forces_and_excludes_tokens(mesh: Mesh) -> None:
    plain, word = words_of(mesh), text_of(WORDS[7]).strip()
    assert words_of(mesh, logit_bias={str(WORDS[7]): 100}) == [word] * 8
    first = ORACLE.tokens(PROMPT, 1)[0]
    assert words_of(mesh, logit_bias={str(first): -100})[0] != plain[0]
    assert words_of(mesh, logit_bias={}) == plain


@pytest.mark.parametrize(
    ("bias", "param", "words"),
    [
        ({"4096": 1}, "logit_bias", "not in the vocabulary of 4096"),
        ({"5": 100.5}, "logit_bias.5", "<= 100"),
        ({"five": 1}, "logit_bias", "token ids as keys"),
        ([[5, 1]], "logit_bias", "an object"),
    ],
)
def test_an_invalid_logit_bias_is_refused(mesh: Mesh, bias: Any, param: str, words: str) -> None:
    error = refusal(mesh, logit_bias=bias)
    assert error["param"] == param
    assert words in error["message"]


def test_a_seed_selects_one_output_unless_the_temperature_is_0(mesh: Mesh) -> None:
    assert words_of(mesh, seed=1) == words_of(mesh, seed=1)
    assert words_of(mesh, seed=1) != words_of(mesh, seed=2)
    assert words_of(mesh, seed=1, temperature=0) == words_of(mesh, temperature=0)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_penalty_separates_repeated_tokens(mesh: Mesh, name: str) -> None:
    bias = {str(WORDS[0]): 30, str(WORDS[1]): 29.75}
    assert len(set(words_of(mesh, logit_bias=bias))) == 1
    assert len(set(words_of(mesh, logit_bias=bias, **{name: 1.9}))) > 1


@pytest.mark.row("S2-38", "S2-81")
def test_min_tokens_delays_the_end_and_stop_strings(mesh: Mesh) -> None:
    plain = complete(mesh, 1000)
    natural = plain["usage"]["completion_tokens"]
    assert plain["choices"][0]["finish_reason"] == "stop"
    longer = complete(mesh, 1000, min_tokens=natural + 5)
    assert longer["usage"]["completion_tokens"] >= natural + 5
    second = text_of(ORACLE.tokens(PROMPT, 2)[1])
    assert complete(mesh, 8, stop=second)["usage"]["completion_tokens"] == 2
    delayed = complete(mesh, 8, stop=second, min_tokens=4)
    assert delayed["usage"]["completion_tokens"] >= 4
    assert second in delayed["choices"][0]["text"]
    assert (
        streamed(mesh, max_tokens=8, stop=second, min_tokens=4)[0] == delayed["choices"][0]["text"]
    )


@pytest.mark.row("S2-40", "S2-83")
def test_the_text_includes_the_stop_string_on_request(mesh: Mesh) -> None:
    tokens = ORACLE.tokens(PROMPT, 4)
    stop: Json = {"stop": [text_of(tokens[2])], "max_tokens": 4}
    excluded, included = ORACLE.decode(tokens[:2]), ORACLE.decode(tokens[:3])
    for fields, text in ((stop, excluded), (stop | {"include_stop_str_in_output": True}, included)):
        choice = complete(mesh, **fields)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert streamed(mesh, **fields) == (text, "stop")
    by_id: Json = {"stop_token_ids": [tokens[2]], "max_tokens": 4}
    assert complete(mesh, **by_id)["choices"][0]["text"] == excluded
    shown = complete(mesh, **by_id, include_stop_str_in_output=True)
    assert shown["choices"][0]["text"] == included


def test_special_tokens_have_a_text_on_request(mesh: Mesh) -> None:
    forced: Json = {"logit_bias": {"1": 100}, "max_tokens": 2}
    assert complete(mesh, **forced)["choices"][0]["text"] == ""
    shown = complete(mesh, **forced, skip_special_tokens=False)["choices"][0]["text"]
    assert shown == "<|im_start|>" * 2
    assert streamed(mesh, **forced, skip_special_tokens=False)[0] == shown


@pytest.mark.row("S2-40", "S2-83")
def test_log_probabilities_write_tokens_as_ids_on_request(mesh: Mesh) -> None:
    fields: Json = {"logprobs": 0, "ignore_eos": True, "return_tokens_as_token_ids": True}
    tokens = complete(mesh, 4, **fields)["choices"][0]["logprobs"]["tokens"]
    assert tokens == [f"token_id:{one}" for one in ORACLE.tokens(PROMPT, 4)]
    content = chat(mesh, MODEL, logprobs=True, return_tokens_as_token_ids=True).json()
    (first, _) = content["choices"][0]["logprobs"]["content"]
    assert first["token"].startswith("token_id:")
    assert bytes(first["bytes"]).decode() == first["token"]
    assert refusal(mesh, return_tokens_as_token_ids=True)["param"] == "return_tokens_as_token_ids"


def test_two_cache_salts_never_share_blocks(mesh: Mesh) -> None:
    prompt = [WORDS[n % len(WORDS)] for n in range(12 * BLOCK_SIZE + 1)]

    def cached(client_id: str, **fields: Any) -> tuple[int, int]:
        """Cached tokens as the router predicted them, and as the engine found them."""
        response = mesh.post_completion(client_id, prompt, **fields)
        assert response.status_code == 200, response.text
        details = response.json()["usage"]["prompt_tokens_details"]
        line = mesh.request_line(client_id)
        return line["predicted_cached_tokens"], details["cached_tokens"]

    whole = 12 * BLOCK_SIZE
    assert cached("none-1") == (0, 0)
    for salt in ("a", "b"):
        assert cached(f"{salt}-1", cache_salt=salt) == (0, 0)
    for name, fields in {"none": {}, "a": {"cache_salt": "a"}, "b": {"cache_salt": "b"}}.items():
        numbers = iter(range(2, 100))
        wait_for(
            lambda name=name, fields=fields, numbers=numbers: (  # type: ignore[misc]
                cached(f"{name}-{next(numbers)}", **fields) == (whole, whole)
            ),
            f"the router finds the blocks of salt {name}",
        )
    assert cached("nvext-1", nvext={"cache_salt": "a"}) == (whole, whole)
    assert cached("c-1", cache_salt="c") == (0, 0)


@pytest.mark.row("S2-13")
def test_a_smaller_priority_goes_first_as_in_vllm(mesh: Mesh) -> None:
    order: list[str] = []
    lock = threading.Lock()
    narrow = mesh.workers[-1]

    def ask(name: str, **fields: Any) -> None:
        complete(mesh, 40, model="narrow", ignore_eos=True, **fields)
        with lock:
            order.append(name)

    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(ask, "first")]
        wait_for(lambda: narrow.load().open_slots == 1, "the first request runs")
        for number, (name, priority) in enumerate({"late": 5, "plain": 0, "early": -5}.items(), 2):
            futures.append(pool.submit(ask, name, priority=priority))
            wait_for(lambda number=number: narrow.load().open_slots == number, "it waits")  # type: ignore[misc]
        for future in futures:
            future.result()
    assert order == ["first", "early", "plain", "late"]


def chat(mesh: Mesh, model: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": model, "messages": messages, "max_tokens": 2, **fields}
    return post(mesh, "chat/completions", body)


def test_reasoning_effort_is_a_setting_of_the_template(mesh: Mesh) -> None:
    def prompt_tokens(**fields: Any) -> int:
        response = chat(mesh, "thinker", **fields)
        assert response.status_code == 200, response.text
        count: int = response.json()["usage"]["prompt_tokens"]
        return count

    def length(text: str) -> int:
        return len(ORACLE.encode(text, special_tokens=False))

    assert prompt_tokens() == length("Hi")
    assert prompt_tokens(reasoning_effort="high") == length("Reasoning: high. Thinking: True. Hi")
    assert prompt_tokens(reasoning_effort="none") == length("Reasoning: none. Thinking: False. Hi")
    kwargs = {"enable_thinking": False}
    text = "Reasoning: low. Thinking: False. Hi"
    assert prompt_tokens(reasoning_effort="low", chat_template_kwargs=kwargs) == length(text)
    error = chat(mesh, MODEL, reasoning_effort="high").json()["error"]
    assert (error["param"], error["code"]) == ("reasoning_effort", "unsupported_parameter")


def test_fields_without_effect_do_not_change_the_response(mesh: Mesh) -> None:
    plain = chat(mesh, MODEL).json()["choices"]
    fields: Json = {
        "user": "u",
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "in_memory",
        "prediction": {"type": "content", "content": "x"},
        "verbosity": "low",
        "service_tier": "auto",
        "store": False,
    }
    assert chat(mesh, MODEL, **fields).json()["choices"] == plain


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_thinking_tokens", 5),
        ("service_tier", "flex"),
        ("store", True),
        ("nvext.max_thinking_tokens", 5),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(
    mesh: Mesh, field: str, value: object
) -> None:
    parent, _, name = field.rpartition(".")
    fields = {parent: {name: value}} if parent else {name: value}
    error = refusal(mesh, **fields)
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


def test_a_time_for_which_caches_are_kept_is_refused_in_chats(mesh: Mesh) -> None:
    response = chat(mesh, MODEL, prompt_cache_retention="24h")
    error = response.json()["error"]
    refused = (response.status_code, error["param"], error["code"])
    assert refused == (400, "prompt_cache_retention", "unsupported_parameter")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("presence_penalty", {"presence_penalty": 1}),
        ("guided_decoding", {"guided_regex": "a"}),
    ],
)
def test_an_option_that_no_engine_of_the_model_honours_is_refused_before_a_worker_is_chosen(
    mesh: Mesh, param: str, fields: Json
) -> None:
    error = refusal(mesh, model="echo", **fields)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


def test_the_list_of_models_has_limits_and_aliases(mesh: Mesh) -> None:
    listed = {one["id"]: one for one in mesh.http.get(f"{mesh.url}/v1/models").json()["data"]}
    assert listed[MODEL]["max_model_len"] == load_sim_model(SIM_MODEL_DIR).context_length
    assert (listed["gpt-5"]["root"], listed["gpt-5"]["parent"]) == ("thinker", None)
    assert "root" not in listed["thinker"]
    for name, entry in listed.items():
        assert mesh.http.get(f"{mesh.url}/v1/models/{name}").json() == entry
    missing = mesh.http.get(f"{mesh.url}/v1/models/gpt-6")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")


def test_an_alias_is_served_like_its_model(mesh: Mesh) -> None:
    response, expected = chat(mesh, "gpt-5"), chat(mesh, "thinker")
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "thinker"
    assert response.json()["choices"] == expected.json()["choices"]
    assert chat(mesh, "gpt-6").status_code == 404


def test_the_examples_of_the_document_are_served(mesh: Mesh) -> None:
    document = mesh.http.get(f"{mesh.url}/openapi.json").json()
    bodies = {
        path: content["application/json"]["example"]
        for path, methods in document["paths"].items()
        if (content := methods.get("post", {}).get("requestBody", {}).get("content"))
        and "application/json" in content
    }
    upload = mesh.http.post(
        f"{mesh.url}/v1/files", data={"purpose": "batch"}, files={"file": b"{}"}
    )
    bodies["/v1/batches"]["input_file_id"] = upload.json()["id"]
    conversation = mesh.http.post(f"{mesh.url}/v1/conversations").json()["id"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/messages"} <= bodies.keys()
    for path, body in bodies.items():
        if path.endswith(("/rerank", "/score")):
            body["model"] = "ranker"
        response = mesh.http.post(f"{mesh.url}{path.format(id=conversation)}", json=body)
        assert response.status_code == 200, (path, response.text)
    for path in document["paths"].keys() - bodies.keys():
        if "{" not in path and "get" in document["paths"][path]:
            listed = document["paths"][path]["get"].get("parameters", [])
            needed = {one["name"]: 0 for one in listed if one.get("required")}
            is_refused = document["paths"][path]["get"]["summary"].startswith("Not implemented")
            status = mesh.http.get(f"{mesh.url}{path}", params=needed).status_code
            assert status == (501 if is_refused else 200), path


def refused_bodies(mesh: Mesh) -> dict[tuple[str, str, str], float]:
    """Counts by model, endpoint and code."""
    found = {}
    for line in mesh.http.get(f"{mesh.url}/metrics").text.splitlines():
        if line.startswith("kvmesh_frontend_refused_bodies_total{"):
            labels, count = line.removeprefix("kvmesh_frontend_refused_bodies_total").split()
            values = dict(one.split("=") for one in labels.strip("{}").split(","))
            names = (values[name].strip('"') for name in ("model", "endpoint", "code"))
            found[cast("tuple[str, str, str]", tuple(names))] = float(count)
    return found


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        ("chat/completions", {}, "missing_required_parameter"),
        ("completions", {"prompt": 5}, "invalid_type"),
        ("completions", {"prompt": "a", "a": 1}, "unknown_parameter"),
        ("messages", {}, "missing_required_parameter"),
        ("completions", {"model": "gpt-5", "prompt": ""}, "invalid_value"),
        ("completions", {"model": "nothing", "prompt": 5}, "invalid_type"),
        ("completions", {"model": "nothing", "prompt": "a"}, "model_not_found"),
        ("completions", {"model": ["x"]}, "invalid_type"),
    ],
)
def test_a_refused_body_is_counted_under_the_served_model_that_it_names(
    mesh: Mesh, path: str, fields: Json, code: str
) -> None:
    body = {"model": MODEL, **fields}
    model = body["model"] if body["model"] in (MODEL, "gpt-5") else "other"
    before = refused_bodies(mesh)
    assert post(mesh, path, body).status_code in (400, 404)
    after = refused_bodies(mesh)
    changed = {key: count - before.get(key, 0) for key, count in after.items()}
    endpoint = path.replace("/", "_")
    assert {key: count for key, count in changed.items() if count} == {(model, endpoint, code): 1.0}

"""Log probabilities at the door: whole, streamed, split into prefill and decode, and migrated."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.e2e.test_choices import events, post
from tests.kit.processes import MODEL, Mesh, mesh_fixture

pytestmark = pytest.mark.slow

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say it"}]}


mesh = mesh_fixture(workers=2, worker_flags=["--speedup=5"])


# Any, here and below: JSON.
def chat(mesh: Mesh, **body: Any) -> Any:
    response = post(mesh, "chat/completions", **CHAT, **{"logprobs": True, **body})
    ChatCompletion.model_validate(response, strict=True)
    return response["choices"][0]


def streamed_chat(mesh: Mesh, **body: Any) -> tuple[str, list[Any]]:
    """The text and its entries; each chunk completes both."""
    text, entries = "", list[Any]()
    for chunk in events(mesh, "chat/completions", **CHAT, **{"logprobs": True, **body}):
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") or ""
            new = choice["logprobs"]["content"] if choice["logprobs"] else []
            text += piece
            entries += new
            raw = bytes(byte for one in entries for byte in one["bytes"])
            assert raw.decode(errors="ignore") == text
    return text, entries


def test_the_entries_of_a_chat_are_those_of_its_tokens(mesh: Mesh) -> None:
    choice = chat(mesh, top_logprobs=4, max_tokens=20, ignore_eos=True)
    entries = choice["logprobs"]["content"]
    assert len(entries) == 20
    assert "".join(one["token"] for one in entries) == choice["message"]["content"]
    for one in entries:
        top = one["top_logprobs"]
        assert len(top) == 4
        assert {"token": one["token"], "logprob": one["logprob"], "bytes": one["bytes"]} == top[0]
        values = [alternative["logprob"] for alternative in top]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) < 1
    assert len({one["logprob"] for one in entries}) > 1, "they depend on the position"


def test_streamed_entries_equal_those_of_the_whole_response(mesh: Mesh) -> None:
    options = {"top_logprobs": 2, "max_tokens": 25}
    choice = chat(mesh, **options)
    text, entries = streamed_chat(mesh, **options)
    assert (text, entries) == (choice["message"]["content"], choice["logprobs"]["content"])


def test_alternatives_and_entries_are_sent_only_on_request(mesh: Mesh) -> None:
    assert chat(mesh, max_tokens=3)["logprobs"]["content"][0]["top_logprobs"] == []
    assert chat(mesh, max_tokens=3, logprobs=False)["logprobs"] is None
    assert post(mesh, prompt="Hi", max_tokens=3)["choices"][0]["logprobs"] is None


def test_a_stop_string_is_neither_in_the_text_nor_in_the_entries(mesh: Mesh) -> None:
    whole = chat(mesh, max_tokens=20)["logprobs"]["content"]
    stop = whole[8]["token"] + whole[9]["token"]
    before = next(i for i in range(9) if whole[i]["token"] + whole[i + 1]["token"] == stop)
    options = {"max_tokens": 20, "stop": stop}
    choice = chat(mesh, **options)
    assert choice["logprobs"]["content"] == whole[:before]
    assert streamed_chat(mesh, **options) == (choice["message"]["content"], whole[:before])


def test_text_withheld_for_a_stop_string_arrives_with_its_entries(mesh: Mesh) -> None:
    whole = chat(mesh, max_tokens=20)["logprobs"]["content"]
    stop = whole[4]["token"] + whole[5]["token"] + "\0"
    text, entries = streamed_chat(mesh, max_tokens=20, stop=stop)
    assert entries == whole
    assert "".join(one["token"] for one in entries) == text


def test_a_bias_changes_the_log_probabilities(mesh: Mesh) -> None:
    plain = chat(mesh, top_logprobs=2, max_tokens=1, temperature=0)["logprobs"]["content"][0]
    response = post(mesh, prompt="x", max_tokens=1)
    assert response["choices"][0]["logprobs"] is None
    ids = mesh.http.post(
        f"{mesh.url}/tokenize", json={"model": MODEL, "prompt": plain["top_logprobs"][1]["token"]}
    ).json()["tokens"]
    biased = chat(mesh, max_tokens=1, temperature=0, logit_bias={str(ids[-1]): 50.0})
    entry = biased["logprobs"]["content"][0]
    assert entry["token"] == plain["top_logprobs"][1]["token"]
    assert entry["logprob"] > plain["logprob"]


@pytest.mark.parametrize("alternatives", [0, 3])
def test_the_arrays_of_a_text_completion_have_one_entry_per_token(
    mesh: Mesh, alternatives: int
) -> None:
    body: dict[str, Any] = {"prompt": "Hi", "max_tokens": 12, "logprobs": alternatives}
    response = post(mesh, **body)
    Completion.model_validate(response, strict=True)
    choice = response["choices"][0]
    arrays = choice["logprobs"]
    assert "".join(arrays["tokens"]) == choice["text"]
    offsets = [len("".join(arrays["tokens"][:i])) for i in range(len(arrays["tokens"]))]
    assert arrays["text_offset"] == offsets
    if alternatives:
        assert [len(one) for one in arrays["top_logprobs"]] == [3] * len(offsets)
    else:
        assert arrays["top_logprobs"] is None
    tokens, values = [], []
    for chunk in events(mesh, **body):
        if logprobs := chunk["choices"][0]["logprobs"]:
            tokens += logprobs["tokens"]
            values += logprobs["token_logprobs"]
    assert (tokens, values) == (arrays["tokens"], arrays["token_logprobs"])


def test_a_character_of_several_tokens_has_an_entry_for_each(mesh: Mesh) -> None:
    choice = chat(mesh, guided_choice=["a 🦆 b"], max_tokens=20)
    assert choice["message"]["content"] == "a 🦆 b"
    entries = choice["logprobs"]["content"]
    assert bytes(byte for one in entries for byte in one["bytes"]).decode() == "a 🦆 b"
    assert any(one["token"].startswith("\\x") for one in entries)
    assert streamed_chat(mesh, guided_choice=["a 🦆 b"], max_tokens=20)[1] == entries


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", CHAT | {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("completions", {"prompt": "x", "logprobs": 6}, "logprobs"),
        ("completions", {"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_a_refused_value_is_named(mesh: Mesh, path: str, body: dict[str, Any], param: str) -> None:
    response = mesh.http.post(f"{mesh.url}/v1/{path}", json={"model": MODEL, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


TEXT = "The 🦆 says hello to the world, and the world answers."


def echoed(mesh: Mesh, **body: Any) -> Any:
    """The choice of a completion with the log probabilities of its prompt."""
    options = {"prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 1, "ignore_eos": True}
    return post(mesh, **{**options, **body})["choices"][0]


def test_an_echoed_prompt_has_log_probabilities_of_all_tokens_but_the_first(mesh: Mesh) -> None:
    choice = echoed(mesh, max_tokens=6)
    plain = post(mesh, prompt=TEXT, logprobs=2, max_tokens=6, ignore_eos=True)["choices"][0]
    assert choice["text"] == TEXT + plain["text"]
    arrays, generated = choice["logprobs"], plain["logprobs"]
    ids = mesh.http.post(f"{mesh.url}/tokenize", json={"model": MODEL, "prompt": TEXT}).json()
    count = len(ids["tokens"])
    assert len(arrays["tokens"]) == count + 6
    assert (arrays["token_logprobs"][0], arrays["top_logprobs"][0]) == (None, None)
    for value, top in zip(arrays["token_logprobs"][1:], arrays["top_logprobs"][1:], strict=True):
        assert value in top.values()
        assert value <= 0
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert arrays[name][count:] == generated[name]
    offsets = arrays["text_offset"]
    assert offsets[count:] == [len(TEXT) + offset for offset in generated["text_offset"]]
    for token, offset in zip(arrays["tokens"], offsets, strict=True):
        if "\\x" not in token:
            assert choice["text"][offset:].startswith(token)


def test_a_generated_token_has_the_same_probability_as_a_part_of_the_prompt(mesh: Mesh) -> None:
    """What an evaluation harness computes: the probability of a continuation."""
    prompt = list(range(300, 400))
    body: dict[str, Any] = {"prompt": prompt, "logprobs": 1, "max_tokens": 9}
    generated = post(mesh, **body, nvext={"extra_fields": ["completion_token_ids"]})
    ids = generated["nvext"]["completion_token_ids"]
    expected = generated["choices"][0]["logprobs"]
    assert len(ids) > 3
    context = [*prompt, *ids]
    choice = echoed(mesh, prompt=[context, prompt], logprobs=1, return_tokens_as_token_ids=True)
    arrays = choice["logprobs"]
    assert arrays["tokens"][:-1] == [f"token_id:{token}" for token in context]
    values = arrays["token_logprobs"][len(prompt) : len(context)]
    assert values == pytest.approx(expected["token_logprobs"])


def test_a_streamed_echo_has_the_entries_of_the_whole_one(mesh: Mesh) -> None:
    long = TEXT * 80  # more tokens than one part has
    whole = echoed(mesh, prompt=long, max_tokens=5)
    text, arrays = "", dict[str, list[Any]]()
    options: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 5, "ignore_eos": True}
    for chunk in events(mesh, prompt=long, **options):
        for choice in chunk["choices"]:
            text += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                arrays.setdefault(name, []).extend(values)
    assert (text, arrays) == (whole["text"], whole["logprobs"])


def test_an_echo_of_too_many_probabilities_is_refused(mesh: Mesh) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": [300] * 20_000, "echo": True}
    for fields in ({"logprobs": 3}, {"logprobs": 0, "n": 4}):
        fields = {**body, **fields, "max_tokens": 1}
        response = mesh.http.post(f"{mesh.url}/v1/completions", json=fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "echo")
        assert "80000 log probabilities" in error["message"]


def test_prefill_and_decode_echo_what_one_worker_echoes(
    mesh: Mesh, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Mesh(tmp_path_factory.mktemp("echo"), workers=0, prefill=1, decode=1) as split:
        for max_tokens in (1, 7):
            assert echoed(split, max_tokens=max_tokens) == echoed(mesh, max_tokens=max_tokens)


def test_an_engine_without_log_probabilities_refuses_the_echo_by_name(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    flags = ["--engine=echo", f"--model-name={MODEL}"]
    with Mesh(tmp_path_factory.mktemp("none"), workers=1, worker_flags=flags) as without:
        body = {"model": MODEL, "prompt": "x", "echo": True, "logprobs": 0, "max_tokens": 1}
        response = without.http.post(f"{without.url}/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] in ("logprobs", "echo")


def test_prefill_and_decode_give_the_entries_of_one_worker(
    mesh: Mesh, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = {"top_logprobs": 3, "max_tokens": 12, "ignore_eos": True}
    expected = chat(mesh, **options)["logprobs"]["content"]
    with Mesh(tmp_path_factory.mktemp("split"), workers=0, prefill=1, decode=1) as split:
        assert chat(split, **options)["logprobs"]["content"] == expected
        assert streamed_chat(split, **options)[1] == expected


def test_entries_of_a_migrated_response_are_those_of_an_undisturbed_one(mesh: Mesh) -> None:
    options = {"top_logprobs": 1, "max_tokens": 120, "ignore_eos": True}
    expected = chat(mesh, **options)["logprobs"]["content"]
    chunks = events(mesh, "chat/completions", **CHAT, logprobs=True, **options)
    entries = list[Any]()
    for number, chunk in enumerate(chunks):
        if number == 10:
            next(worker for worker in mesh.workers if worker.open_slots()).kill()
        entries += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert entries == expected

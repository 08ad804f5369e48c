"""Tokenize and detokenize at the door: exact, as generation tokenizes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.kit.oracle import Oracle
from tests.kit.processes import MODEL, Mesh, mesh_fixture

pytestmark = pytest.mark.slow

ORACLE = Oracle()
TEXT = "Grüße, 世界! <|im_end|> def f(x):\n\treturn x"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <|im_end|> here?"},
]
TOOL = {"type": "function", "function": {"name": "now", "description": "The time."}}


mesh = mesh_fixture(workers=1, worker_flags=["--speedup=0", "--context-length=32768"])


# Any, here and below: JSON.
def post(mesh: Mesh, path: str, **fields: Any) -> httpx.Response:
    return mesh.http.post(f"{mesh.url}{path}", json={"model": MODEL, **fields})


def tokens(mesh: Mesh, **fields: Any) -> Any:
    response = post(mesh, "/tokenize", **fields)
    assert response.status_code == 200, response.text
    value = response.json()
    assert value["count"] == len(value["tokens"])
    return value


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_has_the_tokens_of_the_model_and_back(mesh: Mesh, prefix: str) -> None:
    response = post(mesh, f"{prefix}/tokenize", prompt=TEXT)
    ids = ORACLE.encode(TEXT, special_tokens=True)
    assert response.json() == {
        "count": len(ids),
        "max_model_len": 32_768,
        "tokens": ids,
        "token_strs": None,
    }
    back = post(mesh, f"{prefix}/detokenize", tokens=ids)
    assert back.json() == {"prompt": TEXT}, "special tokens have a text"


def test_options_of_a_text_are_honoured(mesh: Mesh) -> None:
    plain = tokens(mesh, prompt=TEXT, add_special_tokens=False)
    assert plain["tokens"] == ORACLE.encode(TEXT, special_tokens=False)
    named = tokens(mesh, prompt="Hello there", return_token_strs=True)
    assert "".join(named["token_strs"]).replace("Ġ", " ") == "Hello there"
    assert tokens(mesh, prompt="")["tokens"] == ORACLE.encode("", special_tokens=True)


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}])
def test_messages_have_the_tokens_of_their_chat_request(mesh: Mesh, tools: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, **tools}
    value = tokens(mesh, **body)
    chat = post(mesh, "/v1/chat/completions", max_tokens=8, **body).json()
    assert chat["usage"]["prompt_tokens"] == value["count"]
    generated = post(mesh, "/v1/completions", max_tokens=8, prompt=value["tokens"]).json()
    assert generated["usage"]["prompt_tokens"] == value["count"]
    if not tools:
        text = generated["choices"][0]["text"]
        assert text == chat["choices"][0]["message"]["content"], "the same prompt"
    without = tokens(mesh, **body, add_generation_prompt=False)["tokens"]
    assert without == value["tokens"][: len(without)]
    assert len(without) < value["count"]


@pytest.mark.parametrize(
    ("path", "fields", "error"),
    [
        ("/tokenize", {}, (400, "prompt", "missing_required_parameter")),
        ("/tokenize", {"prompt": 1}, (400, "prompt", "invalid_type")),
        ("/tokenize", {"prompt": "a", "messages": []}, (400, "prompt", "invalid_value")),
        ("/tokenize", {"messages": []}, (400, "messages", "invalid_value")),
        ("/tokenize", {"prompt": "a", "n": 1}, (400, "n", "unknown_parameter")),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_special_tokens": True},
            (400, "add_special_tokens", "unsupported_parameter"),
        ),
        ("/tokenize", {"prompt": "a", "model": "none"}, (404, "model", "model_not_found")),
        ("/detokenize", {}, (400, "tokens", "missing_required_parameter")),
        ("/detokenize", {"tokens": [1, -1]}, (400, "tokens[1]", "invalid_value")),
        ("/detokenize", {"tokens": [1, 2**31]}, (400, "tokens[1]", "invalid_value")),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    mesh: Mesh, path: str, fields: dict[str, Any], error: tuple[int, Any, Any]
) -> None:
    response = post(mesh, path, **fields)
    details = response.json()["error"]
    assert (response.status_code, details["param"], details["code"]) == error
    assert details["message"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_the_files_of_a_tokenizer_are_not_shown(mesh: Mesh, prefix: str) -> None:
    response = mesh.http.get(f"{mesh.url}{prefix}/tokenizer_info")
    assert response.status_code == 501
    error = response.json()["error"]
    assert error["code"] == "not_implemented"
    assert "/tokenize and /detokenize" in error["message"]


def test_empty_and_long_lists_of_tokens_are_decoded(mesh: Mesh) -> None:
    assert post(mesh, "/detokenize", tokens=[]).json() == {"prompt": ""}
    text = "words and words " * 4000
    ids = tokens(mesh, prompt=text)["tokens"]
    assert post(mesh, "/detokenize", tokens=ids).json() == {"prompt": text}

"""Invalid input over HTTP: each case has its response; a valid request succeeds after each one.

Run with -s to see the table.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.waiting import WAIT_S

CHAT_COMPLETIONS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HUGE = 10**400
MEGABYTE = b" " * 1_000_000
INVALID = "invalid_request_error"


@dataclass(frozen=True, slots=True)
class BadInputCase:
    """One request and its expected response. body: sent `repeat` times in a row; None: no body.

    status, param, code, type: of the response; is_json: whether it is an OpenAI error.
    """

    name: str
    status: int
    param: str | None
    body: bytes | None
    code: str | None = None
    path: str = CHAT_COMPLETIONS
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    type: str = INVALID
    is_json: bool = True
    repeat: int = 1


def chat(**changes: Any) -> bytes:
    """A valid chat body with these changes; a value of `...` removes the key."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return json.dumps({k: v for k, v in (body | changes).items() if v is not ...}).encode()


def text(**changes: Any) -> bytes:
    """The same for a completion."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
    return json.dumps({k: v for k, v in (body | changes).items() if v is not ...}).encode()


def one_message(content: Any, role: Any = "user") -> list[Any]:
    return [{"role": role, "content": content}]


MISSING, TYPE, VALUE, JSON = (
    *("missing_required_parameter", "invalid_type", "invalid_value", "invalid_json"),
)
UNSUPPORTED, LONG = "unsupported_parameter", "context_length_exceeded"

ROWS = [
    BadInputCase("unknown model", 404, "model", chat(model="gpt-9"), "model_not_found"),
    BadInputCase("unknown model, 100 kB name", 400, "model", chat(model="m" * 100_000), VALUE),
    BadInputCase("no model", 400, "model", chat(model=...), MISSING),
    BadInputCase("model is a number", 400, "model", chat(model=5), TYPE),
    BadInputCase("model with a NUL", 404, "model", chat(model="a\0b"), "model_not_found"),
    BadInputCase("no messages", 400, "messages", chat(messages=...), MISSING),
    BadInputCase("empty messages", 400, "messages", chat(messages=[]), VALUE),
    BadInputCase("messages is a string", 400, "messages", chat(messages="hi"), TYPE),
    BadInputCase("message is a string", 400, "messages[0]", chat(messages=["hi"]), TYPE),
    BadInputCase(
        "unknown role", 400, "messages[0].role", chat(messages=one_message("x", "wizard")), VALUE
    ),
    BadInputCase(
        "content is a number", 400, "messages[0].content", chat(messages=one_message(5)), TYPE
    ),
    BadInputCase(
        "content is an image",
        400,
        "messages[0].content[0].image_url",
        chat(messages=one_message([{"type": "image_url", "image_url": {"url": "http://x"}}])),
        UNSUPPORTED,
    ),
    BadInputCase("negative max_tokens", 400, "max_tokens", chat(max_tokens=-1), VALUE),
    BadInputCase("max_tokens zero", 400, "max_tokens", chat(max_tokens=0), VALUE),
    BadInputCase("max_tokens is text", 400, "max_tokens", chat(max_tokens="5"), TYPE),
    BadInputCase("max_tokens is true", 400, "max_tokens", chat(max_tokens=True), TYPE),
    BadInputCase("max_tokens is 1.5", 400, "max_tokens", chat(max_tokens=1.5), TYPE),
    BadInputCase("max_tokens of 400 digits", 400, None, chat(max_tokens=HUGE), JSON),
    BadInputCase("max_tokens above the context", 400, "max_tokens", chat(max_tokens=40_000), LONG),
    BadInputCase("temperature too high", 400, "temperature", chat(temperature=2.1), VALUE),
    BadInputCase("temperature NaN", 400, None, chat(temperature=float("nan")), JSON),
    BadInputCase("n of 129", 400, "n", chat(n=129), VALUE),
    BadInputCase("stop of 33 texts", 400, "stop", chat(stop=["x"] * 33), VALUE),
    BadInputCase("stop is empty text", 400, "stop", chat(stop=""), VALUE),
    BadInputCase("stream is text", 400, "stream", chat(stream="yes"), TYPE),
    BadInputCase(
        "stream_options without stream",
        400,
        "stream_options",
        chat(stream_options={"include_usage": True}),
        VALUE,
    ),
    BadInputCase("unknown field", 400, "wibble", chat(wibble=1), "unknown_parameter"),
    BadInputCase("tools", 400, "tools[0].type", chat(tools=[{"type": "custom"}]), UNSUPPORTED),
    BadInputCase("seed above 64 bits", 400, "seed", chat(seed=2**64), TYPE),
    BadInputCase("no prompt", 400, "prompt", text(prompt=...), MISSING, COMPLETIONS),
    BadInputCase(
        "prompts of a text and ids", 400, "prompt[1]", text(prompt=["a", [1]]), TYPE, COMPLETIONS
    ),
    BadInputCase(
        "token id above the vocabulary", 400, "prompt", text(prompt=[4096]), VALUE, COMPLETIONS
    ),
    BadInputCase("negative token id", 400, "prompt[0]", text(prompt=[-1]), VALUE, COMPLETIONS),
    BadInputCase(
        "prompt too long", 400, "prompt", text(prompt="able about " * 20_000), LONG, COMPLETIONS
    ),
    BadInputCase("prompt of no tokens", 400, "prompt", text(prompt=""), VALUE, COMPLETIONS),
    BadInputCase("malformed JSON", 400, None, b'{"model": ', JSON),
    BadInputCase("JSON is a list", 400, None, b"[]", TYPE),
    BadInputCase("JSON is null", 400, None, b"null", TYPE),
    BadInputCase("two JSON values", 400, None, chat() + b"{}", JSON),
    BadInputCase("empty body", 400, None, b"", JSON),
    BadInputCase("no body and no content-length", 400, None, None, JSON),
    BadInputCase("invalid UTF-8", 400, None, chat().replace(b"hi", b"\xff\xfe"), JSON),
    BadInputCase("a lone surrogate", 400, None, chat().replace(b'"hi"', b'"\\ud800"'), JSON),
    BadInputCase("a NUL byte", 400, None, chat() + b"\0", JSON),
    BadInputCase("100,000 open brackets", 400, None, b"[" * 100_000, JSON),
    BadInputCase("lists 100,000 deep", 400, None, b"[" * 100_000 + b"]" * 100_000, JSON),
    BadInputCase(
        "objects 200 deep in an unknown field",
        400,
        "deep",
        chat(deep=...)[:-1] + b', "deep": ' + b'{"a":' * 200 + b"1" + b"}" * 201,
        "unknown_parameter",
    ),
    BadInputCase(
        "1,000 unknown fields", 400, "body", chat(**{f"f{i}": i for i in range(1000)}), VALUE
    ),
    BadInputCase("50 MB body", 413, None, MEGABYTE, "body_too_large", repeat=50),
    BadInputCase(
        "content-length of 50 GB",
        413,
        None,
        b"{",
        "body_too_large",
        headers={"content-length": "50000000000"},
    ),
    BadInputCase(
        "content-length is text",
        400,
        None,
        None,
        headers={"content-length": "many"},
        is_json=False,
    ),
    BadInputCase(
        "content-length is negative",
        400,
        None,
        None,
        headers={"content-length": "-5"},
        is_json=False,
    ),
    BadInputCase("GET on a POST route", 405, None, None, "method_not_allowed", method="GET"),
    BadInputCase("PUT on a POST route", 405, None, chat(), "method_not_allowed", method="PUT"),
    BadInputCase("an unknown route", 404, None, chat(), "not_found", path="/v1/chat/nonsense"),
    BadInputCase(
        "a slash behind a route", 404, None, chat(), "not_found", path=f"{CHAT_COMPLETIONS}/"
    ),
    BadInputCase(
        "a slash where a model's name belongs",
        404,
        "model",
        None,
        "model_not_found",
        method="GET",
        path="/v1/models/",
    ),
    BadInputCase("a route with ..", 404, None, chat(), "not_found", path="/v1/../etc/passwd"),
]

# Unusual but valid: these are served.
GOOD = {
    "a chunked body": (chat(), {"transfer-encoding": "chunked"}),
    "a content-type that is not JSON": (chat(), {"content-type": "text/plain"}),
    "an invalid content-type": (chat(), {"content-type": "\xff/;;="}),
    "an x-request-id with spaces": (chat(), {"x-request-id": "not one word"}),
    "an x-request-id of 4 kB": (chat(), {"x-request-id": "x" * 4096}),
    "an invalid traceparent": (chat(), {"traceparent": "00-zz-\xff-01"}),
    "a NUL in the text": (chat(messages=one_message("a\0b")), {}),
    "spaces around the JSON": (b" \n" + chat() + b"\r\n ", {}),
    "an escaped surrogate pair": (chat(messages=one_message("\U0001f389")), {}),
}


mesh = mesh_fixture(workers=1, worker_flags=["--speedup=0", "--context-length=32768"])


def send(
    mesh: Mesh,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    repeat: int = 1,
) -> tuple[int, dict[str, str], bytes]:
    """Sends one request on its own connection; `headers` replace those derived from the body."""
    connection = http.client.HTTPConnection(mesh.url.removeprefix("http://"), timeout=WAIT_S)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        is_chunked = headers.get("transfer-encoding") == "chunked"
        if body is not None and not is_chunked and "content-length" not in headers:
            connection.putheader("content-length", str(len(body) * repeat))
        for name, value in headers.items():
            connection.putheader(name, value.encode("latin-1"))
        connection.endheaders()
        if body is not None and is_chunked:
            for part in (body[:10], body[10:]):
                connection.send(b"%x\r\n%b\r\n" % (len(part), part))
            connection.send(b"0\r\n\r\n")
        elif body is not None:
            for _ in range(repeat):
                connection.send(body)
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def assert_serves(mesh: Mesh) -> None:
    status, _, response = send(mesh, "POST", CHAT_COMPLETIONS, chat(), {})
    assert status == 200, response
    assert json.loads(response)["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_invalid_input_is_refused_by_name_and_the_next_request_is_served(
    mesh: Mesh, row: BadInputCase
) -> None:
    status, headers, response = send(mesh, row.method, row.path, row.body, row.headers, row.repeat)
    if not row.is_json:  # refused by the HTTP parser, before the request exists
        print(f"| {row.name} | {status} | - | - | {response[:60]!r} |")
        assert status == row.status
        assert_serves(mesh)
        return
    error = json.loads(response)["error"]
    print(
        f"| {row.name} | {status} | {error['code']} | {error['param']} | {error['message'][:90]} |"
    )
    assert set(error) == {"message", "type", "param", "code"}
    assert (status, error["type"], error["param"]) == (row.status, row.type, row.param)
    assert error["code"] == row.code
    assert 0 < len(error["message"]) < 1000
    assert headers["content-type"] == "application/json"
    assert ("allow" in headers) == (status == 405)
    assert_serves(mesh)


def test_a_far_too_long_prompt_is_refused_before_it_is_tokenized(mesh: Mesh) -> None:
    for path, body in (
        (CHAT_COMPLETIONS, chat(messages=one_message("able about " * 100_000))),
        (COMPLETIONS, text(prompt="able about " * 100_000)),
    ):
        status, _, response = send(mesh, "POST", path, body, {})
        error = json.loads(response)["error"]
        assert (status, error["code"]) == (400, LONG)
        assert "resulted in at least" in error["message"]
    assert_serves(mesh)


@pytest.mark.parametrize("name", GOOD)
def test_unusual_input_is_served(mesh: Mesh, name: str) -> None:
    body, headers = GOOD[name]
    status, response_headers, response = send(mesh, "POST", CHAT_COMPLETIONS, body, headers)
    assert status == 200, response
    assert json.loads(response)["choices"][0]["finish_reason"]
    assert response_headers["x-request-id"].isprintable()
    assert len(response_headers["x-request-id"]) <= 128


def test_the_frontend_logged_no_internal_error(mesh: Mesh) -> None:
    assert mesh.frontend.events("request_failed") == []
    assert mesh.frontend.process.poll() is None

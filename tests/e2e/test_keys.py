"""API keys at the door: who may do what, and that tenants do not share KV, sessions and responses.

Two frontends have keys, one has none; all use the same workers.
"""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from common.api_keys import Permission
from meshctl.cli import run_command
from meshctl.commands.keys import VARIABLE
from tests.kit.processes import MODEL, ROOT, Mesh
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

BLOCK = 16
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
COMPLETION = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}
ALL = ",".join(Permission)
# Scopes of a key by its name, which is also that of its tenant up to the digit.
SCOPES = {
    "ops0": ALL,
    "acme1": "infer,embeddings",
    "acme2": "infer,explain",
    "bravo1": "infer,explain,routing",
    **{
        f"no-{one}0": ",".join(other for other in Permission if other is not one)
        for one in Permission
    },
}

# Any: JSON.
Json = dict[str, Any]


class Keys:
    """The file of the keys. texts: the keys by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts = {
            name: self.run("create", name[:-1], "--scopes", scopes)
            for name, scopes in SCOPES.items()
        }
        self.texts["expired"] = self.run("create", "acme", "--days=1e-6")

    def run(self, *arguments: str) -> str:
        """The output of `meshctl keys`."""
        with redirect_stdout(io.StringIO()) as output:
            assert run_command(["keys", f"--api-keys={self.path}", *arguments], {}) == 0
        return output.getvalue().strip()

    def id_of(self, text: str) -> str:
        """The id of the newest key of a tenant."""
        rows = [line.split() for line in self.run("list").splitlines()]
        return [row[0] for row in rows if row[1] == text][-1]

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.texts[name]}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def keys(folder: Path) -> Keys:
    return Keys(folder / "keys.json")


@pytest.fixture(scope="module")
def mesh(folder: Path, keys: Keys) -> Iterator[Mesh]:
    flags = ["--session-affinity-ttl-s=300"]
    with Mesh(
        folder, workers=2, frontends=0, worker_flags=["--speedup=20"], router_flags=flags
    ) as mesh:
        mesh.http.headers.update(keys.headers("ops0"))
        key_flag = f"--api-keys={keys.path}"
        for more in ([key_flag, f"--audit-log={folder}/audit.jsonl"], [key_flag], []):
            mesh.spawn("frontend", *more)
        for frontend in mesh.running("frontend"):
            frontend.wait_ready()
        wait_for(mesh.is_complete, "the frontends use the router and the workers")
        wait_for(
            lambda: all(len(mesh.known_instance_ids("frontend", url)) == 3 for url in mesh.urls),
            "the frontends discover each other",
        )
        yield mesh


def send(
    mesh: Mesh,
    path: str,
    body: Mapping[str, object] | None,
    headers: Mapping[str, str],
    *,
    frontend: int = 0,
    method: str = "",
) -> httpx.Response:
    """body: None: a GET."""
    return httpx.request(
        method or ("GET" if body is None else "POST"),
        mesh.urls[frontend] + path,
        json=body,
        headers=dict(headers),
        timeout=WAIT_S,
        trust_env=False,
    )


def error_of(response: httpx.Response) -> Json:
    error: Json = response.json()["error"]
    return error


def test_a_request_without_a_valid_key_is_a_401(mesh: Mesh, keys: Keys) -> None:
    good, expired = keys.texts["acme1"], keys.texts["expired"]
    for headers, part in (
        ({}, "no API key"),
        ({"authorization": "Bearer kvmesh_wrong"}, "not valid"),
        ({"authorization": f"Basic {good}"}, "no API key"),
        ({"x-api-key": good[:-1]}, "not valid"),
        ({"x-api-key": good, "authorization": "Bearer other"}, "several"),
        ({"x-api-key": expired}, "expired"),
    ):
        requests: list[tuple[str, Json | None]] = [
            ("/v1/chat/completions", CHAT),
            ("/v1/embeddings", {"model": MODEL, "input": "a"}),
            *((path, None) for path in ("/v1/models", "/metrics", "/health", "/openapi.json")),
            ("/v1/responses/resp_1", None),
            ("/no-such-path", None),
        ]
        for path, body in requests:
            response = send(mesh, path, body, headers)
            assert response.status_code == 401, (path, response.text)
            error = error_of(response)
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            assert part in error["message"]
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            response = send(mesh, path, CHAT, headers)
            assert (response.status_code, response.json()["type"]) == (401, "error")
            assert error_of(response)["type"] == "authentication_error"


def test_both_headers_carry_a_key_and_health_checks_need_none(mesh: Mesh, keys: Keys) -> None:
    text = keys.texts["acme1"]
    both = {"x-api-key": text, "authorization": f"bearer {text}"}
    for headers in ({"x-api-key": text}, {"Authorization": f"Bearer {text}"}, both):
        assert send(mesh, "/v1/chat/completions", CHAT, headers).status_code == 200
        assert send(mesh, "/v1/messages", CHAT, headers).status_code == 200
        assert send(mesh, "/v1/models", None, headers).status_code == 200
    for path in ("/live", "/ready"):
        assert send(mesh, path, None, {}).status_code == 200
    # A frontend without keys ignores them.
    assert send(mesh, "/v1/chat/completions", CHAT, both, frontend=2).status_code == 200
    assert send(mesh, "/metrics", None, {}, frontend=2).status_code == 200


ROUTING_FIELDS: list[tuple[str, Any]] = [
    ("backend_instance_id", 1),
    ("prefill_worker_id", 1),
    ("decode_worker_id", 1),
    ("dp_rank", 0),
    ("prefill_dp_rank", 0),
    ("allowed_worker_ids", [1]),
    ("router_config_override", {"overlap_score_credit": 0}),
    ("routing_constraints", {"preferred_taints": {"a": 1}}),
]
TEXT = "/v1/completions"


@pytest.mark.parametrize(
    ("scope", "path", "body", "headers", "param"),
    [
        *(("infer", path, CHAT, {}, None) for path in ("/v1/chat/completions", "/v1/messages")),
        ("infer", TEXT, COMPLETION, {}, None),
        ("infer", "/v1/responses", {"model": MODEL, "input": "a"}, {}, None),
        ("infer", "/v1/responses/resp_1", None, {}, None),
        ("infer", "/tokenize", COMPLETION, {}, None),
        ("embeddings", "/v1/embeddings", {"model": MODEL, "input": "a"}, {}, None),
        ("embeddings", "/v1/rerank", {"model": MODEL, "query": "a", "documents": ["b"]}, {}, None),
        ("embeddings", "/v1/score", {"model": MODEL, "text_1": "a", "text_2": "b"}, {}, None),
        ("admin", "/metrics", None, {}, None),
        ("admin", "/health", None, {}, None),
        ("explain", "/v1/internal/preprocess", COMPLETION, {}, None),
        *(
            ("explain", TEXT, COMPLETION | {"nvext": {"extra_fields": [one]}}, {}, "extra_fields")
            for one in ("worker_id", "timing", "kv_hit")
        ),
        *(
            ("explain", TEXT, COMPLETION | {"nvext": {"annotations": [one]}}, {}, "annotations")
            for one in ("query_instance_id", "query_instance_id:", "llm_metrics")
        ),
        *(
            ("routing", TEXT, COMPLETION | {"nvext": {name: value}}, {}, name)
            for name, value in ROUTING_FIELDS
        ),
        *(
            (
                "routing",
                "/v1/chat/completions",
                CHAT | {"kvmesh": {"agent_hints": {name: 1}}},
                {},
                f"kvmesh.agent_hints.{name}",
            )
            for name in ("priority", "strict_priority", "osl")
        ),
        ("routing", TEXT, COMPLETION | {"priority": -1}, {}, "priority"),
        ("routing", "/v1/messages", CHAT, {"x-kvmesh-priority": "1"}, None),
        (
            *("routing", "/v1/embeddings", {"model": MODEL, "input": "a"}),
            *({"x-kvmesh-decode-worker-id": "1"}, "x-kvmesh-decode-worker-id"),
        ),
    ],
)
def test_a_missing_scope_is_a_403_that_names_it(
    mesh: Mesh, keys: Keys, scope: str, path: str, body: Json, headers: Json, param: str | None
) -> None:
    refused = send(mesh, path, body, {**headers, **keys.headers(f"no-{scope}0")})
    assert refused.status_code == 403, refused.text
    error = error_of(refused)
    assert f"scope '{scope}'" in error["message"]
    if path != "/v1/messages":
        assert (error["type"], error["code"]) == ("permission_error", "permission_denied")
        assert (error["param"] or "").removeprefix("nvext.") == (param or "")
    # Whatever else the request lacks, a key with all scopes may send it.
    assert send(mesh, path, body, {**headers, **keys.headers("ops0")}).status_code not in (401, 403)


def prompt_of(seed: int) -> list[int]:
    """Token ids of eight blocks, unlike those of other seeds."""
    return [290 + (seed * 7 + n * n) % 1500 for n in range(8 * BLOCK + 1)]


def cached(
    mesh: Mesh, prompt: list[int], headers: Mapping[str, str], frontend: int = 0, **fields: Any
) -> int | None:
    """What a client learns of the cache."""
    response = send(
        mesh, TEXT, COMPLETION | {"prompt": prompt} | fields, headers, frontend=frontend
    )
    assert response.status_code == 200, response.text
    details = response.json()["usage"].get("prompt_tokens_details")
    return None if details is None else details["cached_tokens"]


def predicted(mesh: Mesh, prompt: list[int], headers: Mapping[str, str], frontend: int = 0) -> int:
    """What a query of the placement reveals, which leaves no trace in the cache."""
    query = {"annotations": ["query_instance_id"]}
    body = COMPLETION | {"prompt": prompt, "nvext": query}
    response = send(mesh, TEXT, body, headers, frontend=frontend)
    count: int = response.json()["nvext"]["kv_hit"]["predicted_cached_tokens"]
    return count


def test_a_client_cannot_learn_what_another_tenant_has_sent(mesh: Mesh, keys: Keys) -> None:
    """The guessing attack: the attacker sends each candidate and reads whether it was cached."""
    bravo, acme = keys.headers("bravo1"), keys.headers("acme2")
    candidates = list(map(prompt_of, range(6)))
    secrets = candidates[::2]

    def hits(victim: Mapping[str, str], attacker: Mapping[str, str], frontend: int) -> list[bool]:
        for secret in secrets:
            cached(mesh, secret, victim, frontend)
        return [
            bool(predicted(mesh, one, attacker, frontend) or cached(mesh, one, attacker, frontend))
            for one in candidates
        ]

    assert hits(bravo, acme, 0) == [False] * 6
    # Without keys, and within the tenant, the same requests are hits.
    assert hits({}, {}, 2) == [True, False] * 3
    assert all(cached(mesh, one, bravo) == 8 * BLOCK for one in secrets)
    assert all(predicted(mesh, one, bravo) for one in secrets)
    # Neither does a client without a key learn it, nor one that chooses its salt.
    fresh = prompt_of(50)
    cached(mesh, fresh, bravo)
    assert cached(mesh, fresh, {}, 2) == 0
    assert cached(mesh, fresh, acme, cache_salt="bravo") == cached(mesh, fresh, acme) == 0
    # A salt separates the requests of a tenant from each other too.
    assert cached(mesh, fresh, bravo, cache_salt="user-1") == 0
    assert cached(mesh, fresh, bravo, cache_salt="user-1") == 8 * BLOCK
    # A key without the scope sees no hits, in whatever API.
    acme1 = keys.headers("acme1")
    assert [cached(mesh, fresh, acme1) for _ in range(2)] == [None, None]
    for path, body in (
        ("/v1/messages", CHAT),
        ("/v1/responses", {"model": MODEL, "input": "a" * 300, "max_output_tokens": 2}),
    ):
        for _ in range(2):
            usage = json.dumps(send(mesh, path, body, acme1).json()["usage"])
            assert '"cached_tokens": 0' in usage or '"cache_read_input_tokens": 0' in usage
    stream = COMPLETION | {"prompt": fresh, "stream": True}
    text = send(mesh, TEXT, stream | {"stream_options": {"include_usage": True}}, acme1).text
    assert '"prompt_tokens":129' in text.replace(" ", "")
    assert "cached_tokens" not in text


def test_tenants_have_sessions_of_their_own(mesh: Mesh, keys: Keys) -> None:
    def affinity(client_id: str, key: str) -> list[str]:
        headers = {**keys.headers(key), "x-kvmesh-session-id": "s", "x-request-id": client_id}
        assert send(mesh, TEXT, COMPLETION, headers).status_code == 200
        reasons: list[str] = mesh.request_line(client_id)["routing"]
        return [one for one in reasons if "session" in one]

    assert affinity("s-1", "acme1") == ["session bound"]
    assert affinity("s-2", "acme2") == ["session kept"]
    assert affinity("s-3", "bravo1") == ["session bound"]


def test_stored_responses_belong_to_a_tenant(mesh: Mesh, keys: Keys) -> None:
    acme, bravo = keys.headers("acme1"), keys.headers("bravo1")
    body = {"model": MODEL, "input": "a", "max_output_tokens": 2}
    stored = send(mesh, "/v1/responses", body, acme).json()["id"]
    path = f"/v1/responses/{stored}"
    unknown = stored[:5] + ("1" if stored[5] == "0" else "0") + stored[6:]
    for frontend in (0, 1):
        items = send(mesh, f"{path}/input_items", None, bravo, frontend=frontend)
        assert items.status_code == 404
        # As if it did not exist.
        missing = send(mesh, f"/v1/responses/{unknown}", None, acme, frontend=frontend).text
        other = send(mesh, path, None, bravo, frontend=frontend)
        assert (other.status_code, other.text) == (404, missing.replace(unknown, stored))
        assert send(mesh, path, None, bravo, frontend=frontend, method="DELETE").status_code == 404
        continued = body | {"previous_response_id": stored}
        refused = send(mesh, "/v1/responses", continued, bravo, frontend=frontend)
        assert error_of(refused)["code"] == "previous_response_not_found"
        reference = body | {"input": [{"type": "item_reference", "id": f"msg_{stored[5:]}_0"}]}
        assert send(mesh, "/v1/responses", reference, bravo, frontend=frontend).status_code == 400
        # Another key of the tenant may.
        owner = keys.headers("acme2")
        assert send(mesh, path, None, owner, frontend=frontend).json()["id"] == stored
        assert send(mesh, "/v1/responses", continued, owner, frontend=frontend).status_code == 200
    assert send(mesh, path, None, {}, frontend=2).status_code == 404
    assert send(mesh, path, None, acme, frontend=1, method="DELETE").status_code == 200
    assert send(mesh, path, None, acme).status_code == 404


def test_a_revoked_key_ends_no_stream_and_starts_none(mesh: Mesh, keys: Keys) -> None:
    key = {"x-api-key": keys.run("create", "leaver")}

    def status() -> int:
        return send(mesh, TEXT, COMPLETION, key).status_code

    wait_for(lambda: status() == 200, "the new key is valid")
    body = COMPLETION | {"max_tokens": 16_000, "ignore_eos": True, "stream": True}
    headers = {**key, "x-request-id": "leaver"}
    with httpx.stream(
        "POST", mesh.url + TEXT, json=body, headers=headers, timeout=WAIT_S, trust_env=False
    ) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        environ = {"PYTHONPATH": f"{ROOT}/protos:{ROOT}", VARIABLE: str(keys.path)}
        revoke = [sys.executable, "-m", "meshctl", "keys", "revoke", keys.id_of("leaver")]
        subprocess.run(revoke, cwd=ROOT, env=environ, check=True, timeout=WAIT_S)
        wait_for(lambda: status() == 401, "the key is revoked")
        assert not mesh.request_lines("leaver"), "the stream has ended"
        for _ in range(200):
            assert "error" not in next(lines)


def test_each_event_of_a_websocket_needs_a_valid_key(mesh: Mesh, keys: Keys) -> None:
    """The handshake too. Tenants continue no responses of each other."""
    url = mesh.url.replace("http", "ws", 1) + "/v1/responses"

    def open_socket(key: str) -> ClientConnection:
        return connect(url, proxy=None, additional_headers={"authorization": f"Bearer {key}"})

    def last_event(client: ClientConnection, **fields: Any) -> Json:
        event = {"type": "response.create", "model": MODEL, "input": "Hi", "max_output_tokens": 2}
        client.send(json.dumps(event | fields))
        # Ends: the last event, or the time limit of `recv`.
        while True:
            received: Json = json.loads(client.recv(WAIT_S))
            if received["type"] in ("error", "response.completed", "response.incomplete"):
                return received

    for name, status in (("expired", 401), ("no-infer0", 403)):
        with pytest.raises(InvalidStatus) as refused:
            open_socket(keys.texts[name])
        assert refused.value.response.status_code == status
    key = keys.run("create", "quitter")
    wait_for(
        lambda: send(mesh, TEXT, COMPLETION, {"x-api-key": key}).status_code == 200,
        "the new key is valid",
    )
    with open_socket(key) as client, open_socket(keys.texts["acme1"]) as other:
        first = last_event(client)["response"]["id"]
        assert last_event(client, previous_response_id=first)["type"] != "error"
        assert last_event(other, previous_response_id=first)["error"]["code"] == (
            "previous_response_not_found"
        )
        pinned = last_event(other, nvext={"backend_instance_id": 1})
        assert (pinned["status"], pinned["error"]["code"]) == (403, "permission_denied")
        keys.run("revoke", keys.id_of("quitter"))
        error = wait_for(
            lambda: [one for one in [last_event(client)] if one["type"] == "error"],
            "the key is revoked",
        )[0]
        assert (error["status"], error["error"]["code"]) == (401, "invalid_api_key")


def test_a_rotated_key_overlaps_with_the_new_one(mesh: Mesh, keys: Keys) -> None:
    def status(text: str) -> int:
        return send(mesh, TEXT, COMPLETION, {"x-api-key": text}).status_code

    old = keys.run("create", "rotor")
    wait_for(lambda: status(old) == 200, "the first key is valid")
    new = keys.run("rotate", keys.id_of("rotor"), "--overlap-s=4")
    wait_for(lambda: status(new) == 200, "the new key is valid")
    assert status(old) == 200
    wait_for(lambda: status(old) == 401, "the overlap has ended")
    assert status(new) == 200


def test_an_invalid_file_changes_no_keys_and_is_logged_once(mesh: Mesh, keys: Keys) -> None:
    content = keys.path.read_bytes()
    try:
        keys.path.write_text('{"tenants": {"a": {"keys": [{"id": "k", "secret": "x"}]}}}')
        (event,) = wait_for(lambda: mesh.frontend.events("api_keys_rejected"), "it is logged")
        assert "tenants.a.keys.0" in event["error"]
        assert send(mesh, TEXT, COMPLETION, keys.headers("acme1")).status_code == 200
    finally:
        keys.path.write_bytes(content)
    loaded = len(mesh.frontend.events("api_keys_loaded"))
    added = {"x-api-key": keys.run("create", "late")}
    wait_for(lambda: send(mesh, TEXT, COMPLETION, added).status_code == 200, "it is read again")
    wait_for(lambda: len(mesh.frontend.events("api_keys_loaded")) > loaded, "it is logged")
    assert len(mesh.frontend.events("api_keys_rejected")) == 1


def test_logs_have_the_tenant_and_the_key_id_and_never_a_key(
    mesh: Mesh, keys: Keys, folder: Path
) -> None:
    headers = {**keys.headers("acme1"), "x-request-id": "logged"}
    assert send(mesh, TEXT, COMPLETION, headers).status_code == 200
    wrong = {"x-api-key": "kvmesh_wrong_and_never_logged", "x-request-id": "refused"}
    assert send(mesh, TEXT, COMPLETION, wrong).status_code == 401
    line, refused = mesh.request_line("logged"), mesh.request_line("refused")
    assert (line["tenant"], line["key_id"][:4]) == ("acme", "key_")
    assert (refused["status"], refused["failure"]) == (401, "INVALID_API_KEY")
    assert "tenant" not in refused
    audit = folder / "audit.jsonl"
    wait_for(lambda: '"x_request_id":"refused"' in audit.read_text(), "the audit log has it")
    records = map(json.loads, audit.read_text().splitlines())
    (record,) = (one for one in records if one.get("x_request_id") == "logged")
    assert (record["tenant"], record["key_id"]) == (line["tenant"], line["key_id"])
    metrics = send(mesh, "/metrics", None, keys.headers("ops0")).text
    assert 'error_type="unauthorized"' in metrics
    written = [metrics, audit.read_text(), *(one.log_path.read_text() for one in mesh.services)]
    for secret in (*keys.texts.values(), wrong["x-api-key"]):
        assert not any(secret in text for text in written)
        assert secret not in keys.path.read_text()
    named = [line for line in metrics.splitlines() if re.search("acme|bravo|key_", line)]
    assert named
    assert all(line.startswith("kvmesh_frontend_usage_") for line in named)


def test_the_sdks_raise_their_own_errors(mesh: Mesh, keys: Keys) -> None:
    def client(key: str) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(trust_env=False)
        return openai.OpenAI(base_url=f"{mesh.url}/v1", api_key=key, http_client=http)

    messages: Any = CHAT["messages"]
    with client(keys.texts["acme1"]) as good:
        response = good.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
        assert response.usage is not None
        assert response.usage.completion_tokens == 2
        with pytest.raises(openai.PermissionDeniedError) as denied:
            good.chat.completions.create(
                model=MODEL, messages=messages, extra_headers={"x-kvmesh-priority": "1"}
            )
        assert denied.value.param == "x-kvmesh-priority"
    with client("sk-wrong") as bad, pytest.raises(openai.AuthenticationError) as refused:
        bad.chat.completions.create(model=MODEL, messages=messages)
    assert refused.value.code == "invalid_api_key"
    http = anthropic.DefaultHttpxClient(trust_env=False)
    with (
        anthropic.Anthropic(base_url=mesh.url, api_key="wrong", http_client=http) as other,
        pytest.raises(anthropic.AuthenticationError, match="authentication_error"),
    ):
        other.messages.create(model=MODEL, messages=messages, max_tokens=2)
    with anthropic.Anthropic(base_url=mesh.url, api_key=keys.texts["acme1"]) as own:
        assert own.messages.create(model=MODEL, messages=messages, max_tokens=2).content


PATH_ENDS = [
    *("%0A", "%0a", "%0D%0A", "%00", "%09", "%20", "%2F", "/", "//", "%2f", ";", ";a=b", "%3B"),
    *("%3F", "?", "?a=b", "#", "%23", "%C2%A0", "%E2%80%A8", "%85", "%FF", "%1F", "%7F", "."),
    *("/.", "/..", "/../metrics", "%2e", "/%2e", "%5C", "%25", "%250A", "%C0%8A"),
]
PATH_BEGINS = ["", "/", "//", "/.", "/v1/..", "/live/..", "/%2e", "/%2F", "/%2f..", "/;", "/%20"]


@pytest.mark.parametrize("path", ["/metrics", "/health"])
def test_no_spelling_of_a_path_reaches_a_route_without_its_scope(
    mesh: Mesh, keys: Keys, path: str
) -> None:
    """The permission is that of the route which dispatch chooses, for every spelling."""
    spelled = [path[:1] + f"%{ord(path[1]):02X}" + path[2:], path.upper(), path.title()]
    spellings = [
        *(path + end for end in PATH_ENDS),
        *(begin + path for begin in PATH_BEGINS),
        *spelled,
        *(each + "%0A" for each in spelled),
    ]
    address = mesh.urls[0].removeprefix("http://")
    for spelling in spellings:
        # Raw, because clients normalize paths.
        assert raw_status(address, spelling, keys.texts["acme1"]) in (400, 403, 404), spelling
    served = {each for each in spellings if raw_status(address, each, keys.texts["ops0"]) == 200}
    # Encoded letters and a query name the same route; nothing else does.
    assert {path, spelled[0], f"{path}?", f"{path}?a=b", f"{path}#"} == served


def raw_status(address: str, path: str, key: str) -> int:
    """The status of a GET whose path is sent as it is."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        head = f"GET {path} HTTP/1.1\r\nhost: {address}\r\nx-api-key: {key}\r\nconnection: close"
        connection.sendall(f"{head}\r\n\r\n".encode())
        return int(connection.makefile("rb").readline().split()[1])

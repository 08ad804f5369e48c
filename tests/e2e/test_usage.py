"""What clients used: counters, records and the `usage` of responses are equal, for every API and
however requests end; records survive the kill of their process."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.usage import (
    COUNTS,
    DAY_S,
    DIMENSIONS,
    USAGE_PATH,
    UsageCounts,
    UsageKey,
    UsagePage,
    UsageQuery,
    total,
)
from meshctl.cli import run_command
from tests.kit.processes import MODEL, Mesh, Service
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

ADAPTER = "french"
# Some milliseconds a token.
SPEED = 2
PROMPT = list(range(300, 340))
MESSAGES = [{"role": "user", "content": "Tell me of a city."}]
PREFIX = "kvmesh_frontend_usage_"
# Well above the 0.1 s between two writes.
COUNTED_S = 5.0
NONE = UsageCounts()

# Any: JSON.
Json = dict[str, Any]
Use = dict[UsageKey, UsageCounts]


class Keys:
    """The file of the keys: two of one tenant, one of another, and that of the operator."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.json"
        self.ids: dict[str, UsageKey] = {}
        self.texts: dict[str, str] = {}
        for name, tenant, scopes in (
            ("ops", "ops", "admin"),
            ("one", "acme", "infer,embeddings,explain"),
            ("two", "acme", "infer,explain"),
            ("bravo", "bravo", "infer,explain"),
        ):
            arguments = ["create", tenant, f"--scopes={scopes}", "--json"]
            with redirect_stdout(io.StringIO()) as output:
                assert run_command(["keys", f"--api-keys={self.path}", *arguments], {}) == 0
            created = json.loads(output.getvalue())
            self.texts[name] = created["key"]
            self.ids[name] = UsageKey(tenant, created["id"])

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.texts[name]}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def keys(folder: Path) -> Keys:
    return Keys(folder)


@pytest.fixture(scope="module")
def mesh(folder: Path, keys: Keys) -> Iterator[Mesh]:
    worker_flags = [f"--speedup={SPEED}", f"--loras={ADAPTER}"]
    with Mesh(folder, workers=2, frontends=0, worker_flags=worker_flags) as mesh:
        mesh.http.headers.update(keys.headers("ops"))
        # Its canaries count for no client.
        more = ["--canary-interval-s=0.1", "--processes=2"]
        mesh.spawn("frontend", f"--api-keys={keys.path}", *more)
        mesh.spawn("frontend", f"--api-keys={keys.path}")
        for frontend in mesh.running("frontend"):
            frontend.wait_ready()
        wait_for(mesh.is_complete, "the frontends use the router and the workers")
        yield mesh


class Client:
    """Sends requests to a frontend, and adds the `usage` of their responses."""

    def __init__(self, url: str, keys: Keys) -> None:
        self._url = url
        self._keys = keys
        self.used: Use = {}

    def add(self, name: str, model: str, counts: UsageCounts) -> None:
        key = self._keys.ids[name]
        adapter = ADAPTER if model == ADAPTER else ""
        key = UsageKey(key.tenant, key.key, MODEL, adapter)
        self.used[key] = self.used.get(key, NONE) + counts

    def send(self, name: str, path: str, *, model: str = MODEL, **body: Any) -> httpx.Response:
        response = httpx.post(
            self._url + path,
            json={"model": model, **body},
            headers=self._keys.headers(name),
            timeout=WAIT_S,
            trust_env=False,
        )
        assert response.status_code == 200, response.text
        self.add(name, model, _counts(_usages(response)[-1]))
        return response


def _usages(response: httpx.Response) -> list[Json]:
    """The usage of a response, or of the events of a stream."""
    if response.headers["content-type"].startswith("application/json"):
        return [response.json()["usage"]]
    found = []
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            holder = event.get("response") or event.get("message") or event
            found += [holder["usage"]] if holder.get("usage") else []
    return found


def _counts(usage: Json) -> UsageCounts:
    """Reads the usage of any API."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    if "cache_read_input_tokens" in usage:  # Anthropic: the other tokens are not in input_tokens
        cached = usage["cache_read_input_tokens"]
        return UsageCounts(1, 0, usage["input_tokens"] + cached, cached, usage["output_tokens"])
    prompt = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]
    outputs = [usage[name] for name in ("completion_tokens", "output_tokens") if name in usage]
    return UsageCounts(1, 0, prompt, details.get("cached_tokens") or 0, sum(outputs))


def added(*uses: Use) -> Use:
    sums: Use = {}
    for use in uses:
        for key, counts in use.items():
            sums[key] = sums.get(key, NONE) + counts
    return sums


def counters(mesh: Mesh, url: str) -> Use:
    """What the metrics of a frontend count."""
    found: dict[UsageKey, dict[str, int]] = {}
    for family in text_string_to_metric_families(mesh.http.get(f"{url}/metrics").text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and sample.name.endswith("_total"):
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                key = UsageKey(**{one: sample.labels[one] for one in DIMENSIONS})
                found.setdefault(key, {})[name] = int(sample.value)
    return {key: UsageCounts(*(counts[name] for name in COUNTS)) for key, counts in found.items()}


def records(mesh: Mesh, url: str) -> Use:
    """What the records of a frontend have."""
    now_s = int(time.time())
    query = UsageQuery(now_s - DAY_S, now_s + DAY_S, by=DIMENSIONS)
    response = mesh.http.get(f"{url}{USAGE_PATH}", params=query.parameters)
    assert response.status_code == 200, response.text
    return total(UsagePage.from_json(response.content).buckets)


def settled(mesh: Mesh, url: str) -> Use:
    """What a frontend without requests has counted, as soon as its counters and records agree: the
    records of another process are written within 0.1 s."""

    def agreed() -> list[Use]:
        found = records(mesh, url)
        return [found] if counters(mesh, url) == found else []

    return wait_for(agreed, "counters and records agree")[0]


def assert_counted(mesh: Mesh, url: str, expected: Use) -> None:
    """A request is counted after its client has the end of the response."""
    with suppress(AssertionError):
        wait_for(lambda: records(mesh, url) == expected, "it is counted", COUNTED_S)
    assert settled(mesh, url) == expected


def key_of(keys: Keys, name: str) -> UsageKey:
    key = keys.ids[name]
    return UsageKey(key.tenant, key.key, MODEL)


def meshctl_usage(folder: Path, keys: Keys, *arguments: str) -> tuple[int, str]:
    environ = {
        "KVMESH_REGISTRY_PATH": f"{folder / 'registry'}",
        "OPENAI_API_KEY": keys.texts["ops"],
    }
    with redirect_stdout(io.StringIO()) as output:
        status = run_command(["usage", *arguments], environ)
    return status, output.getvalue()


def stream_until(
    mesh: Mesh, keys: Keys, client_id: str, tokens: int, max_tokens: int, on_tokens: Any = None
) -> Json | None:
    """Streams a completion of the tenant bravo. on_tokens: called when so many have arrived; None:
    the client leaves then. Returns the last usage of the stream."""
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    usage: Json | None = None
    has_arrived = False
    headers = {**keys.headers("bravo"), "x-request-id": client_id}
    with httpx.stream(
        "POST",
        f"{mesh.url}/v1/completions",
        json=body,
        headers=headers,
        timeout=WAIT_S,
        trust_env=False,
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            if not has_arrived and usage is not None and usage["completion_tokens"] >= tokens:
                if on_tokens is None:
                    return usage
                has_arrived = True
                on_tokens()
    return usage


def test_counters_records_and_the_usage_of_clients_are_equal(
    mesh: Mesh, keys: Keys, folder: Path
) -> None:
    urls = mesh.urls
    before = [settled(mesh, url) for url in urls]
    client, other = (Client(url, keys) for url in urls)
    stream: Json = {"stream": True, "stream_options": {"include_usage": True}}
    for name in ("one", "two", "bravo"):
        client.send(name, "/v1/completions", prompt=PROMPT, max_tokens=3)
        client.send(name, "/v1/completions", prompt=PROMPT, max_tokens=3, **stream)
    client.send("one", "/v1/completions", model=ADAPTER, prompt=PROMPT, max_tokens=4, **stream)
    batch = [PROMPT, PROMPT[:20]]
    client.send("one", "/v1/completions", prompt=batch, n=3, max_tokens=2, ignore_eos=True)
    client.send("one", "/v1/chat/completions", messages=MESSAGES, max_tokens=6)
    client.send("one", "/v1/chat/completions", messages=MESSAGES, max_tokens=6, n=2, **stream)
    responses: Json = {"input": "Hi there", "max_output_tokens": 16, "store": False}
    client.send("two", "/v1/responses", **responses)
    client.send("two", "/v1/responses", **responses, stream=True)
    client.send("two", "/v1/messages", messages=MESSAGES, max_tokens=5)
    client.send("two", "/v1/messages", messages=MESSAGES, max_tokens=5, stream=True)
    client.send("one", "/v1/embeddings", input=["Hi", "there", "my friend"])
    long: Json = {"prompt": PROMPT, "max_tokens": 40}
    whole = client.send("two", "/v1/completions", **long).json()
    # A stop string in the middle: the tokens after it are not the client's.
    word = whole["choices"][0]["text"].split()[1]
    stopped = client.send("two", "/v1/completions", **long, stop=word).json()
    assert stopped["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]
    other.send("bravo", "/v1/completions", prompt=PROMPT, max_tokens=3)

    for url, earlier, one in zip(urls, before, (client, other), strict=True):
        assert_counted(mesh, url, added(earlier, one.used))
    assert any(counts.cached_tokens for counts in client.used.values())

    status, text = meshctl_usage(folder, keys, "--json", *(f"--by={name}" for name in DIMENSIONS))
    report = json.loads(text)
    rows = {
        UsageKey(*(row[name] for name in DIMENSIONS)): UsageCounts(*(row[n] for n in COUNTS))
        for row in report["rows"]
    }
    assert (status, report["problems"]) == (0, [])
    assert rows == added(*before, client.used, other.used), "the sum of both frontends"
    whole = sum(rows.values(), NONE)
    status, text = meshctl_usage(folder, keys, "--by=tenant", "--since=7d")
    header, first, second, last, since = text.splitlines()
    assert header.split() == ["TENANT", "REQUESTS", "FAILED", "PROMPT", "CACHED", "OUTPUT"]
    assert {first.split()[0], second.split()[0]} == {"acme", "bravo"}
    assert last.split() == ["total", *(str(getattr(whole, name)) for name in COUNTS)]
    assert since.startswith("since ")


def test_requests_that_are_refused_or_only_placed_count_nothing(mesh: Mesh, keys: Keys) -> None:
    url = mesh.url
    before = settled(mesh, url)
    requests: list[tuple[str, int, Json]] = [
        ("one", 404, {"model": "none"}),
        ("one", 400, {"temperature": 9}),
        ("ops", 403, {}),
        ("one", 200, {"nvext": {"annotations": ["query_instance_id:"]}}),
    ]
    for name, status, fields in requests:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1, **fields}
        response = httpx.post(
            f"{url}/v1/completions",
            json=body,
            headers=keys.headers(name),
            timeout=WAIT_S,
            trust_env=False,
        )
        assert response.status_code == status, response.text
    client = Client(url, keys)
    client.send("one", "/v1/completions", prompt=PROMPT, max_tokens=1)
    assert_counted(mesh, url, added(before, client.used))


def test_a_client_that_leaves_pays_what_was_delivered(mesh: Mesh, keys: Keys) -> None:
    before = settled(mesh, mesh.url)
    received = stream_until(mesh, keys, "leaves", 5, 2000)
    assert received is not None
    line = mesh.request_line("leaves")
    output = line["completion_tokens"]
    assert received["completion_tokens"] <= output < 2000
    # Its cached tokens are not known: a worker reports them at the end.
    used = UsageCounts(1, 1, len(PROMPT), 0, output)
    assert_counted(mesh, mesh.url, added(before, {key_of(keys, "bravo"): used}))


def test_a_migrated_response_counts_its_prompt_once_and_all_tokens(mesh: Mesh, keys: Keys) -> None:
    before = settled(mesh, mesh.url)

    def kill_its_worker() -> None:
        max(mesh.workers, key=Service.open_slots).kill()

    usage = stream_until(mesh, keys, "migrates", 5, 300, kill_its_worker)
    assert usage is not None
    assert mesh.request_line("migrates")["attempts"] > 1
    counts = _counts(usage)
    assert (counts.prompt_tokens, counts.output_tokens) == (len(PROMPT), 300)
    assert_counted(mesh, mesh.url, added(before, {key_of(keys, "bravo"): counts}))
    mesh.spawn("worker").wait_ready()
    wait_for(mesh.is_complete, "the next test has two workers")


def test_the_records_survive_a_kill_of_the_frontend(mesh: Mesh, keys: Keys, folder: Path) -> None:
    flags = [f"--api-keys={keys.path}", f"--usage-file={folder / 'usage.db'}"]
    frontend = mesh.spawn("frontend", *flags).wait_ready()
    wait_for(mesh.is_complete, "it uses the router and the workers")
    client = Client(frontend.addresses["http"], keys)
    for _ in range(20):
        client.send("one", "/v1/completions", prompt=PROMPT, max_tokens=2)
    # Sleep: a request that ended less than 0.1 s before the kill may be lost.
    time.sleep(1.0)
    frontend.kill()
    successor = mesh.spawn("frontend", *flags).wait_ready()
    url = successor.addresses["http"]
    assert records(mesh, url) == client.used
    assert counters(mesh, url) == {}, "counters start again"
    successor.kill()


def test_usage_needs_the_scope_admin(mesh: Mesh, keys: Keys) -> None:
    response = httpx.get(
        f"{mesh.url}{USAGE_PATH}?start_time=0", headers=keys.headers("one"), trust_env=False
    )
    assert response.status_code == 403
    assert "admin" in response.json()["error"]["message"]


def test_meshctl_names_a_frontend_that_refuses_its_key(
    mesh: Mesh, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"KVMESH_REGISTRY_PATH": f"{folder / 'registry'}"}
    assert run_command(["usage"], environ) == 1
    assert "set OPENAI_API_KEY to a key with the scope admin" in capsys.readouterr().err


def test_meshctl_refuses_a_start_that_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["usage", "--since=yesterday"], {}) == 2
    assert "--since: expected 24h, 7d or a date" in capsys.readouterr().err

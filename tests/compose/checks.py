"""Checks of a mesh that runs in containers, from the host."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

from tests.compose.engine import ROOT, Engine, EngineFailed
from tests.kit.gateways import pick
from tests.kit.oracle import Oracle
from tests.kit.waiting import wait_for

WAIT_S = 30.0
HEALTH_CPU_MAX_MS = 50.0
RECEIVER_URL = "http://127.0.0.1:4318"
PROMETHEUS_URL = "http://127.0.0.1:9090"
CONSOLE_URL = "http://127.0.0.1:8070"
HEALTH_CPU = """
import resource, subprocess
def used():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
costs = []
for _ in range(11):
    before = used()
    subprocess.run(["meshctl", "health", "127.0.0.1:7001"], check=True, stdout=subprocess.DEVNULL)
    costs.append(used() - before)
print(1000 * sorted(costs)[5])
"""
HARDENING = """
test "$(id -u)" = 10001 || echo "runs as $(id -u)"
! touch /kvmesh/written 2> /dev/null || echo "its root is writable"
grep -q '^CapEff:[[:space:]]*0*$' /proc/self/status || echo "it has capabilities"
grep -q '^NoNewPrivs:[[:space:]]*1$' /proc/self/status || echo "it can gain privileges"
meshctl --help > /dev/null || echo "it has no meshctl"
"""


def documented_blocks() -> list[str]:
    """Returns the shell blocks of docs/operate/containers.md that call services."""
    text = (ROOT / "docs/operate/containers.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [block for block in blocks if "grpcurl" in block]


def check_hardening(engine: Engine, services: Iterable[str]) -> None:
    """Raises AssertionError for a container with rights, a writable root or without meshctl."""
    for service in services:
        problems = engine.compose("exec", "-T", service, "sh", "-c", HARDENING).strip()
        assert not problems, f"{service}: {problems}"


def health_cpu_ms(engine: Engine, services: Iterable[str]) -> dict[str, float]:
    """Returns the CPU time of the health check in each container: the median of eleven."""
    found = {}
    for service in services:
        text = engine.compose("exec", "-T", service, "python3", "-c", HEALTH_CPU)
        found[service] = round(float(text), 1)
    return found


def check_documented_calls(engine: Engine, folder: Path) -> None:
    """Runs the documented calls of grpcurl as they stand. Raises AssertionError, EngineFailed."""
    blocks = documented_blocks()
    assert blocks, "docs/operate/containers.md has no calls of grpcurl"
    script = folder / "calls.sh"
    script.write_text("set -eux\n" + "\n".join(blocks))
    output = engine.run("bash", str(script), timeout_s=4 * WAIT_S)
    for part in (
        *("kvmesh.router.v1.RouterService\n", "kvmesh.indexer.v1.IndexerService\n"),
        *("kvmesh.engine.v1.EngineService\n", '"candidates"', '"matches"', '"finish'),
    ):
        assert part in output, f"no {part!r} in the output of the documented calls:\n{output}"


def check_refusal(engine: Engine, address: str) -> None:
    """Raises AssertionError if a call without the token is accepted."""
    try:
        output = engine.run("grpcurl", "-plaintext", "-max-time", "10", address, "list")
    except EngineFailed as error:
        assert "mesh token is required" in str(error), error  # noqa: PT017
    else:
        raise AssertionError(f"{address} accepts a call without a token: {output}")


# Any: the body of the response.
def chat(
    url: str, content: str, max_tokens: int, *, model: str = "sim", traceparent: str = ""
) -> dict[str, Any]:
    """Returns the response to a chat."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
    }
    headers = {"traceparent": traceparent} if traceparent else {}
    response = httpx.post(
        f"{url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S, trust_env=False
    )
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def check_chats(url: str, count: int) -> dict[str, Any]:
    """Returns the figures of some chats, one after the other."""
    oracle, errors, inexact = Oracle(), 0, 0
    for number in range(count):
        content = f"chat {number} of {url}"
        try:
            text = chat(url, content, 16)["choices"][0]["message"]["content"]
        except (AssertionError, httpx.HTTPError):
            errors += 1
        else:
            inexact += text != oracle.chat(content, 16).text
    return {"requests": count, "errors": errors, "inexact": inexact}


def check_picks(address: str) -> None:
    """Raises AssertionError if an endpoint picker does not read a request of a gateway: the sim
    workers are no servers, so it responds that there is none for the model."""
    found = pick(address, {"model": "sim", "messages": [{"role": "user", "content": "x"}]})
    assert found.status == 503, found
    unknown = pick(address, {"model": "absent", "messages": [{"role": "user", "content": "x"}]})
    assert unknown.status == 404, unknown


def check_batch(url: str, count: int) -> dict[str, Any]:
    """Returns the figures of a batch of chats, whose results are those of the sim."""
    contents = {f"line-{n}": f"line {n} of a batch" for n in range(count)}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "sim",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 16,
            },
        }
        for name, content in contents.items()
    ]
    raw = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    with httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as http:
        uploaded = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", raw)})
        assert uploaded.status_code == 200, uploaded.text
        body = {
            "input_file_id": uploaded.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        created = http.post("/v1/batches", json=body)
        assert created.status_code == 200, created.text

        def ended() -> Any:
            batch = http.get(f"/v1/batches/{created.json()['id']}").json()
            return batch if batch["status"] in ("completed", "failed", "expired") else None

        batch = wait_for(ended, "the batch has ended", WAIT_S)
        assert batch["status"] == "completed", batch
        rows = http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    oracle, results = Oracle(), [json.loads(row) for row in rows]
    texts = {
        row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"]
        for row in results
    }
    inexact = sum(
        texts.get(name) != oracle.chat(content, 16).text for name, content in contents.items()
    )
    return {"requests": count, "errors": count - len(results), "inexact": inexact}


def check_linked_trace(url: str, model: str = "sim") -> None:
    """Sends a chat through prefill and decode, and finds its linked spans at the receiver. Raises
    AssertionError."""
    trace_id = uuid.uuid4().hex
    content = "A prompt of more than one block of KV, which prefill computes for decode. " * 4
    response = chat(url, content, 16, model=model, traceparent=f"00-{trace_id}-00f067aa0ba902b7-01")
    assert response["usage"]["completion_tokens"], response

    def linked_spans() -> bool:
        spans = httpx.get(f"{RECEIVER_URL}/{trace_id}", timeout=WAIT_S, trust_env=False).json()
        roles = {
            span["attributes"].get("disagg_role"): span
            for span in spans
            if span["name"] == "engine.generate"
        }
        if not {"prefill", "decode"} <= roles.keys():
            return False
        return bool(roles["prefill"]["span_id"] in roles["decode"]["links"])

    wait_for(linked_spans, "decode's span is linked to prefill's at the receiver", WAIT_S)


def check_metrics(services: int) -> None:
    """Raises AssertionError unless Prometheus scrapes that many services and has their metrics."""

    # Any: JSON.
    def get(path: str) -> Any:
        response = httpx.get(f"{PROMETHEUS_URL}{path}", timeout=WAIT_S, trust_env=False)
        return response.json()["data"]

    def are_up() -> bool:
        health = [target["health"] for target in get("/api/v1/targets")["activeTargets"]]
        return health.count("up") == len(health) == services

    wait_for(are_up, f"Prometheus scrapes {services} services", WAIT_S)
    wait_for(
        lambda: get("/api/v1/query?query=kvmesh_frontend_requests_total")["result"],
        "Prometheus has the requests of the frontend",
        WAIT_S,
    )
    assert get("/api/v1/rules")["groups"], "Prometheus has the alert rules"


def check_console(engine: Engine, chat_url: str, members: int) -> None:
    """Logs in to the console by a link of `meshctl console`. Raises AssertionError unless pages are
    served after the login only, and show all members and the linked spans of a chat."""
    trace_id = uuid.uuid4().hex
    with httpx.Client(base_url=CONSOLE_URL, timeout=WAIT_S, trust_env=False) as browser:

        def page(path: str) -> str:
            response = browser.get(path, headers={"accept": "text/html"})
            assert response.status_code == 200, f"{path}: status {response.status_code}"
            return response.text

        assert browser.get("/").status_code == 401, "a page is served without a login"
        link = engine.compose("exec", "-T", "console", "meshctl", "console").strip()
        assert browser.get(link).status_code == 200, f"{link} does not log in"
        assert httpx.get(link, trust_env=False).status_code == 403, "a link logs in twice"
        wait_for(
            lambda: browser.get("/health").json()["members"] == members,
            f"the console has {members} members",
            2 * WAIT_S,
        )
        overview = page("/")
        for role in ("frontend", "router", "indexer", "prefill", "decode"):
            assert role in overview, f"no {role} in the overview"
        prompt = "A prompt of more than one block of KV, which prefill computes. " * 4
        chat(chat_url, prompt, 16, traceparent=f"00-{trace_id}-00f067aa0ba902b7-01")
        wait_for(
            lambda: re.search(r"follows prefill on \S+: linked", page(f"/requests/{trace_id}")),
            "the page of the request shows the link from decode to prefill",
            WAIT_S,
        )


def check_status(engine: Engine, service: str, members: int) -> None:
    """Raises AssertionError unless `meshctl status` in a container shows that many members.

    Consul lists a member when its own check has passed, which is later than the health of the
    container.
    """

    def are_serving() -> bool:
        try:
            output = engine.compose("exec", "-T", service, "meshctl", "status", "--json")
        except EngineFailed:
            return False
        return len(re.findall(r'"health": ?"serving"', output)) == members

    wait_for(are_serving, f"meshctl status shows {members} members", 3 * WAIT_S)


def check_consul_servers(engine: Engine, count: int) -> None:
    """Raises AssertionError unless the cluster of Consul has that many servers, and all vote."""
    command = (
        "CONSUL_HTTP_TOKEN=$(cat /run/kvmesh/consul/management_token)"
        " consul operator raft list-peers"
    )

    def have_joined() -> bool:
        try:
            output = engine.compose("exec", "-T", "consul-2", "sh", "-c", command)
        except EngineFailed:
            return False
        votes = re.findall(r":8300 .*\b(true|false)\b", output)
        return votes == ["true"] * count

    wait_for(have_joined, f"Consul has {count} servers", 2 * WAIT_S)


def logs_of(engine: Engine) -> str:
    """Returns the last lines of each container."""
    try:
        return engine.compose("--profile", "*", "logs", "--no-color", "--tail=40")
    except EngineFailed as error:
        return str(error)

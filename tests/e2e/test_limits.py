"""Limits of tenants at the door: requests, tokens and concurrent requests, at two frontends."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshctl.cli import run_command
from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

# Any: JSON.
Json = dict[str, Any]
# Limits of each tenant.
LIMITS = {
    "slow": ["--requests-per-s=10"],
    "small": ["--tokens-per-min=600"],
    "single": ["--concurrency=1"],
    "even": ["--tokens-per-min=30000"],
    "shared": ["--requests-per-s=20"],
    "free": [],
}
# On a busy machine the clients cannot use the limits all the time; then they try again.
MEASUREMENTS_MAX = 5


class Tenants:
    """The tenants of a key file, with the headers of a key of each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.headers = {}
        for name, limits in LIMITS.items():
            self.headers[name] = {"authorization": f"Bearer {self.run('create', name)}"}
            self.run("limits", name, *limits)

    def run(self, *arguments: str) -> str:
        with redirect_stdout(io.StringIO()) as output:
            assert run_command(["keys", f"--api-keys={self.path}", *arguments], {}) == 0
        return output.getvalue().strip()


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Tenants:
    return Tenants(tmp_path_factory.mktemp("keys") / "keys.json")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, tenants: Tenants) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    with Mesh(folder, workers=1, frontends=0, worker_flags=["--speedup=20"]) as mesh:
        tenants.run("create", "ops", "--scopes=infer,admin")
        ops = {"authorization": f"Bearer {tenants.run('create', 'ops2', '--scopes=infer,admin')}"}
        mesh.http.headers.update(ops)
        for _ in range(2):
            mesh.spawn("frontend", f"--api-keys={tenants.path}")
        for frontend in mesh.running("frontend"):
            frontend.wait_ready()
        wait_for(mesh.is_complete, "the frontends use the router and the workers")
        wait_for(
            lambda: all(len(mesh.known_instance_ids("frontend", url)) == 2 for url in mesh.urls),
            "the frontends discover each other",
        )
        yield mesh


def send(mesh: Mesh, headers: Json, frontend: int = 0, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "ignore_eos": True, **fields}
    url = f"{mesh.urls[frontend]}/v1/completions"
    return httpx.post(url, json=body, headers=headers, timeout=WAIT_S, trust_env=False)


@dataclass(slots=True)
class Flood:
    """Responses, and the times of the refusals by frontend, from the start to the end."""

    responses: list[httpx.Response] = field(default_factory=list)
    refused_at: dict[int, list[float]] = field(default_factory=dict)

    def was_at_limit(self) -> bool:
        """Whether each frontend refused a request in each second. If not, the clients were too
        slow to use the limit: a bucket of requests is full after a second."""
        return all(
            after - before < 1.0
            for times in self.refused_at.values()
            for before, after in pairwise(times)
        )


async def flood(mesh: Mesh, headers: Json, seconds: float, *frontends: int) -> Flood:
    """The responses to requests of 8 clients in that time."""
    body = {"model": MODEL, "prompt": [7, 8, 9], "max_tokens": 7, "ignore_eos": True}
    started_at = time.monotonic()
    end = started_at + seconds
    result = Flood(refused_at={frontend: [started_at] for frontend in frontends})

    async def client(http: httpx.AsyncClient, number: int) -> None:
        frontend = frontends[number % len(frontends)]
        url = f"{mesh.urls[frontend]}/v1/completions"
        while time.monotonic() < end:
            response = await http.post(url, json=body, headers=headers)
            result.responses.append(response)
            if response.status_code == 429:
                result.refused_at[frontend].append(time.monotonic())
                # Sleep: the pace of a refused client. A bucket holds what is permitted in a second,
                # so nothing of it is lost, and the processor is left to the mesh.
                await asyncio.sleep(0.2)

    async with httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as http:
        await asyncio.gather(*(client(http, number) for number in range(8)))
    for times in result.refused_at.values():
        times.append(time.monotonic())
    return result


def served(responses: list[httpx.Response]) -> int:
    statuses = [one.status_code for one in responses]
    assert set(statuses) <= {200, 429}
    return statuses.count(200)


def test_a_tenant_at_its_request_limit_gets_429_and_may_retry_when_it_says(
    mesh: Mesh, tenants: Tenants
) -> None:
    flooded = asyncio.run(flood(mesh, tenants.headers["slow"], 1.0, 0))
    refused = next(one for one in flooded.responses if one.status_code == 429)
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "tenant 'slow'" in error["message"]
    assert refused.headers["x-ratelimit-limit-requests"] == "5"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-should-retry"] == "true"
    # Sleep: the time that the refusal states.
    time.sleep(int(refused.headers["retry-after-ms"]) / 1000)
    response = send(mesh, tenants.headers["slow"])
    assert response.status_code == 200
    assert "x-ratelimit-reset-requests" in response.headers
    assert send(mesh, tenants.headers["free"]).status_code == 200


def test_a_request_returns_the_tokens_that_it_reserved_and_did_not_use(
    mesh: Mesh, tenants: Tenants
) -> None:
    """Frontend 0 has 300 of the 600 tokens. A request that stops early uses 12 of its 290."""
    small = tenants.headers["small"]
    first = send(mesh, small, prompt=[5] * 10, max_tokens=280, min_tokens=0)
    assert first.status_code == 200
    used = first.json()["usage"]["total_tokens"]
    refused = send(mesh, small, prompt=[5] * 10, max_tokens=290)
    left = float(refused.headers["x-ratelimit-remaining-tokens"])
    assert refused.status_code == 429
    assert 300 - used <= left <= 300 - used + 30
    assert send(mesh, small, prompt=[5], max_tokens=1).status_code == 200


def test_tokens_of_a_client_that_disconnects_are_those_it_was_sent(
    mesh: Mesh, tenants: Tenants
) -> None:
    even = tenants.headers["even"]
    before = float(send(mesh, even).headers["x-ratelimit-remaining-tokens"])
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    url = f"{mesh.urls[0]}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=even, timeout=WAIT_S) as response:
        assert float(response.headers["x-ratelimit-remaining-tokens"]) <= before - 3000 + 500
        next(response.iter_lines())

    def left() -> float:
        return float(send(mesh, even).headers["x-ratelimit-remaining-tokens"])

    wait_for(lambda: left() > before - 1500, "the reservation is settled")


def test_concurrent_requests_above_the_limit_are_refused(mesh: Mesh, tenants: Tenants) -> None:
    single = tenants.headers["single"]
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    url = f"{mesh.urls[0]}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=single, timeout=WAIT_S) as response:
        lines = response.iter_lines()
        next(lines)
        refused = send(mesh, single)
        assert refused.status_code == 429
        assert "1 requests run, the limit is 1" in refused.json()["error"]["message"]
    wait_for(lambda: send(mesh, single).status_code == 200, "the stream has ended")


async def test_two_tenants_under_load_get_exactly_their_limits(
    mesh: Mesh, tenants: Tenants
) -> None:
    """`shared` may send 20 requests a second at two frontends, `even` 500 tokens a second, which
    are 50 requests of 10 tokens. What the buckets held at first is used up before."""
    await asyncio.to_thread(drain, mesh, tenants.headers["even"])
    for seconds in (2.0, *[6.0] * MEASUREMENTS_MAX):
        started_at = time.monotonic()
        shared, even = await asyncio.gather(
            flood(mesh, tenants.headers["shared"], seconds, 0, 1),
            flood(mesh, tenants.headers["even"], seconds, 0, 1),
        )
        elapsed_s = time.monotonic() - started_at
        if seconds == 6.0 and shared.was_at_limit() and even.was_at_limit():
            break
    counts = served(shared.responses), served(even.responses)
    limits = 20 * elapsed_s, 50 * elapsed_s
    for count, limit in zip(counts, limits, strict=True):
        # The buckets of each frontend may hold a request more at the end than at the start.
        assert limit * 0.9 - 4 <= count <= limit * 1.02 + 4
    shares = [count / limit for count, limit in zip(counts, limits, strict=True)]
    fairness = sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
    assert fairness > 0.99


def drain(mesh: Mesh, headers: Json) -> None:
    """Uses the tokens of a tenant at both frontends, but for less than 100 at each.

    Smaller requests would have to be served faster than the bucket fills: 250 tokens a second.
    """

    def is_refused(frontend: int, size: int) -> bool:
        response = send(mesh, headers, frontend, prompt=[7] * (size - 1), max_tokens=1)
        return response.status_code == 429

    for frontend in (0, 1):
        for size in (4000, 1000, 200, 100):
            wait_for(
                partial(is_refused, frontend, size),
                f"the tenant has less than {size} tokens left at frontend {frontend}",
            )


def test_a_changed_limit_takes_effect_without_a_restart(mesh: Mesh, tenants: Tenants) -> None:
    assert "x-ratelimit-limit-requests" not in send(mesh, tenants.headers["free"]).headers
    tenants.run("limits", "free", "--requests-per-s=8")
    wait_for(
        lambda: (
            send(mesh, tenants.headers["free"]).headers.get("x-ratelimit-limit-requests") == "4"
        ),
        "the frontend has the new limit",
    )
    tenants.run("limits", "free", "--none")

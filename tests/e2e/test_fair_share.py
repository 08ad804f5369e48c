"""Tenants share busy workers by weight, however many requests each sends."""

from __future__ import annotations

import asyncio
import io
import time
from collections import Counter
from contextlib import redirect_stdout
from itertools import count
from pathlib import Path

import httpx
import pytest

from meshctl.cli import run_command
from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

# 20 prompts a second.
PROMPT_TOKENS = 200
WORKER_FLAGS = ["--prefill-tokens-per-s=4000", "--max-num-batched-tokens=200", "--max-num-seqs=16"]
SECONDS = 5.0


def run(path: Path, *arguments: str) -> str:
    with redirect_stdout(io.StringIO()) as output:
        assert run_command(["keys", f"--api-keys={path}", *arguments], {}) == 0
    return output.getvalue().strip()


def test_tenants_share_a_busy_worker_by_weight_and_not_by_requests(tmp_path: Path) -> None:
    """`many` has four times the clients of `few`; then `few` has three times the weight."""
    keys = tmp_path / "keys.json"
    headers = {
        name: {"authorization": f"Bearer {run(keys, 'create', name, '--scopes=infer,admin')}"}
        for name in ("many", "few")
    }
    with Mesh(
        tmp_path,
        frontends=0,
        workers=1,
        worker_flags=WORKER_FLAGS,
        router_flags=["--queue-threshold=1"],
    ) as mesh:
        mesh.http.headers.update(headers["few"])
        mesh.spawn("frontend", f"--api-keys={keys}").wait_ready()
        wait_for(mesh.is_complete, "the frontend uses the router and the worker")
        equal = asyncio.run(load(mesh, headers))
        # The limit is never reached; its header shows that the frontend has read the file.
        run(keys, "limits", "few", "--weight=3", "--requests-per-s=1000")
        wait_for(lambda: has_limit(mesh, headers["few"]), "the frontend has the new weight")
        weighted = asyncio.run(load(mesh, headers))
    print(f"equal weights: {dict(equal)}; few with weight 3: {dict(weighted)}")
    assert 0.42 <= equal["few"] / equal.total() <= 0.58
    assert 0.65 <= weighted["few"] / weighted.total() <= 0.85


def has_limit(mesh: Mesh, headers: dict[str, str]) -> bool:
    response = mesh.post_completion("limit", headers=headers)
    return "x-ratelimit-limit-requests" in response.headers


async def load(mesh: Mesh, headers: dict[str, dict[str, str]]) -> Counter[str]:
    """The responses by tenant while all clients have a request open."""
    served: Counter[str] = Counter()
    numbers, end = count(1), time.monotonic() + SECONDS

    async def client(http: httpx.AsyncClient, tenant: str) -> None:
        while time.monotonic() < end:
            number = next(numbers)
            prompt = [300 + (number * 7919 + i * i) % 2000 for i in range(PROMPT_TOKENS)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            url = f"{mesh.urls[0]}/v1/completions"
            response = await http.post(url, json=body, headers=headers[tenant])
            assert response.status_code == 200, response.text
            served[tenant] += time.monotonic() < end

    async with httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as http:
        # Enough that neither queue is ever empty on a busy machine.
        tenants = ["many"] * 64 + ["few"] * 16
        await asyncio.gather(*(client(http, tenant) for tenant in tenants))
    return served

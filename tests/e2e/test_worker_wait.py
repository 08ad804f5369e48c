"""Requests wait for a worker that may come back, within `--worker-wait-s`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.client import Reply, body_of, connect, fetch
from tests.kit.oracle import Oracle
from tests.kit.processes import Mesh
from tests.kit.waiting import WAIT_S, until

pytestmark = pytest.mark.slow

KEEP_ALIVE = b": keep-alive"
TOKENS = 150


async def kill_worker(mesh: Mesh) -> None:
    mesh.workers[0].kill()
    await until(lambda: not mesh.known_instance_ids("worker"), "discovery reports its death")


def assert_exact(replies: list[Reply], oracle: Oracle) -> None:
    for reply in replies:
        expected = oracle.completion(reply.prompt, reply.tokens, ignore_eos=True)
        assert (reply.error, reply.text) == ("", expected.text)


@pytest.mark.parametrize(
    ("counts", "kind"),
    [({"workers": 1}, "worker"), ({"workers": 0, "prefill": 1, "decode": 1}, "decode")],
    ids=["the last worker", "the only decode worker"],
)
async def test_streams_and_new_requests_wait_for_the_successor_of_a_worker(
    tmp_path: Path, oracle: Oracle, counts: dict[str, Any], kind: str
) -> None:
    with Mesh(tmp_path, **counts, frontend_flags=["--keep-alive-s=0.3"]) as mesh:
        running = [Reply(f"Running {n}", TOKENS) for n in range(8)]
        calls = [asyncio.create_task(fetch(mesh.url, reply)) for reply in running]
        await until(lambda: all(reply.events > 5 for reply in running), "the streams run")
        mesh.of_kind(kind)[0].kill()
        new = [Reply(f"New {n}", TOKENS) for n in range(4)]
        calls += [asyncio.create_task(fetch(mesh.url, reply)) for reply in new]
        whole = Reply("Whole", TOKENS)
        calls.append(asyncio.create_task(fetch(mesh.url, whole, stream=False)))
        gone = await connect(mesh.url, Reply("Gone", TOKENS), stream=True)
        await until(lambda: mesh.awaiting_worker() == 14, "all requests wait")
        gone.hang_up()
        await until(lambda: mesh.awaiting_worker() == 13, "the wait of a lost client ends")
        await until(lambda: all(KEEP_ALIVE in reply.raw for reply in [*running, *new]), "comments")
        assert not any(call.done() for call in calls)
        await asyncio.to_thread(mesh.spawn(kind).wait_ready)
        await asyncio.wait_for(asyncio.gather(*calls), WAIT_S)
        assert_exact([*running, *new, whole], oracle)


async def test_a_wait_ends_after_its_limit_and_an_unknown_model_does_not_wait(
    tmp_path: Path,
) -> None:
    flags = ["--keep-alive-s=0.3", "--worker-wait-s=1.5"]
    with Mesh(tmp_path, workers=1, frontend_flags=flags) as mesh:
        await kill_worker(mesh)
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(base_url=mesh.url, trust_env=False) as client:
            began = loop.time()
            body = body_of("Hello", 4, stream=False)
            refused = await client.post("/v1/completions", json=body)
            assert loop.time() - began > 1.4
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert "no worker" in refused.json()["error"]["message"]
            streamed = await client.post("/v1/completions", json={**body, "stream": True})
            assert streamed.status_code == 200
            assert KEEP_ALIVE in streamed.content
            assert streamed.text.rstrip().splitlines()[-1].startswith('data: {"error"')
            unknown = await client.post("/v1/completions", json={**body, "model": "never served"})
            assert unknown.status_code == 404

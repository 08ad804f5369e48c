"""SGLang's scheduler is killed under load. These tests run last: decode does not recover."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from common.errors import MeshError, WorkerLost
from common.registry.file import FileRegistry
from kvmesh.engine.v1 import engine_pb2 as pb
from tests.sglang.conftest import Trio
from tests.sglang.sglang_mesh import HttpMesh, Response
from tests.sglang.sglang_workers import (
    WAIT_S,
    Generated,
    greedy_request,
    is_alive,
    make_bootstrap_info,
    until,
)

NS = "default"
TOKENS = 700


async def failure(work: asyncio.Task[Generated]) -> tuple[MeshError, float]:
    """The error of a request, and its time."""
    with pytest.raises(MeshError) as caught:
        await work
    return caught.value, asyncio.get_running_loop().time()


async def names(trio: Trio) -> Sequence[int]:
    """Instances in the registry."""
    registry = FileRegistry(trio.registry)
    async with registry.watch(NS) as watch:
        return list(watch.current.instances)


async def direct_legs(trio: Trio) -> asyncio.Task[Generated]:
    """A pair's decode leg over gRPC after its KV arrived, far from its end."""
    info: pb.GetInfoResponse = await trio.prefill.info()
    request = replace(
        greedy_request(list(range(100, 140)), 3000), bootstrap_info=make_bootstrap_info(info, 9200)
    )
    stop = replace(request.stop_conditions, max_tokens=1)
    decode = asyncio.create_task(trio.decode.generate(request, "d"))
    await trio.prefill.generate(replace(request, stop_conditions=stop), "p")
    return decode


@pytest.mark.row("S4-31", "S4-32")
async def test_the_death_of_a_scheduler_loses_no_token_of_a_client_and_ends_its_worker(
    trio: Trio, mesh: HttpMesh
) -> None:
    rng = Random(23)
    prompts = [[rng.randrange(3, 4000) for _ in range(20 + 30 * one)] for one in range(4)]
    here = trio.app.instance_id
    alone = await asyncio.gather(*(mesh.complete(one, TOKENS, worker=here) for one in prompts))
    expected = [one.content for one in alone]
    responses = [Response() for _ in prompts]
    direct = await direct_legs(trio)
    streams = [
        asyncio.create_task(mesh.complete(prompt, TOKENS, stream=True, into=response))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    await until(
        lambda: all(response.events > 20 for response in responses), "decode has sent tokens of all"
    )
    pids = trio.decode.scheduler_pids()
    assert pids
    assert not any(stream.done() for stream in streams), "all requests are running"
    began = asyncio.get_running_loop().time()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    error, failed_at = await failure(direct)
    assert isinstance(error, WorkerLost)
    assert error.retryable
    assert failed_at - began < 5.0, "a dead engine is detected at once, not by a timeout"
    # The aggregated worker continues decode's stream without a difference.
    assert [(await stream).content for stream in streams] == expected
    async with asyncio.timeout(WAIT_S):
        assert await trio.decode.process.wait() == 1
    assert trio.decode.instance_id not in await names(trio)
    await until(lambda: not any(map(is_alive, pids)), "no entry is left")
    # The others continue to serve, and prefill still responds without its partner.
    await mesh.until_known({here, trio.prefill.instance_id})
    response, line = await mesh.complete_with_log(prompts[0], max_tokens=24)
    assert response.text
    assert expected[0][0].startswith(response.text)
    assert line["workers"] == [str(here)]
    assert (
        await trio.prefill.generate(replace(greedy_request([7]), is_probe=True), "probe")
    ).token_ids
    await trio.prefill.settled()

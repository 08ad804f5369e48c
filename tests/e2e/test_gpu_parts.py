"""The parts of `make gpu-test` on a mesh of sim workers: comparison, migration, load in turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from bench.measure import build_loadgen
from tests.gpu.exactness import LENGTHS, compare_pair, migrate
from tests.gpu.load import Load, ratios, run_in_turns
from tests.sglang.sglang_mesh import HttpMesh
from tests.sglang.sglang_workers import WorkerProcess

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]


@asynccontextmanager
async def sim_mesh(
    folder: Path, roles: Sequence[str], *flags: str
) -> AsyncIterator[tuple[HttpMesh, list[WorkerProcess]]]:
    await asyncio.to_thread(folder.mkdir)
    async with AsyncExitStack() as ended:
        workers = [
            await ended.enter_async_context(
                WorkerProcess.started(
                    role,
                    model=None,
                    folder=folder,
                    engine_args={},
                    name=f"{role}-{index}",
                    engine="sim",
                    more_flags=flags,
                )
            )
            for index, role in enumerate(roles)
        ]
        await asyncio.gather(*(worker.ready() for worker in workers))
        ids = {worker.instance_id for worker in workers}
        mesh = HttpMesh.started(folder, folder / "registry", ids)
        yield await ended.enter_async_context(mesh), workers


async def test_a_pair_and_a_migrated_response_are_compared_with_one_worker(tmp_path: Path) -> None:
    async with (
        sim_mesh(tmp_path / "one", ["aggregated"] * 2, "--speedup", "4") as (mesh, workers),
        sim_mesh(tmp_path / "two", ["prefill", "decode"], "--speedup", "4") as (pair, _),
    ):
        compared = await compare_pair(mesh, pair)
        assert compared["equal"] == compared["equal_at_once"] == compared["prompts"] == len(LENGTHS)
        assert compared["different_from_char"] == []
        migrated = await migrate(mesh, workers)
    assert migrated["equal"]
    assert migrated["complete"]
    assert migrated["chars_before_kill"] > 0


async def test_servers_receive_the_same_load_in_turns(tmp_path: Path) -> None:
    load = Load(concurrency=2, seconds=0.5, prompt_words=20, output_tokens=8)
    async with sim_mesh(tmp_path / "one", ["aggregated"], "--speedup", "20") as (mesh, _):
        ports = {"bare": mesh.port, "kvmesh": mesh.port}
        loadgen = build_loadgen()
        found = await asyncio.to_thread(run_in_turns, ports, [load], 2, tmp_path, loadgen)
    for one in found["c2"].values():
        assert one["errors"] == 0
        assert one["requests"] > 0
        assert len(one["tokens_per_s_runs"]) == 2
    assert set(ratios(found["c2"], "bare")) == {"kvmesh"}

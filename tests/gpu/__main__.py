"""SGLang on one GPU, bare, behind its own router and behind KVMesh: `python -m tests.gpu`.

Starts five engines on one device: SGLang's own server, two aggregated workers, and a prefill and a
decode worker, which exchange KV through the transfer backend. Compares the greedy responses of the
pair, and of a stream whose worker is killed, with those of one worker; then sends the same load to
the server, to SGLang's router and to the mesh, in turns. Prints progress to standard error and one
line of JSON at the end. The exit status is 1 if a part failed or a response differs that must not.

Responses are exact if the arithmetic is: always with --dtype float32; with 16 bits a prompt that is
computed at once and one that was decoded may round differently, so a migrated response counts as
right if it is complete and equal up to the death of its worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from bench.measure import build_loadgen, print_report
from tests.gpu.exactness import compare_pair, migrate
from tests.gpu.load import Load, ratios, run_in_turns
from tests.gpu.model import SHAPES, write_model
from tests.gpu.servers import sglang_router, sglang_server
from tests.sglang.sglang_mesh import HttpMesh
from tests.sglang.sglang_workers import WorkerProcess

# KV tokens of each engine.
POOL_TOKENS: Final = 131_072
CPU_POOL_TOKENS: Final = 16_384
PARTS: Final = ("pair", "migration", "load")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line chose. engine_args: SGLang's arguments, by its names."""

    device: str
    model: Path | None
    shape: str
    dtype: str
    parts: Sequence[str]
    loads: Sequence[Load]
    rounds: int
    transfer_backend: str
    folder: Path | None
    # Any: SGLang's arguments.
    engine_args: dict[str, Any]

    @property
    def is_cpu(self) -> bool:
        """Returns whether no accelerator is used."""
        return self.device == "cpu"


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Reads the command line; exits with status 2 for an invalid one."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; else random weights")
    parser.add_argument("--shape", choices=SHAPES, help="of random weights; qwen2.5-1.5b, or tiny")
    parser.add_argument("--dtype", help="bfloat16; on a CPU float32")
    parser.add_argument("--parts", help=f"by default {','.join(PARTS)}")
    parser.add_argument("--concurrency", default="", help="of the loads: by default 8,64; CPU: 4")
    parser.add_argument("--seconds", type=float, help="of one run; by default 10, on a CPU 15")
    parser.add_argument("--rounds", type=int, default=0, help="runs a server; 3, on a CPU 1")
    parser.add_argument("--prompt-words", type=int, default=0, help="512, on a CPU 64")
    parser.add_argument("--output-tokens", type=int, default=0, help="128, on a CPU 16")
    parser.add_argument("--transfer-backend", default="", help="nixl; on a CPU mooncake_tcp")
    parser.add_argument("--folder", type=Path, help="keeps models and logs there; must not exist")
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help="JSON, by SGLang's names"
    )
    options = parser.parse_args(arguments)
    is_cpu = options.device == "cpu"
    parts = (options.parts or ",".join(PARTS)).split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--parts: {unknown[0]} is not one of {', '.join(PARTS)}")
    loads = [
        Load(
            concurrency=int(one),
            seconds=options.seconds or (15.0 if is_cpu else 10.0),
            prompt_words=options.prompt_words or (64 if is_cpu else 512),
            output_tokens=options.output_tokens or (16 if is_cpu else 128),
        )
        for one in (options.concurrency or ("4" if is_cpu else "8,64")).split(",")
    ]
    return Settings(
        device=options.device,
        model=options.model,
        shape=options.shape or ("tiny" if is_cpu else "qwen2.5-1.5b"),
        dtype=options.dtype or ("float32" if is_cpu else "bfloat16"),
        parts=parts,
        loads=loads,
        rounds=options.rounds or (1 if is_cpu else 3),
        transfer_backend=options.transfer_backend or ("mooncake_tcp" if is_cpu else "nixl"),
        folder=options.folder,
        engine_args=options.engine_args,
    )


def engine_arguments(settings: Settings) -> dict[str, Any]:
    """Returns the arguments of every engine. Their KV pools are bounded, since they share a
    device."""
    found: dict[str, Any] = {
        "max_total_tokens": CPU_POOL_TOKENS if settings.is_cpu else POOL_TOKENS,
        "dtype": settings.dtype,
    }
    if not settings.is_cpu:
        found |= {"max_running_requests": 128, "disable_prefill_cuda_graph": True}
        found |= {"cuda_graph_max_bs_decode": max(one.concurrency for one in settings.loads)}
    return found | settings.engine_args


class Run:
    """One run of the parts: its figures, and the errors of parts that failed."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.model = settings.model or folder / "model"
        self.figures: dict[str, Any] = {}
        self.errors: list[str] = []
        self._began = time.perf_counter()

    def note(self, text: str) -> None:
        """Prints progress."""
        sys.stderr.write(f"{time.perf_counter() - self._began:6.1f} s  {text}\n")
        sys.stderr.flush()

    async def part(self, name: str, work: Awaitable[Any]) -> None:
        """Stores the figures of a part, or its error: the other parts go on."""
        try:
            self.figures[name] = await work
            self.note(f"{name}: {json.dumps(self.figures[name])}")
        except Exception as error:
            self.errors.append(f"{name}: {type(error).__name__}: {error}"[-2000:])
            self.note(f"FAILED {self.errors[-1]}")

    async def all(self) -> None:
        """Runs the parts."""
        settings = self.settings
        if settings.model is None:
            self.note(f"writing random weights: {settings.shape}")
            arguments = (self.model, settings.shape, settings.device, settings.dtype)
            await asyncio.to_thread(write_model, *arguments)
        async with AsyncExitStack() as ended:
            aggregated = await self._workers(ended, "aggregated", ["aggregated"] * 2)
            self.note("aggregated workers and their mesh serve")
            if "pair" in settings.parts:
                await self.part("pair", self._pair(aggregated.mesh))
            if "migration" in settings.parts:
                await self.part("migration", migrate(aggregated.mesh, aggregated.workers))
            if "load" in settings.parts:
                await self.part("load", self._load(aggregated))

    async def _workers(
        self, ended: AsyncExitStack, name: str, roles: Sequence[str], **more: Any
    ) -> Started:
        """Starts workers and the services in front of them."""
        folder = self.folder / name
        folder.mkdir()
        arguments = engine_arguments(self.settings) | more
        workers = [
            await ended.enter_async_context(
                WorkerProcess.started(
                    role,
                    model=self.model,
                    folder=folder,
                    engine_args=arguments,
                    name=f"{role}-{index}",
                )
            )
            for index, role in enumerate(roles)
        ]
        await asyncio.gather(*(worker.ready() for worker in workers))
        ids = {worker.instance_id for worker in workers}
        mesh = await ended.enter_async_context(HttpMesh.started(folder, folder / "registry", ids))
        return Started(mesh, workers)

    async def _pair(self, aggregated: HttpMesh) -> dict[str, Any]:
        """Compares a pair with an aggregated worker."""
        backend = self.settings.transfer_backend
        async with AsyncExitStack() as ended:
            pair = await self._workers(
                *(ended, "pair", ["prefill", "decode"]), disaggregation_transfer_backend=backend
            )
            self.note("the pair and its mesh serve")
            return {"backend": backend} | await compare_pair(aggregated, pair.mesh)

    async def _load(self, aggregated: Started) -> dict[str, Any]:
        """Compares a worker behind the mesh with SGLang's own server and router."""
        alive = [one for one in aggregated.workers if one.process.returncode is None]
        for one in alive[1:]:
            await one.end()
        await aggregated.mesh.until_known({alive[0].instance_id})
        settings = self.settings
        folder = self.folder / "load"
        folder.mkdir()
        async with AsyncExitStack() as ended:
            arguments = engine_arguments(settings)
            server = await ended.enter_async_context(
                sglang_server(self.model, arguments, folder, is_cpu=settings.is_cpu)
            )
            router = await ended.enter_async_context(sglang_router([server], folder))
            self.note("SGLang's server and router serve")
            ports = {"bare": server, "sglang_router": router, "kvmesh": aggregated.mesh.port}
            loads = await asyncio.to_thread(
                run_in_turns, ports, settings.loads, settings.rounds, folder, build_loadgen()
            )
        return {
            name: {**found, "ratio_to_bare": ratios(found, "bare")} for name, found in loads.items()
        }


@dataclass(frozen=True, slots=True)
class Started:
    """Workers and the mesh in front of them."""

    mesh: HttpMesh
    workers: Sequence[WorkerProcess]


def problems(figures: dict[str, Any], settings: Settings) -> list[str]:
    """Returns what is wrong with the figures, one sentence each."""
    found = []
    is_exact = settings.dtype == "float32"
    if pair := figures.get("pair"):
        if pair["equal"] != pair["prompts"]:
            found.append(f"pair: {pair['equal']} of {pair['prompts']} responses are equal")
        if pair["complete_at_once"] != pair["prompts"]:
            found.append(f"pair: {pair['complete_at_once']} of {pair['prompts']} are complete")
        if is_exact and pair["equal_at_once"] != pair["prompts"]:
            found.append(f"pair: {pair['equal_at_once']} of {pair['prompts']} at once are equal")
    if migration := figures.get("migration"):
        if not (migration["complete"] and migration["equal_before_kill"]):
            found.append("migration: the response is incomplete or differs before the kill")
        if is_exact and not migration["equal"]:
            found.append("migration: the response differs from that of one worker")
    for name, servers in figures.get("load", {}).items():
        for server, one in servers.items():
            if server != "ratio_to_bare" and (one["errors"] or not one["requests"]):
                found.append(
                    f"load {name} {server}: {one['errors']} errors, {one['requests']} requests"
                )
    return found


def device_name(settings: Settings) -> str:
    """Returns the name of the GPU, or "cpu"."""
    import torch  # type: ignore[import-not-found]

    return "cpu" if settings.is_cpu else str(torch.cuda.get_device_name())


def versions() -> dict[str, str]:
    """Returns the versions of the packages that shape the figures, if they are installed."""
    found = {}
    for name in ("sglang", "sglang-kernel", "sglang-router", "torch", "transformers", "nixl"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> int:
    """Runs the parts and prints the report."""
    settings = parse()
    with ExitStack() as ended:
        folder = settings.folder
        if folder is None:
            folder = Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-gpu-")))
        else:
            folder.mkdir(parents=True)
        run = Run(settings, folder.resolve())
        try:
            asyncio.run(run.all())
        except Exception as error:
            run.errors.append(f"{type(error).__name__}: {error}"[-4000:])
    errors = run.errors + problems(run.figures, settings)
    shown = {
        **{"device": settings.device, "shape": settings.shape, "dtype": settings.dtype},
        **{"model": settings.model and settings.model.name, "rounds": settings.rounds},
        "loads": [asdict(one) for one in settings.loads],
        "engine_args": engine_arguments(settings),
    }
    result = {
        "device_name": device_name(settings),
        "versions": versions(),
        **run.figures,
        "errors": errors,
    }
    print_report("gpu", shown, result)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

"""Routing policies on a real mesh of sim workers and in replay; the last line is JSON.

    PYTHONPATH=protos:. python -m bench.bench_mesh [--policies kv,least_loaded,random]

For each policy, a mesh of processes (frontend, router with `--selector`, indexer, 8 sim workers of
3,000 blocks of 512 tokens) serves the first 10 minutes of Mooncake's conversation trace over HTTP,
at twice the arrival rate, spread. Workers and arrivals are `--speedup` times as fast as in reality:
three policies take 7 minutes. Prompts are token ids that repeat where the trace repeats blocks.
Replay gets the same requests; times of the mesh are multiplied by the speedup.

- `mesh_ttft_s`, `replay_ttft_s`: mean time to the first token by policy; `mesh_p99_s`,
  `replay_p99_s`; `mesh_hit_rate`, `replay_hit_rate`: prompt tokens read from a cache; `failed`;
- `is_ordered`: the policies have the same order by mean in both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from bench.bench_replay import CONVERSATION, TRACES
from bench.measure import cpu_s, print_report
from bench.stacks import MODEL, mesh
from replay.mesh import MeshSettings, ReplayMesh
from replay.policies import POLICIES
from replay.report import percentile, summarize
from replay.trace import TraceRequest, at_speed, load_trace, spread_arrivals

WORKERS = 8
BLOCK_SIZE = 512
BLOCKS = 3000
# Ordinary tokens of the sim's vocabulary.
TOKENS = (3, 4096)
STREAM_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """Times in seconds of the trace. ttft_s: None if the request failed. itl_s: mean of a further
    token; None without one."""

    ttft_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    itl_s: float | None = None


class Prompts:
    """Prompts as JSON arrays of token ids; the tokens of a block follow from its id."""

    def __init__(self) -> None:
        self._blocks: dict[int, str] = {}

    def body(self, number: int, request: TraceRequest) -> bytes:
        full, rest = divmod(request.input_tokens, BLOCK_SIZE)
        names = list(request.hash_ids[:full])
        private = (1 + number) << 24
        parts = [self._block(name) for name in names]
        parts += [self._tokens(private + n, BLOCK_SIZE) for n in range(len(names), full)]
        parts += [self._tokens(private + full, rest)] if rest else []
        options = {
            "model": MODEL,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return f'{json.dumps(options)[:-1]}, "prompt": [{",".join(parts)}]}}'.encode()

    def _block(self, name: int) -> str:
        if (found := self._blocks.get(name)) is None:
            found = self._blocks[name] = self._tokens(name, BLOCK_SIZE)
        return found

    @staticmethod
    def _tokens(seed: int, count: int) -> str:
        return ",".join(map(str, np.random.default_rng(seed).integers(*TOKENS, count).tolist()))


async def ask(port: int, body: bytes, speedup: float) -> Answer:
    """One streamed completion; the connection closes after it."""
    started_at = time.perf_counter()
    ttft_s, last_s, usage = None, 0.0, None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=STREAM_LIMIT)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            now_s = (time.perf_counter() - started_at) * speedup
            ttft_s = now_s if ttft_s is None else ttft_s
            if b'"error"' in line:
                return Answer(error=line.decode())
            if b'"usage":{' in line.replace(b" ", b""):
                usage = json.loads(line[6:])["usage"]
            else:
                last_s = now_s
    finally:
        writer.close()
    if usage is None:
        return Answer(error="the stream ended without usage")
    details = usage.get("prompt_tokens_details") or {}
    further = usage["completion_tokens"] - 1
    itl_s = (last_s - ttft_s) / further if ttft_s is not None and further > 0 else None
    cached_tokens = details.get("cached_tokens", 0)
    return Answer(ttft_s, usage["prompt_tokens"], cached_tokens, itl_s=itl_s)


async def play(port: int, requests: Sequence[TraceRequest], speedup: float) -> list[Answer]:
    """Send the requests at their times, divided by the speedup."""
    prompts, began_at = Prompts(), time.perf_counter()
    tasks: list[asyncio.Task[Answer]] = []
    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            body = prompts.body(number, request)
            left_s = began_at + request.at_s / speedup - time.perf_counter()
            await asyncio.sleep(max(0.0, left_s))
            tasks.append(group.create_task(ask(port, body, speedup)))
    return [task.result() for task in tasks]


def run_mesh(policy: str, requests: Sequence[TraceRequest], speedup: float) -> dict[str, Any]:
    sim_flags = [
        *("--block-size", str(BLOCK_SIZE), "--total-kv-blocks", str(BLOCKS)),
        *("--speedup", str(speedup), "--step-limit-s", "60"),
    ]
    frontend_flags = ["--requests-max", "4096"]
    with mesh(sim_flags, frontend_flags, "agg", policy, workers=WORKERS) as (port, pids):
        answers = asyncio.run(play(port, requests, speedup))
        used_s = {name: cpu_s(pid) for name, pid in pids.items()}
    ttfts = sorted(answer.ttft_s for answer in answers if answer.ttft_s is not None)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    return {
        "ttft_s": round(fmean(ttfts), 3),
        "p99_s": round(percentile(ttfts, 0.99), 3),
        "hit_rate": round(sum(answer.cached_tokens for answer in answers) / prompt_tokens, 3),
        "failed": len(answers) - len(ttfts),
        "error": next((answer.error for answer in answers if answer.error), ""),
        "cpu_s": round(sum(used_s.values()), 1),
    }


def run_replay(policy: str, requests: Sequence[TraceRequest]) -> dict[str, Any]:
    settings = MeshSettings(workers=WORKERS)
    found = summarize(policy, 1, ReplayMesh(settings, POLICIES[policy]).run(requests))
    return {
        "ttft_s": round(found.ttft_mean_s, 3),
        "p99_s": round(found.ttft_p99_s, 3),
        "hit_rate": round(found.hit_rate, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policies", default="kv,least_loaded,random")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the trace")
    parser.add_argument("--speed", type=float, default=2.0, help="multiple of the arrival rate")
    parser.add_argument("--speedup", type=float, default=2.5, help="of workers and arrivals")
    args = parser.parse_args()
    trace = [
        request for request in load_trace(TRACES / CONVERSATION) if request.at_s < 60 * args.minutes
    ]
    requests = at_speed(spread_arrivals(trace), args.speed)
    figures: dict[str, Any] = {"requests": len(requests), "load_1m": [], "mesh_failed": {}}
    for policy in args.policies.split(","):
        figures["load_1m"].append(round(os.getloadavg()[0], 2))
        for where, found in (
            ("replay", run_replay(policy, requests)),
            ("mesh", run_mesh(policy, requests, args.speedup)),
        ):
            sys.stdout.write(f"{policy} {where}: {json.dumps(found)}\n")
            sys.stdout.flush()
            for name, value in found.items():
                figures.setdefault(f"{where}_{name}", {})[policy] = value
    orders = [
        sorted(f, key=f.__getitem__) for f in (figures["mesh_ttft_s"], figures["replay_ttft_s"])
    ]
    figures["is_ordered"] = orders[0] == orders[1]
    print_report("mesh", vars(args), figures)


if __name__ == "__main__":
    main()

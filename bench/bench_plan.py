"""`make bench-plan`: predictions of `meshctl plan` beside a real mesh; the last line is JSON.

Sim workers of a fifth of the default speed (2,400 prompt tokens a second, 30 ms a step) serve three
loads from Azure's conversation trace. The speeds are measured through the HTTP API on an idle mesh
before, by single prompts and equal requests at once; the loads mix both.

- `ttft_p95_error`, `itl_p95_error`: (predicted - measured) / measured, of the load with the
  greatest absolute value;
- `replays` of a load: the lowest and the highest 95th percentile of the single replays, about as
  far apart as two runs of one mesh;
- `flaps`: of the recommended counts on ten days (`make bench-scaling`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.bench_mesh import BLOCK_SIZE, BLOCKS, play
from bench.bench_scaling import DAY, SEEDS, azure
from bench.measure import print_report
from bench.stacks import MODEL, mesh
from common.inspection.gateway import new_http_client
from meshctl.view.latencies import LatencyProbe
from replay.engine import WorkerSettings
from replay.plan.search import Fleet, predict
from replay.plan.speeds import Speeds, fit
from replay.report import percentile
from replay.scaling.day import day_of
from replay.scaling.rules import MeshRule
from replay.scaling.run import run_day
from replay.trace import TraceRequest

SPEEDUP = 0.2
FLAGS = [
    *("--block-size", str(BLOCK_SIZE), "--total-kv-blocks", str(BLOCKS)),
    *("--speedup", str(SPEEDUP), "--step-limit-s", "60"),
]


@dataclass(frozen=True, slots=True)
class Load:
    """rate: requests a second. start: of the requests in the trace."""

    name: str
    fleet: Fleet
    rate: float
    start: int

    def requests(self, seconds: float) -> list[TraceRequest]:
        """Returns the requests of so many seconds, from second 0."""
        count = round(self.rate * seconds)
        taken = azure()[self.start : self.start + count]
        first_s, span_s = taken[0].at_s, taken[-1].at_s - taken[0].at_s
        return [
            TraceRequest(
                (one.at_s - first_s) * seconds / span_s, one.input_tokens, one.output_tokens
            )
            for one in taken
        ]


LOADS = (
    Load("third", Fleet(aggregated=2), 1.2, 0),
    Load("two_thirds", Fleet(aggregated=2), 2.6, 4000),
    Load("pair", Fleet(prefill=1, decode=1), 1.2, 8000),
)


async def measure(port: int) -> Speeds:
    async with new_http_client(None) as http:
        found = await LatencyProbe(http, f"http://127.0.0.1:{port}", MODEL).measure()
    return fit(found.prompts, found.decodes, found.pauses)


def measured(load: Load, port: int, seconds: float) -> dict[str, float]:
    answers = asyncio.run(play(port, load.requests(seconds), 1.0))
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise SystemExit(f"{load.name}: {len(failed)} requests failed: {failed[0]}")
    ttfts = sorted(one.ttft_s for one in answers if one.ttft_s is not None)
    itls = sorted(one.itl_s for one in answers if one.itl_s is not None)
    return {
        "ttft_p50_s": percentile(ttfts, 0.5),
        "ttft_p95_s": percentile(ttfts, 0.95),
        "itl_p50_s": percentile(itls, 0.5),
        "itl_p95_s": percentile(itls, 0.95),
    }


def run_load(load: Load, speeds: Speeds | None, seconds: float) -> tuple[Speeds, dict[str, Any]]:
    """Returns the speeds, measured if they are None, and the figures of a load."""
    shape = "pd" if load.fleet.prefill else "agg"
    with mesh(FLAGS, [], shape) as (port, _):
        speeds = asyncio.run(measure(port)) if speeds is None else speeds
        found = measured(load, port, seconds)
    worker = WorkerSettings(BLOCKS, BLOCK_SIZE)
    predicted, _ = predict(load.fleet, load.requests(seconds), speeds, worker)
    figures: dict[str, Any] = {"load_1m": round(os.getloadavg()[0], 2)}
    for name, value in found.items():
        expected = getattr(predicted, name)
        figures[name] = {
            "measured": round(value, 4),
            "predicted": round(expected, 4),
            "error": round((expected - value) / value, 3),
        }
    for name in ("ttft_p95", "itl_p95"):
        spread = getattr(predicted, f"{name}_range_s")
        figures[f"{name}_s"]["replays"] = [round(value, 4) for value in spread]
    return speeds, figures


def worst(found: Sequence[dict[str, Any]], name: str) -> float:
    errors: list[float] = [figures[name]["error"] for figures in found]
    return max(errors, key=abs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="of each load")
    args = parser.parse_args()
    speeds: Speeds | None = None
    loads: dict[str, dict[str, Any]] = {}
    for load in LOADS:
        speeds, loads[load.name] = run_load(load, speeds, args.seconds)
        sys.stdout.write(f"{load.name}: {loads[load.name]}\n")
        sys.stdout.flush()
    days = [run_day(day_of(azure(), seed), DAY, MeshRule(DAY.scaling)) for seed in SEEDS]
    figures: dict[str, Any] = {
        "ttft_p95_error": worst(list(loads.values()), "ttft_p95_s"),
        "itl_p95_error": worst(list(loads.values()), "itl_p95_s"),
        "flaps": sum(day.flaps for day in days),
        "speeds": speeds.to_json() if speeds else "",
        "loads": loads,
    }
    print_report("plan", vars(args), figures)


if __name__ == "__main__":
    main()

"""`make bench-plan`: predictions of `meshctl plan` beside a real mesh; the last line is JSON.

Sim workers of a fifth of the default speed (2,400 prompt tokens a second, 30 ms a step) serve three
loads from Azure's conversation trace. The speeds are measured through the HTTP API on an idle mesh
before, by single prompts and equal requests at once; the loads mix both.

- `ttft_p95_error`, `itl_p95_error`: (predicted - measured) / measured, of the load with the
  greatest absolute value;
- `replays` of a load: the lowest and the highest 95th percentile of the single replays, about as
  far apart as two runs of one mesh;
- `flaps`: of the recommended counts on ten days of two traces (`make bench-scaling`);
- `sglang` (`--sglang PYTHON`, of an environment with SGLang): `meshctl plan --check-s` on a mesh
  with one SGLang worker, a tiny model on the CPU. The engine has the last core to itself, as it has
  a GPU elsewhere; mesh and clients share the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.bench_mesh import BLOCK_SIZE, BLOCKS, play
from bench.bench_scaling import AZURE, HOURS, SEEDS, requests_of
from bench.measure import ROOT, print_report, with_descendants
from bench.stacks import MODEL, mesh
from bench.trees import environment
from common.inspection.gateway import new_http_client
from meshctl.commands.plan import capacity_of, new_probe
from meshctl.options import MeshConfig
from meshctl.view.members import read_members
from replay.plan.search import Fleet, predict
from replay.plan.speeds import Capacity, Speeds, fit
from replay.plan.traffic import to_lines
from replay.report import percentile
from replay.scaling.rules import MeshRule
from replay.trace import TraceRequest

SPEEDUP = 0.2
# Of a request; SGLang's tiny model has a context of 4,096.
SGLANG_TOKENS = 4000
# The title of the process in which SGLang computes.
ENGINE = b"sglang::scheduler"
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
        taken = requests_of(AZURE)[self.start : self.start + count]
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


async def measure(port: int, registry: Path) -> Speeds:
    members = await read_members(MeshConfig(registry="file", registry_path=registry))
    capacity = capacity_of(members, MODEL)
    async with new_http_client(None) as http:
        found = await new_probe(http, f"http://127.0.0.1:{port}", MODEL, capacity).measure()
    return fit(found.prompts, found.decodes, found.pauses, Capacity(**capacity))


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
    with (
        tempfile.TemporaryDirectory(prefix="kvmesh-plan-") as folder,
        mesh(FLAGS, [], shape, registry=(registry := Path(folder, "registry"))) as (port, _),
    ):
        speeds = asyncio.run(measure(port, registry)) if speeds is None else speeds
        found = measured(load, port, seconds)
    worker = speeds.capacity.settings(None, BLOCK_SIZE)
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


def sglang_point(python: str, seconds: float) -> dict[str, Any]:
    """Returns the check of a plan on a mesh with one SGLang worker, and the speeds behind it."""
    fitting = [
        one
        for one in requests_of(AZURE)[:2000]
        if one.input_tokens + one.output_tokens <= SGLANG_TOKENS
    ]
    with tempfile.TemporaryDirectory(prefix="kvmesh-plan-") as name:
        folder = Path(name)
        (folder / "trace.jsonl").write_text(to_lines(fitting))
        with sglang_mesh(python, folder):
            load = os.getloadavg()[0]
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "meshctl", "plan", str(folder / "trace.jsonl")),
                    *("--model", "tiny", "--check-s", f"{seconds:g}", "--json"),
                    *("--speeds", str(folder / "speeds.json"), "--aggregated"),
                    # The plan itself does not matter here.
                    *("--ttft-s", "1000", "--requests", "10"),
                ],
                env={**environment(ROOT), "KVMESH_REGISTRY_PATH": f"{folder}/registry"},
                stdout=subprocess.PIPE,
                check=True,
            )
        speeds = json.loads((folder / "speeds.json").read_text())
    return {
        "load_1m_before": round(load, 2),
        "load_1m": round(os.getloadavg()[0], 2),
        **json.loads(done.stdout)["check"],
        "speeds": speeds,
    }


@contextmanager
def sglang_mesh(python: str, folder: Path) -> Iterator[None]:
    """Runs a mesh whose registry is in the folder. python: of the environment of SGLang."""
    command = [
        *(python, "-m", "meshctl", "up", "--engine", "sglang", "--workers", "1"),
        *("--model-name", "tiny", "--http-port", "0", "--ready-s", "300"),
        *("--log-dir", f"{folder}/logs", "--registry-path", f"{folder}/registry"),
    ]
    variables = {**environment(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=variables)
    assert process.stdout is not None
    own = os.sched_getaffinity(0)
    try:
        # Ends: meshctl stops a mesh that is not ready in time.
        while b"is served" not in (line := process.stdout.readline()):
            if not line:
                raise SystemExit("the mesh with SGLang did not start")
        give_a_core(process.pid)
        yield
    finally:
        os.sched_setaffinity(0, own)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def give_a_core(mesh: int) -> None:
    """Leaves the last core to the engine's scheduler: all threads of the other processes of the
    mesh and of this one go to the other cores. mesh: its process. Nothing on a single core."""
    *others, last = sorted(os.sched_getaffinity(0))
    if not others:
        return
    os.sched_setaffinity(0, others)
    for pid in with_descendants(mesh):
        is_engine = Path(f"/proc/{pid}/cmdline").read_bytes().startswith(ENGINE)
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), [last] if is_engine else others)


def worst(found: Sequence[dict[str, Any]], name: str) -> float:
    errors: list[float] = [figures[name]["error"] for figures in found]
    return max(errors, key=abs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="of each load")
    parser.add_argument("--sglang", metavar="PYTHON", help="of an environment with SGLang")
    parser.add_argument("--only-sglang", action="store_true", help="no sim workers")
    args = parser.parse_args()
    figures: dict[str, Any]
    if args.only_sglang:
        figures = {"sglang": sglang_point(args.sglang or sys.executable, args.seconds)}
        print_report("plan", vars(args), figures)
        return
    speeds: Speeds | None = None
    loads: dict[str, dict[str, Any]] = {}
    for load in LOADS:
        speeds, loads[load.name] = run_load(load, speeds, args.seconds)
        sys.stdout.write(f"{load.name}: {loads[load.name]}\n")
        sys.stdout.flush()
    days = [hour.run(MeshRule(hour.settings.scaling), seed) for hour in HOURS for seed in SEEDS]
    figures = {
        "ttft_p95_error": worst(list(loads.values()), "ttft_p95_s"),
        "itl_p95_error": worst(list(loads.values()), "itl_p95_s"),
        "flaps": sum(day.flaps for day in days),
        "speeds": speeds.to_json() if speeds else "",
        "loads": loads,
    }
    if args.sglang:
        figures["sglang"] = sglang_point(args.sglang, args.seconds)
    print_report("plan", vars(args), figures)


if __name__ == "__main__":
    main()

"""`make bench-scaling`: the recommended worker counts on ten days; the last line is JSON.

Each day has the arrivals and lengths of Azure's conversation trace, with a daily curve, a night and
ten bursts (`replay/scaling/day.py`). Workers compute 750 prompt tokens a second and need a minute
to start. Keys, each the worst of the days:

- `flaps`: changes of the count that were undone within 15 minutes, of all days together;
- `kept`: share of the minutes whose 95th percentile of TTFT is below 8 s;
- `share_of_peak`: worker hours against those of the greatest count all day;
- `planner_*`: the same for the rule of NVIDIA Dynamo's planner (`replay/scaling/rules.py`).

`--plot FILE` draws the day of the first seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from common.scaling.pool import ScalingSettings
from replay.engine import WorkerSettings
from replay.report import import_matplotlib
from replay.scaling.day import day_of
from replay.scaling.rules import MeshRule, PlannerRule, Rule
from replay.scaling.run import DayResult, DaySettings, run_day
from replay.trace import TraceRequest, load_trace
from worker_svc.engines.sim.timing import Timing

TRACE = Path(__file__).parent / "traces" / "azure2023_conversation.csv.gz"
SEEDS = tuple(range(1, 11))
TARGET_S = 8.0
# A large model on a small accelerator: a sixteenth of the speed of the sim engine.
TIMING = Timing(speedup=1 / 16)
DAY = DaySettings(
    WorkerSettings(timing=TIMING),
    ScalingSettings(ttft_target_s=TARGET_S, itl_target_s=2.0, ceiling=32),
)
_COLUMNS = ("rule", "seed", "flaps", "changes", "kept", "peak", "share_of_peak", "worker_hours")


@cache
def azure() -> Sequence[TraceRequest]:
    return load_trace(TRACE)


def make_rules() -> dict[str, Rule]:
    return {
        "kvmesh": MeshRule(DAY.scaling),
        "planner": PlannerRule(TIMING, DAY.scaling),
    }


def figures(results: Sequence[DayResult]) -> dict[str, float]:
    return {
        "flaps": sum(result.flaps for result in results),
        "kept": round(min(result.kept(TARGET_S) for result in results), 4),
        "share_of_peak": round(max(result.share_of_peak for result in results), 3),
        "worker_hours": round(max(result.worker_s for result in results) / 3600, 1),
    }


def row(rule: str, seed: int, result: DayResult) -> str:
    cells = (
        rule,
        str(seed),
        str(result.flaps),
        str(len(result.changes) - 1),
        f"{result.kept(TARGET_S):.4f}",
        str(result.peak),
        f"{result.share_of_peak:.3f}",
        f"{result.worker_s / 3600:.1f}",
    )
    return "".join(cell.rjust(14) for cell in cells) + "\n"


def plot(results: Mapping[str, DayResult], path: Path) -> None:
    """Draws counts and TTFT of one day."""
    pyplot = import_matplotlib()
    figure, (counts, ttfts) = pyplot.subplots(2, 1, figsize=(12, 7), sharex=True)
    for name, result in results.items():
        hours = [minute / 60 for minute in range(len(result.minutes))]
        counts.step(hours, [m.replicas for m in result.minutes], where="post", label=name)
        points = [(h, m.ttft_s) for h, m in zip(hours, result.minutes, strict=True) if m.ttft_s]
        ttfts.plot(*zip(*points, strict=True), ".", markersize=2, label=name)
    first = next(iter(results.values()))
    rates = [minute.requests / 60 for minute in first.minutes]
    load = counts.twinx()
    hours = [minute / 60 for minute in range(len(rates))]
    load.fill_between(hours, rates, alpha=0.15, color="grey")
    load.set_ylabel("requests a second (grey)")
    ttfts.axhline(TARGET_S, color="black", linewidth=0.8)
    ttfts.set(yscale="log", xlabel="hour", ylabel="TTFT p95 of a minute, s")
    counts.set(ylabel="workers", xlim=(0, 24))
    counts.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--days", type=int, default=len(SEEDS), help="the first seeds")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="needs matplotlib")
    args = parser.parse_args(argv)
    results: dict[str, list[DayResult]] = {name: [] for name in make_rules()}
    sys.stdout.write("".join(name.rjust(14) for name in _COLUMNS) + "\n")
    for seed in SEEDS[: args.days]:
        for name, rule in make_rules().items():
            result = run_day(day_of(azure(), seed), DAY, rule)
            results[name].append(result)
            sys.stdout.write(row(name, seed, result))
            sys.stdout.flush()
    if args.plot is not None:
        plot({name: days[0] for name, days in results.items()}, args.plot)
    found = figures(results["kvmesh"])
    found |= {f"planner_{key}": value for key, value in figures(results["planner"]).items()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

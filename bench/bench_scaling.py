"""`make bench-scaling`: the recommended worker counts on ten days; the last line is JSON.

Each day has the arrivals and lengths of an hour of a trace, with a daily curve, a night and ten
bursts (`replay/scaling/day.py`): of Azure's conversations, and of Mooncake's, whose prompts are ten
times as long. The workers of a trace serve its day with about eight of them, and need a minute to
start. Prompts share nothing. Keys, each the worst of the days, for each trace and rule:

- `flaps`: changes of the count that were undone within 15 minutes, of all days together;
- `kept`: share of the minutes whose 95th percentile of TTFT is below the target;
- `share_of_peak`: worker hours against those of the greatest count all day;
- `fewest_hours`, `most_hours`: worker hours of a day.

The rules are that of the router (`kvmesh`), that of NVIDIA Dynamo's planner
(`replay/scaling/rules.py`), and two counts that never move: the smallest one that keeps the target
(`constant`), and one worker fewer. `flaps`, `kept` and `share_of_peak` beside them are the worst of
`kvmesh` over both traces; `failed` has what `find_failures` finds there. The exit status is 1 if it
finds something, or if it finds nothing for a constant count.

`--plot FOLDER` draws the day of the first seed of each trace. `--traces` names those to run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from common.scaling.pool import ScalingSettings
from replay.engine import WorkerSettings
from replay.report import import_matplotlib
from replay.scaling.day import day_of
from replay.scaling.rules import ConstantRule, MeshRule, PlannerRule, Rule
from replay.scaling.run import DayResult, DaySettings, run_day
from replay.trace import TraceRequest, load_trace
from worker_svc.engines.sim.timing import Timing

FOLDER = Path(__file__).parent / "traces"
SEEDS = tuple(range(1, 11))
KEPT_MIN = 0.95
SHARE_OF_PEAK_MAX = 0.7


@dataclass(frozen=True, slots=True)
class Hour:
    """The trace of an hour, with workers for its day.

    - target_s: of the TTFT: what an idle worker needs for the longest usual prompt.
    - speedup: of the workers, against the sim engine.
    - constant: the smallest count that keeps the target all day.
    """

    name: str
    file: str
    target_s: float
    speedup: float
    constant: int

    @property
    def timing(self) -> Timing:
        return Timing(speedup=self.speedup)

    @property
    def settings(self) -> DaySettings:
        return DaySettings(
            WorkerSettings(timing=self.timing),
            ScalingSettings(ttft_target_s=self.target_s, itl_target_s=2.0, ceiling=32),
        )

    def run(self, rule: Rule, seed: int, workers: int = 2) -> DayResult:
        """Returns the day of a seed. workers: at its beginning."""
        settings = replace(self.settings, workers=workers)
        return run_day(day_of(requests_of(self), seed), settings, rule)


# 750 prompt tokens a second: a large model on a small accelerator.
AZURE = Hour("azure", "azure2023_conversation.csv.gz", 8.0, 1 / 16, 8)
# 4,800 prompt tokens a second.
MOONCAKE = Hour("mooncake", "mooncake_conversation.jsonl.gz", 30.0, 0.4, 5)
HOURS = (AZURE, MOONCAKE)
NAMES = tuple(hour.name for hour in HOURS)
_COLUMNS = (
    *("trace", "rule", "seed", "flaps", "changes", "kept", "peak"),
    *("share_of_peak", "worker_hours"),
)


@cache
def requests_of(hour: Hour) -> Sequence[TraceRequest]:
    return load_trace(FOLDER / hour.file)


def run_rules(hour: Hour, seed: int) -> dict[str, DayResult]:
    """Returns a day under each rule."""
    scaling, fewer = hour.settings.scaling, hour.constant - 1
    return {
        "kvmesh": hour.run(MeshRule(scaling), seed),
        "planner": hour.run(PlannerRule(hour.timing, scaling), seed),
        "constant": hour.run(ConstantRule(hour.constant), seed, hour.constant),
        "one_fewer": hour.run(ConstantRule(fewer), seed, fewer),
    }


def figures(results: Sequence[DayResult], target_s: float) -> dict[str, float]:
    hours = [result.worker_s / 3600 for result in results]
    return {
        "flaps": sum(result.flaps for result in results),
        "kept": round(min(result.kept(target_s) for result in results), 4),
        "share_of_peak": round(max(result.share_of_peak for result in results), 3),
        "fewest_hours": round(min(hours), 1),
        "most_hours": round(max(hours), 1),
    }


def find_failures(found: Mapping[str, float]) -> list[str]:
    """Returns what a rule misses by its figures. A count that never moves has all worker hours of
    its peak."""
    return [
        name
        for name, is_missed in (
            ("flaps", found["flaps"] > 0),
            ("kept", found["kept"] < KEPT_MIN),
            ("share_of_peak", found["share_of_peak"] > SHARE_OF_PEAK_MAX),
        )
        if is_missed
    ]


def row(hour: Hour, rule: str, seed: int, result: DayResult) -> str:
    cells = (
        hour.name,
        rule,
        str(seed),
        str(result.flaps),
        str(len(result.changes) - 1),
        f"{result.kept(hour.target_s):.4f}",
        str(result.peak),
        f"{result.share_of_peak:.3f}",
        f"{result.worker_s / 3600:.1f}",
    )
    return "".join(cell.rjust(14) for cell in cells) + "\n"


def plot(hour: Hour, results: Mapping[str, DayResult], path: Path) -> None:
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
    ttfts.axhline(hour.target_s, color="black", linewidth=0.8)
    ttfts.set(yscale="log", xlabel="hour", ylabel="TTFT p95 of a minute, s")
    counts.set(ylabel="workers", xlim=(0, 24))
    counts.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the days; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--traces", nargs="+", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--days", type=int, default=len(SEEDS), help="the first seeds")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="needs matplotlib")
    args = parser.parse_args(argv)
    sys.stdout.write("".join(name.rjust(14) for name in _COLUMNS) + "\n")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for hour in (hour for hour in HOURS if hour.name in args.traces):
        days: dict[str, list[DayResult]] = {}
        for seed in SEEDS[: args.days]:
            for name, result in run_rules(hour, seed).items():
                days.setdefault(name, []).append(result)
                sys.stdout.write(row(hour, name, seed, result))
                sys.stdout.flush()
        found[hour.name] = {name: figures(days[name], hour.target_s) for name in days}
        if args.plot is not None:
            shown = {name: days[name][0] for name in ("kvmesh", "planner")}
            plot(hour, shown, args.plot / f"scaling-{hour.name}.png")
    return report(found)


def report(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> int:
    """Prints the last line; returns the exit status."""
    own = [rules["kvmesh"] for rules in found.values()]
    worst = {
        "flaps": sum(rule["flaps"] for rule in own),
        "kept": min(rule["kept"] for rule in own),
        "share_of_peak": max(rule["share_of_peak"] for rule in own),
    }
    failed = find_failures(worst)
    failed += [
        f"{name}: a count that never moves passes"
        for name, rules in found.items()
        if not find_failures(rules["constant"])
    ]
    sys.stdout.write(json.dumps({**worst, "failed": failed, "traces": found}) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

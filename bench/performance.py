"""Writes docs/performance.md from a report of `make bench-gateway`.

usage: python -m bench.performance REPORT.json [--full REPORT.json] [--out docs/performance.md]

REPORT.json is a file of --out; --full: one of a run with --full, for the matrix. With matplotlib
(pip install 'kvmesh[plot]') it also draws the ratios, as PNG beside the page.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from bench.measure import ROOT

PAGE, TEMPLATE = ROOT / "docs/performance.md", ROOT / "bench/performance.template.md"
PLOT = "img/performance.png"
PLOT_TICKS = (0.1, 0.15, 0.25, 0.4, 0.6, 0.7, 0.8, 1, 1.2, 1.5, 2, 3, 4, 6, 8)
PLOT_FIGURES = {
    "tokens_per_s": "throughput",
    "gateway_cpu": "CPU per token",
    "ttft_p50": "TTFT p50",
}
# Goal of each named figure, as text; and what it is.
NAMED = {
    "burst_c64_tok_s_ratio": ("≥ 1.5", "throughput, burst, 64 streams"),
    "burst_c256_tok_s_ratio": ("≥ 1.8", "throughput, burst, 256 streams"),
    "burst_c64_cpu_ratio": ("≤ 0.65", "CPU per token, burst, 64 streams"),
    "unary_c64_req_s_ratio": ("≥ 1.4", "requests a second, not streamed, 64 clients"),
    "paced_c32_cpu_ratio": ("≤ 0.75", "CPU per token, paced, 32 streams"),
    "paced_c32_added_ttft_ratio": ("≤ 1.5", "mean TTFT beyond the step that computes the prompt"),
    "paced_c256_gap_p99_ratio": ("≤ 0.2", "99th percentile of the gaps between tokens"),
    "c1_ttft_ratio": ("≤ 1.6", "median TTFT of a single client"),
    "frontend_rss_mb_c256": ("≤ 200", "MB of the frontend with its template process, 256 streams"),
    "processes2_ratio": ("≥ 1.7", "requests a second that 2 frontend processes preprocess, to 1"),
    "processes2_burst_ratio": ("", "tokens a second of 64 streams with 2 frontend processes, to 1"),
    "idle_mesh_cpu_pct": ("≤ 4", "percent of a core, all services of an idle `make run`"),
    "paced_c16_gap_p99_ms": ("", "gap p99 of 16 paced streams, ms"),
    "slow_readers_gap_p99_ratio": ("≤ 1.2", "gap p99 of 64 streams beside 1,024 that are not read"),
    "slow_readers_resume_gap_p99_ratio": ("", "the same while those are read at last"),
    "slow_readers_rss_mb": ("", "MB of the frontend with 1,024 responses that are not read"),
    "long_prompt_gap_p99_added_ms": ("≤ 5", "the same beside prompts of 128k tokens: ms more"),
}
COLUMNS = (
    *("mode", "ISL", "shape", "c", "server", "req/s", "tok/s", "TTFT p50", "TTFT p99"),
    *("gap p50", "gap p99", "CPU gateway", "CPU all", "RSS", "errors"),
)

# Any: JSON of a report.
Report = Mapping[str, Any]


def _table(titles: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _is_reached(goal: str, value: float) -> str:
    if not goal:
        return ""
    limit = float(goal[2:])
    return "yes" if (value >= limit if goal[0] == "≥" else value <= limit) else "no"


def _named(report: Report) -> Iterator[Sequence[str]]:
    for name, (goal, text) in NAMED.items():
        if name in report:
            value = report[name]
            yield f"`{name}`", text, f"{value:g}", goal, _is_reached(goal, value)


def _rows(report: Report) -> Iterator[Sequence[str]]:
    for row in report["rows"]:
        for server, medians in row["medians"].items():
            errors = medians["non200"] + medians["broken"] + medians["no_done"]
            yield (
                *(row["mode"], str(row["isl"]), row["shape"], str(row["concurrency"]), server),
                *(f"{medians['window_rps']:.1f}", f"{medians['tokens_per_s']:.0f}"),
                *(f"{medians[key]:.1f}" for key in ("ttft_ms.p50", "ttft_ms.p99")),
                *(f"{medians[key]:.2f}" for key in ("gap_ms.p50", "gap_ms.p99")),
                *(f"{medians[key]:.1f}" for key in ("gateway_cpu", "mesh_cpu")),
                f"{medians['cpu.frontend.rss_mb']:.0f}",
                f"{errors:.0f}",
            )


def _ratios(report: Report) -> Iterator[Sequence[str]]:
    for row in report["rows"]:
        for rival, figures in row["ratios"].items():
            for name, ratio in figures.items():
                load = f"{row['mode']} {row['shape']} {row['isl']} c={row['concurrency']}"
                yield load, rival, name, f"{ratio['median']}", f"{ratio['min']} to {ratio['max']}"


def _plot(report: Report, path: Path) -> bool:
    """Draws the ratios to Dynamo with their ranges; whether matplotlib is installed."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return False
    rows = [row for row in report["rows"] if "dynamo" in row["ratios"]]
    if not rows:
        return False
    figure, panels = pyplot.subplots(1, len(PLOT_FIGURES), figsize=(14, 4))
    for axes, (name, title) in zip(panels, PLOT_FIGURES.items(), strict=True):
        found = [row for row in rows if name in row["ratios"]["dynamo"]]
        ratios = [row["ratios"]["dynamo"][name] for row in found]
        medians = [ratio["median"] for ratio in ratios]
        ends = [
            [max(0.0, ratio["median"] - ratio["min"]) for ratio in ratios],
            [max(0.0, ratio["max"] - ratio["median"]) for ratio in ratios],
        ]
        labels = [f"{row['mode']} {row['concurrency']}" for row in found]
        # From 1, on a logarithmic axis: twice and half are equally far from it.
        heights = [median - 1 for median in medians]
        axes.bar(labels, heights, bottom=1, yerr=ends, capsize=3, color="#4878a8")
        axes.set_yscale("log", base=2)
        low, high = axes.get_ylim()
        ticks = [tick for tick in PLOT_TICKS if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.axhline(1, color="black", linewidth=1)
        better = "higher" if name == "tokens_per_s" else "lower"
        axes.set_title(f"{title}: KVMesh / Dynamo ({better} is better)", fontsize=9)
        axes.tick_params(axis="x", rotation=60, labelsize=8)
        axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return True


def _load(report: Report) -> str:
    machine = report["machine"]
    return (
        f"{machine['cores']} cores ({machine['cpu']}, {machine['arch']}),"
        f" Python {machine['python']}, load {machine['load_1m_before']:.1f} before"
        f" and {machine['load_1m']:.1f} after the run (its own load included)"
    )


def page(report: Report, source: str, *, full: Report | None, has_plot: bool) -> str:
    """The text of docs/performance.md. source: name of the report's file."""
    values = {
        "source": source,
        "commit": report["commit"],
        "load": _load(report),
        "repeat": report["settings"]["repeat"],
        "seconds": report["settings"]["seconds"],
        "named": _table(("figure", "what", "value", "goal", "reached"), _named(report)),
        "picture": f"![Ratios to Dynamo]({PLOT})\n\n" if has_plot else "",
        "rows": _table(COLUMNS, _rows(report)),
        "ratios": _table(("load", "to", "figure", "median", "range"), _ratios(report)),
        "matrix": "",
    }
    if full is not None:
        heading = f"\n## The matrix\n\nCommit `{full['commit']}`, {_load(full)}.\n\n"
        values["matrix"] = heading + _table(COLUMNS, _rows(full))
    return Template(TEMPLATE.read_text()).substitute(values)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.performance")
    parser.add_argument("report", type=Path)
    parser.add_argument("--full", type=Path)
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args()
    report = json.loads(args.report.read_text())
    full = json.loads(args.full.read_text()) if args.full else None
    has_plot = _plot(report, args.out.parent / PLOT)
    args.out.write_text(page(report, args.report.name, full=full, has_plot=has_plot))


if __name__ == "__main__":
    main()

"""Figures of a benchmark: this tree against another commit, in interleaved runs.

usage: python -m bench.against MODULE --against COMMIT [--pairs 7] [--self] [flags of MODULE]

MODULE is a benchmark that prints one JSON object as its last line, such as bench.bench_router. In
each pair both trees run their own version of it (this tree first, then COMMIT first, and so on).
The commit is compiled if this tree is: `make bench-router` and `make bench-index` compile both.

The last line is one JSON object. For each figure, `ratios` has the median of the ratios of the
pairs (this tree to COMMIT), the lowest and the highest one. --self runs COMMIT a second time in
each pair: the ratios of COMMIT to itself show how much of a difference is noise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.measure import ROOT, flatten, machine_lock, medians, print_report, spread
from bench.trees import commit_tree, environment, is_compiled

# Of a report: not figures.
FACTS = ("bench", "commit", "machine", "settings")
THIS_TREE = "this tree"


def measure(tree: Path, module: str, flags: Sequence[str]) -> dict[str, float]:
    """Returns the figures of one run. Raises RuntimeError if it prints no report."""
    env = environment(tree)
    env.pop("DYNAMO_PYTHON", None)  # its figures do not depend on the tree
    command = [sys.executable, "-m", module, *flags]
    # Some end with status 1 if a target is missed.
    done = subprocess.run(
        command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        report = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        text = f"{module} of {tree} printed no report; it ended with status {done.returncode}"
        raise RuntimeError(text) from None
    return dict(flatten({name: value for name, value in report.items() if name not in FACTS}))


def compare(
    runs: Sequence[Mapping[str, Mapping[str, float]]], name: str, other: str
) -> dict[str, dict[str, float]]:
    """Returns the ratios of each figure that both trees have; figures of 0 have none.

    runs: figures by tree, of each pair.
    """
    ratios: dict[str, list[float]] = {}
    for run in runs:
        for figure, value in run[name].items():
            if value and run[other].get(figure):
                ratios.setdefault(figure, []).append(value / run[other][figure])
    return {figure: spread(values) for figure, values in ratios.items()}


def _print_table(
    figures: Mapping[str, Mapping[str, float]],
    ratios: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> None:
    for figure, value in figures[THIS_TREE].items():
        parts = [f"{figure:32s} {value:12g}"]
        for name, found in ratios.items():
            if (ratio := found.get(figure)) is not None:
                text = f"{ratio['median']:.3f} ({ratio['min']:.3f}-{ratio['max']:.3f})"
                parts.append(f"{name}: {text}")
        print("  ".join(parts), flush=True)


def _parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="bench.against", allow_abbrev=False)
    parser.add_argument("module")
    parser.add_argument("--against", metavar="COMMIT", required=True)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--self", action="store_true", help="also COMMIT against itself")
    return parser.parse_known_args()


def main() -> None:
    args, flags = _parse_args()
    compiled = is_compiled(ROOT)
    commit = args.against[:12]
    again = f"{commit} again"
    with machine_lock(), commit_tree(args.against, compiled=compiled) as other:
        trees = {THIS_TREE: ROOT, commit: other} | ({again: other} if args.self else {})
        runs = []
        for pair in range(args.pairs):
            order = list(trees) if pair % 2 == 0 else list(reversed(trees))
            runs.append({name: measure(trees[name], args.module, flags) for name in order})
            print(f"pair {pair + 1} of {args.pairs}", flush=True)
    figures = {name: medians([run[name] for run in runs]) for name in trees}
    ratios = {name: compare(runs, name, commit) for name in trees if name != commit}
    _print_table(figures, ratios)
    settings = {"module": args.module, "flags": flags, "pairs": args.pairs, "compiled": compiled}
    result = {"against": args.against, "medians": figures, "ratios": ratios}
    print_report("against", settings, result)


if __name__ == "__main__":
    main()

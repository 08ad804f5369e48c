"""Runs seeds in virtual time: `make sim SEEDS=500`, or `python -m tests.sim N [--first S]`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.sim.faults import FaultKind
from tests.sim.seed_runs import run_seeds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs N seeds from S on; 1 when one of them failed. argv: of the process by default."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("count", type=int, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--storm", action="store_true", help="with many more faults")
    parser.add_argument("--trace", action="store_true", help="print what happened, event by event")
    args = parser.parse_args(argv)
    started_at = time.perf_counter()
    event_counts, failed, virtual_s, slowest_s = Counter[str](), 0, 0.0, 0.0
    seeds = range(args.first, args.first + args.count)
    for seed, result in zip(seeds, run_seeds(seeds, storm=args.storm), strict=True):
        if seed > args.first and (seed - args.first) % 100 == 0:
            print(f"{seed - args.first} have run, {failed} failed", flush=True)
        if args.trace:
            print("\n".join(result.trace))
        if result.failure:
            failed += 1
            print(result.failure, flush=True)
        event_counts += Counter(key for key, count in result.counts.items() if count)
        virtual_s += result.virtual_s
        slowest_s = max(slowest_s, result.recovered_s)
    _print_counts(event_counts)
    real_s = time.perf_counter() - started_at
    print(f"recovered at most {slowest_s:.1f} s after the last fault and the last request")
    print(f"{virtual_s:.0f} virtual seconds in {real_s:.1f} s, {args.count / real_s:.1f} seeds/s")
    print(f"{args.count - failed} passed, {failed} failed")
    return 1 if failed else 0


def _print_counts(event_counts: Counter[str]) -> None:
    """Number of seeds in which each fault was injected, and each event happened."""
    kinds = {str(kind): event_counts[kind] for kind in FaultKind}
    others = {key: count for key, count in sorted(event_counts.items()) if key not in kinds}
    for title, counts in (("faults", kinds), ("what happened", others)):
        print(f"{title}, by number of seeds: {', '.join(f'{k} {n}' for k, n in counts.items())}")


if __name__ == "__main__":
    sys.exit(main())

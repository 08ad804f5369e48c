"""Runs seeds: `python -m tests.sim N [--first S] [--vertical] [--storm] [--trace]`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.sim.world import draw_scenario, draw_vertical, run_scenario


def main() -> int:
    """Runs N seeds from S on; 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("count", type=int, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--vertical", action="store_true", help="with pairs and a KV index")
    parser.add_argument("--storm", action="store_true", help="with many more faults")
    parser.add_argument("--trace", action="store_true", help="print what happened, event by event")
    args = parser.parse_args()
    began = time.perf_counter()
    virtual_s, failed = 0.0, 0
    for seed in range(args.first, args.first + args.count):
        draw = draw_vertical if args.vertical else draw_scenario
        scenario = draw(seed, storm=args.storm)
        try:
            report = run_scenario(scenario)
        except Exception:
            failed += 1
            print(f"seed {seed}:\n{traceback.format_exc()}  replay: {scenario.command}")
            continue
        virtual_s += report.virtual_s
        if args.trace:
            print("\n".join(report.trace))
        if report.breaches:
            failed += 1
            print(report)
    real_s = time.perf_counter() - began
    print(f"{virtual_s:.0f} virtual seconds in {real_s:.1f} s, {args.count / real_s:.1f} seeds/s")
    print(f"{args.count - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
